"""Differences between sites: runtimes, slow registries, several users, an inventory that changes, policies."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.model.commands import Cancel, Submit
from gpusched.queue.arrivals import FILES_OF_USER
from gpusched.queue.inbox import Inbox
from tests.builders import spec
from tests.e2e.conftest import IMAGE, SETTINGS, WAIT, Cluster
from tests.e2e.people import NOBODY, Screen, nobody
from tests.testbed import Testbed, processes, wait_until

pytestmark = pytest.mark.slow


def test_docker_and_plain_processes_do_what_podman_does(stopped: Cluster, share: Path) -> None:
    cluster = stopped
    cluster.node("dgx002").start_docker()
    cluster.write_inventory(nodes={"dgx002": {"runtime": "docker"}, "dgx004": {"runtime": "process"}})
    cluster.start_controller()
    assert {n["runtime_error"] for n in cluster.nodes().values()} == {None}
    base = ("-p", "V100", "--gpus", "2", "-t", "5m", "--secret", "TOKEN", "--env", 'ODD=it\'s "$(x)"\n')
    script = f"""printf '%s' "$TOKEN" >{share}/$GPUSCHED_NODE; printf '%s|%s' "$CUDA_VISIBLE_DEVICES" "$ODD"
echo "|$NVIDIA_VISIBLE_DEVICES|$GPUSCHED_GPUS"; until [ -e {share}/go ]; do sleep 0.1; done; exit 4"""
    mount = ("--mount", f"{share}:{share}")
    docker = cluster.sh(script, *base, *mount, "--nodelist", "dgx002", env={"TOKEN": "s3cret 'x'"})
    output = share / "out"
    plain = cluster.sh(script, *base, "-o", str(output), "--nodelist", "dgx004", env={"TOKEN": "s3cret 'x'"})
    second = cluster.sh("echo $CUDA_VISIBLE_DEVICES", "-p", "V100", "--gpus", "1", "--nodelist", "dgx004")
    for job in (docker, plain):
        cluster.wait_state(job, "RUNNING")
    for node in ("dgx002", "dgx004"):
        wait_until(
            lambda node=node: (share / node).exists() and (share / node).read_text() == "s3cret 'x'", what="a secret"
        )
    seen = [processes.command_line(pid) for node in cluster.testbed.nodes for pid in node.pids()]
    assert not any("s3cret" in word for words in seen for word in words)
    assert cluster.cli("exec", docker, "--", "sh", "-c", "echo $GPUSCHED_JOB_ID").stdout == f"{docker}\n"
    assert cluster.cli("exec", plain, "--", "sh", "-c", "echo $GPUSCHED_JOB_ID").stdout == f"{plain}\n"
    gpus = [",".join(str(g) for g in cluster.json("show", j)["allocation"][0]["gpus"]) for j in (docker, plain, second)]
    assert cluster.logs(docker) == f'0,1|it\'s "$(x)"\n|{gpus[0]}|{gpus[0]}\n'
    # NVML's own indices here: no container renumbers them.
    assert output.read_text() == cluster.logs(plain) == f'{gpus[1]}|it\'s "$(x)"\n||{gpus[1]}\n'
    cluster.wait_state(second, "COMPLETED")
    assert cluster.logs(second) == f"{gpus[2]}\n"
    assert set(gpus[1].split(",")).isdisjoint(gpus[2].split(","))
    (share / "go").touch()
    for job in (docker, plain):
        assert cluster.wait_state(job, "FAILED").exit_code == 4
    # Children that left the process group end with their job too.
    stray = cluster.sh("setsid sleep 7777 & sleep 8888", "-p", "V100", "--gpus", "1", "--nodelist", "dgx004")
    slow = cluster.sh("sleep 8888", "-p", "V100", "--gpus", "1", "--nodelist", "dgx002")
    for job in (stray, slow):
        cluster.wait_state(job, "RUNNING")
    cluster.cli("cancel", stray, slow, "--wait")
    cluster.wait_clean()
    left = [
        words
        for node in cluster.testbed.nodes
        for pid in node.pids()
        if "sleep" in (words := processes.command_line(pid))[:1]
    ]
    assert not [words for words in left if words[1:] in (["7777"], ["8888"])]
    assert cluster.node("dgx002").run(["docker", "ps", "-aq"]).stdout == ""
    kept = (cluster.node("dgx004").disk / "home").glob
    ours = {path.name for path in kept(".local/state/gpusched-node/*/*/*")}
    assert ours <= {"jobs", "ended", "term", "term.lock", "xid-listener"}, "of the installation, not of jobs"
    wait_until(lambda: not list(kept(".local/state/gpusched-node/*/*/jobs/*")), 30, "the jobs' own folders to be gone")


def test_a_slow_image_delays_no_other_job(house: Cluster, share: Path) -> None:
    gate = share / "gate"
    wrapper = f"""#!/bin/sh
