"""Properties that every replay has, queueing theory, and what the engine's interface promises."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.compiled.loading import kind_of
from gpusched.config.policies import BUILT_IN, load_policy, names_in
from gpusched.errors import UsageError
from gpusched.sim.engine.build import ReplayOptions, world_of
from gpusched.sim.orders import known_policies
from gpusched.sim.policies import policy_by_name, policy_of_order
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import Outage, replay
from gpusched.sim.slicing import node_views
from gpusched.sim.stepper import Stepper
from gpusched.study.own import beliefs_for
from tests.sched.sharing import BELIEFS
from tests.sim.reference_pairs import pool_of, sharing_jobs, sharing_nodes
from tests.sim.worlds import engine_inputs, trace_of, workloads

pytestmark = pytest.mark.compiled  # what long traces run; elsewhere short ones may run as Python
PREEMPTIVE = ("srtf", "las", "drf-users")
_FILED = ("fifo+none", "fifo+skip", "sjf+none", "ljf+none", "fairshare+none")
COMPOSED = (*(n for n in known_policies() if n not in names_in((BUILT_IN,))), *_FILED)


def held(result):
    """(node, start, end, GPUs) of every part of every run, cut ones too."""
    rows = []
    for j in np.flatnonzero(np.isfinite(result.end)):
        rows += [(n, result.last_start[j], result.end[j], result.part_gpus[j]) for n in result.nodes_of(j)]
    cut = result.cut
    for i, j in enumerate(cut.job):
        nodes = cut.part_nodes[cut.part_offsets[i] : cut.part_offsets[i + 1]]
        rows += [(n, cut.start[i], cut.end[i], result.part_gpus[j]) for n in nodes]
    return rows


def assert_capacity(result):
    for node, gpus in enumerate(result.pool.gpus):
        steps = [(t, d) for n, a, b, g in held(result) if n == node for t, d in ((a, g), (b, -g))]
        used = 0
        for _, step in sorted(steps):  # at one time what ends comes first
            used += step
            assert used <= gpus


def events_of(result):
    return hashlib.sha256(result.events.tobytes() + result.part_nodes.tobytes()).hexdigest()


@pytest.mark.parametrize("policy", COMPOSED)
@given(workloads(), st.sampled_from(["best-fit", "random", "naive", "worst-fit"]))
@settings(max_examples=12, deadline=None)
def test_no_gpu_twice_gangs_whole_and_nobody_is_forgotten(policy, world, placement):
    jobs, nodes, outages = world
    trace, pool = engine_inputs(jobs, nodes)
    failures = [Outage(o.node, o.start, o.end, o.drain) for o in outages]
    policy = policy_of_order(policy)
    result = replay(trace, pool, policy, placement=placement, failures=failures, restart_s=0.25, seed=3)
    assert_capacity(result)
    feasible = np.setdiff1d(np.arange(len(trace)), result.infeasible)
    for j in feasible:
        if np.isfinite(result.end[j]):
            mine = result.nodes_of(j)
            assert len(set(mine)) == len(mine)
            assert len(mine) * result.part_gpus[j] == trace.gpus[j]
            assert trace.submit[j] <= result.start[j] <= result.last_start[j] < result.end[j]
            before = trace.depends_on[j]
            assert before < 0 or result.start[j] >= result.end[before]
    if not any(o.end == math.inf for o in failures):
        assert np.isfinite(result.end[feasible]).all()
    assert np.isnan(result.start[result.infeasible]).all()
    again = replay(trace, pool, policy, placement=placement, failures=failures, restart_s=0.25, seed=3)
    assert events_of(again) == events_of(result)
    order = np.lexsort((result.events.time,))
    assert (order == np.arange(len(order))).all()


@pytest.mark.parametrize("policy", PREEMPTIVE)
@given(workloads(failing=False), st.sampled_from([0.0, 0.25]))
@settings(max_examples=30, deadline=None)
def test_preempted_work_is_kept_and_restarts_cost(policy, world, restart_s):
    trace, pool = engine_inputs(*world[:2])
    result = replay(trace, pool, policy, restart_s=restart_s)
    ran = result.end - result.last_start
    np.add.at(ran, result.cut.job, result.cut.end - result.cut.start)
    done = np.isfinite(result.end)
    overhead = ran[done] - trace.duration[done]
    assert (overhead >= -1e-9).all()
    assert (overhead <= result.restarts[done] * restart_s + 1e-9).all()
    single = done & (result.restarts <= 1)
    np.testing.assert_allclose((ran - trace.duration)[single], (result.restarts * restart_s)[single], atol=1e-9)


@given(workloads(failing=False))
@settings(max_examples=40, deadline=None)
def test_fifo_starts_in_order_and_wastes_nothing(world):
    trace, pool = engine_inputs(*world[:2])
    trace = trace_of(trace.submit, trace.duration, trace.gpus)
    result = replay(trace, pool, "fifo")
    start = result.start[np.isfinite(result.start)]
    assert (np.diff(start) >= 0).all()
    skip = replay(trace_of(trace.submit, trace.duration, np.ones(len(trace))), pool, "fifo-skip")
    for j in range(len(trace)):  # work conservation: jobs wait only while all GPUs are held
        if skip.start[j] > trace.submit[j]:
            busy = ((skip.start < skip.start[j]) & (skip.end >= skip.start[j])).sum()
            assert busy >= pool.total_gpus


def erlang_wait(rate, service, servers):
    load = rate * service
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last) * service / (servers - load)


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (4, 0.8), (16, 0.9)])
def test_mean_wait_is_erlangs(servers, load):
    """M/M/c, 100,000 jobs: within 4 %."""
    rng = np.random.default_rng(7)
    jobs, service = 100_000, 100.0
    submit = np.cumsum(rng.exponential(service / (servers * load), jobs))
    trace = trace_of(submit, rng.exponential(service, jobs), np.ones(jobs))
    result = replay(trace, Pool.uniform(1, servers), "fifo")
    wait = float((result.start - trace.submit)[jobs // 20 :].mean())
    assert wait == pytest.approx(erlang_wait(load * servers / service, service, servers), rel=0.04)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_mean_wait_is_pollaczek_and_khinchines(load):
    """M/G/1 with uniform run times, 100,000 jobs: within 4 %."""
    rng = np.random.default_rng(8)
    jobs = 100_000
    duration = rng.uniform(1.0, 9.0, jobs)
    mean, second = 5.0, 25.0 + 64.0 / 12
    trace = trace_of(np.cumsum(rng.exponential(mean / load, jobs)), duration, np.ones(jobs))
    result = replay(trace, Pool.uniform(1, 1), "fifo")
    wait = float((result.start - trace.submit).mean())
    assert wait == pytest.approx(load / mean * second / (2 * (1 - load)), rel=0.04)


def test_jobs_split_into_the_fewest_equal_parts_and_the_impossible_are_named():
    trace = trace_of([0] * 6, [1] * 6, [8, 10, 9, 16, 11, 40])
    result = replay(trace, Pool.uniform(4, 8), "fifo-skip")
    parts = np.diff(result.part_offsets)
    assert parts.tolist() == [1, 2, 3, 2, 0, 0]
    assert result.infeasible.tolist() == [4, 5]
    assert "11 GPUs" in result.infeasible_why[0]
    assert replay(trace, Pool.uniform(1, 128), "fifo").infeasible.size == 0


def test_nodes_of_unknown_memory_have_enough_for_any_job():
    pool = Pool.of([NodeSpec(8, memory_mib=1 << 16), NodeSpec(8)])
    result = replay(trace_of([0], [10], [1], memory=[3 << 20]), pool, "fifo")
    assert result.start.tolist() == [0.0]


def test_waiting_for_the_impossible_is_impossible():
    result = replay(trace_of([0, 0, 0], [1, 1, 1], [99, 1, 1], depends_on=[-1, 0, 1]), Pool.uniform(1, 8), "fifo")
    assert result.infeasible.tolist() == [0, 1, 2]
    assert result.infeasible_why[1] == "waits for a job that can never run"


def test_limits_kill_only_if_asked_to():
    trace = trace_of([0, 0], [10, 3], [1, 1], limit=[5, 5])
    assert replay(trace, Pool.uniform(1, 1), "fifo").end.tolist() == [10, 13]
    result = replay(trace, Pool.uniform(1, 1), "fifo", limits=True)
    assert result.end.tolist() == [5, 8]
    assert result.killed.tolist() == [True, False]


def test_partitions_have_their_own_queues_and_types_bind():
    pool = Pool.of([NodeSpec(2, gpu_type="A", partition="a"), NodeSpec(2, gpu_type="B", partition="b")])
    base = trace_of([0, 0, 0], [5, 5, 5], [2, 2, 2])
    columns = {**vars(base), "groups": ("b", "a", "c"), "group": np.array([0, 1, 2])}
    result = replay(type(base)(**columns), pool, "fifo")
    assert result.nodes_of(0).tolist() == [1]
    assert result.nodes_of(1).tolist() == [0]
    assert result.infeasible_why == ("no partition named 'c'",)


@pytest.mark.parametrize("placement", ["best-fit", "fastest"])
def test_partitions_decide_by_users_usage_before_any_of_them_has(placement):
    """As live: that ann's job starts in one partition does not put her behind bob in the other one, at one instant."""
    trace = trace_of([0.0] * 6, [60.0] * 6, [1] * 6, user=[0, 0, 1] * 2)
    trace = replace(trace, users=("ann", "bob"), group=np.repeat([0, 1], 3), groups=("p", "q"))
    pool = Pool.of([NodeSpec(1, partition="p"), NodeSpec(1, partition="q")])
    assert replay(trace, pool, "fairshare", placement=placement).start.tolist() == [0.0, 120.0, 60.0] * 2


