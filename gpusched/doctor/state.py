"""The examination of the state folder: usable, safe, enough disk space, intact, and used by a controller."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from gpusched.doctor.findings import Finding, Status
from gpusched.errors import GpuschedError
from gpusched.model.backups import BACKUP_META, BackupResult, backup_result, backup_trouble
from gpusched.model.health import Condition
from gpusched.model.notices import Notice
from gpusched.model.readings import Wiring
from gpusched.model.slurm import Trouble
from gpusched.model.units import count_of, format_duration, format_memory
from gpusched.queue.damage import UNREADABLE, disk_error, unreadable
from gpusched.queue.presence import Presence, controller_of
from gpusched.queue.promotions import PolicyChange
from gpusched.queue.reading import DATABASE, file_to_read, open_to_read
from gpusched.queue.schema import SCHEMA_VERSION
from gpusched.queue.snapshots import held_gpus, uncleaned_gpus
from gpusched.queue.store import INVENTORY_TROUBLE, Reader
from gpusched.sched.interference.gpus import slow_gpus

_SUBJECT = "state"
_QUICK_CHECK_S = 20.0
_WARN_MIB, _FAIL_MIB = 2048, 200


class QueuedNodeFacts(NamedTuple):
    """What the queue knows of the nodes.

    Attributes:
        cluster_id: Marks this installation's jobs on the nodes.
        held: Node -> GPU index -> the jobs that hold it.
        drained: Node -> (reason, user), of those out of service.
        wirings: Node -> how it is wired, as last read.
        trouble: Why Slurm cannot be read, where it is the engine.
        changes: Partition -> what was last decided of its policy.
        conditions: Node -> conditions of it and its GPUs.
    """

    cluster_id: str = "check"
    held: Mapping[str, Mapping[int, tuple[str, ...]]] = {}
    drained: Mapping[str, tuple[str, str]] = {}
    wirings: Mapping[str, Wiring] = {}
    trouble: Trouble | None = None
    changes: Mapping[str, PolicyChange] = {}
    conditions: Mapping[str, tuple[Condition, ...]] = {}


def known_nodes(state: Path) -> QueuedNodeFacts:
    """Return what the queue says; empty if there is none yet or it cannot be read (`examine_state` reports that)."""
    try:
        reader = Reader.open(state)
        if reader is None:
            return QueuedNodeFacts()
        with closing(reader):
            active = reader.active()
            held, lingering = held_gpus(active), uncleaned_gpus(active, reader.ranks())
            records = reader.node_records().values()
            return QueuedNodeFacts(
                reader.meta("cluster_id") or "check",
                {
                    name: {**held.get(name, {}), **{gpu: (why,) for gpu, why in lingering.get(name, {}).items()}}
                    for name in {*held, *lingering}
                },
                {r.name: (r.drain_reason, r.drained_by or "?") for r in records if r.drain_reason is not None},
                {r.name: r.wiring for r in records if r.wiring is not None},
                reader.slurm_trouble(),
                reader.live_changes(),
                {r.name: r.health.conditions for r in records if r.health.conditions},
            )
    except (GpuschedError, *UNREADABLE, OSError):
        return QueuedNodeFacts()


def examine_state(state: Path, tick_s: float, now: float) -> list[Finding]:
    """Everything about the state folder; ``tick_s`` is the controller's expected pace."""
    try:
        if not state.is_dir():
            return [_can_create(state)]
        found = [_writable(state), _disk(state), *_exposed_files(state)]
        if (state / DATABASE).exists():
            found.append(_database(state))
            if found[-1].status != "fail":
                found += _controller(state, tick_s, now)
        else:
            found.append(_NEVER_RAN)
        return found
    except OSError as error:
        message = f"{state} cannot be examined: {error.strerror or error}"
        return [_finding("folder", "fail", message, "ask its owner, or set GPUSCHED_STATE to a folder of your own")]


def _can_create(state: Path) -> Finding:
    if state.exists():
        return _finding("folder", "fail", f"{state} is not a folder", "set GPUSCHED_STATE to a folder")
    parent = next(p for p in state.absolute().parents if p.exists())
    if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
        return _finding("folder", "ok", f"{state} does not exist yet; it is created on first use")
    message = f"{state} does not exist, and you cannot create it in {parent}"
    hint = f"create it as root: install -d -o {os.getuid()} {state}; or set GPUSCHED_STATE"
    return _finding("folder", "fail", message, hint)


