"""Slurm's jobs as jobs of ours: what is asked for, states, attempts, ids used again; against a plain reference."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.controller.slurm.devices import indices_by_position, minors_of
from gpusched.controller.slurm.following import MAX_DRIFTS, JobMirror
from gpusched.controller.slurm.guesses import with_guesses
from gpusched.controller.slurm.mirror import FORGOTTEN, MirrorContext, MirrorResult, ended_in_accounting, ended_unknown
from gpusched.controller.slurm.requests import NO_LIMIT_S, SlurmContext, request_of
from gpusched.model.jobs import ACTIVE, ENDED, JobRecord, JobState
from gpusched.model.readings import GpuWiring, Wiring
from gpusched.model.resources import Inventory, Node, Partition, RuntimeName
from gpusched.model.slurm import LEASE, SlurmFacts, SlurmJob, SlurmPartition, slurm_block_reason
from tests.slurm.waiting import T, job


def node(name: str, partition: str, **more: Any) -> Node:
    fields = {"gpus": 8, "cores": 64, "memory_mib": 512_000, "gpu_type": "A100", "runtime": RuntimeName.PROCESS}
    return Node(name=name, partition=partition, address=name, **(fields | more))


SITE = SlurmContext(
    inventory=Inventory(
        path="", engine="slurm",
        partitions=(
            Partition(name="a", nodes=(node("a1", "a"), node("a2", "a", gpus=4, cores=32)), flavors=(),
                      preemptible=True),
            Partition(name="b", nodes=(node("b1", "b", gpu_type="H100"),), flavors=(), max_time_s=3600),
        ),
    ),
    partitions={"a": SlurmPartition(name="a", nodes=("a1", "a2"), max_time_s=7200)},
    features={"a1": ("nvlink", "big"), "a2": ("small",)},
)  # fmt: skip


def running(**more: Any) -> SlurmJob:
    return job(**({"state": "RUNNING", "reason": "None", "start_time": T + 10, "node_names": ("a1",)} | more))


class Kept:
    """A store of a few jobs, and the cycle's part in keeping it."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRecord] = {}
        self.runs: dict[tuple[str, int], list[Any]] = {}
        self.events: list[Any] = []
        self.mirror = JobMirror(self.jobs.get, [])
        self.looked = 0

    def look(self, *jobs: SlurmJob, now: float = T + 100, **world: Any) -> list[MirrorResult]:
        seen = MirrorContext(site=SITE, now=now, **world)
        steps = self.mirror.steps(jobs, seen)
        self.keep(steps)
        for guess in with_guesses([j for j in self.jobs.values() if j.state in ACTIVE], SITE):
            self.jobs[guess.id] = guess
        self.mirror.mark_stored(steps, jobs, seen)
        return steps

    def keep(self, steps: list[MirrorResult]) -> None:
        for step in steps:
            self.jobs[step.job.id] = step.job
            self.events += step.events
            if step.began:
                self.runs[step.job.id, step.job.attempt] = [step.job.start_time]
            if step.ended is not None:
                self.runs[step.job.id, step.ended[0]][1:] = step.ended[1:]

    def again(self) -> None:
        """The controller is started again."""
        self.mirror = JobMirror(self.jobs.get, [j for j in self.jobs.values() if j.state not in ENDED])


# -- what is asked for -------------------------------------------------------------------------------------------


def asked(**more: Any) -> Any:
    one = job(**more)
    return request_of(one, SITE, one.req_nodes)


def test_resources_are_in_equal_parts_rounded_up() -> None:
    spec = asked(nodes=2, gpus={"a100": 3}, cpus=9, memory_mib=1001)
    assert (spec.nodes, spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node) == (2, 2, 5, 501)
    assert spec.gpu_types == ("A100",)
    assert (asked(gpus={}, memory_mib=None).gpus_per_node, asked(memory_mib=None).memory_mib_per_node) == (0, 1)


