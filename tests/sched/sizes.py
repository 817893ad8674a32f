"""Worlds of resizable jobs."""

from __future__ import annotations

from typing import Any

import msgspec

from gpusched.model.jobs import Elastic, JobSpec
from gpusched.model.policy import PolicySpec, Resizing
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from tests.sched.worlds import NOW, node, pending, running

QUICK = Resizing(min_run_s=0.0, per_hour=100, gain=0.05)


POLICY = PolicySpec(name="quick", place="best-fit", backfill="easy", sizes="greedy-gain", resize=QUICK)


PERFECT = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}


def spec(*sizes: int, base: int | None = None, **more: Any) -> JobSpec:
    base = base or sizes[0]
    elastic = Elastic(sizes=sizes, base_gpus=base, base_cores=base, base_memory_mib=1024 * base, cooldown_s=0)
    return JobSpec(
        name="e", partition="p", gpus_per_node=base, cores_per_node=base, memory_mib_per_node=1024 * base,
        time_limit_s=36000, elastic=elastic, **more,
    )  # fmt: skip


def runs(name: str, where: dict[str, tuple[int, ...]], *sizes: int, **more: Any) -> RunningView:
    gpus = sum(len(found) for found in where.values())
    own = spec(*sizes, base=gpus).at_size(gpus, len(where))
    view = running(name, where, NOW + 7200, cores=own.cores_per_node)
    more = {"start_time": NOW - 3600, "submit_time": NOW - 3600, "speeds": PERFECT, **more}
    return msgspec.structs.replace(view, spec=own, **more)


def world(jobs: list[PendingView], busy: list[RunningView], nodes: int = 2, **rules: Any) -> Snapshot:
    policy = msgspec.structs.replace(POLICY, **rules)
    machines = tuple(node(f"n{i}") for i in range(nodes))
    return Snapshot(now=NOW, nodes=machines, running=tuple(busy), pending=tuple(jobs), policies={"p": policy})


def waits(name: str, *sizes: int, speeds: dict[int, float] | None = None, **more: Any) -> PendingView:
    left = more.pop("left", None)
    return msgspec.structs.replace(pending(name, 1, **more), spec=spec(*sizes), speeds=speeds or {}, left=left)
