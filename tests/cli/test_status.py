"""``status``, ``show``, ``why``: what a user sees of jobs in the inbox and in the store."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpusched.client import resolve
from gpusched.config.inventory import load_inventory
from gpusched.doctor.state import examine_state
from gpusched.model import ids
from gpusched.model.commands import Submit
from gpusched.model.events import Event
from gpusched.model.interference import JobClassEstimate, job_class_of
from gpusched.model.jobs import Ending, JobSpec, JobState, Preemptions
from gpusched.model.readings import ContainerReading, NodeReading, NodeState
from gpusched.queue.clock import ANCHOR, Clock
from gpusched.queue.inbox import Inbox
from gpusched.queue.lease import STANDBYS
from gpusched.queue.presence import COMPILING, FILE, announce, controller_of, controller_presence
from gpusched.queue.snapshots import _unavailable
from gpusched.queue.store import INVENTORY_TROUBLE, NodeRecord, RankRecord, Reader, Store
from tests.builders import spec
from tests.cli.conftest import GPUSCHED, INVENTORY, Site

KEYS = {
    "id", "name", "user", "partition", "flavor", "state", "reason", "nodes", "gpus", "submit_time", "start_time",
    "end_time", "exit_code", "energy_j",
}  # fmt: skip


def test_a_new_job_of_another_user_is_waited_for_by_the_time_in_its_id(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in an inbox that this user cannot read, then in the next copy of the store."""
    submit = site.submit()
    (site.state / "inbox/new" / f"{submit}.submit").rename(site.folder / "unreadable")
    site.apply_inbox()
    started, now = time.time(), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 4.0 and (site.folder / "unreadable").exists():
            (site.folder / "unreadable").rename(site.state / "inbox/new" / f"{submit}.submit")
            site.apply_inbox()

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=lambda: ids.minted_at(submit) + now[0])
    monkeypatch.setattr(resolve, "time", clock)
    monkeypatch.setattr(Reader, "lag_s", lambda self: 0.6)
    assert abs(ids.minted_at(submit) - started) < 3600
    assert site.call("show", submit, "--json").ok().json["id"] == submit
    assert 4.0 < now[0] < 5.0
    for age_s, least_s, most_s in ((60.0, 2.2, 2.5), (2 * 86400.0, 0.0, 0.0)):  # a controller may have been down
        old, now[0] = ids.mint(ids.minted_at(submit) - age_s), 0.0
        assert "there is no job" in site.call("show", old).err
        assert least_s <= now[0] <= most_s
    unknown = ids.mint(ids.minted_at(submit))
    assert "there is no job" in site.call("show", unknown).err
    assert 5.0 < now[0] < 9.0


def test_status_and_why_show_preempted_jobs(site: Site) -> None:
    waits = site.submit("-F", "s-V100", "--preemptible", "--", "true")
    runs, never = site.submit(), site.submit()
    site.apply_inbox()
    stops = Preemptions().once_more(time.time() - 90, "learned", "v1", runs)
    site.change(waits, preemptions=stops.with_run(700.0, False).once_more(time.time() - 9, "learned", "v1", runs))
    assert "3 PENDING (1 preempted)" in site.call("status").ok().out
    by_id = {j["id"]: j["preemptions"] for j in site.call("status", "--json").ok().json}
    assert by_id == {waits: 2, runs: 0, never: 0}
    line = f"by learned for job {runs}"
    why = site.call("why", waits).ok().out
    assert "preempted: 2 times, last " in why
    assert line in " ".join(why.split())
    assert site.call("why", waits, "--json").ok().json["stopped"].endswith(line)
    assert site.call("why", never, "--json").ok().json["stopped"] is None
    assert "preempted" not in site.call("why", never).ok().out
    page = " ".join(site.call("show", waits).ok().out.split())
    assert "preemptible: yes" in page
    assert "stopped: 2 times, last " in page
    assert "preemptible" not in site.call("show", never).ok().out


def test_a_partition_that_does_not_exist_is_not_idle(site: Site) -> None:
    for options in ((), ("--json",)):
        done = site.call("status", "-p", "A10", *options)
        assert done.code == 2
        assert "there is no partition 'A10'; did you mean 'A100'?" in done.err + done.out
    assert site.call("status", "-p", "A100", "--json").ok().json == []
    job_id = site.submit()
    site.apply_inbox()
    spec = site.change(job_id).spec
    site.change(job_id, spec=msgspec.structs.replace(spec, partition="left"), state=JobState.CANCELLED)
    assert [job["id"] for job in site.call("status", "-p", "left", "--json").ok().json] == [job_id]
    assert site.call("status", "-p", "left", "-s", "running", "--json").ok().json == []


