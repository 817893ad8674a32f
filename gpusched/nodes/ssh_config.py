"""Where an SSH connection goes: ~/.ssh/config, overruled by the inventory."""

from __future__ import annotations

import getpass
import glob
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from gpusched.model.resources import Node, Settings
from gpusched.nodes.hostkeys import file_version, host_label
from gpusched.nodes.transport import TransportError

if TYPE_CHECKING:
    from paramiko import SSHConfig

_USER_CONFIG, _SYSTEM_CONFIG = "~/.ssh/config", "/etc/ssh/ssh_config"
_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2", "/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
_MAX_INCLUDES = 16  # as in OpenSSH


class SshHop(msgspec.Struct, frozen=True, kw_only=True):
    """One hop of a connection, resolved.

    Attributes:
        label: The name its host key is filed under.
        keys: Private key files named by the inventory or the config; empty means the default ones.
        jumps: Hosts to go through, the nearest to us first, as written in ProxyJump.
        connect_timeout_s: Seconds for TCP and SSH handshake each.
    """

    host: str
    port: int
    user: str
    label: str
    known_hosts: tuple[str, ...]
    keys: tuple[str, ...] = ()
    identities_only: bool = False
    use_agent: bool = True
    proxy_command: str | None = None
    jumps: tuple[str, ...] = ()
    connect_timeout_s: float = 10.0

    @property
    def where(self) -> str:
        """``host`` or ``host:port`` for messages."""
        return self.host if self.port == 22 else f"{self.host}:{self.port}"


def resolve_node(node: Node, settings: Settings) -> SshHop:
    """Return the target of a node; its own user, port and key win over the config.

    Raises:
        TransportError: The SSH config cannot be read.
    """
    return _resolve(node.address, settings, user=node.user, port=node.port, key=node.key)


def resolve_jump(jump: str, settings: Settings) -> SshHop:
    """Return the target of one hop of ProxyJump: ``[user@]host[:port]`` or ``ssh://...``.

    Raises:
        TransportError: Malformed, or the SSH config cannot be read.
    """
    try:
        parts = urlsplit(jump if jump.startswith("ssh://") else f"ssh://{jump}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise TransportError("ssh", f"ProxyJump names no host: {jump!r}", "write it as [user@]host[:port]")
    return _resolve(host, settings, user=parts.username, port=port, key=None)


def _resolve(alias: str, settings: Settings, user: str | None, port: int | None, key: str | None) -> SshHop:
    options = _lookup(alias, settings)
    host = options.get("hostname") or alias
    number = port or _number(options.get("port"), 22)
    identities = [i for i in options.get("identityfile", ()) if i.lower() != "none"]
    jump = options.get("proxyjump") or "none"
    timeout = settings.connect_timeout_s
    if "connecttimeout" in options:
        timeout = min(timeout, _number(options["connecttimeout"], 10) or timeout)
    label = options.get("hostkeyalias")
    return SshHop(
        host=host,
        port=number,
        user=user or options.get("user") or getpass.getuser(),
        label=label.lower() if label else host_label(host, number),
        known_hosts=_known_hosts(options, settings),
        keys=tuple(os.path.expanduser(k) for k in ([key] if key else identities)),
        identities_only=options.get("identitiesonly", "no").lower() == "yes",
        use_agent=options.get("identityagent", "").lower() != "none",
        proxy_command=options.get("proxycommand") or None,
        jumps=() if jump.lower() == "none" else tuple(j.strip() for j in jump.split(",") if j.strip()),
        connect_timeout_s=timeout,
    )


def _known_hosts(options: dict[str, str], settings: Settings) -> tuple[str, ...]:
    if settings.known_hosts:
        return (os.path.expanduser(settings.known_hosts),)
    user = options.get("userknownhostsfile", " ".join(_KNOWN_HOSTS[:2])).split()
    system = options.get("globalknownhostsfile", " ".join(_KNOWN_HOSTS[2:])).split()
    return tuple(os.path.expanduser(p.strip('"')) for p in [*user, *system] if p.lower() != "none")


def _number(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isdigit() else default


def _lookup(alias: str, settings: Settings) -> dict[str, str]:
    paths = [settings.ssh_config] if settings.ssh_config else [_USER_CONFIG, _SYSTEM_CONFIG]
    files = tuple(os.path.expanduser(p) for p in paths)
    if settings.ssh_config and not os.access(files[0], os.R_OK):
        raise TransportError("ssh", f"the SSH config {files[0]} cannot be read", "fix ssh_config in the settings")
    try:
        config = _load(files, tuple(file_version(f) for f in files))
        return dict(config.lookup(alias))
    except Exception as error:  # paramiko's parser lets through whatever its regexes and int() raise
        raise TransportError("ssh", f"{' or '.join(files)}: {error}", "check it with `ssh -G " + alias + "`") from None


@lru_cache(maxsize=4)
def _load(files: tuple[str, ...], versions: tuple[tuple[int, ...] | None, ...]) -> SSHConfig:
    """Return the files read as one (an option's first value wins); ``versions`` makes an edited file be read again.

    Files reached by Include are not watched: a long-lived controller sees changes of theirs when the main file changes.
    """
    from gpusched.nodes.load_paramiko import enable_match_exec, paramiko

    lines = [line for file in files for line in ["Host *", *_lines(file, 0)]]
    if any("exec" in line.lower() for line in lines):
        enable_match_exec()
    return paramiko.SSHConfig.from_text("\n".join(lines))


def _lines(path: str, depth: int) -> Iterator[str]:
    """Return lines of a config with its Includes in place, which paramiko does not know."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return
    block = "Host *"
    for line in text.splitlines():
        words = line.replace("=", " ", 1).split()
        keyword = words[0].lower() if words else ""
        if keyword in ("host", "match"):
            block = line
        if keyword != "include":
            yield line
            continue
        for pattern in words[1:] if depth < _MAX_INCLUDES else ():
            pattern = os.path.expanduser(pattern.strip('"'))
            if not os.path.isabs(pattern):
                pattern = os.path.join(os.path.expanduser("~/.ssh"), pattern)
            for name in sorted(glob.glob(pattern)):
                yield from _lines(name, depth + 1)
                yield block  # what follows belongs to the block in which Include stood
