"""``run`` and ``attach`` before there is anything to be attached to. The rest: tests/e2e/test_shells.py."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from gpusched.client import forwarding
from gpusched.client.context import Client
from gpusched.client.submit import submit
from gpusched.model.commands import Cancel, Submit
from gpusched.model.jobs import JobState
from tests.cli.conftest import Site
from tests.testbed.waiting import wait_until


def begin(site: Site, *words: str, **more: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "gpusched", *words]
    return subprocess.Popen(argv, env=site.env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, **more)  # type: ignore[call-overload,no-any-return]  # fmt: skip


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_run_submits_the_request_and_a_signal_cancels_it(
    site: Site, number: signal.Signals, code: int
) -> None:
    process = begin(site, "run", "-F", "s-V100", "--env", "A=1", "-t", "90", "prog", "--pty", "it's")
    wait_until(lambda: bool(site.commands()), 30)
    command = site.only_submit()
    spec = command.spec
    assert (spec.command, spec.env, spec.time_limit_s) == (("prog", "--pty", "it's"), {"A": "1"}, 5400)
    assert (spec.session, spec.pty, spec.signal, spec.preemptible, spec.elastic) == (600, False, "TERM", False, None)
    wait_until(lambda: _handles(process.pid, number), 30)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (code, "", f"gpusched: job {command.id} cancelled\n")
    (cancel,) = (c for c in site.commands() if not isinstance(c, Submit))
    assert isinstance(cancel, Cancel)
    assert cancel.job_ids == (command.id,)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_the_job_is_being_queued_cancels_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, after: bool
) -> None:
    """Where the client is by then, nobody can know: before or after the job is in the inbox."""

    def interrupted(client: Client, prepared: Submit) -> str:
        if not after:
            signal.raise_signal(number)
        job_id = submit(client, prepared)
        if after:
            signal.raise_signal(number)
        return job_id

    monkeypatch.setattr("gpusched.client.shell.submit", interrupted)
    done = site.call("run", "-F", "s-V100", "prog")
    (command,) = (c for c in site.commands() if isinstance(c, Submit))
    assert (done.code, done.out, done.err) == (code, "", f"gpusched: job {command.id} cancelled\n")
    assert [c.job_ids for c in site.commands() if isinstance(c, Cancel)] == [(command.id,)]


def _handles(pid: int, number: signal.Signals) -> bool:
    with open(f"/proc/{pid}/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_a_terminal_is_asked_for_in_a_terminal_only(site: Site) -> None:
    done = site.run("run", "-F", "s-V100", "--pty", "sh")
    assert (done.code, done.out) == (2, "")
    assert done.err == "gpusched: error: --pty needs a terminal as stdin; omit it, or run it in a terminal\n"
    assert site.commands() == []


def test_a_terminal_session_gets_sighup_at_its_end(site: Site) -> None:
    ours, theirs = os.openpty()
    argv = ["setsid", "--ctty", sys.executable, "-m", "gpusched", "run", "-F", "s-V100", "--pty", "sh"]
    with subprocess.Popen(
        argv, env=site.env | {"TERM": "screen-256color"}, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        wait_until(lambda: bool(site.commands()), 30)
        spec = site.only_submit().spec
        assert (spec.pty, spec.signal, spec.env) == (True, "HUP", {"TERM": "screen-256color"})
        wait_until(lambda: _handles(process.pid, signal.SIGHUP), 30)
        os.close(ours)  # the window is closed
        assert process.wait(300) == 129
    assert len(site.commands()) == 2


@pytest.mark.parametrize("text", ["", "0", "65536", "8888:", ":8888", "a", "1:2:3", "-1", "8888:0", "8888/tcp", "١"])
def test_an_invalid_port_is_refused_before_anything_is_queued(site: Site, text: str) -> None:
    done = site.call("run", "-F", "s-V100", f"--forward={text}", "--", "true")
    assert done.code == 2
    assert done.err == f"gpusched: error: --forward: expected PORT or LOCAL:REMOTE, found '{text}'; 8888, 9000:8888\n"
    assert site.commands() == []


def test_a_port_that_another_has_is_refused_before_anything_is_queued(site: Site) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = site.call("run", "-F", "s-V100", "--forward", str(port), "--", "true")
    assert done.code == 2
    assert f"--forward: port {port} cannot be opened on this machine: Address already in use; --forward " in done.err
    assert site.commands() == []


def test_the_port_that_is_suggested_can_be_had_and_leads_to_the_same_one_of_the_job(site: Site) -> None:
    with socket.socket() as other, socket.socket() as after:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with contextlib.suppress(OSError, OverflowError):  # another has it, which is as good
            after.bind(("127.0.0.1", port + 1))
            after.listen()
        asked = ("--forward", f"{port}:8888", "--forward", f"{max(1, port - 1)}:22")
        done = site.call("run", "-F", "s-V100", *asked, "--", "true")
    found = re.search(rf"port {port} cannot be opened on this machine: .*; --forward (\d+):8888\n", done.err)
    assert found is not None, done.err
    assert int(found[1]) not in (port, port + 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", int(found[1])))
        free.listen()
    assert (done.code, site.commands()) == (2, [])


@pytest.mark.parametrize(("near", "first"), [(80, 8081), (1023, 9024), (8888, 8889), (65535, None)])
def test_where_a_free_port_is_looked_for(monkeypatch: pytest.MonkeyPatch, near: int, first: int | None) -> None:
    tried: list[int] = []

    def bound(port: int) -> socket.socket:
        tried.append(port)
        if port:
            raise OSError
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        return sock

    monkeypatch.setattr(forwarding, "_bind", bound)
    assert forwarding._free_port(near, ()) > 0
    assert tried[0] == (first if first is not None else 0)
    assert tried[-1] == 0


@pytest.mark.parametrize(
    "option", ["--array=0-3", "--hold", "--resizable", "--preemptible", "--output=x", "--sizes=1,2"]
)
def test_options_of_jobs_without_anybody_are_none_of_its(site: Site, option: str) -> None:
    done = site.call("run", "-F", "s-V100", option, "--", "true")
    assert done.code == 2
    assert "no such option" in done.err.lower()


def test_attach_accepts_only_sessions_of_gpusched_run(site: Site) -> None:
    other = site.submit()
    site.apply_inbox()
    done = site.call("attach", other)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"gpusched: error: cannot attach to job {other}: it was not started with 'gpusched run'; "
        f"gpusched logs -f {other}, or gpusched exec -it {other} -- sh\n"
    )
    assert site.call("attach", "zzzzzzzzzzz").code == 2
    process = begin(site, "run", "-F", "s-V100", "--", "true")
    wait_until(lambda: bool(site.commands()), 30)
    own = site.only_submit().id
    site.apply_inbox()
    job = site.change(
        own, state=JobState.CANCELLED, reason="Cancelled", message="cancelled by root", end_time=time.time()
    )
    assert process.communicate(timeout=300) == (
        "",
        f"gpusched: job {own} ended CANCELLED (Cancelled: cancelled by root)\n",
    )
    assert process.returncode == 143
    assert job.spec.session == 600
    done = site.call("attach", own)
    assert (done.code, done.err) == (
        1,
        f"gpusched: error: job {own} has ended CANCELLED (Cancelled: cancelled by root)\n",
    )


def test_a_refused_session_ends_with_the_reason(site: Site) -> None:
    process = begin(site, "run", "-F", "s-V100", "--mount", "/nowhere:/x", "--", "true")
    wait_until(lambda: bool(site.commands()), 30)
    command = site.only_submit()
    site.inventory.write_text(site.inventory.read_text().replace("s-V100:", "t-V100:"))
    site.apply_inbox()
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (1, "")
    assert err.startswith(f"gpusched: error: job {command.id} was refused: ")
    assert err.count("\n") == 1


def test_where_jobs_may_be_stopped_or_resized_by_default_what_people_work_in_may_not(site: Site) -> None:
    text = site.inventory.read_text()
    site.inventory.write_text(
        text.replace("  V100:\n", "  V100:\n    preemptible: true\n    resizable: {default: true}\n")
    )
    site.submit("-p", "V100", "--gpus", "2", "--", "true")
    process = begin(site, "run", "-p", "V100", "--gpus", "2", "--", "true")
    wait_until(lambda: len(site.commands()) == 2, 30)
    process.kill()
    process.communicate()
    specs = {c.spec.session: c.spec for c in site.commands() if isinstance(c, Submit)}
    assert (specs[None].preemptible, specs[None].elastic is None) == (True, False)
    assert (specs[600].preemptible, specs[600].elastic) == (False, None)
