"""Sizes of pending resizable jobs, and resizes of running ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.agents.base import REGISTRY, AgentParts
from gpusched.config.policies import load_policy
from gpusched.config.weights import TrainedModel
from gpusched.errors import FileError
from gpusched.model.jobs import JobState, Resizes
from gpusched.model.plan import Plan, Resize, Start
from gpusched.model.policy import AGENTS, AgentTraits, Resizing
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from gpusched.sched.arrays import node_arrays_of
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.sizing.live import Sized, pace_of, sizes_of
from gpusched.sched.sizing.question import Question, SizingNodes
from gpusched.sched.sizing.rules import RULES, wish
from gpusched.sched.sizing.settle import gather, settle
from gpusched.sched.sizing.shapes import over_fewest, rooms_of
from gpusched.sched.tally import covers
from gpusched.sched.warming import warm_up
from tests.sched.sizes import PERFECT, POLICY, QUICK, runs, spec, waits, world
from tests.sched.worlds import NOW, node, pending, running
from tests.strategies import among


def sized(snapshot: Snapshot) -> Sized:
    return sizes_of(snapshot, node_arrays_of(snapshot))


def started(snapshot: Snapshot) -> dict[str, int]:
    plan, rejections = check(decide(snapshot), snapshot)
    assert rejections == ()
    return {
        a.job_id: sum(len(p.gpus) for p in a.allocation.parts) for a in plan.actions if isinstance(a, Start)
    }  # fmt: skip


def resized(snapshot: Snapshot) -> dict[str, int]:
    plan, rejections = check(decide(snapshot), snapshot)
    assert rejections == ()
    return {a.job_id: a.gpus for a in plan.actions if isinstance(a, Resize)}


def test_a_single_job_starts_with_its_maximum() -> None:
    assert started(world([waits("a", 1, 2, 4, 8)], [])) == {"a": 8}
    assert started(world([waits("a", 1, 2, 4, 8, 16)], [])) == {"a": 16}
    assert started(world([waits("a", 1, 2, 4, 8, 32)], [])) == {"a": 8}, "32 fit nowhere"


def test_it_starts_on_what_is_free() -> None:
    rigid = running("r", {"n0": (0, 1, 2, 3, 4, 5, 6, 7), "n1": (0, 1, 2)}, NOW + 60)
    assert started(world([waits("a", 1, 2, 4, 8)], [rigid])) == {"a": 4}


def test_two_jobs_share_and_the_one_that_gains_more_gets_more() -> None:
    flat = {1: 1.0, 2: 1.05, 4: 1.06, 8: 1.07}
    assert started(world([waits("a", 1, 2, 4, 8), waits("b", 1, 2, 4, 8)], [], nodes=1)) == {"a": 4, "b": 4}
    jobs = [waits("a", 1, 2, 4, 8, speeds=flat), waits("b", 1, 2, 4, speeds=PERFECT)]
    found = started(world(jobs, [], nodes=1))
    assert found["b"] == 4
    assert found["a"] in (2, 4)


def test_it_grows_into_what_is_free_and_says_how_much_faster_it_gets() -> None:
    snapshot = world([], [runs("a", {"n0": (0, 1)}, 1, 2, 4, 8)])
    assert resized(snapshot) == {"a": 8}
    (found,) = sized(snapshot).resizes
    assert found.why == "grows from 2 to 8 free GPUs: 4.00 times as fast (reported)"


def test_it_shrinks_for_one_that_waits_by_no_more_than_that_needs() -> None:
    busy = [runs("a", {"n0": tuple(range(8))}, 1, 2, 4, 8), running("r", {"n1": tuple(range(8))}, NOW + 60)]
    assert resized(world([pending("j", 4)], busy)) == {"a": 4}
    assert resized(world([pending("j", 6)], busy)) == {"a": 2}
    assert resized(world([pending("j", 8)], busy)) == {}, "it keeps its least size, so nothing would come of it"
    (found,) = sized(world([pending("j", 4)], busy)).resizes
    assert found.why == "shrinks from 8 to 4 GPUs for j"


def test_it_does_not_shrink_for_a_resizable_one_where_somebody_ends_soon() -> None:
    costs = Resizes(count=1, costs_s=30.0, measured=1)
    whole = {"n0": tuple(range(8))}
    for ends_in, expected in ((299.0, {}), (301.0, {"a": 4})):
        busy = [runs("a", whole, 1, 2, 4, 8, resizes=costs, own_end=NOW + ends_in)]
        assert resized(world([waits("b", 4, 8)], busy, nodes=1)) == expected
    assert resized(world([pending("r", 4)], [runs("a", whole, 4, 8, own_end=NOW + 9.0)], nodes=1)) == {"a": 4}, "rigid"


def test_it_does_not_grow_for_a_moment() -> None:
    costs = Resizes(count=1, costs_s=60.0, measured=1)
    for gap, expected in ((30.0, {}), (90.0, {"a": 4})):
        late = [runs(f"r{n}", {"n1": (n,)}, 1, start_time=NOW - 1, submit_time=NOW - gap * (7 - n)) for n in range(7)]
        grows = runs("a", {"n0": (0, 1)}, 2, 4, resizes=costs, submit_time=NOW - gap * 8)
        assert resized(world([], [grows, *late])) == expected, gap
    assert resized(world([], [runs("a", {"n0": (0, 1)}, 2, 4, resizes=costs, own_end=NOW + 50.0)])) == {}, "nearly done"


def test_no_job_is_shrunk_for_one_that_still_would_not_fit() -> None:
    ends = [running(f"r{n}", {f"n{n}": (7,)}, NOW + 9000) for n in range(2)]
    busy = [*ends, runs("a", {"n1": tuple(range(7))}, 6, 7)]
    assert resized(world([pending("j", 8)], busy)) == {}, "eight GPUs in all, but on no node"
    assert resized(world([pending("j", 4, nodes=2)], [*ends, runs("a", {"n1": tuple(range(7))}, 3, 7)])) == {"a": 3}


def test_the_job_that_gains_least_shrinks_first() -> None:
    flat = {1: 1.0, 2: 1.9, 4: 1.95}
    busy = [runs("a", {"n0": (0, 1, 2, 3)}, 1, 2, 4), runs("b", {"n0": (4, 5, 6, 7)}, 1, 2, 4, speeds=flat)]
    assert resized(world([pending("j", 2)], busy, nodes=1)) == {"b": 2}


def test_a_job_that_cannot_use_more_does_not_grow() -> None:
    flat = {1: 1.0, 2: 1.9, 4: 1.95, 8: 1.97}
    assert resized(world([], [runs("a", {"n0": (0, 1)}, 1, 2, 4, 8, speeds=flat)])) == {}


def test_the_cost_of_a_stop_is_weighed() -> None:
    costly = Resizes(count=3, costs_s=5400.0, measured=3)  # half an hour each, of an hour and a half that it is old
    snapshot = world([], [runs("a", {"n0": (0, 1, 2, 3)}, 4, 5, resizes=costly, speeds={4: 4.0, 5: 5.0})])
    assert resized(snapshot) == {}
    cheap = Resizes(count=3, costs_s=9.0, measured=3)
    snapshot = world([], [runs("a", {"n0": (0, 1, 2, 3)}, 4, 5, resizes=cheap, speeds={4: 4.0, 5: 5.0})])
    assert resized(snapshot) == {"a": 5}


@pytest.mark.parametrize(
    "braked",
    [
        {"start_time": NOW - 59.0},
        {"state": JobState.COMPLETING},
        {"resizes": Resizes(frozen="it did not save its work")},
        {"resizes": Resizes(times=(NOW - 3000.0, NOW - 10.0))},
    ],
)
def test_brakes_hold(braked: dict[str, Any]) -> None:
    rules = msgspec.structs.replace(QUICK, min_run_s=60.0, per_hour=2)
    assert resized(world([], [runs("a", {"n0": (0, 1)}, 1, 2, 4, 8, **braked)], resize=rules)) == {}
    assert resized(world([], [runs("a", {"n0": (0, 1)}, 1, 2, 4, 8)], resize=rules)) == {"a": 8}


def test_a_size_at_which_it_did_not_come_up_is_not_tried_again() -> None:
    bad = Resizes(unusable=(8,))
    assert resized(world([], [runs("a", {"n0": (0, 1)}, 1, 2, 4, 8, resizes=bad)])) == {"a": 4}


def test_a_job_that_failed_at_every_size_is_tried_at_its_base_size_again() -> None:
    job = msgspec.structs.replace(waits("w", 1), spec=spec(1, 2, 4, base=2), resizes=Resizes(unusable=(1, 2, 4)))
    assert sized(world([job], [])).given == started(world([job], [])) == {"w": 2}


def test_a_job_stopped_for_a_resize_goes_before_all_others() -> None:
    stopped = msgspec.structs.replace(waits("z", 1, 2, 4, 8, submit=900.0), resume_at=4)
    jobs = [pending("a", 8, priority=1000), pending("b", 8), stopped]
    assert started(world(jobs, [], nodes=1)) == {"z": 4}
    assert started(world([stopped], [], nodes=2)) == {"z": 4}, "it was stopped for 4, whatever is free now"
    rigid = running("r", {"n0": (0, 1, 2, 3, 4)}, NOW + 60)
    assert started(world([stopped], [rigid], nodes=1)) == {"z": 2}, "others took the room"


def test_other_partitions_and_policies_are_left_alone() -> None:
    base = world([waits("a", 1, 2, 4)], [runs("b", {"n0": (0,)}, 1, 2)], sizes="base")
    assert sized(base) == Sized(base)
    assert started(base) == {"a": 1}


def test_shapes_are_whole_and_equal() -> None:
    machines = [node("a"), node("b"), node("c", gpus=4)]
    rooms = rooms_of(spec(1, 2, 3), machines)
    found = {g: over_fewest(spec(1, 2, 3), g, rooms) for g in (1, 8, 12, 16, 17, 24)}
    assert {g: s and (s.nodes, s.gpus_per_node, s.cores_per_node) for g, s in found.items()} == {
        1: (1, 1, 1), 8: (1, 8, 8), 12: (2, 6, 6), 16: (2, 8, 8), 17: None, 24: None
    }  # fmt: skip


def test_speeds_between_and_beyond_what_is_known() -> None:
    assert pace_of({}, 4) == pytest.approx(4**0.8, abs=1e-12)
    assert pace_of({2: 3.0}, 4) == pytest.approx(3 * 2**0.8, abs=1e-12)
    known = {2: 2.0, 8: 4.0}  # the square root
    assert [pace_of(known, g) for g in (2, 4, 8, 32)] == pytest.approx([2, 2 * 2**0.5, 4, 8], abs=1e-12)
    assert pace_of(known, 1) == pytest.approx(2 / 2**0.5, abs=1e-12)
    assert pace_of({2: 5.0, 8: 4.0}, 32) == 4.0, "one that gets slower is taken not to gain"
    assert pace_of({1: 1.0, 2: 3.0}, 4) == 6.0, "nor does anything gain more than the GPUs"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_nothing_is_given_twice_and_the_same_is_decided_again(data: st.DataObject) -> None:
    menu = st.sampled_from([(1, 2, 4, 8), (2, 4), (1, 8, 16), (4,), (3, 6)])
    busy: list[RunningView] = []
    free = {f"n{i}": list(range(8)) for i in range(3)}
    for number in range(data.draw(st.integers(0, 5))):
        sizes = data.draw(menu)
        gpus, where = data.draw(among(*sizes)), data.draw(among(*free))
        if gpus <= len(free[where]):
            taken = tuple(free[where][:gpus])
            del free[where][:gpus]
            times = tuple(NOW - s for s in data.draw(st.lists(st.integers(1, 3000), max_size=2)))
            known = {g: data.draw(st.floats(0.1, 50)) for g in data.draw(st.sets(among(*sizes)))}
            busy.append(runs(f"r{number}", {where: taken}, *sizes, speeds=known, resizes=Resizes(times=times)))
    jobs = [
        waits(f"w{n}", *data.draw(menu)) if data.draw(st.booleans()) else pending(f"w{n}", data.draw(st.integers(1, 8)))
        for n in range(data.draw(st.integers(0, 6)))
    ]
    snapshot = world(jobs, busy, nodes=3, sizes=data.draw(among(*RULES)))
    plan = decide(snapshot)
    assert decide(snapshot) == plan
    kept, rejections = check(plan, snapshot)
    assert rejections == ()
    held = sum(len(p.gpus) for r in busy for p in r.allocation.parts)
    begun = sum(len(p.gpus) for a in kept.actions if isinstance(a, Start) for p in a.allocation.parts)
    assert held + begun <= 24
    before = {r.id: r.spec.gpus for r in busy if r.spec is not None}
    grown = sum(max(0, a.gpus - before[a.job_id]) for a in kept.actions if isinstance(a, Resize))
    assert held + begun + grown <= 24, "nobody grows into what another only lets go of"
    for action in kept.actions:
        if isinstance(action, Resize):
            sizes = next(r.spec.elastic.sizes for r in busy if r.id == action.job_id and r.spec and r.spec.elastic)
            assert action.gpus in sizes


def ranged(view: PendingView, **ranges: tuple[int, int]) -> PendingView:
    elastic = view.spec.elastic
    assert elastic is not None
    return msgspec.structs.replace(
        view, spec=msgspec.structs.replace(view.spec, elastic=msgspec.structs.replace(elastic, **ranges))
    )


def cores_of(snapshot: Snapshot) -> dict[str, int]:
    plan, rejections = check(decide(snapshot), snapshot)
    assert rejections == ()
    return {a.job_id: sum(p.cores for p in a.allocation.parts) for a in plan.actions if isinstance(a, Start)}


def test_cores_go_with_the_gpus_within_their_range() -> None:
    job = waits("a", 1, 2, 4, 8)
    assert cores_of(world([job], [], nodes=1)) == {"a": 8}
    assert cores_of(world([ranged(job, cores=(1, 6))], [], nodes=1)) == {"a": 6}
    assert cores_of(world([ranged(job, cores=(12, 20))], [], nodes=1)) == {"a": 12}


def test_with_fewer_cores_free_it_takes_fewer_down_to_the_least() -> None:
    """A job of 1 GPU holds all but 3 of the 80 cores; 7 GPUs are free, with which 7 cores would go."""
    greedy = running("r", {"n0": (0,)}, NOW + 9000, cores=77)
    job = waits("a", 1, 7)
    assert cores_of(world([job], [greedy], nodes=1)) == {}, "without a range it waits for what goes with its GPUs"
    few = world([ranged(job, cores=(2, 7))], [greedy], nodes=1)
    assert cores_of(few) == {"a": 3}
    assert started(few) == {"a": 7}
    none = world([ranged(job, cores=(4, 7))], [greedy], nodes=1)
    assert cores_of(none) == {}, "never less than the least"
    assert sizes_of(none, node_arrays_of(none)).snapshot.pending[0].spec.cores_per_node == 4, "for which it waits"


def test_a_running_job_grows_where_its_minimum_fits() -> None:
    """Of 80 cores another job holds 74 and this one 4: of the 7 that go with 7 GPUs, 6 are there."""
    other = running("r", {"n0": (7,)}, NOW + 9000, cores=74)
    small = runs("e", {"n0": (0, 1, 2, 3)}, 1, 2, 4, 7)
    assert resized(world([], [small, other], nodes=1)) == {}, "4 more cores are not there"
    elastic = small.spec.elastic if small.spec else None
    assert elastic is not None
    own = msgspec.structs.replace(small.spec, elastic=msgspec.structs.replace(elastic, cores=(2, 7)))
    assert resized(world([], [msgspec.structs.replace(small, spec=own), other], nodes=1)) == {"e": 7}


def test_a_plan_that_gives_other_cores_than_the_range_allows_is_refused() -> None:
    job = ranged(waits("a", 1, 2, 4, 8), cores=(4, 6))
    snapshot = world([job], [], nodes=1)
    (start,) = (a for a in decide(snapshot).actions if isinstance(a, Start))
    for cores, right in ((3, False), (4, True), (5, True), (6, True), (7, False)):
        part = msgspec.structs.replace(start.allocation.parts[0], cores=cores)
        given_ = Start("a", msgspec.structs.replace(start.allocation, parts=(part,)))
        _, rejections = check(Plan(actions=(given_,), reasons={}), snapshot)
        assert (rejections == ()) is right, cores


def test_a_job_whose_size_is_now_out_of_bounds_may_start_at_it() -> None:
    """Its partition's bounds came after it; where its policy chooses no sizes it waits at its base."""
    job = waits("a", 1, 2)
    job = msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, elastic=msgspec.structs.replace(
        job.spec.elastic, sizes=(2,))))  # fmt: skip
    assert started(world([job], [], sizes="base")) == {"a": 1}


