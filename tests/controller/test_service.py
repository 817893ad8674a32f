"""The service around the cycle: what it does once an hour, files that change, clocks that are set, its end.

With real nodes: tests/e2e/test_failures_controller.py.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest

from gpusched.cluster.base import NodeObservation
from gpusched.controller import reporting
from gpusched.controller import service as module
from gpusched.controller.leadership import leadership
from gpusched.controller.recovery.unsettled import leave_unsettled
from gpusched.controller.service import Service, StopFlag, run_forever, tick_once
from gpusched.controller.slurm.cycle import SlurmCycle
from gpusched.errors import GpuschedError
from gpusched.model import ids
from gpusched.model.commands import Cancel, Submit
from gpusched.model.jobs import JobState
from gpusched.model.resources import Inventory, Node
from gpusched.nodes.fencing import TermRefused
from gpusched.queue.clock import ANCHOR, Clock
from gpusched.queue.damage import DatabaseDamaged, UnreadableRow
from gpusched.queue.inbox import Inbox
from gpusched.queue.lastgood import Declared
from gpusched.queue.lease import STANDBYS, TERM, Superseded, claim, highest_term
from gpusched.queue.presence import FILE, controller_of
from gpusched.queue.store import INVENTORY_TROUBLE, Reader, UsageRow
from gpusched.slurm.commands import NoAnswer
from tests.builders import spec
from tests.controller.applying import NOW
from tests.controller.declared import DECLARED
from tests.controller.imagined import Host, ImaginedCluster, World
from tests.logged import messages


class Nodes(ImaginedCluster):
    """The service's nodes. ``asked``: the patience of each cycle; ``trouble``: what the next one meets."""

    def __init__(self, world: World, dates: Clock) -> None:
        super().__init__(world, dates)
        self.waited: list[float] = []
        self.trouble: Exception | None = None
        self.declared: Inventory | None = None
        self.term = 0

    def observe(
        self,
        nodes: Iterable[Node],
        patience_s: float,
        known: Container[str] = frozenset(),
        drained: Container[str] = frozenset(),
    ) -> dict[str, NodeObservation]:
        self.waited.append(patience_s)
        self.trouble, trouble = None, self.trouble
        if trouble is not None:
            raise trouble
        return super().observe(nodes, patience_s, known, drained)

    def use_inventory(self, inventory: Inventory) -> None:
        self.declared = inventory

    def raise_term(self, term: int) -> None:
        self.term = term

    def watch_ends(self, wake: Callable[[], None]) -> None:
        pass

    def has_news(self) -> bool:
        return False

    def wait_for_operations(self, timeout_s: float) -> None:
        self.deliver(lambda _: "ok")
        self.world.progress()


class Installation:
    """A state folder, an inventory, imagined nodes; and clocks that only go on when a test says so."""

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.state, self.path, self._caplog = folder / "state", folder / "inventory.yaml", caplog
        self.path.write_text(DECLARED)
        self.world = World(hosts={name: Host(name) for name in ("n0", "n1", "n2")})
        self.ahead = 0.0  # the wall clock, of the boot clock
        self.services: list[Service] = []

    @property
    def said(self) -> list[str]:
        return messages(self._caplog)

    def start(self) -> Service:
        clock = Clock(lambda: self.world.now + self.ahead, lambda: self.world.now, "this")
        service = Service(self.path, self.state, clock)
        self.services.append(service)
        cluster = Nodes(self.world, clock)
        service.cluster.close()
        self.nodes = service.cluster = cluster  # type: ignore[assignment]
        service._replace_cycle()
        return service

    def change(self, text: str) -> None:
        before = self.path.stat().st_mtime_ns
        self.path.write_text(text)
        os.utime(self.path, ns=(before + 10**9,) * 2)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.services[-1].store.events()]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Installation]:
    site = Installation(tmp_path, caplog)
    monkeypatch.setattr(module.time, "monotonic", lambda: 10.0 + site.world.now - NOW)
    yield site
    monkeypatch.undo()
    for service in site.services:
        if service._predictor is not None:
            service._predictor.close()
        service.store.close()


def row(bucket: float) -> UsageRow:
    return UsageRow(bucket=int(bucket), node="n0", job_id="a", user="u", partition="p", gpu_s=1.0)


