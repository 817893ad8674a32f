"""The page as files that any web server can hand out; written by cron, looked at without us."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gpusched.client.context import Client
from gpusched.config.paths import write_atomic
from gpusched.errors import GpuschedError
from gpusched.model.jobs import ACTIVE, ENDED, JobRecord
from gpusched.web.background import forecast_of
from gpusched.web.details import details
from gpusched.web.feed import Feed, SiteReader, shown_jobs
from gpusched.web.usage import UsageStats

PAGE = Path(__file__).with_name("page")
_LIVE, _FILES = 'name="gpusched-data" content="live"', 'name="gpusched-data" content="files"'
_MOST_STORIES = 5000  # of waiting jobs beyond that there is nothing to tell


def export(folder: Path, told: Callable[[float, int], None] | None = None) -> int:
    """Write the page, and of jobs what all may see; returns the number of files. Each is replaced as a whole.

    Raises:
        GpuschedError: The inventory or the store cannot be read.
        OSError: The folder cannot be written to.
    """
    site, now = SiteReader(), time.time()
    feed = Feed(site)
    feed.look(strict=True)
    client, count = site.client, 0
    jobs = [job for job in shown_jobs(client, now) if job.state in ACTIVE | ENDED][:_MOST_STORIES]
    bundles: dict[str, dict[str, Any]] = {}
    for done, job in enumerate(jobs):
        bundles.setdefault(bundle_of(job), {})[job.id] = details(client, job, private=False)
        if told is not None:
            told(done, len(jobs))
    data = folder / "data" / "jobs"
    data.mkdir(parents=True, exist_ok=True)
    for path, content in _files(client, now, feed, bundles):
        write_atomic(folder / path, content)
        count += 1
    for old in data.glob("*.json"):
        if old.stem not in bundles:
            old.unlink()
    return count


def bundle_of(job: JobRecord) -> str:
    """Jobs of one file: their ids begin alike."""
    return job.id[:4]


def _files(client: Client, now: float, feed: Feed, bundles: dict[str, dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """What is read last is written last: the page, then what it shows."""
    for path in sorted(PAGE.iterdir()):
        content = path.read_bytes()
        yield path.name, content.replace(_LIVE.encode(), _FILES.encode()) if path.suffix == ".html" else content
    for name, told in bundles.items():
        yield f"data/jobs/{name}.json", msgspec.json.encode(told)
    try:
        ahead = forecast_of(client)
    except GpuschedError as error:
        ahead = {"now": round(now), "jobs": {}, "trouble": error.line()}
    yield "data/forecast.json", msgspec.json.encode(ahead)
    yield "data/usage.json", msgspec.json.encode(UsageStats().figures(client.reader, now))
    yield "data/state.json", feed.since("", 0).plain