class Counting:
    """An agent that gives everybody what its weights say, in order."""

    asked: ClassVar[list[Question]] = []
    nodes: ClassVar[SizingNodes | None] = None

    @staticmethod
    def prepare(model: TrainedModel) -> Any:
        return model.arrays["sizes"]

    @classmethod
    def choose_sizes(cls, prepared: Any, question: Question) -> Any:
        cls.asked.append(question)
        cls.nodes = question.nodes  # later others may be free
        if prepared.size == 0:
            raise ValueError("a score of its network is no number")
        return prepared[: len(question.claims.jobs)]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> type[Counting]:
    monkeypatch.setitem(AGENTS, "counting", AgentTraits(sizes=True))
    monkeypatch.setitem(REGISTRY, "counting", AgentParts(sizes=lambda: Counting))
    Counting.asked.clear()
    return Counting


def says(*sizes: int) -> dict[str, TrainedModel]:
    return {"p": TrainedModel("counting", {"sizes": np.array(sizes, np.int64)}, {}, "", f"{sizes}")}


def two() -> Snapshot:
    """One of two GPUs that runs and may grow, and one that waits."""
    jobs = [waits("w", 1, 2, 4)]
    return world(jobs, [runs("r", {"n0": (0, 1)}, 1, 2, 4, 8, speeds={2: 3.0})], nodes=1, agent="counting")


