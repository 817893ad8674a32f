"""CPU time of one decision with limits on users, groups and classes, with reservations too, and with neither.

`.venv/bin/python -m benchmarks.quotas [--jobs 10000] [--nodes 1000] [--users 100] [--repeat 7]`
"""

from __future__ import annotations

import argparse

from msgspec.structs import replace

from benchmarks.decide import build, median_ms
from benchmarks.reservations import cases, reserved
from gpusched.model.limits import Group, Groups, Limits, Qos, Quotas
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.queue.quotas import QuotaLedger
from gpusched.sched.check import check
from gpusched.sched.decide import decide

CLASSES = ("", "", "", "high", "spare")


def quotas_of(users: int) -> Quotas:
    """Ten groups in two departments, and two classes."""
    groups = [Group(name=f"d{i}", limits=Limits(gpus=3000)) for i in range(2)]
    groups += [
        Group(
            name=f"g{i}", parent=f"d{i % 2}", shares=1 + i, limits=Limits(gpus=800, jobs=900, gpu_hours=50_000),
            members={f"u{u}": 1 for u in range(i, users, 10)},
        )
        for i in range(10)
    ]  # fmt: skip
    high = Qos(name="high", priority=100, limits=Limits(gpus=500), per_user=Limits(gpus=32, jobs=8))
    return Quotas(
        each=Limits(gpus=64, jobs=40, gpu_hours=8_000),
        groups=Groups(groups=tuple(groups)),
        qos=(high, Qos(name="spare", priority=-100, exempt=True)),
    )


def with_quotas(snapshot: Snapshot, users: int) -> Snapshot:
    """Return the same jobs for this number of users in groups, each job with its limits."""
    quotas = quotas_of(users)
    ledger = QuotaLedger(quotas, (), (), snapshot.now)

    def bounded(i: int, job: PendingView) -> PendingView:
        user, spec = f"u{i % users}", replace(job.spec, qos=CLASSES[i % len(CLASSES)])
        return replace(job, user=user, spec=spec, group=ledger.group(user, ""), bounds=ledger.of(user, spec))

    pending = tuple(bounded(i, job) for i, job in enumerate(snapshot.pending))
    return replace(snapshot, pending=pending, bounds=ledger.bounds(), groups=quotas.groups)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    for option, default in (("--jobs", 10_000), ("--nodes", 1_000), ("--users", 100), ("--repeat", 7)):
        parser.add_argument(option, type=int, default=default)
    args = parser.parse_args()
    print(f"{args.jobs} candidates of {args.users} users, {args.nodes} nodes; median CPU ms of {args.repeat}")
    print(f"{'cluster':9}{'order':11}{'limits':>8}{'reserved':>10}{'started':>9}{'decide':>8}{'check':>8}")
    for cluster, full in (("full", 0.97), ("empty", 0.0)):
        for order in ("fifo", "fairshare"):
            policy = PolicySpec(name="b", order=order, place="best-fit", backfill="easy")  # type: ignore[arg-type]
            plain = build(args.nodes, args.jobs, full, policy, links=False)
            limited = with_quotas(plain, args.users)
            for snapshot in (plain, limited, reserved(limited, cases(limited)["few"])):
                plan = decide(snapshot)
                whole = median_ms(args.repeat, lambda s=snapshot: decide(s))  # type: ignore[misc]
                checked = median_ms(3, lambda s=snapshot, p=plan: check(p, s))  # type: ignore[misc]
                limits = str(len(snapshot.bounds)) if snapshot.bounds else "none"
                nodes = sum(bool(node.reservations) for node in snapshot.nodes)
                row = f"{cluster:9}{order:11}{limits:>8}{nodes:>10}{len(plan.actions):9}{whole:8.1f}{checked:8.1f}"
                print(row, flush=True)


if __name__ == "__main__":
    main()
