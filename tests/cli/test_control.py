"""The commands that ask for a change drop exactly one command file, or none and one line."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpusched.client.context import Client
from gpusched.client.control import selected
from gpusched.client.resolve import Resolver
from gpusched.client.wait import OUTPUT_S, wait_for_ids
from gpusched.client.why import sizes_of_pending
from gpusched.errors import GpuschedError
from gpusched.model import ids
from gpusched.model.commands import (
    AnyCommand,
    Cancel,
    Drain,
    Hold,
    Release,
    Requeue,
    Resume,
    SetPriority,
)
from gpusched.model.events import Event
from gpusched.model.jobs import JobRecord, JobState
from gpusched.queue.store import RankRecord, Reader, Store
from tests.cli.conftest import Site


def last(site: Site) -> AnyCommand:
    return site.commands()[-1]


def test_cancel_a_job_in_the_inbox_by_prefix(site: Site) -> None:
    job_id = site.submit()
    done = site.run("cancel", job_id[:6])
    assert (done.code, done.out) == (0, f"cancel requested: {job_id}\n")
    command = last(site)
    assert isinstance(command, Cancel)
    assert (command.job_ids, command.now) == ((job_id,), False)


def test_ids_as_people_type_them(site: Site) -> None:
    job_id = site.submit()
    typed = job_id.upper().replace("0", "O").replace("1", "l")
    assert site.call("cancel", "--json", "--now", typed).ok().json == {"requested": "cancel", "ids": [job_id]}
    command = last(site)
    assert isinstance(command, Cancel)
    assert command.now


def test_arrays_whole_and_in_part(site: Site) -> None:
    job_id = site.submit("-F", "one", "--array", "0-4", "--", "x")
    for _ in range(2):
        assert site.call("hold", "--json", job_id[:8]).ok().json["ids"] == [job_id]
        assert site.call("hold", "--json", f"{job_id[:8]}_3").ok().json["ids"] == [f"{job_id}_3"]
        assert "has no task 9" in site.call("hold", "--json", f"{job_id}_9").json["error"]
        site.apply_inbox()


def test_scattered_tasks_are_named_one_by_one(site: Site) -> None:
    """Their row is called ID_[0,...,98], which the controller does not know: it refused the command unseen."""
    array = site.submit("-F", "one", "--array", "0-99", "--", "x")
    site.apply_inbox()
    even = ",".join(map(str, range(0, 100, 2)))
    assert site.call("cancel", "-y", "--json", f"{array}_[{even},998]").ok().json["ids"] == [f"{array}_[{even}]"]
    site.apply_inbox()
    states = {j["id"]: j["state"] for j in site.call("status", "--json", "--all").json}
    assert sorted(states.values()) == ["CANCELLED", "PENDING"]


def test_the_controller_understands_them(site: Site) -> None:
    array, single = site.submit("-F", "one", "--array", "0-2", "--", "x"), site.submit()
    site.call("hold", single)
    site.call("cancel", array, "-y")
    site.apply_inbox()
    states = {j["id"]: (j["state"], j["held_by"]) for j in site.call("status", "--json").json}
    assert states[single] == ("PENDING", "user")
    assert states[f"{array}_[0-2]"][0] == "CANCELLED"


def test_hold_release_requeue_priority(site: Site) -> None:
    job_id = site.submit()
    site.call("hold", "--json", job_id).ok()
    assert isinstance(last(site), Hold)
    site.call("priority", "--json", job_id, "-5").ok()
    command = last(site)
    assert isinstance(command, SetPriority)
    assert command.priority == -5
    site.apply_inbox()
    site.call("release", "--json", job_id).ok()
    assert isinstance(last(site), Release)
    site.start(job_id)
    site.call("requeue", "--json", job_id).ok()
    assert isinstance(last(site), Requeue)


def test_more_jobs_than_a_command_may_name_are_in_several(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, before = tuple(site.submit() for _ in range(5)), len(site.commands())
    monkeypatch.setattr("gpusched.client.control.MAX_JOB_IDS", 2)
    assert site.call("hold", "--json", *jobs).ok().json["ids"] == list(jobs)
    sent = [command.job_ids for command in site.commands()[before:] if isinstance(command, Hold)]
    assert sent == [jobs[:2], jobs[2:4], jobs[4:]]


def test_drain_and_resume(site: Site) -> None:
    site.call("drain", "--json", "pc1", "pc2", "--reason", "fan 'loud' $(x)").ok()
    command = last(site)
    assert isinstance(command, Drain)
    assert (command.nodes, command.reason) == (("pc1", "pc2"), "fan 'loud' $(x)")
    site.call("resume", "--json", "pc1").ok()
    command = last(site)
    assert isinstance(command, Resume)
    assert command.nodes == ("pc1",)


def test_cancel_by_user_and_state(site: Site) -> None:
    a, b, c = site.submit(), site.submit(), site.submit()
    site.apply_inbox()
    site.start(a)
    site.end(b)
    me = pwd.getpwuid(os.getuid()).pw_name
    assert site.call("cancel", "--json", "-y", "-u", me).ok().json["ids"] == [a, c]
    assert site.call("cancel", "--json", "-y", "-u", me, "-s", "pending").ok().json["ids"] == [c]
    assert site.call("cancel", "--json", "-y", "-u", "nobody-here").ok().json["ids"] == []
    done = site.call("cancel", "-u", me)
    assert done.code == 2
    assert "-y" in done.err


def test_a_job_that_ends_while_others_of_its_user_are_selected_is_left_out(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, waits = site.submit(), site.submit()
    site.apply_inbox()
    monkeypatch.setattr("gpusched.cli.output.confirm", lambda *_: [site.start(ends), site.end(ends)])
    me = pwd.getpwuid(os.getuid()).pw_name
    assert site.call("cancel", "--json", "-u", me).ok().json["ids"] == [waits]
    assert site.call("cancel", "--json", waits, "-u", me).code == 2
    site.apply_inbox()
    assert site.call("cancel", "--json", "--wait", "-u", me).ok().json["ids"] == []


def test_a_job_that_starts_while_jobs_are_read_is_in_one_list(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run are read before those that wait, or after them: each time it would be in none, or in both."""
    job = site.submit()
    site.apply_inbox()
    real_rows, real_pending = Reader.rows, Reader.pending_rows

    def starts() -> None:
        store = Store.create_or_open(site.state)
        if store.job(job).state is JobState.PENDING:  # type: ignore[union-attr]
            site.start(job)
        store.close()

    def rows(reader: Reader, **how: Any) -> list[JobRecord]:
        found = real_rows(reader, **how)
        starts()
        return found

    def pending_rows(reader: Reader) -> list[JobRecord]:
        found = real_pending(reader)
        starts()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "rows", rows)
        assert selected(Client(), None, None) == ([job], 1)
    assert [j["state"] for j in site.call("status", "--json").ok().json] == ["RUNNING"]
    site.change(job, state=JobState.PENDING, allocation=None, start_time=None)
    waiting = Resolver(Client()).target(job).jobs[0]
    monkeypatch.setattr(Reader, "pending_rows", pending_rows)
    snapshot, _ = sizes_of_pending(Client(), waiting)
    assert [[view.id for view in jobs] for jobs in (snapshot.running, snapshot.pending)] == [[], [job]]


