"""Shared GPUs: what is held and counted, what is said, and what cannot be shared."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from string import ascii_lowercase

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.agents.gist.networks import heuristic
from gpusched.config.weights import TrainedModel
from gpusched.errors import UsageError
from gpusched.model.resources import SharingSettings
from gpusched.model.topology import Switch, Topology
from gpusched.sched.decide import decide
from gpusched.sched.heaps import push
from gpusched.sched.kernel.beside import MAX_KINDS
from gpusched.sched.topology.tree import links_of
from gpusched.sim.engine.build import ReplayOptions, log_of, world_of
from gpusched.sim.engine.generic import new_queue, run_generic
from gpusched.sim.engine.pace import join_links
from gpusched.sim.engine.placing_walk import run_walk
from gpusched.sim.engine.state import ARRIVED, GROW, IN_SYSTEM, PARTS, RUNNING, RUNS, WAITING, grown
from gpusched.sim.network import learned_network, network_for
from gpusched.sim.placed import walked, with_ways
from gpusched.sim.policies import ReplayPolicy, policy_by_name
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.profiles import Profiles, Series
from gpusched.sim.rates import Rates
from gpusched.sim.replay import replay
from gpusched.sim.sharing import share_for
from gpusched.sim.stepper import Stepper
from gpusched.study.metrics import metrics_of
from gpusched.study.own import beliefs_for
from gpusched.study.timeline import paired_runs, parts_of
from tests.sched.gist_decisions import GIST
from tests.sched.sharing import BELIEFS, CORES, GPUS, KINDS, Has, nodes_of, partner, slower, snapshot_of, worlds
from tests.sched.worlds import NOW, started
from tests.sim.paced import inputs, paced_worlds
from tests.sim.worlds import trace_of
from tests.strategies import among

pytestmark = pytest.mark.interpreted

PLACES = st.sampled_from(["first-fit", "best-fit", "worst-fit"])
RATES = Rates(
    profiles=Profiles(
        series={("m", "A"): Series({(1, 1): 8.0}, "nodes"), ("n", "A"): Series({(1, 1): 4.0}, "nodes")},
        beside={("m", "A", 1, "n"): 0.5, ("n", "A", 1, "m"): 1.0, ("m", "A", 1, "m"): 0.5},
        recorded_on={"m": "A", "n": "A"},
    )
)


def fractions(submit, duration, milli, **columns):
    trace = trace_of(submit, duration, [1] * len(submit), **columns)
    return replace(trace, gpu_milli=np.array(milli, np.int64))


def with_models(trace, models):
    return replace(trace, model=np.array(["mn".index(m) for m in models]), models=("m", "n"))


def test_fractions_fill_a_gpu_and_are_counted_as_such():
    trace = fractions([0, 0, 0, 0], [10, 10, 10, 10], [500, 400, 100, 1])
    shared = replay(trace, Pool.uniform(1, 1), "fifo", share="fractions")
    assert shared.end.tolist() == [10, 10, 10, 20]
    metrics = metrics_of(shared)
    assert metrics.gpu_hours_utilization == pytest.approx((1000 + 1) / 2000)
    assert metrics.utilization == pytest.approx((1000 + 1) / 2000)
    assert metrics.fragmentation is None
    assert "4 jobs hold only the requested part of one" in shared.notes[0]
    whole = replay(trace, Pool.uniform(1, 1), "fifo")
    assert whole.end.tolist() == [10, 20, 30, 40]
    assert whole.notes == ("4 jobs that request part of a GPU hold a whole one",)
    assert share_for("auto", trace) == "fractions"
    assert share_for("auto", trace_of([0], [1], [1])) == "no"


def test_whole_jobs_never_share_and_best_fit_is_by_gpu():
    trace = fractions([0, 0, 1, 1, 2], [9, 9, 9, 9, 9], [600, 300, 350, 1000, 100])
    result = replay(trace, Pool.uniform(1, 2), "fifo-skip", share="fractions")
    # 600, 300 and the last 100 fill one GPU until 11; 350 opens the other, which the whole job gets after it
    assert result.start.tolist() == [0, 0, 1, 10, 2]


def test_neighbours_slow_each_other_down_while_they_are_there():
    trace = with_models(fractions([0, 4], [10, 2], [500, 500]), "mn")
    result = replay(trace, Pool.uniform(1, 1, gpu_type="A"), "fifo", share="fractions", rates=RATES)
    assert result.end.tolist() == [11, 6]  # m does 1 of its seconds of work in the two that n is there
    assert not any("shared a GPU" in note for note in result.notes)
    unknown = with_models(fractions([0, 4], [10, 2], [500, 500]), "nn")
    result = replay(unknown, Pool.uniform(1, 1, gpu_type="A"), "fifo", share="fractions", rates=RATES)
    assert result.end.tolist() == [10, 6]
    assert any(note.startswith("1 time a job shared a GPU") for note in result.notes)


@pytest.mark.compiled
def test_pairs_only_where_both_together_get_more_done():
    pool = Pool.uniform(1, 1, gpu_type="A")
    pair = with_models(trace_of([0, 1], [10, 4], [1, 1]), "mn")  # 0.5 + 1 > 1
    result = replay(pair, pool, "fifo", share="pairs", rates=RATES)
    assert result.start.tolist() == [0, 1]
    assert result.end.tolist() == [12, 5]
    assert paired_runs(result) == [(1, 0, 1.0, 5.0)]
    metrics = metrics_of(result)
    assert metrics.gpu_hours * 3600 == pytest.approx(12)
    assert metrics.utilization == pytest.approx(1.0)
    assert metrics.gpu_hours_utilization == pytest.approx(1.0)
    parts = parts_of(result)
    assert (parts.gpus * (parts.end - parts.start)).sum() == pytest.approx(12)
    turns = with_models(trace_of([0, 1], [10, 4], [1, 1]), "mm")  # 0.5 + 0.5 is no more than taking turns
    assert replay(turns, pool, "fifo", share="pairs", rates=RATES).start.tolist() == [0, 10]


def test_a_job_has_one_partner_at_a_time():
    trace = with_models(trace_of([0, 1, 2], [10, 4, 4], [1, 1, 1]), "mnn")
    result = replay(trace, Pool.uniform(1, 1, gpu_type="A"), "fifo", share="pairs", rates=RATES)
    assert result.start.tolist() == [0, 1, 5]


def test_that_one_has_no_partner_says_nothing_of_the_next():
    trace = with_models(trace_of([0, 1, 1], [10, 4, 4], [1, 1, 1]), "mmn")
    result = replay(trace, Pool.uniform(1, 1, gpu_type="A"), "fifo-skip", share="pairs", rates=RATES)
    assert result.start[2] == 1.0


def test_a_gpu_of_two_comes_free_once_for_the_first_in_the_queue():
    """It needs all three, so not before the long one's end: the last one is over by then."""
    limit = [10, 100, 100, 21, 100, 50]
    trace = trace_of([0, 0, 0, 1, 2, 6], [10, 5, 90, 30, 10, 10], [1, 1, 1, 1, 3, 1], limit=limit)
    trace = replace(trace, model=np.array([0, -1, -1, 1, -1, -1]), models=("m", "n"))
    result = replay(trace, Pool.uniform(1, 3, gpu_type="A"), "fifo+easy", share="pairs", rates=RATES)
    assert result.start[[3, 5]].tolist() == [1.0, 6.0]