def test_a_job_without_a_limit_has_its_partitions_or_a_year() -> None:
    assert asked(time_limit_s=None).time_limit_s == 7200, "Slurm's partition"
    assert asked(time_limit_s=None, partitions=("b",)).time_limit_s == 3600, "the inventory's"
    assert asked(time_limit_s=None, partitions=("c",)).time_limit_s == NO_LIMIT_S


def test_of_several_partitions_the_first_that_is_declared_counts() -> None:
    assert asked(partitions=("c", "b", "a")).partition == "b"
    assert asked(partitions=("c", "d")).partition == "c"


def test_nodes_that_the_user_named_bind_only_where_they_are_enough() -> None:
    assert asked(req_nodes=("a1", "a2"), nodes=2).nodelist == ("a1", "a2")
    assert asked(req_nodes=("a1",), nodes=2).nodelist == ()


@pytest.mark.parametrize(
    ("features", "exclude"),
    [
        ("", ()), ("nvlink", ("a2",)), ("nvlink&big", ("a2",)), ("nvlink|small", ()), ("nvlink&small", ("a1", "a2")),
        ("other|small", ("a1",)), ("[nvlink*2&small*1]", ()),
    ],
)  # fmt: skip
def test_features_leave_out_nodes_that_lack_them(features: str, exclude: tuple[str, ...]) -> None:
    assert asked(features=features).exclude == exclude


def test_whole_nodes_are_the_smallest_that_do() -> None:
    small, large = asked(exclusive=True), asked(exclusive=True, gpus={"": 5})
    assert (small.gpus_per_node, small.cores_per_node, large.gpus_per_node, large.cores_per_node) == (4, 32, 8, 64)


def test_a_partition_lets_its_jobs_be_preempted_where_they_may_be_requeued() -> None:
    assert asked().preemptible
    assert not asked(requeue=False).preemptible
    assert not asked(partitions=("b",)).preemptible


def test_a_name_is_one_line() -> None:
    assert asked(name="a\x1b[31m\nb" + "c" * 500).name == "a?[31m?b" + "c" * 192
    assert asked(name="").name == "-"


# -- states ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("CONFIGURING", "RUNNING"), ("SUSPENDED", "RUNNING"), ("STOPPED", "RUNNING"), ("COMPLETING", "COMPLETING"),
        ("COMPLETED", "COMPLETED"), ("BOOT_FAIL", "NODE_FAIL"), ("DEADLINE", "TIMEOUT"), ("REVOKED", "CANCELLED"),
        ("PREEMPTED", "PREEMPTED"), ("OUT_OF_MEMORY", "OUT_OF_MEMORY"), ("A_NEW_WORD", "RUNNING"),
    ],
)  # fmt: skip
def test_states_in_our_words(state: str, expected: str) -> None:
    kept = Kept()
    kept.look(running(state=state, end_time=T + 20))
    assert kept.jobs["7"].state == expected


def test_a_job_that_never_started_has_no_attempt_and_no_run() -> None:
    kept = Kept()
    kept.look(job(state="CANCELLED", start_time=T + 20, end_time=T + 20))
    assert (kept.jobs["7"].attempt, kept.jobs["7"].start_time, kept.runs) == (0, None, {})
    kept.look(job(id="8", state="DEADLINE", start_time=T + 20, end_time=T + 20))
    assert kept.jobs["8"].state == "CANCELLED"


def test_a_job_that_came_and_went_between_two_looks_has_its_whole_story() -> None:
    kept = Kept()
    kept.look(running(state="FAILED", reason="NonZeroExitCode", end_time=T + 20, exit_code=3))
    found = kept.jobs["7"]
    assert (found.state, found.exit_code, found.reason) == ("FAILED", 3, "NonZeroExitCode")
    assert kept.runs == {("7", 1): [T + 10, T + 20, JobState.FAILED]}
    assert [e.kind for e in kept.events] == ["submitted", "running", "ended"]


def test_held_jobs_say_by_whom() -> None:
    kept = Kept()
    for reason, priority, by in (
        ("JobHeldUser", 0, "user"), ("JobHeldAdmin", 0, "admin"), ("Priority", 4, ""), ("None", 0, "user"),
    ):  # fmt: skip
        kept.look(job(reason=reason, priority=priority))
        assert kept.jobs["7"].held_by == by
    assert [e.kind for e in kept.events] == ["submitted", "held", "held", "released", "held"]


