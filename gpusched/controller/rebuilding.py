"""Rebuilds a lost store: restores the last backup, asks all nodes, settles, and puts the result in place.

All work is on a copy below the state folder until `Rebuild.commit`, whose last step is one rename.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpusched.cluster.base import NodeObservation
from gpusched.cluster.ssh import SshCluster
from gpusched.config.paths import sync_folder
from gpusched.controller.leadership import Leadership, leadership
from gpusched.controller.recovery.settling import NodeEvidence, settle
from gpusched.controller.recovery.unsettled import leave_unsettled
from gpusched.errors import GpuschedError
from gpusched.model.backups import Backup
from gpusched.model.events import Event
from gpusched.model.readings import ProbeFailure
from gpusched.model.recovery import RecoveryReport
from gpusched.model.resources import Inventory, Node
from gpusched.nodes.opening import open_transport
from gpusched.nodes.records import find_clusters, read_records
from gpusched.nodes.transport import TransportError
from gpusched.queue.audit import FOLDER as AUDIT
from gpusched.queue.backup import LOGS, MANIFEST, NAME, TREES, copy_tree, find_backup, parse_backup, refuse_as_root
from gpusched.queue.clock import ANCHOR, Clock, follow_wall_clock
from gpusched.queue.damage import disk_error
from gpusched.queue.inbox import Inbox
from gpusched.queue.lease import TERM
from gpusched.queue.reading import DATABASE, open_to_read
from gpusched.queue.store import Store

WORK = ".recovery"
THREADS = 32
SKIPPED_EVENT_NUMBERS = 1_000_000
"""So many may have been used since the backup: log pipelines take a number seen before for a repetition."""
_REMOTE = re.compile(r"([^/:\s-][^/:\s]*):(/.+)")


class Rebuild:
    """A rebuilt store, not yet in place.

    Attributes:
        report: What was found.
    """

    def __init__(
        self, state: Path, backup: Backup | None, store: Store, report: RecoveryReport, leads: Leadership
    ) -> None:
        self._state, self._backup, self._store, self._leads, self.report = state, backup, store, leads, report

    def commit(self) -> None:
        """Restore the backup's files that the state folder lacks, and put the store in place.

        Raises:
            GpuschedError: A controller took over, or the state folder was replaced; nothing is changed.
            OSError: It failed; it can be repeated.
        """
        state, work = self._state, self._state / WORK
        self._leads.check()
        if self._backup is not None:
            for tree in TREES:
                copy_tree(self._backup.path, state, tree)
            copy_tree(self._backup.path.parent, state, LOGS)
            # The audit log only as a whole: in one that is still there files have other names since.
            if (self._backup.path / AUDIT).is_dir() and not any((state / AUDIT).glob("*.jsonl")):
                copy_tree(self._backup.path, work, AUDIT)
                (work / AUDIT).rename(state / AUDIT)
        self._store.close()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        for suffix in ("-wal", "-shm", "-journal", ""):  # another database's journal would damage this one
            old = state / f"{DATABASE}{suffix}"
            if old.exists():
                old.rename(state / f"{DATABASE}.damaged-{stamp}{suffix}")
        with (work / DATABASE).open("rb") as file:
            os.fsync(file.fileno())
        (work / DATABASE).rename(state / DATABASE)
        sync_folder(state)


@contextlib.contextmanager
def rebuild(
    state: Path, inventory: Inventory, source: str | None = "", cluster_id: str = ""
) -> Iterator[Rebuild]:
    """Yield the rebuilt store, as the folder's controller; without `Rebuild.commit` nothing is changed.

    The rebuilt store has the highest term that nodes have seen, so that the next controller's is higher than that.

    Args:
        state: The state folder, in which the database is missing or damaged.
        inventory: All nodes that may have jobs.
        source: A folder of backups, or a backup, on this machine or as ``host:path``; "": as the inventory says;
            None: no backup is used.
        cluster_id: Of the installation; needed if there is no backup and nodes have jobs of several.

    Raises:
        GpuschedError: A controller runs, the database is in order, or there is no usable backup in ``source``.
    """
    refuse_as_root(state)
    with leadership(state) as leads:  # with its lease, since no standby may take over meanwhile
        _refuse_sound(state)
        work = state / WORK
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)
        try:
            backup = _backup(source, inventory, work)
            if backup is not None:
                shutil.copyfile(backup.path / DATABASE, work / DATABASE)
                (work / DATABASE).chmod(0o600)
            with contextlib.closing(Store.create_or_open(work)) as store:
                if backup is None:
                    store.set_meta("cluster_id", cluster_id or _find_cluster(inventory))
                _follow_clock(store)
                yield Rebuild(state, backup, store, _settled(state, inventory, backup, store, time.time()), leads)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _follow_clock(store: Store) -> None:
    """Bring the restored times to this machine's clock before times by it are added: the next controller moves all."""
    clock = Clock()
    clock.resume(store.meta(ANCHOR), store.number("heartbeat", 0.0))
    follow_wall_clock(store, clock)
    store.set_meta(ANCHOR, clock.anchor())


