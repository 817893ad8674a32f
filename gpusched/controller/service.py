"""Runs the cycle under a lock: in a loop (``gpusched controller``) or once (``gpusched tick``)."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import gpusched
from gpusched.cluster.collecting import rotate
from gpusched.cluster.logfiles import remove_drafts
from gpusched.cluster.ssh import SshCluster
from gpusched.config.paths import SHARED_STATE
from gpusched.config.policies import POLICY, WEIGHTS, policy_folders
from gpusched.config.users import user_name
from gpusched.controller import logsetup
from gpusched.controller.auditing import HOST
from gpusched.controller.backups import BackupRunner
from gpusched.controller.commandfiles import STORAGE_ERRORS
from gpusched.controller.cycle import Cycle
from gpusched.controller.eventlog import EventLogger
from gpusched.controller.injob import Prepare
from gpusched.controller.leadership import Leadership, end_former, leadership, standby
from gpusched.controller.notices.service import NotificationService
from gpusched.controller.predicting import BUDGET_S, StartPredictor
from gpusched.controller.publishing import Publisher
from gpusched.controller.reporting import Reporting
from gpusched.controller.secretfiles import forbid_core_dumps
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.audit import audit_entry
from gpusched.model.events import Event
from gpusched.model.policy import PolicySpec
from gpusched.model.relay import SOCKET
from gpusched.model.resources import Inventory
from gpusched.model.units import count_of
from gpusched.nodes.fencing import TermRefused
from gpusched.queue.clock import ANCHOR, Clock, follow_wall_clock
from gpusched.queue.damage import STORE_FAULTS, DatabaseDamaged, UnreadableRow
from gpusched.queue.inbox import Inbox
from gpusched.queue.lastgood import Declared, declared_or_kept, store_declared
from gpusched.queue.lease import LEASE, STANDBYS, Superseded
from gpusched.queue.locks import LOCK_TIMEOUT_S as LOCK_PATIENCE_S
from gpusched.queue.locks import lock_holders
from gpusched.queue.presence import COMPILING, announce, controller_presence
from gpusched.queue.repair import set_aside_damaged
from gpusched.queue.store import DATABASE, INVENTORY_TROUBLE, Store
from gpusched.sched.warming import warm_up

if TYPE_CHECKING:
    from gpusched.controller.slurm.cycle import SlurmCycle
    from gpusched.controller.slurm.deadman import DeadMan

POLL_S = 0.2
LOCK_REPORT_S = 0.4
PATIENCE_S = 3.0  # how long a cycle waits for slow nodes; a later cycle uses their answers
FORMER_HOLDER_S = 4.0  # how long a superseded controller may keep a lock on the store
MAX_TICK_ROUNDS = 4
CRON_S = 60.0  # cron's shortest interval, within which the controller must not count as missing
TICK_PREDICTING_S = 1.0  # a tick has no pause between cycles
TICK_NOTICES_S = 20.0  # sending stops when the tick ends; the next tick sends the rest
RELAY_RESTART_S = 10.0
MAX_LOGGED_ROWS = 20
HOUSEKEEPING_S = 3600.0
REPORT_AGAIN_S = 60.0
KEEP_FINE_USAGE_S = 14 * 86400
_log = logging.getLogger(__name__)


class Service:
    """A controller with its store, inventory and connections."""

    def __init__(
        self,
        inventory_path: Path,
        state: Path,
        clock: Clock | None = None,
        lock_wait: LockWait | None = None,
        prepare: Prepare | None = None,
        leadership: Leadership | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        self._path, self._state, self._prepare, self._leadership = inventory_path, state, prepare, leadership
        self._files = self._refused_files = self._stamp()  # before they are read
        term = leadership.term if leadership is not None else None
        declared = declared_or_kept(inventory_path, state)
        inventory, policies = declared.inventory, declared.policies
        Inbox(state).create()
        self.store = Store.create_or_open(state, lock_wait or LockWait(state), term)
        self._publisher = publisher or Publisher(state)
        self.is_shared = False
        self._apply_sharing(inventory)  # first, so that readers have a copy during a slow start
        cluster_id = self.store.meta("cluster_id")
        assert cluster_id is not None
        self.clock = clock or Clock()
        self.clock.resume(self.store.meta(ANCHOR), self.store.number("heartbeat", 0.0))
        self.store.set_meta(ANCHOR, self.clock.anchor())
        self.cluster = SshCluster(inventory, cluster_id, state / "logs", self.clock, term, self._refused)
        self._reporting = Reporting(self.store, state)
        self.cycle = self._new_cycle(inventory, policies)
        self._predictor: StartPredictor | None = StartPredictor(self.store)
        self._notices, self._events = NotificationService(self.store), EventLogger(self.store)
        self._backups = BackupRunner(self.store, state, inventory_path)
        self._housekept_at = -HOUSEKEEPING_S
        self._last_cycle_s = 0.0  # duration of the last cycle
        self._seen_term = 0  # the highest that a node not settled yet refused this controller by
        self._failures: dict[str, float] = {}  # why cycles could not be recorded -> when that was logged
        self.store.set_meta("controller_pid", str(os.getpid()))
        self.store.set_meta("tick_s", str(inventory.settings.tick_s))
        self.store.set_meta("inventory", str(inventory_path.absolute()))
        self._event("controller_started", pid=os.getpid())
        if leadership is not None and leadership.former is not None:
            self._event("controller_took_over", former=leadership.former.holder, term=leadership.term)
        self._record_inventory(declared)
        remove_drafts(state / "logs")
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile or load the scheduling passes before the first cycle: slow once, and later cycles do not wait."""
        from gpusched.compiled import is_on_disk
        from gpusched.sched.kernel.by_rule import pass_for
        from gpusched.sched.state import EASY

        if not is_on_disk(pass_for(EASY)):
            announce(self._state, COMPILING)
            _log.info("compiling the scheduling passes (once only, about ten seconds)")
        warm_up(self.cycle.policies.values(), any(node.sharing for node in self.cycle.inventory.nodes))
        self.cycle.warm_up()
        announce(self._state)

    def _apply_sharing(self, inventory: Inventory) -> None:
        """Open the state folder to the machine's other users, or close it, as the inventory says."""
        was_shared, self.is_shared = self.is_shared, inventory.settings.shared or self._state == SHARED_STATE
        inbox = Inbox(self._state)
        if not self.is_shared:
            inbox.make_private()
            self._publisher.withdraw()
            return
        inbox.create(shared=True)
        self._publisher.start()
        if not was_shared and not self._state.stat().st_mode & stat.S_IXOTH:
            _log.error(
                "settings.shared: other users cannot enter %s; as its owner: chmod 755 %s", self._state, self._state
            )

    def _event(self, kind: str, **data: object) -> None:
        self.store.append([Event(time=self.clock(), kind=kind, data=data)])

    def _refused(self, error: TermRefused) -> None:
        assert self._leadership is not None
        # A recovered store has a term above those of all nodes that answered then.
        if isinstance(self.cycle, Cycle) and self.cycle.is_unsettled(error.node):
            self._seen_term = max(self._seen_term, error.term)
            return
        hint = f"if no other controller runs, the state folder was restored: remove {self._state / LEASE}, then restart"
        self._leadership.lose(Superseded(f"{error.reason}: this controller stops, jobs keep running", hint))

    def _follow_terms(self, leads: Leadership) -> None:
        """Go on with a term above one that the backup of a recovered store did not know."""
        if not self._seen_term:
            return
        if self._seen_term >= leads.term:
            leads.raise_term(self._seen_term + 1)
        self.store.raise_term(leads.term)  # a full disk: again in the next cycle
        self.cluster.raise_term(leads.term)
        self._seen_term = 0
        _log.warning("a node that did not answer the recovery has seen a later term; now: %d", leads.term)

    def audit(self, command: str, uid: int, *subject: str, refused: str = "", **data: object) -> None:
        """Record what did not come by the inbox."""
        sender = uid, user_name(uid)
        self.store.add_audit(
            audit_entry(self.clock(), HOST, sender, command, subject, refused=refused, via="command", data=data)
        )

    def run(self, patience_s: float) -> None:
        """Run one cycle, after reloading changed files.

        Raises:
            Superseded: Another controller took over.
            GpuschedError: The state folder at this path is another one since the last cycle.
        """
        started = time.monotonic()
        if self._leadership is not None:
            self._leadership.check()  # before anything is written
            self._follow_terms(self._leadership)
            self._record_standbys(self._leadership)
        self._reload()
        if step := follow_wall_clock(self.store, self.clock):
            self._replace_cycle()
            _log.warning(
                "this machine's clock was set by %+.0f s; limits, retries and grace periods are unaffected", step
            )
        self.cycle.run(patience_s)
        self._events.step()
        self.send_notices()
        if time.monotonic() - self._housekept_at > HOUSEKEEPING_S:
            self._housekept_at = time.monotonic()
            with self.store.transaction():
                self.store.compact_usage(self.clock() - KEEP_FINE_USAGE_S, 3600)
            rotate(self._state / "logs", self.cycle.inventory.settings.logs)
            self.cycle.inbox.tidy()
        self._last_cycle_s = time.monotonic() - started
        _log.debug("a cycle of %.3f s", self._last_cycle_s)
        self._reporting.step(self._last_cycle_s, self.cycle.inventory.settings.events)
        self._backups.step(self.cycle.inventory.settings.backup, self.clock())

    def finish_backup(self) -> None:
        """Wait for the backup that is being made."""
        self._backups.finish(self.cycle.inventory.settings.backup, self.clock())

    def _record_standbys(self, leadership: Leadership) -> None:
        found = ", ".join(leadership.holder.standbys)
        if found != (self.store.meta(STANDBYS) or ""):
            self.store.set_meta(STANDBYS, found)
            _log.info("standbys: %s", found or "none")

    def send_notices(self, wait_s: float = 0.0) -> None:
        """Send due notices, waiting up to ``wait_s`` for the results."""
        self._notices.step(self.cycle.inventory, self.clock(), wait_s)

    def predict_starts(self, budget_s: float = BUDGET_S) -> None:
        """Predict job starts between two cycles; an error turns predictions off, and does not stop the controller."""
        if self._predictor is None:
            return
        try:
            self._predictor.step(self.cycle.inventory, self.clock(), budget_s)
        except STORE_FAULTS:
            raise
        except Exception as error:
            self._predictor.close()
            self._predictor = None
            why = f"{type(error).__name__}: {error}"
            _log.exception("start predictions are off until the controller restarts: %s", why)
            self._event("start_prediction_failed", why=why)

    def recover(self, error: Exception) -> None:
        """Go on after a cycle that could not be written: none of it is in the store, so the next starts from there.

        Jobs keep running; commands wait in the inbox. A reason is logged once per minute.
        """
        now, reason = time.monotonic(), str(error)
        self._failures = {why: at for why, at in self._failures.items() if now - at < REPORT_AGAIN_S}
        level = logging.DEBUG if reason in self._failures else logging.ERROR
        self._failures.setdefault(reason, now)
        message = "this cycle could not be recorded in %s: %s; retrying, see 'gpusched check'"
        _log.log(level, message, self._state, reason)
        self._replace_cycle()

    def set_aside(self, error: DatabaseDamaged) -> None:
        """Set aside unreadable rows and go on without them.

        Raises:
            Damaged: There are none, so the damage is not limited to rows.
        """
        try:
            rows = set_aside_damaged(self.store, self.clock())
        except STORAGE_ERRORS as problem:
            self.recover(problem)
            return
        if not rows:
            raise error
        _log_set_aside(rows)
        self._replace_cycle()

    def _replace_cycle(self) -> None:
        """Replace the cycle by a new one, which reads its state from the store."""
        previous = self.cycle
        previous.close()
        self.cycle = self._new_cycle(previous.inventory, previous.policies)
        if isinstance(self.cycle, Cycle) and isinstance(previous, Cycle):
            self.cycle.take_over(previous)
        self.cycle.inbox = previous.inbox  # it knows which files were put off

    def _new_cycle(self, inventory: Inventory, policies: dict[str, PolicySpec]) -> Cycle | SlurmCycle:
        timings = self._reporting.timings
        if inventory.engine != "slurm":
            return Cycle(self.store, self._state, inventory, policies, self.cluster, self.clock, self._prepare, timings)
        from gpusched.controller.slurm.applying import LeaseApplier
        from gpusched.controller.slurm.cycle import SlurmCycle
        from gpusched.slurm.commands import Slurm

        slurm = Slurm(before_update=self._leadership.check) if self._leadership is not None else Slurm()
        applier = LeaseApplier(self.store, slurm)
        return SlurmCycle(
            self.store, self._state, inventory, policies, self.cluster, self.clock, slurm, applier, timings
        )

    def _stamp(self) -> tuple[tuple[str, int, int, int], ...]:
        """Return what changes with the inventory and the policies."""
        patterns = ("*.yaml", f"*/{POLICY}", f"*/*{WEIGHTS}")
        files, found = [self._path], list[tuple[str, int, int, int]]()
        with contextlib.suppress(GpuschedError, OSError):  # a folder that is being replaced
            files += [f for folder in policy_folders(self._path) for p in patterns for f in sorted(folder.glob(p))]
        for file in files:
            with contextlib.suppress(OSError):
                status = file.stat()
                found.append((str(file), status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)

    def _reload(self) -> None:
        """Apply a changed inventory.yaml or policy; an invalid one is reported and the old one stays active."""
        stamp = self._stamp()
        if stamp == self._files:
            return
        try:
            declared = declared_or_kept(self._path, self._state)
        except GpuschedError as error:  # no stored copy: keep the one in use
            declared = Declared(self.cycle.inventory, self.cycle.policies, error.line())
        if declared.trouble and stamp != self._refused_files:
            self._refused_files = stamp  # reported if the next cycle finds the same: it may be half saved
            return
        self._record_inventory(declared)
        self._files = stamp  # last: on a full disk it is tried again
        if declared.trouble:
            return
        inventory, policies = declared.inventory, declared.policies
        other_engine = inventory.engine != self.cycle.inventory.engine
        self.cycle.inventory, self.cycle.policies = inventory, policies
        if other_engine:
            self._replace_cycle()
        self.cluster.use_inventory(inventory)
        self._apply_sharing(inventory)
        self.store.set_meta("tick_s", str(inventory.settings.tick_s))
        _log.info("reloaded %s", self._path)
        self._event("inventory_reloaded")
        self._audit_inventory()

    def _audit_inventory(self, refused: str = "") -> None:
        """Record a change of inventory.yaml; its owner need not have made it."""
        with contextlib.suppress(OSError):
            digest = hashlib.sha256(self._path.read_bytes()).hexdigest()
            uid = self._path.stat().st_uid
            self.audit("inventory", uid, str(self._path), refused=refused, sha256=digest)

    def _record_inventory(self, declared: Declared) -> None:
        """Store a valid inventory, to start from if the file is invalid then; report an invalid one."""
        if declared.trouble and declared.trouble != self.store.meta(INVENTORY_TROUBLE):
            self._event("inventory_refused", why=declared.trouble)
            self._audit_inventory(declared.trouble)
        store_declared(self.store, declared)
        if declared.trouble:
            _log.error("kept the old inventory: %s", declared.trouble)

    def pause(self, stop: StopFlag) -> None:
        """Wait for the next tick, a command in the inbox, or the end of an operation or job.

        Such news ends the wait, but not before it has lasted as long as the cycle did, so that many ends in a row are
        handled together.
        """
        started = now = time.monotonic()
        until = started + self.cycle.inventory.settings.tick_s
        earliest = started + min(POLL_S, self._last_cycle_s)
        while now < until and not stop.wait(earliest - now if now < earliest else POLL_S):
            now = time.monotonic()
            if self._leadership is not None and self._leadership.is_lost:
                return
            if now >= earliest and (self.cluster.has_news() or self.cycle.inbox.has_any()):
                return

    def close(self) -> None:
        """Release all resources; what runs on the nodes keeps running."""
        with contextlib.suppress(*STORE_FAULTS):  # a full disk must not prevent the end
            self._event("controller_stopped")
            self._reporting.close()
        if self._predictor is not None:
            self._predictor.close()
        self._backups.close()
        self.cycle.close()
        self.cycle.inbox.close()
        self.cluster.close()
        self._publisher.stop()
        self.store.close()


class StopFlag:
    """A stop request, set by signal handlers.

    `threading.Event` has a lock: a handler that runs while the main thread holds it would wait forever.
    """

    def __init__(self) -> None:
        self._requested = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)

    def set(self) -> None:
        """Request the stop; safe in a signal handler."""
        self._requested = True
        self.wake()

    def wake(self) -> None:
        """End `wait` at once; safe in any thread and in a signal handler."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so `wait` ends anyway
            os.write(self._wake_write, b"\0")

    def is_set(self) -> bool:
        """Return whether a stop was requested."""
        return self._requested

    def wait(self, seconds: float) -> bool:
        """Wait until woken or timed out; return whether a stop was requested."""
        if not self._requested and self._poll.poll(1000 * seconds):
            os.read(self._wake_read, 65536)
        return self._requested


class LockWait:
    """Decides how long to wait for the store's locks, and logs their holders within a second.

    Args:
        state: The state folder.
        stop: Ends the wait.
        patience_s: The longest wait.
    """

    def __init__(self, state: Path, stop: StopFlag | None = None, patience_s: float = LOCK_PATIENCE_S) -> None:
        self._database, self._stop, self.patience_s = state / DATABASE, stop, patience_s
        self._reported = ""
        self._end_holder: Callable[[], bool] = lambda: True
        self._end_holder_after_s = math.inf

    def end_holder_after(self, seconds: float, end: Callable[[], bool]) -> None:
        """Have ``end`` called once when a lock was waited for that long."""
        self._end_holder_after_s, self._end_holder = seconds, end

    def __call__(self, waited_s: float) -> bool:
        """Return whether to wait longer after ``waited_s``; -1.0: the wait is over."""
        if waited_s < 0:
            if self._reported:
                _log.info("the store is free again")
            self._reported = ""
            return True
        if waited_s >= LOCK_REPORT_S:
            unknown = f"an unknown process (try: fuser {self._database}-shm)"
            holder = ", ".join(lock_holders(self._database)) or unknown
            if holder != self._reported:
                self._reported = holder
                _log.warning("waiting for a lock on the store, held by %s", holder)
        if waited_s >= self._end_holder_after_s:
            self._end_holder_after_s = math.inf
            self._end_holder()
        return waited_s < self.patience_s and not (self._stop is not None and self._stop.is_set())


class RelayProcess:
    """Keeps the relay process (`gpusched.controller.relay`) running beside the controller of a shared installation.

    Nothing depends on it: without it, users cannot look into running jobs, and all else works.
    """

    def __init__(self, state: Path, inventory_path: Path, check: Callable[[], None]) -> None:
        self._state, self._inventory_path = state, inventory_path
        self._check = check  # see `Leadership.check`
        self._process: subprocess.Popen[bytes] | None = None
        self._started = float("-inf")

    def watch(self) -> None:
        """Start the process, or restart it."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            _log.warning("the relay to running jobs ended (exit code %s); restarting it", self._process.returncode)
            self._clear()
        if time.monotonic() - self._started < RELAY_RESTART_S:
            return
        self._started = time.monotonic()
        # -P: do not import from the current folder, which may be another user's.
        argv = [sys.executable, "-P", "-m", "gpusched.controller.relay", str(self._state), str(self._inventory_path)]
        argv += logsetup.arguments()
        paths = [str(Path(gpusched.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        except OSError as error:
            _log.error("the relay to running jobs cannot be started: %s", error)

    def close(self) -> None:
        """Kill the process, with its sessions."""
        if self._process is not None:
            with contextlib.suppress(OSError, GpuschedError):
                self._check()  # else the socket is another relay's
                (self._state / SOCKET).unlink()
            self._process.kill()
            self._process.wait()
            self._clear()

    def _clear(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None


def open_service(
    inventory_path: Path,
    state: Path,
    lock_wait: LockWait | None = None,
    prepare: Prepare | None = None,
    leadership: Leadership | None = None,
) -> Service:
    """Return the controller, after setting aside unreadable rows if necessary."""
    publisher = Publisher(state)
    try:
        return Service(inventory_path, state, None, lock_wait, prepare, leadership, publisher)
    except DatabaseDamaged:
        publisher.stop()
        term = leadership.term if leadership is not None else None
        with contextlib.closing(Store.create_or_open(state, lock_wait, term)) as store:
            rows = set_aside_damaged(store, time.time())
        if not rows:
            raise
        _log_set_aside(rows)
        return Service(inventory_path, state, None, lock_wait, prepare, leadership)


def _log_set_aside(rows: Sequence[UnreadableRow]) -> None:
    for row in rows[:MAX_LOGGED_ROWS]:
        _log.error("the database is damaged: %s; set aside", row.line)
    if len(rows) > MAX_LOGGED_ROWS:
        _log.error("and %d more rows, see the events row_set_aside", len(rows) - MAX_LOGGED_ROWS)


def run_forever(inventory_path: Path, state: Path, prepare: Prepare | None = None) -> None:
    """Run ``gpusched controller``: cycles until SIGTERM or SIGINT. ``prepare``: see `Asking`.

    Raises:
        Superseded: A standby took over.
        GpuschedError: The lock is taken, the state folder was replaced, or inventory, policies or store cannot be read.
    """
    forbid_core_dumps()
    with leadership(state) as leads:
        _run_leading(inventory_path, state, prepare, leads, StopFlag())


def run_standby(inventory_path: Path, state: Path, expiry_s: float, prepare: Prepare | None = None) -> None:
    """Run ``gpusched controller --standby``: wait until no controller runs, then run as `run_forever` does.

    Args:
        inventory_path: inventory.yaml.
        state: The state folder, shared with the controller's machine.
        expiry_s: A controller that is silent for that long is superseded.
        prepare: See `Asking`.

    Raises:
        GpuschedError: As for `run_forever`.
    """
    if declared_or_kept(inventory_path, state).inventory.engine == "slurm":  # an invalid one is reported now
        raise UsageError("--standby: not with engine: slurm", "let Slurm's own backup controller take over")
    forbid_core_dumps()
    stop = StopFlag()
    _stop_on_signals(stop)
    with standby(state, expiry_s, stop.wait) as leads:
        if leads is not None:
            _run_leading(inventory_path, state, prepare, leads, stop)


def _stop_on_signals(stop: StopFlag) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())


def _run_leading(
    inventory_path: Path, state: Path, prepare: Prepare | None, leads: Leadership, stop: StopFlag
) -> None:
    leads.on_loss(stop.wake)
    with controller_presence(state):
        lock_wait = LockWait(state, stop, math.inf)  # wait forever: a restart would find the same lock
        if leads.former is not None:
            lock_wait.end_holder_after(FORMER_HOLDER_S, partial(end_former, leads.former))
        service = open_service(inventory_path, state, lock_wait, prepare, leads)
        lock_wait.patience_s = LOCK_PATIENCE_S
        service.audit("controller", os.getuid(), str(state))
        service.cluster.watch_ends(stop.wake)
        relay, relay_runs = RelayProcess(state, inventory_path, leads.check), False
        keep_dead_man = _dead_man_keeper(service, state)
        _stop_on_signals(stop)
        nodes = count_of(len(service.cycle.inventory.nodes), "node")
        _log.info("controller %d on %s: %s", os.getpid(), state, nodes)
        try:
            while not stop.is_set():
                if service.is_shared:
                    relay.watch()
                elif relay_runs:
                    relay.close()
                relay_runs = service.is_shared
                try:
                    keep_dead_man()
                    service.run(PATIENCE_S)
                    service.predict_starts()
                except STORAGE_ERRORS as error:
                    service.recover(error)
                except DatabaseDamaged as error:
                    service.set_aside(error)
                service.pause(stop)
            _log.info("stopping on a signal; jobs keep running")
        except OSError as error:  # a network filesystem that is gone, say
            hint = "jobs keep running; start the controller again when it can be used"
            raise GpuschedError(f"{state} cannot be used: {error.strerror or error}", hint) from error
        finally:
            relay.close()
            service.close()


def _dead_man_keeper(service: Service, state: Path) -> Callable[[], None]:
    """Return a function that keeps the dead man's switch, which outlives the controller, running beside Slurm."""
    dead_man: DeadMan | None = None

    def keep() -> None:
        nonlocal dead_man
        if service.cycle.inventory.engine == "slurm":
            from gpusched.controller.slurm.deadman import DeadMan
            from gpusched.promotion.live import live_modes

            dead_man = dead_man or DeadMan(state)
            dead_man.watch(live_modes(service.cycle.inventory, service.store))

    return keep


def tick_once(inventory_path: Path, state: Path, prepare: Prepare | None = None) -> None:
    """Run ``gpusched tick``: one cycle that waits for every node, repeated while its own operations end.

    Raises:
        GpuschedError: As for `run_forever`.
    """
    forbid_core_dumps()
    with leadership(state) as leads, controller_presence(state):
        service = open_service(inventory_path, state, prepare=prepare, leadership=leads)
        service.store.set_meta("tick_s", str(max(CRON_S, service.cycle.inventory.settings.tick_s)))
        try:
            for _ in range(MAX_TICK_ROUNDS):
                try:
                    service.run(service.cycle.inventory.settings.probe_timeout_s + 1)
                except DatabaseDamaged as error:
                    service.set_aside(error)
                    continue
                if not service.cluster.busy():
                    break
                service.cluster.wait_for_operations(60.0)
            service.predict_starts(TICK_PREDICTING_S)
            service.send_notices(TICK_NOTICES_S)
            service.finish_backup()
        finally:
            service.close()
