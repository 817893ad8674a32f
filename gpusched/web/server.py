"""The page over HTTP: the standard library's server, one thread per connection, which sends what the feed prepared."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from gpusched import __version__
from gpusched.client.context import Client
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.commands import RecordAudit
from gpusched.queue.audit import AuditReporter
from gpusched.web.access import AccessRules, Viewer, is_own_host, may_see, peer_of, viewer_of
from gpusched.web.background import BackgroundStats
from gpusched.web.details import details, log_tail, one_job
from gpusched.web.feed import Feed, ResponseBody, SiteReader

PAGE = Path(__file__).with_name("page")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
MAX_CONNECTIONS = 512
MAX_CONNECTIONS_OF_ONE = MAX_CONNECTIONS // 4  # an account of this machine, an address, a user that the proxy names
_IDLE_S, _KEEPALIVE_S = 60.0, 15.0
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_SECURITY_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_log = logging.getLogger(__name__)


class HttpRefusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: HTTPStatus, line: str) -> None:
        super().__init__(line)
        self.status = status


class WebServer(ThreadingHTTPServer):
    """The listening socket, and what its connections share."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str, port: int, rules: AccessRules) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.bound, self.rules = address, rules
        self.feed = Feed(SiteReader())
        self.background = BackgroundStats(self.feed)
        self._open: dict[Any, int | str | None] = {}  # connection -> its owner
        self._lock = threading.Lock()
        self.audit = _audit()
        try:
            super().__init__((address, port), _Connection)
        except (OSError, TypeError, UnicodeError) as error:  # the latter two: of a host's name
            raise UsageError(
                f"cannot listen on {address} port {port}: {getattr(error, 'strerror', None) or error}",
                "choose another with --bind or --port",
            ) from None

    def server_bind(self) -> None:
        """Bind without looking up host names, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.bound, self.server_address[1]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether one more connection is allowed."""
        return self.admit(request, peer_of(self.rules, client_address[:2], request.getsockname()[:2]))

    def admit(self, connection: Any, owner: int | str | None) -> bool:
        """Note a connection's owner (None: many users); return False if too many are open, or too many of one."""
        with self._lock:
            others = [owner for one, owner in self._open.items() if one is not connection]
            if len(others) >= MAX_CONNECTIONS or (owner is not None and others.count(owner) >= MAX_CONNECTIONS_OF_ONE):
                return False
            self._open[connection] = owner
            return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, served or not."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect; log any other error, which is a bug."""
        error = sys.exception()
        if not isinstance(error, OSError):
            _log.error("%s: %s", type(error).__name__, error, exc_info=error)

    @property
    def url(self) -> str:
        """Return the address of the page."""
        name = f"[{self.bound}]" if ":" in self.bound else self.bound
        return f"http://{name}:{self.server_port}/"


def _audit() -> AuditReporter | None:
    """Return what reports refusals; None where this account may not say in the audit log what others did."""
    client = Client()
    try:
        is_trusted = os.geteuid() in (0, client.state.stat().st_uid)
    except OSError:
        return None
    return AuditReporter(client.state) if is_trusted else None


def serve(server: WebServer) -> None:
    """Serve until `WebServer.shutdown`; the feed and the background statistics each have a thread."""
    threads = [threading.Thread(target=run, daemon=True) for run in (server.feed.run, server.background.run)]
    for thread in threads:
        thread.start()
    try:
        server.serve_forever(poll_interval=0.2)
    finally:
        server.feed.stop()
        server.background.stop()
        server.server_close()
        for thread in threads:
            thread.join(timeout=5)


