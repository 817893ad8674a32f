"""List jobs from the store and the inbox."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import msgspec

from gpusched.client import slurm
from gpusched.client.context import Client
from gpusched.client.costs import place_costs
from gpusched.client.inbox import inbox_jobs
from gpusched.client.resolve import Resolver
from gpusched.config.validate import known_partition
from gpusched.errors import UsageError
from gpusched.model import ids
from gpusched.model.healthchecks import DRAINED_BY, holding_reasons, open_conditions
from gpusched.model.jobs import ACTIVE, ENDED, JobRecord, JobState
from gpusched.model.progress import JobProgress
from gpusched.model.suggest import did_you_mean
from gpusched.queue.store import SUSPENDED_BY, Reader
from gpusched.views.jobs import Listing

ENDED_SHOWN = 10
LONG_QUEUE, SHOWN_OF_LONG = 200, 25  # on screen: users do not page through more
MAX_PREFIXES = 200


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs to list.

    Attributes:
        ended: How many ended jobs; None means the default number, -1 all.
        window_s: Only jobs that ended within this many seconds (and all that have not ended).
    """

    jobs: tuple[str, ...] = ()
    user: str | None = None
    partition: str | None = None
    states: frozenset[JobState] | None = None
    ended: int | None = None
    window_s: int | None = None

    @property
    def is_usual(self) -> bool:
        """Return whether the query has no filters."""
        return self == Query()


def parse_states(values: Iterable[str]) -> frozenset[JobState] | None:
    """Return the states named, in any case, comma-separated; None if none is given.

    Raises:
        UsageError: No such state.
    """
    names = [n.strip() for v in values for n in v.split(",")]
    for name in names:
        if name.upper() not in list(JobState):
            raise UsageError(f"--state: there is no state '{name[:40]}'{did_you_mean(name, list(JobState))}")
    return frozenset(JobState(n.upper()) for n in names) or None


def listing(client: Client, query: Query, *, for_people: bool) -> Listing:
    """Return the jobs that ``query`` selects; counts, unique prefixes and the warning only ``for_people``."""
    counts = _counts(client, query) if for_people else {}
    max_pending = SHOWN_OF_LONG if query.is_usual and counts.get(JobState.PENDING, 0) > LONG_QUEUE else None
    jobs = _named(client, query) if query.jobs else queried(client, query, max_pending)
    if query.partition is not None and not jobs:
        _check_partition(client, query.partition)
    reader = client.reader
    result = Listing(
        now=time.time(),
        jobs=tuple(jobs),
        energies=reader.energy_of_jobs() if reader else {},
        progress=_progress(reader, jobs),
        partners=sharing_partners(reader, jobs),
        slower={name: cost.slower for name, cost in place_costs(client, jobs).items()},
        fallbacks={name: f.line for name, f in reader.fallbacks().items()} if reader else {},
    )
    if not for_people:
        return result
    waiting = sum(job.count for job in jobs if job.state is JobState.PENDING)
    return msgspec.structs.replace(
        result,
        counts=counts,
        unshown=0 if max_pending is None else max(0, counts.get(JobState.PENDING, 0) - waiting),
        scope=_counted(query),
        preempted=reader.preempted_pending(user=query.user, partition=query.partition) if reader else 0,
        prefixes=_prefixes(client, jobs),
        warning=client.controller_warning() or _suspended(client),
        notes=(*client.notes(), *(kept_weights(reader) if reader else ()), *_slice_fallbacks(client, jobs)),
        engine=slurm.modes_line(client) if slurm.manages_jobs() else client.standby_line(),
    )


def _check_partition(client: Client, name: str) -> None:
    """Raise for an unknown partition: an empty list would look like an idle one.

    Raises:
        UsageError: Neither the inventory nor any job knows it.
    """
    if not client.reader or not client.reader.counts(partition=name):
        known_partition(client.inventory, name)


def _progress(reader: Reader | None, jobs: Iterable[JobRecord]) -> dict[str, JobProgress]:
    """Return the progress of the jobs that report any in their current attempt."""
    found = reader.progress_of_unended() if reader else {}
    return {job.id: report for job in jobs for report in found.get(job.id, ())[-1:] if report.attempt == job.attempt}


def sharing_partners(reader: Reader | None, jobs: Iterable[JobRecord]) -> dict[str, str]:
    """Return the partners of those jobs that share GPUs."""
    if reader is None or not any(job.spec.share for job in jobs):
        return {}
    from gpusched.queue.snapshots import partners_of

    return partners_of(reader.active())


def _slice_fallbacks(client: Client, jobs: Iterable[JobRecord]) -> Iterable[str]:
    """Return the lines on agents that leave MIG slices to their fallbacks, where a listed job waits for some."""
    if not any(job.spec.profile for job in jobs):
        return ()
    from gpusched.promotion.live import slice_fallbacks  # status starts faster without it

    return slice_fallbacks(client.inventory, client.reader, jobs).values()


