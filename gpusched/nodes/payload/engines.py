"""What container engines say of gpusched's containers. Runs on the node: stdlib, Python 3.6+."""
# ruff: noqa: UP031, B904

import os
import select
import time

from gpusched.nodes.payload.child import SIGKILL
from gpusched.nodes.payload.jsontext import loads

MYPY = False  # as mypy knows it; importing typing costs time on every probe
if MYPY:
    from typing import Any


ENGINE_TIMEOUT_S = 8.0
MAX_ERROR_CHARS = 2000
ENDED = ("exited", "stopped", "dead")


def last_lines(text: str) -> str:
    """Return the end of a launcher's messages, without blank lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-8:])[-MAX_ERROR_CHARS:]


class EngineError(Exception):
    """The engine could not be asked; the text says why."""


def run_engine(argv: "list[str]", allow_failure: bool = False) -> str:
    """Output of one engine call.

    Raises:
        EngineError: It is missing, failed, or did not answer in time.
    """
    until = time.monotonic() + ENGINE_TIMEOUT_S
    try:
        pid, pipes = _start(argv)
    except OSError as error:  # no process, no pipe to be had
        raise EngineError("%s: %s" % (argv[0], error.strerror))
    said, reading = {pipe: b"" for pipe in pipes}, list(pipes)
    ended = status = 0
    while not ended:
        left_s = until - time.monotonic()
        ready = select.select(reading, [], [], max(0.0, left_s))[0] if reading else []
        for pipe in ready:
            data = os.read(pipe, 65536)
            said[pipe] += data
            if not data:
                reading.remove(pipe)
                os.close(pipe)
        if not reading:
            ended, status = os.waitpid(pid, os.WNOHANG)
        if left_s <= 0 and not ended:
            # Its children hold the pipes too; and what waits for a dead disk cannot be waited for.
            try:
                os.killpg(pid, SIGKILL)
            except ProcessLookupError:  # on a busy node it may not lead a group yet
                os.kill(pid, SIGKILL)
            raise EngineError("%s did not answer within %g s" % (argv[0], ENGINE_TIMEOUT_S))
        if not reading and not ended:
            time.sleep(0.001)
    out, err, failed = (said[pipe] for pipe in pipes)
    if failed:
        raise EngineError("%s: %s" % (argv[0], os.strerror(int(failed))))
    if status and not allow_failure:
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        raise EngineError("%s: %s" % (argv[0], last_lines(err.decode("utf-8", "replace")) or code))
    return out.decode("utf-8", "replace")


def _start(argv: "list[str]") -> "tuple[int, list[int]]":
    """Start a program in a session of its own, as subprocess does, which costs more to import than Python's own start.

    Returns:
        Its process; where to read its output, its errors, and the number of the error for which it could not start.
    """
    import _signal  # type: ignore[import-not-found]  # signal itself imports enum

    pipes = [os.pipe() for _ in range(3)]
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)  # Python ignores it, and so would what it becomes
            for number, source in enumerate((os.open(os.devnull, os.O_RDONLY), pipes[0][1], pipes[1][1])):
                os.dup2(source, number)
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(pipes[2][1], b"%d" % (error.errno or 0))
        finally:
            os._exit(127)
    for _, write in pipes:
        os.close(write)
    return pid, [read for read, _ in pipes]


def _filters(cluster_id: str, node: str) -> "list[str]":
    return ["--filter", "label=gpusched.cluster=" + cluster_id, "--filter", "label=gpusched.node=" + node]


OOM_FORMAT = "{{.Id}} {{.State.OOMKilled}}"


def _podman(cluster_id: str, node: str) -> "dict[str, dict[str, Any]]":
    text = run_engine(["podman", "ps", "-a", "--format", "json", *_filters(cluster_id, node)])
    containers = parse_podman(text)
    # `ps` does not report the out-of-memory killer; failed containers do not stay for long, so this call is rare.
    failed = [str(c["id"]) for c in containers.values() if c["state"] in ENDED and c["exit_code"]]
    if failed:
        inspect = ["podman", "container", "inspect", "--format", OOM_FORMAT, *failed]
        containers = parse_podman(text, run_engine(inspect, allow_failure=True))
    running = [c for c in containers.values() if c["state"] == "running" and c["pid"]]
    dead = [c for c in running if not _is_container_process(c["pid"], c["id"])]
    if dead:
        _mark_lost(dead, cluster_id, node)
    return containers


LOST = "lost"  # podman says `running` for ever when conmon, which waits for the container's end, was killed


def _mark_lost(dead: "list[dict[str, Any]]", cluster_id: str, node: str) -> None:
    """Set the state of those that ended unseen: no process waits for their end, and podman still shows them as running.

    In this order: a conmon that is gone has written the end down before, and podman is asked after that.
    """
    unseen = [container for container in dead if not _has_conmon(container["id"])]
    if unseen:
        again = parse_podman(run_engine(["podman", "ps", "-a", "--format", "json", *_filters(cluster_id, node)]))
        running = {c["id"] for c in again.values() if c["state"] == "running"}
        for container in unseen:
            if container["id"] in running:
                container["state"] = LOST


def _is_container_process(pid: int, container: str) -> bool:
    """Return whether the process is there, and the container's first one (a number may have been given anew)."""
    stat = (read_text("/proc/%d/stat" % pid) or "").rsplit(")", 1)[-1].split()
    if not stat or stat[0] in ("Z", "X"):
        return False
    cgroup, environment = (read_text("/proc/%d/%s" % (pid, name)) or "" for name in ("cgroup", "environ"))
    return container in cgroup or "GPUSCHED_CONTAINER=" in environment


