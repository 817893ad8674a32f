"""Jobs that people work in: gpusched run, attach, --forward; with real terminals, engines and lost connections."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpusched.model.jobs import JobRecord
from tests.e2e.conftest import GPUSCHED, Cluster
from tests.e2e.people import Screen, nobody
from tests.testbed import Testbed, processes, wait_until

pytestmark = pytest.mark.slow

NODES = {"podman": "dgx001", "process": "dgx004"}  # the others: tests/nodes/runtimes/test_sessions.py
SETTINGS = {"shared": True, "root_jobs": True, "session_keep": "10m", "grace": "2s"}


@pytest.fixture(scope="module")
def shared(testbed_session: Testbed) -> Iterator[Cluster]:
    """A shared installation with a node for each way to run jobs; one for all tests of this file."""
    folder = Path(tempfile.mkdtemp(prefix="gpusched-e2e-", dir="/tmp"))
    folder.chmod(0o755)
    cluster = Cluster(testbed_session, folder)
    _declare(cluster)
    cluster.start_controller()
    yield cluster
    cluster.close()
    shutil.rmtree(folder)
    testbed_session.reset()


@pytest.fixture
def site(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    while _people:
        _people.pop().close()
    shared.clear()


_people: list[Person] = []


def _declare(cluster: Cluster, **settings: object) -> None:
    cluster.write_inventory(SETTINGS | settings, nodes={"dgx004": {"runtime": "process"}})


def _on(runtime: str) -> tuple[str, ...]:
    return ("-p", "A100" if runtime == "podman" else "V100", "--gpus", "1", "--nodelist", NODES[runtime])


def _live(cluster: Cluster, *but: str) -> list[JobRecord]:
    """Jobs that have not ended."""
    with cluster.reader() as reader:
        found = [*reader.active(), *reader.pending()] if reader is not None else []
    return [job for job in found if job.id not in but]


class Person(Screen):
    """Somebody at a terminal who runs gpusched."""

    def __init__(self, cluster: Cluster, *words: str, prefix: Sequence[str] = ()) -> None:
        super().__init__(cluster, [*prefix, *GPUSCHED, *words], rows=31, columns=97)
        self.cluster = cluster
        _people.append(self)

    def says(self, text: str, *, types: str = "") -> None:
        """Wait for a text after all that was shown before, and after what is typed now."""
        if types:
            self.shown = ""
            self.type(types)
        self.wait_for(text)

    def job(self) -> str:
        """The one job that has not ended."""
        (job,) = _live(self.cluster)
        return job.id

    def end(self) -> int:
        self.shown = ""
        try:
            wait_until(self._ended, 60, "the command's end")
        finally:
            self.close()
        return self.process.returncode

    def _ended(self) -> bool:
        self.look()
        return self.process.poll() is not None


@pytest.mark.parametrize("runtime", NODES)
def test_a_shell_has_a_terminal_and_is_there_again_after_its_client_was_killed(site: Cluster, runtime: str) -> None:
    person = Person(site, "run", *_on(runtime), "--pty", "sh")
    person.says("31 97", types="until stty size | grep -q 97; do sleep 0.1; done; stty size\n")
    person.resize(40, 111)
    person.says("40 111", types="until stty size | grep -q 111; do sleep 0.1; done; stty size\n")
    person.says("job-", types="echo job-$GPUSCHED_JOB_ID; x=kept; echo $TERM; tty\n")
    job = person.job()
    person.says(f"job-{job}")
    site.wait_state(job, "RUNNING")
    person.says("sleep", types="sleep 9999\n")
    wait_until(lambda: _runs(site, "sleep", "9999"), what="the sleeper")
    person.says("woken-4", types="\x03echo woken-$((2 + 2))\n")
    # Keys by which engines let go of a terminal are the job's, too.
    person.says("still-4", types="\x10\x11\x15echo still-$((2 + 2))\n")
    person.close()  # kill -9
    again = Person(site, "attach", job)
    wait = "until stty size | grep -q 97; do sleep 0.1; done"
    again.says("kept-31-97", types=f'\n\x15{wait}; set -- $(stty size); echo "$x-$1-$2"\n')
    again.says("exit", types="exit 5\n")
    assert again.end() == 5
    ended = site.wait_state(job, "FAILED")
    assert (ended.exit_code, ended.attempt) == (5, 1)
    assert "woken-4" in site.logs(job)


def _runs(cluster: Cluster, *words: str) -> bool:
    return any(processes.command_line(pid) == list(words) for node in cluster.testbed.nodes for pid in node.pids())


def test_without_a_terminal_input_and_outputs_are_as_they_are(site: Cluster) -> None:
    given = os.urandom(1 << 20) + b"\x1egpusched-attached\x1e\x04\x03" + os.urandom(1 << 20)
    script = "cat; echo warning >&2; exit 7"
    done = subprocess.run(
        [*GPUSCHED, "run", *_on("podman"), "--", "sh", "-c", script], env=site.env(), input=given, capture_output=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 7
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(given).digest()
    assert b"warning\n" in done.stderr
    # Nothing is lost of what has ended before anybody could look.
    assert site.cli("run", *_on("podman"), "--", "echo", "it's").stdout == "it's\n"


def test_programs_that_fill_the_screen_work(site: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "text"
    for editor, runtime in (("vi", "podman"), ("vim", "process")):
        mount = ("--mount", f"{tmp_path}:{tmp_path}") if runtime == "podman" else ()
        person = Person(site, "run", *_on(runtime), *mount, "--pty", editor, str(file))
        person.says("~")
        person.type("ihello from " + editor + "\x1b")
        person.says("hello from " + editor)
        person.type(":wq\r")
        assert person.end() == 0
        assert file.read_text() == f"hello from {editor}\n"
        file.unlink()
    person = Person(site, "run", *_on("process"), "--pty", "tmux", "-L", tmp_path.name, "-f", "/dev/null", "new", "sh")
    person.says("[0]")  # its status line
    person.says("cols-97", types="echo cols-$(tput cols)\n")
    person.resize(30, 90)
    person.says("cols-90", types="until [ $(tput cols) = 90 ]; do sleep 0.1; done; echo cols-$(tput cols)\n")
    job = person.job()
    person.close()
    again = Person(site, "attach", job)
    again.says("[0]")  # drawn anew, without a key
    again.says("exited", types="exit\n")
    # tmux's server and its last session end together; which of both its client hears of first decides its exit code.
    server_was_first = "server exited" in again.shown
    assert again.end() == server_was_first


def test_run_shows_why_the_job_is_pending_and_ctrl_c_cancels_it(site: Cluster) -> None:
    blocker = site.sh("sleep 1000", "--gpus", "8", "--nodelist", "dgx001")
    site.wait_state(blocker, "RUNNING")
    person = Person(site, "run", *_on("podman"), "--pty", "sh")
    person.says("PENDING (")
    person.says("GPU")
    (job,) = (j.id for j in _live(site, blocker))
    reason = site.json("why", job)["message"]
    person.wait_for(reason[:16])  # the terminal is 80 columns wide
    assert person.shown.count("\n") == 0, "one line that changes"
    person.type("\x03")
    assert person.end() == 130
    assert site.wait_state(job, "CANCELLED").attempt == 0
    # In a pipe nothing is said, and a kill is as good as Ctrl-C.
    waiting = site.popen("run", *_on("podman"), "--", "true")
    wait_until(lambda: _live(site, blocker), what="the second job")
    (second,) = (j.id for j in _live(site, blocker))
    waiting.send_signal(signal.SIGTERM)
    code, out, err = site.finish(waiting)
    assert (code, out, err) == (143, "", f"gpusched: job {second} cancelled\n")
    assert site.wait_state(second, "CANCELLED").attempt == 0


def test_the_client_shows_why_its_session_was_ended(site: Cluster) -> None:
    person = Person(site, "run", *_on("podman"), "--pty", "sh")
    person.says("ready-2", types="echo ready-$((1 + 1))\n")
    job = person.job()
    site.cli("cancel", job)
    person.says(f"job {job} ended CANCELLED (Cancelled: cancelled by root)")
    assert person.end() == 143
    wrong = site.cli("run", *_on("podman"), "--", "no-such-program", check=False)
    assert wrong.returncode == 127
    # One that the engine cannot start when somebody attaches is a launch that failed.
    person = Person(site, "run", *_on("podman"), "--workdir", "/bin/sh", "--pty", "sh")
    wait_until(lambda: any(job.retries for job in _live(site)), 60, "another try to be due")
    site.cli("cancel", _live(site)[0].id)
    person.says("ended CANCELLED")
    assert person.end() == 143
    assert "goes on" not in person.shown


def test_a_session_ends_when_nobody_was_attached_for_so_long(site: Cluster) -> None:
    _declare(site, session_keep="15s")
    wait_until(lambda: "reloaded" in site.controller_log, what="the new setting")
    people = {runtime: Person(site, "run", *_on(runtime), "--pty", "sh") for runtime in ("podman", "process")}
    for person in people.values():
        person.says("ready-2", types="echo ready-$((1 + 1))\n")
    jobs = {j.allocation.parts[0].node: j.id for j in _live(site) if j.allocation is not None}
    stays, goes = jobs[NODES["podman"]], jobs[NODES["process"]]
    site.kill_controller()
    people["process"].close()
    _declare(site)
    site.start_controller()
    ended = site.wait_state(goes, "TIMEOUT")
    assert (ended.reason, ended.message) == (
        "InactiveLimit", "nobody attached for 15 s (settings.session_keep)",
    )  # fmt: skip
    assert site.state_of(stays) == "RUNNING"
    people["podman"].says("there-2", types="echo there-$((1 + 1))\n")
    people["podman"].says("exit", types="exit\n")
    assert people["podman"].end() == 0


def test_a_lost_connection_leaves_the_job(site: Cluster) -> None:
    person = Person(site, "run", *_on("podman"), "--pty", "sh")
    person.says("ready-2", types="x=kept; echo ready-$((1 + 1))\n")
    job, node = person.job(), site.node("dgx001")
    node.stop_sshd(sessions=True)
    person.says(f"job {job} keeps running for 10 min: gpusched attach {job}")
    assert person.end() == 255
    node.start_sshd()
    again = Person(site, "attach", job)
    again.says("it-is-kept", types="\n\x15echo it-is-$x\n")
    again.says("exit", types="exit\n")
    assert again.end() == 0


WEB = "cd $GPUSCHED_JOB_DIR && echo page >index.html && busybox httpd -f -p {port} -h ."


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _fetched(port: int) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), 30) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return b"".join(iter(lambda: sock.recv(65536), b""))
    except OSError:
        return b""


def test_users_without_an_account_on_the_nodes_have_all_of_it(site: Cluster) -> None:
    as_nobody, port = nobody(), _free_port()
    words = ("run", *_on("podman"), "--forward", f"{port}:8088", "--pty", "sh")
    person = Person(site, *words, prefix=as_nobody)
    person.says(f"forwarding 127.0.0.1:{port} to port 8088 of the job")
    person.says("uid-65534", types="x=kept; echo uid-$(id -u)\n")
    assert _fetched(port) == b"", "nobody listens yet"
    person.type(WEB.format(port=8088) + " &\n")
    wait_until(lambda: b"page\n" in _fetched(port), 60, "the page")
    job = person.job()
    others = site.cli("attach", job, prefix=nobody("--reuid", "3"), check=False)
    assert others.returncode in (1, 2)
    assert site.controller is not None
    (relay,) = (
        p for p in processes.tree(site.controller.pid) if "gpusched.controller.relay" in processes.command_line(p)
    )
    os.kill(relay, signal.SIGKILL)
    person.says(f"job {job} keeps running for 10 min")
    assert person.end() == 255
    again = Person(site, "attach", job, prefix=as_nobody)
    again.says("it-is-kept", types="\n\x15echo it-is-$x\n")
    again.says("exit", types="kill %1; exit 3\n")
    assert again.end() == 3


@pytest.mark.parametrize("runtime", NODES)
def test_a_client_that_stops_reading_ends_the_job(site: Cluster, runtime: str) -> None:
    """``run ... | head -1``: as soon as the reader has gone, whether or not the job goes on talking."""
    process = site.popen("run", *_on(runtime), "--", "sh", "-c", "echo first; exec sleep 7004")
    assert process.stdout is not None
    assert process.stdout.readline() == "first\n"
    (job,) = _live(site)
    process.stdout.close()
    assert process.wait(300) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""
    site.wait_state(job.id, "CANCELLED", timeout=60)
    assert not _runs(site, "sleep", "7004")


def test_a_port_of_the_job_is_brought_here(site: Cluster) -> None:
    port = _free_port()
    busy = socket.socket()
    busy.bind(("127.0.0.1", 0))
    busy.listen()
    taken = busy.getsockname()[1]
    done = site.cli("run", *_on("podman"), "--forward", str(taken), "--", "true", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(
        rf"--forward: port {taken} cannot be opened on this machine: .*; --forward \d+:{taken}\n", done.stderr
    )
    assert _live(site) == [], "nothing was queued"
    busy.close()
    web = WEB.format(port=8077)
    serving = site.popen("run", *_on("podman"), "--forward", f"{port}:8077", "--", "sh", "-c", web)
    wait_until(lambda: b"page\n" in _fetched(port), 60, "the page")
    assert b"page\n" in _fetched(port)
    serving.send_signal(signal.SIGINT)
    code, _, err = site.finish(serving)
    assert "is being cancelled" in err
    assert (code, _fetched(port)) == (143, b"")