def kept_weights(reader: Reader) -> Iterator[str]:
    """Yield a line for each live or shadow agent with weights that were saved although training found them worse."""
    live = {name: change.spec for name, change in reader.live_changes().items()}
    shadows = {name: shadow.spec for name, shadow in reader.shadows().items() if shadow.until is None}
    for state, specs in (("", live), ("shadow ", shadows)):
        for partition, spec in specs.items():
            if spec.agent is None:
                continue
            from gpusched.config.weightfiles import kept_anyway  # status starts faster without it

            if line := kept_anyway(spec.folder, partition):
                yield f"{partition}: {state}{spec.name} has weights that were kept anyway, {line}"


def _suspended(client: Client) -> str:
    """Return one line about nodes that the controller took out of service itself, else ""."""
    if client.reader is None:
        return ""
    recent = time.time() - 3600  # one that left the inventory keeps its record
    records = [r for r in client.reader.node_records().values() if (r.last_seen or 0) > recent]
    checks = client.reader.check_records()
    failed = holding_reasons(open_conditions(checks, client.inventory.declared_checks())) if checks else {}
    held = {r.name for r in records if r.drained_by == DRAINED_BY or r.name in failed}
    launches = {r.name for r in records if r.drained_by == SUSPENDED_BY}
    return "; ".join(
        f"nodes {why}: {', '.join(sorted(names))}; see 'gpusched nodes'"
        for why, names in (("suspended after failed launches", launches), ("held by health checks", held))
        if names
    )


def _named(client: Client, query: Query) -> list[JobRecord]:
    jobs = [j for target in Resolver(client).targets(query.jobs) for j in target.jobs]
    return [j for j in {j.id: j for j in jobs}.values() if _matches(j, query)]


def _matches(job: JobRecord, query: Query) -> bool:
    return (
        (query.user is None or job.user == query.user)
        and (query.partition is None or job.spec.partition == query.partition)
        and (query.states is None or job.state in query.states)
    )


def queried(client: Client, query: Query, max_pending: int | None = None) -> list[JobRecord]:
    """Return ended jobs, then running ones, then the ``max_pending`` oldest pending ones (those in the inbox last)."""
    queued = inbox_jobs(client)  # read before the store: a job queued in between is then in both, never in neither
    reader = client.reader
    jobs: list[JobRecord] = []
    if reader:
        states = query.states if query.states is not None else frozenset(JobState)
        with reader.one_moment():
            if ended := states & ENDED:
                jobs += _ended(client, query, ended)
            for group, limit in ((states & ACTIVE, None), (states & {JobState.PENDING}, max_pending)):
                if group:
                    jobs += reader.rows(
                        states=group, user=query.user, partition=query.partition, limit=limit, oldest=limit is not None
                    )
    known = {j.id for j in jobs if j.state is JobState.PENDING}
    if max_pending is not None:
        queued = queued[: max(0, max_pending - len(known))]
    return jobs + [j for j in queued if j.id not in known and _matches(j, query) and not _stored(client, j)]


def _stored(client: Client, job: JobRecord) -> bool:
    return client.reader is not None and bool(client.reader.matching(job.array_id or job.id, limit=1))


def _ended(client: Client, query: Query, states: frozenset[JobState]) -> list[JobRecord]:
    reader = client.reader
    assert reader is not None
    limit = query.ended
    since = None if query.window_s is None else time.time() - query.window_s
    if limit is None and since is None and query.states is None:
        limit = ENDED_SHOWN
    elif limit is not None and limit < 0:
        limit = None
    plain = query.user is None and query.partition is None and since is None and states == ENDED
    if plain and limit is not None:
        return reader.rows_recently_ended(limit)
    return reader.rows(states=states, user=query.user, partition=query.partition, since=since, limit=limit)


def _counts(client: Client, query: Query) -> dict[str, int]:
    """Return the number of jobs per state, of the query's user and partition."""
    counts = dict(client.reader.counts(user=query.user, partition=query.partition)) if client.reader else {}
    scope = Query(user=query.user, partition=query.partition)
    queued = sum(j.count for j in inbox_jobs(client) if _matches(j, scope) and not _stored(client, j))
    if queued:
        counts[JobState.PENDING] = counts.get(JobState.PENDING, 0) + queued
    return counts


def _counted(query: Query) -> str:
    """Return the scope of the counts, or "" for all jobs."""
    return ", ".join(
        filter(None, (query.user and f"user {query.user}", query.partition and f"partition {query.partition}"))
    )


def _prefixes(client: Client, jobs: list[JobRecord]) -> dict[str, int]:
    """Return how many characters identify each job (array); whole ids if there are too many to check."""
    bases = list(dict.fromkeys(j.array_id or j.id for j in jobs))[-MAX_PREFIXES:]
    queued = {j.array_id or j.id for j in inbox_jobs(client)}
    return {base: _prefix_length(client, base, queued) for base in bases}


def _prefix_length(client: Client, base: str, queued: set[str]) -> int:
    """Return one more than the longest common prefix with a neighbour in id order, in the store or the inbox."""
    if ids.is_slurms(base):
        return len(base)
    others = [*(client.reader.neighbours(base) if client.reader else ()), *(queued - {base})]
    common = (next((i for i, (a, b) in enumerate(zip(base, other, strict=False)) if a != b), 0) for other in others)
    return min(len(base), 1 + max(common, default=0))
