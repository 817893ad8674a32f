"""Runs one of the site's checks on a node, at most once for each run id, and reads its result.

The check runs detached, in a folder of its own: it continues if the connection or the controller dies, and a second
request for the same run waits for its result instead of starting it again.
"""

from __future__ import annotations

import math
import re
import shlex

import msgspec

from gpusched.errors import GpuschedError
from gpusched.model.healthchecks import CheckResult, CheckRun
from gpusched.nodes.runtimes.shell import FUNCTIONS, KILL_STRAYS, exports, script
from gpusched.nodes.transport import Transport, TransportError

KILL_S = 5
"""Within that time a check that hangs is killed: TERM, after two seconds KILL."""
_ANSWER_S = 60.0  # beyond the check's own time: more than the script itself waits, for a node under load
_MAX_OUTPUT_BYTES = 65536
_MAX_LINE = 300
_EXIT_CODE = re.compile(r"[0-9]{1,3}")
_VALUE = re.compile(r"value=([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?:[ \t]+(\S{1,20}))?")

# By the clock, not by counted pauses: on a node under load these take longer.
_UPTIME = """\
uptime() { read -r up rest </proc/uptime; echo "${up%.*}"; }
"""

# The command's whole process group is ended, and what left the group and still has the run's name in its environment.
_SUPERVISOR = """\
trap '' HUP PIPE
dir=${0%/*}
name=$1 limit=$2
lives() { starttime "$child" >/dev/null; }
wait_for_end() { # TENTHS
    n=0
    while lives && [ $n -lt "$1" ]; do sleep 0.1; n=$((n + 1)); done
}
stamp $$ "$dir/pid"
mkfifo "$dir/pipe" || exit 1
tail -c MAX_BYTES <"$dir/pipe" >"$dir/output" &
reader=$!
end=$(($(uptime) + limit + 1)) # whole seconds, rounded down
GPUSCHED_CHECK_RUN=$name setsid sh "$dir/command" </dev/null >"$dir/pipe" 2>&1 &
child=$!
while lives && [ "$(uptime)" -lt $end ]; do sleep 0.1; done
if lives; then
    code=hung
    kill -TERM "-$child" 2>/dev/null
    wait_for_end 20
    kill -KILL "-$child" 2>/dev/null
else
    wait "$child"
    code=$?
fi
kill_strays
wait_for_end 20
lives && code=stuck
child=$reader
wait_for_end 10
echo "$code" >"$dir/code.tmp" && mv "$dir/code.tmp" "$dir/code"
"""

_RUN = """\
umask 077
base="${XDG_STATE_HOME:-$HOME/.local/state}/gpusched-checks/"PATH
name=NAME
dir=$base/$name
ADOPT_OR_START
supervised() { read -r pid since <"$dir/pid" && [ "$(starttime "$pid")" = "$since" ]; } 2>/dev/null
pause=0.1 begun=$(uptime)
until [ -e "$dir/code" ]; do
    waited=$(($(uptime) - begun))
    # The supervisor needs a moment to write who it is.
    if [ $waited -gt 5 ] && ! supervised; then
        [ -e "$dir/code" ] || { echo lost; exit; }
    fi
    [ $waited -lt PATIENCE ] || { echo stuck; cat "$dir/output" 2>/dev/null; exit; }
    [ $waited -lt 5 ] || pause=0.5
    sleep $pause
done
cat "$dir/code" "$dir/output"
"""
_ADOPT = '[ -d "$dir" ] || { echo lost; exit; }'
_START = """\
command -v setsid >/dev/null || { echo 'setsid (util-linux) is missing on this node' >&2; exit 1; }
mkdir -p -- "$base" || exit 1
if mkdir -- "$dir" 2>/dev/null; then
    for old in "$base"/CHECK.*; do [ "$old" = "$dir" ] || rm -rf -- "$old"; done
    printf '%s' SUPERVISOR >"$dir/run" && printf '%s' COMMAND >"$dir/command" || { rm -rf -- "$dir"; exit 1; }
    setsid sh "$dir/run" "$name" LIMIT </dev/null >/dev/null 2>&1 &
fi
[ -d "$dir" ] || exit 1"""


def run_check(transport: Transport, cluster_id: str, run: CheckRun) -> CheckResult:
    """Start the run unless it was started before, and wait for its end.

    Raises:
        TransportError: The node could not be asked; the run goes on where it was started.
        GpuschedError: The node cannot start it.
    """
    request = msgspec.structs.replace(script(check_script(cluster_id, run)), max_bytes=16 * _MAX_OUTPUT_BYTES)
    answer = transport.run(request, run.check.timeout_s + _ANSWER_S)
    if answer.exit_code:
        raise GpuschedError(f"{run.node}: it cannot be started: {answer.complaint}")
    if (result := parse_answer(answer.stdout.decode(errors="replace"))) is None:
        raise TransportError("protocol", f"{run.node}: the answer has no result of the check {run.check.name}")
    return result


def check_script(cluster_id: str, run: CheckRun) -> str:
    """Return the text that starts or adopts a run and prints its result: how it ended, then its output."""
    kill = KILL_STRAYS.replace("GPUSCHED_CONTAINER", "GPUSCHED_CHECK_RUN")
    supervisor = FUNCTIONS + _UPTIME + kill + _SUPERVISOR.replace("MAX_BYTES", str(_MAX_OUTPUT_BYTES))
    start = (
        _START.replace("LIMIT", str(run.check.timeout_s))
        .replace("SUPERVISOR", shlex.quote(supervisor), 1)
        .replace("COMMAND", shlex.quote(exports(run.env) + run.check.command + "\n"), 1)
        .replace("CHECK", shlex.quote(run.check.name), 1)  # last: it may be called as one of the others
    )
    patience_s = run.check.timeout_s + 4 * KILL_S
    text = _RUN.replace("PATH", shlex.quote(f"{cluster_id}/{run.node}"), 1).replace("NAME", shlex.quote(run.id), 1)
    text = text.replace("PATIENCE", str(patience_s)).replace("ADOPT_OR_START", _ADOPT if run.adopt else start, 1)
    return FUNCTIONS + _UPTIME + text


def parse_answer(text: str) -> CheckResult | None:
    """Return the result in the script's output; None if there is none."""
    code, _, output = text.partition("\n")
    line, before, value, unit = "", "", None, ""
    for candidate in output.splitlines():
        words = " ".join("".join(c if c.isprintable() else " " for c in candidate).split())
        if (found := _VALUE.fullmatch(words)) and math.isfinite(float(found[1])):  # JSON, the store's, has no infinity
            before, value, unit = line, float(found[1]), found[2] or ""
        elif any(map(str.isalnum, words)):
            line = words[:_MAX_LINE]
    if code == "lost":
        return CheckResult(lost=True)
    if code in ("hung", "stuck"):
        what = "cannot be killed" if code == "stuck" else "killed"
        return CheckResult(line=f"{what} after its time; last output: {line}" if line else f"{what} after its time")
    if not _EXIT_CODE.fullmatch(code):
        return None
    if int(code) == 0 and before:
        line = before  # what comes later is of the end: torchrun logs that the other nodes have left
    return CheckResult(exit_code=int(code), line=line, value=value, unit=unit)