def test_counts_are_of_the_user_and_partition_asked_for(site: Site) -> None:
    mine, also, ours = site.submit(), site.submit("--array", "0-4", "-F", "s-V100", "--", "true"), site.submit()
    site.apply_inbox()
    stops = Preemptions().once_more(time.time(), "learned", "v1", mine)
    site.change(ours, user="bob", preemptions=stops)
    waits = site.submit()  # in the inbox
    assert site.call("status").ok().out.splitlines()[0] == "8 PENDING (1 preempted)"
    me = site.call("show", mine, "--json").ok().json["user"]
    assert site.call("status", "-u", me).ok().out.splitlines()[0] == f"user {me}: 7 PENDING"
    assert site.call("status", "-u", "bob").ok().out.splitlines()[0] == "user bob: 1 PENDING (1 preempted)"
    both = site.call("status", "-u", "bob", "-p", "A100").ok().out.splitlines()[0]
    assert both == "user bob, partition A100: no jobs"
    assert site.call("status", "-u", "zoe").ok().out.splitlines()[0] == "user zoe: no jobs"
    assert also[:4] in site.call("status").out
    assert waits[:4] in site.call("status").out


def test_while_it_is_stopped_why_says_for_whom(site: Site) -> None:
    runs, waits = site.submit(), site.submit()
    site.apply_inbox()
    job = site.start(runs)
    stops = Preemptions().once_more(time.time(), "learned", "v1", waits)
    message = f"stopped by learned for job {waits}"
    ending = Ending(
        outcome=JobState.PENDING, reason="Preempted", message=message, kill_at=time.time(), preemptions=stops
    )
    site.change(job.id, state=JobState.COMPLETING, ending=ending, reason="Preempted", message=message)
    answer = site.call("why", runs, "--json").ok().json
    assert answer["message"] == f"ending ({message})"
    assert answer["next_steps"] == [f"'gpusched show {runs}' shows what was tried and what is still running"]
    assert "preempted: once, " in site.call("why", runs).ok().out
    assert f"job {runs} is being stopped for it" in site.call("why", waits, "--json").ok().json["message"]


def test_nothing_yet(site: Site) -> None:
    assert site.run("status", "--json").ok().json == []
    done = site.run("status").ok()
    assert "no jobs" in done.out
    assert "the controller has not run yet" in done.out


def test_a_job_in_the_inbox_is_pending(site: Site) -> None:
    job_id = site.submit()
    (job,) = site.run("status", "--json").ok().json
    assert job.keys() >= KEYS
    assert (job["id"], job["state"], job["reason"]) == (job_id, "PENDING", "InInbox")
    assert (job["start_time"], job["exit_code"], job["energy_j"], job["nodes"]) == (None, None, None, [])
    assert job["submit_time"].endswith("Z")
    assert job["time_limit_s"] == 72 * 3600


def test_a_folded_job_is_shown_once(site: Site) -> None:
    job_id = site.submit()
    command = site.only_submit()
    site.apply_inbox()
    Inbox(site.state).deliver(command)  # the controller died between its commit and the removal of the file
    (job,) = site.call("status", "--json").ok().json
    assert (job["id"], job["reason"]) == (job_id, None)


def test_states_nodes_times_energy(site: Site) -> None:
    ran, runs, waits = site.submit(), site.submit(), site.submit()
    site.apply_inbox()
    for job_id in (ran, runs):
        site.start(job_id)
    site.end(ran, JobState.FAILED, 3, "NonZeroExitCode")
    site.change(waits, reason="Resources", message="waits for 2 GPUs")
    by_id = {j["id"]: j for j in site.call("status", "--json").ok().json}
    assert [by_id[i]["state"] for i in (ran, runs, waits)] == ["FAILED", "RUNNING", "PENDING"]
    assert (by_id[ran]["exit_code"], by_id[ran]["energy_j"], by_id[ran]["nodes"]) == (3, 7200.0, ["dgx-1v-1"])
    assert 59 < by_id[runs]["elapsed_s"] < 3600
    assert by_id[waits]["message"] == "waits for 2 GPUs"
    screen = site.call("status").ok().out
    assert "1 PENDING, 1 RUNNING, 1 FAILED" in screen
    assert "dgx-1v-1 (NonZeroExitCode 3)" in screen
    assert "(Resources)" in screen


def test_ten_ended_ones_unless_asked(site: Site) -> None:
    ids = [site.submit() for _ in range(12)]
    site.apply_inbox()
    for job_id in ids:
        site.start(job_id)
        site.end(job_id)
    assert len(site.call("status", "--json").json) == 10
    assert len(site.call("status", "--json", "-n", "3").json) == 3
    assert len(site.call("status", "--json", "--all").json) == 12
    assert len(site.call("status", "--json", "--since", "1h").json) == 12
    assert len(site.call("status", "--json", "-s", "completed").json) == 12
    assert site.call("status", "--json", "-s", "failed,timeout").json == []
    assert [j["id"] for j in site.call("status", "--json", ids[0], ids[3]).json] == [ids[0], ids[3]]