def test_a_begin_time_and_a_dependency_keep_a_job_waiting() -> None:
    kept = Kept()
    kept.look(job(reason="BeginTime", eligible_time=T + 500), job(id="8", reason="None", dependency="afterok:7(un)"))
    assert kept.jobs["7"].eligible_time == kept.jobs["7"].spec.begin_time == T + 500
    facts = kept.jobs["8"].slurm
    assert facts is not None
    assert facts.reason == "Dependency"


@pytest.mark.parametrize(
    ("reason", "reservation", "why"),
    [
        ("Resources", "", ""), ("BeginTime", "", ""), ("Priority", LEASE, ""), ("Resources", "maint", "maint"),
        ("QOSMaxGRESPerUser", "", "QOSMaxGRESPerUser"), ("JobArrayTaskLimit", "", "JobArrayTaskLimit"),
    ],
)  # fmt: skip
def test_jobs_that_slurm_holds_are_left_to_it(reason: str, reservation: str, why: str) -> None:
    facts = SlurmFacts(reason=reason, reservation=reservation)
    assert why in slurm_block_reason(facts)
    assert bool(slurm_block_reason(facts)) == bool(why)


# -- attempts and ids --------------------------------------------------------------------------------------------


def test_a_requeue_is_another_attempt_of_the_same_job() -> None:
    kept = Kept()
    kept.look(running())
    kept.look(job(restarts=1, submit_time=T + 50, reason="BeginTime", eligible_time=T + 170))
    waiting = kept.jobs["7"]
    assert (waiting.state, waiting.attempt, waiting.allocation, waiting.submit_time) == ("PENDING", 1, None, T)
    assert kept.runs == {("7", 1): [T + 10, T + 50, JobState.PENDING]}
    kept.again()
    kept.look(running(restarts=1, submit_time=T + 50, start_time=T + 200), now=T + 210)
    kept.look(running(restarts=1, submit_time=T + 50, start_time=T + 200, state="COMPLETED", end_time=T + 220))
    assert kept.jobs["7"].attempt == 2
    assert kept.runs["7", 2] == [T + 200, T + 220, JobState.COMPLETED]


def test_an_unseen_requeue_still_ended_an_attempt() -> None:
    for then in (
        job(state="CANCELLED", restarts=1, submit_time=T + 50, start_time=T + 60, end_time=T + 60),
        running(restarts=1, submit_time=T + 50, start_time=T + 70),
    ):
        kept = Kept()
        kept.look(running())
        kept.look(then)
        assert kept.runs["7", 1] == [T + 10, T + 50, JobState.PENDING]
        assert kept.jobs["7"].state == then.state


def test_an_ended_job_whose_id_was_used_before_is_known_again_after_a_restart() -> None:
    kept = Kept()
    kept.look(running(state="COMPLETED", end_time=T + 20))
    second = running(state="FAILED", submit_time=T + 30, start_time=T + 40, end_time=T + 50)
    kept.look(second)
    assert (kept.jobs["7"].state, kept.jobs["7~2"].state) == ("COMPLETED", "FAILED")
    kept.again()
    assert kept.look(second) == []


