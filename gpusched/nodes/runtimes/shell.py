"""POSIX sh shared by all runtimes, and the quoting that goes into it.

A launch writes one file into the attempt's folder, ``launch``: what the launcher does, and (by its first argument) what
is done later with the same knowledge: follow the output, start a gang's rank, run the job itself. It holds no secret.
The script that writes it comes over stdin, so nothing of it is ever seen in an argv.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping

from gpusched.nodes.runtimes.base import EXISTS_EXIT_CODE, LAUNCHED, RECORD, AttemptRef, LaunchRequest
from gpusched.nodes.runtimes.checks import check_ref, check_request
from gpusched.nodes.transport import RemoteScript

STATE_ON_NODE = "${XDG_STATE_HOME:-$HOME/.local/state}/gpusched-node"
"""In double quotes of sh: the folder of attempts and their records on a node, of the account that enters it."""

# Signal 0 to a group knows processes that lost their leader; a leader with another start time is a recycled number.
FUNCTIONS = """\
starttime() {
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    set -- ${stat##*) }
    [ "$1" != Z ] && echo "${20}"
}
stamp() { echo "$1 $(starttime "$1")" >"$2.tmp" && mv "$2.tmp" "$2"; }
claim() { # PID FILE: as stamp, for the first who comes; whether that was this one
    echo "$1 $(starttime "$1")" >"$2.$$" && ln "$2.$$" "$2" 2>/dev/null
    set -- $? "$2.$$"
    rm -f "$2"
    return "$1"
}
same_boot() { grep -qx "boot=$(cat /proc/sys/kernel/random/boot_id)" "$dir/meta" 2>/dev/null; }
group() { # FILE: what to kill of the process group whose leader is stamped there, if any of it is alive
    [ -r "$1" ] && same_boot || return 1
    read -r leader since <"$1" || return 1
    [ "${leader:-0}" -gt 1 ] || return 1
    now=$(starttime "$leader") && [ "$now" != "$since" ] && return 1
    kill -0 "-$leader" 2>/dev/null && echo "-$leader" && return
    [ -n "$now" ] && echo "$leader" # a launcher is stamped before it has a group of its own
}
alive() { # FILE: whether the stamped process itself is
    [ -r "$1" ] && same_boot && read -r leader since <"$1" && [ "$(starttime "$leader")" = "$since" ]
}
"""

BOUNDED = """\
if command -v timeout >/dev/null 2>&1; then bounded() { timeout -k 1 "$@"; }; else bounded() { shift; "$@"; }; fi
"""
"""sh: ``bounded SECONDS COMMAND...`` ends the command after so long, where the node has timeout(1)."""

# Environments outlive process groups: all that the job started carries its name. A fork may slip through between
# looking and killing, hence the rounds; what waits for a dead disk survives them all. Looking takes its time, so each
# is looked at again before it is killed: its number may be another's by then.
KILL_STRAYS = """\
strays() { # [PROCESS'S FOLDER]
    grep -l -z -x -F -e "GPUSCHED_CONTAINER=$name" ${1:-/proc/[0-9]*}/environ 2>/dev/null | cut -d / -f 3
}
kill_all() { # LISTING: a function such as strays; whether none is left
    round=0
    while listed=$("$1"); [ -n "$listed" ]; do
        [ $round -lt 20 ] || return 1
        for pid in $listed; do [ -z "$("$1" "/proc/$pid")" ] || kill -KILL "$pid" 2>/dev/null; done
        round=$((round + 1))
        [ $round -lt 3 ] || sleep 0.1
    done
}
kill_strays() { kill_all strays; }
"""

# Files of a job in a shared installation are opened with its user's rights, not with root's. Jobs of an account that is
# not root are rootless podman's: they have the submitter's ids in the account's user namespace.
AS_USER = """\
as_user() {
    if [ -z "$uid" ]; then "$@"; return; fi
    if [ "$(id -u)" = 0 ]; then setpriv --reuid "$uid" --regid "$gid" "$(user_groups)" -- "$@"; return; fi
    podman unshare setpriv --reuid "$uid" --regid "$gid" --clear-groups -- "$@"
}
user_groups() { if getent passwd "$uid" >/dev/null 2>&1; then echo --init-groups; else echo --clear-groups; fi; }
"""

FAIL = """\
fail() { # CODE [MESSAGE]: give up, for the probe to see
    [ $# -lt 2 ] || printf '%s\\n' "$2" >&2
    echo "$1" >"$dir/failed.tmp" && mv "$dir/failed.tmp" "$dir/failed"
    exit 0
}
"""

# Opening a pipe for writing waits for its reader. Opened for reading, too, nothing waits, and what was opened is looked
# at, not the name: that may be another file's by now.
OUTPUT = """\
put() { # HOW FILE COMMAND: run the command with its stdout in the user's file
    as_user sh -c 'exec 3<>"$1" && { [ -f /proc/self/fd/3 ] || [ /proc/self/fd/3 -ef /dev/null ]; } &&
        exec '"$3 $1/proc/self/fd/3" sh "$2"
}
check_output() {
    [ -z "$output" ] || put "$how" "$output" true || fail 1 "cannot write the output file $output"
    [ -z "$errors" ] || put "$how" "$errors" true || fail 1 "cannot write the file of --error $errors"
}
"""

# Known only here: which account ~/.ssh/config names.
_NOT_ROOT = """\
[ "${uid:-$(id -u)}" != 0 ] || {
    echo 'the job would run as root, which needs settings.root_jobs in inventory.yaml' >&2
    exit 1
}
"""

_CLAIM = """\
trap '' HUP PIPE
mask=$(umask)
umask 077
command -v setsid >/dev/null || { echo 'setsid (util-linux) is missing on this node' >&2; exit 1; }
mkdir -p -- "${dir%/*}" || exit 1
if ! error=$(mkdir -- "$dir" 2>&1); then
    [ -d "$dir" ] && echo exists && exit EXISTS
    printf '%s\\n' "$error" >&2
    exit 1
fi
boot=$(cat /proc/sys/kernel/random/boot_id)
abandon() { rm -rf -- "$dir"; echo "cannot write to ${1:-$dir}" >&2; exit 1; }
"""

# A folder of the job's own, which its later attempts find again. What is above it belongs to whom we are here, so that
# nobody can put a link in its place; below it everything is the job's. An image may have a user of its own: where ours
# is the job's, the folder is open to it, and what is above it keeps everybody else out.
_JOB_DIR = """\
jobs=${job_dir%/*}
(umask 066 && mkdir -p -- "$jobs") && [ -O "$jobs" ] || abandon "$jobs"
if mkdir -- "$job_dir" 2>/dev/null; then
    if [ -z "$uid" ]; then chmod OPEN -- "$job_dir"
    elif [ "$(id -u)" = 0 ]; then chown -- "$uid:$gid" "$job_dir"
    else podman unshare chown -- "$uid:$gid" "$job_dir"; fi || abandon "$job_dir"
fi
[ -d "$job_dir" ] && [ ! -L "$job_dir" ] || abandon "$job_dir"
rm -f -- "$job_dir/resize.json" || abandon "$job_dir"
"""

# As the job's user, as is all below. Nobody waits for what the job may have put there, as in OUTPUT.
_WRITE = """\
as_user sh -c 'umask 022
    exec 3<>"$1.part" && [ -f /proc/self/fd/3 ] && cat >/proc/self/fd/3 && mv -- "$1.part" "$1"
' sh "$job_dir/NAME" <<'END'
TEXT
END
"""
_PROGRAM = f"{{ {_WRITE}}} || abandon \"$job_dir\"\n"

# Of an attempt's job, once it has been launched.
_OF_JOB = """\
job_dir=$(sed -n 's/^job_dir=//p' "$dir/meta")
uid= gid=
eval "$(grep -m 1 -x 'uid=[0-9]* gid=[0-9]*' "$dir/launch")"
"""

# Nobody waits for a pipe, and what a link leads to is the user's to read. No output: there is no result.
_RESULT = """\
as_user sh -c '[ ! -f "$1" ] || [ -L "$1" ] || exec cat -- "$1"' sh "$job_dir/NAME"
"""

# The background list's own process becomes the launcher by exec, so that $! is its number.
_SPAWN = """\
(
    umask "$mask"
    unset GPUSCHED_CONTAINER
EXPORTS
    exec setsid sh "$dir/launch" launch </dev/null >>"$dir/start.err" 2>&1
) </dev/null >/dev/null 2>&1 &
stamp $! "$dir/launcher.pid" || { kill -KILL $! 2>/dev/null; abandon; }
"""


OTHERS_JOBS = "/var/lib/gpusched-node"  # the usual place lies in a home that only its owner may enter


def quote_all(words: Iterable[str]) -> str:
    """Words of one command line, each quoted once."""
    return " ".join(shlex.quote(word) for word in words)


def attempt_folder(ref: AttemptRef) -> str:
    """Lines that set ``name`` and ``dir`` for an attempt.

    Raises:
        UsageError: The reference holds what cannot be part of a path.
    """
    check_ref(ref)
    name = shlex.quote(ref.name)
    path = f"{ref.cluster_id}/{ref.node}"
    return f'name={name}\ndir="{STATE_ON_NODE}/"{shlex.quote(path)}"/$name"\n'


def script(text: str) -> RemoteScript:
    """Return a script that comes over stdin."""
    return RemoteScript(("sh", "-s"), text.encode())


def stream_script(text: str, follow: bool) -> RemoteScript:
    """Return a script without secrets that leaves stdin alone, as `Transport.stream` wants it.

    One that follows gets a process group of its own, ended by the TERM that the transport sends when its reader goes
    away: `podman logs -f` would outlive its channel for ever.
    """
    if follow:
        text = (
            f"setsid sh -c {shlex.quote(text)} </dev/null &\ng=$!\n"
            'trap \'kill -TERM "-$g" 2>/dev/null || kill -TERM "$g" 2>/dev/null\' TERM INT HUP\nwait "$g"\n'
        )
    return RemoteScript(("sh", "-c", text))


def heredoc(text: str, file: str) -> str:
    """Lines that write ``text`` into ``$dir/file`` exactly, plus a line break where its last line has none."""
    text = text if text.endswith("\n") else text + "\n"
    end = "END_" + hashlib.sha256(text.encode()).hexdigest()[:24]
    return f"cat >\"$dir/{file}\" <<'{end}' || abandon\n{text}{end}\n"


def _hostfile(request: LaunchRequest) -> str:
    """Lines that write it, for the job's user to read."""
    return "" if request.hostfile is None else heredoc(request.hostfile, "hostfile") + 'chmod a+r "$dir/hostfile"\n'


def _spool(request: LaunchRequest) -> str:
    """Lines that make the folder of a job script: for all to read who reach it, as an image has users of its own."""
    if not request.spool:
        return ""
    folders = quote_all(sorted({f"spool/{name}".rpartition("/")[0] for name in request.spool}))
    return (
        f'(cd -- "$dir" && mkdir -p -- {folders}) || abandon\n'
        + "".join(heredoc(text, f"spool/{name}") for name, text in request.spool.items())
        + '(cd -- "$dir/spool" && chmod -R a+rX . && chmod a+x run script bin/*) || abandon\n'
    )


def exports(variables: Mapping[str, str]) -> str:
    """Lines that put variables into the environment."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def take_secrets(names: Iterable[str]) -> str:
    """Lines that give the secrets, which `launch_script` put into the environment, the names that the job wants.

    Until then they have names of ours: a secret called ``dir`` must not be one to the launcher, which runs as root.
    """
    aliases = {name: f"GPUSCHED_SECRET_{number}" for number, name in enumerate(names)}
    return "".join(
        f'[ -z "${{{alias}+set}}" ] || export {name}="${alias}"; unset {alias}\n' for name, alias in aliases.items()
    )


def launch_script(
    request: LaunchRequest, runtime: str, launcher: str, secrets: dict[str, str], files: Mapping[str, str] = {}
) -> RemoteScript:
    """Claim the attempt's folder, write what the launcher needs and detach it.

    ``launcher`` is the text of the ``launch`` file; ``files`` are more files of that folder (name to text). The secrets
    go into the environment of the launcher and of nothing else, for `take_secrets`.

    Raises:
        UsageError: The request cannot be passed on.
    """
    check_request(request)
    meta = [
        f"runtime={runtime}",
        f"job={request.job_id}",
        f"attempt={request.attempt}",
        f"rank={request.rank}",
        f"gpus={','.join(map(str, request.gpus))}",
        f"hold={int(request.hold)}",
    ]
    print_meta = f"printf '%s\\n' {quote_all(meta)}"
    aliased = {f"GPUSCHED_SECRET_{number}": value for number, value in enumerate(secrets.values())}
    written = 'echo "created=$(date +%s)"; echo "boot=$boot"; echo "job_dir=$job_dir"'
    parts = [
        attempt_folder(request.ref),
        FUNCTIONS,
        "" if request.allow_root else f"{_identity(request)}{_NOT_ROOT}",
        _CLAIM.replace("EXISTS", str(EXISTS_EXIT_CODE)),
        _identity(request),
        _JOB_DIR.replace("OPEN", "700" if request.job_dirs else "777"),
        f'{{ {print_meta}; {written}; }} >"$dir/meta" || abandon\n',
        heredoc(launcher, "launch"),
        heredoc(request.record, RECORD) if request.record else "",
        _hostfile(request),
        _program(request),
        _spool(request),
        *(heredoc(text, name) for name, text in files.items()),
        _SPAWN.replace("EXPORTS\n", exports(aliased), 1),
        f"echo {LAUNCHED}\n",
    ]
    return script("".join(parts))


def launch_header(request: LaunchRequest) -> str:
    """Return the first lines of every ``launch`` file."""
    return (
        f"trap '' HUP PIPE\ndir=${{0%/*}}\nname={shlex.quote(request.name)}\n{_identity(request)}"
        f"output={shlex.quote(request.output or '')}\n"
        f"errors={shlex.quote(request.error or '')}\nhow='{'>>' if request.append else '>'}'\n"
        f"{FUNCTIONS}{FAIL}{AS_USER}{OUTPUT}"
    )


def _identity(request: LaunchRequest) -> str:
    """Lines that set ``uid`` and ``gid`` ("": ours), and ``job_dir``, the job's own folder."""
    uid, gid = request.run_as or ("", "")
    return f"uid={uid} gid={gid}\njob_dir={job_dir(request)}\n"


def job_dir(request: LaunchRequest) -> str:
    """Return a sh word: the job's own folder (on a shared disk, where another user reaches it, or by the attempts)."""
    if request.job_dirs is not None:
        return shlex.quote(f"{request.job_dirs}/{request.cluster_id}/{request.job_id}")
    own = f'"${{dir%/*}}"/jobs/{shlex.quote(request.job_id)}'
    if request.run_as is not None:
        others = shlex.quote(f"{OTHERS_JOBS}/{request.cluster_id}/{request.node}/{request.job_id}")
        return f'"$(if [ "$(id -u)" = 0 ]; then echo {others}; else echo {own}; fi)"'
    return own


def _program(request: LaunchRequest) -> str:
    """Lines that put the program into the job's own folder; none where there is none."""
    if not request.program:
        return ""
    end = "END_" + hashlib.sha256(request.program.encode()).hexdigest()[:24]
    name = f"program.{request.attempt}.{request.rank}.py"
    return AS_USER + _PROGRAM.replace("NAME", name).replace("END", end).replace("TEXT", request.program)


def result(ref: AttemptRef, attempt: int, rank: int) -> RemoteScript:
    """Return a script for `Transport.stream` that prints what a Python function left in its job's folder."""
    read = _RESULT.replace("NAME", f"result.{attempt}.{rank}")
    return stream_script(f"{attempt_folder(ref)}{AS_USER}{_OF_JOB}{read}", False)


def write_answer(ref: AttemptRef, text: str) -> RemoteScript:
    """Put the answer to what a job asked into its own folder."""
    body = text if text.endswith("\n") else text + "\n"
    end = "END_" + hashlib.sha256(body.encode()).hexdigest()[:24]
    written = _PROGRAM.replace("NAME", "answer").replace("END", end).replace("TEXT\n", body)
    return script(f"{attempt_folder(ref)}abandon() {{ exit 1; }}\n{AS_USER}{_OF_JOB}{written}")


def forget_job(ref: AttemptRef, job_id: str) -> RemoteScript:
    """Remove a job's own folder, wherever it is on this node; one on a shared disk is left to its users.

    Args:
        ref: Of any attempt of the job.
        job_id: The job's.
    """
    job, others = shlex.quote(job_id), shlex.quote(f"{OTHERS_JOBS}/{ref.cluster_id}/{ref.node}/{job_id}")
    own = f'"${{dir%/*}}"/jobs/{job}'
    # What a job of rootless podman wrote belongs to a subordinate id.
    return script(f"{attempt_folder(ref)}rm -rf -- {own} {others} 2>/dev/null || podman unshare rm -rf -- {own}\n")


def write_note(text: str | None) -> str:
    """Lines that put one line of JSON into resize.json of an attempt's job; none where there is no text."""
    return "" if text is None else AS_USER + _OF_JOB + _WRITE.replace("NAME", "resize.json").replace("TEXT", text)