def _writable(state: Path) -> Finding:
    if os.access(state, os.W_OK | os.X_OK):
        return _finding("folder", "ok", f"{state} is writable")
    if os.access(state / "inbox" / "new", os.W_OK | os.X_OK):
        return _finding("folder", "ok", f"{state} belongs to another user; you can write to its inbox")
    hint = "ask the administrator, or set GPUSCHED_STATE to a folder of your own"
    return _finding("folder", "fail", f"you have no write access to {state} and its inbox", hint)


def _disk(state: Path) -> Finding:
    free = shutil.disk_usage(state).free >> 20
    status: Status = "fail" if free < _FAIL_MIB else "warn" if free < _WARN_MIB else "ok"
    hint = "" if status == "ok" else "free some space; otherwise no command or event can be recorded"
    return _finding("disk", status, f"{format_memory(free)} free", hint)


def _exposed_files(state: Path) -> list[Finding]:
    """Check what others could read or change but should not."""
    found = []
    if state.stat().st_mode & stat.S_IWOTH:
        message = f"{state} is writable by all users, who could change the queue"
        found.append(_finding("permissions", "fail", message, f"chmod o-w {state}"))
    programs = state / "programs"
    for folder in (state / "secrets", *(programs.iterdir() if programs.is_dir() else ())):
        try:
            files = [folder, *folder.iterdir()]
        except (PermissionError, FileNotFoundError):
            files = []  # closed to us, as it should be to all but its owner
        exposed = [f for f in files if _mode(f) & (stat.S_IRWXG | stat.S_IRWXO)]
        if exposed:
            message = f"secrets of jobs can be read by other users: {exposed[0]}"
            found.append(_finding("permissions", "fail", message, f"chmod -R go= {folder}"))
    for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm"):
        file = state / name
        if _mode(file) & (stat.S_IRWXG | stat.S_IRWXO):
            message = f"other users can open {file}, and stop the controller by locking it"
            found.append(_finding("permissions", "warn", message, "restart the controller, which closes it"))
    for folder in (state / "inbox" / "tmp", state / "inbox" / "new"):
        mode = _mode(folder)
        if mode & stat.S_IWOTH and (not mode & stat.S_ISVTX or mode & stat.S_IROTH):
            message = f"{folder} has mode {stat.S_IMODE(mode):04o}: users could see or remove each other's commands"
            found.append(_finding("permissions", "fail", message, f"chmod 3733 {folder}"))
    return found or [_finding("permissions", "ok", "no unsafe permissions")]


def _mode(path: Path) -> int:
    """Return a file's mode; 0 where there is none, as of a job that has ended meanwhile."""
    with suppress(FileNotFoundError):
        return path.stat().st_mode
    return 0


def _database(state: Path) -> Finding:
    path = file_to_read(state)
    deadline = time.monotonic() + _QUICK_CHECK_S
    try:
        with closing(open_to_read(state).db) as db:
            db.set_progress_handler(lambda: int(time.monotonic() > deadline), 100_000)
            (version,) = db.execute("PRAGMA user_version").fetchone()
            problems = [row[0] for row in db.execute("PRAGMA quick_check(3)")]
            if problems != ["ok"]:
                raise sqlite3.DatabaseError(problems[0])
            row = next(unreadable(db, deadline - time.monotonic()), None)
    except PermissionError as error:
        hint = "to let other users see the queue, set settings.shared: true in inventory.yaml"
        return _finding("database", "fail", f"no permission to read {path}: {error}", hint)
    except (*UNREADABLE, OSError) as error:
        if "interrupt" in str(error):
            return _finding("database", "warn", f"{path} is too large to be checked within {_QUICK_CHECK_S:.0f} s")
        if broken := disk_error(path, error):
            return _finding("database", "fail", f"{path} cannot be read: {broken}", "see 'dmesg'; then check again")
        damaged = " is damaged" if type(error) is sqlite3.DatabaseError else ""
        return _finding("database", "fail", f"{path}{damaged}: {error}", _RESTORE)
    if version != SCHEMA_VERSION:
        message = f"{path} has version {version}, this gpusched supports {SCHEMA_VERSION}"
        return _finding("database", "fail", message, "use the gpusched that the controller runs")
    if row is not None:
        hint = "restart the controller: it sets such rows aside and keeps their content as events"
        return _finding("database", "fail", f"{path} is damaged: {row.line}", hint)
    return _finding("database", "ok", f"{path.name} is intact, {format_memory(max(1, path.stat().st_size >> 20))}")