def test_a_job_that_completes_lets_go_of_its_nodes_soon() -> None:
    kept = Kept()
    kept.look(running(state="COMPLETING", end_time=T + 90))
    found = kept.jobs["7"]
    assert found.ending is not None
    assert T + 90 < found.ending.kill_at < T + 200
    kept.look(running(state="COMPLETED", end_time=T + 90))
    assert kept.jobs["7"].ending is None


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "other", [{"submit_time": T - 900}, {"submit_time": T + 50}, {"submit_time": T + 50, "restarts": 1, "uid": 9}]
)
def test_an_id_that_slurm_uses_again_is_another_job(restart: bool, other: dict[str, Any]) -> None:
    """slurmctld lost what it had not saved: the old job is over, the new one has a name of its own."""
    kept = Kept()
    kept.look(running())
    if restart:
        kept.again()
    kept.look(job(**other))
    assert (kept.jobs["7"].state, kept.jobs["7"].reason) == ("CANCELLED", FORGOTTEN)
    assert kept.runs["7", 1] == [T + 10, T + 100, JobState.CANCELLED]
    assert kept.jobs["7~2"].state == "PENDING"
    if restart:
        kept.again()
    kept.look(running(**other))
    kept.look(job(submit_time=T + 77, uid=5))
    assert (kept.jobs["7~2"].state, kept.jobs["7~3"].state) == ("CANCELLED", "PENDING")
    assert sorted(kept.jobs) == ["7", "7~2", "7~3"]
    kept.again()
    assert kept.look(job(submit_time=T + 77, uid=5)) == []


def test_jobs_elsewhere_are_not_mirrored_unless_they_hold_our_nodes() -> None:
    kept = Kept()
    kept.look(job(partitions=("c",)), running(id="8", partitions=("c",), node_names=("z9",)))
    assert kept.jobs == {}
    kept.look(running(id="9", partitions=("c",), node_names=("a1",)), positions={"9": {"a1": (1, 2)}})
    assert kept.jobs["9"].spec.partition == "c"
    assert kept.jobs["9"].allocation is not None


def test_one_unreadable_job_does_not_affect_the_others() -> None:
    kept = Kept()
    odd = job(id="8")
    msgspec.structs.force_setattr(odd, "gpus", None)
    kept.look(odd, job())
    assert list(kept.jobs) == ["7"]
    assert "job 8 cannot be mirrored" in kept.mirror.troubles["8"]
    kept.look(job())
    assert kept.mirror.troubles == {}, "of jobs that Slurm lists"


def test_jobs_that_slurm_names_no_more_are_missing_until_it_is_known_how_they_ended() -> None:
    kept = Kept()
    kept.look(running(), job(id="8"))
    assert kept.mirror.missing([], T + 195, T + 200) == {"7": (T + 195, T + 200), "8": (T + 195, T + 200)}
    assert kept.mirror.missing([job(id="8")], T + 200, T + 205) == {"7": (T + 195, T + 200)}
    kept.keep([ended_in_accounting(kept.jobs["7"], "TIMEOUT", T + 10, T + 50)])
    assert kept.runs["7", 1] == [T + 10, T + 50, JobState.TIMEOUT]
    kept.keep([ended_in_accounting(kept.jobs["8"], "COMPLETED", T + 20, T + 60)])
    assert (kept.jobs["8"].attempt, kept.runs["8", 1]) == (1, [T + 20, T + 60, JobState.COMPLETED])
    assert ended_unknown(job_waiting(), T + 99).job.reason == FORGOTTEN


def job_waiting() -> JobRecord:
    kept = Kept()
    kept.look(job())
    return kept.jobs["7"]


# -- GPUs --------------------------------------------------------------------------------------------------------


def parts(found: JobRecord) -> dict[str, tuple[int, ...]]:
    assert found.allocation is not None
    return {part.node: part.gpus for part in found.allocation.parts}


def test_positions_become_nvmls_indices_and_are_kept_when_slurm_says_them_no_more() -> None:
    kept = Kept()
    kept.look(running(), positions={"7": {"a1": (0, 2)}}, devices={"a1": (5, 4, 1)})
    assert parts(kept.jobs["7"]) == {"a1": (1, 5)}
    kept.look(running(), devices={"a1": (5, 4, 1)})
    kept.look(running(state="COMPLETED", end_time=T + 20), devices={"a1": (5, 4, 1)})
    assert parts(kept.jobs["7"]) == {"a1": (1, 5)}


