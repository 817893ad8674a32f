"""Which job shares a job's GPUs, and what that costs it."""

from __future__ import annotations

from gpusched.client.context import Client
from gpusched.model.interference import Cost, JobClassEstimate, job_class_of
from gpusched.model.jobs import ACTIVE, JobRecord
from gpusched.queue.store import Reader
from gpusched.views import common


def sharing_of(client: Client, job: JobRecord) -> tuple[str | None, str]:
    """Return the id of the job that shares this job's GPUs, and one line with these GPUs and the cost."""
    if not job.spec.share or job.state not in ACTIVE or client.reader is None:
        return None, ""
    from gpusched.queue.snapshots import partners_of

    active = {other.id: other for other in client.reader.active()}
    partner = active.get(partners_of(active.values()).get(job.id, ""))
    if partner is None or job.allocation is None or partner.allocation is None:
        return None, ""
    own_part, partner_part = job.allocation.parts[0], partner.allocation.parts[0]
    gpus = common.ranges(gpu for gpu in own_part.gpus if gpu in partner_part.gpus)
    cost = _cost_beside(client.reader, job, partner)
    partner_label = f"job {partner.id} ({partner.spec.name} of {partner.user})"
    return partner.id, f"GPUs {gpus} of {own_part.node} with {partner_label}, expected {cost.line('alone')}"


def _cost_beside(reader: Reader, job: JobRecord, other: JobRecord) -> Cost:
    """Return how much slower a job is expected to run with another one on its GPUs."""
    from gpusched.sched.interference.beliefs import cost_of_neighbour

    kinds = (job_class_of(record.user, record.spec.name) for record in (job, other))
    own, neighbour = (reader.belief(kind) or JobClassEstimate(kind=kind) for kind in kinds)
    return cost_of_neighbour(own, neighbour, "gpu")
