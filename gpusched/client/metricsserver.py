"""Serves metrics over HTTP with prometheus_client: ``gpusched metrics --listen``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from gpusched.client.context import Client
from gpusched.client.metrics import collect
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.metrics import Family, Histogram

if TYPE_CHECKING:
    from threading import Thread

    from prometheus_client import Metric

DEFAULT_HOST = "127.0.0.1"
_log = logging.getLogger(__name__)


def serve(client: Client, address: str) -> None:
    """Serve until interrupted.

    Raises:
        UsageError: Not an address, or prometheus_client is not installed.
        GpuschedError: Nothing can listen there.
    """
    server, thread = start(client, address)
    host, port = server.server_address[:2]
    _log.info("serving at http://%s:%s/metrics (Ctrl-C stops it)", host, port)
    try:
        thread.join()
    finally:
        server.shutdown()
        server.server_close()


def start(client: Client, address: str) -> tuple[WSGIServer, Thread]:
    """Start serving in a thread; each scrape reads the store anew.

    Raises:
        UsageError, GpuschedError: As `serve`.
    """
    host, port = parse_address(address)
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise UsageError(
            "--listen needs prometheus_client, which is not installed", "pip install 'gpusched-cluster[metrics]'"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(client))
    try:
        return start_http_server(port, host, registry)
    except (OSError, TypeError, UnicodeError) as error:  # the latter two: of a host's name
        why = getattr(error, "strerror", None) or error
        raise GpuschedError(f"cannot listen on {address}: {why}", "choose another port") from None


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``PORT``, ``HOST:PORT`` or ``[ADDRESS]:PORT``; without a host only this machine is served.

    Raises:
        UsageError: It is none of these.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise UsageError(f"--listen {text}: not an address", "such as 9836 or 0.0.0.0:9836")
    return host.strip("[]") or DEFAULT_HOST, int(port)


class _Collector:
    """Turns our families into those of prometheus_client, which writes the format that the scraper asks for."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        client = self._client.another()  # each scrape has a thread of its own
        try:
            families = collect(client.reader)
        finally:
            client.reopen()
        return (_converted(family) for family in families if family.samples)


def _converted(family: Family) -> Metric:
    from prometheus_client import Metric

    name, kind, names, text = family.metric
    found = Metric(name, text, kind)
    suffix = "_total" if kind == "counter" else ""
    for values, value in family.samples:
        labels = dict(zip(names, values, strict=True))
        if not isinstance(value, Histogram):
            found.add_sample(name + suffix, labels, value)
            continue
        for bound, count in zip((*map(str, value.bounds), "+Inf"), accumulate(value.counts), strict=True):
            found.add_sample(f"{name}_bucket", labels | {"le": bound}, count)
        found.add_sample(f"{name}_count", labels, sum(value.counts))
        found.add_sample(f"{name}_sum", labels, value.sum)
    return found