DECIDED = ("fifo+easy", "sjf-oracle", "fifo+conservative", "sjf-estimate+easy", "multifactor", *PREEMPTIVE)


@pytest.mark.parametrize(
    ("policies", "how"),
    [
        (DECIDED, {"NUMBA_DISABLE_JIT": "1"}),
        (("fifo+easy",), {"GPUSCHED_COMPILED": "numba", "NUMBA_OPT": "1"}),  # compiled sooner
    ],
    ids=["plain", "numba"],
)
def test_plain_python_and_numba_alone_decide_the_same(policies, how):
    program = f"from tests.sim.test_engine import events_of, small\nprint(*[events_of(small(p)) for p in {policies}])\n"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, env=os.environ | how, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [events_of(small(policy)) for policy in policies], done.stderr


def small(policy):
    rng = np.random.default_rng(5)
    jobs = 60
    duration = rng.integers(1, 40, jobs) * 0.5
    submit = np.sort(rng.integers(0, 60, jobs) * 0.5)
    trace = trace_of(
        submit, duration, rng.choice([1, 2, 4, 8], jobs), limit=2 * duration, user=rng.integers(0, 4, jobs)
    )
    failures = [Outage(1, 10.0, 20.0), Outage(0, 15.0, 25.0, True)]
    return replay(trace, Pool.uniform(4, 4), policy, failures=failures, placement="random", restart_s=0.5)