def _has_conmon(container: str) -> bool:
    pids = [name for name in os.listdir("/proc") if name.isdigit()]
    conmons = [pid for pid in pids if read_text("/proc/%s/comm" % pid) == "conmon\n"]
    return any(container in (read_text("/proc/%s/cmdline" % pid) or "").split("\0") for pid in conmons)


def read_text(path: str) -> "str | None":
    """Return a file's content if it has at most 1 MiB, else None."""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return None


def _docker(cluster_id: str, node: str) -> "dict[str, dict[str, Any]]":
    found = {}  # type: dict[str, dict[str, Any]]
    for is_last in (False, True):
        ids = run_engine(["docker", "ps", "-a", "-q", "--no-trunc", *_filters(cluster_id, node)]).split()
        # One that is removed meanwhile makes the call fail. A container that is not reported counts as lost.
        inspect = ["docker", "container", "inspect", *ids]
        found = parse_docker(run_engine(inspect, allow_failure=not is_last)) if ids else {}
        if len(found) == len(ids):
            break
    return found


ENGINES = {"podman": _podman, "docker": _docker}


def parse_podman(text: str, killed: str = "", lost: str = "") -> "dict[str, dict[str, Any]]":
    """Parse ``podman ps -a --format json`` (2.0 and later), lines of `OOM_FORMAT`, and ids that are `LOST`.

    Returns:
        {name: container}.
    """
    found = {}  # type: dict[str, dict[str, Any]]
    oom = {line.split()[0] for line in killed.splitlines() if line.endswith(" true")}
    for item in _json_list(text, "podman"):
        names = item.get("Names") or []
        name = (item.get("Labels") or {}).get("gpusched.name") or (names[0] if isinstance(names, list) else names)
        found[name] = {
            "id": item.get("Id"),
            "state": LOST if item.get("Id") in lost.split() else str(item.get("State")).lower(),
            "exit_code": item.get("ExitCode"),
            "pid": item.get("Pid") or None,
            "started_at": _epoch(item.get("StartedAt")),
            "finished_at": _epoch(item.get("ExitedAt")),
            "oom_killed": item.get("Id") in oom,
            "error": "",
        }
    return found


def parse_docker(text: str) -> "dict[str, dict[str, Any]]":
    """Parse ``docker container inspect`` into {name: container}."""
    found = {}  # type: dict[str, dict[str, Any]]
    for item in _json_list(text, "docker"):
        state = item.get("State") or {}
        labels = (item.get("Config") or {}).get("Labels") or {}
        found[labels.get("gpusched.name") or item.get("Name", "").lstrip("/")] = {
            "id": item.get("Id"),
            "state": str(state.get("Status")).lower(),
            "exit_code": state.get("ExitCode"),
            "pid": state.get("Pid") or None,
            "started_at": _epoch(state.get("StartedAt")),
            "finished_at": _epoch(state.get("FinishedAt")),
            "oom_killed": bool(state.get("OOMKilled")),
            "error": state.get("Error") or "",
        }
    return found


def _json_list(text: str, engine: str) -> "list[Any]":
    try:
        items = loads(text or "[]")
    except ValueError:
        raise EngineError("%s answered something that is not JSON: %.100r" % (engine, text))
    return items if isinstance(items, list) else []


def _epoch(value: "Any") -> "float | None":
    """Unix seconds of podman's number or docker's text; both write the year 1 for never."""
    if isinstance(value, str):
        import calendar  # docker's only; loading it takes a tenth of a probe

        try:
            whole = calendar.timegm(time.strptime(value[:19], "%Y-%m-%dT%H:%M:%S"))
        except ValueError:
            return None
        digits = value[20:].rstrip("Z").split("+")[0] if value[19:20] == "." else ""
        value = whole + (float("0." + digits) if digits.isdigit() else 0.0)
    return float(value) if value is not None and value > 0 else None


def version(runtime: str) -> "str | None":
    """Return what the runtime calls its version; None if it does not say."""
    commands = {
        "podman": ["podman", "--version"],
        "apptainer": ["apptainer", "--version"],
        "docker": ["docker", "version", "--format", "docker version {{.Server.Version}}"],
    }
    try:
        return run_engine(commands[runtime]).strip() or None if runtime in commands else None
    except EngineError:
        return None
