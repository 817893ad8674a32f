"""What the shell offers after TAB. Fast, and silent about whatever is wrong."""

from __future__ import annotations

from collections.abc import Callable

from gpusched.client.context import Client
from gpusched.model.jobs import ENDED, Job, JobState

MAX_OFFERED = 200


def _quiet(offer: Callable[[Client, str], list[tuple[str, str]]]) -> Callable[[str], list[tuple[str, str]]]:
    def safe(incomplete: str) -> list[tuple[str, str]]:
        try:
            return offer(Client(), incomplete)[:MAX_OFFERED]
        except Exception:
            return []

    return safe


def _jobs(client: Client) -> list[Job]:
    from gpusched.client.waiting import inbox_jobs

    waiting = inbox_jobs(client)
    reader = client.reader
    stored = reader.active() + reader.jobs(states=[JobState.PENDING], limit=MAX_OFFERED) if reader else []
    known = {j.id for j in stored}
    return [*stored, *(j for j in waiting if j.id not in known)]


def _described(jobs: list[Job], incomplete: str) -> list[tuple[str, str]]:
    chosen = [j for j in reversed(jobs) if j.id.startswith(incomplete)]
    return [(j.id, f"{j.spec.name} ({j.user}, {j.state})") for j in chosen]


@_quiet
def live_jobs(client: Client, incomplete: str) -> list[tuple[str, str]]:
    """Ids of jobs that wait or run, newest first."""
    return _described(_jobs(client), incomplete)


@_quiet
def pending_jobs(client: Client, incomplete: str) -> list[tuple[str, str]]:
    """Ids of jobs that wait."""
    return _described([j for j in _jobs(client) if j.state is JobState.PENDING], incomplete)


@_quiet
def all_jobs(client: Client, incomplete: str) -> list[tuple[str, str]]:
    """Ids of jobs that wait or run, and of those that ended last."""
    ended = client.reader.recently_ended(20) if client.reader else []
    return _described([*(j for j in ended if j.state in ENDED), *_jobs(client)], incomplete)


@_quiet
def nodes(client: Client, incomplete: str) -> list[tuple[str, str]]:
    """Names of nodes."""
    return [(n.name, f"{n.partition}, {n.gpus} GPUs") for n in client.inventory.nodes if n.name.startswith(incomplete)]


@_quiet
def partitions(client: Client, incomplete: str) -> list[tuple[str, str]]:
    """Names of partitions."""
    found = client.inventory.partitions
    return [(p.name, f"{len(p.nodes)} nodes") for p in found if p.name.startswith(incomplete)]


@_quiet
def flavors(client: Client, incomplete: str) -> list[tuple[str, str]]:
    """Names of flavors."""
    return [
        (f.name, f"{f.gpus} GPUs, {f.cores} cores ({p.name})")
        for p in client.inventory.partitions
        for f in p.flavors
        if f.name.startswith(incomplete)
    ]


def states(incomplete: str) -> list[tuple[str, str]]:
    """Names of job states, in the case the user types."""
    found = [str(s) for s in JobState if s.startswith(incomplete.upper())]
    return [(s.lower() if incomplete.islower() else s, "") for s in found]