def test_an_agents_cores_and_memory_bound_what_a_job_with_ranges_gets(counting: type[Counting]) -> None:
    snapshot = world([ranged(waits("a", 1, 2, 4, 8), cores=(2, 8))], [], nodes=1, agent="counting")
    for cores, given_ in ((0, 8), (3, 3), (1, 2)):  # no bound, a bound, and one below the least of its range
        weights = TrainedModel("counting", {"sizes": np.array([[8, cores, 0]])}, {}, "", f"cores {cores}")
        (start,) = (a for a in decide(snapshot, {"p": weights}).actions if isinstance(a, Start))
        (part,) = start.allocation.parts
        assert (len(part.gpus), part.cores, part.memory_mib) == (8, given_, 8192)
    nodes = counting.nodes
    assert nodes is not None
    assert nodes.free.tolist() == nodes.usable.tolist()
    assert nodes.asks[0, 3].tolist() == [1, 8, 2, 8192]
    assert nodes.widest[0].tolist() == [[2, 1024], [2, 2048], [4, 4096], [8, 8192]]


def test_an_agent_chooses_sizes(counting: type[Counting]) -> None:
    plan = decide(two(), says(4, 2))
    assert [(a.job_id, a.gpus) for a in plan.actions if isinstance(a, Resize)] == [("r", 4)]
    assert [(a.job_id, a.allocation.gpus) for a in plan.actions if isinstance(a, Start)] == [("w", 2)]
    (question,) = counting.asked
    jobs, claims = question.claims.jobs, question.claims
    assert (question.partition, question.now, question.names) == ("p", NOW, ("e", "e"))
    assert (question.capacity, question.free, question.total, question.others) == (8, 6, 8, 0)
    assert (jobs["held"].tolist(), jobs["count"].tolist()) == ([2, 0], [4, 3])
    assert claims.sizes[0].tolist() == [1, 2, 4, 8]
    assert claims.allowed[0].tolist() == [1, 1, 1, 1]
    assert claims.reported[0].tolist() == [0, 1, 0, 0]
    assert claims.pace[0] == pytest.approx([3 / 2**0.8, 3, 3 * 2**0.8, 3 * 4**0.8])


