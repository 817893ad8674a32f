"""Host keys as OpenSSH keeps them: which keys a host is known by, and what to say when it shows another.

paramiko's own reader knows neither patterns nor ``@revoked`` lines, so the files are read here.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import os
import shlex
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from gpusched.nodes.transport import TransportError

_SIGNATURES = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256", "ssh-rsa")}  # one kind of key, several ways to sign with it


class KnownKey(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a known_hosts file."""

    patterns: str
    type: str
    blob: bytes
    path: str
    line: int
    revoked: bool = False


def fingerprint(blob: bytes) -> str:
    """Return ``SHA256:...`` of a public key, as ``ssh-keygen -l`` shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def host_label(host: str, port: int) -> str:
    """Return the name under which OpenSSH files a host: plain on port 22, else ``[host]:port``."""
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def known_keys(paths: Sequence[str], label: str) -> list[KnownKey]:
    """Keys on file for a host, by its `host_label`; on another port, as in OpenSSH, also those under its plain name."""
    found = [key for path in paths for key in _read(path) if _matches(key.patterns, label)]
    if not found and label.startswith("["):
        return known_keys(paths, label[1:].rpartition("]")[0])
    return found


def preferred_algorithms(known: Sequence[KnownKey], offered: Sequence[str]) -> list[str]:
    """``offered`` with those first that the known keys can answer, so that the server shows a key we can compare."""
    types = [k.type for k in known if not k.revoked]
    wanted = [a for t in types for a in _SIGNATURES.get(t, (t,)) if a in offered]
    return list(dict.fromkeys([*wanted, *offered]))


def verify(node: str, host: str, port: int, label: str, paths: Sequence[str], key_type: str, blob: bytes) -> None:
    """Compare the key a host showed with those on file; a jump host is checked in the same way.

    Raises:
        TransportError: Unknown, changed or revoked. Nothing is ever written to the files.
    """
    known = known_keys(paths, label)
    shown = f"{_short(key_type)} {fingerprint(blob)}"
    if any(k.revoked and k.blob == blob for k in known):
        raise TransportError(
            "host-key-changed",
            f"{node}: REVOKED HOST KEY: {label} showed {shown}, which is marked @revoked",
            "do not use this host before its administrator has replaced the key",
        )
    valid = [k for k in known if not k.revoked]
    if any(k.type == key_type and hmac.compare_digest(k.blob, blob) for k in valid):
        return
    if not valid:
        raise TransportError("host-key-unknown", f"{node}: unknown host key of {label}: it presented {shown}",
                             _accept_hint(host, port, key_type, paths))  # fmt: skip
    old = next((k for k in valid if k.type == key_type), valid[0])
    raise TransportError(
        "host-key-changed",
        f"{node}: THE HOST KEY OF {label} HAS CHANGED: it showed {shown}, but {old.path}:{old.line} has "
        f"{_short(old.type)} {fingerprint(old.blob)}; someone may be intercepting, or the server was reinstalled",
        f"ask the server's administrator; only if the new key is correct: ssh-keygen -R {shlex.quote(label)} "
        f"-f {shlex.quote(old.path)}, then accept the new one",
    )


def _accept_hint(host: str, port: int, key_type: str, paths: Sequence[str]) -> str:
    kind = _short(key_type)
    target = shlex.quote(paths[0]) if paths else "~/.ssh/known_hosts"
    return (
        f"compare with `ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub` run on the server itself; if they are the "
        f"same: ssh-keyscan -t {kind} -p {port} {shlex.quote(host)} >> {target}"
    )


def _short(key_type: str) -> str:
    return "ecdsa" if key_type.startswith("ecdsa") else key_type.removeprefix("ssh-")


def _matches(patterns: str, label: str) -> bool:
    if patterns.startswith("|1|"):
        return _matches_hash(patterns, label)
    # Brackets are part of [host]:port here, not a character class.
    globs = [pattern.replace("[", "[[]") for pattern in patterns.lower().split(",")]
    hits = [glob for glob in globs if fnmatch.fnmatchcase(label, glob.lstrip("!"))]
    return bool(hits) and not any(glob.startswith("!") for glob in hits)


def _matches_hash(text: str, label: str) -> bool:
    try:
        _, _, salt, digest = text.split("|")
        computed = hmac.new(base64.b64decode(salt), label.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(computed, base64.b64decode(digest))
    except (ValueError, binascii.Error):
        return False


def _read(path: str) -> tuple[KnownKey, ...]:
    version = file_version(path)
    return () if version is None else _parse_file(path, version)


def file_version(path: str) -> tuple[int, int, int] | None:
    """Return the key by which a cache notices that a file was edited; None where there is none."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@lru_cache(maxsize=16)
def _parse_file(path: str, version: tuple[int, int, int]) -> tuple[KnownKey, ...]:
    """Return lines of one file; ``version`` makes the cache forget a file that was edited."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [_parse_line(path, number, text) for number, text in enumerate(file, start=1)]
    except OSError:
        return ()
    return tuple(line for line in lines if line is not None)


def _parse_line(path: str, number: int, text: str) -> KnownKey | None:
    fields = text.split()
    revoked = fields[:1] == ["@revoked"]
    fields = fields[revoked:]
    # @cert-authority: paramiko does not ask for host certificates.
    if len(fields) < 3 or fields[0].startswith(("#", "@")):
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (ValueError, binascii.Error):
        return None
    return KnownKey(patterns=fields[0], type=fields[1], blob=blob, path=path, line=number, revoked=revoked)
