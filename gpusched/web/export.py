"""Write the page as files for any web server (from cron)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gpusched.client.context import Client
from gpusched.config.paths import write_atomic
from gpusched.errors import GpuschedError
from gpusched.model.jobs import ACTIVE, ENDED
from gpusched.web.background import forecast_of
from gpusched.web.details import details
from gpusched.web.feed import Feed, SiteReader, shown_jobs
from gpusched.web.usage import UsageStats

PAGE = Path(__file__).with_name("page")
_LIVE, _FILES = 'name="gpusched-data" content="live"', 'name="gpusched-data" content="files"'
_MAX_DETAILED_JOBS = 5000  # other jobs get no page


def export(folder: Path, advance: Callable[[float, int], None] | None = None) -> int:
    """Write the page and the public details of jobs; return the number of files. Each file is replaced atomically.

    Raises:
        GpuschedError: The inventory or the store cannot be read.
        OSError: The folder cannot be written to.
    """
    site, now = SiteReader(), time.time()
    feed = Feed(site)
    feed.refresh_view(strict=True)
    client, count = site.client, 0
    jobs = [job for job in shown_jobs(client, now) if job.state in ACTIVE | ENDED][:_MAX_DETAILED_JOBS]
    bundles: dict[str, dict[str, Any]] = {}
    for done, job in enumerate(jobs):
        bundles.setdefault(job.id[:4], {})[job.id] = details(client, job, private=False)
        if advance is not None:
            advance(done, len(jobs))
    data = folder / "data" / "jobs"
    data.mkdir(parents=True, exist_ok=True)
    for path, content in _files(client, now, feed, bundles):
        write_atomic(folder / path, content)
        count += 1
    for old in data.glob("*.json"):
        if old.stem not in bundles:
            old.unlink(missing_ok=True)  # another export may have removed it
    return count


def _files(client: Client, now: float, feed: Feed, bundles: dict[str, dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content), the data that the page loads first last: it refers only to files that exist."""
    for path in sorted(PAGE.iterdir()):
        content = path.read_bytes()
        yield path.name, content.replace(_LIVE.encode(), _FILES.encode()) if path.suffix == ".html" else content
    for name, details_by_id in bundles.items():
        yield f"data/jobs/{name}.json", msgspec.json.encode(details_by_id)
    try:
        forecast = forecast_of(client)
    except GpuschedError as error:
        forecast = {"now": round(now), "jobs": {}, "trouble": error.line()}
    yield "data/forecast.json", msgspec.json.encode(forecast)
    yield "data/usage.json", msgspec.json.encode(UsageStats().figures(client.reader, now))
    yield "data/state.json", feed.since("", 0).plain
