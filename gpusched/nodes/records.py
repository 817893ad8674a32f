"""Records of attempts on the nodes (`gpusched.model.attemptrecords`), from which a lost store is rebuilt.

An attempt's folder has its record from the launch on. A removed attempt's is in ``ended/DAY/NAME`` beside the folders
for some days; DAY counts days since 1970 by the node's clock.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from gpusched.model.attemptrecords import AttemptRecord
from gpusched.model.jobs import container_name
from gpusched.nodes.runtimes.base import RECORD, AttemptRef
from gpusched.nodes.runtimes.shell import STATE_ON_NODE, attempt_folder, script
from gpusched.nodes.transport import RemoteScript, Transport, TransportError

KEEP_DAYS = 7  # so long a backup may be missing
READ_TIMEOUT_S = 120.0

# A node that cannot keep a record (a full disk) must be cleaned up all the same.
_KEEP = """\
(
    umask 077
    ended=${dir%/*}/ended today=$(($(date +%s) / 86400))
    mkdir -p -- "$ended/$today" && cat >"$ended/$today/.$name" <<'END' &&
TEXT
END
        mv -- "$ended/$today/.$name" "$ended/$today/$name"
    for day in "$ended"/*; do
        [ "${day##*/}" -gt $((today - KEEP_DAYS)) ] || rm -rf -- "$day"
    done
) >/dev/null 2>&1
"""

_READ = """\
sed 's/^/term /' "$root/term" 2>/dev/null
for dir in "$root"/gpusched-*; do
    [ -d "$dir" ] || continue
    sed 's/^/live /' "$dir/RECORD" 2>/dev/null || [ ! -d "$dir" ] || printf 'unknown %s\\n' "${dir##*/}"
    echo
done
for day in "$root"/ended/*; do
    [ ! -d "$day" ] || [ "${day##*/}" -lt SINCE ] || find "$day" -name 'gpusched-*' -exec sed 's/^/ended /' {} +
    echo  # a record that was cut off ends without one
done
echo end
"""

_FIND = """\
for root in "$all"/*/"$node"; do
    for file in "$root"/gpusched-* "$root"/ended/*; do
        [ ! -e "$file" ] || { root=${root%/*}; echo "${root##*/}"; break; }
    done
done
echo end
"""
_ALL = f'"{STATE_ON_NODE}"'


class NodeRecords(NamedTuple):
    """All that a node keeps: records of attempts that are there, of removed ones, and names of those without one.

    ``term``: the highest term of a controller that it has seen (`nodes.fencing`); 0: none.
    """

    live: list[AttemptRecord]
    ended: list[AttemptRecord]
    unknown: list[str]
    term: int = 0


def keep_record(ref: AttemptRef, text: str) -> str:
    """Return lines of sh that keep a removed attempt's record, of one line."""
    end = "END_" + hashlib.sha256(text.encode()).hexdigest()[:24]
    lines = _KEEP.replace("KEEP_DAYS", str(KEEP_DAYS)).replace("END\n", f"{end}\n").replace("'END'", f"'{end}'")
    return attempt_folder(ref) + lines.replace("TEXT", text)


def read_records(transport: Transport, cluster_id: str, node: str, since: float = 0.0) -> NodeRecords:
    """Read a node's records, of removed attempts those since then (Unix seconds); damaged ones count as unknown.

    Raises:
        TransportError: The node does not answer, or its answer breaks off.
    """
    root = f"root={_ALL}/{shlex.quote(f'{cluster_id}/{node}')}\n"
    found = NodeRecords([], [], [])
    day = int(since // 86400) - 1  # its clock may be behind
    asked = script(root + _READ.replace("RECORD", RECORD).replace("SINCE", str(day)))
    for line in filter(None, _lines(transport, node, asked)):
        word, _, rest = line.partition(b" ")
        try:
            if word == b"term":
                found = found._replace(term=int(rest) if rest.isdigit() else 0)
            elif word == b"unknown":
                found.unknown.append(rest.decode())
            else:
                record = msgspec.json.decode(rest, type=AttemptRecord)
                (found.live if word == b"live" else found.ended).append(record)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            found.unknown.append(f"an unreadable record ({error})")
    return found


def find_clusters(transport: Transport, node: str) -> list[str]:
    """Return the ids of the installations that have attempts, or records of them, on a node.

    Raises:
        TransportError: The node does not answer.
    """
    return [line.decode() for line in _lines(transport, node, script(f"all={_ALL} node={shlex.quote(node)}\n{_FIND}"))]


def _lines(transport: Transport, node: str, asked: RemoteScript) -> Iterator[bytes]:
    result = transport.run(asked, READ_TIMEOUT_S)
    lines = result.stdout.split(b"\n")
    if result.exit_code != 0 or lines[-2:] != [b"end", b""]:
        raise TransportError("protocol", f"{node}: its records of attempts cannot be read: {result.complaint}")
    return iter(lines[:-2])


def name_of(record: AttemptRecord) -> str:
    """Return the attempt's name on its node."""
    return container_name(record.job.id, record.job.attempt, record.rank)
