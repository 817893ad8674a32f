"""Fencing on the nodes: what changes something there carries the controller's term, and lower terms are refused.

The node keeps the highest term it has seen beside the attempts. A script runs under a shared lock on it, and a higher
term is written under an exclusive one: from then on no script of a lower term runs, nor does one begun before still.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpusched.model.relay import Terminal
from gpusched.nodes.runtimes.shell import STATE_ON_NODE
from gpusched.nodes.transport import CommandResult, RemoteScript, Session, Transport, TransportError

LOCK_WAIT_S = 10

_REFUSED_EXIT_CODE = 76
_MARK = b"gpusched-term "

# The command and what it detaches must not inherit the lock, or they would hold it until they end.
_FENCE = f"""\
folder="{STATE_ON_NODE}/$1" term=$2 patience=$3
shift 3
stop() {{ printf '{_MARK.decode()}%s\\n' "$*" >&2; exit {_REFUSED_EXIT_CODE}; }}
seen() {{
    seen=0
    [ ! -e "$folder/term" ] || {{ seen= && read -r seen <"$folder/term"; }}
    case $seen in '' | *[!0-9]*) stop "broken $folder/term is damaged; remove it" ;; esac
    [ "$seen" -le "$term" ] || stop "$seen"
}}
lock() {{
    flock "$1" -w "$patience" 9 && return
    command -v flock >/dev/null || stop 'broken flock (util-linux) is missing on this node'
    stop 'busy a command of the previous controller still runs'
}}
[ -e "$folder/term.lock" ] || (umask 077; mkdir -p -- "$folder" && true >>"$folder/term.lock") 2>/dev/null ||
    stop "broken cannot write to $folder"
# NFS wants it open for reading for a shared lock and for writing for an exclusive one; on a disk that turned read-only,
# what only looks still works.
if true 2>/dev/null <>"$folder/term.lock"; then exec 9<>"$folder/term.lock"; else exec 9<"$folder/term.lock"; fi
lock -s
seen
while [ "$seen" != "$term" ]; do
    lock -x
    seen
    if [ "$seen" != "$term" ]; then
        (umask 077; echo "$term" >"$folder/term.new") && {{ sync "$folder/term.new" 2>/dev/null || sync; }} &&
            mv -- "$folder/term.new" "$folder/term" || stop "broken cannot write to $folder"
        sync "$folder" 2>/dev/null || sync
    fi
    lock -s
    seen
done
"$@" 9>&-
"""


class TermRefused(TransportError):
    """The node obeys a controller with a higher ``term``; nothing was done."""

    def __init__(self, node: str, term: int) -> None:
        super().__init__("protocol", f"{node} obeys another controller, which took over (term {term})")
        self.node, self.term = node, term


class FencingUnavailable(TransportError):
    """The node cannot keep a term: nothing can be changed there, as on a full disk."""


class FencedTransport:
    """A transport whose `run` is refused by the node once it has seen a higher term. The rest is not fenced.

    Args:
        transport: The connection.
        cluster_id: The installation's.
        node: Name of the node.
        term: The controller's.
        patience_s: How long scripts of an earlier term may take to end.
    """

    def __init__(
        self, transport: Transport, cluster_id: str, node: str, term: int, patience_s: int = LOCK_WAIT_S
    ) -> None:
        self._transport, self._node = transport, node
        self._words = ("sh", "-c", _FENCE, "sh", f"{cluster_id}/{node}", str(term), str(patience_s))

    def claim(self, timeout_s: float) -> None:
        """Make the node refuse lower terms, and wait until it runs nothing of them any more.

        Raises:
            TermRefused: It has seen a higher one.
            TransportError: It cannot be done now.
        """
        self.run(RemoteScript(("true",)), timeout_s)

    def run(self, script: RemoteScript, timeout_s: float) -> CommandResult:
        """See `Transport.run`.

        Raises:
            TermRefused: The node has seen a higher term.
            TransportError: Its term cannot be read, or as `Transport.run`.
        """
        fenced = RemoteScript((*self._words, *script.argv), script.stdin, script.max_bytes)
        result = self._transport.run(fenced, timeout_s)
        if result.exit_code == _REFUSED_EXIT_CODE and (mark := result.stderr.rfind(_MARK)) >= 0:
            line = result.stderr[mark + len(_MARK) :].decode(errors="replace").partition("\n")[0]
            term, _, why = line.partition(" ")
            if not why:
                raise TermRefused(self._node, int(term))
            kind = TransportError if term == "busy" else FencingUnavailable
            raise kind("protocol", f"{self._node}: {why}")
        return result

    def stream(self, script: RemoteScript) -> Iterator[bytes]:
        """See `Transport.stream`."""
        return self._transport.stream(script)

    def session(self, argv: tuple[str, ...], terminal: Terminal | None = None) -> Session:
        """See `Transport.session`."""
        return self._transport.session(argv, terminal)

    def dial(self, host: str, port: int) -> Session:
        """See `Transport.dial`."""
        return self._transport.dial(host, port)

    def close(self) -> None:
        """See `Transport.close`."""
        self._transport.close()