def test_of_a_long_queue_the_oldest_unless_asked(site: Site) -> None:
    for _ in range(2):
        site.submit()
    site.apply_inbox()
    store = Store.create_or_open(site.state)
    oldest, newest = sorted(store.pending(), key=lambda job: job.submit_time)
    more = [msgspec.structs.replace(newest, id=ids.mint(newest.submit_time + n)) for n in range(1, 200)]
    store.put_jobs(more[:-1])
    whole = site.run("status").out
    assert "200 PENDING" in whole
    assert "more pending" not in whole
    store.put_jobs(more[-1:])
    store.close()
    short = site.run("status").out
    assert "201 PENDING" in short
    assert short.splitlines()[-1].startswith("176 more pending; list all with gpusched status -s PENDING")
    assert oldest.id[:8] in short
    for words in (("-s", "PENDING"), ("-u", oldest.user), ("--all",)):
        assert "more pending" not in site.run("status", *words).out
    assert len(site.run("status", "--json").json) == 201


def test_filters(site: Site) -> None:
    a, b = site.submit("-F", "one", "--", "x"), site.submit()
    site.apply_inbox()
    site.change(b, user="bob")
    c = site.submit("-F", "one", "--", "x")
    assert [j["id"] for j in site.call("status", "--json", "-u", "bob").json] == [b]
    assert [j["id"] for j in site.call("status", "--json", "-p", "bare").json] == [a, c]
    assert site.call("status", "--json", "-u", "bob", "-p", "bare").json == []


def test_big_arrays_share_a_row(site: Site) -> None:
    job_id = site.submit("-F", "one", "--array", "0-99", "--", "x")
    for _ in range(2):  # in the inbox, then in the store
        (row,) = site.call("status", "--json").json
        identity = (row["id"], row["array_id"], row["array_index"], row["array_tasks"], row["array_count"])
        assert identity == (f"{job_id}_[0-99]", job_id, None, "0-99", 100)
        assert site.call("status").out.startswith("100 PENDING\n")
        lines = [line for line in site.call("status").out.splitlines() if line.startswith(job_id)]
        assert len(lines) == 1
        assert f"{job_id}_[0-99]" in lines[0]
        site.apply_inbox()
    site.start(f"{job_id}_3")
    lines = [line for line in site.call("status").out.splitlines() if line.startswith(job_id)]
    assert len(lines) == 2
    assert any(f"{job_id}_[0-2,4-99]" in line for line in lines)
    site.change(f"{job_id}_3", state=JobState.PENDING, allocation=None, start_time=None)
    lines = [line for line in site.call("status").out.splitlines() if line.startswith(job_id)]
    assert [line.split()[0] for line in lines] == [f"{job_id}_[0-99]"], "one that waits again is among the others"


def test_status_distinguishes_a_starting_controller_from_none(site: Site) -> None:
    pid = os.getpid()
    with controller_presence(site.state):
        assert f"the controller (pid {pid}) is starting\n" in site.call("status").ok().out
        announce(site.state, COMPILING)
        assert f"(pid {pid}) is starting: compiling the scheduling passes" in site.run("status").ok().out
        assert (site.state / FILE).stat().st_mode & 0o777 == 0o644, "who may not open the lock can read it"
        announce(site.state)
        assert "is running its first cycle" in site.call("status").ok().out
        job = site.submit()
        assert "is running its first cycle" in site.call("why", job).out
    assert "the controller has not run yet; start it" in site.call("status").ok().out