def test_a_pinned_job_counts_with_the_lowest_free_gpus() -> None:
    kept = Kept()
    pin = job(id="8", reservation=LEASE, req_nodes=("a1",), reason="Resources")
    kept.look(running(), pin, positions={"7": {"a1": (0, 2)}})
    pinned = kept.jobs["8"]
    assert (pinned.state, parts(pinned), pinned.attempt) == ("STARTING", {"a1": (1, 3)}, 1)
    kept.look(running(), running(id="9"), pin, positions={"7": {"a1": (0, 2)}, "9": {"a1": (1, 4)}})
    assert parts(kept.jobs["8"]) == {"a1": (3, 5)}, "Slurm gave one of them away"
    kept.look(running(), running(id="9"), job(id="8"), positions={"7": {"a1": (0, 2)}, "9": {"a1": (1, 4)}})
    assert (kept.jobs["8"].state, kept.jobs["8"].allocation, kept.jobs["8"].attempt) == ("PENDING", None, 0)
    assert kept.runs.keys() == {("7", 1), ("9", 1)}, "a pin is no attempt"


def test_nodes_named_by_a_user_outlive_a_pin() -> None:
    kept = Kept()
    kept.look(job(req_nodes=("a1", "a2")))
    kept.look(job(req_nodes=("a2",), reservation=LEASE), now=T + 105)
    facts = kept.jobs["7"].slurm
    assert facts is not None
    assert (facts.nodelist, facts.pinned, facts.pinned_at) == (("a1", "a2"), ("a2",), T + 105)
    kept.look(job(req_nodes=("a2",), reservation=LEASE, priority=9), now=T + 110)
    later = kept.jobs["7"].slurm
    assert later is not None
    assert (later.pinned_at, kept.jobs["7"].spec.nodelist) == (T + 105, ("a1", "a2"))


def test_a_hold_that_the_lease_caused_is_no_users_and_is_remembered_until_undone() -> None:
    kept, seen = Kept(), []
    for one in (
        job(reservation=LEASE, req_nodes=("a1",)),
        job(priority=0, reason="BadConstraints"),  # Slurm has taken it out of the lease
        job(),
    ):
        kept.look(one)
        facts = kept.jobs["7"].slurm
        assert facts is not None
        seen.append((facts.leased, kept.jobs["7"].held_by))
    assert seen == [(True, ""), (True, ""), (False, "")]
    kept.look(job(priority=0, reason="BadConstraints"))
    assert kept.jobs["7"].slurm.leased is False, "it was not in the lease"  # type: ignore[union-attr]


GRES = """
AutoDetect=off
NodeName=n[1-2] Name=gpu Type=a File=/dev/nvidia3   # the first
Name=gpu nodename=n1 Type=b File=/dev/nvidia[1,0] Cores=1
NodeName=n1 Name=gpu Type=a \\
  File=/dev/nvidia2
NodeName=n3 AutoDetect=nvml
Name=mps Count=100
"""


def test_gres_conf_names_device_files_by_position() -> None:
    assert minors_of(GRES, "n1", ("a", "b")) == (3, 2, 1, 0)
    assert minors_of(GRES, "n1", ("b", "a")) == (1, 0, 3, 2), "one type after the other, as slurm.conf has them"
    assert minors_of(GRES, "n2", ("a",)) == (3,)
    assert minors_of(GRES, "n3", ("a",)) == (), "as NVML counts"
    assert minors_of(GRES, "n4", ()) is None
    assert minors_of("Name=gpu File=/dev/nvidia[3", "n4", ()) is None


@given(st.permutations(range(8)), st.permutations(range(8)))
def test_positions_lead_to_the_gpu_whose_device_file_stands_there(order: list[int], minors: list[int]) -> None:
    """``order``: minor numbers by position; ``minors``: by NVML's index."""
    wiring = Wiring(gpus=tuple(GpuWiring(index=i, minor=minor) for i, minor in enumerate(minors)))
    found = indices_by_position(tuple(order), wiring)
    assert [minors[index] for index in found] == order
    assert indices_by_position(tuple(order), None) == tuple(order)


# -- cost --------------------------------------------------------------------------------------------------------


