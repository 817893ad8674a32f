"""The size that a policy would give a pending job, explained from any snapshot."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpusched.config.weights import TrainedModel
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.model.units import count_of
from gpusched.sched.alone import SingleJobView
from gpusched.sched.arrays import node_arrays_of
from gpusched.sched.sizing.live import Sized, sizes_of
from gpusched.sched.sizing.shapes import over_fewest, rooms_of
from gpusched.sched.text import listed


class SizesNow(msgspec.Struct, frozen=True, kw_only=True):
    """The size that a pending resizable job would get.

    Attributes:
        fits: Its sizes that fit now.
        least: The least that the nodes, empty, can give: for that it waits. None: there is none.
        given: GPUs that the policy would start it with, now or once others have shrunk; None: it waits.
        shrinks: The jobs that must shrink for pending ones: job -> (from, to).
        message: All of it as a sentence.
    """

    fits: tuple[int, ...] = ()
    least: int | None = None
    given: int | None = None
    shrinks: dict[str, tuple[int, int]] = {}
    message: str = ""


def sizes_now(
    snapshot: Snapshot, job_id: str, models: Mapping[str, TrainedModel] = {}
) -> tuple[Snapshot, SizesNow | None]:
    """Return the snapshot with jobs at the sizes they wait for, and the explanation for this job.

    None where the job is rigid, or its policy does not choose sizes. An agent without weights in ``models`` (by
    partition) has its fallback's rule in its place, as in the controller.
    """
    job = next(j for j in snapshot.pending if j.id == job_id)
    policy = snapshot.policies.get(job.spec.partition)
    if job.spec.elastic is None or policy is None or policy.sizes == "base":
        return snapshot, None
    sized = sizes_of(snapshot, node_arrays_of(snapshot), models)
    possible = _possible(snapshot, job)
    alone = SingleJobView(snapshot)
    fitting = tuple(gpus for gpus, view in possible.items() if alone.fits(view))
    given = sized.given.get(job_id)
    before = {view.id: view.allocation.gpus for view in snapshot.running}
    shrinks = {r.job_id: (before[r.job_id], r.gpus) for r in sized.resizes if r.gpus < before[r.job_id]}
    answer = SizesNow(
        fits=fitting,
        least=min(possible, default=None),
        given=given,
        shrinks=shrinks if given is not None and given not in fitting else {},
    )
    by_rule = policy.fallback is not None and (job.spec.partition not in models or job.spec.partition in sized.troubles)
    by = policy.fallback.name if policy.fallback is not None and by_rule else policy.name
    message = _message(job.spec.elastic.sizes, by, answer, sized)
    return sized.snapshot, msgspec.structs.replace(answer, message=message)


def _possible(snapshot: Snapshot, job: PendingView) -> dict[int, PendingView]:
    """Return its sizes that the nodes can give, with the request, except those at which it failed to start."""
    assert job.spec.elastic is not None
    nodes = [node for node in snapshot.nodes if node.partition == job.spec.partition]
    bad = job.resizes.unusable if job.resizes is not None else ()
    rooms = rooms_of(job.spec, nodes)
    asked = {gpus: over_fewest(job.spec, gpus, rooms) for gpus in job.spec.elastic.sizes if gpus not in bad}
    least = {gpus: spec.least for gpus, spec in asked.items() if spec is not None}
    at_once = {gpus: msgspec.structs.replace(spec, placement_wait_s=0.0) for gpus, spec in least.items()}
    return {gpus: msgspec.structs.replace(job, spec=spec) for gpus, spec in at_once.items()}


def _message(sizes: tuple[int, ...], policy: str, answer: SizesNow, sized: Sized) -> str:
    """Explain what size the job would get, or what it waits for and which jobs could shrink for it."""
    fitting = f"fits now on {_gpus(answer.fits)}" if answer.fits else f"fits now on none of {_gpus(sizes)}"
    if answer.given is not None and answer.shrinks:
        names = listed([f"job {job} from {old} to {new}" for job, (old, new) in answer.shrinks.items()])
        return f"{fitting}; {policy} would give it {count_of(answer.given, 'GPU')}, after these shrink: {names}"
    if answer.given is not None and answer.given in answer.fits:
        return f"{fitting}; {policy} would start it with {answer.given}"
    if answer.given is not None:
        return f"{fitting}; {policy} would give it {answer.given}, not free together yet"
    if answer.least is None:
        return f"no nodes can give any of {_gpus(sizes)}"
    waits = f"{fitting}; waits for {count_of(answer.least, 'GPU')}, its minimum"
    if answer.fits:
        return f"{waits}, behind other jobs"
    if not sized.spare:
        return f"{waits}; no job can shrink now"
    names = listed([f"job {job} from {old} to {least}" for job, (old, least) in sized.spare.items()])
    return f"{waits}; jobs that could shrink ({names}) are not stopped for it now"


def _gpus(sizes: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, sizes))} GPUs" if sizes != (1,) else "1 GPU"