def test_a_real_controller_on_its_way_to_its_first_cycle(site: Site) -> None:
    Store.create_or_open(site.state).close()  # stopped while it creates the store it would hold up every reader
    controller = subprocess.Popen([GPUSCHED, "controller"], env=site.env, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 300
        while not (site.state / FILE).exists() and time.monotonic() < end:
            time.sleep(0.002)  # a tenth of a second later it may be in its first cycle, or beyond
        controller.send_signal(signal.SIGSTOP)
        said = site.call("status").ok().out  # where another process had compiled all, it may be beyond starting
        doing = f"the controller (pid {controller.pid}) is"
        assert f"{doing} starting" in said or f"{doing} running its first cycle" in said
    finally:
        controller.kill()
        controller.wait()
    assert controller_of(site.state) is None, "killed: its file is there, and is not believed"
    assert (site.state / FILE).exists()


def test_status_distinguishes_a_slow_controller_from_a_dead_one(site: Site) -> None:
    site.submit()
    site.apply_inbox(alive=False)
    with controller_presence(site.state):
        announce(site.state)
        assert f"(pid {os.getpid()}) is busy: its last cycle was 1 h ago" in site.call("status").ok().out
        own = msgspec.json.decode((site.state / FILE).read_bytes())
        for other in ({"started": "1"}, {"boot_id": "another"}, {"pid": 2**22 - 1}):  # that process has ended
            (site.state / FILE).write_bytes(msgspec.json.encode(own | other))
            assert "the controller is not running (last seen 1 h ago)" in site.call("status").ok().out


def test_a_set_clock_makes_no_dead_controller(site: Site) -> None:
    site.submit()
    site.apply_inbox()
    store = Store.create_or_open(site.state)
    clock = Clock(wall=lambda: time.time() - 3600)  # the wall clock was set by an hour since
    store.set_meta(ANCHOR, clock.anchor())
    store.set_meta("heartbeat", str(clock()))
    store.close()
    site.age_files()
    assert "warning" not in site.call("status").ok().out


def test_status_and_nodes_show_nodes_that_left_the_inventory_and_of_one_not_in_force(site: Site) -> None:
    site.apply_inbox()
    store = Store.create_or_open(site.state)
    node = load_inventory(site.inventory).node("pc1")
    assert node is not None
    gone = msgspec.structs.replace(node, name="pc0")
    reason = "no longer in inventory.yaml; its jobs keep running"
    store.put_nodes([NodeRecord(name="pc0", state=NodeState.DRAINING, reason=reason, declared=gone, left=True)])
    store.set_meta(INVENTORY_TROUBLE, "inventory.yaml:3: it is garbled")
    store.close()
    said = " ".join(site.call("status").ok().out.split())
    assert f"warning: node pc0 is {reason}" in said
    assert "still uses the last valid inventory: inventory.yaml:3: it is garbled" in said
    rows = {row["name"]: row for row in site.call("nodes", "--json").ok().json}
    assert (rows["pc0"]["state"], rows["pc0"]["reason"]) == ("DRAINING", reason)
    assert [row["name"] for row in site.call("nodes", "pc0", "--json").ok().json] == ["pc0"]


def test_status_and_show_do_without_an_inventory_in_order(site: Site) -> None:
    """They go by the store, also of jobs of which more could be said."""
    runs, waits = site.submit(), site.submit("-F", "all", "--", "true")
    resizable = site.submit("-p", "A100", "--image", "x", "--resizable", "--sizes", "4,16", "--", "run")
    site.apply_inbox()
    site.start(runs)
    store = Store.create_or_open(site.state)
    store.put_beliefs([JobClassEstimate(kind=job_class_of(job.user, job.spec.name)) for job in store.pending()])
    store.close()
    site.inventory.write_text("partitions: 'unended")
    assert {row["id"] for row in site.call("status", "--json").ok().json} == {runs, waits, resizable}
    for job in (runs, waits, resizable):
        assert site.call("show", job, "--json").ok().json["id"] == job


def test_the_warning_goes_by_the_heartbeat(site: Site) -> None:
    site.submit()
    site.apply_inbox(alive=False)
    assert "the controller is not running (last seen 1 h ago)" in site.call("status").ok().out
    site.apply_inbox(alive=True)
    assert "warning" not in site.call("status").ok().out


def test_hostile_names_do_not_reach_the_terminal_raw(site: Site) -> None:
    spec = JobSpec(
        name="\x1b[31m[red]evil\n", partition="bare", gpus_per_node=0, cores_per_node=1, memory_mib_per_node=1,
        time_limit_s=60, command=("x",), comment="\x1b]0;x\x07",
    )  # fmt: skip
    Inbox(site.state).deliver(Submit(time=1.0, id="00000000000", spec=spec))
    for words in (("status",), ("show", "0"), ("why", "0")):
        out = site.call(*words).ok().out
        assert "\x1b" not in out
        assert "[red]evil" in out


def test_show(site: Site) -> None:
    job_id = site.submit("-F", "s-V100", "--comment", "c", "--env", "A=b", "--", "sh", "-c", "echo 'hi there'")
    site.apply_inbox()
    site.start(job_id)
    site.end(job_id)
    page = site.run("show", "--json", job_id[:10]).ok().json
    assert page.keys() >= KEYS | {"spec", "allocation", "events", "attempts"}
    assert page["spec"]["command"] == ["sh", "-c", "echo 'hi there'"]
    assert page["allocation"] == [{"rank": 0, "node": "dgx-1v-1", "gpus": [0, 1], "cores": 20, "memory_mib": 131072}]
    assert page["events"][0]["kind"] == "submitted"
    text = site.run("show", job_id).ok().out
    for part in ("COMPLETED", "GPUs 0-1, 20 cores, 128G", "2.0 Wh", "events:", "submitted", "fifo abc"):
        assert part in text


def test_jobs_that_share_gpus_are_shown_with_their_partner(site: Site) -> None:
    asked = ("-p", "V100", "--gpus", "2", "--share", "pairs", "--gpu-mem", "8G", "-J")
    jobs = [site.submit(*asked, name, "--", "x") for name in ("first", "second", "third")]
    site.apply_inbox()
    for job_id in jobs[:2]:
        site.start(job_id)
    site.start(jobs[2], "dgx-1v-2")
    listed = {job["id"]: job["shared_with"] for job in site.call("status", "--json").ok().json}
    assert listed == {jobs[0]: jobs[1], jobs[1]: jobs[0], jobs[2]: None}
    assert "shared with" in site.call("status", jobs[0]).out
    assert "shared with" not in site.call("status", jobs[2]).out
    page = site.call("show", "--json", jobs[0]).ok().json
    assert (page["shared_with"], page["spec"]["share"], page["spec"]["gpu_memory_mib"]) == (jobs[1], "pairs", 8192)
    line = f"GPUs 0-1 of dgx-1v-1 with job {jobs[1]} (second of "
    slowdown = "expected about 61 % slower than alone ("
    text = " ".join(site.call("show", jobs[0]).ok().out.split())
    assert line in text
    assert slowdown in text
    assert "may share: pairs, 8G of each GPU" in text
    assert f"is RUNNING: shares {line}" in " ".join(site.call("why", jobs[0]).ok().out.split())
    assert site.call("why", "--json", jobs[0]).ok().json["job"]["shared_with"] == jobs[1]
    assert site.call("why", "--json", jobs[2]).ok().json["message"] is None
    gpus = {gpu["index"]: gpu for node in site.call("nodes", "--json").ok().json for gpu in node["gpus"]
            if node["name"] == "dgx-1v-1"}  # fmt: skip
    assert {gpus[0]["job"], gpus[0]["shared_with"]} == set(jobs[:2])
    assert gpus[0]["user"] == gpus[0]["shared_user"] is not None
    assert (gpus[2]["job"], gpus[2]["shared_with"]) == (None, None)


def test_show_prints_events_in_local_time_and_round_memory(site: Site) -> None:
    job_id = site.submit()
    site.apply_inbox()
    moment = 1_795_000_000.25
    facts = {"eligible_time": moment, "memory_mib": 6488064, "attempt": 2, "ending": {"asked": moment, "grace_s": 30}}
    store = Store.create_or_open(site.state)
    with store.transaction():
        store.append([Event(time=moment, kind="requeued", job_id=job_id, data=facts)])
    store.close()
    line = site.call("show", job_id).ok().out.splitlines()[-1]
    local = datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")
    assert line.startswith(f"  {local}  requeued eligible_time={local} memory_mib=6.2T attempt=2")
    assert "1795000000" not in line
    assert "'grace_s': 30" in line
    (event,) = [e for e in site.call("show", "--json", job_id).json["events"] if e["kind"] == "requeued"]
    assert event["time"] == "2026-11-18T11:06:40.250Z"
    assert event["data"] == facts


def test_a_nodes_name_stands_once_before_its_trouble() -> None:
    record = NodeRecord(name="dgx003", state=NodeState.DOWN, reason="dgx003: nothing is listening on 10.0.0.3 port 22")
    assert _unavailable(NodeState.DOWN, record) == "DOWN: nothing is listening on 10.0.0.3 port 22"


def test_show_an_array_and_one_task(site: Site) -> None:
    job_id = site.submit("-F", "one", "--array", "0-3", "--", "x")
    for _ in range(2):
        (row,) = site.call("show", "--json", job_id).ok().json["tasks"]
        assert row["array_tasks"] == "0-3"
        assert "PENDING [0-3] (4)" in site.call("show", job_id).ok().out
        assert site.call("show", "--json", f"{job_id}_2").ok().json["array_index"] == 2
        (some,) = site.call("show", "--json", f"{job_id}_[1-2,9]").ok().json["tasks"]
        assert some["array_tasks"] == "1-2"
        site.apply_inbox()


def test_secret_values_are_nowhere(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    job_id = site.submit("-F", "one", "--secret", "TOKEN", "--", "x")
    for _ in range(2):
        for words in (("show", job_id), ("show", "--json", job_id), ("status", "--json"), ("why", "--json", job_id)):
            done = site.call(*words).ok()
            assert "hunter2" not in done.out
        assert "TOKEN" in site.call("show", job_id).out
        site.apply_inbox()
    assert b"hunter2" not in b"".join(p.read_bytes() for p in site.state.glob("gpusched.db*"))


def test_show_says_why_a_submission_was_refused(site: Site) -> None:
    spec = JobSpec(
        name="n", partition="nowhere", gpus_per_node=0, cores_per_node=1, memory_mib_per_node=1, time_limit_s=60,
        command=("x",),
    )  # fmt: skip
    Inbox(site.state).deliver(Submit(time=1.0, id="00000000000", spec=spec))
    site.apply_inbox()
    for command in ("show", "wait"):
        done = site.call(command, "00000000000")
        assert (done.code, done.out) == (1, "")
        assert "was refused" in done.err
        assert "nowhere" in done.err


def test_why_pending(site: Site) -> None:
    job_id = site.submit()
    answer = site.run("why", "--json", job_id).ok().json
    assert (answer["state"], answer["reason"]) == ("PENDING", "ReqNodeNotAvail")
    assert [n["name"] for n in answer["nodes"]] == ["dgx-1v-1", "dgx-1v-2"]
    assert "controller" in answer["warning"]
    assert answer["next_steps"]
    site.apply_inbox()
    text = site.run("why", job_id).ok().out
    assert "ReqNodeNotAvail" in text
    assert "dgx-1v-2" in text


def test_why_says_how_long_containers_may_still_be_prepared(site: Site) -> None:
    job_id = site.submit()
    site.apply_inbox()
    site.start(job_id)
    site.change(job_id, state=JobState.STARTING, start_time=None)
    since = time.time() - 600
    rank = RankRecord(job_id=job_id, attempt=1, rank=0, node="dgx-1v-1", runtime="podman", launched_at=since)
    with contextlib.closing(Store.create_or_open(site.state)) as store:
        store.put_ranks([rank])
    text = " ".join(site.call("why", job_id).ok().out.split())
    assert "is STARTING: preparing its container for 0:10:0" in text
    assert "given up and retried elsewhere after 2:00:00" in text


def test_why_says_that_a_job_waits_for_its_client(site: Site) -> None:
    job_id = site.submit()
    site.apply_inbox()
    site.start(job_id)
    site.change(job_id, state=JobState.STARTING, start_time=None, spec=spec(session=600))
    rank = RankRecord(job_id=job_id, attempt=1, rank=0, node="dgx-1v-1", runtime="podman", launched_at=time.time())
    container = ContainerReading(name=f"gpusched-{job_id}-1-0", phase="ready")
    reading = NodeReading(node="dgx-1v-1", time=time.time(), gpus=(), containers=(container,))
    with contextlib.closing(Store.create_or_open(site.state)) as store:
        store.put_ranks([rank])
        store.put_nodes([NodeRecord(name="dgx-1v-1", reading=reading)])
    text = " ".join(site.call("why", job_id).ok().out.split())
    assert f"is STARTING: waits for a client: gpusched attach {job_id}; ended after 0:10:00 without one" in text


def test_why_held_and_dependent(site: Site) -> None:
    first = site.submit("-F", "one", "--hold", "--", "x")
    second = site.submit("-F", "one", "--dependency", f"afterok:{first}", "--", "x")
    for _ in range(2):
        assert site.call("why", "--json", first).ok().json["reason"] == "JobHeldUser"
        assert site.call("why", "--json", second).ok().json["reason"] == "Dependency"
        site.apply_inbox()


@pytest.mark.parametrize(
    ("state", "code", "step"),
    [
        (JobState.FAILED, 3, "gpusched logs"),
        (JobState.TIMEOUT, None, "-t"),
        (JobState.OUT_OF_MEMORY, 137, "--mem"),
        (JobState.NODE_FAIL, None, "gpusched nodes"),
        (JobState.CANCELLED, None, "requeue"),
    ],
)
def test_why_it_ended(site: Site, state: JobState, code: int | None, step: str) -> None:
    job_id = site.submit()
    site.apply_inbox()
    site.start(job_id)
    site.end(job_id, state, code, "Because")
    answer = site.call("why", "--json", job_id).ok().json
    assert (answer["state"], answer["reason"], answer["exit_code"]) == (state, "Because", code)
    assert step in answer["next_steps"][0]
    assert step in site.call("why", job_id).ok().out


def test_a_reader_that_goes_away_is_no_error(site: Site) -> None:
    site.submit("-F", "one", "--array", "0-99999:2", "--", "x")
    command = f"{GPUSCHED} status --json | head -c 10 >/dev/null; echo ${{PIPESTATUS[0]}}"
    env = site.env
    env.pop("PYTHONUNBUFFERED", None)  # with it, Python itself forgets to look whether a write was whole
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == "141"


ERRORS = [
    (("status", "zzz"), 2, "there is no job 'zzz'"),
    (("status", "not-an-id!"), 2, "is not a job id"),
    (("status", "-s", "RUNING"), 2, "did you mean 'RUNNING'?"),
    (("status", "--since", "x"), 2, "--since"),
    (("status", "-n", "-1"), 2, "less than 0"),
    (("status", "-n", "x"), 2, "not a whole number"),
    (("status", "-w"), 2, "--watch needs a terminal"),
    (("show",), 2, "missing argument"),
    (("show", "0"), 2, "there is no job"),
    (("show", "\udcff"), 2, "is not a job id"),
    (("why", "0"), 2, "there is no job"),
    (("why", "0", "1"), 2, "unexpected extra argument"),
    (("wait", "0"), 2, "there is no job"),
    (("statsu",), 2, "did you mean 'status'?"),
    (("--bad",), 2, "no such option"),
    (("completion", "fish"), 2, "fish"),
]


@pytest.mark.parametrize(("words", "code", "part"), ERRORS)
def test_every_error_is_one_line(site: Site, words: tuple[str, ...], code: int, part: str) -> None:
    done = site.call(*words)
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith("gpusched: error: ")
    assert done.err.count("\n") == 1
    assert part in done.err
    as_json = site.call(*words, "--json")
    assert (as_json.code, as_json.err) == (code, "")
    assert list(as_json.json) == ["error"]


def test_ambiguous_prefixes_list_their_candidates(site: Site) -> None:
    first, second = site.submit(), site.submit()
    done = site.call("show", next(first[:n] for n in range(11, 0, -1) if second.startswith(first[:n])))
    assert done.code == 2
    assert first in done.err
    assert second in done.err


def test_watch_and_json_do_not_go_together(site: Site) -> None:
    assert "cannot be combined" in site.call("status", "-w", "--json").json["error"]


@pytest.mark.parametrize("content", [b"SQLite", b"not a database at all" * 100])
def test_a_broken_store_is_one_line(site: Site, content: bytes) -> None:
    (site.state / "gpusched.db").write_bytes(content)
    for words in (("status",), ("status", "--json"), ("show", "0"), ("why", "0")):
        done = site.call(*words)
        assert done.code in (1, 2)
        assert (done.out + done.err).count("\n") == 1
        assert "Traceback" not in done.out + done.err


def test_a_foreign_file_in_the_inbox_is_ignored(site: Site) -> None:
    new = site.state / "inbox/new"
    (new / "x.submit").write_text("{")
    (new / "dir").mkdir()
    os.mkfifo(new / "pipe")
    job_id = site.submit()
    assert [j["id"] for j in site.call("status", "--json").ok().json] == [job_id]


def test_version_and_help(site: Site) -> None:
    assert site.call("--version").ok().out.startswith("gpusched ")
    out = site.call("--help").ok().out
    from gpusched.cli.main import COMMANDS

    assert all(f"  {name} " in out for name in COMMANDS)
    assert site.call().ok().out == out


def test_help_of_every_command(site: Site) -> None:
    for name in ("submit", "status", "show", "why", "wait", "cancel", "hold", "release", "requeue", "priority", "drain",
                 "resume", "completion"):  # fmt: skip
        out = site.call(name, "--help").ok().out
        assert f"gpusched {name}" in out
        assert "--json" in out


def test_internal_errors_are_one_line_unless_debugging(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops\nline 2")

    monkeypatch.setattr("gpusched.client.show.show", broken)
    monkeypatch.setattr("gpusched.cli.show.load_page", broken, raising=False)
    done = site.call("show", "0")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "internal error: ZeroDivisionError" in done.err
    monkeypatch.setenv("GPUSCHED_DEBUG", "1")
    assert "Traceback" in site.call("show", "0").err


def test_start_up_imports_nothing_heavy(site: Site, tmp_path: Path) -> None:
    site.submit()
    site.apply_inbox()
    heavy = "{'numpy', 'numba', 'torch', 'paramiko', 'pydantic', 'rich', 'asyncio', 'pynvml'}"
    for words in (["status", "--json"], ["submit", "--json", "-F", "s-V100", "--", "x"], ["submit", "-F", "one", "x"]):
        code = (
            f"import sys; from gpusched.cli.main import run; code = run({words!r}); "
            f"print(sorted({heavy} & set(sys.modules)), code, file=sys.stderr)"
        )
        python = str(Path(GPUSCHED).parent / "python")
        done = subprocess.run([python, "-c", code], env=site.env, capture_output=True, text=True, check=True)
        assert done.stderr.splitlines()[-1] == "[] 0"  # on a busy machine the controller was seen long ago


CONTROLS = "\x9b2J\x1b[31m\u202e\u2066\x7f"


def test_no_control_of_any_kind_reaches_the_terminal_raw(site: Site) -> None:
    job_id = site.submit("-F", "s-V100", "--comment", CONTROLS, "--env", f"A={CONTROLS}", "--", "echo", CONTROLS)
    site.apply_inbox()
    events = [Event(time=1.0, kind=CONTROLS, job_id=job_id, user=CONTROLS, data={CONTROLS: [CONTROLS]})]
    store = Store.create_or_open(site.state)
    store.append(events)
    store.close()
    site.change(job_id, reason=CONTROLS, message=CONTROLS, user=CONTROLS)
    for words in (("status",), ("show", job_id), ("why", job_id), ("power",)):
        for more in ((), ("--json",)):
            out = site.call(*words, *more).ok().out
            assert all(c.isprintable() or c == "\n" for c in out), words
    assert site.call("show", job_id, "--json").json["spec"]["comment"] == CONTROLS, "JSON says the same, escaped"
    waited = site.call("wait", job_id, "--timeout", "0s")
    assert "\x9b" not in waited.out + waited.err


def test_times_that_no_calendar_holds_are_shown(site: Site) -> None:
    """A store from before numbers had bounds may hold them; one such job broke everybody's screens."""
    other = site.submit()
    job_id = site.submit()
    site.apply_inbox()
    spec = site.change(job_id).spec
    hostile = msgspec.structs.replace(
        spec, begin_time=1e300, time_limit_s=10**400, memory_mib_per_node=10**400, signal_before_s=10**400
    )
    site.change(job_id, spec=hostile, eligible_time=1e300, submit_time=-1e300)
    rows = {row["id"]: row for row in site.call("status", "--json").ok().json}
    assert rows.keys() == {other, job_id}
    assert rows[job_id]["eligible_time"] == "3000-01-01T00:00:00.000Z"
    assert rows[job_id]["submit_time"] == "1970-01-01T00:00:00.000Z"
    for words in (("status",), ("show", job_id), ("show", "--json", job_id)):
        site.call(*words).ok()


@pytest.mark.parametrize(
    "field",
    [{"begin_time": 1e300}, {"signal_before_s": 10**400}, {"time_limit_s": 10**400}],
    ids=["begin", "signal", "limit"],
)
def test_a_command_file_with_such_a_number_is_refused(site: Site, field: dict[str, Any]) -> None:
    job_id = site.submit()
    command = site.only_submit()
    Inbox(site.state).remove(f"{job_id}.submit")
    Inbox(site.state).deliver(msgspec.structs.replace(command, spec=msgspec.structs.replace(command.spec, **field)))
    assert [row["id"] for row in site.call("status", "--json").ok().json] == [job_id], "also while it waits"
    site.apply_inbox()
    assert site.call("status", "--json").ok().json == []
    assert "refused" in site.call("show", job_id).err


def test_more_waiting_jobs_than_a_user_may_have_are_refused_with_the_number(site: Site) -> None:
    site.inventory.write_text("settings: {max_queued_jobs_per_user: 2, max_queued_size_per_user: 1M}\n" + INVENTORY)
    fits = site.submit("-F", "s-V100", "--array", "0-1", "--", "true")
    many = site.submit("-F", "s-V100", "--", "true")
    site.apply_inbox()
    refused = site.call("show", many)
    assert refused.code == 1
    assert "has 2 of 2 pending jobs; 1 more exceed the limit (settings.max_queued_jobs_per_user" in refused.err
    site.call("cancel", "-y", fits).ok()
    site.apply_inbox()
    again = site.submit("-F", "s-V100", "--", "true")
    site.apply_inbox()
    assert site.call("status", "--json", again).ok().json[0]["state"] == "PENDING"


def test_status_and_check_name_the_active_controller_where_a_standby_was_seen(site: Site) -> None:
    site.submit()
    site.apply_inbox()
    store = Store.create_or_open(site.state, term=5)
    active = f"the controller of {os.uname().nodename}, pid {os.getpid()} is active"
    assert active not in site.call("status").ok().out
    store.set_meta(STANDBYS, "login2")
    assert f"\n{active}; standby: login2\n" in site.call("status").ok().out
    store.set_meta(STANDBYS, "")
    assert f"\nwarning: {active}; no standby is running\n" in site.call("status").ok().out
    store.close()
    (found,) = [f for f in examine_state(site.state, 5.0, time.time()) if f.check == "standby"]
    assert (found.status, found.message) == ("warn", f"{active}; no standby is running")