def test_of_several_jobs_those_that_have_not_ended_are_cancelled(site: Site) -> None:
    """As scancel does; a line names each job that has ended already. An unknown job is an error."""
    ended, runs, waits = site.submit(), site.submit(), site.submit()
    site.apply_inbox()
    for job in (ended, runs):
        site.start(job)
    site.end(ended)
    done = site.call("cancel", waits, ended, runs)
    assert (done.code, done.out) == (0, f"cancel requested: {waits} {runs}\n")
    assert [line for line in done.err.splitlines() if ended in line] == [f"gpusched: job {ended} has ended: COMPLETED"]
    command = last(site)
    assert isinstance(command, Cancel)
    assert command.job_ids == (waits, runs)
    assert site.call("cancel", "--json", "--wait", ended, ended).code == 1
    assert site.call("cancel", waits, "0").code == 2
    assert last(site) == command


def test_a_name_in_place_of_an_id_gets_the_ids_of_that_name(site: Site) -> None:
    stored = site.submit("--job-name", "my-train", "-F", "s-V100", "--", "true")
    site.apply_inbox()
    queued = site.submit("--job-name", "my-train", "-F", "s-V100", "--", "true")
    other = site.submit("--job-name", "train!", "-F", "s-V100", "--", "true")
    done = site.call("cancel", "my-train")
    assert (done.code, done.out) == (2, "")
    assert f"name jobs by id; you have jobs of this name: {queued}, {stored}\n" in done.err
    assert f"you have jobs of this name: {other}\n" in site.call("logs", "train!").err
    assert "of this name" not in site.call("cancel", "nobody").err


