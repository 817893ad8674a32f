"""Jobs that are plain processes of the node: the launcher stays and supervises them.

Two sessions: the launcher, which records how the job ended, and the job: its leader records itself before it becomes
the job's program. Killing the launcher leaves the job running, visible and killable; only its exit code is then lost.
Neither cores nor memory are limited: without a container engine jobs are trusted to keep to what they asked for.
"""

from __future__ import annotations

import shlex

from gpusched.errors import UsageError
from gpusched.nodes.batch.spool import RUN
from gpusched.nodes.runtimes import sessions
from gpusched.nodes.runtimes.base import AttemptRef, LaunchRequest
from gpusched.nodes.runtimes.checks import check_request, check_signal
from gpusched.nodes.runtimes.shell import (
    AS_USER,
    FUNCTIONS,
    KILL_STRAYS,
    OTHERS_JOBS,
    attempt_folder,
    exports,
    launch_header,
    launch_script,
    quote_all,
    script,
    stream_script,
    take_secrets,
    write_note,
)
from gpusched.nodes.transport import RemoteScript

_LAUNCHER = """\
home=$HOME
if [ -n "$uid" ]; then
    home=$(getent passwd "$uid" | cut -d: -f6)
    user=$(getent passwd "$uid" | cut -d: -f1)
    home=${home:-/} user=${user:-$uid}
fi
[ -n "$workdir" ] || workdir=$home
# In a shared installation the attempt's folder lies in a home that only its owner may enter.
if [ -n "$uid" ]; then seen=$apart; else seen=$dir; fi
spool=$seen/spool
if [ -e "$dir/hostfile" ]; then hostfile=$seen/hostfile; else hostfile=; fi
as_job() { # PROGRAM...: become the job's user; the job's variables are for the program to read at descriptor 3
    set -- "GPUSCHED_CONTAINER=$name" SHELLS_OWN "$@"
    set -- "PREFIXGPUSCHED_JOB_DIR=$job_dir" "$@"
    [ -z "$hostfile" ] || set -- "PREFIXGPUSCHED_HOSTFILE=$hostfile" "$@"
    [ -z "$uid" ] || set -- "HOME=$home" "USER=$user" "LOGNAME=$user" "$@"
    set -- env "$@"
    [ -z "$uid" ] || set -- setpriv CONFINEMENT --reuid "$uid" --regid "$gid" "$(user_groups)" -- "$@"
    exec "$@" 3<"$dir/env"
}
show_files() {
    [ -n "$uid" ] || return 0
    for file in spool hostfile; do
        [ -e "$dir/$file" ] || continue
        (umask 066 && mkdir -p -- "${apart%/*}" && umask 077 && mkdir -p -- "$apart") || return
        cp -R -- "$dir/$file" "$apart/" || return
    done
    [ ! -e "$apart" ] || chown -R -- "$uid:$gid" "$apart"
}
now() {  # seconds, with a fraction where this date knows how
    t=$(date +%s.%N)
    case $t in *[!0-9.]*) date +%s ;; *) echo "$t" ;; esac
}
case $1 in
launch)
    as_user sh -c 'cd -- "$1"' sh "$workdir" || fail 1 "cannot enter the workdir $workdir"
    check_output
    show_files || fail $? "cannot write to $apart"
    prepare || fail $?
    # Room for how it ends: a job whose end is not known runs again, and it may have filled the disk itself.
    printf '%64s' '' >"$dir/exit.tmp" || fail 1 "cannot write to $dir"
    if [ -n "$output" ]; then ln -s -- "$output" "$dir/out"; own=$dir/start.err; else own=$dir/out; fi
    if [ -n "$session" ]; then
        command -v python3 >/dev/null 2>&1 || fail 1 'what people work in needs python3 on a node without containers'
        : >"$dir/ready" # for the first who attaches
        set -- env "GPUSCHED_CONTAINER=$name" sh "$0" child
        set -- python3 -I -S "$dir/session.py" hold "$dir" "$session" "$uid" "$@"
    elif [ "$hold" = 1 ]; then
        : >"$dir/ready"
        until [ -e "$dir/go" ]; do
            [ -d "$dir" ] || exit 0
            sleep 0.2
        done
    fi
    # Named before it leaves our group, so that a removal finds it in the one or by the other.
    if [ -n "$session" ]; then "$@" </dev/null >>"$own" &
    else GPUSCHED_CONTAINER=$name setsid sh "$0" child </dev/null >>"$own" 2>&1 & fi
    wait $!
    code=$?
    until kill_strays; do :; done # the GPUs are theirs until then
    printf '%-63s\\n' "$code $(now)" 1<>"$dir/exit.tmp" && mv "$dir/exit.tmp" "$dir/exit"
    [ ! -p "${dir%/*}/ended" ] || echo "$name:" 1<>"${dir%/*}/ended" # ends.sh; nobody need be there to read it
    ;;
child)
    trap - HUP PIPE
    stamp $$ "$dir/pid" || exit 1
    now >"$dir/started"
    job
    ;;
exec)
    trap - HUP PIPE
    shift
    run "$@"
    ;;
esac
"""

