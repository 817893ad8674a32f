"""Cutting GPUs on demand: what is cut is valid, nothing that runs is touched, nobody waits for ever, little is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpusched.model.plan import Start
from gpusched.model.slices import Cut, gpu_of, slice_index
from gpusched.model.slicetables import GPU_PARTS, PUBLISHED, parts_of
from gpusched.model.snapshot import NodeView, PendingView, RunningView, SliceView, Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.slices import plan
from gpusched.sched.slices.plan import arrange
from gpusched.sched.slices.tree import Table, arranged, filled, is_valid, most_of
from tests.sched.slices import pending, running
from tests.sched.worlds import NOW, node, snapshot
from tests.strategies import among, examples

A100 = PUBLISHED["A100-80GB"]
MODELS = tuple(PUBLISHED)


# Published tables, and the search over them


def units(table: Table, placed: Sequence[tuple[str, int]]) -> list[int] | None:
    """The memory units of these slices; None: they do not go together. Counted apart from the search."""
    places = {one.name: dict(one.placements) for one in table}
    if any(start not in places[name] for name, start in placed):
        return None
    used = [unit for name, start in placed for unit in range(start, start + places[name][start])]
    compute = sum(one.compute for name, _ in placed for one in table if one.name == name)
    media = sum(name.endswith("+me") for name, _ in placed)
    return used if len(set(used)) == len(used) and compute <= table[0].gpu_compute and media <= 1 else None


@cache
def geometries(table: Table) -> frozenset[frozenset[tuple[str, int]]]:
    """All ways to cut a GPU, by adding one slice after the other."""
    found, new = {frozenset[tuple[str, int]]()}, {frozenset[tuple[str, int]]()}
    while new:
        new = {
            one | {(profile.name, start)}
            for one in new
            for profile in table
            for start, _ in profile.placements
            if (profile.name, start) not in one and units(table, [*one, (profile.name, start)]) is not None
        } - found
        found |= new
    return frozenset(found)


def test_an_a100_has_nineteen_geometries() -> None:
    """One slice, or what fits into the units 0 to 3 beside what fits into the others."""
    table = tuple(one for one in A100 if one.name in ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"))
    every = geometries(table)
    largest = [one for one in every if not any(one < other for other in every)]
    drawn = {"".join(name[0] for name, _ in sorted(one, key=lambda pair: pair[1])) for one in largest}
    assert drawn == {"7", *map("".join, product(["4", "3", "22", "211", "112", "1111"], ["3", "21", "111"]))}
    assert len(largest) == 19


@pytest.mark.parametrize("model", MODELS)
def test_every_geometry_of_every_model_is_valid_and_no_other_set_is(model: str) -> None:
    table = PUBLISHED[model]
    every = geometries(table)
    assert all(is_valid(table, one) for one in every)
    places = [(profile.name, start) for profile in table for start, _ in profile.placements]
    pairs = [pair for pair in combinations(places, 2) if frozenset(pair) not in every]
    assert not any(is_valid(table, pair) for pair in pairs)
    assert not is_valid(table, [("1g.9gb", 0)])


@given(st.sampled_from(MODELS), st.data())
@settings(max_examples=200, deadline=None)
def test_slices_fit_together_if_any_geometry_has_them(model: str, data: st.DataObject) -> None:
    table = PUBLISHED[model]
    wanted = tuple(data.draw(st.lists(st.sampled_from([one.name for one in table]), min_size=1, max_size=5)))
    possible = any(sorted(name for name, _ in one) == sorted(wanted) for one in geometries(table))
    found, full = arranged(table, wanted), filled(table, wanted)
    assert (found is not None, full is not None) == (possible, possible)
    if found is None or full is None:
        return
    assert sorted(name for name, _ in found) == sorted(wanted)
    assert units(table, found) is not None
    names = [name for name, _ in full]
    assert all(names.count(name) >= wanted.count(name) for name in wanted)
    assert units(table, full) is not None
    more = [(*full, (name, start)) for name in set(wanted) for one in table if one.name == name
            for start, _ in one.placements]  # fmt: skip
    assert not any(units(table, one) is not None for one in more), "there was room for more of them"


def test_the_remaining_slice_is_as_large_as_possible() -> None:
    assert arranged(A100, ("2g.20gb",)) in ((("2g.20gb", 0),), (("2g.20gb", 2),), (("2g.20gb", 4),))
    for wanted, largest in ((("1g.10gb",), 4), (("2g.20gb", "1g.10gb"), 4), (("1g.10gb",) * 4, 4), (("3g.40gb",), 4)):
        found = arranged(A100, wanted)
        assert found is not None
        room = [one.memory_units for one in A100 for start, _ in one.placements
                if units(A100, [*found, (one.name, start)]) is not None]  # fmt: skip
        assert max(room) == largest, wanted
    assert [len(most_of(A100, one.name)) for one in A100] == [one.max_count for one in A100]


# Cutting


def on_demand(name: str, gpus: int = 4, table: Table = A100, **more: Any) -> NodeView:
    view = node(name, gpus=gpus, cores=16 * gpus, **more)
    return replace(view, cuttable=dict.fromkeys(range(gpus), table))


class Lab:
    """Nodes whose GPUs are cut as planned, jobs that run to their limits, and what must hold in every cycle."""

    def __init__(self, nodes: Sequence[NodeView], jobs: Sequence[PendingView], **policy: str) -> None:
        self.nodes = {one.name: one for one in nodes}
        self.jobs, self.busy = list(jobs), list[RunningView]()
        self.now, self.policy = NOW, {"backfill": "easy"} | policy
        self.cuts, self.is_cutting = 0, False
        self.began: dict[str, float] = {}

    def snapshot(self) -> Snapshot:
        snap = snapshot(list(self.nodes.values()), self.jobs, self.busy, **self.policy)  # type: ignore[arg-type]
        return replace(snap, now=self.now)

    def cycle(self) -> tuple[Cut, ...]:
        """Decide, start, and cut; return the cuts."""
        snap = self.snapshot()
        plan, rejections = check(decide(snap), snap)
        assert rejections == ()
        cuts = arrange(snap).cuts
        for action in plan.actions:
            assert isinstance(action, Start)
            job = next(one for one in self.jobs if one.id == action.job_id)
            self.jobs.remove(job)
            self.began[job.id] = self.now
            self.busy.append(RunningView(
                id=job.id, user=job.user, allocation=action.allocation, start_time=self.now, spec=job.spec,
                expected_end=self.now + job.spec.time_limit_s,
            ))  # fmt: skip
        self._cut(cuts)
        self.is_cutting = bool(cuts)
        return cuts

    def _cut(self, cuts: Sequence[Cut]) -> None:
        held = {(part.node, gpu_of(gpu)) for job in self.busy for part in job.allocation.parts for gpu in part.gpus}
        assert len({(cut.node, cut.gpu) for cut in cuts}) == len(cuts)
        for cut in cuts:
            view = self.nodes[cut.node]
            assert (cut.node, cut.gpu) not in held, "a job is on it"
            assert units(view.cuttable[cut.gpu], cut.slices) is not None
            assert not any(why.startswith("BUSY") and gpu_of(n) == cut.gpu for n, why in view.blocked.items())
            kept = tuple(one for one in view.slices if gpu_of(one.number) != cut.gpu)
            new = tuple(SliceView(slice_index(cut.gpu, start), profile) for profile, start in cut.slices)
            blocked = {n: why for n, why in view.blocked.items() if gpu_of(n) != cut.gpu}
            self.nodes[cut.node] = replace(view, slices=kept + new, blocked=blocked)
            self.cuts += 1

    def later(self) -> None:
        """Let half a minute pass; where nothing was cut in it, until the next job ends."""
        end = min((job.expected_end for job in self.busy), default=0.0)
        self.now = max(self.now + 30, 0.0 if self.is_cutting else end)
        self.busy = [job for job in self.busy if job.expected_end > self.now]

    def whole(self) -> int:
        """GPUs that are not cut."""
        return sum(len(view.gpus) - len({gpu_of(one.number) for one in view.slices}) for view in self.nodes.values())


def test_a_gpu_is_cut_for_a_job_and_whole_again_when_no_job_requests_slices() -> None:
    lab = Lab([on_demand("a")], [pending("j", 2, "1g.10gb", limit=600)])
    (cut,) = lab.cycle()
    assert cut == Cut("a", 3, tuple(("1g.10gb", start) for start in range(7)))
    assert lab.began == {}
    assert lab.cycle() == ()
    assert lab.began == {"j": NOW}
    lab.jobs = [pending("k", 5, "1g.10gb", limit=60), pending("l", 1, "1g.10gb", limit=60)]
    assert [one.node for one in lab.cycle()] == ["a"], "five are left: only the sixth needs another GPU"
    assert lab.whole() == 2
    for _ in range(5):
        lab.later()
        lab.cycle()
    assert (lab.whole(), lab.busy) == (4, [])


def test_slices_fill_a_gpu_that_is_cut_before_another_is_cut() -> None:
    lab = Lab([on_demand("a"), on_demand("b")], [pending(f"j{i}", 1, "2g.20gb") for i in range(4)])
    assert [(cut.node, cut.gpu) for cut in lab.cycle()] == [("a", 2), ("a", 3)], "three on one, and the fourth"
    lab.jobs += [pending("k", 1, "1g.10gb")]
    lab.cycle()
    assert len(lab.began) == 4
    assert lab.cuts == 3, "no 1g.10gb is on these two"


def test_gpus_being_cut_count_as_cut() -> None:
    geometry = most_of(A100, "1g.10gb")
    busy = on_demand("n", gpus=3, cutting={2: geometry}, blocked={2: "BUSY: it is being cut"})
    jobs = [pending(f"j{i}", 1, "1g.10gb") for i in range(8)]
    assert arrange(snapshot([busy], jobs[:7])).cuts == ()
    (cut,) = arrange(snapshot([busy], jobs)).cuts
    assert cut.gpu != 2
    whole = on_demand("n", gpus=1, cutting={0: ()}, blocked={0: "BUSY: it is being made whole"})
    assert arrange(snapshot([whole], [pending("w", 1)])).cuts == ()


def test_different_slices_share_a_gpu() -> None:
    jobs = [pending("a", 1, "3g.40gb"), pending("b", 1, "2g.20gb"), pending("c", 2, "1g.10gb")]
    lab = Lab([on_demand("n", gpus=1)], jobs)
    (cut,) = lab.cycle()
    assert sorted(name for name, _ in cut.slices) == ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"]
    lab.cycle()
    assert lab.began.keys() == {"a", "b", "c"}


def test_a_job_for_a_gpu_drains_the_slices_that_are_in_its_way() -> None:
    """New jobs for slices come all the time; it starts when those end that ran before it came."""
    lab = Lab([on_demand("n", gpus=2)], [pending(f"s{i}", 1, "1g.10gb", limit=600 + 60 * i) for i in range(14)])
    lab.cycle()
    lab.cycle()
    assert len(lab.began) == 14
    lab.jobs = [pending("gpu", 1, limit=600, submit=1.0)]
    for i in range(40):
        lab.jobs += [pending(f"t{i}-{k}", 1, "1g.10gb", limit=600, submit=2.0 + i) for k in range(14 - len(lab.jobs))]
        lab.cycle()
        lab.later()
    assert "gpu" in lab.began
    assert lab.began["gpu"] <= NOW + 600 + 60 * 13 + 120
    before = [name for name, at in lab.began.items() if name.startswith("t") and at < lab.began["gpu"]]
    assert before, "the other GPU is open"


def test_a_job_for_slices_does_not_wait_for_ever_behind_jobs_for_gpus() -> None:
    lab = Lab([on_demand("n", gpus=2)], [pending(f"g{i}", 1, limit=600 + 300 * i) for i in range(2)])
    lab.cycle()
    lab.jobs = [pending("slice", 1, "1g.10gb", limit=600, submit=1.0)]
    for i in range(20):
        lab.jobs += [pending(f"h{i}-{k}", 1, limit=600, submit=2.0 + i) for k in range(2)]
        lab.cycle()
        lab.later()
    assert lab.began["slice"] <= NOW + 700


def test_slices_of_one_profile_do_not_keep_another_waiting() -> None:
    lab = Lab([on_demand("n", gpus=1)], [pending(f"s{i}", 1, "1g.10gb", limit=600 + 60 * i) for i in range(7)])
    lab.cycle()
    lab.cycle()
    lab.jobs = [pending("half", 1, "3g.40gb", limit=600, submit=1.0)]
    for i in range(30):
        lab.jobs += [pending(f"t{i}-{k}", 1, "1g.10gb", limit=600, submit=2.0 + i) for k in range(7 - len(lab.jobs))]
        lab.cycle()
        lab.later()
    assert lab.began["half"] <= NOW + 600 + 60 * 6 + 120
    assert any(name.startswith("t") for name in lab.began), "and they go on"


def test_a_job_with_many_cores_gets_as_many_gpus_as_bring_them() -> None:
    lab = Lab([on_demand("n", gpus=2)], [pending("j", 1, "1g.10gb", cores_per_node=20)])
    assert len(lab.cycle()) == 2, "a GPU brings 16 cores"
    lab.cycle()
    assert lab.began == {"j": NOW}


def test_the_remains_of_an_interrupted_cut_are_repaired() -> None:
    raw = replace(on_demand("n", gpus=2), blocked={0: "SLICED: MIG is on, without slices"})
    lab = Lab([raw], [])
    assert lab.cycle() == (Cut("n", 0),)
    half = replace(
        on_demand("n", gpus=2),
        slices=(SliceView(1000, "1g.10gb"), SliceView(1001, "1g.10gb")),
        blocked={1001: "UNUSABLE: no compute instance spans it"},
    )
    assert Lab([half], []).cycle() == (Cut("n", 0),)
    lab = Lab([half], [pending("j", 2, "1g.10gb")])
    lab.cycle()
    lab.cycle()
    assert "j" in lab.began


def test_where_a_stranger_is_nothing_is_cut() -> None:
    blocked = {0: "BUSY: foreign: pid 7", 1001: "BUSY: foreign: pid 8"}
    view = replace(on_demand("n", gpus=1), blocked={0: "BUSY: foreign: pid 7"})
    assert Lab([view], [pending("j", 1, "1g.10gb")]).cycle() == ()
    view = replace(on_demand("n", gpus=1), slices=(SliceView(1001, "1g.10gb"),), blocked={1001: blocked[1001]})
    assert Lab([view], [pending("j", 1, "1g.10gb")]).cycle() == ()
    assert Lab([view], [pending("g", 1)]).cycle() == ()


WAYS = tuple(sorted(geometries(A100), key=lambda one: (len(one), sorted(one))))
CUT = st.sampled_from(WAYS)
PROFILES = st.sampled_from(["", "", "1g.10gb", "1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"])


@st.composite
def states(draw: st.DrawFn) -> Lab:
    """GPUs cut in any way, partly in use, some that stay whole, and a queue of all kinds of jobs."""
    nodes, busy = [], []
    for n in range(draw(st.integers(1, 2))):
        gpus = draw(st.integers(1, 4))
        view, slices, name = on_demand(f"n{n}", gpus=gpus), [], f"n{n}"
        for gpu in range(gpus):
            kind = draw(among("whole", "whole", "held", "cut", "fixed"))
            if kind == "fixed":
                view = replace(view, cuttable={g: table for g, table in view.cuttable.items() if g != gpu})
            if kind == "held":
                busy.append(held(f"r{n}{gpu}", name, gpu, "", draw(st.integers(1, 4000))))
            if kind == "cut":
                for profile, start in sorted(draw(CUT)):
                    number = slice_index(gpu, start)
                    slices.append(SliceView(number, profile))
                    if draw(st.booleans()):
                        busy.append(held(f"r{n}{number}", name, number, profile, draw(st.integers(1, 4000))))
        nodes.append(replace(view, slices=tuple(slices)))
    jobs = [
        pending(f"j{i}", draw(st.integers(1, 3)), draw(PROFILES), nodes=draw(among(1, 1, 1, len(nodes))),
                limit=draw(among(300, 3600)), submit=float(i), priority=draw(among(0, 0, 5)))
        for i in range(draw(st.integers(0, 9)))
    ]  # fmt: skip
    lab = Lab(nodes, jobs, backfill=draw(among("none", "easy", "skip")))
    lab.busy = busy
    return lab


def held(job: str, where: str, number: int, profile: str, left: int) -> RunningView:
    return replace(running(job, {where: (number,)}, profile), expected_end=NOW + left)


@given(states())
@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_cuts_are_valid_and_every_job_that_can_run_runs(lab: Lab) -> None:
    """What is cut is checked in every cycle. Then time passes without new jobs, until nobody waits who could start."""
    for _ in range(60):
        lab.cycle()
        if not lab.jobs or not (lab.busy or lab.is_cutting):
            break
        lab.later()
    for job in lab.jobs:
        assert not could_run(lab, job), job


def could_run(lab: Lab, job: PendingView) -> bool:
    """Whether the job fits if nothing else is there."""
    fits = 0
    for view in lab.nodes.values():
        tables = list(view.cuttable.values())
        count = len(view.gpus) if not job.spec.profile else sum(len(most_of(t, job.spec.profile)) for t in tables)
        fits += count >= job.spec.gpus_per_node
    return fits >= job.spec.nodes


def test_a_node_is_asked_once_for_equal_jobs_until_something_changes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 jobs on 1,000 nodes took half a minute."""
    asked = list[str]()

    def counted(node: NodeView, job: PendingView) -> int:
        asked.append(node.name)
        return slices_needed(node, job)

    slices_needed = plan._slices_needed
    monkeypatch.setattr(plan, "_slices_needed", counted)
    nodes = [on_demand(f"n{i}", gpus=1) for i in range(20)]
    jobs = [pending(f"j{i:02}", 1, "7g.80gb", submit=float(i)) for i in range(60)]
    assert len(arrange(Lab(nodes, jobs).snapshot()).cuts) == 20
    assert len(asked) <= 5 * len(nodes)