case "$*" in *localhost/slow:1*) ;; *) exec /usr/bin/podman "$@" ;; esac
until [ -e {gate} ]; do sleep 0.05; done
for word; do shift; [ "$word" != localhost/slow:1 ] || word=localhost/gs/busybox:1; set -- "$@" "$word"; done
exec /usr/bin/podman "$@"
"""
    house.node("dgx001").install_script("podman", wrapper)
    slow = house.sh("echo at last", "--gpus", "1", "--nodelist", "dgx001", "--image", "localhost/slow:1")
    house.wait_state(slow, "STARTING")
    others = [house.submit("--gpus", "1", "--nodelist", n) for n in ("dgx001", "dgx001", "dgx003")]
    for job in others:
        house.wait_state(job, "COMPLETED")
    (listed,) = house.json("status", slow)
    assert (listed["state"], listed["start_time"], listed["nodes"]) == ("STARTING", None, ["dgx001"])
    gate.touch()
    assert house.wait_state(slow, "COMPLETED").attempt == 1
    house.wait_clean()
    assert house.logs(slow) == "at last\n"


@pytest.fixture
def shared(testbed: Testbed) -> Iterator[Cluster]:
    """A cluster in a folder that others can reach, as a shared installation is."""
    folder = Path(tempfile.mkdtemp(prefix="gpusched-e2e-", dir="/tmp"))
    folder.chmod(0o755)
    cluster = Cluster(testbed, folder, ("A100",))
    (folder / "share").mkdir()
    (folder / "share").chmod(0o777)
    cluster.write_inventory({"shared": True, "root_jobs": True, "allowed_mounts": [str(folder / "share")]})
    cluster.start_controller()
    yield cluster
    cluster.close()
    shutil.rmtree(folder)


FLOOD = """
import os, socket, sys
os.chdir(sys.argv[1])
content = sys.stdin.buffer.read()
for number in range(int(sys.argv[2])):
    name = f"0123{number:07d}"
    with open(f"{name}.submit", "xb") as file:
        file.write(content.replace(b"0" * 11, name.encode()))
os.mkfifo("1pipe.submit")
os.symlink("/etc/shadow", "1link.submit")
socket.socket(socket.AF_UNIX).bind("1socket.submit")
with open("1sparse.submit", "xb") as file:
    file.truncate(1 << 30)
os.mkdir("1folder.submit")
os.chdir("1folder.submit")
for _ in range(1200):
    os.mkdir("deep")
    os.chdir("deep")
