"""Interactive jobs: whether a user is attached, joining them, how they ended, where their ports are. Builders only.

Such a job is launched like the rank of a gang: created first, and started by the first user who joins it, so that none
of its output is lost. Its terminal is the engine's (else payload/session.py's), not the connection's, and outlives it.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from gpusched.nodes.payload.session import MARK as MARK
from gpusched.nodes.runtimes.base import AttemptRef
from gpusched.nodes.runtimes.shell import attempt_folder, script
from gpusched.nodes.transport import RemoteScript

# By the clock since boot, which cannot be set.
_NOTE_ATTACHED = """\
[ -d "$dir" ] || exit 0
read -r up _ </proc/uptime && (umask 077; echo "$up" >"$dir/attached.tmp") && mv "$dir/attached.tmp" "$dir/attached"
"""

# The launch may be on its way. Where there is no terminal, nothing shows that our caller is gone.
_JOIN = """\
tries=0
until [ -e "$dir/launcher.pid" ]; do
    tries=$((tries + 1))
    [ $tries -lt 300 ] || exit 1
    sleep 0.2
done
exec sh "$dir/launch" VERB
"""

# The first client starts it. What cannot be started is tried once more, without us, for the launch to be given up
# with the reason.
ENGINE = """\
case $1 in
attach)
    while :; do
        [ ! -e "$dir/failed" ] || exit 1
        case $(state 2>/dev/null) in
        created | configured | initialized)
            alive "$dir/launcher.pid" || { verb='start --attach --interactive START' && break; }
            ;;
        running | paused) verb='attach --sig-proxy=false' && break ;;
        '') alive "$dir/launcher.pid" || exit 1 ;;
        *) exit 1 ;;
        esac
        sleep 0.2
    done
    [ ! -t 0 ] || stty raw -echo 2>/dev/null
    printf 'MARK'
    trap - HUP PIPE
    (
        while :; do case $(state) in created | configured | initialized) sleep 0.3 ;; *) break ;; esac; done
        unpin
    ) </dev/null >/dev/null 2>&1 &
    (cd "$dir" && engine $verb --detach-keys=KEYS "$name")
    code=$?
    case $(state) in created | configured | initialized) start 2>>"$dir/start.err" ;; esac
    exit $code
    ;;
ended)
    [ ! -e "$dir/failed" ] || { echo failed && exit; }
    set -- $(engine inspect --type container --format '{{.State.Status}} {{.State.ExitCode}}' "$name")
    case $1 in exited | stopped | dead) echo "$2" ;; esac
    ;;
address)
    set -- $(engine inspect --type container \\
        --format '{{.HostConfig.NetworkMode}} {{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}' "$name")
    case $1:$2 in host:*) echo 127.0.0.1 ;; *:?*) echo "$2" ;; *)
        echo "its network ($1) has no address that the node can reach; settings.network: host has" >&2 && exit 1 ;;
    esac
    ;;
esac
"""

SUPERVISED = """\
case $1 in
attach)
    trap - HUP PIPE
    exec python3 -I -S "$dir/session.py" attach "$dir"
    ;;
ended)
    [ ! -e "$dir/failed" ] || { echo failed && exit; }
    tries=0
    until [ -e "$dir/exit" ] || [ $tries -ge 20 ]; do
        tries=$((tries + 1))
        sleep 0.1
    done
    [ ! -e "$dir/exit" ] || cut -d ' ' -f 1 "$dir/exit"
    ;;
address) echo 127.0.0.1 ;;
esac
"""


def engine_cases(start_options: str, detach_keys: str) -> str:
    """Return what the ``launch`` file of a container with a session does besides.

    Args:
        start_options: Of its `start`, which must not pass our signals on.
        detach_keys: Keys that users never type; some engines need such keys.
    """
    mark = MARK.decode().replace("\036", "\\036")
    return ENGINE.replace("START", start_options).replace("MARK", mark).replace("KEYS", detach_keys)


@lru_cache(maxsize=1)
def payload() -> str:
    """Return the text of payload/session.py."""
    return (Path(__file__).parents[1] / "payload" / "session.py").read_text("utf-8")


def attach_argv(ref: AttemptRef) -> tuple[str, ...]:
    """Return the command that joins the job; after `MARK` its stdin, stdout and stderr (or terminal) are the job's.

    It waits for a launch that is on its way. Its exit code says nothing; see `ended`.
    """
    return ("sh", "-c", attempt_folder(ref) + _JOIN.replace("VERB", "attach"))


def ended(ref: AttemptRef) -> RemoteScript:
    """Return the script that prints the job's exit code, ``failed`` if it was not started, nothing while it runs."""
    return script(f'{attempt_folder(ref)}[ ! -e "$dir/launch" ] || sh "$dir/launch" ended </dev/null\n')


def note_attached(ref: AttemptRef) -> RemoteScript:
    """Return the script that notes for the probe that a client is attached at this moment."""
    return script(attempt_folder(ref) + _NOTE_ATTACHED)


def address(ref: AttemptRef) -> RemoteScript:
    """Return the script that prints the address at which the node reaches the job's ports."""
    return script(f'{attempt_folder(ref)}sh "$dir/launch" address </dev/null\n')