def test_impossible_ones_are_refused_before_anything_is_asked(site: Site) -> None:
    ended, runs, waits = site.submit(), site.submit(), site.submit()
    site.apply_inbox()
    site.start(ended)
    site.end(ended)
    site.start(runs)
    for words, part in (
        (("cancel", ended), "has ended: COMPLETED"),
        (("hold", runs), "is RUNNING, not PENDING"),
        (("release", waits), "is not held"),
        (("requeue", waits), "is already PENDING"),
        (("priority", runs, "3"), "is RUNNING"),
    ):
        done = site.call(*words)
        assert (done.code, done.out) == (1, "")
        assert part in done.err
        assert done.err.count("\n") == 1
    assert site.commands() == []


ERRORS = [
    (("cancel",), "no jobs given"),
    (("cancel", "0"), "there is no job"),
    (("cancel", "a", "-u", "x"), "use one or the other"),
    (("hold",), "missing argument"),
    (("hold", "!"), "is not a job id"),
    (("priority", "0", "x"), "not a whole number"),
    (("priority", "0", "99999999999"), "is between"),
    (("drain", "pc1"), "--reason"),
    (("drain", "pc1", "--reason", " "), "--reason"),
    (("drain", "pc1", "--reason", "a\nb"), "--reason"),
    (("drain", "pc", "--reason", "x"), "did you mean 'pc"),
    (("drain", "--reason", "x"), "missing argument"),
    (("resume", "nope"), "there is no node"),
]


@pytest.mark.parametrize(("words", "part"), ERRORS)
def test_every_error_is_one_line(site: Site, words: tuple[str, ...], part: str) -> None:
    done = site.call(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("gpusched: error: ")
    assert done.err.count("\n") == 1
    assert part in done.err
    as_json = site.call(*words, "--json")
    assert (as_json.code, as_json.err) == (2, "")
    assert part in as_json.json["error"]
    assert site.commands() == []


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        (JobState.COMPLETED, 0, 0),
        (JobState.FAILED, 42, 42),
        (JobState.FAILED, None, 1),
        (JobState.TIMEOUT, 143, 124),
        (JobState.CANCELLED, None, 143),
        (JobState.OUT_OF_MEMORY, 137, 137),
        (JobState.NODE_FAIL, None, 125),
        (JobState.PREEMPTED, None, 143),
    ],
)
def test_wait_exits_as_the_job_did(site: Site, state: JobState, code: int | None, expected: int) -> None:
    job_id = site.submit()
    site.apply_inbox()
    site.start(job_id)
    site.end(job_id, state, code)
    done = site.call("wait", job_id)
    assert done.code == expected
    assert f"{job_id} {state}" in done.out
    (job,) = site.call("wait", "--json", job_id).json
    assert (job["state"], job["wait_exit_code"]) == (state, expected)


def test_wait_for_several_takes_the_highest(site: Site) -> None:
    a, b = site.submit(), site.submit("-F", "one", "--array", "0-1", "--", "x")
    site.apply_inbox()
    for job_id, code in ((a, 3), (f"{b}_0", 9), (f"{b}_1", 0)):
        site.start(job_id)
        site.end(job_id, JobState.FAILED if code else JobState.COMPLETED, code)
    assert site.call("wait", a, b).code == 9
    assert site.call("wait", a, f"{b}_1").code == 3


def test_wait_from_the_inbox_to_the_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = site.submit()
    steps = [site.apply_inbox, lambda: site.start(job_id), lambda: site.end(job_id, JobState.FAILED, 5)]
    waited = 0.0

    def sleep(seconds: float) -> None:
        nonlocal waited
        waited += seconds
        if waited > 10 * (4 - len(steps)):
            steps.pop(0)()

    monkeypatch.setattr("gpusched.client.wait.time", SimpleNamespace(sleep=sleep, monotonic=lambda: waited))
    assert site.call("wait", job_id).code == 5
    assert steps == []


def test_an_earlier_refusal_of_too_many_is_not_taken_for_this_one_s(site: Site) -> None:
    """In a shared installation a submission is neither in the inbox nor in the copy of the store for a moment."""
    site.apply_inbox()
    store, me = Store.create_or_open(site.state), pwd.getpwuid(os.getuid()).pw_name
    new, later = ids.mint(1_800_000_000.0), ids.mint(1_800_003_600.0)
    store.append(
        [Event(time=1_800_000_001.0, kind="refused_command", user=me, data={"why": "too many", "surplus": 7})]
    )
    store.close()
    with pytest.raises(GpuschedError, match="was refused: too many"):
        wait_for_ids(Client(), [new], 0.0)
    with pytest.raises(GpuschedError, match="still running after 0 s"):
        wait_for_ids(Client(), [f"{later}_3"], 0.0)


