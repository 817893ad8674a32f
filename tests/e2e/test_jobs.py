"""One job at a time, as its user sees it: what it gets, what comes back, and that nothing leaks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import WAIT, Cluster
from tests.testbed import wait_until

HOSTILE = (
    "plain", "", " ", "it's", '"double"', "$(touch /share/pwned)", "`touch /share/pwned`", "; touch /share/pwned;",
    "a\nb\n",
    "tab\there", "cr\r\nlf", "back\\slash \\n", "*?[a-z]", "~root", "${HOME}", "--flag=x", "-", "ünï çödé 日本 🚀",
    "a=b,c=d", "%s%n %j",
    "#no comment", "!history", "{{.ID}}", "&& exit 9",
)  # fmt: skip

JOB_KEYS = {
    "id", "name", "user", "partition", "flavor", "state", "reason", "nodes", "gpus", "submit_time", "start_time",
    "end_time",
    "exit_code", "energy_j",
}  # fmt: skip
NODE_KEYS = {"name", "partition", "state", "reason", "gpus_total", "gpus_free", "power_w", "gpus"}
GPU_KEYS = {
    "index", "uuid", "name", "state", "memory_total_mib", "memory_used_mib", "utilization_pct", "power_w",
    "power_limit_w",
    "temperature_c", "processes",
}  # fmt: skip
UTC = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


def variables(path: Path) -> dict[str, str]:
    """/proc/PID/environ as a dict."""
    return dict(item.split("=", 1) for item in path.read_bytes().decode().split("\0")[:-1])


def test_a_job_of_a_flavor_from_submission_to_its_end(house: Cluster, share: Path, tmp_path: Path) -> None:
    read_only = tmp_path / "data"
    read_only.mkdir()
    (read_only / "set").write_text("numbers")
    script = f"""cat /proc/$$/environ >/share/environ.part && mv /share/environ.part /share/environ