def test_the_age_time_left_and_shares_that_an_agent_gets(counting: type[Counting]) -> None:
    """Time left: by progress at the least size, else by the limit, an hour at most. Share: of the scarcest resource."""
    busy = [runs("r", {"n0": (0, 1)}, 1, 2, own_end=NOW + 100), runs("s", {"n0": (2,)}, 1, 2, submit_time=None)]
    large = spec(1, 2)
    assert large.elastic is not None
    large = msgspec.structs.replace(large, elastic=msgspec.structs.replace(large.elastic, base_memory_mib=256 << 10))
    jobs = [waits("t", 1, 2, speeds={2: 4.0}, left=6000.0, submit=NOW - 70), waits("u", 1, 2, submit=NOW - 60),
            msgspec.structs.replace(waits("v", 1, submit=NOW - 50), spec=large, estimate_s=300.0)]  # fmt: skip
    decide(world(jobs, busy, nodes=1, agent="counting"), says(2, 1, 1, 1, 1))
    (question,) = counting.asked
    rows = question.claims.jobs
    assert rows["left_s"] == pytest.approx([100, 7200, 6000 / (4 / 2**0.8), 3600, 300])
    assert rows["age_s"].tolist() == [3600, 3600, 70, 60, 50]
    assert rows["share"].tolist() == [1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 2]


