"""Running the cycle: for ever (``gpusched controller``) or once (``gpusched tick``), under one lock."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import gpusched
from gpusched.cluster.collecting import rotate
from gpusched.cluster.ssh import SshCluster
from gpusched.config.paths import SHARED_STATE
from gpusched.config.policies import POLICY, WEIGHTS, policy_folders
from gpusched.controller.asking import Prepare
from gpusched.controller.cycle import Cycle
from gpusched.controller.fold import STORAGE_ERRORS
from gpusched.controller.notices.desk import NotificationService
from gpusched.controller.outputs import secure_logs
from gpusched.controller.predicting import BUDGET_S, StartPredictor
from gpusched.controller.publishing import Publisher
from gpusched.errors import GpuschedError
from gpusched.model.events import Event
from gpusched.model.policy import PolicySpec
from gpusched.model.relay import SOCKET
from gpusched.model.resources import Inventory
from gpusched.model.units import count_of
from gpusched.queue.clock import ANCHOR, Clock, follow_wall_clock
from gpusched.queue.damage import STORE_FAULTS, Damaged, UnreadableRow
from gpusched.queue.inbox import Inbox
from gpusched.queue.lastgood import Declared, declared_or_kept, keep
from gpusched.queue.locks import PATIENCE_S as LOCK_PATIENCE_S
from gpusched.queue.locks import holders
from gpusched.queue.mending import set_aside_damaged
from gpusched.queue.presence import COMPILING, announce, present
from gpusched.queue.store import DATABASE, INVENTORY_TROUBLE, Store
from gpusched.sched.warming import warm_up

if TYPE_CHECKING:
    from gpusched.controller.slurm.cycle import SlurmCycle
    from gpusched.controller.slurm.deadman import DeadMan

POLL_S = 0.2
LOCK_NAMED_S = 0.4
PATIENCE_S = 3.0  # how long one cycle waits for slow nodes; their answers count in a later one
MAX_TICK_ROUNDS = 4
CRON_S = 60.0  # cron calls no more often: until then nobody should miss the controller
TICK_PREDICTING_S = 1.0  # a tick has no pause in which it could go on
TICK_TELLING_S = 20.0  # a tick that ends ends its sending; what was not sent is sent by the next
RELAY_RESTART_S = 10.0
MOST_SAID = 20
HOUSEKEEPING_S = 3600.0
KEEP_FINE_USAGE_S = 14 * 86400


class AlreadyRunning(GpuschedError):
    """Another controller holds the lock."""


@contextlib.contextmanager
def controller_lock(state: Path) -> Iterator[Callable[[], None]]:
    """The right to be the one writer. The kernel gives it up when the process dies, however it dies.

    Yields:
        What raises `GpuschedError` where the state folder is not the one that was locked any more: it was removed, or
        put back from a copy. A controller that went on would take commands that are meant for another one.

    Raises:
        AlreadyRunning: Another process has it.
        GpuschedError: The lock's file cannot be opened.
    """
    state.mkdir(parents=True, exist_ok=True)
    path = state / "controller.lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise GpuschedError(
            f"{path} cannot be opened: {error.strerror}", "it must belong to the controller's user"
        ) from None
    with open(descriptor, "r+") as file:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o600 and os.fstat(descriptor).st_uid == os.getuid():
            os.fchmod(descriptor, 0o600)  # whoever can open it can lock it; earlier versions let all users read it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(20).strip() or "unknown"
            raise AlreadyRunning(f"a controller (pid {holder}) already runs on {state}", "only one may run") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        own = os.fstat(descriptor)

        def still_held() -> None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), own):
                    return
            raise GpuschedError(
                f"{state} was removed or replaced while this controller used it; it stops, jobs keep running",
                "start a controller on the new folder, and run 'gpusched check'",
            )

        yield still_held


class Service:
    """A controller with its store, inventory and connections."""

    def __init__(
        self,
        inventory_path: Path,
        state: Path,
        say: Callable[[str], None],
        clock: Clock | None = None,
        lock_wait: LockWait | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        self._path, self._state, self._say, self._prepare = inventory_path, state, say, prepare
        declared = declared_or_kept(inventory_path, state)
        inventory, policies = declared.inventory, declared.policies
        Inbox(state).create()
        self.store = Store.create_or_open(state, lock_wait or LockWait(state, say))
        self._publisher = Publisher(state, say)
        self.is_shared = False
        self._share(inventory)  # before anything that takes long: readers have what was last recorded
        cluster_id = self.store.meta("cluster_id")
        assert cluster_id is not None
        self.clock = clock or Clock()
        self.clock.resume(self.store.meta(ANCHOR), self.store.number("heartbeat", 0.0))
        self.store.set_meta(ANCHOR, self.clock.anchor())
        self.cluster = SshCluster(inventory, cluster_id, state / "logs", self.clock)
        self.cycle = self._new_cycle(inventory, policies)
        self._predictor: StartPredictor | None = StartPredictor(self.store)
        self._notices = NotificationService(self.store, say)
        self._files = self._stamp()
        self._housekept = -HOUSEKEEPING_S
        self._ran_s = 0.0  # how long the last cycle took
        self.store.set_meta("controller_pid", str(os.getpid()))
        self.store.set_meta("tick_s", str(inventory.settings.tick_s))
        self.store.set_meta("inventory", str(inventory_path.absolute()))
        self._event("controller_started", pid=os.getpid())
        self._take_note(declared)
        try:
            secure_logs(state, self.store, inventory)
        except OSError as error:
            say(f"output of earlier versions cannot be reclaimed: {error}; see {state / 'logs'}")
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile, or load what was compiled, before the first cycle: it takes long once, and then nobody waits."""
        from gpusched.compiled import is_on_disk
        from gpusched.sched.kernel.by_rule import pass_for
        from gpusched.sched.state import EASY

        if not is_on_disk(pass_for(EASY)):
            announce(self._state, COMPILING)
            self._say("compiling the scheduling passes (once only, about ten seconds)")
        warm_up(self.cycle.policies.values(), any(node.sharing for node in self.cycle.inventory.nodes))
        self.cycle.warm_up()
        announce(self._state)

    def _share(self, inventory: Inventory) -> None:
        """Open the state folder to the machine's other users, or close it, as the inventory says."""
        before, self.is_shared = self.is_shared, inventory.settings.shared or self._state == SHARED_STATE
        inbox = Inbox(self._state)
        if not self.is_shared:
            inbox.make_private()
            self._publisher.withdraw()
            return
        inbox.create(shared=True)
        self._publisher.start()
        if not before and not self._state.stat().st_mode & stat.S_IXOTH:
            self._say(f"settings.shared: other users cannot enter {self._state}; as its owner: chmod 755 {self._state}")

    def _event(self, kind: str, **data: object) -> None:
        self.store.append([Event(time=self.clock(), kind=kind, data=data)])

    def run(self, patience_s: float) -> None:
        """One cycle with a fresh look at the files."""
        begun = time.monotonic()
        self._reload()
        if step := follow_wall_clock(self.store, self.clock):
            self._begin_anew()
            self._say(
                f"this machine's clock was set by {step:+.0f} s; limits, retries and grace periods are unaffected"
            )
        self.cycle.run(patience_s)
        self.tell()
        if time.monotonic() - self._housekept > HOUSEKEEPING_S:
            self._housekept = time.monotonic()
            with self.store.transaction():
                self.store.compact_usage(self.clock() - KEEP_FINE_USAGE_S, 3600)
            rotate(self._state / "logs", self.cycle.inventory.settings.logs)
            self.cycle.inbox.tidy()
        self._ran_s = time.monotonic() - begun

    def tell(self, wait_s: float = 0.0) -> None:
        """Send notices of what is new, waiting so long for what becomes of them."""
        self._notices.step(self.cycle.inventory, self.clock(), wait_s)

    def predict_starts(self, budget_s: float = BUDGET_S) -> None:
        """Between two cycles: predict starts for the record. What goes wrong there must not stop the cluster."""
        if self._predictor is None:
            return
        try:
            self._predictor.step(self.cycle.inventory, self.clock(), budget_s)
        except STORE_FAULTS:
            raise
        except Exception as error:
            self._predictor.close()
            self._predictor = None
            self._say(f"start predictions are off until the controller restarts: {type(error).__name__}: {error}")
            self._event("foretelling_failed", why=f"{type(error).__name__}: {error}")

    def recover(self, error: Exception) -> None:
        """Go on after a cycle that could not write: nothing of it is in the store, so the next one begins from there.

        Jobs run on meanwhile; commands wait in the inbox.
        """
        self._say(f"this cycle could not be recorded in {self._state}: {error}; retrying, see 'gpusched check'")
        self._begin_anew()

    def set_aside(self, error: Damaged) -> None:
        """Set aside the rows that cannot be read, and go on without them.

        Raises:
            Damaged: There is none: it is more than a row.
        """
        try:
            rows = set_aside_damaged(self.store, self.clock())
        except STORAGE_ERRORS as problem:
            self.recover(problem)
            return
        if not rows:
            raise error
        _say_set_aside(rows, self._say)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget what the cycle remembers besides the store."""
        before = self.cycle
        before.close()
        self.cycle = self._new_cycle(before.inventory, before.policies)
        if isinstance(self.cycle, Cycle) and isinstance(before, Cycle):
            self.cycle.follow(before)
        self.cycle.inbox = before.inbox  # it knows what was put off

    def _new_cycle(self, inventory: Inventory, policies: dict[str, PolicySpec]) -> Cycle | SlurmCycle:
        if inventory.engine != "slurm":
            return Cycle(
                self.store, self._state, inventory, policies, self.cluster, self.clock, self._say, self._prepare
            )
        from gpusched.controller.slurm.applying import LeaseApplier
        from gpusched.controller.slurm.cycle import SlurmCycle
        from gpusched.slurm.commands import Slurm

        slurm = Slurm()
        applier = LeaseApplier(self.store, slurm, self._say)
        return SlurmCycle(
            self.store, self._state, inventory, policies, self.cluster, self.clock, self._say, slurm, applier
        )

    def _stamp(self) -> tuple[tuple[str, int], ...]:
        folders = policy_folders(self._path)
        patterns = ("*.yaml", f"*/{POLICY}", f"*/*{WEIGHTS}")
        files = [self._path, *(f for folder in folders for p in patterns for f in sorted(folder.glob(p)))]
        return tuple((str(f), f.stat().st_mtime_ns) for f in files if f.exists())

    def _reload(self) -> None:
        """Take up a changed inventory.yaml or policy; a broken one is reported and the old one stays in force."""
        stamp = self._stamp()
        if stamp == self._files:
            return
        try:
            declared = declared_or_kept(self._path, self._state)
        except GpuschedError as error:  # nothing is kept of it; what is in force here stays so
            declared = Declared(self.cycle.inventory, self.cycle.policies, error.line())
        self._take_note(declared)
        self._files = stamp  # only now: on a full disk it is tried again
        if declared.trouble:
            return
        inventory, policies = declared.inventory, declared.policies
        other_engine = inventory.engine != self.cycle.inventory.engine
        self.cycle.inventory, self.cycle.policies = inventory, policies
        if other_engine:
            self._begin_anew()
        self.cluster.use_inventory(inventory)
        self._share(inventory)
        self.store.set_meta("tick_s", str(inventory.settings.tick_s))
        self._say(f"reloaded {self._path}")
        self._event("inventory_reloaded")

    def _take_note(self, declared: Declared) -> None:
        """Keep what is in order, for a start beside files that are not; of these, tell everybody."""
        if declared.trouble and declared.trouble != self.store.meta(INVENTORY_TROUBLE):
            self._event("inventory_refused", why=declared.trouble)
        keep(self.store, declared)
        if declared.trouble:
            self._say(f"kept the old inventory: {declared.trouble}")

    def pause(self, stop: Stop) -> None:
        """Wait for the next tick, or for news: a command in the inbox, an operation or a job that ended.

        News end it at once, but not before it has lasted as long as the cycle did: many ends in a row leave time.
        """
        begun = now = time.monotonic()
        until = begun + self.cycle.inventory.settings.tick_s
        rested = begun + min(POLL_S, self._ran_s)
        while now < until and not stop.wait(rested - now if now < rested else POLL_S):
            now = time.monotonic()
            if now >= rested and (self.cluster.has_news() or self.cycle.inbox.has_any()):
                return

    def close(self) -> None:
        """Let go of everything; what runs on the nodes goes on."""
        with contextlib.suppress(*STORE_FAULTS):  # a full disk must not keep us from ending
            self._event("controller_stopped")
        if self._predictor is not None:
            self._predictor.close()
        self.cycle.close()
        self.cycle.inbox.close()
        self.cluster.close()
        self._publisher.stop()
        self.store.close()


class Stop:
    """That a signal asks for the end.

    No `threading.Event`: that has a lock, for which a handler waits for ever that comes while the main thread holds it.
    """

    def __init__(self) -> None:
        self._asked = False
        self._woken, self._waking = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)

    def set(self) -> None:
        """For a signal's handler."""
        self._asked = True
        self.wake()

    def wake(self) -> None:
        """End `wait` at once, from any thread or a signal's handler."""
        with contextlib.suppress(BlockingIOError):  # there is much that nobody has read: it wakes as well
            os.write(self._waking, b"\0")

    def is_set(self) -> bool:
        """Whether it was asked for."""
        return self._asked

    def wait(self, seconds: float) -> bool:
        """The same, after so long or when woken."""
        if not self._asked and self._poll.poll(1000 * seconds):
            os.read(self._woken, 65536)
        return self._asked