# As the job's user, in its environment, in its folder, with its output; then the job's own program, by the shell's PATH
# and exit codes. The variables are read here since what is an argument anywhere can be seen by all users of the node.
_ENTER = (
    'eval "$(cat <&3)"; exec 3<&-; cd -- "$1" || exit 1; '
    '[ -z "$2" ] || exec >>"$2" 2>&1; [ -z "$3" ] || exec 2>>"$3"; shift 3; exec "$@"'
)

# Of bash, which is the sh of many nodes: it cannot set them, only env(1) can, in its arguments.
_SHELL_VARIABLES = frozenset({"UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO"})

_START = """\
[ -d "$dir" ] || { echo "$name is not on this node" >&2; exit 1; }
: >"$dir/go"
"""

_SIGNAL = """\
group=$(group "$dir/pid") && kill "-$signal" "$group" 2>/dev/null
[ "$signal" != KILL ] || kill_strays
exit 0
"""

_REMOVE = """\
for file in launcher.pid pid; do
    group=$(group "$dir/$file") && kill -KILL "$group" 2>/dev/null
done
gone() { kill_strays || { echo 'its processes cannot be killed' >&2; exit 1; }; }
gone
rm -rf -- "$dir" "$apart" || exit
gone # of a launcher that was not stamped yet; without the folder it starts no more
"""

_LOG = """\
over() {
    [ ! -d "$dir" ] || [ -e "$dir/exit" ] || [ -e "$dir/failed" ] && return 0
    ! alive "$dir/launcher.pid" && ! alive "$dir/pid"
}
uid= gid= out=$dir/out
# The file of -o, and the link that may be in its place, are the user's: looked at with his rights, not with ours.
if [ -L "$out" ]; then
    out=$(readlink "$out")
    eval "$(grep -m 1 -x 'uid=[0-9]* gid=[0-9]*' "$dir/launch")"
fi
size() { as_user sh -c '[ ! -f "$1" ] || exec wc -c <"$1"' sh "$out" | grep . || echo 0; }
end=$(size)
from=0
if [ -n "$tail" ] && [ "$end" -gt "$tail" ]; then from=$((end - tail)); fi
while :; do
    last=
    if [ -z "$follow" ] || over; then last=1; fi
    end=$(size)
    # The folder may go meanwhile; what tail says of that is no output of the job.
    [ "$end" -le "$from" ] || as_user tail -c "+$((from + 1))" -- "$out" 2>/dev/null | head -c "$((end - from))" || exit
    [ "$end" -ge "$from" ] && from=$end
    [ -z "$last" ] || exit 0
    sleep 0.3
done
"""