@pytest.mark.parametrize("held", [0, 2])
def test_time_left_is_an_hour_where_neither_progress_nor_a_limit_says_it(counting: type[Counting], held: int) -> None:
    endless = runs("r", {"n0": (0, 1)}, 1, 2, own_end=math.inf)
    jobs = [msgspec.structs.replace(waits("w", 1, 2), estimate_s=math.inf)]
    decide(world(jobs, [endless] if held else [], nodes=1, agent="counting"), says(2, 1))
    (question,) = counting.asked
    assert (question.claims.jobs["left_s"] == 3600).all()


def test_a_job_that_gets_no_gpus_waits_and_its_reason_says_so(counting: type[Counting]) -> None:
    plan = decide(two(), says(2, 0))
    assert plan.actions == ()
    assert plan.reasons["w"].message == "the policy gives it no GPUs now"


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        ((), "a score of its network is no number"),
        ((8, 4), "it chose sizes that a job may not have now, or more GPUs than exist"),
        ((3, 1), "it chose sizes that a job may not have now, or more GPUs than exist"),
        ((2, -1), "it chose sizes that a job may not have now, or more GPUs than exist"),
        ((2,), "its answer is not one whole number of GPUs for each job"),
    ],
)
def test_where_an_agent_cannot_choose_its_fallback_s_rule_does(
    counting: type[Counting], answer: tuple[int, ...], trouble: str
) -> None:
    plan = decide(two(), says(*answer))
    plain = msgspec.structs.replace(two(), policies={"p": POLICY})
    assert plan.troubles == {"p": trouble}
    assert plan.actions == decide(plain).actions
    assert decide(two()).troubles == {"p": "no weights"}


