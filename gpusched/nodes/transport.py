"""The port through which every remote command goes, and the errors it answers with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, Protocol

import msgspec

from gpusched.errors import GpuschedError
from gpusched.model.relay import Terminal

FailureKind = Literal[
    "timeout", "refused", "unreachable", "auth", "host-key-unknown", "host-key-changed", "ssh", "protocol"
]


class RemoteScript(msgspec.Struct, frozen=True):
    """A command for a node.

    Attributes:
        argv: Arguments, quoted by the transport exactly once; nothing in them is seen by a shell.
        stdin: What the command reads; secrets belong here, since argv is visible to every user of the node.
        max_bytes: Of stdout and stderr together. A node that sends more is not listened to any longer: what it answers
            is held in our memory. Streams have no bound.
    """

    argv: tuple[str, ...]
    stdin: bytes = b""
    max_bytes: int = 256 << 20


class CommandResult(msgspec.Struct, frozen=True):
    """What a command that ended left behind.

    ``exit_code`` follows the shell: 128 + N for a process killed by signal N (sshd reports only that there was a signal
    where it is not one of its own names; then it is 255).
    """

    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def complaint(self) -> str:
        """The last line of stderr, or the exit code where there is none."""
        lines = self.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else f"exit code {self.exit_code}"


class TransportError(GpuschedError):
    """A node could not be asked. The fields become those of `gpusched.model.readings.ProbeFailure`.

    Attributes:
        kind: For programs.
        reason: For people: one line, which node and what happened.
        hint: What to do about it.
    """

    def __init__(self, kind: FailureKind, reason: str, hint: str = "") -> None:
        super().__init__(reason, hint)
        self.kind: FailureKind = kind
        self.reason = reason


class SessionRefused(TransportError):
    """The node's sshd allows no more sessions on this connection (MaxSessions)."""


def output_too_large(node: str, script: RemoteScript) -> TransportError:
    """Return the error of a command that prints more than it may."""
    return TransportError(
        "protocol",
        f"{node}: `{script.argv[0]}` answered more than {script.max_bytes >> 20} MiB",
        "check what the account's shell start-up file and the container engine print there",
    )


class Session(Protocol):
    """A running command with open input: one thread reads, another may write, any may close."""

    def pump(self, take: Callable[[int, bytes], None]) -> int:
        """Give the output to ``take`` (1: stdout, 2: stderr) until the command has ended; returns its exit code.

        ``take`` may be slow: the command waits.

        Raises:
            TransportError: The connection was lost.
        """

    def write(self, data: bytes) -> int:
        """Write what the command takes within a second; return how much (all, where the command reads no more)."""

    def end_input(self) -> None:
        """No more input will come."""

    def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size."""

    def close(self) -> None:
        """Hang up; `pump` returns soon."""


class Transport(Protocol):
    """A way to run commands on one node; safe to use from several threads at once."""

    def run(self, script: RemoteScript, timeout_s: float) -> CommandResult:
        """Run a command to its end; returns or raises within ``timeout_s`` seconds, whatever the node does.

        Raises:
            TransportError: No answer, or not the whole of it. The command may have run.
        """

    def stream(self, script: RemoteScript) -> Iterator[bytes]:
        """Output of a command as it comes, stderr included; closing the iterator ends the command on the node.

        Raises:
            TransportError: While iterating, when the connection is lost.
        """

    def session(self, argv: tuple[str, ...], terminal: Terminal | None = None) -> Session:
        """Start a command that is talked with, in a terminal of its own where one is given.

        Raises:
            TransportError: It cannot be asked for.
        """

    def dial(self, host: str, port: int) -> Session:
        """Open a connection from the node to a TCP port, as a session with neither stderr nor exit code.

        Raises:
            TransportError: The node cannot be reached; kind ``refused``: nothing listens there.
        """

    def close(self) -> None:
        """Drop the connection. A later ``run`` makes a new one."""


# Ends the command when our side goes away: the process that reads stdin gets its end of file and kills the command's
# group. sshd itself never does that without a terminal (`podman logs -f` outlives its channel for ever). When the
# command ends first, the watcher is killed so that the shell, and with it the channel, ends too.
_STREAM_WRAPPER = (
    "exec 3<&0 </dev/null; "
    'if command -v setsid >/dev/null 2>&1; then setsid "$@" 3<&- & else "$@" 3<&- & fi; p=$!; '
    "{ cat <&3; kill -TERM -$p || kill -TERM $p; sleep 2; kill -KILL -$p || kill -KILL $p; } >/dev/null 2>&1 & w=$!; "
    "exec 3<&-; wait $p; r=$?; kill $w 2>/dev/null; exit $r"
)


def stream_argv(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``argv`` wrapped so that it ends with the stdin of the wrapper, which the caller must hold open."""
    return ("sh", "-c", _STREAM_WRAPPER, "sh", *argv)
