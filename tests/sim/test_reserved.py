"""Replays of a cluster of which nodes are reserved, against decisions of the live passes, one after the other."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as changed

from gpusched.errors import GpuschedError
from gpusched.model.jobs import JobRecord, JobState
from gpusched.model.reservations import Reservation
from gpusched.queue.store import Store
from gpusched.sim.outages import read_reservations
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import Outage, replay
from gpusched.sim.reserving import Booking, bookings_of
from gpusched.sim.stepper import PolicyFunction, Stepper
from gpusched.study.own import RESERVED, with_run_conditions
from gpusched.study.study import Scenario
from tests.sched.reserved import H, drawn, driven, some_in_reservations
from tests.sched.worlds import NOW, pending
from tests.sim.links import World
from tests.sim.reserved import POOL, bookings, trace_of


@pytest.mark.parametrize("backfill", ["none", "easy", "skip", "conservative"])
@pytest.mark.parametrize("seed", range(6))
def test_a_replay_is_what_the_live_passes_do(seed: int, backfill: str) -> None:
    """With odd seeds also where jobs are in reservations, and from the fourth on where they end early."""
    snap, ones = drawn(random.Random(seed), backfill)
    if seed % 2:
        snap = some_in_reservations(snap, ones)
    happened, share = dict[str, float](), 0.5 if seed > 2 else 1.0
    for now, begun, _ in driven(snap, ones, share):
        happened |= dict.fromkeys(begun, now - NOW)
    trace = trace_of(snap)
    trace = replace(trace, duration=share * trace.limit)
    result = replay(
        trace, POOL, f"fifo+{backfill}", placement="first-fit", reservations=bookings(ones, snap)
    )  # fmt: skip
    begun = {job: start for job, start in zip(result.trace.ids, result.start.tolist(), strict=True) if start >= 0}
    assert begun == pytest.approx(happened, abs=1e-3)


@pytest.mark.parametrize(("policy", "long"), [("fifo+none", 1.5), ("las", 0.125), ("easy", 1.5)])
def test_nodes_are_kept_by_limits_whatever_a_policy_knows(policy: str, long: float) -> None:
    """What nobody knows: ``r`` ends early. Until it does, or may be stopped, all free nodes are kept for ``all``."""
    asked = (pending("r", 8, limit=10 * H), pending("all", 8, 4, limit=24 * H), pending("long", 1, limit=5 * H))
    trace = trace_of(changed(drawn(random.Random(0), "none")[0], pending=asked))
    trace = replace(trace, duration=np.array([1.5 * H, 24 * H, 5 * H]))
    reserved = (Booking("m", (0, 1), 0, 4 * H),)
    result = replay(trace, Pool.uniform(5, 8), policy, placement="first-fit", reservations=reserved, restart_s=0)
    assert (result.start / H).tolist() == [0.0, 4.0, long]


def in_strict_order(stepper: Stepper) -> None:
    for job in stepper.waiting():
        if not stepper.start(job):
            return


@pytest.mark.parametrize("policy", ["fifo+none", in_strict_order])
def test_a_row_that_turns_is_an_instant_for_every_engine(policy: str | PolicyFunction) -> None:
    """Before a maintenance ``first`` waits for ``r``, until that could not end any more: then ``next`` starts."""
    asked = (pending("r", 8, limit=6 * H), pending("first", 8, 2, limit=5 * H), pending("next", 1, limit=H))
    trace = trace_of(changed(drawn(random.Random(0), "none")[0], pending=asked))
    reserved = (Booking("m", (0, 1), 10 * H, 12 * H),)
    result = replay(trace, Pool.uniform(2, 8), policy, placement="first-fit", reservations=reserved)
    assert (result.start / H).tolist() == pytest.approx([0, 12, 5])


@pytest.mark.parametrize("policy", ["fifo", "easy", "fairshare", "fifo+conservative"])
@pytest.mark.parametrize("seed", range(2))
def test_nothing_starts_that_cannot_end_before(policy: str, seed: int) -> None:
    """Of any policy; and all jobs run in the end."""
    snap, ones = drawn(random.Random(seed), "easy")
    trace, kept = trace_of(snap), bookings(ones, snap)
    result = replay(trace, POOL, policy, reservations=kept)
    assert np.isfinite(result.start).all()
    for job in range(len(trace)):
        nodes = result.part_nodes[result.part_offsets[job] : result.part_offsets[job + 1]].tolist()
        for one in kept:
            if set(nodes) & set(one.nodes):
                start, end = result.last_start[job], result.last_start[job] + trace.limit[job]
                assert end <= one.start or start >= one.end, (trace.ids[job], one)


def test_jobs_of_a_reservation_run_in_it_and_nowhere_else() -> None:
    snap, _ = drawn(random.Random(0), "easy")
    snap = changed(snap, pending=tuple(pending(f"{i}", 4, limit=H, submit=i) for i in range(4)))
    one = Reservation(name="class", nodes=("n0001", "gone"), begin=NOW + 2 * H, end=NOW + 9 * H)
    trace = trace_of(snap, epoch=NOW)
    found = bookings_of([one], {"class": ["1", "2", "elsewhere"]}, replace(trace, submit=trace.submit + 3 * H), POOL)
    assert found == (Booking("class", (1,), 2.0 * H, 9.0 * H, frozenset({"1", "2"})),)
    result = replay(trace, POOL, "easy", reservations=found)
    assert result.start.tolist() == [0, 2 * H, 3 * H, 0]
    assert result.part_nodes[1:3].tolist() == [1, 1]


def test_nodes_are_kept_for_another_than_what_waits_for_its_own_reservation() -> None:
    """Its nodes are reserved for it in any case: ``all`` has the place, so that ``long`` waits for it."""
    own, whole, long = pending("own", 1, limit=H), pending("all", 8, 2, limit=24 * H), pending("long", 1, limit=5 * H)
    trace = trace_of(changed(drawn(random.Random(0), "none")[0], pending=(own, whole, long)))
    pool = Pool.of([NodeSpec(8), NodeSpec(8), NodeSpec(4)])
    kept = Booking("class", (2,), 0.5 * H, 4 * H, frozenset({"own"})), Booking("m", (0,), H, 4 * H)
    for policy in ("fifo+none", "easy"):
        result = replay(trace, pool, policy, placement="first-fit", reservations=kept)
        assert (result.start / H).tolist() == [0.5, 4, 4], policy


@pytest.mark.parametrize("placement", ["best-fit", "contention", "rack-wait"])
def test_jobs_of_a_reservation_run_in_it_where_placement_costs_something(placement: str) -> None:
    world = World(3)

    def start_in(nodes: int) -> float:
        one = Booking("class", tuple(range(nodes)), 30.0, 500.0, frozenset(world.trace.ids[:1]))
        asked = {"placement": placement, "network": world.network, "reservations": (one,), "generic": True}
        return float(replay(world.trace, world.pool, "easy", **asked).start[0])

    assert start_in(len(world.pool)) == 30
    assert math.isnan(start_in(2))  # it has too few GPUs for the job, which starts nowhere else


def test_a_place_is_kept_where_placement_costs_something_too() -> None:
    """Replays that usually go by an index walk the queue then, as `sched.keeping` is the walk's."""
    for seed in (12, 14, 22, 25):
        world = World(seed)
        one = Booking("m", tuple(range((len(world.pool) + 1) // 2)), 20.0, 60.0)
        asked = {"placement": "best-fit", "network": world.network, "reservations": (one,)}
        usual, walk = (replay(world.trace, world.pool, "easy", generic=g, **asked) for g in (False, True))
        np.testing.assert_array_equal(usual.start, walk.start, err_msg=f"seed {seed}")


def test_node_failures_and_reservations_go_together() -> None:
    """A node that is away when its reservation ends comes back later."""
    snap, _ = drawn(random.Random(0), "easy")
    snap = changed(snap, pending=(pending("a", 4, 4, limit=H),))
    away = (Outage(0, H, 5 * H, drain=True),)
    result = replay(trace_of(snap), POOL, "easy", reservations=(Booking("m", (0, 1), 0.5 * H, 3 * H),), failures=away)
    assert result.start.tolist() == [5 * H]


def test_own_reservations_come_from_the_store(tmp_path: Path) -> None:
    """Those of the time of the trace, with the jobs that asked for them."""
    store = Store.create_or_open(tmp_path)
    spec = changed(pending("x", 1).spec, reservation="class")
    job = JobRecord(id="1", user="u", uid=1, spec=spec, state=JobState.COMPLETED, submit_time=NOW)
    with store.transaction():
        store.put_jobs([job, changed(job, id="2", spec=changed(spec, reservation=""))])
        for name, begin in (("before", -9), ("class", 2), ("later", 99)):
            one = Reservation(name=name, nodes=("n0001",), begin=NOW + begin * H, end=NOW + (begin + 1) * H)
            store.put_reservation(one, 0.0)
    snap = changed(drawn(random.Random(0), "easy")[0], pending=tuple(pending(i, 4, limit=H) for i in "123"))
    trace = replace(trace_of(snap, epoch=NOW), submit=np.array([0.0, 0.0, 5 * H]))
    scenario = with_run_conditions(Scenario(trace, POOL, None), None, store)  # type: ignore[arg-type]
    assert scenario.reserved == (Booking("class", (1,), 2.0 * H, 3.0 * H, frozenset({"1"})),)
    assert scenario.notes == (RESERVED.format(1),)
    store.close()


def test_planned_ones_come_from_a_file(tmp_path: Path) -> None:
    """With its line, where something is wrong."""
    file = tmp_path / "planned.csv"
    file.write_text("node,start,end\nn0001,10,20\nn0001,20,30\n")
    assert read_reservations(file, POOL) == (Booking("0", (1,), 10, 20), Booking("1", (1,), 20, 30))
    for text, said in (("n0001,10,", ":2: end"), ("n0001,10,20\nn0001,15,30", ":3: start"), ("x,1,2", ":2: node")):
        file.write_text(f"node,start,end\n{text}\n")
        with pytest.raises(GpuschedError) as caught:
            read_reservations(file, POOL)
        assert said in caught.value.line()


def test_orders_without_run_times_need_none_where_nodes_are_reserved() -> None:
    """Nor do they warn: of what is looked ahead to, a job without a limit never ends."""
    trace = trace_of(drawn(random.Random(0), "none")[0])
    trace = replace(trace, limit=np.full(len(trace), np.nan), gpus=0 * trace.gpus)
    assert replay(trace, POOL, "fifo", reservations=(Booking("r", (0,), 1e6, 2e6),)).notes == ()
