"""Which two jobs may share GPUs at all, regardless of the cost."""

from __future__ import annotations

from typing import NamedTuple

from gpusched.model.jobs import JobSpec, NodeAllocation
from gpusched.model.snapshot import NodeView, RunningView
from gpusched.model.units import format_memory


class Sharer(NamedTuple):
    """A job that asked to share, on GPUs of one node that are shared there.

    Attributes:
        name: Of the job, as `JobSpec.name`.
        memory_mib: Of each GPU, the most that it takes.
        partner: Id of the one that has some of them, too; "": none.
    """

    id: str
    user: str
    name: str
    memory_mib: int
    node: str
    gpus: tuple[int, ...]
    partner: str = ""


def sharer_of_running(job: RunningView) -> Sharer | None:
    """Return a running job as a partner for sharing; None: it shares nothing."""
    if not job.shares or job.spec is None or job.spec.gpu_memory_mib is None:
        return None
    node = job.allocation.parts[0].node
    return Sharer(job.id, job.user, job.spec.name, job.spec.gpu_memory_mib, node, job.shares, job.partner)


def sharer_of_start(job_id: str, user: str, spec: JobSpec, parts: tuple[NodeAllocation, ...]) -> Sharer | None:
    """Return a job about to start there as a partner; `cannot_share` checks that its node shares GPUs."""
    if not spec.share or spec.gpu_memory_mib is None or len(parts) != 1 or not parts[0].gpus:
        return None
    return Sharer(job_id, user, spec.name, spec.gpu_memory_mib, parts[0].node, parts[0].gpus)


def cannot_share(node: NodeView, job: Sharer, other: Sharer) -> str | None:
    """Return why the job cannot have its GPUs, on that node, beside the other one; None if it can.

    All of them are the other's, which has no partner yet: so at most two jobs are on a GPU, and each slows down one.
    """
    if node.sharing is None:
        return f"node {node.name} does not share GPUs"
    if other.partner:
        return f"job {other.id} shares its GPUs with job {other.partner} already"
    if other.node != node.name or not set(job.gpus) <= set(other.gpus):
        return f"not all of them belong to job {other.id}"
    if node.sharing.mode == "mps" and job.user != other.user:
        return f"MPS serves one user at a time, and job {other.id} is of {other.user}"
    for gpu in job.gpus:
        if gpu not in node.shareable:
            return f"GPU {gpu} of {node.name} cannot be shared now: its memory is unknown, or a foreign process uses it"
        if job.memory_mib + other.memory_mib > node.shareable[gpu]:
            both, has = format_memory(job.memory_mib + other.memory_mib), format_memory(node.shareable[gpu])
            return f"with job {other.id} it needs {both} of GPU memory; GPU {gpu} of {node.name} has {has} for both"
    return None
