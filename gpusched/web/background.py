"""What takes longer than a look at the store: forecasts and sums over days, in a thread of its own, at leisure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from gpusched.client.context import Client
from gpusched.web.feed import Feed, Packed, SiteReader
from gpusched.web.usage import UsageStats

_PAUSE_S = {"forecast": 20.0, "usage": 60.0}
_REST = 10.0  # so many times as long as the last one took is waited before the next
EMPTY: dict[str, Any] = {
    "forecast": {"now": 0, "jobs": {}, "ends": {}},
    "usage": {"now": 0, "hours": [], "fine": [], "users": {}},
}


class BackgroundStats:
    """Makes both again when the view has changed, and tells the feed."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._packed = {name: Packed.of(msgspec.json.encode(value)) for name, value in EMPTY.items()}
        self._stop = threading.Event()

    def run(self) -> None:
        """Again and again, until `stop`."""
        site, used = SiteReader(), UsageStats()
        works: dict[str, Callable[[Client], Any]] = {
            "usage": lambda client: used.figures(client.reader, time.time()),
            "forecast": forecast_of,
        }
        due = dict.fromkeys(works, 0.0)
        seen = dict.fromkeys(works, 0)
        while not self._stop.wait(0.2):
            for name, work in works.items():
                if time.monotonic() < due[name] or self._feed.version == seen[name]:
                    continue
                begin, seen[name] = time.monotonic(), self._feed.version
                self._make(name, work, site)
                end = time.monotonic()
                due[name] = end + max(_PAUSE_S[name], _REST * (end - begin))

    def _make(self, name: str, work: Callable[[Client], Any], site: SiteReader) -> None:
        try:
            site.refresh()
            found = work(site.client)
        except Exception as error:  # the page goes on without
            found = EMPTY[name] | {"trouble": f"{type(error).__name__}: {error}"}
        self._packed[name] = Packed.of(msgspec.json.encode(found))
        self._feed.tell(name)

    def packed(self, name: str) -> Packed:
        """The last one made."""
        return self._packed[name]

    def stop(self) -> None:
        """End `run` after what it is at."""
        self._stop.set()


def forecast_of(client: Client) -> Any:
    """See `ahead.forecast`; empty where there is no store yet."""
    from gpusched.web.ahead import forecast

    return forecast(client.reader, client.inventory, time.time()) if client.reader else EMPTY["forecast"]