@pytest.mark.parametrize("partitions", ["p", "pq"])
def test_numbers_and_layouts_that_mean_the_same_need_one_compiled_version(partitions):
    """Each further version takes half a minute to compile."""
    pool = pool_of(partitions)
    trace = sharing_jobs(1, pool)
    believed = beliefs_for(trace, sharing_nodes(node_views(pool)), BELIEFS)
    without_kinds = believed._replace(row=np.full_like(believed.row, -1))
    whole, parts = (
        world_of(trace, pool, policy_by_name("fifo"), ReplayOptions(believed=of, restart_s=restart_s))
        for of, restart_s in ((believed, 2), (without_kinds, 2.0))
    )
    assert kind_of((whole.sim, whole.restart_s)) == kind_of((parts.sim, parts.restart_s))
    assert whole.sim.pace.speed.flags.c_contiguous


def test_conservative_delays_no_earlier_job():
    """With exact run times on one node, later jobs change no start of earlier ones."""
    rng = np.random.default_rng(11)
    jobs = 120
    duration = rng.integers(1, 30, jobs).astype(float)
    submit = np.sort(rng.integers(0, 200, jobs)).astype(float)
    gpus = rng.integers(1, 9, jobs)
    whole = replay(trace_of(submit, duration, gpus), Pool.uniform(1, 8), "fifo+conservative")
    for count in range(10, jobs, 10):
        part = trace_of(submit[:count], duration[:count], gpus[:count])
        first = replay(part, Pool.uniform(1, 8), "fifo+conservative")
        np.testing.assert_array_equal(first.start, whole.start[:count])
    fifo = replay(trace_of(submit, duration, gpus), Pool.uniform(1, 8), "fifo")
    assert whole.start.mean() < fifo.start.mean()


