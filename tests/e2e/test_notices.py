"""Notices: mail, webhooks and commands, through a controller as its operator sets it up."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from email import message_from_bytes
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import Envelope

from tests.e2e.conftest import Cluster
from tests.testbed import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.one_partition, pytest.mark.processes]


class Site:
    """The operator's receivers: a mail server, a webhook that can be out of order, a program."""

    def __init__(self, folder: Path) -> None:
        self.mails: list[Envelope] = []
        self.posts: list[dict[str, Any]] = []
        self.tries, self.broken, self.release = 0, False, threading.Event()
        self.release.set()
        self.written = folder / "written"
        self.program = folder / "notify.sh"
        self.program.write_text(f'#!/bin/sh\n{{ cat; echo; }} >> "{self.written}"\n')
        self.program.chmod(0o755)
        site = self

        class Hook(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                site.tries += 1
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                site.release.wait(300)
                self.send_response(503 if site.broken else 204)
                self.end_headers()
                if not site.broken:
                    site.posts.append(body)

            def log_message(self, *_: object) -> None:
                pass

        self.hook = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
        threading.Thread(target=self.hook.serve_forever, daemon=True).start()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.mail_host = f"127.0.0.1:{port}"
        self.smtp = Controller(self, hostname="127.0.0.1", port=port)
        self.smtp.start()

    async def handle_DATA(self, server: object, session: object, envelope: Envelope) -> str:
        self.mails.append(envelope)
        return "250 OK"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.hook.server_port}/hooks/secret-token"

    def of(self, job: str) -> list[tuple[str, str]]:
        """Return (kind, text) of each notice to the webhook of a job or array."""
        posts = [post for post in self.posts if post["job"] and job in (post["job"]["id"], post["job"]["array"])]
        return [(post["notice"], post["text"]) for post in posts]

    def close(self) -> None:
        self.release.set()
        self.hook.shutdown()
        self.hook.server_close()
        self.smtp.stop()


@pytest.fixture
def site(house: Cluster, tmp_path: Path) -> Iterator[Site]:
    """The house with notices in its inventory, until the test is over."""
    site = Site(tmp_path)
    before = house.inventory.read_text()
    notices = {
        "smtp": site.mail_host,
        "from": "gpusched@example.org",
        "to": [
            {"webhook": site.url, "on": ["all"]},
            {"command": [str(site.program)], "on": ["fail"], "users": ["root"]},
        ],
    }
    part = house.inventory.with_suffix(".part")
    declared = json.loads(before)
    declared["settings"]["tick"] = "1s"  # a notice that is due waits for the next cycle
    part.write_text(json.dumps(declared | {"notices": notices}))
    part.rename(house.inventory)
    yield site
    part.write_text(before)
    part.rename(house.inventory)
    site.close()


def test_users_and_receivers_get_the_notices_they_asked_for(house: Cluster, site: Site, share: Path) -> None:
    good = house.sh("true", "--gpus", "1", "-J", "good", "--mail", "ada@example.org", "--notify", "begin,end")
    bad = house.sh("exit 3", "--gpus", "1", "-J", "bad", "--mail", "ada@example.org", "--notify", "begin")
    plain = house.sh("true", "--gpus", "1", "-J", "plain")
    wait_until(lambda: len(site.mails) == 3, 30, "three mails")
    wait_until(lambda: all(len(site.of(job)) >= 2 for job in (good, bad, plain)), 30, "the webhook")
    subjects = [str(message_from_bytes(m.content, policy=default)["Subject"]).strip() for m in site.mails]
    happened = ((bad, "bad", "started"), (good, "good", "started"), (good, "good", "ended"))
    about = [f"{job} ({name}) of root has {what} " for job, name, what in happened]
    assert all(any(subject.startswith(f"gpusched: job {what}") for subject in subjects) for what in about), subjects
    assert {tuple(m.rcpt_tos) for m in site.mails} == {("ada@example.org",)}
    assert {m.mail_from for m in site.mails} == {"gpusched@example.org"}
    ends = [text for kind, text in site.of(good) if kind == "end"]
    assert ends[0].startswith(f"job {good} (good) of root has ended COMPLETED")
    wait_until(site.written.exists, 30, "the program")
    (notice,) = [json.loads(line) for line in site.written.read_text().splitlines() if line]
    assert (notice["notice"], notice["job"]["id"], notice["job"]["exit_code"]) == ("fail", bad, 3)
    assert notice["text"].startswith(f"job {bad} (bad) of root has ended FAILED")


def test_an_array_gives_each_notice_once(house: Cluster, site: Site) -> None:
    array = house.sh('[ "$SLURM_ARRAY_TASK_ID" != 1 ]', "--gpus", "1", "--array", "0-2", "-J", "many")
    wait_until(lambda: {"end", "fail"} <= {kind for kind, _ in site.of(array)}, 40, "the end of the array")
    sent = site.of(array)
    assert sorted(kind for kind, _ in sent) == ["begin", "end", "fail"], "not of each task"
    assert ("end", f"array {array} (many) of root has ended: 2 COMPLETED, 1 FAILED") in sent


def test_a_receiver_that_fails_or_hangs_delays_nothing_and_gets_the_notice_again(
    house: Cluster, site: Site, share: Path
) -> None:
    site.release.clear()  # it takes what is said and answers nothing
    first = house.sh("true", "--gpus", "1")
    house.wait_state(first, "COMPLETED")
    wait_until(lambda: site.tries >= 1, 30, "a try")
    house.wait_state(house.sh("true", "--gpus", "1"), "COMPLETED")
    site.broken = True
    site.release.set()

    def finding() -> dict[str, str] | None:
        found = house.json("check", check=False)
        return next((f for f in found if f["check"] == "notices"), None)

    def unsent(why: str = "") -> bool:
        with house.reader() as reader:
            return reader is not None and any(why in notice.error for notice in reader.failed_notices())

    wait_until(lambda: unsent("503"), 30, "a failed delivery")  # before, one that hung may have been given up
    house.stop_controller()  # before the second try, after which it pauses for longer
    found = finding()
    assert found is not None
    assert "503" in found["message"]
    assert "secret-token" not in json.dumps(found)
    site.broken = False
    house.start_controller()
    wait_until(lambda: {"begin", "end"} <= {kind for kind, _ in site.of(first)}, 60, "what was not delivered before")
    wait_until(lambda: not unsent(), 30, "the rest")
    assert finding() is None, "check is content"


def test_wrong_options_of_notices_are_one_line_errors(house: Cluster) -> None:
    for words, said in (
        (("--mail", "a b"), "--mail: found 'a b', expected an address such as ada@example.org, or a user"),
        (("--mail", "-oQ/tmp"), "--mail: found '-oQ/tmp', expected an address such as ada@example.org, or a user"),
        (("--notify", "end"), "--notify: no mail address; add --mail ADDRESS"),
        (("--mail", "ada", "--notify", "ends"), "--notify: there is no notice 'ends'; did you mean 'end'?"),
    ):
        done = house.cli("submit", "-p", "A100", "--gpus", "1", *words, "--", "true", check=False)
        assert (done.returncode, done.stderr) == (2, f"gpusched: error: {said}\n")