def test_the_controller_records_its_state_in_the_store(site: Installation) -> None:
    service = site.start()
    meta = service.store.meta
    assert (meta("controller_pid"), meta("tick_s"), meta("inventory")) == (str(os.getpid()), "7.0", str(site.path))
    assert meta(ANCHOR) == service.clock.anchor()
    assert (service.is_shared, (site.state / "inbox/new").stat().st_mode & 0o077) == (False, 0o055)
    assert site.kinds() == ["controller_started"]
    found = controller_of(site.state)
    assert found is not None
    assert (found.pid, found.doing) == (os.getpid(), "")
    service.close()
    reader = Reader.open(site.state)
    assert reader is not None
    assert [e.kind for e in reader.events()][-1] == "controller_stopped"
    reader.close()


def test_a_shared_installation_lets_others_in(site: Installation) -> None:
    site.path.write_text(DECLARED.replace("tick: 7s", "tick: 7s, shared: true"))
    assert site.start().is_shared
    assert (site.state / "inbox/new").stat().st_mode & 0o7777 == 0o3733


def test_a_start_that_finds_damage_leaves_no_publisher_behind(
    site: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.path.write_text(DECLARED.replace("tick: 7s", "tick: 7s, shared: true"))
    faults: list[Exception] = [DatabaseDamaged(None)]

    def warm_up(_: Service) -> None:
        if faults:
            raise faults.pop()

    before = set(threading.enumerate())
    monkeypatch.setattr(Service, "_warm_up", warm_up)
    monkeypatch.setattr(module, "set_aside_damaged", lambda *_: [UnreadableRow("jobs", {"id": "a"}, "it is spoilt")])
    service = module.open_service(site.path, site.state)
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["publisher"]
    service.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("count", "more"), [(1, 0), (20, 0), (21, 1), (42, 22)])
def test_of_many_damaged_rows_the_first_are_logged(
    site: Installation, monkeypatch: pytest.MonkeyPatch, count: int, more: int
) -> None:
    service = site.start()
    rows = [UnreadableRow("jobs", {"id": str(number)}, "spoilt") for number in range(count)]
    monkeypatch.setattr(module, "set_aside_damaged", lambda *_: rows)
    before = service.cycle
    service.set_aside(DatabaseDamaged(None))
    assert service.cycle is not before, "it is read anew"
    logged = [line for line in site.said if "set aside" in line]
    assert logged == [f"the database is damaged: {row.line}; set aside" for row in rows[:20]]
    assert [line for line in site.said if " more rows" in line] == (
        [f"and {more} more rows, see the events row_set_aside"] if more else []
    )


