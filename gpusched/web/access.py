"""Who looks, and what that person may see.

What ``status``, ``nodes`` and ``power`` show, all may see. What a job runs and what it prints, only its user and admins
may: those whom a login proxy names in a header. The header counts only from that proxy. A proxy on this machine is
known by the account that the kernel says the connection belongs to, since any user of a login node can connect to
loopback; one elsewhere by its address.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from gpusched.config.users import user_name
from gpusched.errors import UsageError
from gpusched.model.resources import Inventory

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\$?")
_ESTABLISHED = "01"


class AccessRules(msgspec.Struct, frozen=True, kw_only=True):
    """How viewers are told apart.

    Attributes:
        header: Names the user, where it comes from the proxy; "": nobody is named.
        proxy_address: Of a proxy on another machine. proxy_uid: Of one on this machine, its account.
        names: Host names, besides this machine's own, that requests may be for.
    """

    header: str = ""
    proxy_address: str = ""
    proxy_uid: int | None = None
    names: tuple[str, ...] = ()


def rules_of(header: str | None, proxy: str | None, names: Iterable[str]) -> AccessRules:
    """The rules as they are asked for on the command line.

    Raises:
        UsageError: One of header and proxy without the other, no such account, or a loopback address.
    """
    names = tuple(name.lower() for name in names)
    if header is None and proxy is None:
        return AccessRules(names=names)
    if header is None or proxy is None:
        raise UsageError(
            "--user-header and --proxy must be used together", "without a trusted proxy anyone could send the header"
        )
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", header):
        raise UsageError(f"--user-header: {header[:70]!r} is not a header name", "for example X-Remote-User")
    try:
        address = ipaddress.ip_address(proxy)
    except ValueError:
        return AccessRules(header=header, proxy_uid=_uid_of(proxy), names=names)
    if address.is_loopback:
        raise UsageError(
            f"--proxy {proxy}: every user of this machine connects from there",
            "name the account that the proxy runs as, such as www-data",
        )
    return AccessRules(header=header, proxy_address=str(address), names=names)


def _uid_of(account: str) -> int:
    import pwd

    try:
        return pwd.getpwnam(account).pw_uid
    except KeyError:
        raise UsageError(
            f"--proxy {account[:60]!r} is neither an address nor an account of this machine", "such as www-data"
        ) from None


class Viewer(msgspec.Struct, frozen=True):
    """Who looks: ``user`` is None where nobody is named; ``proxied``: the request came through the proxy."""

    user: str | None = None
    proxied: bool = False


def viewer_of(rules: AccessRules, peer: tuple[str, int], here: tuple[str, int], headers: Mapping[str, str]) -> Viewer:
    """Who sent a request over the connection from ``peer`` to ``here`` (address and port)."""
    if not rules.header or not _is_proxy(rules, peer, here):
        return Viewer()
    found = headers.get(rules.header, "").strip()
    return Viewer(found if _USER.fullmatch(found) else None, proxied=True)


def _is_proxy(rules: AccessRules, peer: tuple[str, int], here: tuple[str, int]) -> bool:
    address = _plain(peer[0])
    if rules.proxy_address:
        return str(address) == rules.proxy_address
    return address.is_loopback and rules.proxy_uid is not None and uid_of_peer(peer, here) == rules.proxy_uid


def may_see(viewer: Viewer, owner: str, inventory: Inventory, state: Path) -> bool:
    """Whether the viewer may see what only a job's user and admins may (`controller.outputs.may_see`)."""
    if viewer.user is None:
        return False
    return viewer.user == owner or viewer.user in (*inventory.settings.admins, "root", user_name(_owner(state)))


def _owner(state: Path) -> int:
    try:
        return state.stat().st_uid
    except OSError:
        return os.getuid()


def right_host(rules: AccessRules, bound: str, host: str) -> bool:
    """Whether a Host header names this machine: else a page of another site has led its reader's browser here.

    An address names no site, so it is right; of names only this machine's own and those that were given.
    """
    name = re.sub(r":\d+$", "", host.strip().lower()).strip("[]")
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        own = socket.gethostname().lower()
        return name in {"localhost", own, own.partition(".")[0], bound.lower(), *rules.names}


def uid_of_peer(peer: tuple[str, int], here: tuple[str, int]) -> int | None:
    """The account whose process holds the other end of a connection on this machine; None: it cannot be told."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, remote, state, _, _, _, uid, *_ = line.split()
            if state == _ESTABLISHED and _end(local) == _key(peer) and _end(remote) == _key(here):
                return int(uid)
    return None


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _end(text: str) -> tuple[Address, int]:
    """``0100007F:1F90``: words of 32 bits in this machine's byte order."""
    words, _, port = text.partition(":")
    packed = b"".join(bytes.fromhex(words[i : i + 8])[::_ORDER] for i in range(0, len(words), 8))
    return _unmapped(ipaddress.ip_address(packed)), int(port, 16)


_ORDER = -1 if int.from_bytes(b"\1\0", "little") == memoryview(b"\1\0").cast("H")[0] else 1


def _key(end: tuple[str, int]) -> tuple[Address, int]:
    return _plain(end[0]), end[1]


def _plain(text: str) -> Address:
    return _unmapped(ipaddress.ip_address(text.partition("%")[0]))


def _unmapped(address: Address) -> Address:
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped if mapped is not None else address