def test_conservative_backfill_knows_no_shared_gpus_and_says_so():
    trace = fractions([0, 0], [10, 10], [500, 500], limit=[20, 20])
    result = replay(trace, Pool.uniform(1, 1), "fifo+conservative", share="fractions")
    assert sorted(result.end.tolist()) == [10, 20]
    assert "fifo+conservative does not share GPUs: every job holds whole ones" in result.notes


@given(paced_worlds(), PLACES, st.sampled_from(["fractions", "pairs"]), st.data())
@settings(max_examples=60, deadline=None)
def test_rltune_is_its_usual_rule_also_where_jobs_share(world, place, share, data):
    trace, pool, rates, failures = inputs(world)
    user = data.draw(st.lists(st.integers(0, 2), min_size=len(trace), max_size=len(trace)))
    trace = replace(trace, user=np.array(user, np.int64), users=("ann", "bob", "cyd"))
    options = {"placement": place, "rates": rates, "failures": failures, "share": share}
    result, rule = (replay(trace, pool, policy, **options) for policy in ("rltune", "sjf-estimate-skip"))
    for name in ("start", "end", "part_nodes"):
        np.testing.assert_array_equal(getattr(result, name), getattr(rule, name))
    assert [note for note in result.notes if "share" in note] == [note for note in rule.notes if "share" in note]