# Exact packing


def packed(table: Table, gpus: int, wanted: Sequence[str]) -> int:
    """The parts of GPUs that requests have, one slice each, on so many empty GPUs.

    In their order each is served if there is any way to serve it with all that were served before; all are tried.
    """
    ways, served = {((),) * gpus}, 0
    for name in wanted:
        more = {
            tuple(sorted((*(one for at, one in enumerate(way) if at != gpu), (*way[gpu], name))))
            for way in ways
            for gpu in range(gpus)
            if fits(table, tuple(sorted((*way[gpu], name))))
        }
        served, ways = (served + parts_of(name), more) if more else (served, ways)
    return served


@cache
def fits(table: Table, names: tuple[str, ...]) -> bool:
    return any(sorted(name for name, _ in one) == list(names) for one in geometries(table))


def draws(count: int) -> Iterator[tuple[int, list[str]]]:
    generator = random.Random(20)
    kinds = ["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"]
    for _ in range(count):
        yield generator.randint(1, 3), [generator.choice(kinds) for _ in range(generator.randint(1, 10))]


def test_cuts_serve_as_much_as_an_exact_packing() -> None:
    ours, exact, states = 0.0, 0.0, examples(400)
    for gpus, wanted in draws(states):
        jobs = [pending(f"j{i:02}", 1, name, submit=float(i)) for i, name in enumerate(wanted)]
        cuts = arrange(Lab([on_demand("n", gpus=gpus)], jobs).snapshot()).cuts
        there = [name for cut in cuts for name, _ in cut.slices]
        served = sum(min(there.count(name), wanted.count(name)) * parts_of(name) for name in set(wanted))
        ours += 100 * served / (GPU_PARTS * gpus) / states
        exact += 100 * packed(A100, gpus, wanted) / (GPU_PARTS * gpus) / states
    assert exact - ours <= 1, f"{ours:.1f} % instead of {exact:.1f} %"