def test_repeated_answers_of_slurm_are_skipped() -> None:
    kept = Kept()
    jobs = [job(id=str(n), raw_id=str(n)) for n in range(2500)]
    assert len(kept.look(*jobs)) == 2500
    assert kept.look(*copy.deepcopy(jobs)) == []
    older = [msgspec.structs.replace(one, priority=6) for one in jobs]
    older[0] = running(id="0")
    assert [len(kept.look(*older)) for _ in range(4)] == [1 + MAX_DRIFTS, MAX_DRIFTS, 2499 - 2 * MAX_DRIFTS, 0]
    limited = [msgspec.structs.replace(one, reason="QOSMaxGRESPerUser") for one in jobs[1:]]
    assert len(kept.look(*limited)) == 2499, "nor that they may not start"
    held = [msgspec.structs.replace(one, priority=0, reason="JobHeldAdmin") for one in jobs]
    assert len(kept.look(*held)) == 2500, "that somebody holds them is no drift"


# -- any story, against a reference ------------------------------------------------------------------------------


class Story:
    """One Slurm job from its submission on, and what of it must be in the store whenever one looks."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.runs: dict[int, tuple[float, float | None, str | None]] = {}
        self.now, self.restarts, self.submit, self.state = T, 0, T, "PENDING"
        self.end: float | None = None

    def step(self) -> None:
        self.now += self.draw(st.integers(1, 50))
        ways = {
            "PENDING": ["RUNNING", "CANCELLED", "PENDING"],
            "RUNNING": ["SUSPENDED", "COMPLETING", "FAILED", "TIMEOUT", "PENDING", "RUNNING"],
            "SUSPENDED": ["RUNNING", "CANCELLED"],
            "COMPLETING": ["COMPLETED", "FAILED"],
        }
        was, self.state = self.state, self.draw(st.sampled_from(ways.get(self.state, [self.state])))
        attempt = self.restarts + 1
        if was == "PENDING" and self.state == "RUNNING":
            self.runs[attempt] = (self.now, None, None)
        if was == "RUNNING" and self.state == "PENDING":
            self.runs[attempt] = (self.runs[attempt][0], self.now, "PENDING")
            self.restarts, self.submit = self.restarts + 1, self.now
        if was != self.state and self.state in ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT") and attempt in self.runs:
            self.runs[attempt] = (self.runs[attempt][0], self.now, self.state)
        self.end = self.now if self.state != was else self.end

    def seen(self) -> SlurmJob:
        begun = self.runs.get(self.restarts + 1)
        over = self.state in ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT")
        return job(
            state=self.state, reason="None", submit_time=self.submit,
            restarts=self.restarts, start_time=begun[0] if begun else self.end if over else None,
            end_time=self.end if over else None, node_names=("a1",) if begun else (),
        )  # fmt: skip


def story(draw: Any) -> Iterator[Story]:
    one = Story(draw)
    for _ in range(draw(st.integers(1, 12))):
        one.step()
        yield one


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_story_seen_at_any_times_is_recorded_correctly(data: st.DataObject) -> None:
    """Looks and restarts of the controller at any time: the state, the attempts seen and their times are Slurm's."""
    kept = Kept()
    for one in story(data.draw):
        if data.draw(st.booleans()):
            continue
        if data.draw(st.integers(0, 4)) == 0:
            kept.again()
        kept.look(one.seen(), now=one.now)
        found, begun = kept.jobs["7"], one.runs.get(one.restarts + 1)
        assert found.state == {"SUSPENDED": "RUNNING"}.get(one.state, one.state)
        assert (found.allocation is not None) == (found.start_time is not None)
        assert found.attempt == one.restarts + (begun is not None)
        assert found.start_time == (begun[0] if begun is not None else None)
        assert begun is None or ("7", found.attempt) in kept.runs
        for (_, attempt), run in kept.runs.items():
            start, end, outcome = one.runs[attempt]
            if attempt < one.restarts and end is not None and len(run) == 3:
                end = run[1]  # Slurm has requeued it since: when it did so before, it does not say
            assert tuple(run) == ((start,) if end is None else (start, end, outcome)), attempt
        events = [event.kind for event in kept.events]
        assert events.count("running") == len(kept.runs)
        assert events.count("ended") == (found.state in ENDED)
