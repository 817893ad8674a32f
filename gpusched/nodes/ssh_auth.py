"""Proving who we are to an SSH server: key files, the agent, and a record of what was tried."""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

from gpusched.nodes.load_paramiko import paramiko
from gpusched.nodes.ssh_config import SshHop
from gpusched.nodes.transport import TransportError

_DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")  # OpenSSH's that paramiko can read
_NO_KEYS = "the server takes no public keys"
_AGENT_S = 3.0


class _Agent(paramiko.Agent):
    """The agent, which may be hung: paramiko would wait for its list of keys for ever."""

    def _connect(self, conn: Any) -> None:
        conn.settimeout(_AGENT_S)
        with contextlib.suppress(paramiko.SSHException, OSError):
            cast(Any, super())._connect(conn)
        conn.settimeout(None)  # people may have to confirm a signature


def authenticate(connection: paramiko.Transport, target: SshHop, node: str, deadline: float) -> None:
    """Log in with the first key the server takes, over a connection whose host key is verified.

    The target's ``keys`` come first, then the agent's, then (when it names none) the default files. The deadline is on
    the monotonic clock.

    Raises:
        TransportError: No key was taken (``auth``), or no answer came.
    """
    tried: list[str] = []
    agent = _Agent() if target.use_agent else None
    try:
        for label, key in _candidates(target, agent, tried):
            refusal = _try(connection, target.user, key, deadline)
            if refusal is None:
                return
            tried.append(f"{label} ({refusal})")
            if not connection.is_active():
                tried.append("the server then hung up (MaxAuthTries?)")
                break
        else:
            refusal = _try(connection, target.user, None, deadline)
            if refusal is None:
                return
            if refusal != _NO_KEYS:
                tried.append(f"no key at all ({refusal})")
    except TimeoutError:
        raise TransportError(
            "timeout", f"{node}: {target.where} did not answer while logging in", "check the node's load and sshd"
        ) from None
    finally:
        if agent is not None:
            agent.close()
    raise TransportError(
        "auth",
        f"{node}: {target.user}@{target.where} refuses the login; tried {', '.join(tried)}",
        f"put the public key into {target.user}'s authorized_keys there (ssh-copy-id), or set user and key of the node",
    )


def _try(connection: paramiko.Transport, user: str, key: paramiko.PKey | None, deadline: float) -> str | None:
    """Why the server does not let us in with this key (None: with none); None: it does."""
    connection.auth_timeout = deadline - time.monotonic()
    if connection.auth_timeout <= 0:
        raise TimeoutError
    try:
        more = connection.auth_publickey(user, key) if key is not None else connection.auth_none(user)
    except paramiko.BadAuthenticationType:
        return _NO_KEYS
    except paramiko.AuthenticationException as error:
        if "timeout" in str(error).lower():
            raise TimeoutError from None
        return "refused"
    except (paramiko.SSHException, EOFError, OSError, ValueError) as error:
        return str(error) or "connection lost"
    return f"accepted, but the server also requires {' or '.join(more)}" if more else None


def _candidates(target: SshHop, agent: paramiko.Agent | None, tried: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    named = {_public_blob(path) for path in target.keys}
    for path in target.keys:
        yield from _from_file(path, tried, missing_matters=True)
    keys = list(agent.get_keys()) if agent is not None else []
    keys.sort(key=lambda k: k.asbytes() not in named)
    for key in keys:
        if not target.identities_only or key.asbytes() in named:
            yield f"agent key {getattr(key, 'comment', '') or key.get_name()}", key
    if not keys:
        tried.append(
            "no ssh-agent" if "SSH_AUTH_SOCK" not in os.environ else "an agent that has no keys, or does not answer"
        )
    if not target.keys:
        for path in _DEFAULT_KEYS:
            yield from _from_file(os.path.expanduser(path), tried, missing_matters=False)


def _from_file(path: str, tried: list[str], missing_matters: bool) -> Iterator[tuple[str, paramiko.PKey]]:
    try:
        stat = os.stat(path)
        key = _load(path, (stat.st_mtime_ns, stat.st_size))
    except FileNotFoundError:
        if missing_matters:
            tried.append(f"{path} (no such file)")
    except OSError as error:
        tried.append(f"{path} ({error.strerror})")
    except (paramiko.PasswordRequiredException, TypeError):  # cryptography's word for a missing passphrase
        tried.append(f"{path} (has a passphrase: ssh-add it)")
    except Exception as error:  # malformed keys surface as whatever the parser stumbled over
        tried.append(f"{path} (not a usable key: {str(error).splitlines()[0] if str(error) else type(error).__name__})")
    else:
        yield path, key


@lru_cache(maxsize=64)
def _load(path: str, version: tuple[int, int]) -> paramiko.PKey:
    return paramiko.PKey.from_path(path)


def _public_blob(path: str) -> bytes | None:
    try:
        with open(path + ".pub", encoding="utf-8") as file:
            return base64.b64decode(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