def test_the_file_of_an_agent_that_chooses_sizes(counting: type[Counting], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("agent: counting\nresize: {min_run: 5m}\n")
    found = load_policy(tmp_path / "mine.yaml")
    assert (found.order, found.place, found.backfill, found.sizes) == ("fifo", "best-fit", "easy", "greedy-gain")
    assert (found.resize.min_run_s, found.fallback and found.fallback.name) == (300.0, "elastic")
    (tmp_path / "mine.yaml").write_text("agent: counting\nfallback: drf\nbackfill: skip\n")
    found = load_policy(tmp_path / "mine.yaml")
    assert (found.sizes, found.backfill) == ("drf", "skip")
    for text, where in (("fallback: easy", "fallback"), ("sizes: drf", "sizes")):
        (tmp_path / "mine.yaml").write_text(f"agent: counting\n{text}\n")
        with pytest.raises(FileError, match=f"{where}: .*expected a fallback that chooses sizes, such as elastic"):
            load_policy(tmp_path / "mine.yaml")


def test_a_controller_that_has_warmed_up_compiles_nothing_more() -> None:
    warm_up([POLICY])
    passes = (gather, wish, settle)
    if not hasattr(gather, "signatures"):
        pytest.skip("nothing is compiled here")
    before = [len(one.signatures) for one in passes]  # type: ignore[attr-defined]
    assert all(before)
    busy = [runs("r", {"n0": (0, 1)}, 1, 2, 4, 8)]
    decide(world([waits("a", 1, 2, 4, 8, speeds={2: 3.0}, left=5.0), pending("j", 4)], busy))
    assert [len(one.signatures) for one in passes] == before  # type: ignore[attr-defined]


def test_a_rule_moves_gpus_between_jobs_only_if_no_job_ends_soon() -> None:
    costs = Resizes(count=1, costs_s=30.0, measured=1)
    rigid = running("r", {"n1": (1, 2, 3, 4, 5, 6, 7)}, NOW + 90000)
    for ends_in, expected in ((299.0, {}), (6000.0, {"a": 4})):
        a = runs("a", {"n0": tuple(range(8))}, 1, 2, 4, 8, resizes=costs, own_end=NOW + ends_in)
        b = runs("b", {"n1": (0,)}, 1, 2, 4, 8, resizes=costs)
        snapshot = world([], [a, b, rigid], sizes="drf")
        assert resized(snapshot) == expected, "b grows when that is free"
    after = runs("a", {"n0": (0, 1, 2, 3)}, 1, 2, 4, 8, start_time=NOW)
    assert resized(world([], [after, b, rigid], sizes="drf", resize=Resizing(min_run_s=60.0))) == {"b": 4}


def test_no_job_grows_without_a_node_that_can_hold_it() -> None:
    ends = [running(f"r{n}", {f"n{n}": (7,)}, NOW + 9000) for n in range(2)]
    assert resized(world([], [*ends, runs("a", {"n0": (0, 1)}, 2, 8)])) == {}
    assert resized(world([], [*ends, runs("a", {"n0": (0, 1)}, 2, 7)])) == {"a": 7}


def test_tasks_beyond_their_array_s_bound_take_no_gpus() -> None:
    tasks = [waits(f"a_{n}", 1, 2, 4, 8, array_id="a", array_room=1) for n in range(2)]
    assert started(world(tasks, [], nodes=1)) == {"a_0": 8}


def test_a_job_that_would_release_nothing_is_not_shrunk() -> None:
    a, b = (runs(name, {where: tuple(range(8))}, 4, 8) for name, where in (("a", "n1"), ("b", "n0")))
    snapshot = world([pending("j", 4)], [a, b])
    assert resized(snapshot) == {"a": 4}
    for broken in ({"available": False}, {"blocked": {7: "LOST"}}):
        nodes = (node("n0"), node("n1", **broken))
        assert resized(msgspec.structs.replace(snapshot, nodes=nodes)) == {"b": 4}


def test_hundreds_of_sizes_on_hundreds_of_nodes_take_no_time_by_their_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--gpus 1-1000 --resizable`` on a thousand nodes kept every decision waiting for half a minute."""
    asked = 0

    def counted(*amounts: Any) -> bool:
        nonlocal asked
        asked += 1
        return covers(*amounts)

    monkeypatch.setattr("gpusched.sched.tally.covers", counted)
    assert sized(world([waits("a", *range(1, 301))], [], nodes=300)).given == {"a": 300}
    assert asked < 10_000