def test_code_for_one_backfill_serves_all():
    trace, kinds = trace_of([0, 1], [5, 5], [1, 2]), []
    for backfill in ("skip", "easy", "conservative"):
        world = world_of(trace, Pool.uniform(2, 2), policy_of_order(f"fifo+{backfill}"), ReplayOptions(generic=True))
        kinds.append(kind_of((world.sim, world.passes)))
    assert kinds[0] == kinds[1] == kinds[2]


@pytest.mark.parametrize("backfill", ["easy", "conservative"])
def test_backfill_that_looks_only_so_often_lets_others_start_in_order_at_once(backfill):
    """Half a node is held to 100, all of it is wanted next; smaller jobs may go before that at 30, 60 and 90 only."""
    submit, duration, gpus = [0, 1, 2, 31, 59.5, 95], [100, 20, 10, 5, 40, 3], [4, 8, 4, 4, 4, 1]
    trace = trace_of(submit, duration, gpus)
    rare = replay(trace, Pool.uniform(1, 8), f"fifo+{backfill}", backfill_every_s=30.0)
    assert rare.start.tolist() == [0, 100, 30, 60, 120, 120]
    often = replay(trace, Pool.uniform(1, 8), f"fifo+{backfill}")
    assert often.start.tolist() == [0, 100, 2, 31, 59.5, 120]


def test_a_policy_in_plain_python_plugs_in():
    def shortest_first(stepper: Stepper) -> None:
        for job in sorted(stepper.waiting(), key=lambda j: (stepper.trace.duration[j], j)):
            if not stepper.start(job):
                return

    shortest_first.knows = "oracle"
    rng = np.random.default_rng(2)
    trace = trace_of(np.sort(rng.random(200) * 300), rng.random(200) * 20 + 1, rng.choice([1, 2, 4, 8, 16], 200))
    pool = Pool.uniform(3, 8)
    mine, ours = replay(trace, pool, shortest_first), replay(trace, pool, "sjf-oracle")
    assert mine.events.tobytes() == ours.events.tobytes()
    assert (mine.policy, mine.knows) == ("shortest_first", "oracle")


def test_the_stepper_refuses_what_cannot_be():
    stepper = Stepper(trace_of([0, 0], [5, 5], [8, 8]), Pool.uniform(1, 8))
    assert stepper.advance()
    assert stepper.start(0, [0])
    assert not stepper.start(1)
    for nodes in ([0], [0, 0], [3], []):
        with pytest.raises(UsageError, match="cannot start"):
            stepper.start(1, nodes)
    with pytest.raises(UsageError, match="is not pending"):
        stepper.start(0)
    with pytest.raises(UsageError, match="only just"):
        stepper.preempt(0)
    assert stepper.advance(until=2.0)
    stepper.preempt(0)
    assert stepper.start(1)
    assert stepper.advance()
    assert stepper.now == 7.0
    assert stepper.start(0)
    while stepper.advance():
        pass
    assert stepper.result("x").end.tolist() == [10.0, 7.0]