cat /data/set; (echo no >/data/new) 2>/dev/null || echo ' is read-only'; pwd; ls /dev/nvidia* | wc -l; {WAIT}; exit 7"""
    job = house.sh(
        script, "-F", "s-A100", "-J", "train it", "--mount", f"{share}:/share", "--mount", f"{read_only}:/data:ro",
        "--workdir", "/var", "--env", "EPOCHS=3", "--comment", "for people",
    )  # fmt: skip
    running = house.wait_state(job, "RUNNING")
    env = variables(wait_until(lambda: (p := share / "environ").exists() and p, what="the job's environment"))

    assert running.allocation is not None
    (part,) = running.allocation.parts
    assert len(part.gpus) == 2
    assert {name for name in env if name.startswith("GPU_")} == {f"GPU_{i}" for i in part.gpus}
    expected = {
        "CUDA_VISIBLE_DEVICES": "0,1", "EPOCHS": "3", "GPUSCHED_JOB_ID": job, "SLURM_JOB_ID": job,
        "SLURM_CPUS_ON_NODE": "2",
        "GPUSCHED_GPUS": ",".join(map(str, part.gpus)), "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0",
        "NODE_RANK": "0",
        "GPUSCHED_NODE": part.node, "GPUSCHED_USER": "root", "SLURM_JOB_NAME": "train it", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    assert {k: env.get(k) for k in expected} == expected
    name = f"gpusched-{job}-1-0"
    form = "{{.HostConfig.NanoCpus}} {{.HostConfig.Memory}} {{.HostConfig.Init}} {{.Config.Image}}"
    limits = house.node(part.node).run(["/usr/bin/podman", "inspect", "--format", form, name]).stdout.split()
    assert limits == ["2000000000", str(512 << 20), "true", "localhost/gs/busybox:1"]

    (listed,) = house.json("status", job)
    shown, why, nodes = house.json("show", job), house.json("why", job), house.nodes()
    assert listed.keys() >= JOB_KEYS
    assert shown.keys() >= JOB_KEYS
    assert why["job"].keys() >= JOB_KEYS
    facts = {k: listed[k] for k in ("id", "name", "user", "partition", "flavor", "state", "reason", "nodes", "gpus")}
    assert facts == {
        "id": job, "name": "train it", "user": "root", "partition": "A100", "flavor": "s-A100", "state": "RUNNING",
        "reason": None,
        "nodes": [part.node], "gpus": 2,
    }  # fmt: skip
    assert (listed["end_time"], listed["exit_code"]) == (None, None)
    assert UTC.fullmatch(listed["submit_time"])
    assert listed["submit_time"] <= listed["start_time"]
    assert list(nodes) == ["dgx001", "dgx003", "dgx002", "dgx004"]
    node = nodes[part.node]
    assert node.keys() >= NODE_KEYS
    assert (node["state"], node["gpus_total"], node["gpus_free"]) == ("MIXED", 8, 6)
    assert node["power_w"] == 8 * 55
    assert all(gpu.keys() >= GPU_KEYS for gpu in node["gpus"])
    assert [g["state"] for g in node["gpus"]] == ["ALLOCATED" if i in part.gpus else "FREE" for i in range(8)]
    first = node["gpus"][0]
    assert (first["name"], first["memory_total_mib"], first["power_limit_w"]) == ("NVIDIA A100-SXM4-80GB", 81920, 400)

    done = house.cli(
        "exec", job, "--", "sh", "-c", 'echo "$GPUSCHED_JOB_ID $1"; exit 5', "sh", "a  'b' $HOME", check=False
    )
    assert (done.returncode, done.stdout) == (5, f"{job} a  'b' $HOME\n")
    live = "numbers is read-only\n/var\n2\n"
    wait_until(lambda: house.logs(job) == live, what="the output so far")
    follower = house.popen("logs", "-f", job)
    waiter = house.popen("wait", "--json", job)
    (share / "go").touch()
    assert house.finish(follower)[:2] == (7, live)
    code, out, _ = house.finish(waiter)
    assert (code, json.loads(out)[0]["wait_exit_code"]) == (7, 7)
    house.wait_clean()
    assert house.logs(job) == live  # collected: nothing of it is on the node any more
    assert (house.state / "logs" / job / "1.0.log").read_text() == live
    (ended,) = house.json("status", job)
    assert (ended["state"], ended["reason"], ended["exit_code"]) == ("FAILED", "NonZeroExitCode", 7)
    assert UTC.fullmatch(ended["end_time"])
    assert ended["energy_j"] is not None
    kinds = [event["kind"] for event in house.json("show", job)["events"]]
    assert kinds == ["submitted", "starting", "launched", "running", "ending", "ended"]
    assert house.json("why", job)["exit_code"] == 7
    power = house.json("power", "--since", "1h", "--by", "job")
    assert job in [row["name"] for row in power["rows"]]
    assert all(n["gpus_free"] == 8 for n in house.nodes().values())


def test_whatever_a_user_types_reaches_the_job_exactly(house: Cluster, share: Path) -> None:
    big = ("x'\"$(id)\\\n" * 12000)[:100_000]
    env = {f"V{i}": value for i, value in enumerate(HOSTILE)} | {"BIG": big}
    options = [word for k, v in env.items() for word in ("--env", f"{k}={v}")]
    name = 'it\'s "$(touch /share/pwned)" ünï 🚀 --x'
    script = "cat /proc/$$/environ >/share/environ; cat /proc/$$/cmdline >/share/cmdline; true"
    folder = share / "a b'c$(x)"
    folder.mkdir()
    output = share / "out 'é' $(touch pwned) %j %x"
    job = house.submit(
        "--gpus", "0", "--cpus", "1", "--mem", "64M", "-J", name, "--mount", f"{share}:/share", "--mount",
        f"{folder}:/odd $(y)",
        "-o", str(output).replace("%x", "%%x"), *options, command=("sh", "-c", script, *HOSTILE, big),
    )  # fmt: skip
    assert house.cli("wait", job).returncode == 0
    house.wait_clean()
    found = variables(share / "environ")
    assert {k: found.get(k) for k in env} == env
    assert found["GPUSCHED_JOB_NAME"] == name
    assert found["CUDA_VISIBLE_DEVICES"] == ""
    words = (share / "cmdline").read_bytes().decode().split("\0")[:-1]
    assert words == ["sh", "-c", script, *HOSTILE, big]
    assert house.json("show", job)["name"] == name
    assert {p.name for p in share.iterdir()} == {"environ", "cmdline", folder.name, output.name.replace("%j", job)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-F", "s-A10"], "s-A100"),
        (
            ["--gpus", "17", "-p", "A100"],
            "17 GPUs, 17 cores, 8704M of memory cannot be split evenly across any number of nodes",
        ),
        (["-F", "s-A100", "--env", "A-B=1"], "A-B"),
        (["-F", "s-A100", "--env", f"A={'x' * 130_000}"], "130000 bytes"),
        (["-F", "s-A100", "--mount", "/a:/b:rx:ro"], "--mount"),
        (["-F", "s-A100", "--secret", "TOKEN=abc"], "is visible to everyone"),
        (["-F", "s-A100", "--dependency", "afterok:zzz"], "zzz"),
        (["-F", "s-A100", "-J", "two\nlines"], "one line"),
        (["-F", "s-A100", "--array", "9-1"], "--array"),
        (["-F", "s-A100", "-t", "soon"], "soon"),
        (["-F", "s-A100", "-t", "2h"], "exceeds the maximum of flavor"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_and_nothing_is_queued(
    house: Cluster, words: list[str], said: str
) -> None:
    before = len(house.json("status", "--all"))
    done = house.cli("submit", *words, "--", "true", check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert len(house.json("status", "--all")) == before


SAMPLER = """
import os, sys
mark, stop, seen, count = sys.argv[1][::-1].encode(), sys.argv[2], set(), 0
while count < 4 or not os.path.exists(stop):
    count += 1
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for what in ("cmdline", "environ"):
            try:
                with open(f"/proc/{pid}/{what}", "rb") as file:
                    found = mark in file.read()
                if found:
                    arguments = open(f"/proc/{pid}/cmdline").read().split("\\0")
                    name = "submit" if "submit" in arguments else open(f"/proc/{pid}/comm").read().strip()
                    seen.add((what, os.readlink(f"/proc/{pid}/ns/pid"), name.replace(" ", "_")))
            except OSError:
                pass
