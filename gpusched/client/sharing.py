"""With whom a job shares its GPUs, and what that costs it."""

from __future__ import annotations

from gpusched.client.context import Client
from gpusched.model.interference import Cost, JobClassEstimate, job_class_of
from gpusched.model.jobs import ACTIVE, JobRecord
from gpusched.queue.store import Reader
from gpusched.views import common


def sharing_of(client: Client, job: JobRecord) -> tuple[str | None, str]:
    """The job that has GPUs of this one, too; and which these are and what that costs, as a line."""
    if not job.spec.share or job.state not in ACTIVE or client.reader is None:
        return None, ""
    from gpusched.queue.snapshots import partners_of

    active = {other.id: other for other in client.reader.active()}
    partner = active.get(partners_of(active.values()).get(job.id, ""))
    if partner is None or job.allocation is None or partner.allocation is None:
        return None, ""
    mine, its = job.allocation.parts[0], partner.allocation.parts[0]
    gpus = common.ranges(gpu for gpu in mine.gpus if gpu in its.gpus)
    cost = _cost_beside(client.reader, job, partner)
    whose = f"job {partner.id} ({partner.spec.name} of {partner.user})"
    return partner.id, f"GPUs {gpus} of {mine.node} with {whose}, expected {cost.line('alone')}"


def _cost_beside(reader: Reader, job: JobRecord, other: JobRecord) -> Cost:
    """How much slower a job is expected to be with another one on its GPUs."""
    from gpusched.sched.interference.beliefs import cost_of_neighbour

    own, its = (job_class_of(one.user, one.spec.name) for one in (job, other))
    own_belief, its_belief = (reader.belief(kind) or JobClassEstimate(kind=kind) for kind in (own, its))
    return cost_of_neighbour(own_belief, its_belief, "gpu")