@pytest.mark.parametrize("policy", ["las", "srtf", "drf-users", "rltune-preempt", "gist"])
@given(paced_worlds(failing=False), PLACES)
@settings(max_examples=20, deadline=None)
def test_parts_of_gpus_never_add_up_to_more_than_there_are(policy, world, place):
    """Also of jobs that are stopped: at every instant the parts on a node are some GPUs' and fit them."""
    trace, pool, _, _ = inputs(world)
    trace = replace(trace, user=np.arange(len(trace)) % 3, users=("ann", "bob", "cyd"))
    if policy == "gist":
        model = TrainedModel("gist", heuristic(), {}, "", "g")
        policy = ReplayPolicy(name="g", order="gist", knows="limit", source="", spec=GIST, model=model)
    result = replay(trace, pool, policy, placement=place, share="fractions")
    assert np.isfinite(result.end[trace.gpus <= pool.total_gpus]).sum() + len(result.infeasible) == len(trace)
    parts = parts_of(result)
    for time in np.unique(parts.start):
        for node in range(len(pool)):
            on = (parts.start <= time) & (time < parts.end) & (parts.node == node)
            assert fewest_gpus(parts.gpus[on]) <= pool.gpus[node]


def fewest_gpus(parts):
    """How many GPUs hold these parts of one, and jobs of whole ones."""

    def go(rest, rooms):
        if not rest:
            return len(rooms)
        first, *others = rest
        into = [go(others, [*rooms[:i], room - first, *rooms[i + 1 :]])
                for i, room in enumerate(rooms) if room >= first - 1e-9 and room not in rooms[:i]]  # fmt: skip
        return min([*into, go(others, [*rooms, 1.0 - first])])

    whole = sum(int(part) for part in parts if part >= 1)
    return whole + go(sorted((part for part in parts.tolist() if 0 < part < 1), reverse=True), [])


def test_a_job_that_goes_before_a_part_takes_a_gpu_of_its_own_from_whom_it_must():
    """The third is shorter than the first, whose GPU the second does not leave."""
    trace = fractions([0, 0, 1, 2], [30, 10, 5, 5], [600, 400, 700, 300])
    result = replay(trace, Pool.uniform(1, 1), "srtf", share="fractions")
    assert result.start.tolist() == [0, 0, 1, 2]
    assert result.restarts.tolist() == [1, 1, 0, 0]
    assert result.end.tolist() == [36, 15, 6, 7]


def test_las_counts_parts_of_gpus():
    """At 12 s the first has had as much as is enough, of half a GPU."""
    trace = fractions([0, 0, 2], [30, 30, 5], [500, 500, 1000])
    result = replay(trace, Pool.uniform(1, 1), "las", share="fractions", las_thresholds_gpu_s=(6.0,))
    assert result.start.tolist() == [0, 0, 12]


def test_a_stepper_shares_too():
    stepper = Stepper(fractions([0] * 3, [5] * 3, [500] * 3), Pool.uniform(2, 1), ReplayOptions(share="fractions"))
    assert stepper.advance()
    assert stepper.start(0, [1])
    assert stepper.fits(1) == (1,)
    assert stepper.start(1)
    assert stepper.free_gpus.tolist() == [1, 0]
    with pytest.raises(UsageError, match="not free"):
        stepper.start(2, [1])
    assert stepper.start(2)


def test_an_unknown_way_to_share_is_refused():
    with pytest.raises(UsageError, match="--share 'maybe' is not known"):
        share_for("maybe", trace_of([0], [1], [1]))


