"""Cuts of GPUs by the controller: never on a GPU in use, and whatever is lost, the node's own state decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.cluster.base import Operation
from gpusched.controller.cutting import ORPHAN_S, shows
from gpusched.controller.cycle import Cycle
from gpusched.model.jobs import JobState
from gpusched.model.readings import GpuProcess
from gpusched.model.resources import Inventory, RuntimeName
from gpusched.model.slices import Cut, gpu_of
from gpusched.model.snapshot import Snapshot
from gpusched.queue.store import CutState
from tests.builders import spec
from tests.controller.crash_orders import POLICIES
from tests.controller.imagined import GPUS, ImaginedCluster, on_demand
from tests.controller.site import Site
from tests.queue.records import NOW
from tests.queue.records import job as job_record

ASKING = "0000000000a"
HALVES = (("3g.40gb", 0), ("3g.40gb", 4))
SEVEN = tuple(("1g.10gb", start) for start in range(7))


class CutSite(Site):
    """A site whose planner asks for what the test wants."""

    wanted: tuple[Cut, ...] = ()
    asked = 0  # how often it was

    def begin(self, declared: Inventory) -> None:
        self.cluster = ImaginedCluster(self.world)
        self.cycle = Cycle(
            self.store, self.state, declared, POLICIES, self.cluster, clock=lambda: self.world.now, arrange=self.arrange
        )  # fmt: skip

    def turn(self, times: int = 1, seconds: float = 6, heard: bool = True) -> None:
        """Longer than a tick, so that all nodes are observed."""
        super().turn(times, seconds, heard)

    def arrange(self, snapshot: Snapshot) -> Iterable[Cut]:
        self.asked += 1
        return self.wanted

    def ask(self) -> None:
        """Have a job wait for slices, which never starts: else nothing is cut."""
        wants = spec(nodes=1, gpus_per_node=1, profile="1g.10gb")
        self.store.put_jobs(
            [job_record(ASKING, JobState.PENDING, spec=wants, held_by="user", allocation=None, ending=None)]
        )

    def cut_of(self, gpu: int, node: str = "n0") -> CutState | None:
        record = self.store.node_record(node)
        assert record is not None
        return record.cuts.get(gpu)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.store.events(node="n0") if event.kind.startswith("gpu_c")]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CutSite]:
    found = CutSite(tmp_path)
    found.begin(on_demand())
    found.turn()
    found.ask()
    yield found
    found.store.close()


def answer(verdict: str) -> Callable[[Operation], str]:
    return lambda operation: verdict if operation.verb == "cut" else "ok"


def test_a_gpu_is_cut_and_made_whole(site: CutSite) -> None:
    site.wanted = (Cut("n0", 2, HALVES),)
    site.turn(heard=False)
    state = site.cut_of(2)
    assert state is not None
    assert state.under_way
    site.turn(3)
    assert site.world.hosts["n0"].mig == {2: HALVES}
    assert site.cut_of(2) is None
    site.wanted = (Cut("n0", 2),)
    site.turn(3)
    assert site.world.hosts["n0"].mig == {}
    assert len(site.world.hosts["n0"].cuts) == 2, "what is there already is not cut again"
    assert site.kinds() == ["gpu_cutting", "gpu_cut"] * 2


def test_without_jobs_for_slices_nothing_is_looked_for_once_all_gpus_are_whole(site: CutSite) -> None:
    site.wanted = (Cut("n0", 2, HALVES),)
    site.turn(3)
    asking = site.job(ASKING)
    site.store.put_jobs([msgspec.structs.replace(asking, state=JobState.CANCELLED, end_time=NOW)])
    site.wanted = (Cut("n0", 2),)
    site.turn(4)  # what nobody asks for is made whole
    assert site.world.hosts["n0"].mig == {}
    before = site.asked
    site.submit(spec=spec(nodes=1, gpus_per_node=1))
    site.turn(3)
    assert site.asked == before
    site.ask()
    site.turn(3)
    assert site.asked == before + 3


def test_no_job_starts_on_a_gpu_while_it_is_cut(site: CutSite) -> None:
    site.wanted = tuple(Cut(f"n{n}", g, HALVES) for n in range(3) for g in range(GPUS) if (n, g) != (1, 3))
    site.turn(heard=False)
    job = site.submit(spec=spec(nodes=1, gpus_per_node=1))
    other = site.submit(spec=spec(nodes=1, gpus_per_node=1))
    site.turn(heard=False)
    parts = [part for held in site.store.active() if held.allocation for part in held.allocation.parts]
    assert [(part.node, part.gpus) for part in parts] == [("n1", (3,))]
    assert {site.job(job).state, site.job(other).state} == {JobState.STARTING, JobState.PENDING}


@pytest.mark.parametrize("ends", [False, True])
def test_a_gpu_with_a_job_is_left_alone_until_nothing_is_on_it(site: CutSite, ends: bool) -> None:
    job = site.submit(spec=spec(nodes=1, gpus_per_node=1))
    site.turn(4)
    (part,) = site.job(job).allocation.parts  # type: ignore[union-attr]
    site.wanted = (Cut(part.node, part.gpus[0], SEVEN),)
    site.turn(3)
    assert site.cut_of(part.gpus[0], part.node) is None, "it was not even tried"
    if ends:
        for host, box in site.world.running():
            site.world.end(box, 0)
            assert host.name == part.node
        site.turn(12)
        assert site.store.ranks() == []
        assert site.world.hosts[part.node].mig == {part.gpus[0]: SEVEN}


def test_a_job_that_started_in_the_same_cycle_goes_before(site: CutSite) -> None:
    job = site.submit(spec=spec(nodes=1, gpus_per_node=GPUS))
    site.wanted = tuple(Cut(f"n{n}", g, SEVEN) for n in range(3) for g in range(GPUS))
    site.turn()
    (part,) = site.job(job).allocation.parts  # type: ignore[union-attr]
    site.turn(6)
    assert [site.cut_of(gpu, part.node) for gpu in range(GPUS)] == [None] * GPUS
    assert site.job(job).state is JobState.RUNNING


def test_a_gpu_with_a_strangers_process_is_left_alone(site: CutSite) -> None:
    host = site.world.hosts["n0"]
    plain = host.gpu
    host.gpu = lambda index, now: msgspec.structs.replace(plain(index, now), processes=(GpuProcess(pid=7),))  # type: ignore[method-assign]
    site.turn()
    site.wanted = (Cut("n0", 0, SEVEN),)
    site.turn(2)
    assert site.kinds() == []
    host.gpu = plain  # type: ignore[method-assign]
    site.turn(4)
    assert host.mig == {0: SEVEN}


def test_a_gpu_that_cannot_be_read_is_left_alone(site: CutSite) -> None:
    host = site.world.hosts["n0"]
    plain = host.gpu
    host.gpu = lambda index, now: msgspec.structs.replace(plain(index, now), error="lost")  # type: ignore[method-assign]
    site.turn()
    site.wanted = (Cut("n0", 0, SEVEN),)
    site.turn(2)
    assert (site.kinds().count("gpu_cutting"), host.mig) == (0, {})


def test_an_answer_is_not_judged_by_an_older_reading(site: CutSite) -> None:
    site.wanted = (Cut("n0", 0, SEVEN),)
    site.turn(heard=False)
    site.cluster.overtaken("n0")  # before the node is done
    site.cluster.deliver(answer("ok"))
    site.turn(heard=False)
    assert site.kinds() == ["gpu_cutting"] or site.kinds() == ["gpu_cutting", "gpu_cut"]
    site.turn(2)
    assert site.kinds() == ["gpu_cutting", "gpu_cut"]


def test_only_gpus_that_are_declared_so_are_cut(site: CutSite) -> None:
    site.cycle.inventory = on_demand((1,))
    site.wanted = tuple(Cut("n0", gpu, SEVEN) for gpu in range(GPUS))
    site.turn(3)
    assert site.world.hosts["n0"].mig == {1: SEVEN}


def test_an_error_of_the_planner_costs_no_cycle(site: CutSite, caplog: pytest.LogCaptureFixture) -> None:
    site.arrange = lambda snapshot: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    site.restart()
    job = site.submit(spec=spec(nodes=1, gpus_per_node=1))
    site.turn(4)
    assert site.job(job).state is JobState.RUNNING
    assert [r.message for r in caplog.records if "cut" in r.message] == [
        "no GPU is cut on demand: ZeroDivisionError: integer division or modulo by zero"
    ]


def test_a_drained_node_is_left_as_it_is(site: CutSite) -> None:
    record = site.store.node_record("n0")
    assert record is not None
    with site.store.transaction():
        site.store.put_nodes([msgspec.structs.replace(record, drain_reason="fans", drained_by="root")])
    site.wanted = (Cut("n0", 0, SEVEN),)
    site.turn(3)
    assert site.world.hosts["n0"].cuts == []


def test_a_refused_cut_is_tried_again_ever_more_seldom(site: CutSite) -> None:
    host = site.world.hosts["n0"]
    host.cut = lambda cut, half=False: "Failed to create GPU instances: Insufficient Resources"  # type: ignore[method-assign]
    site.wanted = (Cut("n0", 0, SEVEN),)
    site.turn(3)
    state = site.cut_of(0)
    assert state is not None
    assert (state.failures, state.error) == (1, "Failed to create GPU instances: Insufficient Resources")
    assert not state.under_way
    site.turn(3, seconds=10)
    assert site.kinds() == ["gpu_cutting", "gpu_cut_failed"]
    site.turn(4, seconds=30)
    state = site.cut_of(0)
    assert state is not None
    assert state.failures == 2
    assert state.retry_at is not None
    assert state.ended is not None
    assert state.retry_at - state.ended >= 120


@pytest.mark.parametrize("fate", ["lost", "unheard", "half"])
def test_a_cut_without_answer_is_read_when_the_node_must_be_done(site: CutSite, fate: str) -> None:
    site.wanted = (Cut("n0", 0, SEVEN),)
    site.turn(heard=False)
    site.cluster.deliver(answer(fate))
    site.turn(5, heard=False)
    state = site.cut_of(0)
    assert state is not None
    assert state.under_way, "its script may still be at work"
    site.turn(2, seconds=ORPHAN_S)
    if fate == "unheard":
        assert site.cut_of(0) is None
    else:
        site.turn(3, seconds=100)
    site.turn(3)
    assert site.world.hosts["n0"].mig == {0: SEVEN}


def test_an_orphan_that_is_done_is_settled_at_once_where_no_file_follows(site: CutSite) -> None:
    for runtime, at_once in ((RuntimeName.PODMAN, False), (RuntimeName.PROCESS, True)):
        declared = on_demand()
        (partition,) = declared.partitions
        nodes = tuple(msgspec.structs.replace(node, runtime=runtime) for node in partition.nodes)
        site.cycle.inventory = msgspec.structs.replace(
            declared, partitions=(msgspec.structs.replace(partition, nodes=nodes),)
        )
        site.wanted = (Cut("n0", 0, SEVEN if at_once else HALVES),)
        site.turn(heard=False)
        site.cluster.deliver(answer("unheard"))
        site.restart()
        site.turn(heard=False)
        assert (site.cut_of(0) is None) is at_once
        site.turn(2, seconds=ORPHAN_S)
        assert site.cut_of(0) is None


def test_a_node_that_is_still_at_work_is_not_given_up(site: CutSite) -> None:
    site.wanted = (Cut("n0", 0, SEVEN),)
    site.turn(3, seconds=ORPHAN_S, heard=False)
    assert site.kinds() == ["gpu_cutting"]
    site.turn(2)
    assert site.kinds() == ["gpu_cutting", "gpu_cut"]


@pytest.mark.parametrize("moment", range(4))
@pytest.mark.parametrize("fate", ["ok", "lost", "unheard", "half"])
def test_a_controller_that_is_killed_leaves_the_rest_to_the_next(site: CutSite, moment: int, fate: str) -> None:
    site.wanted = (Cut("n0", 0, SEVEN), Cut("n0", 1, HALVES))
    for step in range(4):
        if step == moment:
            site.cluster.deliver(answer(fate))
            site.restart()
        site.turn(heard=step > moment)
    site.turn(8, seconds=60)
    assert site.world.hosts["n0"].mig == {0: SEVEN, 1: HALVES}
    assert site.cut_of(0) is site.cut_of(1) is None


Step = tuple[str, list[str], int, tuple[tuple[str, int], ...]]
STEP = st.sampled_from(["turn", "late", "kill", "submit", "end", "down", "up", "want"])
FATES = st.lists(st.sampled_from(["ok", "ok", "lost", "unheard", "half", "wait"]), min_size=1, max_size=3)
GEOMETRY = st.sampled_from([(), HALVES, SEVEN])


@given(st.lists(st.tuples(STEP, FATES, st.integers(0, 3), GEOMETRY), max_size=25))
@settings(max_examples=60, deadline=None)
def test_whatever_is_lost_nothing_in_use_is_cut(steps: list[Step]) -> None:
    with TemporaryDirectory() as folder:
        site = CutSite(Path(folder))
        site.begin(on_demand())
        site.ask()
        for step, fates, number, geometry in steps:
            host = site.world.hosts[f"n{number % 2}"]
            if step == "want":
                site.wanted = (*(c for c in site.wanted if c.gpu != number), Cut(host.name, number, geometry))
            elif step == "submit":
                site.submit(spec=spec(nodes=1, gpus_per_node=1 + number % 2))
            elif step == "kill":
                site.restart()
            elif step == "end":
                for _, box in site.world.running()[:1]:
                    site.world.end(box, 0)
            elif step in ("down", "up"):
                host.up = step == "up"
            before = {name: dict(h.mig) for name, h in site.world.hosts.items()}
            used = {(h.name, gpu_of(g)) for h, box in site.world.running() for g in box.gpus}
            site.turn(seconds=40 if step == "late" else 1, heard=False)
            site.cluster.deliver(lambda operation, left=iter(fates): next(left, "ok"))
            for name, gpu in used:
                assert site.world.hosts[name].mig.get(gpu) == before[name].get(gpu)
        for host in site.world.hosts.values():
            host.up = True
        site.wanted = tuple(Cut("n0", gpu, SEVEN) for gpu in range(GPUS)) if len(steps) % 2 else ()
        for _ in range(12):
            for _, box in site.world.running():
                site.world.end(box, 0)
            site.turn(seconds=400)
        for cut in site.wanted:
            assert shows(site.world.hosts["n0"].gpu(cut.gpu, 0), cut)
        site.store.close()