class _Connection(BaseHTTPRequestHandler):
    server: WebServer
    protocol_version = "HTTP/1.1"
    server_version = f"gpusched/{__version__}"
    sys_version = ""
    timeout = _IDLE_S
    disable_nagle_algorithm = True
    routes: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"/api/state", "_state"),
        (r"/api/events", "_events"),
        (r"/api/me", "_me"),
        (r"/api/(forecast|usage)", "_extra"),
        (r"/api/job/([^/]{1,80})", "_job"),
        (r"/api/job/([^/]{1,80})/log", "_log"),
        (r"/([a-z]+\.(?:js|css|svg))?", "_file"),
    )

    def do_GET(self) -> None:
        """Answer one request."""
        self._viewer = Viewer()
        try:
            self._viewer = self._check_request()
            try:
                url = urlsplit(self.path)
            except ValueError:  # an address with half a bracket
                raise HttpRefusal(HTTPStatus.BAD_REQUEST, "the address cannot be parsed") from None
            self._query, path = parse_qs(url.query), unquote(url.path)
            if path.startswith("/api/") and self.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
                raise HttpRefusal(HTTPStatus.FORBIDDEN, "request from another site")
            for pattern, name in self.routes:
                if (found := re.fullmatch(pattern, path)) is not None:
                    getattr(self, name)(*found.groups())
                    return
            raise HttpRefusal(HTTPStatus.NOT_FOUND, "there is no such page")
        except HttpRefusal as error:
            if error.status is not HTTPStatus.NOT_FOUND and self.server.audit is not None:
                self.server.audit.refused(self._refusal(str(error)))
            self._json({"error": str(error)}, error.status)
        except UsageError as error:
            self._json({"error": error.line()}, HTTPStatus.NOT_FOUND)
        except GpuschedError as error:
            self._json({"error": error.line()}, HTTPStatus.SERVICE_UNAVAILABLE)

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is none, quoting at most its beginning."""
        super().send_error(code, message[:200] if message is not None else None, explain)

    def _check_request(self) -> Viewer:
        """Return the viewer, after checking that the request may be answered.

        A request that comes through the proxy is for the proxy's public name. What follows it as a body would be read
        as the next one, whose headers a proxy that keeps connections has not seen; payload is what the parser takes
        for no headers, such as those behind two bare line breaks.
        """
        lengths = self.headers.get_all("Content-Length", [])
        has_body = "Transfer-Encoding" in self.headers or any(length.strip() != "0" for length in lengths)
        if has_body or self.headers.get_payload():
            self.close_connection = True
            raise HttpRefusal(HTTPStatus.BAD_REQUEST, "a request with a body")
        viewer = viewer_of(
            self.server.rules, self.client_address[:2], self.request.getsockname()[:2], _Headers(self.headers)
        )
        if not viewer.proxied and not is_own_host(self.server.rules, self.server.bound, self.headers.get("Host", "")):
            raise HttpRefusal(HTTPStatus.MISDIRECTED_REQUEST, "unknown host name; add it with --name of 'gpusched web'")
        if viewer.user is not None and not self.server.admit(self.request, viewer.user):
            raise HttpRefusal(HTTPStatus.TOO_MANY_REQUESTS, "you have too many connections open; close some pages")
        return viewer

    def _refusal(self, why: str) -> RecordAudit:
        viewer = self._viewer.user or "unknown"
        path = "".join(c if c.isprintable() else "?" for c in self.path[:200])
        return RecordAudit(
            time=time.time(), origin=f"http {self.client_address[0]}", action="page", subject=(path,), refused=why,
            via="page", user=viewer,
        )  # fmt: skip

    # -- answers

    def _file(self, name: str | None) -> None:
        path = PAGE / (name or "index.html")
        if not path.is_file():
            raise HttpRefusal(HTTPStatus.NOT_FOUND, "there is no such page")
        content = _file_body(path, path.stat().st_mtime_ns)
        self._send(content, TYPES[path.suffix], f'"{__version__}-{path.stat().st_mtime_ns:x}"')

    def _state(self) -> None:
        feed, _, version = self._parameter("since").rpartition("-")
        known = int(version) if re.fullmatch(r"[0-9]{1,12}", version) else 0
        if not self.server.feed.version:
            self.server.feed.wait(self.server.feed.versions(), 10.0)  # the first view is not ready yet
        self._send(self.server.feed.since(feed, known))

    def _extra(self, name: str) -> None:
        self._send(self.server.background.packed(name))

    def _me(self) -> None:
        self._json({"user": self._viewer.user, "names": bool(self.server.rules.header)})

    def _job(self, text: str) -> None:
        with _request_client() as client:
            job = one_job(client, text)
            private = may_see(self._viewer, job.user, client.inventory, client.state)
            self._json(details(client, job, private=private))

    def _log(self, text: str) -> None:
        with _request_client() as client:
            job = one_job(client, text)
            viewer = self._viewer.user
            if viewer is None or not may_see(self._viewer, job.user, client.inventory, client.state):
                raise HttpRefusal(HTTPStatus.FORBIDDEN, "only its user (logged in) and admins can see a job's output")
            rank, attempt = self._number("rank") or 0, self._number("attempt")
            try:
                self._json({"text": log_tail(client, job, rank, attempt, viewer)})
            except GpuschedError as error:
                self._json({"text": "", "note": error.line()})

    def _events(self) -> None:
        """Send the version numbers as they change; viewers then fetch the data, the same bytes for all."""
        self.send_response(HTTPStatus.OK)
        self._head({"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        self.connection.settimeout(_KEEPALIVE_S)  # a client that reads nothing for that long has gone
        versions: dict[str, Any] | None = self.server.feed.versions()
        self.wfile.write(b"retry: 2000\n\n")
        while not self.server.feed.stopped:
            if versions is not None:
                known = versions
                self.wfile.write(b"data: %b\n\n" % msgspec.json.encode(versions))
            else:
                self.wfile.write(b": still here\n\n")
            versions = self.server.feed.wait(known, _KEEPALIVE_S)

    # -- parameters and responses

    def _parameter(self, name: str) -> str:
        return self._query.get(name, [""])[0]

    def _number(self, name: str) -> int | None:
        text = self._parameter(name)
        return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else None

    def _json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(ResponseBody.of(msgspec.json.encode(value)), status=status)

    def _send(
        self, content: ResponseBody, kind: str = "application/json", tag: str = "", status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        if tag and self.headers.get("If-None-Match") == tag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self._head({"ETag": tag, "Cache-Control": "no-cache"})
            self.end_headers()
            return
        is_compressed = "gzip" in self.headers.get("Accept-Encoding", "")
        body = content.zipped if is_compressed else content.plain
        self.send_response(status)
        caching = {"ETag": tag, "Cache-Control": "no-cache"} if tag else {"Cache-Control": "no-store"}
        self._head({"Content-Type": kind, "Content-Length": str(len(body)), "Vary": "Accept-Encoding", **caching})
        if is_compressed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, headers: Mapping[str, str]) -> None:
        closes = {"Connection": "close"} if self.close_connection else {}
        for name, value in (_SECURITY_HEADERS | closes | dict(headers)).items():
            self.send_header(name, value)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a proxy has its own log."""


class _Headers(dict[str, str]):
    """Headers by name, in any case; a header that occurs twice is ignored."""

    def __init__(self, message: Any) -> None:
        super().__init__()
        self._message = message

    def get(self, key: str, default: str = "") -> str:  # type: ignore[override]
        found = self._message.get_all(key, [])
        return found[0] if len(found) == 1 else default


@contextmanager
def _request_client() -> Iterator[Client]:
    """Open a client for this request: SQLite's connections stay in their thread."""
    client = Client()
    try:
        yield client
    finally:
        client.reopen()


_files: dict[Path, tuple[int, ResponseBody]] = {}


def _file_body(path: Path, changed: int) -> ResponseBody:
    if _files.get(path, (0,))[0] != changed:
        _files[path] = changed, ResponseBody.of(path.read_bytes())
    return _files[path][1]


def is_loopback(address: str) -> bool:
    """Return whether only this machine can connect to the address."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