def test_wait_gives_up(site: Site) -> None:
    job_id = site.submit()
    done = site.call("wait", job_id, "--timeout", "1s")
    assert (done.code, done.out) == (1, "")
    assert f"still running after 1 s: {job_id}" in done.err


@pytest.mark.parametrize("answers", [True, False])
def test_wait_waits_for_the_rest_of_an_o_file(site: Site, monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    job_id = site.submit("-F", "one", "-o", "/data/%j.out", "--", "x")
    site.apply_inbox()
    site.start(job_id)
    site.end(job_id, JobState.FAILED, 5)
    rank = RankRecord(job_id=job_id, attempt=1, rank=0, node="pc1", runtime="process", output=f"/data/{job_id}.out")

    def put(rank: RankRecord) -> None:
        store = Store.create_or_open(site.state)
        with store.transaction():
            store.put_ranks([rank])
        store.close()

    put(rank)
    waited = 0.0

    def sleep(seconds: float) -> None:
        nonlocal waited
        if answers and waited < 10 <= waited + seconds:
            put(msgspec.structs.replace(rank, collected=True))
        waited += seconds

    monkeypatch.setattr("gpusched.client.wait.time", SimpleNamespace(sleep=sleep, monotonic=lambda: waited))
    assert site.call("wait", job_id).code == 5
    assert waited == pytest.approx(10 if answers else OUTPUT_S, abs=1)


def test_wait_is_no_busy_loop(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, waits = site.submit(), list[float]()
    site.apply_inbox()
    clock = SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits))
    monkeypatch.setattr("gpusched.client.wait.time", clock)
    assert "still running after 60 s" in site.call("wait", job_id, "--timeout", "60s").err
    assert 10 < len(waits) < 200


@pytest.mark.parametrize("moment", ["typer", "msgspec", "gpusched.client.wait", ""])
def test_ctrl_c_ends_quietly_with_130(site: Site, moment: str) -> None:
    """Whenever it comes: while a module is imported, or while the command waits ("")."""
    job_id = site.submit()
    code = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what runs the tests may ignore it
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {moment!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from gpusched.__main__ import main\n"
        "import time\n"
        "def interrupted(seconds): os.kill(os.getpid(), signal.SIGINT)\n"
        f"if not {moment!r}: time.sleep = interrupted\n"
        f"sys.argv = ['gpusched', 'wait', {job_id!r}]\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=site.env, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_requeue_of_an_ended_job_with_secrets_says_why_it_cannot_be(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "x")
    job_id = site.submit("-F", "s-V100", "--secret", "TOKEN", "--", "true")
    array = site.submit("-F", "one", "--secret", "TOKEN", "--array", "0-1", "--", "true")
    site.apply_inbox()
    for ended in (job_id, f"{array}_0"):
        site.end(ended, JobState.FAILED, 1)
    done = site.run("requeue", job_id)
    assert (done.code, done.out) == (1, "")
    assert "its secrets are no longer stored; submit it again" in done.err
    assert done.err.count("\n") == 1
    assert site.commands() == []
    done = site.run("requeue", array)  # the other task has not ended: the controller still has them
    assert (done.code, done.out) == (0, f"requeue requested: {array}\n")
    assert f"skipped 1 of 2 tasks: job {array}_1 is already PENDING" in done.err


def test_commands_without_effect_are_reported_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, array = site.submit(), site.submit("-F", "one", "--array", "0-2", "--", "x")
    site.apply_inbox()
    site.start(f"{array}_1", node="pc1")
    done = site.run("hold", array)
    assert done.code == 0
    assert f"skipped 1 of 3 tasks: job {array}_1 is RUNNING, not PENDING" in done.err
    site.change(job_id, held_by="admin")
    monkeypatch.setattr("gpusched.client.control.check_admin", _no_admin)
    for words, why in (
        (("release", job_id), "is held by an admin"),
        (("hold", job_id), "is already held by an admin"),
        (("priority", job_id, "5"), "has priority 0; only an admin can raise it"),
    ):
        done = site.call(*words)
        assert (done.code, why in done.err, done.out) == (1, True, ""), done.err
    site.call("priority", job_id, "-5").ok()
    assert isinstance(last(site), SetPriority)


def _no_admin(client: object) -> None:
    raise GpuschedError("you are no admin")