def shared(trace, users, names, memory_mib):
    """With who owns jobs, what they are called, and the memory of those that share GPUs; the last job is nobody's."""
    models = tuple(dict.fromkeys((*KINDS, *names)))
    columns = {"user": [*map(["ann", "bob"].index, users), 0], "model": [*map(models.index, names), 0]}
    columns = {column: np.array(values, np.int64) for column, values in columns.items()}
    share_mib = np.array([*memory_mib, -1], np.int64)
    return replace(trace, users=("ann", "bob"), models=models, share_mib=share_mib, **columns)


def test_a_job_whose_name_is_unknown_is_not_of_the_last_ones_class():
    nodes, _ = nodes_of({"a": SharingSettings(mode="time-slicing", slowdown=0.5)})
    last = len(KINDS) - 1
    trace = shared(trace_of([0, 0, 1], [10, 10, 1], [1, 1, 0]), ["ann", "ann"], ["calm", "calm"], [20, 20])
    believed = beliefs_for(replace(trace, model=np.array([last, -1, last])), nodes, BELIEFS)
    assert believed.row.tolist() == [0, 1, -1]


def test_own_jobs_share_as_they_agreed_to_and_are_slowed_as_is_believed():
    """w is busy's third GPU's partner until busy ends, and keeps that GPU then, which nobody else gets before."""
    nodes, _ = nodes_of({"a": SharingSettings(mode="time-slicing", slowdown=0.5)})
    trace = trace_of([0, 0, 1, 2], [10, 40, 20, 1], [3, 1, 3, 0], limit=[100, 90, 50, 1])
    trace = shared(trace, ["ann", "bob", "bob"], ["calm", "calm", "calm"], [20, 20, -1])
    believed = beliefs_for(trace, nodes, BELIEFS)
    result = replay(trace, Pool.of([NodeSpec(GPUS)]), "fifo+easy", believed=believed)
    slow = 1 + slower("calm", "calm")
    assert result.start[:2].tolist() == [0, 0]
    assert result.end[0] == pytest.approx(10 * slow)
    assert result.end[1] == pytest.approx(10 * slow + 30)
    assert result.start[2] == result.end[1]
    assert metrics_of(result).gpu_hours * 3600 == pytest.approx(3 * 10 * slow + 30 + 3 * 20)
    assert "GPUs are shared: two jobs share as they agreed to" in result.notes


def test_own_jobs_share_at_measured_speeds_of_gpu_types():
    """On GPUs with half the speed both take twice as long, and are slowed down by each other as is believed."""
    nodes, _ = nodes_of({"a": SharingSettings(mode="time-slicing", slowdown=0.5)})
    trace = trace_of([0, 0, 1, 300], [10, 40, 5, 1], [3, 1, 3, 0], limit=[100, 90, 50, 1])
    trace = shared(trace, ["ann", "bob", "bob"], ["calm", "calm", "busy"], [20, 20, -1])
    speeds = {("calm", kind): Series({(1, 1): of, (3, 1): of}, "nodes") for kind, of in (("A", 8.0), ("B", 4.0))}
    rates = Rates(profiles=Profiles(series=speeds, recorded_on={"calm": "A"}))
    pool = Pool.of([NodeSpec(GPUS, gpu_type="B", name="a")])
    believed = beliefs_for(trace, nodes, BELIEFS)
    result = replay(trace, pool, "fifo+easy", believed=believed, rates=rates)
    slow = 1 + slower("calm", "calm")
    assert result.start.tolist() == [0, 0, pytest.approx(20 * slow + 60), 300]
    np.testing.assert_allclose(result.end[:3], [20 * slow, 20 * slow + 60, 20 * slow + 65])
    result = replay(trace, pool, "fifo-skip", placement="fastest", believed=believed, rates=rates)
    np.testing.assert_allclose(result.end[:2], [20 * slow, 20 * slow + 60])