def test_damage_that_is_not_limited_to_rows_ends_the_controller_and_a_full_disk_does_not(
    site: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, damaged = site.start(), DatabaseDamaged(None)
    monkeypatch.setattr(module, "set_aside_damaged", lambda *_: [])
    with pytest.raises(DatabaseDamaged) as raised:
        service.set_aside(damaged)
    assert raised.value is damaged
    monkeypatch.setattr(module, "set_aside_damaged", Mock(side_effect=sqlite3.OperationalError("disk is full")))
    service.set_aside(damaged)
    assert site.said[-1].endswith(f"recorded in {site.state}: disk is full; retrying, see 'gpusched check'")


def test_an_audit_log_that_cannot_be_read_is_logged_once_and_tried_again(
    site: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, opened = site.start(), reporting.audit_stream
    monkeypatch.setattr(reporting, "audit_stream", Mock(side_effect=OSError("no permission")))
    for _ in range(3):
        service.run(0)
    line = "cannot read the audit log: no permission; entries are kept in the database"
    assert [said for said in site.said if "audit" in said] == [line]
    assert service._reporting._audit is None
    monkeypatch.setattr(reporting, "audit_stream", opened)
    service.run(0)
    assert service._reporting._audit is not None


def test_a_superseded_controller_changes_nothing_in_slurm(site: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm knows no terms: each change is preceded by a look at the lease."""
    monkeypatch.setenv("PATH", "")
    with leadership(site.state) as leads:
        service = site.start()
        service._leadership = leads
        beside = msgspec.structs.replace(service.cycle.inventory, engine="slurm")
        cycle = service._new_cycle(beside, service.cycle.policies)
        assert isinstance(cycle, SlurmCycle)
        with pytest.raises(NoAnswer):  # there is no scontrol
            cycle._slurm.update(["show nothing"])
        assert claim(site.state, leads.term + 1) is not None
        with pytest.raises(Superseded):
            cycle._slurm.update(["show nothing"])
        cycle.close()


def test_a_node_that_was_silent_at_a_recovery_may_have_seen_later_controllers(
    site: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It obeys the controller of the recovered store once that has a higher term; any other node's refusal counts."""
    with leadership(site.state) as leads:
        service = site.start()
        service._leadership = leads
        leave_unsettled(service.store, ["n1"], NOW, 0.0)
        service._replace_cycle()
        seen = leads.term + 7
        service._refused(TermRefused("n1", seen))
        with monkeypatch.context() as full:
            full.setattr(service.store, "raise_term", Mock(side_effect=sqlite3.OperationalError("full")))
            with pytest.raises(sqlite3.OperationalError, match="full"):
                service.run(0.0)
        service.run(0.0)
        assert (leads.term, site.nodes.term, leads.is_lost) == (seen + 1, seen + 1, False)
        assert (service.store.meta(TERM), highest_term(site.state)) == (str(seen + 1), seen + 1)
        leads.check()
        assert claim(site.state, seen + 9) is not None
        with pytest.raises(Superseded):
            leads.raise_term(seen + 8)
        service._refused(TermRefused("n0", seen + 9))
        assert leads.is_lost


def test_once_an_hour_it_tidies_up(site: Installation) -> None:
    service, logs = site.start(), site.state / "logs/job"
    logs.mkdir(parents=True)
    hour = NOW // 3600 * 3600
    old, young = hour - 15 * 86400, hour - 13 * 86400
    service.store.add_usage([row(b + s) for b in (old, young) for s in (300, 600)])

    def begin_anew() -> None:
        for number in (1, 2):
            path = logs / f"{number}.0.log"
            path.write_bytes(b"x" * (600 << 10))
            os.utime(path, (NOW + number,) * 2)
        draft = site.state / "inbox/tmp/draft"
        draft.touch()

    def left() -> list[str]:
        return sorted(path.name for path in logs.iterdir())

    begin_anew()
    service.run(0.0)  # the first cycle, too
    assert left() == ["2.0.log"], "the oldest output, above what the inventory allows"
    assert sorted(r.bucket for r in service.store.usage(0) if r.job_id == "a") == [old, young + 300, young + 600]
    begin_anew()
    for seconds, expected in ((3599.0, ["1.0.log", "2.0.log"]), (1.5, ["2.0.log"])):
        site.world.now += seconds
        service.run(0.0)
        assert left() == expected


def test_old_drafts_are_removed(site: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    service = site.start()
    (site.state / "inbox/tmp/draft").touch()
    monkeypatch.setattr("gpusched.queue.inbox.KEEP_DRAFTS_S", -1.0)
    service.run(0.0)
    assert not list((site.state / "inbox/tmp").iterdir())


def test_a_changed_inventory_is_taken_up_and_a_broken_one_is_not(site: Installation) -> None:
    service = site.start()
    service.run(0.0)
    assert "inventory_reloaded" not in site.kinds()
    site.change(DECLARED.replace("{name: n1}", "{name: n1}, {name: n2}").replace("tick: 7s", "tick: 9s"))
    service.run(0.0)
    assert [n.name for n in service.cycle.inventory.nodes] == ["n0", "n1", "n2"]
    assert site.nodes.declared is service.cycle.inventory
    assert (service.store.meta("tick_s"), site.said[-1]) == ("9.0", f"reloaded {site.path}")
    for text in ("partitions: [", "partitions: [ "):  # the same mistake, reported once
        site.change(text)
        service.run(0.0)
        service.run(0.0)
    assert len(service.cycle.inventory.nodes) == 3
    assert (site.kinds().count("inventory_reloaded"), site.kinds().count("inventory_refused")) == (1, 1)
    trouble = service.store.meta(INVENTORY_TROUBLE)
    assert trouble
    assert site.said[-2:] == [f"kept the old inventory: {trouble}"] * 2
    again = site.start()  # beside the broken file
    assert len(again.cycle.inventory.nodes) == 3
    assert site.kinds().count("inventory_refused") == 1
    site.change(DECLARED)
    again.run(0.0)
    assert (len(again.cycle.inventory.nodes), again.store.meta(INVENTORY_TROUBLE)) == (2, "")


def test_each_other_mistake_in_the_inventory_is_reported(site: Installation) -> None:
    service = site.start()
    for count, text in enumerate(("partitions: [", "partitions: 5", "partitions: ["), 1):
        site.change(text)
        for _ in range(2):  # in the first it may be half saved
            service.run(0.0)
        assert site.kinds().count("inventory_refused") == count


def test_a_half_saved_inventory_is_not_refused(site: Installation) -> None:
    service = site.start()
    site.change("")  # an editor's first step
    service.run(0.0)
    site.change(DECLARED.replace("tick: 7s", "tick: 9s"))
    service.run(0.0)
    assert service.store.meta("tick_s") == "9.0"
    assert "inventory_refused" not in site.kinds()


def test_a_change_within_the_resolution_of_the_clock_is_seen(site: Installation) -> None:
    service = site.start()
    status = site.path.stat()
    site.path.write_text(DECLARED.replace("tick: 7s", "tick: 11s"))
    os.utime(site.path, ns=(status.st_mtime_ns,) * 2)
    service.run(0.0)
    assert service.store.meta("tick_s") == "11.0"


def test_a_change_during_the_start_is_seen(site: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    read = module.declared_or_kept

    def changed_then(*given: Path) -> Declared:
        found = read(*given)
        site.change(DECLARED.replace("tick: 7s", "tick: 9s"))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(module, "declared_or_kept", changed_then)
        service = site.start()
    service.run(0.0)
    assert service.store.meta("tick_s") == "9.0"


def test_a_folder_of_policies_that_is_being_replaced_ends_no_controller(
    site: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = site.path.parent / "ours"
    policies.mkdir()
    (policies / "mine.yaml").write_text("order: fifo\n")
    site.path.write_text(DECLARED.replace("    nodes", "    policy: mine\n    nodes"))
    monkeypatch.setenv("GPUSCHED_POLICIES", str(policies))
    service = site.start()
    policies.rename(site.path.parent / "old")
    service.run(0.0)
    (site.path.parent / "old").rename(policies)
    service.run(0.0)
    assert "inventory_refused" not in site.kinds()
    policies.rename(site.path.parent / "old")
    for _ in range(2):
        service.run(0.0)
    assert "GPUSCHED_POLICIES names" in (service.store.meta(INVENTORY_TROUBLE) or "")
    assert service.cycle.policies["p"].name == "mine"


def test_a_policy_that_vanishes_between_two_looks_costs_no_cycle(
    site: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = site.path.parent / "policies" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text("order: fifo\n")
    service = site.start()
    real, seen = Path.stat, list[Path]()

    def vanishing(path: Path, **how: bool) -> os.stat_result:
        if path == mine:
            seen.append(path)
            if len(seen) > 1:
                raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, **how)

    monkeypatch.setattr(Path, "stat", vanishing)
    service.run(0.0)
    service.run(0.0)
    assert len(seen) > 1
    assert "inventory_refused" not in site.kinds()


def test_a_policy_of_ones_own_is_looked_at_as_well(site: Installation) -> None:
    policies = site.path.parent / "policies"
    policies.mkdir()
    (policies / "mine.yaml").write_text("order: fifo\n")
    site.path.write_text(DECLARED.replace("    nodes", "    policy: mine\n    nodes"))
    service = site.start()
    assert service.cycle.policies["p"].backfill == "none"
    (policies / "mine.yaml").write_text("order: fifo\nbackfill: easy\n")
    os.utime(policies / "mine.yaml", (1.0, 1.0))
    service.run(0.0)
    assert service.cycle.policies["p"].backfill == "easy"


def test_running_jobs_are_unaffected_by_a_clock_step(site: Installation) -> None:
    service = site.start()
    command = Submit(time=site.world.now, id=ids.mint(site.world.now), spec=spec(time_limit_s=600))
    service.cycle.inbox.deliver(command)
    service.run(0.0)
    held = service.cycle.inbox
    site.ahead = -900.0
    service.run(0.0)
    assert service.cycle.inbox is held, "it knows what was put off"
    job = service.store.job(command.id)
    assert job is not None
    assert job.submit_time == pytest.approx(command.time - 900.0, abs=1e-3)
    assert "this machine's clock was set by -900 s; limits, retries and grace periods are unaffected" in site.said
    before = len(site.said)
    service.run(0.0)
    assert site.said[before:] == []


def test_a_cycle_that_could_not_be_recorded_is_done_again(site: Installation) -> None:
    service = site.start()
    cycle, inbox = service.cycle, service.cycle.inbox
    service.recover(sqlite3.OperationalError("database or disk is full"))
    assert service.cycle is not cycle
    assert service.cycle.inbox is inbox
    assert "database or disk is full; retrying" in site.said[-1]
    before = len(site.said)
    service.recover(sqlite3.OperationalError("database or disk is full"))
    assert site.said[before:] == [], "a reason is logged once per minute"
    service.recover(sqlite3.OperationalError("disk I/O error"))
    site.world.now += 60.0
    service.recover(sqlite3.OperationalError("database or disk is full"))
    assert [line.split(": ")[1].split(";")[0] for line in site.said[before:]] == [
        "disk I/O error", "database or disk is full"
    ]  # fmt: skip
    command = Submit(time=site.world.now, id=ids.mint(site.world.now), spec=spec())
    service.cycle.inbox.deliver(command)
    service.run(0.0)
    job = service.store.job(command.id)
    assert job is not None
    assert job.state is JobState.STARTING


def test_a_prediction_that_fails_stops_nothing_but_itself(site: Installation) -> None:
    service = site.start()

    class Broken:
        calls = 0

        def step(self, *_: object) -> None:
            self.calls += 1
            raise ZeroDivisionError("oh")

        def close(self) -> None:
            self.calls += 100

    broken = Broken()
    service._predictor = broken  # type: ignore[assignment]
    service.predict_starts()
    service.predict_starts()
    assert broken.calls == 101, "asked once, and closed"
    assert site.said[-1] == "start predictions are off until the controller restarts: ZeroDivisionError: oh"
    assert site.kinds()[-1] == "start_prediction_failed"


def test_a_pause_ends_with_the_tick_with_news_or_on_request(site: Installation) -> None:
    service, news, waits = site.start(), [False], list[float]()

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            site.world.now += 1.0
            return len(waits) > 50

    service.cluster.has_news = lambda: news[0]  # type: ignore[method-assign]
    service.pause(Stop())
    assert len(waits) == 7, "a tick"
    assert max(waits) <= 0.5, "news is soon seen"
    news[0] = True
    service.pause(Stop())
    assert len(waits) == 8
    news[0] = False
    service.cycle.inbox.deliver(Cancel(time=NOW, job_ids=("x",)))
    service.pause(Stop())
    assert len(waits) == 9


def test_news_end_a_pause_no_sooner_than_after_the_duration_of_a_cycle(
    site: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends that come one after another leave the controller time for nothing else otherwise."""
    service, now, waits = site.start(), 0.0, list[float]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    service.cluster.has_news = lambda: True  # type: ignore[method-assign]

    class Woken(StopFlag):
        def wait(self, seconds: float) -> bool:
            nonlocal now
            waits.append(seconds)
            now += min(seconds, 0.03)
            return False

    for ran_s, rested_s in ((0.01, 0.01), (0.1, 0.1), (5.0, module.POLL_S)):
        service._last_cycle_s, now = ran_s, 0.0
        service.pause(Woken())
        assert now == pytest.approx(rested_s, abs=1e-9)
        assert waits[-1] <= 0.03


def test_the_duration_of_each_cycle_is_counted(site: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    service, now = site.start(), 0.125
    real, counted = service.cycle.run, list[float]()

    def run(patience_s: float) -> None:
        nonlocal now
        real(patience_s)
        now += 0.25

    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(service.cycle, "run", run)
    monkeypatch.setattr(service._reporting, "step", lambda cycle_s, _: counted.append(cycle_s))
    for _ in range(2):
        service.run(0)
    assert counted == [0.25, 0.25]


def test_totals_are_written_at_most_once_a_second(site: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    service, now, written = site.start(), 0.0, list[float]()
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(service._reporting._metering, "write", lambda: written.append(now))
    for moment in (100.0, 100.9, 101.0, 101.9, 102.5, 103.4, 109.0):
        now = moment
        service.run(0)
    assert written == [100.0, 101.0, 102.5, 109.0]


def test_standbys_are_recorded_and_logged_as_they_come_and_go(site: Installation) -> None:
    service = site.start()
    for names in ((), ("login1", "login2"), ("login1", "login2"), ("login2",), (), ()):
        service._record_standbys(SimpleNamespace(holder=SimpleNamespace(standbys=names)))  # type: ignore[arg-type]
        assert (service.store.meta(STANDBYS) or "") == ", ".join(names)
    assert site.said[-3:] == ["standbys: login1, login2", "standbys: login2", "standbys: none"]
    assert len([line for line in site.said if line.startswith("standbys")]) == 3


def test_a_wait_ends_when_it_is_woken() -> None:
    stop = StopFlag()
    for asked in (False, True):
        thread = threading.Timer(0.05, stop.set if asked else stop.wake)
        thread.start()
        assert stop.wait(300.0) is asked
        thread.join()
    assert stop.wait(300.0), "and from then on at once"
    for _ in range(100_000):
        stop.wake()
    assert stop.wait(300.0), "the pipe is full"


def test_without_any_inventory_that_was_ever_right_there_is_no_start(site: Installation) -> None:
    site.path.write_text("partitions: [")
    with pytest.raises(GpuschedError):
        site.start()


@pytest.fixture
def started(site: Installation, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installation]:
    """Start the service on the imagined nodes."""
    monkeypatch.setattr(module, "Service", lambda *_: site.start())
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield site
    for number, handler in before.items():
        signal.signal(number, handler)


def states(site: Installation) -> dict[str, int]:
    reader = Reader.open(site.state)
    assert reader is not None
    counts = reader.counts()
    reader.close()
    return counts


def submit(site: Installation) -> None:
    Inbox(site.state).create()
    Inbox(site.state).deliver(Submit(time=site.world.now, id=ids.mint(site.world.now), spec=spec()))


@pytest.mark.parametrize(("tick", "due_s"), [("7s", "60.0"), ("90s", "90.0")])
def test_a_tick_goes_on_while_its_own_works_bring_news(
    started: Installation, monkeypatch: pytest.MonkeyPatch, tick: str, due_s: str
) -> None:
    site = started
    site.path.write_text(DECLARED.replace("tick: 7s", f"tick: {tick}, probe_timeout: 4s"))
    submit(site)
    budgets: list[float] = []
    monkeypatch.setattr(Service, "predict_starts", lambda self, budget_s: budgets.append(budget_s))
    tick_once(site.path, site.state)
    assert budgets == [1.0], "it has no pause in which that could go on"
    assert states(site) == {"RUNNING": 1}
    assert site.nodes.waited == [5.0] * 2, "launched, then seen to run"
    reader = Reader.open(site.state)
    assert reader is not None
    assert reader.meta("tick_s") == due_s, "cron calls it no more often"
    assert [e.kind for e in reader.events()][-1] == "controller_stopped"
    reader.close()
    assert not (site.state / FILE).exists()
    tick_once(site.path, site.state)
    assert len(site.nodes.waited) == 1, "nothing is under way"


def test_a_tick_ends_while_works_go_on(started: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(started)
    monkeypatch.setattr(Nodes, "wait_for_operations", lambda self, timeout_s: None)
    tick_once(started.path, started.state)
    assert len(started.nodes.waited) == 4
    assert states(started) == {"STARTING": 1}


@pytest.mark.parametrize("shared", [False, True])
def test_cycles_go_on_through_trouble_until_it_is_stopped(
    started: Installation, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    site, relays = started, list[str]()
    if shared:
        site.path.write_text(DECLARED.replace("tick: 7s", "tick: 7s, shared: true"))

    class Relaying:
        def __init__(self, *_: object) -> None:
            pass

        def watch(self) -> None:
            relays.append("watch")

        def close(self) -> None:
            relays.append("close")

    def pause(service: Service, stop: threading.Event) -> None:
        assert controller_of(site.state) is not None
        assert (site.state / "controller.lock").read_text() == str(os.getpid())
        site.world.now += 1
        cycles = len(site.nodes.waited)
        if cycles == 1:
            site.nodes.trouble = OSError("no room")
        elif cycles == 4:
            signal.raise_signal(signal.SIGTERM)
            assert stop.is_set()

    monkeypatch.setattr(module, "RelayProcess", Relaying)
    monkeypatch.setattr(Service, "pause", pause)
    monkeypatch.setattr(Service, "predict_starts", lambda self: relays.append("predict_starts") if not shared else None)
    run_forever(site.path, site.state)
    assert site.nodes.waited == [3.0] * 4
    assert relays == (["watch"] * 4 if shared else ["predict_starts"] * 3) + ["close"]
    assert len([line for line in site.said if "could not be recorded" in line and "no room" in line]) == 1
    assert f"controller {os.getpid()} on {site.state}: 2 nodes" in site.said
    assert not (site.state / FILE).exists()


def test_signals_that_come_at_any_moment_of_a_wait_end_it() -> None:
    """An Event's lock may be held by the very thread whose handler would take it."""
    code = """
import signal
from gpusched.controller.service import StopFlag
stops = [StopFlag() for _ in range(2000)]
signal.signal(signal.SIGALRM, lambda *_: stops[0].set())
signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
while stops:
    if stops[0].wait(0.0002):
        stops.pop(0)
    if len(stops) == 1:
        signal.setitimer(signal.ITIMER_REAL, 0)
        stops[0].set()
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout, done.stderr) == ("ended\n", "")
