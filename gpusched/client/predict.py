"""``gpusched predict``: how long jobs will run, and what was learned of a job class."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from gpusched.agents.predictor.request import PredictedJob, predict_jobs
from gpusched.client.context import Client
from gpusched.client.resolve import Resolver
from gpusched.config.users import user_name
from gpusched.errors import UsageError
from gpusched.model.arrays import first_task_of
from gpusched.model.interference import (
    Cost,
    JobClassEstimate,
    JobClassReport,
    JobShape,
    Link,
    job_class_of,
    name_pattern,
)
from gpusched.model.jobs import JobRecord
from gpusched.model.units import count_of

_Estimates = Mapping[str, JobClassEstimate]


def predict_job(text: str) -> list[PredictedJob]:
    """Return the predictions for one job of this cluster (for each row of an array), as of its submission.

    Raises:
        UsageError: No such job.
    """
    client = Client()
    jobs = [first_task_of(job) for job in Resolver(client).target(text).jobs]
    last_submit = max(job.submit_time for job in jobs)
    reader = client.reader
    past = [] if reader is None else [*reader.ended_runs(until=last_submit), *reader.active()]
    return predict_jobs(past, jobs)


def is_job_class(text: str) -> bool:
    """Return whether the text names a job class with measurements."""
    reader = Client().reader
    return reader is not None and bool(_matching_classes(reader.beliefs(), text))


def describe_class(
    text: str, gpus: int | None, nodes: int | None, racks: int | None, beside: Sequence[str]
) -> JobClassReport:
    """Return what was learned of a job class, and the cost of more nodes, more racks or these neighbours.

    Args:
        text: A job name, of this user's jobs or else of the only user with such jobs; or USER/NAME.
        gpus: GPUs of the whole job; None: as in most of its attempts.
        nodes: The number of nodes.
        racks: The number of racks that these nodes are in.
        beside: Names of job classes; one job of each is a neighbour.

    Raises:
        UsageError: Nothing was learned of such a class, or several match.
    """
    from gpusched.sched.interference.beliefs import cost_of_neighbour, describe_belief

    client = Client()
    estimates = client.reader.beliefs() if client.reader else {}
    estimate = _find_estimate(estimates, text)
    speeds, links = describe_belief(estimate)
    lines: list[str] = []
    costs: list[Cost | None] = []
    one_gpu = JobShape(gpu_type="", unit="", gpus=1, max_gpus_per_node=1, nodes=1, racks=1)
    usual_shape = speeds[0].shape if speeds else one_gpu
    racks = racks or 1
    shape = msgspec.structs.replace(usual_shape, gpus=gpus or usual_shape.gpus, nodes=nodes or racks, racks=racks)
    if shape.racks > shape.nodes:
        raise UsageError(f"--racks {shape.racks} exceeds --nodes {shape.nodes}", "each rack has at least one node")
    if shape.gpus % shape.nodes:
        split = f"{count_of(shape.gpus, 'GPU')} cannot be split evenly across {count_of(shape.nodes, 'node')}"
        raise UsageError(split, "set --gpus")
    if shape.nodes > 1:
        line, cost = _cost_of_spread(estimates, estimate.kind, shape)
        lines.append(line)
        costs.append(cost)
    places: dict[Link, str] = {"nic": "sharing NICs with it"} if shape.nodes > 1 else {"server": "in the same server"}
    if shape.nodes == 1 and any(node.sharing for node in client.inventory.nodes):
        places["gpu"] = "on the same GPUs"
    for name in beside:
        neighbour = _find_estimate(estimates, name)
        for link, place in places.items():
            cost = cost_of_neighbour(estimate, neighbour, link)
            lines.append(f"beside {neighbour.kind} ({place}) {cost.line('alone')}")
            costs.append(cost)
    return JobClassReport(kind=estimate.kind, paces=speeds, links=links, lines=tuple(lines), costs=tuple(costs))


def spread_cost(estimates: _Estimates, job: JobRecord, racks: int) -> tuple[str, Cost] | None:
    """Return what several racks cost a job compared with one, as a sentence and a value; None if not measured."""
    return cost_at(estimates, job, job.spec.nodes, racks) if 1 < racks <= job.spec.nodes else None


def cost_at(estimates: _Estimates, job: JobRecord, nodes: int, racks: int) -> tuple[str, Cost] | None:
    """Return the cost of several racks compared with one, or of several nodes in one rack compared with one node."""
    estimate = estimates.get(job_class_of(job.user, job.spec.name))
    if estimate is None or not estimate.shapes or nodes < 2:
        return None
    usual_shape = max(estimate.shapes, key=lambda speed: speed.count).shape
    shape = msgspec.structs.replace(usual_shape, gpus=job.spec.gpus, nodes=nodes, racks=max(racks, 1))
    line, cost = _cost_of_spread(estimates, estimate.kind, shape)
    return (line, cost) if cost is not None else None


def _cost_of_spread(estimates: _Estimates, job_class: str, shape: JobShape) -> tuple[str, Cost | None]:
    """Return the cost of several racks (or nodes) compared with one, as a sentence and a value."""
    from gpusched.sched.interference.beliefs import cost_of_spread

    close_shape = (shape.nodes, 1) if shape.racks > 1 else (1, 1)
    spread_shape = _spread_over(shape, shape.nodes, shape.racks)
    cost = cost_of_spread(estimates.values(), job_class, spread_shape, _spread_over(shape, *close_shape))
    place, base = (f"on {shape.racks} racks", "in one") if shape.racks > 1 else (f"on {shape.nodes} nodes", "on one")
    return f"{place} {cost.line(base) if cost else 'no measured speed'}", cost


def _spread_over(shape: JobShape, nodes: int, racks: int) -> JobShape:
    return msgspec.structs.replace(shape, max_gpus_per_node=shape.gpus // nodes, nodes=nodes, racks=racks)


def _matching_classes(estimates: _Estimates, text: str) -> list[str]:
    """Return the job classes that a text names: the user's own, else others'."""
    user, slash, name = text.partition("/")
    wanted = job_class_of(user, name) if slash else job_class_of(user_name(os.getuid()), text)
    if wanted in estimates or slash:
        return [wanted] if wanted in estimates else []
    return sorted(job_class for job_class in estimates if job_class.partition("/")[2] == name_pattern(text))


def _find_estimate(estimates: _Estimates, text: str) -> JobClassEstimate:
    found = _matching_classes(estimates, text)
    if len(found) == 1:
        return estimates[found[0]]
    if found:
        raise UsageError(f"several users have jobs named {text}", f"choose one: {', '.join(found[:5])}")
    from gpusched.model.suggest import did_you_mean

    suggestion = did_you_mean(text, [job_class.partition("/")[2] for job_class in estimates])
    hint = "jobs report their pace in progress.json; it is learned as they end"
    raise UsageError(f"no data on jobs named {text}{suggestion}", hint)
