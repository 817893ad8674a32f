"""Attempts of gpusched on this node, from folders and the container engine. Runs on the node: stdlib, Python 3.6+.

Three steps, so that a node without Python can have the first two done by attempts.sh and the third on the controller:
``read_folder`` collects facts, the engine's listing is parsed, ``merge`` draws the conclusions.
"""
# ruff: noqa: UP031

import os
import time

from gpusched.nodes.payload import jobfiles
from gpusched.nodes.payload.child import Child
from gpusched.nodes.payload.engines import ENDED, ENGINES, LOST, EngineError, last_lines, read_text, version

MYPY = False  # as mypy knows it; importing typing costs time on every probe
if MYPY:
    from typing import Any


CLAIM_GRACE_S = 30.0  # between `mkdir` of a folder and the first sign of its launcher
_BOOTTIME = 7  # time.CLOCK_BOOTTIME, which Python 3.6 has no name for
NOT_STARTED = ("created", "configured", "initialized")


def default_root(cluster_id: str, node: str) -> str:
    """Return the folder of one installation's attempts on one node."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "gpusched-node", cluster_id, node)


def list_attempts(
    cluster_id: str, node: str, runtime: str, want_version: bool = False
) -> "tuple[list[dict[str, Any]], str | None, str | None]":
    """List one installation's attempts on one node; with ``want_version`` at the cost of one more call of the engine.

    Returns:
        (attempts, error, version): dicts with the fields of ``ContainerReading`` and ``id`` (its container's);
        why the engine could not be asked, or None (then those without a container only); its version or None.
    """
    folder = default_root(cluster_id, node)
    facts = {}
    # Folders first: what is launched in between is then seen in its earlier state, never as lost.
    for name in jobfiles.names(folder):
        fact = read_folder(os.path.join(folder, name)) if name.startswith("gpusched-") else None
        if fact is not None:
            facts[name] = fact
    containers, error = {}, None  # type: dict[str, dict[str, Any]] | None, str | None
    try:
        if runtime in ENGINES:
            containers = ENGINES[runtime](cluster_id, node)
    except EngineError as failure:
        containers, error = None, str(failure)
    for name, fact in facts.items():
        # Looked for last: they are written just before the engine reports the end.
        if os.path.exists(os.path.join(folder, name, "oom")):
            fact["files"].append("oom")
    metas = {name: fact["meta"] for name, fact in facts.items()}
    first = {name: meta["job_dir"] for name, meta in metas.items() if meta.get("rank") == "0" and "job_dir" in meta}
    for name, files in _job_files(folder, first).items():
        facts[name]["job_files"] = files
    jobfiles.drop_surplus([fact.get("job_files", {}) for fact in facts.values()])
    attempts = merge(facts, containers, cluster_id)
    for attempt in attempts:
        if attempt["phase"] == "running":
            attempt["ran_s"] = _ran_s(attempt["pid"])
    return attempts, error, version(runtime) if want_version and error is None else None


def _job_files(root: str, folders: "dict[str, str]") -> "dict[str, dict[str, tuple[str, float]]]":
    """Read what jobs wrote, by attempt; on a shared disk, which may hang, in a child that is given some seconds."""
    shared = [name for name, folder in folders.items() if not folder.startswith((root + "/", jobfiles.OPEN_ROOT))]
    found = {name: jobfiles.read(folder) for name, folder in folders.items() if name not in shared}
    if shared:
        child = Child({"name": name, "files": jobfiles.read(folders[name])} for name in shared)
        until = time.monotonic() + jobfiles.LIMIT_S
        try:
            for _ in shared:
                message = child.next(until)
                if message is None:
                    break
                found[message["name"]] = message["files"]
        except EOFError:
            pass
        child.kill()
    silent = {"progress": ("!its disk does not answer", 0.0)}
    return dict(dict.fromkeys(shared, silent), **found)


def attribute(pid: "int | None", attempts: "list[dict[str, Any]]") -> "str | None":
    """Return the listed attempt that process ``pid`` belongs to; None for a foreign process."""
    names = {a["name"] for a in attempts}
    ids = {a["id"]: a["name"] for a in attempts if a.get("id")}  # type: dict[str, str]
    pids = {a["pid"]: a["name"] for a in attempts if a.get("pid")}  # type: dict[int, str]
    for _ in range(64):
        if pid is None or pid <= 1:
            return None
        if pid in pids:
            return pids[pid]
        mark = _container_variable(pid)
        if mark in names:
            return mark
        cgroup = read_text("/proc/%d/cgroup" % pid) or ""
        for container, name in ids.items():
            if container in cgroup:
                return name
        pid = _parent(pid)
    return None


# ---- facts of one folder ------------------------------------------------------------------------------------------


def read_folder(path: str) -> "dict[str, Any] | None":
    """Return the contents of one attempt's folder as a dict; None if it has vanished."""
    try:
        modified = os.stat(path).st_mtime
        files = set(os.listdir(path))
    except OSError:
        return None
    meta = dict(line.split("=", 1) for line in (read_text(path + "/meta") or "").splitlines() if "=" in line)
    same_boot = meta.get("boot") == (read_text("/proc/sys/kernel/random/boot_id") or "").strip()
    fact = {
        "meta": meta,
        "same_boot": same_boot,
        "new": time.time() - modified < CLAIM_GRACE_S,
        "launcher": same_boot and _group_alive(read_text(path + "/launcher.pid")),
        "pid": None,
        "pid_alive": False,
        "files": sorted(files),
        "started": read_text(path + "/started"),
        "exit": read_text(path + "/exit"),
        "failed": read_text(path + "/failed"),
        "error": "",
    }  # type: dict[str, Any]
    stamp = (read_text(path + "/pid") or "").split()
    if len(stamp) == 2:
        fact["pid"] = int(stamp[0])
        fact["pid_alive"] = same_boot and start_time(fact["pid"]) == stamp[1]
    fact["attached_s"] = _attached_s(read_text(path + "/attached")) if same_boot else None
    if fact["failed"] is not None:  # it may have been written since the folder was listed
        fact["error"] = last_lines(read_text(path + "/start.err") or "")
    return fact


def _stat(pid: int) -> "list[str] | None":
    # The command's name may hold spaces and brackets; the fields after it do not.
    text = read_text("/proc/%d/stat" % pid)
    return text.rsplit(")", 1)[-1].split() if text else None


def start_time(pid: int) -> "str | None":
    """Return when a process began, by its boot's clock; None: it is gone, or waits to be."""
    stat = _stat(pid)
    return stat[19] if stat and stat[0] != "Z" else None


def _ran_s(pid: "int | None") -> "float | None":
    """Return for how long a process has run, by the boot clock; None: not known."""
    start = start_time(pid) if pid else None
    if start is None:
        return None
    return max(0.0, time.clock_gettime(_BOOTTIME) - float(start) / os.sysconf("SC_CLK_TCK"))


def _attached_s(stamp: "str | None") -> "float | None":
    """Seconds since a client was attached, by the boot clock (see runtimes/sessions.py); None: none has been."""
    noted = _number(stamp)
    return None if noted is None else max(0.0, time.clock_gettime(_BOOTTIME) - noted)


def _parent(pid: int) -> "int | None":
    stat = _stat(pid)
    return int(stat[1]) if stat else None


def _container_variable(pid: int) -> "str | None":
    for variable in (read_text("/proc/%d/environ" % pid) or "").split("\0"):
        if variable.startswith("GPUSCHED_CONTAINER="):
            return variable.split("=", 1)[1]
    return None


def _group_alive(stamp: "str | None") -> bool:
    """Return whether any process is alive in the group of the leader with this stamp ("PID STARTTIME").

    A launcher that was killed may leave the engine's client behind, still pulling: that is not lost yet.
    """
    parts = (stamp or "").split()
    if len(parts) != 2 or int(parts[0]) <= 1:
        return False
    pid = int(parts[0])
    now = start_time(pid)
    if now is not None:  # a launcher is stamped before it has a group of its own
        return now == parts[1]
    try:
        os.killpg(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


# ---- conclusions --------------------------------------------------------------------------------------------------


def merge(
    facts: "dict[str, dict[str, Any]]", containers: "dict[str, dict[str, Any]] | None", cluster_id: str
) -> "list[dict[str, Any]]":
    """Return attempts as dicts, ordered by name.

    Args:
        facts: Folder name -> `read_folder`.
        containers: Name -> container of `parse_podman` or `parse_docker`; None when the engine could not be asked.
        cluster_id: Goes into each.
    """
    attempts = []  # type: list[dict[str, Any]]
    for name in sorted(set(facts) | set(containers or {})):
        fact = facts.get(name)
        container = (containers or {}).get(name)
        if fact is not None and fact["meta"].get("runtime") not in (None, "podman", "docker"):
            attempt = _supervised(fact)  # no engine knows it: its folder says all
        elif container is not None:
            attempt = _with_container(fact, container)
        elif containers is not None and fact is not None:
            attempt = _without_container(fact)
        else:
            continue  # the engine did not answer: whether there is a container is unknown, so say nothing
        base = {
            "name": name,
            "phase": "lost",
            "exit_code": None,
            "oom_killed": False,
            "started_at": None,
            "finished_at": None,
            "error": None,
            "cluster_id": cluster_id,
            "pid": None,
            "ran_s": None,
            "attached_s": fact.get("attached_s") if fact else None,
            "id": container["id"] if container else None,
        }
        base.update(attempt)
        base.update(jobfiles.parse(fact.get("job_files", {}) if fact else {}))
        attempts.append(base)
    return attempts


def _supervised(fact: "dict[str, Any]") -> "dict[str, Any]":
    times = {"started_at": _number(fact["started"])}
    ending = (fact["exit"] or "").split()
    if len(ending) == 2:
        return dict(times, phase="exited", exit_code=int(ending[0]), finished_at=float(ending[1]))
    # A dead job whose launcher lives is about to be recorded; a launcher may live before its stamp is written.
    unstamped = fact["new"] and "launcher.pid" not in fact["files"]
    if fact["pid_alive"] or (fact["pid"] and (fact["launcher"] or unstamped)):
        return dict(times, phase="running", pid=fact["pid"])
    if fact["failed"] is None and not fact["launcher"] and fact["pid"]:
        return dict(times, phase="lost", error=_why_lost(fact, "its supervisor was killed: the exit code is unknown"))
    # Until it has a process: one that was ready for hours is no launch that takes too long.
    if fact["launcher"] and "ready" in fact["files"]:
        return {"phase": "ready"}
    return _without_container(fact)


def _without_container(fact: "dict[str, Any]") -> "dict[str, Any]":
    """Return the phase of an attempt that has neither container nor process."""
    if fact["failed"] is not None:
        return {"phase": "failed", "exit_code": int(_number(fact["failed"]) or 1), "error": fact["error"] or None}
    if fact["launcher"] or (fact["new"] and "launcher.pid" not in fact["files"]):
        return {"phase": "preparing"}
    return {"phase": "lost", "error": _why_lost(fact, "the launcher died before it made a container")}


def _why_lost(fact: "dict[str, Any]", otherwise: str) -> str:
    return otherwise if fact["same_boot"] or not fact["meta"].get("boot") else "the node was rebooted"


def _with_container(fact: "dict[str, Any] | None", container: "dict[str, Any]") -> "dict[str, Any]":
    known = {k: container[k] for k in ("pid", "started_at", "finished_at")}
    rebooted = fact is not None and bool(fact["meta"].get("boot")) and not fact["same_boot"]
    if container["state"] in NOT_STARTED:
        # After a reboot podman calls `created` what ran before; started now, a job would silently begin anew.
        if rebooted:
            return {"phase": "lost", "error": "the node was rebooted"}
        if fact is not None and fact["failed"] is not None:
            return _without_container(fact)
        return {"phase": "preparing" if fact is not None and fact["launcher"] else "ready"}
    if container["state"] == LOST:
        error = "its supervisor on the node (conmon) was killed: the exit code is unknown"
        return dict(known, phase="lost", pid=None, finished_at=None, error=error)
    if container["state"] not in ENDED:
        return dict(known, phase="running", finished_at=None)
    code = container["exit_code"]
    if rebooted and code == 255:  # what docker writes for containers it finds dead at its start
        return dict(known, phase="lost", error="the node was rebooted")
    # podman before 4.6 does not say it, but its conmon leaves a file where it was started (see runtimes/engine.py).
    oom = container["oom_killed"] or (fact is not None and "oom" in fact["files"])
    return dict(known, phase="exited", pid=None, exit_code=code, oom_killed=oom, error=container["error"] or None)


def _number(text: "str | None") -> "float | None":
    try:
        return float((text or "").split()[0])
    except (ValueError, IndexError):
        return None