def test_every_policy_says_what_it_knows_and_where_it_is_from():
    for name in COMPOSED:
        policy = policy_of_order(name)
        assert policy.source
        assert policy.knows in ("nothing", "limit", "estimate", "oracle")
    assert policy_of_order("sjf-oracle").knows == "oracle"
    assert policy_by_name("fifo").knows == "nothing"
    assert policy_by_name("fifo+easy").knows == "limit"
    live = policy_by_name("policies/easy.yaml")
    assert (live.order, live.backfill, live.placement) == ("fifo", "easy", "best-fit")
    for name in ("sjf", "ljf", "fairshare", "fifo", "easy"):  # one meaning, live and replayed
        spec = load_policy(BUILT_IN / f"{name}.yaml")
        named = policy_by_name(name)
        assert (named.order, named.backfill, named.placement) == (spec.order, spec.backfill, spec.place)
    assert policy_by_name("greedy-gain").spec == load_policy(BUILT_IN / "elastic.yaml")
    assert policy_by_name("drf-users").kind == "preemptive"
    assert policy_by_name("drf").spec == load_policy(BUILT_IN / "drf.yaml")
    with pytest.raises(UsageError, match="did you mean 'fifo'"):
        policy_by_name("fifoo")


def test_orders_go_by_what_live_policies_go_by():
    trace = trace_of([0, 0, 0, 0], [9, 1, 5, 3], [2, 2, 2, 2], limit=[10, 40, 30, 20])
    sizes = trace_of([0, 0, 0, 0], [5, 5, 5, 5], [1, 2, 3, 4])

    def begun(name, of=trace, gpus=2):
        return np.argsort(replay(of, Pool.uniform(1, gpus), name).start, kind="stable").tolist()

    for name in ("sjf", "sjf+none", "sjf-limit"):
        assert begun(name) == [0, 3, 2, 1], name
    assert begun("sjf-oracle") == begun("spt") == [1, 3, 2, 0]
    assert begun("lpt-oracle") == begun("lpt") == [0, 2, 3, 1]
    assert begun("lpt-limit") == begun("ljf-limit") == [1, 2, 3, 0]
    for name in ("ljf", "ljf+none", "largest"):
        assert begun(name, sizes, 4)[0] == 3, name
    assert begun("smallest", sizes, 4)[:2] == [0, 1]


@pytest.mark.parametrize("name", ["fifo", "sjf-oracle", "f1", "wfp3+easy", "fairshare+conservative", "sjf-estimate"])
def test_explicit_priorities_go_before_every_order(name):
    limits, users = [60, 10, 20, 10, 20], [0, 1, 2, 2, 2]
    trace = trace_of([0, 1, 2, 3, 4], [50, 5, 9, 5, 9], [2, 2, 2, 2, 2], limit=limits, user=users)
    trace = replace(trace, priority=np.array([0, 0, 5, -1, 5]))
    assert replay(trace, Pool.uniform(1, 2), name).start.tolist() == [0, 68, 50, 73, 59]


@pytest.mark.parametrize("name", ["srtf", "las", "drf-users"])
def test_explicit_priorities_go_before_every_order_that_stops_jobs(name):
    trace = trace_of([0, 1, 2, 3], [9, 99, 1, 8], [2, 2, 2, 2], user=[0, 0, 1, 2])
    trace = replace(trace, priority=np.array([0, 5, 0, 7]))
    assert replay(trace, Pool.uniform(1, 2), name).end[[3, 1]].tolist() == [11, 108]


def test_past_usage_decays_by_the_sites_half_life():
    """Ann had 8 GPUs for an hour, long ago; Bob had one lately. Who goes first depends on the half-life."""
    hour = 3600.0
    trace = trace_of(
        [0, 40 * hour, 43 * hour, 43.1 * hour, 43.1 * hour], [hour, 2 * hour, hour, 1, 1], [8, 1, 8, 8, 8],
        user=np.array([0, 1, 2, 1, 0]),
    )  # fmt: skip
    slow, fast = (replay(trace, Pool.uniform(1, 8), "fairshare+none", half_life_s=s * hour).start for s in (1000, 2))
    assert slow[3] < slow[4]
    assert fast[4] < fast[3]


