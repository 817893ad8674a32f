"""How long a decision takes where nodes are reserved, beside the same without.

`.venv/bin/python -m benchmarks.reservations [--jobs 10000] [--nodes 1000] [--repeat 7]`

``few``: two reservations, of a quarter of the nodes in two hours and of ten nodes now. ``many``: 200, of five nodes
each, one after the other. ``all``: a maintenance of every node in an hour, which most jobs have to wait for.
"""

from __future__ import annotations

import argparse

from msgspec.structs import replace

from benchmarks.decide import build, median_ms
from gpusched.model.policy import PolicySpec
from gpusched.model.reservations import Reservation, by_node
from gpusched.model.snapshot import Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide


def reserved(snapshot: Snapshot, ones: list[Reservation]) -> Snapshot:
    """Return the snapshot with these reservations."""
    found = by_node(ones, snapshot.now)
    nodes = tuple(replace(node, reservations=found.get(node.name, ())) for node in snapshot.nodes)
    return replace(snapshot, nodes=nodes)


def one(snapshot: Snapshot, name: str, first: int, last: int, begin_h: float, end_h: float) -> Reservation:
    """Of nodes ``first`` to ``last``, from so many hours on."""
    names = tuple(node.name for node in snapshot.nodes[first:last])
    now = snapshot.now
    return Reservation(name=name, nodes=names, begin=now + begin_h * 3600, end=now + end_h * 3600, users=("u1",))


def cases(snapshot: Snapshot) -> dict[str, list[Reservation]]:
    """By name."""
    nodes = len(snapshot.nodes)
    few = [one(snapshot, "a", 0, nodes // 4, 2, 6), one(snapshot, "b", nodes - 10, nodes, -1, 4)]
    many = [one(snapshot, f"m{i}", 5 * i % nodes, 5 * i % nodes + 5, 0.5 * i, 0.5 * i + 2) for i in range(200)]
    return {"none": [], "few": few, "many": many, "all": [one(snapshot, "all", 0, nodes, 1, 5)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    print(f"{args.jobs} pending jobs, {args.nodes} nodes; median CPU ms of {args.repeat}")
    print(f"{'cluster':8}{'backfill':9}{'reserved':9}{'started':>8}{'decide':>8}{'check':>7}")
    for cluster, full in (("full", 0.97), ("empty", 0.0)):
        for backfill in ("none", "easy"):
            policy = PolicySpec(name="b", backfill=backfill, place="best-fit")  # type: ignore[arg-type]
            bare = build(args.nodes, args.jobs, full, policy, links=False)
            for name, ones in cases(bare).items():
                snapshot = reserved(bare, ones)
                plan = decide(snapshot)
                whole = median_ms(args.repeat, lambda s=snapshot: decide(s))  # type: ignore[misc]
                checked = median_ms(3, lambda s=snapshot, p=plan: check(p, s))  # type: ignore[misc]
                row = f"{cluster:8}{backfill:9}{name:9}{len(plan.actions):8}{whole:8.1f}{checked:7.1f}"
                print(row, flush=True)


if __name__ == "__main__":
    main()
