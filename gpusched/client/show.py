"""All details of one job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpusched.client.context import Client
from gpusched.client.costs import place_costs
from gpusched.client.resolve import Resolver
from gpusched.client.sharing import sharing_of
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.arrays import first_task_of
from gpusched.model.forecast import SpreadStart
from gpusched.model.jobs import ENDED, JobRecord, JobState
from gpusched.model.progress import speeds_of
from gpusched.views.show import Page

if TYPE_CHECKING:
    from gpusched.sched.sizing.explain import SizesNow


def show(client: Client, text: str) -> Page:
    """Return the job; for an array's own id, the first task that has not ended, with all tasks.

    Raises:
        UsageError: No such job.
        GpuschedError: The controller refused its submission.
    """
    target = Resolver(client).target(text)
    jobs = target.jobs
    job = first_task_of(next((j for j in jobs if j.state not in ENDED), jobs[0]))
    reader = client.reader
    energies = reader.energy_of_jobs() if reader and job.state is not JobState.PENDING else {}
    progress = reader.progress_of_job(job.id) if reader else []
    partner, shared = sharing_of(client, job)
    is_resizable = job.state is JobState.PENDING and job.spec.elastic is not None
    spreads = _spreads(client, job) if job.state is JobState.PENDING else ()
    costs = place_costs(client, (job,))
    return Page(
        job=job,
        now=time.time(),  # after what is forecast, so that what begins at once does not begin later
        tasks=jobs if len(jobs) > 1 or jobs[0].tasks or target.id != job.id else (),
        events=tuple(reader.events(job_id=job.id)) if reader else (),
        energy_j=energies.get(job.id),
        warning="" if job.state in ENDED else client.warning(),
        progress=progress[-1] if progress else None,
        speeds=speeds_of(progress),
        sizes=_sizes(client, job) if is_resizable else None,
        partner=partner,
        shared=shared,
        spreads=spreads,
        place_cost=costs.get(job.id),
    )


def script_of(client: Client, text: str) -> str:
    """Return the text of a job's script.

    Raises:
        UsageError: No such job, or it has none.
        GpuschedError: The controller refused its submission.
    """
    job = Resolver(client).target(text).jobs[0]
    if job.spec.script is None:
        raise UsageError(f"job {job.id} has no script", f"see its command with gpusched show {job.id}")
    return job.spec.script


def _spreads(client: Client, job: JobRecord) -> tuple[SpreadStart, ...]:
    """Return the start times by spread, as `why` has them; none for a job on one node or with an invalid inventory."""
    if job.spec.nodes == 1 and job.spec.max_nodes is None:
        return ()
    from gpusched.client.why import explain_pending

    try:
        return explain_pending(client, job).spreads
    except GpuschedError:
        return ()


def _sizes(client: Client, job: JobRecord) -> SizesNow | None:
    from gpusched.client.why import sizes_of_pending

    try:
        return sizes_of_pending(client, job)[1]
    except GpuschedError:
        return None
