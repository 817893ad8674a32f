"""podman and docker: the container is the supervisor, the launcher only brings it to life."""

from __future__ import annotations

import posixpath
import shlex

from gpusched.errors import UsageError
from gpusched.model.slices import MigSlice
from gpusched.nodes.batch.spool import RUN, SPOOL
from gpusched.nodes.runtimes.base import AttemptRef, LaunchRequest
from gpusched.nodes.runtimes.checks import (
    MAX_ENV_FILE_BYTES,
    NO_IMAGE_HINT,
    check_request,
    check_signal,
    configures_client,
)
from gpusched.nodes.runtimes.mounts import PIN, pin_lines, pinned_path, unpin_lines
from gpusched.nodes.runtimes.sessions import engine_cases
from gpusched.nodes.runtimes.shell import (
    BOUNDED,
    FUNCTIONS,
    KILL_STRAYS,
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

HOSTFILE = "/etc/gpusched-hostfile"
"""Where a gang's hostfile is inside its containers."""
GROUPS = "/etc/group"
JOB_DIR = "/gpusched"
"""Where a job's own folder is inside its containers."""

# A launcher that fails leaves no container behind: a `created` one would look ready to be started.
_LAUNCHER = """\
give_up() {
    code=$?
    for id in $(ours); do engine rm -f "$id" >/dev/null 2>&1; done
    unpin
    fail $code
}
state() { engine inspect --type container --format '{{.State.Status}}' "$name"; }
follow() {
    [ -z "$output$errors" ] || setsid sh "$0" follow </dev/null >/dev/null 2>&1 &
}
copy() { # HOW FILE
    if [ -z "$2" ]; then cat >/dev/null; else put "$1" "$2" cat; fi
}
deliver() { # HOW [-f]: the output to where it is to go
    to=$1
    shift
    if [ -z "$errors" ]; then engine logs "$@" "$name" 2>&1 | copy "$to" "$output"; return; fi
    { engine logs "$@" "$name" 2>&1 >&3 3>&- | copy "$to" "$errors" 3>&-; } 3>&1 | copy "$to" "$output"
}
# conmon writes the file oom, where it is started, when the kernel ends a process for want of memory.
start() {
    (cd "$dir" && engine start "$name") >/dev/null || give_up
    unpin
    follow
}
case $1 in
launch)
    check_output
    pin_mounts
    memlock
    create >/dev/null || give_up
    [ "$hold" = 1 ] || start
    ;;
start)
    # Two starts of one gang must not run a short job twice: the first claims; a claim whose owner died is taken over.
    case $(state) in created | configured | initialized) ;; *) exit 0 ;; esac
    if ! (set -C; date +%s >"$dir/starting") 2>/dev/null; then
        read -r since <"$dir/starting"
        [ $(($(date +%s) - ${since:-0})) -gt 30 ] || exit 0
        date +%s >"$dir/starting"
    fi
    start 2>>"$dir/start.err"
    ;;
follow)
    claim $$ "$dir/output.pid" || exit 0
    deliver '>>' -f || exit 1
    case $(state) in running | paused) ;; *) : >"$dir/output.done" ;; esac
    ;;
finish)
    [ -n "$output$errors" ] || exit 0
    claim 0 "$dir/output.pid" # a follower that has not begun yet would add all of it once more
    tries=0
    while [ ! -e "$dir/output.done" ] && [ $tries -lt 25 ] && group "$dir/output.pid" >/dev/null; do
        tries=$((tries + 1))
        sleep 0.2
    done
    [ ! -e "$dir/output.done" ] || exit 0
    follower=$(group "$dir/output.pid") && kill -KILL "$follower"
    # With append some of it may stand there twice: the file is not cut, the next start may write to it already.
    deliver "$how" || exit 1
    : >"$dir/output.done"
    ;;
esac
"""

_START = """\
[ -e "$dir/launch" ] || { echo "$name is not on this node" >&2; exit 1; }
sh "$dir/launch" start </dev/null || exit
[ ! -e "$dir/failed" ] || { tail -n 5 "$dir/start.err" >&2; exit 1; }
"""

# By label, so that a stranger's container of the same name is left alone.
_OURS = """\
ours() { # [OPTION]: by default their ids
    engine ps -a "${1:--q}" --no-trunc --filter "label=gpusched.name=$name" --filter "label=gpusched.cluster=$cluster" \
        --filter "label=gpusched.node=$node"
}
"""

# An engine may hang, or fail to end what the kernel could: a container's processes are known by the name of their
# cgroup (conmon, beside it, has another) and by their environment.
_REMOVE_BY_FORCE = BOUNDED + KILL_STRAYS + """\
engine() { # within the time of the whole command: one that hangs would keep the next controller out, by the term's lock
    bounded 45 "$binary" "$@" && return
    set -- $?
    case $1 in 124 | 137) echo "$binary did not answer within 45 s" >&2 ;; esac
    return "$1"
}
state() { bounded 10 "$binary" inspect --type container --format '{{.State.Status}}' "$id" 2>/dev/null; }
processes() { # of the container $id; [PROCESS'S FOLDER]
    {
        grep -l -e "/\\(libpod-\\|docker-\\)\\{0,1\\}$id" ${1:-/proc/[0-9]*}/cgroup 2>/dev/null | cut -d / -f 3
        strays "$@"
    } | while read -r pid; do starttime "$pid" >/dev/null && echo "$pid"; done
}
"""

_SIGNAL = """\
found=$(ours) || exit 1
for id in $found; do
    error=$(bounded 10 "$binary" kill --signal "$signal" "$id" 2>&1 >/dev/null) && continue
    case $(state) in running | paused) ;; *) continue ;; esac
    case $signal in KILL | 9) kill_all processes && continue ;; esac
    printf '%s\\n' "${error:-$binary did not answer within 10 s}" >&2
    exit 1
done
exit 0
"""

# kill before rm: podman's `rm -f` waits ten seconds for a container that ignores TERM. Most have ended, and need none.
_REMOVE = """\
launcher=$(group "$dir/launcher.pid") && kill -KILL "$launcher"
found=$(ours '--format={{.ID}} {{.Status}}') || exit 1
for id in $(printf '%s\\n' "$found" | cut -d ' ' -f 1); do
    case $found in *"$id Exited"*) ;; *) bounded 10 "$binary" kill --signal KILL "$id" >/dev/null 2>&1 ;; esac
    for is_last in '' 1; do
        # While another removal of it is under way, podman's prints nothing and exits with 0.
        printed=$(bounded 120 "$binary" rm -f -v "$id" 2>&1) && [ -n "$printed" ] && break
        left=$(ours) || exit 1
        case $left in *"$id"*) ;; *) break ;; esac
        [ -z "$is_last" ] || { printf '%s\\n' "${printed:-$binary did not remove it within 120 s}" >&2; exit 1; }
        kill_all processes
    done
done
follower=$(group "$dir/output.pid") && kill -KILL "$follower"
unpin
rm -rf -- "$dir"
"""

# For `gpusched check`: a container as a job's, of an image that is there. Nothing is pulled.
_TRIAL = """\
if [ -z "$image" ] || ! bounded 10 "$binary" inspect --type image "$image" >/dev/null 2>&1; then
    image=$(bounded 10 "$binary" images -q --no-trunc | head -n 1)
    [ -n "$image" ] || exit NO_IMAGE
fi
memlock
error=$(create 2>&1 >/dev/null) && error=$(bounded 60 "$binary" start "$name" 2>&1 >/dev/null)
code=$?
for id in $(ours); do
    bounded 10 "$binary" kill --signal KILL "$id" >/dev/null 2>&1
    bounded 60 "$binary" rm -f -v "$id" >/dev/null 2>&1
done
[ $code = 0 ] || { printf '%s\\n' "${error:-$binary did not answer within 60 s}" >&2; exit 1; }
"""
NO_IMAGE_EXIT_CODE = 3
"""Of `EngineRuntime.trial`: the node has no image that could be tried."""

_LOG = """\
while :; do
    if ! state=$(engine inspect --type container --format '{{.State.Status}}' "$name" 2>/dev/null); then
        [ -n "$follow" ] || engine ps -q >/dev/null || exit # a failing engine must not look like empty output
        state=
    fi
    case $state in '' | created | configured | initialized) ;; *) break ;; esac
    [ -n "$follow" ] && [ -d "$dir" ] && [ ! -e "$dir/failed" ] || exit 0
    sleep 0.3
done
# What --error sends elsewhere is no part of it.
if [ -e "$dir/apart" ]; then
    logs() { engine logs "$@" 2>/dev/null; }
else
    logs() { engine logs "$@" 2>&1; }
fi
from=1
if [ -n "$tail" ]; then
    size=$(logs "$name" | wc -c)
    [ "$size" -le "$tail" ] || from=$((size - tail + 1))
fi
# GNU tail keeps what it reads from a pipe until a block is full.
if command -v stdbuf >/dev/null; then unbuffered='stdbuf -o0'; else unbuffered=; fi
if [ "$from" = 1 ]; then
    logs $follow "$name"
else
    logs $follow "$name" | $unbuffered tail -c "+$from"
fi
"""


class EngineRuntime:
    """What podman and docker have in common; the differences are the methods at the top."""

    binary: str

    def gpu_arguments(self, gpus: tuple[int, ...], slices: tuple[MigSlice, ...] = ()) -> tuple[str, ...]:
        """Options that give a container these GPUs, or these slices, and no others."""
        raise NotImplementedError

    create_arguments: tuple[str, ...] = ()
    """Options of every `create` that only this engine needs."""

    attaching: tuple[str, str]
    """Of jobs that people work in, see `gpusched.nodes.runtimes.sessions.engine_cases`."""

    daemon_pid: str
    """sh: prints the process whose capabilities decide about limits."""

    def launch(self, request: LaunchRequest) -> RemoteScript:
        """See `Runtime.launch`."""
        check_request(request)
        image = request.image
        if image is None:
            raise UsageError(f"runtime {self.binary} needs an image", NO_IMAGE_HINT)
        binds = _own_binds(request)
        inherited, written = _environment(request)
        files = ["--env-file", "$dir/env"] if written else []
        files += ["--env", f"GPUSCHED_HOSTFILE={HOSTFILE}"] if request.hostfile is not None else []
        files += _repeat("--mount", [_mount(f"$dir/{name}", target, True) for name, target in binds.items()])
        files += ["--mount", _mount("$job_dir", JOB_DIR, False), "--env", f"GPUSCHED_JOB_DIR={JOB_DIR}"]
        own_options = " ".join(f'"{word}"' for word in files)  # the folder's path is known on the node only
        options = quote_all(self._create(request, (*inherited, *request.secrets)))
        program = (f"{SPOOL}/{RUN}",) if request.spool else ()
        command = quote_all((image, *program, *request.command))
        # The values reach the client by its environment: what its arguments are, everybody on the node can see. The
        # words are complete by then: a job's variable may be called as one of ours.
        create = (
            f"create() (\nset -- {self.binary} create $memlock {options} {own_options} {command}\n"
            f'ulimit -S -c 0\n{take_secrets(request.secrets)}{exports(inherited)}exec "$@"\n)\n'  # no dump of them
        )
        launcher = (
            f"{launch_header(request)}hold={int(request.hold)}\n{self._engine(request.ref)}{self._memlock()}"
            f"{PIN}{unpin_lines(request.ref)}{pin_lines(request)}{create}{_LAUNCHER}"
            f"{engine_cases(*self.attaching) if request.session else ''}"
        )
        extra = {"env": "".join(f"{name}={value}\n" for name, value in written.items())} if written else {}
        if request.error is not None:
            extra["apart"] = ""
        if request.run_as is not None:
            extra["group"] = "job:x:{1}:\n".format(*request.run_as)
        return launch_script(request, self.binary, launcher, request.secrets, extra)

    def start(self, ref: AttemptRef) -> RemoteScript:
        """See `Runtime.start`."""
        return script(attempt_folder(ref) + _START)

    def signal(self, ref: AttemptRef, signal: str, note: str | None = None) -> RemoteScript:
        """See `Runtime.signal`; the container's init passes it on."""
        name = check_signal(signal)
        return script(
            f"{attempt_folder(ref)}{FUNCTIONS}{self._engine(ref)}{_REMOVE_BY_FORCE}{write_note(note)}signal={name}\n{_SIGNAL}"
        )

    def remove(self, ref: AttemptRef) -> RemoteScript:
        """See `Runtime.remove`."""
        functions = f"{FUNCTIONS}{self._engine(ref)}{_REMOVE_BY_FORCE}{unpin_lines(ref)}"
        return script(f"{attempt_folder(ref)}{functions}{_REMOVE}")

    def log(self, ref: AttemptRef, follow: bool = False, tail_bytes: int | None = None) -> RemoteScript:
        """See `Runtime.log`."""
        tail = "" if tail_bytes is None else max(0, tail_bytes)
        settings = f"follow={'-f' if follow else ''} tail={tail}\n"
        return stream_script(f"{attempt_folder(ref)}{self._engine(ref)}{settings}{_LOG}", follow)

    def trial(self, request: LaunchRequest) -> RemoteScript:
        """Start, and remove, a container like that of this request which runs ``true`` (or fails to: it has started).

        Of the request's image, or another that is there; `NO_IMAGE_EXIT_CODE` where there is none.
        """
        check_request(request)
        options = quote_all(self._create(request, ()))
        create = f'create() {{ bounded 60 {self.binary} create $memlock {options} --entrypoint true "$image"; }}\n'
        head = f"name={shlex.quote(request.name)} image={shlex.quote(request.image or '')}\n"
        trial = _TRIAL.replace("NO_IMAGE", str(NO_IMAGE_EXIT_CODE))
        return script(f"{head}{self._engine(request.ref)}{self._memlock()}{_REMOVE_BY_FORCE}{create}{trial}")

    def finish_output(self, ref: AttemptRef) -> RemoteScript:
        """See `Runtime.finish_output`."""
        return script(f'{attempt_folder(ref)}[ ! -e "$dir/launch" ] || sh "$dir/launch" finish </dev/null\n')

    def exec_argv(self, ref: AttemptRef, argv: tuple[str, ...], tty: bool) -> tuple[str, ...]:
        """See `Runtime.exec_argv`."""
        return (self.binary, "exec", "-i", *(("-t",) if tty else ()), ref.name, *argv)

    def _engine(self, ref: AttemptRef) -> str:
        labels = f"cluster={shlex.quote(ref.cluster_id)} node={shlex.quote(ref.node)}\n"
        return f'{labels}binary={self.binary}\nengine() {{ {self.binary} "$@"; }}\n{_OURS}'

    def _memlock(self) -> str:
        # RDMA and pinned memory want no limit on locked memory. Raising it needs CAP_SYS_RESOURCE (bit 24), which
        # neither rootless podman nor an engine inside a restricted container has; there it would fail the start.
        return f"""\
memlock() {{
    memlock=
    caps=$(sed -n 's/^CapEff:[[:space:]]*//p' "/proc/$({self.daemon_pid})/status" 2>/dev/null)
    case ${{caps%??????}} in *[13579bdf]) memlock='--ulimit memlock=-1:-1' ;; esac
}}
"""

    def _create(self, request: LaunchRequest, inherited: tuple[str, ...]) -> tuple[str, ...]:
        ref = request.ref
        labels = [f"gpusched.cluster={ref.cluster_id}", f"gpusched.node={ref.node}", f"gpusched.name={ref.name}"]
        mounts = [_mount(pinned_path(request, i), m.target, m.read_only) for i, m in enumerate(request.mounts)]
        user: tuple[str, ...] = ()
        if request.run_as is not None:
            # An image may hold setuid files, and its maker is not to become root by them.
            user = ("--user", "{}:{}".format(*request.run_as), "--security-opt", "no-new-privileges")
            user = (*user, "--cap-drop", "ALL", *_repeat("--cap-add", list(request.capabilities)))
        return (
            *("--name", request.name),
            *_repeat("--label", labels),
            "--init",
            *(("--interactive",) if request.session else ()),
            *(("--tty",) if request.session == "terminal" else ()),
            *self.create_arguments,
            *("--network", request.network),
            *("--cpus", str(request.cores), "--memory", f"{request.memory_mib}m"),
            *_shared_memory(request),
            *self.gpu_arguments(request.gpus, request.slices),
            *user,
            *(("--workdir", request.workdir) if request.workdir is not None else ()),
            *_repeat("--mount", mounts),
            *("--env", f"GPUSCHED_CONTAINER={request.name}"),
            *_repeat("--env", list(inherited)),
        )


class Podman(EngineRuntime):
    """`gpusched.nodes.runtimes.base.Runtime` for podman 3.4 and later."""

    binary = "podman"
    attaching = ("--sig-proxy=false", "")
    daemon_pid = "echo self"
    # journald, the default where systemd runs, drops lines of jobs that write fast.
    create_arguments = ("--pull", "missing", "--log-driver", "k8s-file")

    def gpu_arguments(self, gpus: tuple[int, ...], slices: tuple[MigSlice, ...] = ()) -> tuple[str, ...]:
        """One CDI device per GPU or slice; podman silently ignores --gpus.

        nvidia-ctk calls a slice ``GPU:DEVICE``, and puts its files below /dev/nvidia-caps into the container with it.
        CUDA images ask for all GPUs by a variable that an old NVIDIA hook beside CDI obeys: void turns that off.
        """
        names = [f"{one.gpu}:{one.device}" for one in slices] or list(map(str, gpus))
        devices = (word for name in names for word in ("--device", f"nvidia.com/gpu={name}"))
        return (*devices, "--env", "NVIDIA_VISIBLE_DEVICES=void")


class Docker(EngineRuntime):
    """`gpusched.nodes.runtimes.base.Runtime` for docker 19.03 and later."""

    binary = "docker"
    attaching = ("", ",".join(["ctrl-@"] * 8))  # no keys would be its usual ones
    daemon_pid = "cat /run/docker.pid"
    # `docker logs` cannot read what a daemon-wide driver such as syslog took.
    create_arguments = ("--log-driver", "json-file")

    def gpu_arguments(self, gpus: tuple[int, ...], slices: tuple[MigSlice, ...] = ()) -> tuple[str, ...]:
        """--gpus with the inner quotes that keep docker from splitting at the comma.

        CUDA images ask for all GPUs by a variable that NVIDIA's runtime, where it is the default, obeys: void turns
        that off where no GPU was asked for.
        """
        if not gpus:
            return ("--env", "NVIDIA_VISIBLE_DEVICES=void")
        names = [one.uuid or "" for one in slices] or list(map(str, gpus))
        return ("--gpus", f'"device={",".join(names)}"')


def _shared_memory(request: LaunchRequest) -> tuple[str, ...]:
    # PyTorch's loaders and NCCL want a big /dev/shm. Its own one, bounded by the job's memory (its pages count
    # there anyway), goes away with the container; with --ipc host a killed job's segments would stay. MPS needs that:
    # its server and its clients talk by segments of the node.
    if request.mps_pipe is None:
        return ("--shm-size", f"{request.memory_mib}m")
    return ("--ipc", "host", "--mount", _mount(request.mps_pipe, request.mps_pipe, False))


def _own_binds(request: LaunchRequest) -> dict[str, str]:
    """Return what of the attempt's folder is mounted into the container, by name, and where.

    runc looks the job's gid up among the names of the image's groups: the image's author could give it any group.

    Raises:
        UsageError: The job mounts something there.
    """
    binds = {"hostfile": HOSTFILE} if request.hostfile is not None else {}
    binds |= {"group": GROUPS} if request.run_as is not None else {}
    binds |= {"spool": SPOOL} if request.spool else {}
    for mount in request.mounts:
        if posixpath.normpath("/" + mount.target.lstrip("/")) in (*binds.values(), JOB_DIR):
            raise UsageError(f"--mount: nothing can be mounted at {mount.target}")
    return binds


def _environment(request: LaunchRequest) -> tuple[dict[str, str], dict[str, str]]:
    """Return the job's variables: those the engine's client inherits, and those that would steer it, read from a file.

    Raises:
        UsageError: One fits neither way: the file has one line for each.
    """
    own = {k: v for k, v in request.env.items() if k not in request.secrets and k != "GPUSCHED_CONTAINER"}
    written = {name: value for name, value in own.items() if configures_client(name)}
    for name, value in written.items():
        if "\n" in value or "\r" in value or len(value.encode()) > MAX_ENV_FILE_BYTES:
            raise UsageError(
                f"environment variable {name} cannot be passed: it would steer the container engine, so it must be one "
                f"line of at most {MAX_ENV_FILE_BYTES} bytes",
                "give it another name",
            )
    return {name: value for name, value in own.items() if name not in written}, written


def _repeat(option: str, values: list[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _mount(source: str, target: str, read_only: bool) -> str:
    return f"type=bind,src={source},dst={target}" + (",readonly" if read_only else "")
