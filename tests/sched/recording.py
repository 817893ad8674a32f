"""Decisions as they are today, one file per order of the queue: `python -m tests.sched.recording` writes them anew.

They say nothing about what is right; other tests do. They notice what changes without being meant to, and what is
meant to change shows as a diff that can be read.
"""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

from gpusched.model.plan import Start
from gpusched.model.policy import Mapping, PolicySpec
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.sched.decide import decide
from gpusched.sched.explain import explain
from tests.sched.worlds import NOW, after, node, pending, running

FOLDER = Path(__file__).parent / "recorded"
ORDERS = ("fifo", "ljf", "sjf", "sjf-estimate", "fairshare")
PLACES = ("first-fit", "best-fit", "spread", "naive", "fastest")
BACKFILLS = ("none", "skip", "easy")
SPEEDS = {"t*": {"A100": 1.0, "V100": 0.5, "K80": 0.2}, "u": {"V100": 1.0, "A100": 0.9}}
TYPES = ("A100", "V100", "K80")


def world(seed: str, order: str, place: str, backfill: str) -> Snapshot:
    """Two partitions, partly busy, partly broken, with more jobs than fit."""
    rng = random.Random(seed)
    nodes = [_node(rng, f"n{i}", "q" if i == 5 else "p") for i in range(6)]
    busy = [r for i, n in enumerate(nodes) for r in _running(rng, i, n)]
    jobs = [_pending(rng, i, nodes) for i in range(12)]
    policy = PolicySpec(
        name="t", order=order, place=place, backfill=backfill, mapping=Mapping(speeds=SPEEDS),  # type: ignore[arg-type]
    )  # fmt: skip
    return Snapshot(
        now=NOW, nodes=tuple(nodes), running=tuple(busy), pending=tuple(jobs), policies={"p": policy, "q": policy},
        usage={"alice": 3.0, "bob": 1.0}, seed=rng.getrandbits(63),
    )  # fmt: skip


def _node(rng: random.Random, name: str, partition: str) -> NodeView:
    gpus = rng.choice([2, 4, 8, 8])
    islands = {a: {b: 4 if a // 2 == b // 2 else 1 + a // 4 + b // 4 for b in range(8)} for a in range(8)}
    return node(
        name, gpus, cores=rng.choice([8, 16, 32]), memory_mib=rng.choice([8192, 16384]), partition=partition,
        blocked={rng.randrange(gpus): "BUSY: pid 1"} if rng.random() < 0.3 else {}, gpu_type=rng.choice(TYPES),
        links=islands if rng.random() < 0.5 else {}, available=rng.random() < 0.85, unavailable_reason="DRAINED: fan",
    )  # fmt: skip


def _running(rng: random.Random, row: int, where: NodeView) -> list[RunningView]:
    at, jobs = 0, []
    for k in range(rng.randint(0, 2)):
        gpus = where.gpus[at : at + rng.randint(1, 4)]
        if gpus:
            at += len(gpus)
            ends = NOW + rng.choice([-100, 90, 700, 1500, 5000])
            jobs.append(running(f"r{row}{k}", {where.name: gpus}, ends, cores=rng.randint(1, 3)))
    return jobs


def _pending(rng: random.Random, number: int, nodes: list[NodeView]) -> PendingView:
    gpus = rng.choice([0, 1, 1, 2, 2, 3, 4, 4, 8])
    names = tuple(rng.sample([n.name for n in nodes], 2))
    flaws: list[dict[str, object]] = [
        {"held_by": "user"}, {"held_by": "admin"}, {"dependency": "waiting", "dependency_message": "waits for 7"},
        {"eligible_time": NOW + 60}, {"eligible_time": NOW}, {"nodelist": names}, {"exclude": names},
        {"excluded_nodes": names}, {"gpu_types": ("A100",)}, {"array_id": "a", "array_room": 1},
        {"array_id": "b", "array_room": 0}, {"dependency": "never", "dependency_message": "6 failed"},
    ]  # fmt: skip
    flaw = rng.choice(flaws) if rng.random() < 0.35 else {}
    return pending(
        f"{flaw['array_id']}_{number}" if "array_id" in flaw else f"j{number}", gpus, name=rng.choice(["t1", "u", "v"]),
        nodes=rng.choice([1, 1, 1, 1, 2, 3]), limit=rng.choice([300, 600, 1200, 3600, 7200]),
        submit=float(rng.randint(0, 5)), partition=rng.choice("pppppq"), priority=rng.choice([0, 0, 0, 5, -2]),
        user=rng.choice(["alice", "bob", "carol"]), estimate_s=rng.choice([None, None, 60.0, 500.0, 5000.0]),
        cores_per_node=rng.choice([1, 1, 2, 4, 8]), memory_mib_per_node=rng.choice([512, 512, 2048, 8192]), **flaw,
    )  # fmt: skip


def decided(snapshot: Snapshot) -> list[str]:
    """A line for each start, then one for each job that waits, with why and what would help."""
    plan = decide(snapshot)
    lines = []
    for action in plan.actions:
        assert isinstance(action, Start)
        parts = (f"{p.node}{list(p.gpus)} {p.cores}c {p.memory_mib}M" for p in action.allocation.parts)
        lines.append(f"  {action.job_id} starts on {', '.join(parts)}")
    left, seen = after(snapshot, plan), set()
    for job_id, reason in sorted(plan.reasons.items()):
        found = explain(left, job_id)
        why = [f"  {job_id} {reason.code}: {reason.message}", f"({found.position} of {found.queue_length})"]
        lines.append(" ".join([*why, "; ".join(found.next_steps)]))
        if reason.code not in seen:
            seen.add(reason.code)
            lines += [f"    {n.node} {n.dimension or n.fits}: {n.text}" for n in found.nodes]
    return lines + [f"  {name}: {text}" for name, text in sorted((plan.troubles | plan.remarks).items())]


def recorded(order: str) -> str:
    lines = []
    for place, backfill in product(PLACES, BACKFILLS):
        lines.append(f"{order}, {place}, {backfill}")
        lines += decided(world(f"{order} {place} {backfill}", order, place, backfill))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for one in ORDERS:
        (FOLDER / f"{one}.txt").write_text(recorded(one))
