"""Jobs as JSON, on the ``status`` screen and on one job's page."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from gpusched.model.arrays import indices_of
from gpusched.model.idle import IdleState
from gpusched.model.indices import text_of, union
from gpusched.model.jobs import ACTIVE, JobRecord, JobSpec, JobState, Resizes
from gpusched.model.plan import ReasonCode
from gpusched.model.progress import JobProgress
from gpusched.model.slurm import SlurmFacts
from gpusched.model.units import count_of, format_duration, format_memory, gpus_of, iso_utc, local_clock, local_time
from gpusched.views import common

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

NAME_WIDTH = 24
REASON_WIDTH = 60
TASKS_WIDTH, FEW_TASKS_WIDTH = 24, 10
"""Of an array's list of tasks; the latter on narrow screens, where one long list would cost all rows their columns."""
COLUMNS = (
    "ID",
    "NAME",
    "USER",
    "PARTITION",
    "FLAVOR",
    "STATE",
    "GPUS",
    "NODES/REASON",
    "TIME",
    "LIMIT",
    "PROGRESS",
    "SLOWER",
)
DROPPED_FIRST = ("FLAVOR", "LIMIT", "SLOWER", "PROGRESS", "PARTITION", "NAME", "TIME", "GPUS", "USER")
"""What a narrow screen does without, the first of them first."""
_MIN_WIDTH_FOR_BARS = 110
_BAR_WIDTH = 8
_MIN_SHOWN_SLOWDOWN = 0.01
_STALLED_AFTER_S = 300.0  # a job without a step for this long is shown as stalled


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the ``status`` screen.

    Attributes:
        jobs: In order of display.
        energies: Joules so far of active jobs, if measured.
        progress: Of active jobs that report it.
        partners: Job -> the job that shares its GPUs.
        slower: The fraction by which steps take longer because of the placement, for active jobs if known.
        counts: State -> number of all jobs; empty in JSON mode.
        scope: The user and partition that the counts are of; "" for all.
        unshown: How many pending jobs are not shown.
        preempted: How many pending jobs were preempted.
        prefixes: Id (an array's own for its tasks) -> how many of its characters identify it.
        warning: Why the queue does not advance, or "".
        fallbacks: Partition -> why its agent's fallback decides there.
        notes: Other problems, one per line.
        engine: One line: what gpusched does if Slurm manages the jobs, or which of several controllers is active;
            else "".
    """

    now: float
    jobs: tuple[JobRecord, ...]
    energies: Mapping[str, float] = {}
    progress: Mapping[str, JobProgress] = {}
    partners: Mapping[str, str] = {}
    slower: Mapping[str, float] = {}
    counts: Mapping[str, int] = {}
    scope: str = ""
    unshown: int = 0
    preempted: int = 0
    prefixes: Mapping[str, int] = {}
    warning: str = ""
    fallbacks: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    engine: str = ""


def job_nodes(job: JobRecord) -> list[str]:
    """Return the names of the nodes that the job has (or had), by rank."""
    return [part.node for part in job.allocation.parts] if job.allocation else []


def elapsed_s(job: JobRecord, now: float) -> float | None:
    """Return the seconds since the start, or from start to end; None if the job never started."""
    if job.start_time is None:
        return None
    return max(0.0, (job.end_time if job.end_time is not None else now) - job.start_time)


def job_dict(
    job: JobRecord,
    now: float,
    energy_j: float | None = None,
    fallbacks: Mapping[str, str] = {},
    progress: JobProgress | None = None,
    partner: str | None = None,
    slower: float | None = None,
) -> dict[str, Any]:
    """Return a job as in all ``--json`` output. Times are UTC ISO-8601, durations seconds, unknown is None."""
    spec = job.spec
    return {
        "id": job.id,
        "user": job.user,
        **common.fields_of(spec, "name", "partition", "flavor", "gpus", "time_limit_s"),
        **common.fields_of(job, "exit_code", "array_id", "array_index", "attempt", "retries", "priority", "policy"),
        "state": str(job.state),
        "reason": job.reason or None,
        "message": job.message or None,
        "nodes": job_nodes(job),
        **({"profile": spec.profile} if spec.profile else {}),
        "submit_time": iso_utc(job.submit_time),
        "eligible_time": iso_utc(job.eligible_time),
        "start_time": iso_utc(job.start_time),
        "end_time": iso_utc(job.end_time),
        "elapsed_s": elapsed_s(job, now),
        "energy_j": job.energy_j if energy_j is None else energy_j,
        "array_tasks": text_of(job.tasks) or None,
        "array_count": job.count if job.tasks else None,
        "preemptions": job.preemptions.count if job.preemptions else 0,
        "resizes": None if spec.elastic is None else _resizes_dict(job.resizes or Resizes()),
        "held_by": job.held_by or None,
        "policy_version": job.policy_version,
        "fallback": fallbacks.get(spec.partition) if job.state is JobState.PENDING else None,
        "progress": None if progress is None else _progress_dict(progress, now),
        "shared_with": partner,
        "slower": slower,
        "idle": None if (idle := idle_of(job)) is None else _idle_dict(idle, now),
    } | ({} if job.slurm is None else {"slurm": slurm_dict(job.slurm)})


def slurm_dict(facts: SlurmFacts) -> dict[str, Any]:
    """Return the additional fields of a Slurm job, as JSON."""
    return {
        **common.fields_of(facts, "state", "priority", "site_factor", "restarts", "requeue"),
        **common.fields_of(facts, "partitions", "nodelist", "pinned"),
        **{name: getattr(facts, name) or None for name in ("reason", "account", "qos", "reservation")},
        "pinned_time": iso_utc(facts.pinned_at),
        "gres_positions": {node: list(positions) for node, positions in facts.gpus.items()},
    }


def _resizes_dict(resizes: Resizes) -> dict[str, Any]:
    return {
        "count": resizes.count,
        "why": resizes.why or None,
        "cost_s": resizes.cost_s,
        "lost_s": resizes.lost_s,
        "unusable": list(resizes.unusable),
        "frozen": resizes.frozen or None,
    }


def idle_of(job: JobRecord) -> IdleState | None:
    """Return the state of an active job whose GPUs are idle, if there is a rule for that."""
    return job.idle if job.state in ACTIVE else None


def _idle_dict(idle: IdleState, now: float) -> dict[str, Any]:
    return {
        "since": iso_utc(idle.since),
        "idle_s": max(0.0, now - idle.since),
        "below": idle.below,
        "then": idle.then,
        "time": iso_utc(idle.at),
        "warned": iso_utc(idle.warned_at),
        "acted": iso_utc(idle.acted_at),
    }


def idle_line(job: JobRecord, now: float) -> str:
    """Return for how long all GPUs of a job have been idle, and what is done about it; "" if they are not."""
    idle = idle_of(job)
    if idle is None:
        return ""
    line = f"GPUs below {100 * idle.below:.3g}% for {format_duration(max(0.0, now - idle.since))}"
    done = {"signal": "signalled", "requeue": "requeued", "cancel": "cancelled"}.get(idle.then, "")
    if idle.acted_at is not None:
        return f"{line}; {done} at {local_clock(idle.acted_at, now)}"
    if idle.at is not None:
        return f"{line}; to be {done} at {local_clock(idle.at, now)} unless used"
    return f"{line}; warned at {local_clock(idle.warned_at, now)}" if idle.warned_at is not None else line


def resizes_line(job: JobRecord) -> str:
    """Return how often a job was resized, the last reason, the cost, and sizes that are no longer used."""
    found = job.resizes
    if found is None:
        return ""
    words = [
        f"{'once' if found.count == 1 else f'{found.count} times'}, {'last: ' if found.count > 1 else ''}{found.why}"
    ]
    if found.cost_s is not None:
        words.append(f"a resize costs {found.cost_s:.0f} s")
    if found.lost_s:
        words.append(f"{format_duration(found.lost_s)} of work lost")
    if found.unusable:
        words.append(f"failed to start with {common.ranges(found.unusable)} GPUs")
    if found.frozen:
        words.append(f"no longer resized: {found.frozen}")
    return "; ".join(words)


def _progress_dict(progress: JobProgress, now: float) -> dict[str, Any]:
    return {
        **common.fields_of(progress, "step", "of", "steps_per_s", "samples_per_s", "saved_step"),
        "time": iso_utc(progress.at),
        "left_s": progress.left_s(now),
        "saved_time": iso_utc(progress.saved_at),
        "error": progress.trouble or None,
    }


def progress_text(progress: JobProgress | None, now: float, width: int) -> Text:
    """Return progress and remaining time, with a bar of ``width`` cells (0: none) if both are known."""
    from rich.text import Text

    from gpusched.views.bars import meter

    text = Text(no_wrap=True)
    if progress is None or progress.step is None:
        return text
    if progress.fraction is None:
        return text.append(f"step {progress.step:,.0f}")
    if width:
        text.append_text(meter(progress.fraction, width, "green")).append(" ")
    text.append(f"{progress.fraction:.0%}")
    left = progress.left_s(now)
    return text if left is None else text.append(f" {format_duration(left)} left")


def progress_line(progress: JobProgress, now: float) -> str:
    """Return the progress with speeds, for one job's page."""
    if progress.step is None:
        return ""
    words = [f"step {progress.step:,.0f}" + (f" of {progress.of:,.0f}" if progress.of else "")]
    if progress.fraction is not None:
        words[0] += f" ({progress.fraction:.0%})"
    if (pace := progress.steps_per_s) is not None:
        words.append(f"{pace:.3g} steps/s" if pace >= 0.01 else f"{1 / pace:,.0f} s a step")
    if progress.samples_per_s is not None:
        words.append(f"{progress.samples_per_s:,.4g} samples/s")
    if (left := progress.left_s(now)) is not None:
        words.append(f"about {format_duration(left)} left at this pace")
    quiet = now - progress.at if progress.at is not None else 0.0
    return ", ".join(words) + (f"; no progress for {format_duration(quiet)}" if quiet > _STALLED_AFTER_S else "")


def head_line(listing: Listing) -> str:
    """Return the number of jobs in each state."""
    order = list(JobState)
    states = sorted((JobState(s) for s, n in listing.counts.items() if n), key=order.index)
    words = [f"{listing.counts[s]} {s}" for s in states]
    if listing.preempted and JobState.PENDING in states:
        words[states.index(JobState.PENDING)] += f" ({listing.preempted} preempted)"
    scope = f"{common.clean(listing.scope)}: " if listing.scope else ""
    return scope + (", ".join(words) or "no jobs")


def preemptions_line(job: JobRecord) -> str:
    """Return how often a policy preempted the job, and when and for which job last; "" if never."""
    found = job.ending.preemptions if job.ending and job.ending.preemptions else job.preemptions
    if found is None or not found.count:
        return ""
    count_text = "once" if found.count == 1 else f"{found.count} times"
    last = local_time(found.times[-1])
    for_job = f" for job {found.for_job}" if found.for_job else ""
    return f"{count_text}, {'last ' if found.count > 1 else ''}{last} by {found.policy}{for_job}"


def status_screen(listing: Listing, width: int) -> Group:
    """Return counts, warnings and table, for a screen of ``width`` columns."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Text | Table] = [Text(head_line(listing), style="bold")]
    if listing.engine:
        parts.append(Text(listing.engine, style="dim"))
    if listing.warning:
        parts.append(Text(f"warning: {listing.warning}", style="bold red"))
    parts += [
        Text(f"warning: {common.clean(line)}", style="bold red")
        for line in (*listing.notes, *listing.fallbacks.values())
    ]
    if listing.jobs:
        parts.append(status_table(listing, width))
    if listing.unshown:
        hint = f"{listing.unshown:,} more pending; list all with gpusched status -s PENDING, one user's with -u USER"
        parts.append(Text(hint, style="dim"))
    return Group(*parts)


def status_table(listing: Listing, width: int) -> Table:
    """Return one row per job; pending tasks of an array with one reason share a row."""
    hidden: tuple[str, ...] = ()
    if not any(job.id in listing.progress for job in listing.jobs):
        hidden = ("PROGRESS",)
    if not any(listing.slower.get(job.id, 0.0) >= _MIN_SHOWN_SLOWDOWN for job in listing.jobs):
        hidden = (*hidden, "SLOWER")
    table = common.plain_table(
        *(c for c in COLUMNS if c not in hidden),
        right=("GPUS", "TIME", "LIMIT", "SLOWER"),
        wrap=("NODES/REASON",),
        drop=DROPPED_FIRST,
        max_widths={"NAME": NAME_WIDTH},
    )
    for _, jobs in groupby(listing.jobs, _row_key):
        cells = _cells(list(jobs), listing, width)
        table.add_row(*(cell for column, cell in zip(COLUMNS, cells, strict=True) if column not in hidden))
    return table


def _cells(jobs: list[JobRecord], listing: Listing, width: int) -> list[Text]:
    from rich.text import Text

    job, bar = jobs[0], _BAR_WIDTH if width >= _MIN_WIDTH_FOR_BARS else 0
    tasks = common.WHOLE if width >= common.WHOLE else TASKS_WIDTH if width >= _MIN_WIDTH_FOR_BARS else FEW_TASKS_WIDTH
    return [
        _id_text(jobs, listing.prefixes, tasks),
        Text(common.clean(job.spec.name)),
        Text(job.user),
        Text(job.spec.partition),
        Text(job.spec.flavor or common.UNKNOWN),
        Text(job.state, style=common.state_style(job.state)),
        Text(gpus_text(job.spec)),
        Text(nodes_or_reason(job) + _sharing_text(job, listing) + _idle_text(job, listing.now)),
        Text(format_duration(elapsed_s(job, listing.now))),
        Text(format_duration(job.spec.time_limit_s)),
        progress_text(listing.progress.get(job.id), listing.now, bar),
        Text(f"{slower:.0%}" if (slower := listing.slower.get(job.id, 0.0)) >= _MIN_SHOWN_SLOWDOWN else ""),
    ]


def _sharing_text(job: JobRecord, listing: Listing) -> str:
    """Return which job shares its GPUs, with the id shortened to its unique prefix; or ""."""
    partner = listing.partners.get(job.id)
    if partner is None:
        return ""
    base, separator, index = partner.partition("_")
    return f" shared with {base[: listing.prefixes.get(base, len(base))]}{separator}{index}"


def _idle_text(job: JobRecord, now: float) -> str:
    """Return the state of a job whose user was warned of its idle GPUs; or ""."""
    warned = job.state is JobState.RUNNING and job.idle is not None and job.idle.warned_at is not None
    return f" ({idle_line(job, now)})" if warned else ""


def _row_key(job: JobRecord) -> tuple[object, ...]:
    """Return a key that is equal for jobs of one row: adjacent pending tasks of one array with one reason."""
    is_grouped = job.state is JobState.PENDING and job.array_id is not None
    return (job.array_id, job.reason, job.held_by, job.priority) if is_grouped else (job.id,)


def _id_text(jobs: list[JobRecord], prefixes: Mapping[str, int], tasks_width: int) -> Text:
    from rich.text import Text

    base = jobs[0].array_id or jobs[0].id
    unique = prefixes.get(base, len(base))
    text = Text(base[:unique], style="bold cyan")
    text.append(base[unique:], style="dim")
    if jobs[0].array_id is not None:
        indices = text_of(union(span for job in jobs for span in indices_of(job)))
        plain = len(jobs) == 1 and not jobs[0].tasks
        shown = indices if tasks_width >= common.WHOLE else common.shorten(indices, tasks_width)
        text.append(f"_{indices}" if plain else f"_[{shown}]", style="bold cyan")
    return text


def nodes_or_reason(job: JobRecord) -> str:
    """Return the job's nodes, if any, and the reason of its state."""
    nodes = common.compress_names(job_nodes(job))
    reason = job.reason
    if job.slurm is not None and reason == ReasonCode.NOT_ELIGIBLE:
        reason = job.slurm.reason  # more specific
    if job.state in ACTIVE and not job.ending:
        return nodes
    if job.exit_code:
        reason = f"{reason} {job.exit_code}".strip()
    return " ".join(p for p in (nodes, f"({common.shorten(reason, REASON_WIDTH)})" if reason else "") if p)


def queue_position(job: JobRecord) -> str:
    """Return reason and message of a job in one sentence; "" if there is none."""
    return ": ".join(p for p in (job.reason, common.clean(job.message)) if p)


def memory_is_counted(job: JobRecord) -> bool:
    """Return whether memory is allocated: Slurm may not count it, and its jobs then have one MiB."""
    return job.slurm is None or job.spec.memory_mib_per_node > 1


def gpus_text(spec: JobSpec) -> str:
    """Return the number of GPUs, of slices as they are asked for: ``1g.10gb:2``."""
    return f"{spec.profile}:{spec.gpus}" if spec.profile else str(spec.gpus)


def resources_line(job: JobRecord) -> str:
    """Return the requested resources in words."""
    spec = job.spec
    gpus = gpus_of(spec.gpus_per_node, spec.profile)
    cores = count_of(spec.cores_per_node, "core")
    parts = f"{gpus}, {cores}" + (f", {format_memory(spec.memory_mib_per_node)}" if memory_is_counted(job) else "")
    parts += f", {spec.tasks_per_node} tasks" if spec.tasks_per_node > 1 else ""
    return parts if spec.nodes == 1 else f"{spec.nodes} nodes, each {parts}"
