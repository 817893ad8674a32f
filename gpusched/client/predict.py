"""``gpusched predict``: how long jobs of this cluster will run, and what is believed of a kind of job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from gpusched.agents.predictor.request import PredictedJob, loaded, tell_jobs
from gpusched.client.context import Client
from gpusched.client.resolve import Resolver
from gpusched.config.users import user_name
from gpusched.errors import UsageError
from gpusched.model.arrays import first_of
from gpusched.model.interference import Cost, JobClassEstimate, JobShape, KindTold, Link, kind_of, pattern_of
from gpusched.model.jobs import JobRecord
from gpusched.model.units import count_of


def tell_job(model: str | None, text: str) -> list[PredictedJob]:
    """What the predictor says of one job of this cluster (of each row of an array), as of its submission.

    Raises:
        UsageError: No such job.
        GpuschedError: The predictor cannot be read.
    """
    predictor, client = loaded(model), Client()
    jobs = [first_of(job) for job in Resolver(client).target(text).jobs]
    until = max(job.submit_time for job in jobs)
    return tell_jobs(predictor, client.reader.ended_runs(until=until) if client.reader else [], jobs)


def believed(text: str) -> bool:
    """Whether a text names a kind of job of which something is believed."""
    reader = Client().reader
    return reader is not None and bool(_matching(reader.beliefs(), text))


def tell_kind(text: str, gpus: int | None, nodes: int | None, racks: int | None, beside: Sequence[str]) -> KindTold:
    """What is believed of a kind of job, and what more nodes or racks, and these neighbours, would cost it.

    Args:
        text: A job's name, as in this user's jobs, else in those of the only user with such jobs; or USER/NAME.
        gpus: Of the whole job; None: as most of its attempts had.
        nodes: Over how many it would be.
        racks: In how many these are.
        beside: Names of kinds, one job of each beside it.

    Raises:
        UsageError: Nothing is believed of such a kind, or there are several.
    """
    from gpusched.sched.interference.beliefs import cost_of_neighbour, describe_belief

    client = Client()
    beliefs = client.reader.beliefs() if client.reader else {}
    own = _one(beliefs, text)
    paces, links = describe_belief(own)
    lines: list[str] = []
    costs: list[Cost | None] = []
    usual = paces[0].shape if paces else JobShape(gpu_type="", unit="", gpus=1, most=1, nodes=1, racks=1)
    racks = racks or 1
    asked = msgspec.structs.replace(usual, gpus=gpus or usual.gpus, nodes=nodes or racks, racks=racks)
    if asked.racks > asked.nodes:
        raise UsageError(f"--racks {asked.racks} exceeds --nodes {asked.nodes}", "each rack has at least one node")
    if asked.gpus % asked.nodes:
        split = f"{count_of(asked.gpus, 'GPU')} cannot be split evenly across {count_of(asked.nodes, 'node')}"
        raise UsageError(split, "set --gpus")
    if asked.nodes > 1:
        line, cost = _spread(beliefs, own.kind, asked)
        lines.append(line)
        costs.append(cost)
    places: dict[Link, str] = {"nic": "sharing NICs with it"} if asked.nodes > 1 else {"server": "in the same server"}
    if asked.nodes == 1 and any(node.sharing for node in client.inventory.nodes):
        places["gpu"] = "on the same GPUs"
    for name in beside:
        other = _one(beliefs, name)
        for link, where in places.items():
            cost = cost_of_neighbour(own, other, link)
            lines.append(f"beside {other.kind} ({where}) {cost.line('alone')}")
            costs.append(cost)
    return KindTold(kind=own.kind, paces=paces, links=links, lines=tuple(lines), costs=tuple(costs))


def spread_cost(beliefs: Mapping[str, JobClassEstimate], job: JobRecord, racks: int) -> tuple[str, Cost] | None:
    """What more racks than one cost a job, also as a sentence; None where nothing says."""
    return cost_at(beliefs, job, job.spec.nodes, racks) if 1 < racks <= job.spec.nodes else None


def cost_at(beliefs: Mapping[str, JobClassEstimate], job: JobRecord, nodes: int, racks: int) -> tuple[str, Cost] | None:
    """What so many racks cost a job against one, or so many nodes of one rack against one; None: nothing says."""
    own = beliefs.get(kind_of(job.user, job.spec.name))
    if own is None or not own.shapes or nodes < 2:
        return None
    usual = max(own.shapes, key=lambda paces: paces.count).shape
    asked = msgspec.structs.replace(usual, gpus=job.spec.gpus, nodes=nodes, racks=max(racks, 1))
    line, cost = _spread(beliefs, own.kind, asked)
    return (line, cost) if cost is not None else None


def _spread(beliefs: Mapping[str, JobClassEstimate], kind: str, asked: JobShape) -> tuple[str, Cost | None]:
    """What it costs to be on several racks, or nodes, and not on one."""
    from gpusched.sched.interference.beliefs import cost_of_spread

    tight = (asked.nodes, 1) if asked.racks > 1 else (1, 1)
    wide = _over(asked, asked.nodes, asked.racks)
    cost = cost_of_spread(beliefs.values(), kind, wide, _over(asked, *tight))
    what, than = (f"on {asked.racks} racks", "in one") if asked.racks > 1 else (f"on {asked.nodes} nodes", "on one")
    return f"{what} {cost.line(than) if cost else 'no measured speed'}", cost


def _over(shape: JobShape, nodes: int, racks: int) -> JobShape:
    return msgspec.structs.replace(shape, most=shape.gpus // nodes, nodes=nodes, racks=racks)


def _matching(beliefs: Mapping[str, JobClassEstimate], text: str) -> list[str]:
    """The kinds that a text names: one's own before others'."""
    user, slash, name = text.partition("/")
    wanted = kind_of(user, name) if slash else kind_of(user_name(os.getuid()), text)
    if wanted in beliefs or slash:
        return [wanted] if wanted in beliefs else []
    return sorted(kind for kind in beliefs if kind.partition("/")[2] == pattern_of(text))


def _one(beliefs: Mapping[str, JobClassEstimate], text: str) -> JobClassEstimate:
    found = _matching(beliefs, text)
    if len(found) == 1:
        return beliefs[found[0]]
    if found:
        raise UsageError(f"several users have jobs named {text}", f"choose one: {', '.join(found[:5])}")
    from gpusched.model.suggest import did_you_mean

    near = did_you_mean(text, [kind.partition("/")[2] for kind in beliefs])
    hint = "jobs report their pace in progress.json; it is learned as they end"
    raise UsageError(f"no data on jobs named {text}{near}", hint)