"""


def test_a_users_thousands_of_files_delay_no_other_user(shared: Cluster) -> None:
    cluster, inbox, many = shared, Inbox(shared.state), 3 * FILES_OF_USER
    kept = inbox.refused / "0first.cancel"
    (inbox.new / kept.name).write_text("{")
    wait_until(kept.exists, 30, "a file that is no command to be set aside")
    one = Submit(time=time.time(), id="0" * 11, spec=spec(partition="A100", image=IMAGE, hold=True, gpus_per_node=9))
    assert cluster.controller is not None
    cluster.controller.send_signal(signal.SIGSTOP)
    subprocess.run(
        [*nobody(), sys.executable, "-c", FLOOD, inbox.new, str(many)], input=msgspec.json.encode(one), check=True
    )
    job = cluster.submit("--gpus", "1")
    cluster.controller.send_signal(signal.SIGCONT)
    wait_until(lambda: cluster.state_of(job), 120, "the other user's job to be taken")
    with cluster.reader() as reader:
        assert reader is not None
        events = reader.events(limit=10**6)
    taken = next(place for place, event in enumerate(events) if event.job_id == job)
    refused = sum(event.kind == "refused_command" for event in events[:taken])
    assert refused < 2 * FILES_OF_USER, "not behind all of them"
    assert cluster.wait_state(job, timeout=120).state == "COMPLETED"
    wait_until(lambda: not os.listdir(inbox.new), 300, "the inbox to be empty")
    cluster.cli("tick", check=False)
    with cluster.reader() as reader:
        assert reader is not None
        events = [event for event in reader.events(limit=10**6) if event.kind == "refused_command"]
    files = {str(event.data["file"]) for event in events if event.user == "nobody"}
    odd = {f"1{name}.submit" for name in ("pipe", "link", "socket", "sparse", "folder")}
    assert len(files) == many + len(odd)
    assert odd < files
    assert "1sparse.submit" not in os.listdir(inbox.refused)
    assert kept.exists(), "a large file pushes no other out"
    assert Path("/etc/shadow").exists()


def test_users_own_their_jobs_by_the_owner_of_the_command_file(shared: Cluster) -> None:
    cluster, share = shared, shared.folder / "share"
    as_nobody = nobody()
    wait = WAIT.replace("/share", str(share))
    roots = cluster.sh(wait, "--gpus", "1", "--mount", f"{share}:{share}")
    script = f'id -u; id -g; echo $GPUSCHED_USER; printf %s "$TOKEN" >{share}/token; {wait}'
    theirs = cluster.sh(
        script, "--gpus", "1", "--mount", f"{share}:{share}", "--secret", "TOKEN", env={"TOKEN": "ours"},
        prefix=as_nobody,
    )  # fmt: skip
    for job in (roots, theirs):
        cluster.wait_state(job, "RUNNING")
    facts = {j["id"]: j["user"] for j in cluster.json("status")}
    assert facts == {roots: "root", theirs: "nobody"}
    assert [j["id"] for j in cluster.json("status", "--user", "nobody")] == [theirs]
    wait_until((share / "token").exists, what="the job's file")
    assert (share / "token").stat().st_uid == NOBODY
    # Others may look...
    seen = cluster.cli("status", "--json", prefix=as_nobody)
    assert {j["id"] for j in msgspec.json.decode(seen.stdout)} == {roots, theirs}
    # ... but not touch: refused at once, and by the controller where the client is bypassed.
    done = cluster.cli("cancel", roots, prefix=as_nobody, check=False)
    assert done.returncode == 1
    assert "belongs to root" in done.stderr
    inbox = Inbox(cluster.state)
    forged = inbox.tmp / "forged"
    forged.write_bytes(msgspec.json.encode(Cancel(time=time.time(), job_ids=(roots,))))
    os.chown(forged, NOBODY, NOBODY)
    forged.rename(inbox.new / "zzz.cancel")
    (inbox.new / "zzzz.cancel").write_text('{"not": "a command"')
    wait_until(lambda: sum(e.kind == "refused_command" for e in _events(cluster)) == 2, what="two refusals")
    first, second = [e for e in _events(cluster) if e.kind == "refused_command"]
    assert (first.user, f"job {roots} belongs to root" in first.data["why"]) == ("nobody", True)
    assert "not a command" in second.data["why"]
    assert [p.name for p in inbox.refused.iterdir()] == ["zzzz.cancel"]
    assert cluster.state_of(roots) == "RUNNING"
    for words in (["drain", "dgx001", "--reason", "mine"], ["priority", roots, "9"]):
        assert cluster.cli(*words, prefix=as_nobody, check=False).returncode == 1
    for options, said in ((("--mount", "/etc:/data"), "allowed_mounts"), (("--priority", "5"), "needs an admin")):
        words = ["submit", "-p", "A100", "--gpus", "1", *options, "--wait", "--", "true"]
        refused = cluster.cli(*words, prefix=as_nobody, check=False)
        assert refused.returncode == 1
        assert said in refused.stderr
        assert refused.stderr.strip().count("\n") == 0
    done = cluster.cli("cancel", theirs, check=False)  # root may
    assert done.returncode == 0
    cluster.wait_state(theirs, "CANCELLED")
    (share / "go").touch()
    cluster.wait_state(roots, "COMPLETED")
    cluster.wait_clean()
    log = cluster.state / "logs" / theirs / "1.0.log"
    # The controller's own, in a folder that is its own; an access list lets the job's user read it.
    assert [(p.stat().st_uid, p.stat().st_mode & 0o007) for p in (log, log.parent)] == [(0, 0), (0, 1)]
    plain = ("setpriv", "--regid", str(NOBODY), "--clear-groups", "--reuid")
    read = {uid: subprocess.run([*plain, uid, "cat", log], check=False, capture_output=True) for uid in ("65534", "99")}
    assert (read["65534"].stdout, read["99"].returncode) == (f"{NOBODY}\n{NOBODY}\nnobody\n".encode(), 1)
    assert cluster.cli("logs", theirs, prefix=as_nobody).stdout == f"{NOBODY}\n{NOBODY}\nnobody\n"
    assert "token" not in cluster.controller_log
    assert list((cluster.state / "secrets").iterdir()) == []


def test_users_reach_their_running_jobs_through_the_controller(shared: Cluster) -> None:
    cluster, share = shared, shared.folder / "share"
    as_nobody = nobody()
    mount = ("--mount", f"{share}:/share")
    no_ssh = {"GPUSCHED_STATE": str(cluster.state), "HOME": "/nonexistent", "PATH": os.environ["PATH"]}
    theirs = cluster.sh(f"echo begun; {WAIT}; echo done; exit 3", "--gpus", "1", *mount, prefix=as_nobody)
    roots = cluster.sh(WAIT, "--gpus", "1", *mount)
    for job in (theirs, roots):
        cluster.wait_state(job, "RUNNING")

    def as_user(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return cluster.cli(*args, prefix=as_nobody, check=False, env=no_ssh, **more)

    wait_until(lambda: as_user("logs", theirs).stdout == "begun\n", 60, "the job's first line")
    assert as_user("logs", theirs, "--tail", "1").stdout == "begun\n"
    for words in (("logs", roots), ("logs", "-f", roots), ("exec", roots, "--", "id")):
        done = as_user(*words)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"job {roots} belongs to root" in done.stderr
        assert done.stderr.count("\n") == 1
    done = as_user("exec", theirs, "--", "sh", "-c", 'id -u; echo "$1" >&2; exit 7', "sh", "it's $(x) é")
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{NOBODY}\n", "it's $(x) é\n")
    # More than any buffer holds, both ways, and an end of the input.
    big = "0123456789abcdef" * 200_000
    assert as_user("exec", "-i", theirs, "--", "cat", input=big).stdout == big
    assert as_user("exec", theirs, "--", "no-such-program").returncode in (126, 127)

    screen = Screen(
        cluster, [*as_nobody, sys.executable, "-m", "gpusched", "exec", "-it", theirs, "--", "sh"], rows=31, columns=97
    )
    try:
        screen.type("until stty size | grep 97; do sleep 0.1; done; echo ready-$((1 + 1))\n")
        screen.wait_for("31 97")
        screen.wait_for("ready-2")
        screen.resize(40, 111)
        screen.type("until stty size | grep -q 111; do sleep 0.1; done; stty size\n")
        screen.wait_for("40 111")
        screen.type("sleep 9999\n")
        wait_until(lambda: _running(cluster, ["sleep", "9999"]), what="the sleeper")
        screen.type("\x03")
        screen.type("echo woken-$((2 + 2)); exit 5\n")
        screen.wait_for("woken-4")
        assert screen.process.wait(300) == 5
    finally:
        screen.close()

    _shout_at(cluster.state / "relay.sock")
    following = subprocess.Popen(
        [*as_nobody, sys.executable, "-u", "-m", "gpusched", "logs", "-f", theirs], env=cluster.env(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert following.stdout is not None
    assert following.stdout.readline() == "begun\n"
    (share / "go").touch()
    assert following.communicate(timeout=300)[0] == "done\n"
    assert following.returncode == 3
    cluster.wait_state(theirs, "FAILED")
    assert cluster.controller is not None
    assert cluster.controller.poll() is None
    last = cluster.sh("sleep 9998", "--gpus", "1", prefix=as_nobody)
    cluster.wait_state(last, "RUNNING")
    cluster.stop_controller()
    for words in (("logs", last), ("logs", "-f", last), ("exec", last, "--", "id")):
        done = as_user(*words)
        assert done.returncode == 1
        assert "which is not listening" in done.stderr.splitlines()[-1]
    cluster.start_controller()
    cluster.cli("cancel", last, "--now")
    cluster.wait_clean()


def _running(cluster: Cluster, words: list[str]) -> bool:
    return any(processes.command_line(pid) == words for node in cluster.testbed.nodes for pid in node.pids())


def _shout_at(path: Path) -> None:
    """Send what no client would; it must bring nothing down, and every connection must end."""
    header = struct.Struct("!BI")
    shouts = [
        b"", b"\0" * 100, b"GET / HTTP/1.0\r\n\r\n", header.pack(ord("q"), 1 << 31), header.pack(ord("q"), 2) + b"[]",
        header.pack(ord("q"), 70_000) + b"[" * 70_000, header.pack(ord("i"), 1) + b"x",
    ]  # fmt: skip
    for request in (
        {"type": "exec", "job": "x", "rank": -1, "argv": ["id"]}, {"type": "exec", "job": "x", "rank": 0, "argv": []},
        {"type": "log", "job": "../../x", "attempt": 1, "rank": 10**30}, {"type": "kept", "job": None},
        {"type": "kept", "job": "../../x", "attempt": 1, "rank": 1},
    ):  # fmt: skip
        text = msgspec.json.encode(request)
        shouts.append(header.pack(ord("q"), len(text)) + text)
    for shout in shouts:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(300)
            sock.connect(str(path))
            sock.sendall(shout)
            sock.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda: sock.recv(65536), b""))[:1] == b"f", shout[:50]


def test_no_job_of_others_reaches_beyond_the_allowed_folder(shared: Cluster) -> None:
    cluster, share = shared, shared.folder / "share"
    as_nobody = nobody()
    hidden = cluster.folder / "hidden"
    hidden.mkdir()
    (hidden / "key").write_text("hush")
    os.symlink(hidden, share / "x")
    (share / "inner").mkdir()
    (share / "inner" / "key").write_text("mine")
    os.symlink("inner", share / "y")
    for image in ("docker-archive:/root/x.tar", "oci:/root", "dir:/root", "/root/x.tar"):
        words = ["submit", "-p", "A100", "--gpus", "1", "--image", image, "--", "true"]
        refused = cluster.cli(*words, prefix=as_nobody, check=False)
        assert refused.returncode == 2
        assert "image" in refused.stderr
        assert refused.stderr.strip().count("\n") == 0
    options = ("--gpus", "1", "--nodelist", "dgx001")
    out = [
        cluster.sh("cat /h/key", *options, "--mount", f"{share}/x{place}:/h{place}", prefix=as_nobody)
        for place in ("", "/key", "")
    ]
    own = cluster.sh("cat /h/key; grep NoNewPrivs /proc/self/status", *options, "--mount", f"{share}/y:/h",
                     prefix=as_nobody)  # fmt: skip
    by_root = cluster.sh("cat /h/key", *options, "--mount", f"{share}/x:/h")
    for job in out:
        failed = cluster.wait_state(job, "FAILED")
        assert f"cannot mount {share}/x" in failed.message
        assert "settings.allowed_mounts" in failed.message
        assert (failed.attempt, failed.message.count("\n")) == (1, 0)
    assert cluster.wait_state(own, "COMPLETED").attempt == 1
    cluster.wait_state(by_root, "COMPLETED")
    cluster.wait_clean()
    assert cluster.logs(own) == "mineNoNewPrivs:\t1\n"
    assert cluster.logs(by_root) == "hush"
    assert cluster.nodes()["dgx001"]["state"] == "IDLE"
    assert cluster.node("dgx001").run(["sh", "-c", "grep gpusched-node /proc/mounts; :"]).stdout == ""


def _events(cluster: Cluster) -> list:  # type: ignore[type-arg]
    with cluster.reader() as reader:
        assert reader is not None
        return reader.events()


@pytest.mark.processes
def test_inventory_and_policies_change_under_running_jobs(stopped: Cluster, share: Path) -> None:
    cluster = stopped
    cluster.settings = SETTINGS | {"tick": "1s"}  # a new inventory is looked for in each
    cluster.write_inventory(leave_out=["dgx003"], policies={"A100": "spread"})
    cluster.start_controller()
    assert set(cluster.nodes()) == {"dgx001", "dgx002", "dgx004"}
    old = cluster.shared(WAIT, share, "--gpus", "8")
    cluster.wait_state(old, "RUNNING")
    waits = cluster.shared(WAIT, share, "--gpus", "1")
    wait_until(lambda: (j := cluster.job(waits)) and j.reason == "Resources", what="a reason")
    cluster.write_inventory(policies={"A100": "spread"})  # dgx003 joins
    assert cluster.wait_state(waits, "RUNNING").allocation.parts[0].node == "dgx003"  # type: ignore[union-attr]
    assert cluster.state_of(old) == "RUNNING"

    good = cluster.inventory.read_text()
    cluster.inventory.write_text(good.replace('"cores": 8', '"cores": "many"', 1))
    wait_until(lambda: "kept the old inventory" in cluster.controller_log, what="the refusal")
    assert "inventory.yaml:" in cluster.controller_log
    assert "many" in cluster.controller_log
    said = cluster.cli("submit", "-p", "A100", "--gpus", "1", "--dry-run", "--", "true").stderr
    assert "inventory.yaml:" in said
    assert "using the last good copy" in said
    cluster.inventory.write_text(good)
    (share / "go").touch()
    for job in (old, waits):
        cluster.wait_state(job, "COMPLETED")

    # Partition A100 spreads, V100 packs; then the other way round.
    def places(*partitions: str) -> dict[str, int]:
        gate = share / f"gate{time.monotonic_ns()}"
        script = f"until [ -e /share/{gate.name} ]; do sleep 0.1; done"
        jobs = {p: [cluster.shared(script, share, "-p", p, "--gpus", "1") for _ in "12"] for p in partitions}
        nodes = {p: {cluster.wait_state(j, "RUNNING").allocation.parts[0].node for j in js} for p, js in jobs.items()}  # type: ignore[union-attr]
        gate.touch()
        for js in jobs.values():
            for job in js:
                cluster.wait_state(job, "COMPLETED")
        return {p: len(names) for p, names in nodes.items()}

    assert places("A100", "V100") == {"A100": 2, "V100": 1}
    (cluster.folder / "policies").mkdir()
    (cluster.folder / "policies" / "ours.yaml").write_text("order: sjf\nplace: spread\nbackfill: skip\n")
    cluster.write_inventory(policies={"A100": "fifo", "V100": "ours"})
    wait_until(lambda: cluster.controller_log.count("reloaded") == 3, what="the new policies")
    assert places("A100", "V100") == {"A100": 1, "V100": 2}
    (last,) = [j for j in cluster.json("status", "-n", "1")]
    assert last["policy"] in ("fifo", "ours")
