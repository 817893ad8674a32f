"""Who is told apart from whom, by real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpusched.errors import UsageError
from gpusched.web.access import AccessRules, is_own_host, rules_of, uid_of_peer, viewer_of
from gpusched.web.server import WebServer
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
