"""How clients are distinguished, by real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from gpusched.errors import UsageError
from gpusched.web import server
from gpusched.web.access import AccessRules, is_own_host, rules_of, uid_of_peer, viewer_of
from gpusched.web.server import WebServer
from tests.testbed.waiting import wait_until
from tests.web.conftest import account


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_kernel_knows_whose_a_connection_is(family: int, address: str) -> None:
    with socket.socket(family) as listening:
        listening.bind((address, 0))
        listening.listen()
        with socket.create_connection((address, listening.getsockname()[1])):
            accepted, peer = listening.accept()
            with accepted:
                assert uid_of_peer(peer[:2], accepted.getsockname()[:2]) == os.getuid()
        assert uid_of_peer((address, 1), listening.getsockname()[:2]) is None


@pytest.mark.skipif(os.getuid() != 0, reason="needs another account")
def test_another_accounts_connection_is_its_own() -> None:
    code = (
        "import encodings.idna, os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(300)
        child = subprocess.Popen([sys.executable, "-c", code, str(listening.getsockname()[1])])
        accepted, peer = listening.accept()
        with accepted:
            here = accepted.getsockname()
            assert uid_of_peer(peer, here) == 65534
            asked = {"X-User": "root"}
            assert viewer_of(rules_of("X-User", account(), ()), peer, here, asked).user is None
            assert viewer_of(AccessRules(header="X-User", proxy_uid=65534), peer, here, asked).user == "root"
        child.wait(300)


def test_a_proxy_elsewhere_is_known_by_its_address() -> None:
    rules, here = rules_of("X-User", "10.77.0.9", ()), ("10.77.0.1", 80)
    assert viewer_of(rules, ("10.77.0.9", 5), here, {"X-User": "amira"}).user == "amira"
    assert viewer_of(rules, ("::ffff:10.77.0.9", 5), here, {"X-User": "amira"}).user == "amira"
    assert viewer_of(rules, ("10.77.0.8", 5), here, {"X-User": "amira"}).user is None
    assert viewer_of(rules, ("10.77.0.9", 5), here, {}).user is None


@pytest.mark.parametrize(
    ("header", "proxy", "said"),
    [
        ("X-User", None, "must be used together"),
        (None, "www-data", "must be used together"),
        ("X-User", "127.0.0.1", "every user of this machine"),
        ("X-User", "::1", "every user of this machine"),
        ("X-User", "nobody-at-all", "neither an address nor an account"),
        ("X User:", "10.0.0.1", "not a header name"),
    ],
)
def test_rules_that_would_trust_anyone_are_refused(header: str | None, proxy: str | None, said: str) -> None:
    with pytest.raises(UsageError) as error:
        rules_of(header, proxy, ())
    assert said in error.value.line()


def test_names_that_were_given_are_ours() -> None:
    assert is_own_host(AccessRules(names=("gpus.example.org",)), "0.0.0.0", "GPUs.example.org:443")
    assert not is_own_host(AccessRules(), "0.0.0.0", "gpus.example.org")


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = [sys.executable, "-m", "gpusched", "web", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Address already in use" in done.stderr
    with pytest.raises(UsageError, match="cannot listen on \udcff port 0"):
        WebServer("\udcff", 0, AccessRules())


def _status(port: int, held: ExitStack, user: str = "") -> int:
    """The status of one answer, 0: the connection was closed instead; it stays open while ``held``."""
    connection = held.enter_context(closing(HTTPConnection("127.0.0.1", port, timeout=300)))
    try:
        connection.request("GET", "/app.js", headers={"X-User": user} if user else {})
        answer = held.enter_context(connection.getresponse())
        answer.read()
        return answer.status
    except ConnectionError:
        return 0


@pytest.fixture
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[AccessRules], WebServer]]:
    """A page of which each may have two connections."""
    monkeypatch.setenv("GPUSCHED_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(server, "MAX_CONNECTIONS_OF_ONE", 2)
    monkeypatch.setattr(server._Connection, "timeout", 3600.0)
    with ExitStack() as ends:

        def started(rules: AccessRules) -> WebServer:
            page = WebServer("127.0.0.1", 0, rules)
            thread = threading.Thread(target=page.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            ends.callback(lambda: (page.shutdown(), thread.join(), page.server_close()))
            return page

        yield started


@pytest.mark.skipif(os.getuid() != 0, reason="needs another account")
def test_one_account_cannot_have_all_connections(narrow: Callable[[AccessRules], WebServer]) -> None:
    port = narrow(AccessRules()).server_port
    code = (
        "import encodings.idna, http.client as h, os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        "c = h.HTTPConnection('127.0.0.1', int(sys.argv[1])); c.request('GET', '/app.js');"
        "print(c.getresponse().status)"
    )
    with ExitStack() as held:
        assert [_status(port, held) for _ in range(3)] == [200, 200, 0]
        done = subprocess.run([sys.executable, "-c", code, str(port)], capture_output=True, text=True, timeout=300)
        assert done.stdout == "200\n", done.stderr

    def is_free() -> bool:
        with ExitStack() as held:
            return _status(port, held) == 200

    wait_until(is_free, what="a closed connection to count no more")


def test_nor_one_user_behind_the_proxy(narrow: Callable[[AccessRules], WebServer]) -> None:
    port = narrow(rules_of("X-User", account(), ())).server_port
    with ExitStack() as held:
        assert [_status(port, held, user) for user in ("ada", "ada", "ada", "bob")] == [200, 200, 429, 200]