class SupervisedRuntime:
    """What the process and apptainer runtimes have in common."""

    name: str
    containers = False
    """Whether jobs run in containers: they have an image, and folders can be mounted."""

    def program(self, request: LaunchRequest) -> str:
        """Return the sh functions ``prepare`` (before the start), ``job``, and ``run`` (something beside the job).

        Raises:
            UsageError: The request lacks what this runtime needs.
        """
        raise NotImplementedError

    def confinement(self, request: LaunchRequest) -> tuple[str, ...]:
        """Options of setpriv(1) for jobs with ``run_as``."""
        kept = ",".join(("-all", *(f"+{name.lower()}" for name in request.capabilities)))
        return ("--no-new-privs", "--inh-caps", kept, "--ambient-caps", kept, "--bounding-set", kept)

    prefix = ""
    """Begins the names by which the job's variables and secrets reach its program."""

    enters_workdir = True
    """Whether the workdir is a folder of the node; else the program starts in its user's home."""

    def launch(self, request: LaunchRequest) -> RemoteScript:
        """See `Runtime.launch`."""
        check_request(request)
        workdir = request.workdir if self.enters_workdir else None
        settings = f"hold={int(request.hold)}\nsession={request.session}\nworkdir={shlex.quote(workdir or '')}\n"
        launcher = _LAUNCHER.replace("PREFIX", self.prefix)
        launcher = launcher.replace("CONFINEMENT", quote_all(self.confinement(request)))
        # An export would override a secret that came by the environment.
        env = {k: v for k, v in request.env.items() if k not in request.secrets}
        variables = {self.prefix + k: v for k, v in (env | {"GPUSCHED_CONTAINER": request.name}).items()}
        shells = [f"{name}={variables.pop(name)}" for name in sorted(_SHELL_VARIABLES & variables.keys())]
        launcher = launcher.replace("SHELLS_OWN", quote_all(shells))
        secrets = {self.prefix + k: v for k, v in request.secrets.items()}
        files = {"env": exports(variables) + take_secrets(secrets)}
        header = launch_header(request) + _job_files_variable(request.ref)
        text = header + KILL_STRAYS + settings + self.program(request) + launcher
        if request.session:
            text += sessions.SUPERVISED
            files["session.py"] = sessions.payload()
        return launch_script(request, self.name, text, secrets, files)

    def start(self, ref: AttemptRef) -> RemoteScript:
        """See `Runtime.start`."""
        return script(attempt_folder(ref) + _START)

    def signal(self, ref: AttemptRef, signal: str, note: str | None = None) -> RemoteScript:
        """See `Runtime.signal`."""
        number = check_signal(signal)
        name = "KILL" if number == "9" else number
        return script(f"{attempt_folder(ref)}{FUNCTIONS}{KILL_STRAYS}{write_note(note)}signal={name}\n{_SIGNAL}")

    def remove(self, ref: AttemptRef) -> RemoteScript:
        """See `Runtime.remove`."""
        return script(f"{attempt_folder(ref)}{_job_files_variable(ref)}{FUNCTIONS}{KILL_STRAYS}{_REMOVE}")

    def log(self, ref: AttemptRef, follow: bool = False, tail_bytes: int | None = None) -> RemoteScript:
        """See `Runtime.log`."""
        tail = "" if tail_bytes is None else max(0, tail_bytes)
        settings = f"follow={'1' if follow else ''} tail={tail}\n"
        return stream_script(f"{attempt_folder(ref)}{FUNCTIONS}{AS_USER}{settings}{_LOG}", follow)

    def finish_output(self, ref: AttemptRef) -> RemoteScript:
        """See `Runtime.finish_output`; the job writes the file itself, so there is nothing to do."""
        return script(attempt_folder(ref))

    def exec_argv(self, ref: AttemptRef, argv: tuple[str, ...], tty: bool) -> tuple[str, ...]:
        """See `Runtime.exec_argv`."""
        return ("sh", "-c", attempt_folder(ref) + 'exec sh "$dir/launch" exec "$@"', "sh", *argv)


def _job_files_variable(ref: AttemptRef) -> str:
    """sh: where a job with ``run_as`` finds its files."""
    return f"apart={shlex.quote(f'{OTHERS_JOBS}/{ref.cluster_id}/.{ref.node}/{ref.name}')}\n"


def in_job(command: str, files: bool) -> str:
    """sh: become the job in its environment and folder, then exec ``command``, its output in its ``files``."""
    # sh by its full path: the job's own PATH counts already.
    where = '"$output" "$errors"' if files else "'' ''"
    return f'as_job /bin/sh -c {shlex.quote(_ENTER)} sh "$workdir" {where} {command}'


class Process(SupervisedRuntime):
    """`gpusched.nodes.runtimes.base.Runtime` without containers: the image is ignored, mounts are refused."""

    name = "process"
    wrapper: tuple[str, ...] = ()
    """Words before each command of the job, whether its own, its script's or one of ``gpusched exec``."""

    def program(self, request: LaunchRequest) -> str:
        """See `SupervisedRuntime.program`."""
        if not request.command and not request.spool:
            raise UsageError("runtime process needs a command: there is no image whose own could run")
        if request.mounts:
            raise UsageError("runtime process cannot mount folders: its jobs see the node's own")
        wrapper = f"{quote_all(self.wrapper)} " if self.wrapper else ""
        program = f'"$spool"/{RUN} ' if request.spool else ""
        job = in_job(wrapper + program + quote_all(request.command), files=True)
        other = in_job(wrapper + '"$@"', files=False)
        return f"prepare() {{ :; }}\njob() {{ {job}; }}\nrun() {{ {other}; }}\n"