@pytest.mark.parametrize(("policy", "placement"), [("rltune", None), ("rltune", "fastest"), ("fifo-skip", "fastest")])
def test_jobs_left_pending_by_agents_and_mappings_may_share(policy, placement):
    nodes, _ = nodes_of({"a": SharingSettings(mode="time-slicing", slowdown=0.5)})
    trace = trace_of([0, 1, 2, 3], [90, 40, 40, 1], [3, 1, 1, 0], limit=[100, 90, 90, 1])
    trace = shared(trace, ["ann", "bob", "ann"], ["calm", "calm", "calm"], [20, 20, 20])
    believed = beliefs_for(trace, nodes, BELIEFS)
    result = replay(trace, Pool.of([NodeSpec(GPUS)]), policy, placement=placement, believed=believed)
    assert result.start[:2].tolist() == [0, 1]
    assert result.start[2] == result.end[1]  # of the third one there is one partner at a time


def test_kinds_of_learned_pairs_are_no_gpu_types():
    nodes, _ = nodes_of({"a": SharingSettings(mode="time-slicing", slowdown=0.5), "b": None})
    trace = trace_of([0, 1, 2], [90, 40, 1], [3, 3, 0], limit=[100, 90, 1])
    trace = shared(trace, ["ann", "bob"], ["calm", "calm"], [20, 20])
    believed, pool = beliefs_for(trace, nodes, BELIEFS), Pool.of([NodeSpec(GPUS, name=name) for name in "ab"])
    assert believed.speed.shape[0] > len(pool.gpu_types)
    result = replay(trace, pool, "fifo-skip", placement="fastest", believed=believed)
    assert result.start[:2].tolist() == [0, 1]


def test_both_jobs_of_a_pair_have_room_on_all_their_links():
    """Of four jobs, two on the same GPUs, each is on two NICs and four uplinks."""
    trace = with_models(replace(trace_of([0] * 4, [10] * 4, [2] * 4), nodes=np.full(4, 2)), "mmmm")
    pool = Pool.of([NodeSpec(1, name=f"n{i}") for i in range(4)])
    above = {"top": None, "p0": "top", "p1": "top"} | {f"r{i}": f"p{i // 2}" for i in range(4)}
    switches = [Switch(name=name, parent=parent, uplink_gbps=100.0, nodes=(f"n{name[1]}",) if name[0] == "r" else ())
                for name, parent in above.items()]  # fmt: skip
    network, _ = network_for(Topology(switches=tuple(switches)), trace, pool)
    policy = replace(policy_by_name("fifo-skip"), placement="best-fit")
    world, _ = with_ways(world_of(trace, pool, policy, ReplayOptions(rates=RATES, share="pairs", network=network)))
    links = world.sim.links
    assert world.shared == "pairs"
    assert links_of(links.tree, np.array([0, 2]), 2, 1, links.use) == 6
    assert len(links.load.uses) > 4 * 6


def test_fair_share_counts_half_of_a_gpu_for_each_of_two_jobs():
    """Ann's two jobs on one GPU count as one, so that she goes before Bob, who has had two."""
    nodes, _ = nodes_of({"a": SharingSettings(mode="time-slicing", slowdown=0.5)})
    lasts = [1000, 1000, 100, 1000, 10, 10, 1]
    trace = trace_of([0, 0, 0, 0, 1, 2, 3], lasts, [1, 1, 1, 1, 1, 1, 0], limit=[2000] * 7)
    trace = shared(trace, ["ann", "bob", "bob", "ann", "bob", "ann"], ["calm"] * 6, [20, -1, -1, 20, -1, -1])
    result = replay(trace, Pool.of([NodeSpec(3)]), "fairshare", believed=beliefs_for(trace, nodes, BELIEFS))
    assert result.start[:6].tolist() == [0, 0, 0, 0, 110, 100]


def test_fair_share_counts_parts_of_gpus():
    users = {"user": np.array([1, 1, 0, 0, 0, 1, 0]), "users": ("ann", "bob")}
    lasts = [1000, 100, 1000, 1000, 1000, 10, 10]
    trace = fractions([0, 0, 0, 0, 0, 1, 2], lasts, [1000, 1000, 250, 250, 250, 1000, 1000])
    result = replay(replace(trace, **users), Pool.of([NodeSpec(3)]), "fairshare", share="fractions")
    assert result.start.tolist() == [0, 0, 0, 0, 0, 110, 100]


