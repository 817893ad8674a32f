"""Decisions with reservations, and what must hold of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpusched.model.plan import Plan, Start
from gpusched.model.reservations import Reservation, by_node, overlapping
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from tests.sched import worlds
from tests.sched.worlds import NOW, node, pending, snapshot
from tests.strategies import among

H = 3600


FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def reservation(name: str, nodes: Sequence[str], begin: float, end: float, **more: object) -> Reservation:
    """``begin`` and ``end``: from now."""
    return Reservation(name=name, nodes=tuple(nodes), begin=NOW + begin, end=NOW + end, **more)  # type: ignore[arg-type]


def with_reservations(snap: Snapshot, *ones: Reservation) -> Snapshot:
    """The snapshot at its time, with the jobs that name one of these in it."""
    found, names = by_node(ones, snap.now), {one.name: one for one in ones}
    return replace(
        snap,
        nodes=tuple(replace(n, reservations=found.get(n.name, ())) for n in snap.nodes),
        pending=tuple(replace(j, reserved=names.get(j.spec.reservation)) for j in snap.pending),
    )


def of(name: str, job: PendingView) -> PendingView:
    """The job in a reservation."""
    return replace(job, spec=replace(job.spec, reservation=name))


@st.composite
def reserved_snapshots(draw: st.DrawFn, racked: bool = False) -> Snapshot:
    """Random snapshots with random reservations, and jobs in some of them."""
    snap = draw(worlds.snapshots(racked=racked))
    ones: list[Reservation] = []
    for i in range(draw(st.integers(1, 4))):
        nodes = draw(st.lists(st.sampled_from([n.name for n in snap.nodes]), min_size=1, max_size=3, unique=True))
        begin = draw(among(-600, 0, 600, 1200, 3000, 7200))
        one = reservation(f"r{i}", nodes, begin, begin + draw(among(700, 3600, 40000)))
        if one.end > NOW and overlapping(one, ones) is None:
            ones.append(one)
    names = ["", "", "", *(one.name for one in ones)]
    jobs = tuple(of(draw(among(*names)), job) for job in snap.pending)
    return with_reservations(replace(snap, pending=jobs), *ones)


def breaks(snap: Snapshot, start: Start) -> bool:
    """By the definition: counted on its own."""
    job = next(j for j in snap.pending if j.id == start.job_id)
    end = snap.now + job.spec.time_limit_s
    for part in start.allocation.parts:
        here = next(n for n in snap.nodes if n.name == part.node).reservations
        if job.spec.reservation:
            own = [one for one in here if one.name == job.spec.reservation]
            if not own or not own[0].begin <= snap.now or end > own[0].end + 600:
                return True
        if any(not (end <= one.begin or one.end <= snap.now) for one in here if one.name != job.spec.reservation):
            return True
    return False


def sound(snap: Snapshot, plan: Plan) -> None:
    """A plan breaks no reservation, and the check finds nothing to refuse."""
    assert not any(breaks(snap, a) for a in plan.actions if isinstance(a, Start))
    assert check(plan, snap)[1] == ()


def drawn(draw: random.Random, backfill: str) -> tuple[Snapshot, list[Reservation]]:
    """Four nodes, a queue, and maintenances of some of them for days."""
    nodes = [node(f"n{i}", gpus=4) for i in range(4)]
    jobs = [
        pending(
            f"{i:03}",
            draw.choice([1, 2, 4]),
            draw.choice([1, 1, 2, 4]),
            limit=draw.choice([1, 2, 3, 5, 9]) * H,
            submit=i,
        )
        for i in range(25)
    ]
    ones: list[Reservation] = []
    for i in range(8):
        begin, of_nodes = draw.randrange(1, 60) * H, draw.sample([n.name for n in nodes], draw.choice([1, 2, 4]))
        wanted = reservation(f"m{i}", of_nodes, begin, begin + draw.choice([1, 4]) * H)
        if overlapping(wanted, ones) is None:
            ones.append(wanted)
    return snapshot(nodes, jobs, backfill=backfill), ones


def some_in_reservations(snap: Snapshot, ones: Sequence[Reservation]) -> Snapshot:
    """Every fourth job is in one of them that has nodes enough."""
    jobs = list(snap.pending)
    for i in range(0, len(jobs), 4):
        enough = [one for one in ones if len(one.nodes) >= jobs[i].spec.nodes]
        if enough:
            jobs[i] = of(enough[i % len(enough)].name, jobs[i])
    return replace(snap, pending=tuple(jobs))


def driven(
    snap: Snapshot, ones: Sequence[Reservation], share: float = 1.0
) -> Iterator[tuple[float, set[str], Snapshot]]:
    """Decisions one after the other: (time, who starts, the snapshot after that). Jobs last so much of their limit."""
    ends: dict[str, float] = {}
    while snap.pending:
        snap = with_reservations(snap, *ones)
        plan, refused = check(decide(snap), snap)
        assert not refused
        limits = {j.id: j.spec.time_limit_s for j in snap.pending}
        snap = worlds.after(snap, plan)
        begun = {a.job_id for a in plan.actions if isinstance(a, Start)}
        ends |= {job: snap.now + share * limits[job] for job in begun}
        yield snap.now, begun, snap
        times = [t for r in snap.running for t in (ends[r.id], r.expected_end)]
        times += [t for one in ones for t in (one.begin, one.end)]
        # and when somebody could no more end before a reservation, or before the place of one who waits for its end
        times += [math.nextafter(t, math.inf) - limit for t in [*times] for limit in {*limits.values()}]
        now = min((t for t in times if t > snap.now), default=None)
        if now is None:
            return
        alive = tuple(r for r in snap.running if ends[r.id] > now)
        snap = replace(snap, now=now, running=alive)
