"""Requests of a running job are done once, for its own user's jobs, and only if they are its own."""

from __future__ import annotations

import os

import pytest

from gpusched.cluster.base import NodeObservation
from gpusched.controller import injob
from gpusched.model.commands import RelayedCommand
from gpusched.model.jobs import Ending, JobState
from gpusched.model.readings import AskReading, ContainerReading, NodeReading
from tests.controller.applying import ADMIN, ALICE, BOB, NOW, InboxWorld
from tests.controller.injob import ask, running, world

__all__ = ["world"]  # a fixture


def test_a_job_queues_itself_again_and_hears_of_it_once_that_is_so(world: InboxWorld) -> None:
    job = running(world, ALICE)
    assert ask(world, job, "scontrol", "requeue", job) is None
    assert ask(world, job, "scontrol", "requeue", job) is None, "it waits in the inbox"
    assert world.apply_inbox() == 1
    found = world.job(job)
    assert (found.state, found.ending is not None and found.ending.outcome) == (JobState.COMPLETING, JobState.PENDING)
    assert ask(world, job, "scontrol", "requeue", job) == "0\n"
    assert world.apply_inbox() == 0
    assert not world.refusals()


def test_its_user_has_no_power_over_others_jobs_there_even_as_an_admin(world: InboxWorld) -> None:
    theirs = world.submit(BOB)
    for uid in (ALICE, ADMIN, os.getuid()):
        job = running(world, uid)
        assert ask(world, job, "scancel", theirs) == f"1\nscancel: error: job {theirs} belongs to {BOB}\n"
        assert theirs not in (ask(world, job, "squeue") or "")
        world.say(RelayedCommand(time=NOW, job_id=job, attempt=1, act="cancel", job_ids=(theirs,)))
        assert world.job(theirs).state is JobState.PENDING


def test_only_the_controller_relays_commands_of_jobs(world: InboxWorld) -> None:
    job = running(world, ALICE)
    for uid in (ALICE, BOB, ADMIN):
        why = world.say(RelayedCommand(time=NOW, job_id=job, attempt=1, act="cancel", job_ids=(job,)), uid)
        assert why == "only the controller forwards requests of jobs"
    assert world.job(job).state is JobState.RUNNING


def test_requests_of_an_earlier_attempt_or_another_node_are_ignored(world: InboxWorld) -> None:
    job = running(world, ALICE)
    assert ask(world, job, "scancel", job, attempt=2) is None
    assert ask(world, job, "scancel", job, node="n1") is None
    assert world.apply_inbox() == 0
    assert ask(world, job, "scancel", job) is None
    world.put(job, JobState.RUNNING, attempt=2)
    world.apply_inbox()
    assert world.job(job).state is JobState.RUNNING


def test_a_cancelled_job_is_not_brought_back_by_its_trap(world: InboxWorld) -> None:
    job = running(world, ALICE)
    assert ask(world, job, "scontrol", "requeue", job) is None  # before the cancel is known
    ending = Ending(outcome=JobState.CANCELLED, reason="Cancelled", message="", kill_at=NOW + 30)
    world.put(job, JobState.COMPLETING, ending=ending)
    world.apply_inbox()
    found = world.job(job).ending
    assert (found is not None and found.outcome) == JobState.CANCELLED
    assert [event.data["why"] for event in world.refusals()] == [f"job {job} was cancelled"]
    assert ask(world, job, "scontrol", "requeue", job, number=2) == f"1\nscontrol: error: job {job} was cancelled\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("squeue", "-h", "-o", "%.5t|%8j|%T|%D|%u|%L|%q"), "0\n    R|mine    |RUNNING|1|{user}|0:08:20|\n"),
        (("squeue", "--noheader", "--format=%i", "--states", "PD,R", "-n", "mine,x"), "0\n{job}\n"),
        (("squeue", "-hj", "nothere"), "0\n"),
        (("squeue", "-h", "-t", "PENDING"), "0\n"),
        (("sacct", "-nPX", "-j", "{job}.batch"), "0\n{job}|mine|p||1|RUNNING|0:0\n"),
        (("sacct", "--brief"), "1\nsacct: error: --brief is not understood inside jobs"),
        (("sacct", "-n", "-P", "-j", "{job}.batch", "-o", "jobid,State%20,ExitCode"), "0\n{job}|RUNNING|0:0\n"),
        (("sacct", "-nP", "-o", "Elapsed,Restarts"), "0\n0:01:40|0\n"),
        (("sacct", "-o", "Nothing"), "1\nsacct: error: there is no field 'Nothing' inside jobs"),
        (("squeue", "-o", "%" + "9" * 5000 + "i"), "1\nsqueue: error: a format has at most 1000 characters"),
        (("squeue", "-o", "%." + "9" * 900 + "i"), "1\nsqueue: error: %99999999999999999999: a column is at most 999"),
        (("squeue", "-ho", "%.1000000000i"), "1\nsqueue: error: %1000000000: a column is at most 999 wide"),
        (("sacct", "-o", "JobID," * 20000), "1\nsacct: error: a format has at most 1000 characters"),
        (("squeue", "-" + "h" * 150000), "1\nsqueue: error: -" + "h" * 59 + ": too many options in one word"),
        (("squeue", "-o", "%z"), "1\nsqueue: error: %z is not filled in inside jobs"),
        (("squeue", "-u", "root2"), "1\nsqueue: error: inside a job only the jobs of {user} are shown"),
        (("scancel",), "1\nscancel: error: expected ids of jobs"),
        (("scancel", ",".join(map(str, range(1001)))), "1\nscancel: error: at most 1000 jobs at once, found 1001"),
        (("scancel", "--user=bob"), "1\nscancel: error: expected ids of jobs, found '--user=bob'"),
        (("rm", "-rf", "/"), "1\nrm: error: not supported inside a job"),
    ],
)  # fmt: skip
def test_output_of_slurms_commands_in_a_job(world: InboxWorld, words: tuple[str, ...], expected: str) -> None:
    job = running(world, ALICE)
    world.now = NOW + 100
    answer = ask(world, job, *(word.replace("{job}", job) for word in words))
    assert (answer or "").startswith(expected.replace("{job}", job).replace("{user}", world.job(job).user)), answer


