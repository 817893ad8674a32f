"""Worlds in which jobs share GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import exp, inf

import msgspec
from hypothesis import strategies as st

from gpusched.model.interference import ContentionEstimate, JobClassEstimate
from gpusched.model.jobs import Allocation, JobSpec, NodeAllocation
from gpusched.model.resources import Inventory, Node, Partition, RuntimeName, SharingSettings
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.queue.snapshots import sharing_views
from gpusched.queue.store import RankRecord
from tests.sched.worlds import NOW, snapshot
from tests.strategies import among

GPUS, CORES, MIB = 3, 6, 40


KINDS = {"calm": (-2.0, -2.0), "busy": (-0.2, -0.2), "rude": (-2.5, -0.1)}
"""Logarithms of sensitivity and pressure: what one loses beside another is their product, 2 to 90 %."""


@dataclass
class Has:
    """A job as it truly is; ``memory_mib`` None: it does not share."""

    id: str
    user: str
    name: str
    memory_mib: int | None
    gpus: tuple[int, ...] = ()
    node: str = ""
    cores: int = 1
    end: float = inf
    ready: bool = True  # launched so that it can share
    limit: int = 100

    @property
    def spec(self) -> JobSpec:
        return JobSpec(
            name=self.name, partition="p", gpus_per_node=len(self.gpus), cores_per_node=self.cores,
            memory_mib_per_node=1, time_limit_s=self.limit, preemptible=True,
            share="pairs" if self.memory_mib is not None else "", gpu_memory_mib=self.memory_mib,
        )  # fmt: skip


BELIEFS = {
    f"{user}/{name}": JobClassEstimate(
        kind=f"{user}/{name}",
        links=(ContentionEstimate(link="gpu", sensitivity=known[0], pressure=known[1], cov=(0, 0, 0), count=9),),
    )
    for user in ("ann", "bob")
    for name, known in KINDS.items()
}


def slower(one: str, other: str) -> float:
    return exp(KINDS[one][0] + KINDS[other][1])


def nodes_of(modes: dict[str, SharingSettings | None]) -> tuple[list[NodeView], Inventory]:
    views = [
        NodeView(name=name, partition="p", gpus=tuple(range(GPUS)), cores=CORES, memory_mib=99, sharing=sharing,
                 shareable=dict.fromkeys(range(GPUS), MIB) if sharing else {})
        for name, sharing in modes.items()
    ]  # fmt: skip
    nodes = tuple(
        Node(name=name, partition="p", address=name, gpus=GPUS, cores=CORES, memory_mib=99, runtime=RuntimeName.PODMAN,
             sharing=sharing)
        for name, sharing in modes.items()
    )  # fmt: skip
    return views, Inventory(path="", partitions=(Partition(name="p", nodes=nodes, flavors=()),))


def snapshot_of(modes: dict[str, SharingSettings | None], has: list[Has], waits: list[Has]) -> Snapshot:
    views, inventory = nodes_of(modes)
    busy, ranks = [], []
    for one in has:
        part = NodeAllocation(rank=0, node=one.node, gpus=one.gpus, cores=one.cores, memory_mib=1)
        busy.append(RunningView(id=one.id, user=one.user, allocation=Allocation(one.id, (part,)), start_time=0.0,
                                expected_end=one.end, spec=one.spec))  # fmt: skip
        sharing = modes[one.node]
        mode = sharing.mode if sharing and one.ready and one.memory_mib is not None else ""
        ranks.append(RankRecord(job_id=one.id, attempt=1, rank=0, node=one.node, runtime="podman", sharing=mode))
    jobs = [
        PendingView(id=one.id, user=one.user, spec=one.spec, submit_time=float(i)) for i, one in enumerate(waits)
    ]  # fmt: skip
    snap = snapshot(views, jobs, list(sharing_views(busy, inventory, ranks)))
    return msgspec.structs.replace(snap, beliefs=BELIEFS)


def holders(has: list[Has], node: str, gpu: int) -> list[Has]:
    return [one for one in has if one.node == node and gpu in one.gpus]


def partner(has: list[Has], one: Has) -> Has | None:
    found = [o for g in one.gpus for o in holders(has, one.node, g) if o is not one]
    return found[0] if found else None


def may_be(
    modes: dict[str, SharingSettings | None], has: list[Has], job: Has, node: str, gpus: tuple[int, ...]
) -> bool:
    """Whether a waiting job may have these GPUs."""
    on = [holders(has, node, gpu) for gpu in gpus]
    if job.cores > CORES - sum(one.cores for one in has if one.node == node):
        return False
    if not any(on):
        return True
    sharing = modes[node]
    if sharing is None or job.memory_mib is None or any(len(some) != 1 for some in on):
        return False
    other = on[0][0]
    if any(some[0] is not other for some in on) or other.memory_mib is None or not other.ready:
        return False
    if sharing.mode == "mps" and other.user != job.user:
        return False
    return partner(has, other) is None and job.memory_mib + other.memory_mib <= MIB


@cache
def sharings() -> st.SearchStrategy[SharingSettings | None]:
    kinds = st.builds(
        SharingSettings, mode=st.sampled_from(["mps", "time-slicing"]), slowdown=st.sampled_from([0.01, 0.1, 1])
    )
    return st.none() | kinds | kinds


@st.composite
def jobs(draw: st.DrawFn, name: str) -> Has:
    return Has(
        name, draw(among("ann", "bob")), draw(among(*KINDS)),
        draw(among(None, 10, 20, 20, 30)), tuple(range(draw(st.integers(1, GPUS)))),
        cores=draw(st.integers(1, 3)), end=NOW + draw(st.integers(1, 9)) * 20, ready=draw(st.integers(0, 4)) > 0,
        limit=draw(among(30, 90, 150)),
    )  # fmt: skip


@st.composite
def worlds(draw: st.DrawFn, waits: int = 4) -> tuple[dict[str, SharingSettings | None], list[Has], list[Has]]:
    """Nodes, who runs there (only as may be), and who waits."""
    modes = {name: draw(sharings()) for name in ("a", "b")[: draw(st.integers(1, 2))]}
    has: list[Has] = []
    for number in range(draw(st.integers(0, 5))):
        job = draw(jobs(f"r{number}"))
        node = draw(among(*modes))
        places = [g for g in combinations(range(GPUS), len(job.gpus)) if may_be(modes, has, job, node, g)]
        if places:
            job.node, job.gpus = node, draw(among(*places))
            if all(len(holders(has, node, g)) for g in job.gpus) and not job.ready:
                continue  # it was put beside the other one, so it can share
            has.append(job)
    return modes, has, [draw(jobs(f"w{number}")) for number in range(draw(st.integers(1, waits)))]
