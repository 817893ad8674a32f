"""Slow statistics, computed in a background thread: forecasts, and sums over days."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from gpusched.client.context import Client
from gpusched.web.feed import Feed, ResponseBody, SiteReader
from gpusched.web.usage import UsageStats

_PAUSE_S = {"forecast": 20.0, "usage": 60.0}
_MAX_AGE_S = 300.0  # both depend on the clock, too: they age while the view does not change
_REST_FACTOR = 10.0  # pauses last this many times as long as the computation before them
EMPTY: dict[str, Any] = {
    "forecast": {"now": 0, "jobs": {}, "ends": {}},
    "usage": {"now": 0, "hours": [], "fine": [], "idle": [], "users": {}},
}


class BackgroundStats:
    """Recomputes both when the view has changed, or after `_MAX_AGE_S`, and notifies the feed."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._packed = {name: ResponseBody.of(msgspec.json.encode(value)) for name, value in EMPTY.items()}
        self._stop = threading.Event()

    def run(self) -> None:
        """Recompute until `stop`."""
        site, usage = SiteReader(), UsageStats()
        works: dict[str, Callable[[Client], Any]] = {
            "usage": lambda client: usage.figures(client.reader, time.time()),
            "forecast": forecast_of,
        }
        due = dict.fromkeys(works, 0.0)
        seen_version = dict.fromkeys(works, 0)
        while not self._stop.wait(0.2):
            for name, work in works.items():
                if not is_due(time.monotonic() - due[name], self._feed.version, seen_version[name]):
                    continue
                start, seen_version[name] = time.monotonic(), self._feed.version
                self._make(name, work, site)
                finish = time.monotonic()
                due[name] = finish + max(_PAUSE_S[name], _REST_FACTOR * (finish - start))

    def _make(self, name: str, work: Callable[[Client], Any], site: SiteReader) -> None:
        try:
            site.refresh()
            result = work(site.client)
        except Exception as error:  # the page works without it
            result = EMPTY[name] | {"trouble": f"{type(error).__name__}: {error}"}
        self._packed[name] = ResponseBody.of(msgspec.json.encode(result))
        self._feed.notify(name)

    def packed(self, name: str) -> ResponseBody:
        """Return the latest result."""
        return self._packed[name]

    def stop(self) -> None:
        """End `run` after the current computation."""
        self._stop.set()


def is_due(late_s: float, version: int, seen: int) -> bool:
    """Return whether to recompute; ``late_s``: past the pause; ``version``, ``seen``: of the view, now and then."""
    return late_s >= 0 and version > 0 and (version != seen or late_s >= _MAX_AGE_S)


def forecast_of(client: Client) -> Any:
    """Return `forecast.forecast`, or an empty one without a store."""
    from gpusched.web.forecast import forecast

    return forecast(client.reader, client.inventory, time.time()) if client.reader else EMPTY["forecast"]