def _refuse_sound(state: Path) -> None:
    path = state / DATABASE
    if not path.exists():
        return
    try:
        with contextlib.closing(open_to_read(state).db) as db:
            filled = db.execute("PRAGMA user_version").fetchone()[0]  # SQLite takes 0 bytes for a sound database
            if (found := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(found)
            if filled:
                raise GpuschedError(
                    f"{path} is in order, so there is nothing to recover",
                    "to restore a backup anyway, move it away first, with its -wal and -shm",
                )
    except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
        if failed := disk_error(path, error):
            raise GpuschedError(
                f"{path} cannot be read now, and may be in order: {failed}",
                "see 'dmesg'; if its disk is lost, move it away first, with its -wal, -shm and -journal",
            ) from error


def _backup(source: str | None, inventory: Inventory, work: Path) -> Backup | None:
    if source is None:
        return None
    source = source or inventory.settings.backup.to
    if not source:
        raise GpuschedError("settings.backup names no folder", "name a backup with --from, or use --no-backup")
    if remote := _REMOTE.fullmatch(source):
        return _fetch(remote[1], remote[2], work / "fetched")
    return find_backup(Path(source))


def _fetch(host: str, path: str, target: Path) -> Backup:
    """Copy the newest backup of a folder, or a backup, from another machine, with the collected output."""
    names = _command("ssh", "-o", "BatchMode=yes", host, f"cd -- {shlex.quote(path)} && ls").split()
    folder = path
    if MANIFEST in names:
        folder, *names = os.path.split(path.rstrip("/"))
    target.mkdir()
    files = [f"{name}/{MANIFEST}" for name in names if NAME.fullmatch(name)]
    shown = f"cd -- {shlex.quote(folder)} && grep -Hs '' {' '.join(files)}; true"  # FILE:MANIFEST; some may lack one
    lines = [line.partition(":") for line in _command("ssh", "-o", "BatchMode=yes", host, shown).splitlines()]
    oldest_first = sorted((parse_backup(Path(file).parent, text) for file, _, text in lines), key=lambda one: one.order)
    for name in [one.name for one in reversed(oldest_first)]:
        _command("scp", "-o", "BatchMode=yes", "-rpq", f"{host}:{folder}/{name}", str(target))
        with contextlib.suppress(GpuschedError):
            found = find_backup(target / name)
            with contextlib.suppress(GpuschedError):  # without any output collected so far there is none
                _command("scp", "-o", "BatchMode=yes", "-rpq", f"{host}:{folder}/{LOGS}", str(target))
            return found
    raise GpuschedError(f"no usable backup in {host}:{path}", "name another one with --from")


def _command(*argv: str) -> str:
    try:
        return subprocess.run(argv, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    except FileNotFoundError:
        raise GpuschedError(f"{argv[0]} is not installed here", "install OpenSSH's client") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["it failed"])[-1]
        raise GpuschedError(f"{argv[0]}: {said}", "copy the backup here, and name it with --from") from None


def _find_cluster(inventory: Inventory) -> str:
    """Return the only installation that has left attempts on these nodes.

    Raises:
        GpuschedError: There is none, or several.
    """
    found: dict[str, list[str]] = {}

    def ask(node: Node) -> None:
        with (
            contextlib.suppress(TransportError),
            contextlib.closing(open_transport(node, inventory.settings)) as transport,
        ):
            for cluster in find_clusters(transport, node.name):
                found.setdefault(cluster, []).append(node.name)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(ask, inventory.nodes))
    if len(found) == 1:
        return next(iter(found))
    if not found:
        raise GpuschedError("no node that answers has jobs of an installation", "name a backup with --from")
    each = "; ".join(f"{cluster}: {', '.join(sorted(nodes))}" for cluster, nodes in sorted(found.items()))
    raise GpuschedError(f"nodes have jobs of several installations ({each})", "name one with --cluster-id")


