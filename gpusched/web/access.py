"""Identify viewers, and decide what they may see.

Everyone may see what ``status``, ``nodes`` and ``power`` show. Only a job's user and admins may see what it runs and
prints; a login proxy names them in a header, which is trusted only from that proxy. A proxy on this machine is
identified by the account that the kernel reports for the connection, since any user of a login node can connect to
loopback; a proxy elsewhere by its address.
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
    """How viewers are identified.

    Attributes:
        header: The proxy's header that names the user; "": no user is named.
        proxy_address: The address of a proxy on another machine. proxy_uid: The account of one on this machine.
        names: Host names of this server besides its own.
    """

    header: str = ""
    proxy_address: str = ""
    proxy_uid: int | None = None
    names: tuple[str, ...] = ()


def rules_of(header: str | None, proxy: str | None, names: Iterable[str]) -> AccessRules:
    """Return the rules given on the command line.

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
    """The viewer of a request: ``user`` is None if unknown; ``proxied``: the request came through the proxy."""

    user: str | None = None
    proxied: bool = False


def viewer_of(rules: AccessRules, peer: tuple[str, int], local: tuple[str, int], headers: Mapping[str, str]) -> Viewer:
    """Return who sent a request over the connection from ``peer`` to ``local`` (address and port)."""
    if not rules.header or not _is_proxy(rules, peer, local):
        return Viewer()
    found = headers.get(rules.header, "").strip()
    return Viewer(found if _USER.fullmatch(found) else None, proxied=True)


def _is_proxy(rules: AccessRules, peer: tuple[str, int], local: tuple[str, int]) -> bool:
    address = _parse_address(peer[0])
    if rules.proxy_address:
        return str(address) == rules.proxy_address
    return address.is_loopback and rules.proxy_uid is not None and uid_of_peer(peer, local) == rules.proxy_uid


def peer_of(rules: AccessRules, peer: tuple[str, int], local: tuple[str, int]) -> int | str | None:
    """Return a connection's owner: an account of this machine, else an address; None: the proxy's, so many users'."""
    if rules.header and _is_proxy(rules, peer, local):
        return None
    account = uid_of_peer(peer, local) if _parse_address(peer[0]).is_loopback else None
    return peer[0] if account is None else account


def may_see(viewer: Viewer, owner: str, inventory: Inventory, state: Path) -> bool:
    """Return whether the viewer may see what only a job's user and admins may (`controller.outputs.may_see`)."""
    if viewer.user is None:
        return False
    return viewer.user == owner or viewer.user in (*inventory.settings.admins, "root", user_name(_owner(state)))


def _owner(state: Path) -> int:
    try:
        return state.stat().st_uid
    except OSError:
        return os.getuid()


def is_own_host(rules: AccessRules, bound: str, host: str) -> bool:
    """Return whether a Host header names this machine: otherwise a page of another site sent its reader's browser here.

    An IP address names no site and is accepted; names are accepted if they are this machine's or were configured.
    """
    name = re.sub(r":\d+$", "", host.strip().lower()).strip("[]")
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        own = socket.gethostname().lower()
        return name in {"localhost", own, own.partition(".")[0], bound.lower(), *rules.names}


def uid_of_peer(peer: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the account of the process at the other end of a local connection; None if unknown."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, remote, state, _, _, _, uid, *_ = line.split()
            ends = _parse_endpoint(local), _parse_endpoint(remote)
            if state == _ESTABLISHED and ends == (_endpoint(peer), _endpoint(server)):
                return int(uid)
    return None


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _parse_endpoint(text: str) -> tuple[Address, int]:
    """Parse ``0100007F:1F90``: 32-bit words in this machine's byte order."""
    words, _, port = text.partition(":")
    packed = b"".join(bytes.fromhex(words[i : i + 8])[::_ORDER] for i in range(0, len(words), 8))
    return _unmapped(ipaddress.ip_address(packed)), int(port, 16)


_ORDER = -1 if int.from_bytes(b"\1\0", "little") == memoryview(b"\1\0").cast("H")[0] else 1


def _endpoint(end: tuple[str, int]) -> tuple[Address, int]:
    return _parse_address(end[0]), end[1]


def _parse_address(text: str) -> Address:
    return _unmapped(ipaddress.ip_address(text.partition("%")[0]))


def _unmapped(address: Address) -> Address:
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped if mapped is not None else address
