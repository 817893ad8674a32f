"""Snapshots for the tests of deciding: small builders, and hypothesis strategies for random ones."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st
from msgspec.structs import replace

from gpusched.model.jobs import Allocation, JobSpec, NodeAllocation
from gpusched.model.plan import Plan, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.model.topology import Switch, Topology
from tests.strategies import among

NOW = 1000.0


def node(name: str, gpus: int = 8, cores: int = 80, memory_mib: int = 512 << 10, **more: object) -> NodeView:
    more = {"partition": "p", **more}
    return NodeView(name=name, gpus=tuple(range(gpus)), cores=cores, memory_mib=memory_mib, **more)  # type: ignore[arg-type]


def pending(
    job_id: str, gpus: int, nodes: int = 1, limit: int = 3600, submit: float = 0.0, **more: object
) -> PendingView:
    names = {"name", "nodelist", "exclude", "gpu_types", "partition", "dependencies", "cores_per_node"}
    names |= {"memory_mib_per_node"}
    own = {k: more.pop(k) for k in list(more) if k in names}
    fields = {
        "name": "t",
        "partition": "p",
        "nodes": nodes,
        "gpus_per_node": gpus,
        "cores_per_node": gpus,
        "memory_mib_per_node": 1024 * gpus,
        "time_limit_s": limit,
        **own,
    }
    more = {"user": "alice", **more}
    return PendingView(id=job_id, spec=JobSpec(**fields), submit_time=submit, **more)  # type: ignore[arg-type]


def running(
    job_id: str, where: dict[str, tuple[int, ...]], end: float, cores: int = 1, user: str = "bob"
) -> RunningView:
    parts = tuple(
        NodeAllocation(rank=i, node=n, gpus=g, cores=cores, memory_mib=1024) for i, (n, g) in enumerate(where.items())
    )
    return RunningView(id=job_id, user=user, allocation=Allocation(job_id, parts), start_time=0.0, expected_end=end)


def snapshot(
    nodes: list[NodeView],
    jobs: list[PendingView],
    busy: list[RunningView] | None = None,
    order: str = "fifo",
    place: str = "first-fit",
    backfill: str = "none",
    **more: object,
) -> Snapshot:
    policy = PolicySpec(name="t", order=order, place=place, backfill=backfill)  # type: ignore[arg-type]
    fields = {"now": NOW, "policies": {n.partition: policy for n in nodes} or {"p": policy}, **more}
    return Snapshot(nodes=tuple(nodes), running=tuple(busy or ()), pending=tuple(jobs), **fields)  # type: ignore[arg-type]


def started(plan: Plan) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Job id -> its (node, GPUs), in the plan's order."""
    return {a.job_id: [(p.node, p.gpus) for p in a.allocation.parts] for a in plan.actions if isinstance(a, Start)}


def after(snap: Snapshot, plan: Plan) -> Snapshot:
    """The snapshot once the plan's starts have happened."""
    specs = {j.id: j for j in snap.pending}
    new = [
        RunningView(
            id=a.job_id,
            user=specs[a.job_id].user,
            allocation=a.allocation,
            start_time=snap.now,
            expected_end=snap.now + specs[a.job_id].spec.time_limit_s,
            spec=specs[a.job_id].spec,
        )
        for a in plan.actions
        if isinstance(a, Start)
    ]
    gone = {r.id for r in new}
    resources: dict[str, int] = {}
    for job_id in gone:
        resources[specs[job_id].array_id or ""] = resources.get(specs[job_id].array_id or "", 0) + 1
    left = tuple(_less_room(j, resources) for j in snap.pending if j.id not in gone)
    fields = {f: getattr(snap, f) for f in snap.__struct_fields__}
    return Snapshot(**{**fields, "running": (*snap.running, *new), "pending": left})


def _less_room(job: PendingView, resources: dict[str, int]) -> PendingView:
    if job.array_room is None:
        return job
    fields = {f: getattr(job, f) for f in job.__struct_fields__}
    return PendingView(**{**fields, "array_room": job.array_room - resources.get(job.array_id or "", 0)})