print(count)
for line in seen:
    print(*line)
"""
TOOLS = frozenset("chmod chown cut date env grep head ln mkdir mv readlink rm sed setpriv setsid stat tail".split())
HOLDERS = TOOLS | frozenset("sh busybox podman podman-init sleep runc exe conmon tini catatonit cat printf".split())
"""Programs of the launcher, the engine (``exe``: one that runs itself again) and the job on a node."""


def test_a_secret_is_seen_only_by_its_job(house: Cluster, share: Path) -> None:
    mark = uuid.uuid4().hex
    value = f"{mark}'\"$(id)\nsecond line,x=y"
    (share / "file").write_text(f"{mark}-of-a-file\n")
    recorder = share / "podman.argv"
    for node in house.testbed.nodes:
        wrapper = f'#!/bin/sh\nprintf \'%s\\n\' "$@" >>{recorder}\nexec /usr/bin/podman "$@"\n'
        node.install_script("podman", wrapper)
    sampler = subprocess.Popen(
        [sys.executable, "-c", SAMPLER, mark[::-1], str(share / "stop")], stdout=subprocess.PIPE, text=True
    )
    script = f'printf %s "$TOKEN" >/share/token; printf %s "$OTHER" >/share/other; echo ready; {WAIT}; exit 3'
    job = house.sh(
        script, "--gpus", "1", "--secret", "TOKEN", "--secret", f"OTHER=@{share}/file", "--mount", f"{share}:/share",
        env={"TOKEN": value},
    )  # fmt: skip
    house.wait_state(job, "RUNNING")
    wait_until(lambda: (share / "other").exists() and (share / "other").read_text(), what="the job to read its secrets")
    assert (share / "token").read_text() == value
    assert (share / "other").read_text() == f"{mark}-of-a-file"

    (share / "stop").touch()
    output, _ = sampler.communicate(timeout=300)
    samples, *seen = output.splitlines()
    assert int(samples) > 3, "it looked while the job was launched"
    where = {tuple(line.split()) for line in seen}
    assert {what for what, *_ in where} <= {"environ"}, "no argument ever, on either side"
    own = os.readlink("/proc/self/ns/pid")
    on_login_node = {name for _, namespace, name in where if namespace == own}
    assert on_login_node <= {"submit"}, "no other process of the login node"
    assert {name for _, namespace, name in where if namespace != own} <= HOLDERS

    leaks = [p for p in Path("/proc").glob("[0-9]*/cmdline") if mark in _bytes(p)]
    homes = [p for node in house.testbed.nodes for p in (node.disk / "home").rglob("*") if mark in _bytes(p)]
    database = [p for p in house.state.glob("gpusched.db*") if mark in _bytes(p)]
    assert (leaks, homes, database) == ([], [], [])
    for path in house.state.rglob("*"):  # until the end a file that only the controller can read
        if mark in _bytes(path):
            assert path.parent.name == "secrets"
            assert path.stat().st_mode & 0o077 == 0
            assert path.parent.stat().st_mode & 0o077 == 0
    (share / "go").touch()
    house.wait_state(job, "FAILED")
    house.wait_clean()
    assert [p for p in house.state.rglob("*") if mark in _bytes(p)] == []
    assert "create" in recorder.read_text()
    assert mark not in recorder.read_text()
    assert mark not in house.cli("show", job).stdout + house.json("show", job).__repr__() + house.controller_log
    refused = house.cli("requeue", job, check=False)
    wait_until(
        lambda: any(e.kind == "refused_command" for e in _all_events(house)) or refused.returncode, what="a refusal"
    )
    assert house.state_of(job) == "FAILED"


def _bytes(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace") if not path.is_dir() else ""
    except OSError:
        return ""


def _all_events(cluster: Cluster) -> list[Any]:
    with cluster.reader() as reader:
        assert reader is not None
        return reader.events()


def test_output_on_the_shared_file_system_grows_while_the_job_runs(house: Cluster, share: Path) -> None:
    job = house.sh(
        f"echo one >&2; {WAIT}; echo two; printf three", "--gpus", "1", "--mount", f"{share}:/share", "-o",
        f"{share}/%x-%j-%N.out",
        "-J", "a job",
    )  # fmt: skip
    house.wait_state(job, "RUNNING")
    (path,) = wait_until(lambda: [p for p in share.glob("*.out") if p.read_text() == "one\n"], what="the first line")
    assert path.name == f"a job-{job}-{house.json('show', job)['nodes'][0]}.out"
    assert house.logs(job) == "one\n"
    (share / "go").touch()
    house.wait_state(job, "COMPLETED")
    house.wait_clean()
    assert path.read_text() == "one\ntwo\nthree"
    assert house.logs(job) == "one\ntwo\nthree"
    assert house.logs(job, "--tail", "1") == "three"
    assert not (house.state / "logs" / job).exists()


def test_submit_wait_has_the_jobs_own_exit_code(house: Cluster) -> None:
    words = ["submit", "-p", "A100", "--gpus", "1", "--wait", "--"]
    ok = house.popen(*words, "true")
    own = house.popen(*words, "sh", "-c", "exit 42")
    killed = house.popen(*words, "sh", "-c", "kill -15 $$")
    hungry = house.popen(*words[:-1], "--mem", "32M", "--", "tail", "/dev/zero")
    missing = house.popen(*words, "no-such-program")
    image = house.popen(*words[:-1], "--image", "localhost/no/such:1", "--", "true")
    processes = {"ok": ok, "own": own, "killed": killed, "hungry": hungry, "missing": missing, "image": image}
    ends = {name: house.finish(process) for name, process in processes.items()}
    codes = {"ok": 0, "own": 42, "killed": 143, "hungry": 137, "missing": 127, "image": 125}
    assert {name: end[0] for name, end in ends.items()} == codes
    jobs = {name: end[1].split()[0] for name, end in ends.items()}
    assert house.state_of(jobs["ok"]) == "COMPLETED"
    assert [house.state_of(jobs[name]) for name in ("killed", "hungry")] == ["FAILED", "OUT_OF_MEMORY"]
    failed = house.json("show", jobs["image"])
    assert (failed["state"], failed["reason"], failed["attempt"], failed["retries"]) == ("FAILED", "LaunchFailed", 1, 0)
    assert "localhost/no/such:1" in failed["message"]  # the engine's own words
    assert "localhost/no/such:1" in house.cli("why", jobs["image"]).stdout
    failed = house.json("show", jobs["missing"])
    assert (failed["state"], failed["attempt"], failed["exit_code"]) == ("FAILED", 1, 127)
    assert "no-such-program" in house.logs(jobs["missing"])
    house.wait_clean()
    assert all(n["state"] == "IDLE" for n in house.nodes().values())


def test_ids_can_be_cut_short_and_unknown_ones_are_refused(house: Cluster) -> None:
    job = house.submit("--gpus", "1")
    house.wait_state(job, "COMPLETED")
    prefix = next(job[:n] for n in range(1, len(job) + 1) if len(_ids(house, job[:n])) == 1)
    assert house.json("show", prefix)["id"] == job
    assert house.json("show", "0000000000a", check=False).keys() == {"error"}
    done = house.cli("cancel", job, check=False)
    assert done.returncode == 1
    assert "COMPLETED" in done.stderr
    assert os.listdir(house.state / "inbox" / "refused") == []


def _ids(cluster: Cluster, prefix: str) -> list[str]:
    return [j["id"] for j in cluster.json("status", "--all") if j["id"].startswith(prefix)]


def test_a_time_limit_warns_then_asks_then_kills(house: Cluster, share: Path) -> None:
    mount = ("--gpus", "1", "--mount", f"{share}:/share")
    # Saves its work in the grace; ends by itself.
    good = "trap 'echo saved >/share/good; exit 0' TERM; while :; do sleep 0.05; done"
    # Warned a cycle before, then ignores what follows: the grace (10 s) ends it.
    deaf = "trap 'echo warned >>/share/deaf' USR1; trap 'echo asked >>/share/deaf' TERM; while :; do sleep 0.05; done"
    a = house.sh(good, "-t", "2s", *mount)
    b = house.sh(deaf, "-t", "8s", "--signal", "USR1@7", *mount)
    for job in (a, b):
        ended = house.wait_state(job, "TIMEOUT")
        assert ended.reason == "TimeLimit"
    assert (share / "good").read_text() == "saved\n"
    assert (share / "deaf").read_text() == "warned\nasked\n"
    assert ended.end_time is not None
    assert ended.start_time is not None
    assert 18 - 1 <= ended.end_time - ended.start_time < 60  # limit and grace; started_at has whole seconds
    assert house.cli("wait", a, check=False).returncode == 124
    house.wait_clean()


def test_cancel_whatever_the_job_is_doing(house: Cluster, share: Path) -> None:
    gate = share / "gate"
    slow = f'if [ "$1" = create ]; then until [ -e {gate} ]; do sleep 0.05; done; fi'
    wrapper = f'#!/bin/sh\n{slow}\nexec /usr/bin/podman "$@"\n'
    house.node("dgx002").install_script("podman", wrapper)
    starting = house.submit("-p", "V100", "--gpus", "1", "--nodelist", "dgx002")
    pending = house.submit("--gpus", "1", "--hold")
    polite = house.sh(
        f"trap 'echo asked >/share/asked; exit 9' TERM; echo >/share/ready; {WAIT}", "--gpus", "1", "--mount",
        f"{share}:/share",
    )  # fmt: skip
    deaf = house.sh(f"trap '' TERM; echo >/share/deaf; {WAIT}", "--gpus", "1", "--mount", f"{share}:/share")
    wait_until(lambda: (share / "ready").exists() and (share / "deaf").exists(), 20, "the traps")
    house.wait_state(deaf, "RUNNING")
    house.wait_state(polite, "RUNNING")
    house.wait_state(starting, "STARTING")
    asked = house.json("cancel", starting, pending, polite)
    assert asked == {"requested": "cancel", "ids": [starting, pending, polite]}
    house.cli("cancel", deaf, "--now")
    for job in (starting, pending, polite, deaf):
        ended = house.wait_state(job, "CANCELLED")
        assert (ended.reason, ended.message) == ("Cancelled", "cancelled by root")
    assert (share / "asked").exists()
    assert house.cli("wait", polite, check=False).returncode == 143
    gate.touch()
    house.wait_clean()
    began = house.json("show", starting)
    assert began["start_time"] is None
    assert house.cli("cancel", "--user", "root", "--state", "PENDING", "-y").returncode == 0
    done = house.cli("cancel", "--user", "root", "--state", "RUNNING", check=False)
    assert (done.returncode, "no matching jobs" in done.stdout) == (0, True)