_RESTORE = "stop the controller, then: gpusched recover"


def _controller(state: Path, tick_s: float, now: float) -> list[Finding]:
    """Check that a controller runs, and report where it uses something else than inventory.yaml says now."""
    try:
        reader = Reader.open(state)
        if reader is None:  # it was moved away meanwhile
            return [_NEVER_RAN]
        with closing(reader):
            tick_s += reader.lag_s()
            beat, trouble, left = reader.number("heartbeat", 0.0), reader.meta(INVENTORY_TROUBLE), reader.left_nodes()
            paces, unsent = reader.paces(), reader.failed_notices()
            standbys, alone = reader.standbys(), reader.misses_standby()
            backup = backup_result(reader.meta(BACKUP_META))
    except (GpuschedError, *UNREADABLE) as error:
        return [_finding("controller", "fail", f"its last heartbeat cannot be read: {error}", _RESTORE)]
    found = [_heartbeat(controller_of(state), now - beat if beat else None, max(60.0, 6 * tick_s))]
    if standbys:
        hint = "start it on the second login node: gpusched controller --standby" if alone else ""
        found.append(_finding("standby", "warn" if alone else "ok", standbys, hint))
    if trouble:
        message = f"the controller still uses the last valid one: {trouble}"
        found.append(_finding("inventory", "warn", message, "fix it; a running controller reloads it"))
    found += [_backup(backup, now)] if backup is not None else []
    slow = "check the node: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK; or exclude it with gpu_indices"
    found += _unsent_notices(unsent, now)
    found += [Finding(gpu.node, f"GPU {gpu.index}", "warn", gpu.line, slow) for gpu in slow_gpus(paces)]
    hint = "add it back, or wait for its jobs; no new job starts there"
    return found + [_finding("inventory", "warn", f"node {record.name} is {record.reason}", hint) for record in left]


def _backup(result: BackupResult, now: float) -> Finding:
    if trouble := backup_trouble(result, now):
        return _finding("backup", "warn", trouble, "then try: gpusched backup")
    return _finding("backup", "ok", f"{result.name}, {format_duration(max(0.0, now - (result.made or now)))} ago")


def _unsent_notices(notices: Sequence[Notice], now: float) -> list[Finding]:
    """Return the notices that could not be delivered yet, by reason."""
    found = []
    for error in dict.fromkeys(notice.error for notice in notices):
        some = [notice for notice in notices if notice.error == error]
        given_up = sum(notice.due is None for notice in some)
        due = min((notice.due for notice in some if notice.due is not None), default=None)
        delivery = f"{given_up} given up" if due is None else f"retry in {format_duration(max(0.0, due - now))}"
        message = f"{count_of(len(some), 'notice')} not sent ({delivery}): {error}; the latest: {some[0].body['text']}"
        found.append(_finding("notices", "warn", message, "check notices: in inventory.yaml, and the address"))
    return found


def _heartbeat(runs: Presence | None, age: float | None, most: float) -> Finding:
    if age is None and runs is not None:
        return _finding("controller", "warn", runs.line("is running its first cycle"), "wait, then check again")
    if age is None:
        return _finding("controller", "warn", "it has never completed a cycle here", "start it: gpusched controller")
    if age <= most:
        return _finding("controller", "ok", f"seen {max(0.0, age):.0f} s ago")
    if runs is not None:
        message = runs.line(f"is busy: its last cycle was {age:.0f} s ago")
        return _finding("controller", "warn", message, "wait, or see its log: journalctl -u gpusched")
    hint = "start it: gpusched controller (why it stopped: journalctl -u gpusched)"
    return _finding("controller", "warn", f"last seen {age:.0f} s ago", hint)


def _finding(check: str, status: Status, message: str, hint: str = "") -> Finding:
    return Finding(_SUBJECT, check, status, message, hint)


_NEVER_RAN = _finding("controller", "warn", "it has never run here", "start it: gpusched controller")