GPU_COUNTS = st.sampled_from([0, 1, 1, 2, 2, 3, 4, 4, 8])
GPU_TYPES = ("", "A100", "V100")
FLAWS = {
    "held_by": "user",
    "dependency": "waiting",
    "eligible_time": NOW + 60,
    "nodelist": None,  # None: drawn from the nodes' names
    "exclude": None,
    "excluded_nodes": None,
    "gpu_types": None,
}
LIMITS = st.sampled_from([600, 1200, 3600, 7200, 36000])
LINKS = st.sampled_from([{}, {a: {b: 2 if a // 2 == b // 2 else 1 for b in range(8)} for a in range(8)}])


@cache
def _blocked(gpus: int) -> st.SearchStrategy[dict[int, str]]:
    return st.dictionaries(st.integers(0, gpus - 1), among("BUSY: pid 1", "LOST"), max_size=2)


@cache
def _up_to_two(*names: str) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(among(*names), max_size=2, unique=True).map(tuple)


@st.composite
def snapshots(draw: st.DrawFn, simple: bool = False, racked: bool = False, plans: bool = False) -> Snapshot:
    """Random clusters of one or two partitions, partly busy, partly broken, with queues of all kinds of jobs.

    ``simple``: one partition, all well, no holds, arrays or constraints. ``racked``: nodes in racks, and jobs that say
    how far they may be spread and how long they wait. ``plans``: some policies backfill conservatively.
    """
    partitions = ("p",) if simple else draw(among(("p",), ("p", "q")))
    nodes = [_node(draw, f"n{i}", draw(among(*partitions)), simple) for i in range(draw(st.integers(1, 5)))]
    busy = [r for i, n in enumerate(nodes) for r in _running_on(draw, i, n)]
    jobs = [_pending(draw, i, partitions, nodes, simple) for i in range(draw(st.integers(0, 12)))]
    if racked:
        jobs = [_spread(draw, job) for job in jobs]
    places = ["first-fit", "best-fit", "spread", *([] if simple else ["naive"])]
    policies = {
        name: PolicySpec(
            name="t",
            order=draw(among("fifo", "ljf", "sjf", "sjf-estimate", "fairshare")),
            place=draw(among(*places, *(["rack", "rack-wait"] * 3 if racked else []))),
            backfill=draw(among("none", "skip", "easy", *(["conservative"] if plans else []))),
        )
        for name in partitions
    }
    return Snapshot(
        now=NOW,
        nodes=tuple(nodes),
        running=tuple(busy),
        pending=tuple(jobs),
        policies=policies,
        usage={"alice": 3.0, "bob": 1.0},
        seed=draw(st.integers(0, 2**63)),
        topology=topology(*(draw(among("", "r1", "r1", "r2")) for _ in nodes)) if racked else Topology(),
    )


def topology(*racks: str) -> Topology:
    """The nodes n0, n1, ... in these racks; "": in none."""
    names = dict.fromkeys(racks)
    return Topology(
        switches=tuple(
            Switch(name=name, nodes=tuple(f"n{i}" for i, own in enumerate(racks) if own == name))
            for name in names
            if name
        )
    )


def _spread(draw: st.DrawFn, job: PendingView) -> PendingView:
    waits = draw(among(None, None, 0.0, 1500.0, 1e4))
    most = draw(among(None, None, 8)) if job.spec.gpus > 1 else None
    asked = draw(among("", "", "rack", "any"))
    spec = replace(job.spec, max_spread=asked, placement_wait_s=waits, max_nodes=most if asked else None)
    return replace(job, spec=spec)


def _node(draw: st.DrawFn, name: str, partition: str, simple: bool) -> NodeView:
    gpus = draw(among(2, 4, 8, 8))
    blocked = {} if simple else draw(_blocked(gpus))
    links = draw(LINKS)
    return node(
        name,
        gpus,
        cores=draw(among(8, 16, 32)),
        memory_mib=draw(among(8192, 16384)),
        partition=partition,
        blocked=blocked,
        gpu_type="" if simple else draw(among(*GPU_TYPES)),
        links=links,
        available=simple or draw(st.integers(0, 5)) > 0,
        unavailable_reason="DRAINED: fan",
    )


def _running_on(draw: st.DrawFn, i: int, where: NodeView) -> list[RunningView]:
    at, jobs = 0, []
    for k in range(draw(st.integers(0, 3))):
        gpus = where.gpus[at : at + draw(st.integers(1, 4))]
        if gpus:
            at += len(gpus)
            jobs.append(running(f"r{i}{k}", {where.name: gpus}, NOW + draw(st.integers(-100, 5000))))
    return jobs


def _pending(draw: st.DrawFn, i: int, partitions: tuple[str, ...], nodes: list[NodeView], simple: bool) -> PendingView:
    gpus = draw(GPU_COUNTS)
    more: dict[str, object] = {}
    if not simple:
        flaw = draw(among(*FLAWS, *[""] * 2 * len(FLAWS)))
        names = GPU_TYPES if flaw == "gpu_types" else [n.name for n in nodes]
        more = {flaw: draw(_up_to_two(*names)) if FLAWS[flaw] is None else FLAWS[flaw]} if flaw else {}
        if draw(st.integers(0, 4)) == 0:
            more |= {"array_id": "a", "array_room": 1}
    return pending(
        f"a_{i}" if "array_id" in more else f"j{i}",
        gpus,
        nodes=draw(among(1, 1, 1, 1, 2, 3)),
        limit=draw(LIMITS),
        submit=float(draw(st.integers(0, 5))),
        partition=draw(among(*partitions)),
        priority=draw(among(0, 0, 0, 5)),
        user=draw(among("alice", "bob", "carol")),
        estimate_s=draw(among(None, None, 60.0, 5000.0)),
        cores_per_node=draw(among(1, 1, 2, 4, 8)),
        memory_mib_per_node=draw(among(512, 512, 2048, 8192)),
        **more,
    )