def _settled(
    state: Path, inventory: Inventory, backup: Backup | None, store: Store, now: float
) -> RecoveryReport:
    cluster_id = store.meta("cluster_id")
    assert cluster_id is not None
    # Slurm's jobs are as Slurm says; the controller reads them anew.
    made = backup.manifest.made if backup is not None and backup.manifest is not None else None
    since = made if made is not None and made <= now else 0.0  # a clock that was ahead does not tell when it was made
    asked = inventory.engine == "ssh"
    nodes, silent = ask_nodes(inventory, cluster_id, state / WORK, since) if asked else ({}, {})
    with store.transaction():
        event = Event(time=now, kind="store_recovered", data={"backup": made, "silent": sorted(silent)})
        store.append_after_gap(event, SKIPPED_EVENT_NUMBERS)
        # Nodes refuse lower terms than they have seen, and this machine's clock may be behind that of the lost one.
        seen = max((evidence.records.term for evidence in nodes.values()), default=0)
        store.set_meta(TERM, str(seen))
        found = settle(store, inventory, nodes, silent.keys(), now)
        leave_unsettled(store, silent, now, since)
    inboxes = [Inbox(state).new, *([backup.path / "inbox" / "new"] if backup is not None else [])]
    return RecoveryReport(
        backup=str(backup.path) if backup is not None else "",
        made=made,
        jobs=tuple(found.jobs),
        pending=sum(row.count for row in store.pending_rows()),
        commands=len({name for new in inboxes if new.is_dir() for name in os.listdir(new)}),
        silent=silent,
        strays=tuple(found.strays),
    )


def ask_nodes(
    inventory: Inventory, cluster_id: str, folder: Path, since: float
) -> tuple[dict[str, NodeEvidence], dict[str, str]]:
    """Return what the nodes show and keep (of removed attempts since then), and why others do not answer."""
    with contextlib.closing(SshCluster(inventory, cluster_id, folder)) as cluster:
        patience_s = inventory.settings.probe_timeout_s + inventory.settings.connect_timeout_s
        observations = cluster.observe(inventory.nodes, patience_s)
    silent: dict[str, str] = {}

    def ask(node: Node) -> NodeEvidence | None:
        observation = observations.get(node.name)
        if (why := _why_silent(observation)) or observation is None:
            silent[node.name] = why
            return None
        try:
            with contextlib.closing(open_transport(node, inventory.settings)) as transport:
                records = read_records(transport, cluster_id, node.name, since)
        except TransportError as error:
            silent[node.name] = error.reason
            return None
        assert observation.complete_reading is not None
        return NodeEvidence(observation.complete_reading, records)

    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip((node.name for node in inventory.nodes), pool.map(ask, inventory.nodes), strict=True))
    return {name: one for name, one in found.items() if one is not None}, silent


def _why_silent(observation: NodeObservation | None) -> str:
    if observation is None:
        return "no answer"
    if isinstance(observation.result, ProbeFailure):
        return observation.result.reason
    if observation.complete_reading is None:
        return observation.result.runtime_error or "its containers cannot be listed"
    return ""