class LockWait:
    """How long the store's locks are waited for, and what is said meanwhile.

    Args:
        state: The state folder.
        say: Told within a second which file is locked, and by whom.
        stop: Ends the waiting.
        patience_s: The longest wait.
    """

    def __init__(
        self, state: Path, say: Callable[[str], None], stop: Stop | None = None, patience_s: float = LOCK_PATIENCE_S
    ) -> None:
        self._database, self._say, self._stop, self.patience_s = state / DATABASE, say, stop, patience_s
        self._told = ""

    def __call__(self, waited_s: float) -> bool:
        """Whether to go on waiting after so long; -1.0: it is over."""
        if waited_s < 0:
            if self._told:
                self._say("the store is free again")
            self._told = ""
            return True
        if waited_s >= LOCK_NAMED_S:
            unknown = f"an unknown process (try: fuser {self._database}-shm)"
            who = ", ".join(holders(self._database)) or unknown
            if who != self._told:
                self._told = who
                self._say(f"waiting for a lock on the store, held by {who}")
        return waited_s < self.patience_s and not (self._stop is not None and self._stop.is_set())


class Relaying:
    """Keeps the relay's process (`gpusched.controller.relay`) running beside the controller of a shared installation.

    Nothing waits for it: without it users cannot look into running jobs, and all else goes on.
    """

    def __init__(self, state: Path, inventory_path: Path, say: Callable[[str], None]) -> None:
        self._state, self._inventory_path, self._say = state, inventory_path, say
        self._process: subprocess.Popen[bytes] | None = None
        self._started = float("-inf")

    def watch(self) -> None:
        """Start it, or start it again."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._say(f"the relay to running jobs ended (exit code {self._process.returncode}); restarting it")
            self._forget()
        if time.monotonic() - self._started < RELAY_RESTART_S:
            return
        self._started = time.monotonic()
        # -P: the current folder, perhaps somebody else's, is no place to take code from.
        argv = [sys.executable, "-P", "-m", "gpusched.controller.relay", str(self._state), str(self._inventory_path)]
        paths = [str(Path(gpusched.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        except OSError as error:
            self._say(f"the relay to running jobs cannot be started: {error}")

    def close(self) -> None:
        """End it, with the sessions that it has."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                (self._state / SOCKET).unlink()
            self._process.kill()
            self._process.wait()
            self._forget()

    def _forget(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None


def open_service(
    inventory_path: Path,
    state: Path,
    say: Callable[[str], None],
    lock_wait: LockWait | None = None,
    prepare: Prepare | None = None,
) -> Service:
    """Return the controller, where need be after rows that cannot be read were set aside."""
    try:
        return Service(inventory_path, state, say, None, lock_wait, prepare)
    except Damaged:
        with contextlib.closing(Store.create_or_open(state, lock_wait)) as store:
            rows = set_aside_damaged(store, time.time())
        if not rows:
            raise
        _say_set_aside(rows, say)
        return Service(inventory_path, state, say, None, lock_wait, prepare)


def _say_set_aside(rows: Sequence[UnreadableRow], say: Callable[[str], None]) -> None:
    for row in rows[:MOST_SAID]:
        say(f"the database is damaged: {row.line}; set aside")
    if len(rows) > MOST_SAID:
        say(f"and {len(rows) - MOST_SAID} more rows, see the events row_set_aside")


def run_forever(inventory_path: Path, state: Path, say: Callable[[str], None], prepare: Prepare | None = None) -> None:
    """``gpusched controller``: cycles until SIGTERM or SIGINT. ``prepare``: see `Asking`.

    Raises:
        GpuschedError: The lock is taken, inventory, policies or store cannot be read, or the state folder was replaced.
    """
    stop = Stop()
    with controller_lock(state) as still_held, present(state):
        lock_wait = LockWait(state, say, stop, math.inf)  # to start again later would find the same lock
        service = open_service(inventory_path, state, say, lock_wait, prepare)
        lock_wait.patience_s = LOCK_PATIENCE_S
        service.cluster.watch_ends(stop.wake)
        relaying, relayed = Relaying(state, inventory_path, say), False
        outliving = _outliving(service, state, say)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        say(f"controller {os.getpid()} on {state}: {count_of(len(service.cycle.inventory.nodes), 'node')}")
        try:
            while not stop.is_set():
                if service.is_shared:
                    relaying.watch()
                elif relayed:
                    relaying.close()
                relayed = service.is_shared
                still_held()
                outliving()
                try:
                    service.run(PATIENCE_S)
                    service.predict_starts()
                except STORAGE_ERRORS as error:
                    service.recover(error)
                except Damaged as error:
                    service.set_aside(error)
                service.pause(stop)
        finally:
            relaying.close()
            service.close()


def _outliving(service: Service, state: Path, say: Callable[[str], None]) -> Callable[[], None]:
    """What keeps running beside a controller that decides for Slurm, to let go of its jobs there when it has died."""
    dead_man: DeadMan | None = None

    def watch() -> None:
        nonlocal dead_man
        if service.cycle.inventory.engine == "slurm":
            from gpusched.controller.slurm.deadman import DeadMan
            from gpusched.promotion.live import live_modes

            dead_man = dead_man or DeadMan(state, say)
            dead_man.watch(live_modes(service.cycle.inventory, service.store))

    return watch


def tick_once(inventory_path: Path, state: Path, say: Callable[[str], None], prepare: Prepare | None = None) -> None:
    """``gpusched tick``: the same cycle once, waiting for every node; again while its own operations bring news.

    Raises:
        GpuschedError: As for `run_forever`.
    """
    with controller_lock(state), present(state):
        service = open_service(inventory_path, state, say, prepare=prepare)
        service.store.set_meta("tick_s", str(max(CRON_S, service.cycle.inventory.settings.tick_s)))
        try:
            for _ in range(MAX_TICK_ROUNDS):
                try:
                    service.run(service.cycle.inventory.settings.probe_timeout_s + 1)
                except Damaged as error:
                    service.set_aside(error)
                    continue
                if not service.cluster.busy():
                    break
                service.cluster.wait_for_operations(60.0)
            service.predict_starts(TICK_PREDICTING_S)
            service.tell(TICK_TELLING_S)
        finally:
            service.close()