def test_gpus_held_by_a_sharing_job_are_not_what_the_head_waits_for():
    """The fifth gets two GPUs of the first at 100 s, so that the free one of the second node is for the sixth."""
    nodes, _ = nodes_of(dict.fromkeys("ab", SharingSettings(mode="time-slicing", slowdown=0.5)))
    limit = [100, 150, 1, 200, 50, 200, 1]
    trace = trace_of([0, 0, 0, 0, 1, 2, 3], [90, 140, 0.5, 190, 10, 20, 1], [3, 1, 1, 1, 2, 1, 0], limit=limit)
    trace = shared(trace, ["ann"] * 6, ["calm"] * 6, [20, -1, -1, 10, -1, -1])
    believed = beliefs_for(trace, nodes, BELIEFS)
    pool = Pool.of([NodeSpec(3), NodeSpec(2)])
    assert replay(trace, pool, "fifo+easy", believed=believed).start[[3, 5]].tolist() == [0, 2]


def first_decision(modes, has, waits, backfill, place):
    """Return starts, nodes and partners in a replay that begins in this state with the live estimates of these jobs.

    Jobs are numbered: those that run, those that wait, and one without GPUs, the first in the queue, so that the run
    ends for want of room in its log.
    """
    jobs, first = [*has, *waits], len(has)
    limit = np.array([*(one.end - NOW for one in has), *(float(one.limit) for one in waits), 1.0])
    gpus, cores = [*(len(one.gpus) for one in jobs), 0], [*(one.cores for one in jobs), 0]
    trace = trace_of(np.full(len(limit), NOW), limit, gpus, cores=cores, memory=[1] * len(jobs) + [0])
    pool = Pool.of([NodeSpec(GPUS, CORES, 99, name=name) for name in modes])
    policy = ReplayPolicy(name="t", order="fifo", knows="limit", source="", backfill=backfill, placement=place)
    shares = [one.memory_mib is not None and (one.ready or not one.node) for one in jobs]
    trace = shared(
        trace,
        [one.user for one in jobs],
        [one.name for one in jobs],
        [one.memory_mib if one_shares else -1 for one, one_shares in zip(jobs, shares, strict=True)],
    )
    trace, believed = replace(trace, nodes=np.ones_like(trace.gpus)), beliefs_for(trace, nodes_of(modes)[0], BELIEFS)
    network = learned_network(Topology(), trace, pool, BELIEFS)[0] if place == "contention" else None
    world, walk = world_of(trace, pool, policy, ReplayOptions(believed=believed, generic=True, network=network)), None
    if network is not None:
        world, walk = walked(*with_ways(world))
    queue = new_queue(world) if walk is None else walk.queue
    sim, log = world.sim, grown(log_of(world), world.sim)
    names = list(pool.names)
    sim.pairs.parted[0] = 1
    for row, one in enumerate(has):
        node, other, used = names.index(one.node), partner(has, one), world.passes.releases.used
        sim.held[sim.jobs["offset"][row]] = node
        mate = -1 if other is None else has.index(other)
        sim.pace.runs["mate"][row] = mate
        taken = len(one.gpus) if other is None or mate > row else len({*one.gpus} - {*other.gpus})
        sim.node["free"][node] -= taken
        sim.resources.gpus[node] -= taken
        sim.resources.cores[node] -= one.cores
        sim.resources.memory[node] -= 1
        parts = {"end": one.end, "node": node, "gpus": len(one.gpus), "cores": one.cores, "memory": 1, "owner": row}
        for name, value in parts.items():
            getattr(world.passes.releases, name)[used[0]] = value
        used[0] += 1
        sim.state["status"][row], sim.state["start"][row], sim.state["due"][row] = RUNNING, NOW, one.end
        push(sim.ends, one.end, row)
        join_links(sim.links, sim, row)
    order = [len(jobs), *range(first, len(jobs))]
    queue.waiting[: len(order)], queue.size[0] = order, len(order)
    sim.jobs["rank"][order] = np.arange(len(order))
    sim.state["status"][order] = WAITING
    sim.counter[RUNS], sim.counter[PARTS], sim.counter[IN_SYSTEM] = len(has), len(has), len(limit)
    sim.counter[ARRIVED], sim.clock[1] = len(limit), NOW
    log = log._replace(cuts=log.cuts[: len(has)])
    code = run_generic(sim, log, world.passes, queue) if walk is None else run_walk(sim, log, world.passes, walk)
    assert code == GROW
    assert sim.clock[0] == NOW
    found = {}
    for job, one in enumerate(waits, first):
        if sim.state["status"][job] == RUNNING:
            mate = sim.pace.runs["mate"][job]
            found[one.id] = names[sim.held[sim.jobs["offset"][job]]], jobs[mate].id if mate >= 0 else ""
    return found