def test_a_request_that_breaks_its_command_gets_an_error(
    world: InboxWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> str:
        raise OverflowError("too wide")

    monkeypatch.setattr(injob, "squeue", broken)
    job = running(world, ALICE)
    assert ask(world, job, "squeue") == "1\nsqueue: error: internal error; the controller's log has it\n"
    assert f"the request of job {job} failed: squeue" in caplog.text


def test_their_tables_have_heads(world: InboxWorld) -> None:
    job = running(world, ALICE)
    squeue = (ask(world, job, "squeue") or "").splitlines()
    assert squeue[1].split() == ["JOBID", "PARTITION", "NAME", "USER", "ST", "TIME", "NODES", "NODELIST(REASON)"]
    assert squeue[2].split()[:3] == [job, "p", "mine"]
    sacct = (ask(world, job, "sacct") or "").splitlines()
    assert sacct[1].split() == ["JobID", "JobName", "Partition", "Account", "AllocCPUS", "State", "ExitCode"]
    assert sacct[2].split() == [job, "mine", "p", "1", "RUNNING", "0:0"]


def test_sacct_lists_jobs_that_ended_within_a_day(world: InboxWorld) -> None:
    job = running(world, ALICE)
    ended = {age: world.submit(ALICE) for age in (injob.SACCT_S - 1, injob.SACCT_S + 1)}
    for age, other in ended.items():
        world.put(other, JobState.COMPLETED, submit_time=world.now - age - 9, end_time=world.now - age)
    recent, _ = ended.values()
    assert {line.split("|")[0] for line in (ask(world, job, "sacct", "-nP") or "").splitlines()[1:]} == {job, recent}


def test_ids_of_many_tasks_are_bounded_too(world: InboxWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injob, "MAX_LOOKED_UP", 4)
    job, array = running(world, ALICE), world.submit(ALICE, array=(0, 1, 2))
    world.store.put_jobs(world.store.jobs_of_array(array))
    assert ask(world, job, "scancel", array, f"{array}_[0-1]") == "1\nscancel: error: at most 4 tasks at once\n"
    assert ask(world, job, "scancel", array) is None


def test_a_users_lists_are_made_in_several_cycles_the_oldest_request_first(
    world: InboxWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(injob, "MAX_LISTS", 2)
    asking = [(running(world, uid), age) for uid, age in ((ALICE, 1.0), (ALICE, 3.0), (ALICE, 2.0), (BOB, 0.0))]
    containers = tuple(
        ContainerReading(name=f"gpusched-{job}-1-0", phase="running", ask=AskReading(
            id="1-1", attempt=1, words=("squeue",), age_s=age))
        for job, age in asking
    )  # fmt: skip
    reading = NodeReading(node="n0", time=NOW, containers=containers)
    observed = {"n0": NodeObservation(began=NOW, result=reading)}
    made = injob.InJobCommandHandler(world.store, world.inbox).answers(observed, world.inventory, NOW)
    assert [one.key[0] for one in made if one.key] == [asking[n][0] for n in (1, 2, 3)]