def test_a_trace_without_limits_makes_backfill_an_oracle_with_a_note():
    trace = trace_of([0], [5], [1], limit=[np.nan])
    result = replay(trace, Pool.uniform(1, 8), "fifo+easy")
    assert result.knows == "oracle"
    assert "no limits" not in result.policy
    assert "the trace has none" in result.notes[0]


def test_srtf_beats_sjf_and_restarts_cost():
    trace = trace_of([0, 1], [100, 1], [8, 8])
    pool = Pool.uniform(1, 8)
    assert replay(trace, pool, "sjf-oracle").end.tolist() == [100, 101]
    assert replay(trace, pool, "srtf").end.tolist() == [101, 2]
    assert replay(trace, pool, "srtf", restart_s=10.0).end.tolist() == [111, 2]


def test_las_demotes_jobs_that_have_had_their_share():
    trace = trace_of([0, 1], [100, 10], [8, 8])
    result = replay(trace, Pool.uniform(1, 8), "las", las_thresholds_gpu_s=[80.0])
    assert result.end.tolist() == [110, 20]
    assert result.cut.end.tolist() == [10.0]


def test_drf_shares_between_users():
    trace = trace_of([0] * 6, [10] * 6, [4] * 6, user=[0, 0, 0, 0, 0, 1])
    result = replay(trace, Pool.uniform(2, 4), "drf-users")
    assert result.start[5] == 0.0


def test_jobs_that_waited_when_a_window_begins_have_waited_since_their_submission():
    """A job runs on half of the nodes; of the two that waited the earlier is long, the later the first by its wait."""
    trace = trace_of([-60, -900, -300, 10], [6000, 5000, 60, 20], [4, 4, 4, 4])
    trace, pool = replace(trace, arrival=np.array([0.0, 1.0, 1.0, 10.0])), Pool.uniform(2, 4)
    assert replay(trace, pool, "fifo").start.tolist() == [0, 1, 5001, 5061]
    assert replay(trace, pool, "wfp3").start.tolist() == [0, 81, 1, 61]
    late = replace(trace, submit=np.maximum(trace.submit, trace.arrival))
    assert replay(late, pool, "wfp3").start.tolist() == [0, 1, 5021, 5001]


def test_progress_is_reported_during_a_replay(monkeypatch):
    """From another thread, so the run must be one that lets others go on: a queue of thousands, walked every time."""
    monkeypatch.setattr("gpusched.sim.replay.WATCH_S", 0.002)
    jobs = 3000
    trace = trace_of(np.arange(jobs) * 0.01, np.full(jobs, 1.0), np.ones(jobs, int), limit=np.full(jobs, 2.0))
    shares = []
    plain = replay(trace, Pool.uniform(1, 4), "wfp3")
    watched = replay(trace, Pool.uniform(1, 4), "wfp3", progress=shares.append)
    assert events_of(plain) == events_of(watched)
    assert any(0 < share < 1 for share in shares)
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1


def test_of_outages_that_overlap_the_last_to_end_brings_the_node_back() -> None:
    drained_while = [Outage(0, 0.0, 100.0, True), Outage(0, 50.0, 60.0)]
    for failures, start in (([Outage(0, 0.0, 50.0), Outage(0, 20.0, 80.0)], 80.0), (drained_while, 100.0)):
        trace = trace_of([55.0], [10.0], [1])
        assert replay(trace, Pool.uniform(1, 1), "fifo", failures=failures).start.tolist() == [start]


def test_a_stepper_s_time_goes_no_way_back_and_an_earlier_until_is_over() -> None:
    stepper = Stepper(trace_of([0.0, 30.0], [5.0, 5.0], [1, 1]), Pool.uniform(1, 1), ReplayOptions())
    times = []
    for until in (np.inf, 20.0, 2.0, np.inf):
        assert stepper.advance(until)
        times.append(stepper.now)
        if stepper.now == 0.0:
            stepper.start(0)
    assert times == [0.0, 5.0, 5.0, 30.0]