@pytest.mark.compiled
@settings(max_examples=200, deadline=None)
@given(
    worlds(waits=6),
    st.sampled_from(["none", "skip", "easy", "conservative"]).map(lambda of: (of, "first-fit"))
    | st.sampled_from(["none", "skip", "easy"]).map(lambda of: (of, "contention")),
)
def test_live_shares_as_a_replay_does_from_the_same_state(world, stages):
    """Also where places cost what was learned."""
    as_a_replay_does(*world, *stages)


@st.composite
def many_kinds(draw):
    """More kinds of jobs wait than a pass looks at, at most nodes where each may be; some jobs are of the same kind."""
    modes = dict.fromkeys(ascii_lowercase[:14], SharingSettings(mode="time-slicing", slowdown=1.0))
    has = [Has(f"r{at:02}", "ann", draw(among(*KINDS)), 10, (at % GPUS,), "abcdefghijklmn"[at // GPUS], end=NOW + 99)
           for at in range(GPUS * len(modes))]  # fmt: skip
    kinds = [*product("uvwxyz", "abcdefgh")][: draw(st.integers(MAX_KINDS - 2, 40))]
    names = draw(st.permutations(["".join(of) for of in kinds for _ in range(draw(st.integers(1, 2)))]))
    memory = draw(st.lists(among(10, 20, 20), min_size=len(names), max_size=len(names)))
    return modes, has, [Has(f"w{at:03}", draw(among("ann", "bob")), name, mib, (0,), limit=draw(among(30, 150)))
                        for at, (name, mib) in enumerate(zip(names, memory, strict=True))]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(many_kinds(), st.sampled_from(["skip", "easy", "conservative"]))
def test_live_looks_at_as_many_kinds_of_jobs_as_a_replay_does(world, backfill):
    _, has, waits = world
    kinds = {(one.user, one.name, one.memory_mib): 0 for one in waits}
    looked_at = [one.id for one in waits if (one.user, one.name, one.memory_mib) in list(kinds)[:MAX_KINDS]]
    found = as_a_replay_does(*world, backfill, "first-fit")
    assert found.keys() <= set(looked_at)
    if backfill == "skip":
        assert [*found] == looked_at[: len(has)]


def as_a_replay_does(modes, has, waits, backfill, place):
    """Compare the live decision in this state with a replay's, and return it: job -> node and partner."""
    snap = snapshot_of(modes, has, waits)
    policy = msgspec.structs.replace(snap.policies["p"], backfill=backfill, place=place)
    snap = msgspec.structs.replace(snap, policies={"p": policy})
    where = {job: parts[0] for job, parts in started(decide(snap)).items()}
    on = {(one.node, gpu): one.id for one in has for gpu in one.gpus if not partner(has, one)}
    live = {}
    for job, (node, gpus) in where.items():
        live[job] = node, on.get((node, gpus[0]), "")
        on[node, gpus[0]] = job
    replayed = first_decision(modes, has, waits, backfill, place)
    assert {job: node for job, (node, _) in replayed.items()} == {job: node for job, (node, _) in live.items()}
    for job, (node, mate) in live.items():
        if mate:
            assert replayed[job] == (node, mate)
    return live
