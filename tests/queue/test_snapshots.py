"""From the store to what is decided on: dependencies, GPUs that are not free yet, nodes that are avoided."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.model.arrays import restricted_row
from gpusched.model.interference import JobClassEstimate
from gpusched.model.jobs import (
    Allocation,
    Dependency,
    DependencyKind,
    Elastic,
    Ending,
    JobRecord,
    JobState,
    NodeAllocation,
    Resizes,
)
from gpusched.model.policy import PolicySpec
from gpusched.model.progress import JobProgress
from gpusched.model.readings import Gpu, GpuProcess, NodeReading, NodeState
from gpusched.model.reservations import Reservation
from gpusched.model.resources import SharingSettings
from gpusched.model.slices import Cut, MigSlice, SliceProfile
from gpusched.model.slurm import SlurmFacts
from gpusched.model.snapshot import NodeView, PendingView
from gpusched.queue import array_limit
from gpusched.queue.array_limit import ArrayTaskLimit
from gpusched.queue.dependencies import Dependencies
from gpusched.queue.snapshots import build_snapshot, snapshot_of_store, uncleaned_gpus
from gpusched.queue.store import CutState, NodeRecord, RankRecord, RunRecord, Store
from tests import builders
from tests.builders import spec
from tests.controller.applying import NOW
from tests.controller.imagined import GPUS, Host, inventory, on_demand, reading_of

_S = JobState


def job(job_id: str, state: JobState = _S.PENDING, **changes: Any) -> JobRecord:
    return builders.job(job_id, state, **({"submit_time": NOW, "user": "u"} | changes))


def on(job_id: str, *nodes: str, gpus: tuple[int, ...] = (1,)) -> Allocation:
    parts = [NodeAllocation(rank=i, node=n, gpus=gpus, cores=1, memory_mib=1) for i, n in enumerate(nodes)]
    return Allocation(job_id, tuple(parts))


def seen(
    *jobs: JobRecord, others: tuple[JobRecord, ...] = (), asked: list[str] | None = None, **more: Any
) -> dict[str, Any]:
    """Views of what waits and runs, by id, and of nodes, by name."""

    def lookup(job_id: str) -> list[JobRecord]:
        if asked is not None:
            asked.append(job_id)
        return [other for other in others if job_id in (other.id, other.array_id)]

    fields = {"ranks": (), "usage": {}, "array_limits": {}, "now": NOW, "records": {}, "inventory": inventory()}
    pending = [j for j in jobs if j.state is _S.PENDING]
    active = [j for j in jobs if j.state is not _S.PENDING]
    more = {"policies": {}} | more
    snapshot = build_snapshot(active=active, pending=pending, lookup=lookup, **fields | more)
    views = [*snapshot.pending, *snapshot.running]
    return {view.id: view for view in views} | {node.name: node for node in snapshot.nodes}


def verdict(kind: str, *states: JobState, **changes: Any) -> tuple[str, str]:
    """Return the verdict on a job that depends on others, the tasks of one array, in these states."""
    others = tuple(job(f"x_{i}", state, array_id="x", **changes) for i, state in enumerate(states))
    waits = job("w", spec=spec(dependencies=(Dependency(DependencyKind(kind), "x"),)))
    view: PendingView = seen(waits, others=others)["w"]
    return view.dependency, view.dependency_message


@pytest.mark.parametrize(
    ("kind", "met", "waits", "never"),
    [
        ("afterok", {_S.COMPLETED}, {_S.PENDING, _S.STARTING, _S.RUNNING, _S.COMPLETING}, {_S.FAILED, _S.CANCELLED}),
        ("afternotok", {_S.FAILED, _S.CANCELLED, _S.TIMEOUT}, {_S.PENDING, _S.RUNNING, _S.COMPLETING}, {_S.COMPLETED}),
        ("afterany", {_S.COMPLETED, _S.FAILED, _S.CANCELLED}, {_S.PENDING, _S.RUNNING, _S.COMPLETING}, set()),
    ],
)
def test_dependencies_on_an_end(kind: str, met: set[JobState], waits: set[JobState], never: set[JobState]) -> None:
    for states, expected in ((met, ""), (waits, "waiting"), (never, "never")):
        assert {state: verdict(kind, state)[0] for state in states} == dict.fromkeys(states, expected)


def test_after_is_met_by_a_start_and_by_what_will_never_start() -> None:
    assert verdict("after", _S.PENDING)[0] == "waiting"
    assert verdict("after", _S.RUNNING, start_time=NOW) == ("", "")
    assert verdict("after", _S.PENDING, start_time=NOW) == ("", ""), "it is tried again"
    assert verdict("after", _S.CANCELLED) == ("", "")
    assert verdict("after", _S.FAILED)[0] == "never", "its launch failed"


def test_all_tasks_of_an_array_count_as_dependencies_and_their_states_are_named() -> None:
    assert verdict("afterok", _S.COMPLETED, _S.COMPLETED) == ("", "")
    one = verdict("afterok", _S.COMPLETED, _S.RUNNING)
    assert one == ("waiting", "afterok: waits for job x_1 (RUNNING)")
    two = verdict("afterok", _S.PENDING, _S.RUNNING)
    assert two == ("waiting", "afterok: waits for job x_0 (PENDING) and 1 more")
    many = verdict("afterok", _S.PENDING, *[_S.RUNNING] * 3)
    assert many == ("waiting", "afterok: waits for job x_0 (PENDING) and 3 more")
    lost = verdict("afterok", _S.RUNNING, _S.FAILED)
    assert lost == ("never", "afterok:x: job x_1 ended FAILED")
    assert verdict("afterok") == ("never", "afterok:x: no such job")


def test_the_reason_is_of_the_worst_dependency_and_the_first_of_equal_ones() -> None:
    ok, any_ = DependencyKind.AFTEROK, DependencyKind.AFTERANY
    others = (job("a", _S.RUNNING), job("b", _S.COMPLETED), job("c", _S.RUNNING), job("d", _S.FAILED))
    asked: list[str] = []

    def depends(job_id: str, *names: str) -> JobRecord:
        return job(job_id, spec=spec(dependencies=tuple(Dependency(any_ if n == "d?" else ok, n[0]) for n in names)))

    jobs = [depends("1", "b", "a", "c"), depends("2", "a", "d", "c"), depends("3", "b", "d?"), job("4")]
    views = seen(*jobs, others=others, asked=asked)
    assert [views[n].dependency for n in "1234"] == ["waiting", "never", "", ""]
    assert views["1"].dependency_message == "afterok: waits for job a (RUNNING)"
    assert views["2"].dependency_message == "afterok:d: job d ended FAILED"
    assert sorted(asked) == ["a", "b", "c", "d"], "each is asked for once"


@pytest.mark.parametrize("kind", ["afterok", "afternotok", "afterany", "after", "aftercorr"])
def test_only_by_aftercorr_a_task_waits_for_one_task_alone(kind: str) -> None:
    ended = _S.FAILED if kind == "afternotok" else _S.COMPLETED
    others = tuple(job(f"x_{i}", state, array_id="x", start_time=None if i else NOW)
                   for i, state in enumerate((ended, _S.STARTING)))  # fmt: skip
    waits = spec(dependencies=(Dependency(DependencyKind(kind), "x"),))
    tasks = [job(f"w_{i}", array_id="w", array_index=i, spec=waits) for i in (0, 1)]
    views = seen(*tasks, others=others)
    assert [views[one.id].dependency for one in tasks] == ["" if kind == "aftercorr" else "waiting", "waiting"]
    assert views["w_0"].dependency_message == ("" if kind == "aftercorr" else f"{kind}: waits for job x_1 (STARTING)")


def test_of_one_name_the_earliest_job_of_a_user_runs_alone() -> None:
    alone = spec(name="n", dependencies=(Dependency(DependencyKind.SINGLETON, ""),))
    waits = [job(f"w{n}", spec=alone, submit_time=NOW + n) for n in (3, 1, 2, 0)]
    waits.append(job("a_4", array_id="a", spec=alone, submit_time=NOW + 4))
    waits.append(job("a_5", array_id="a", spec=alone, submit_time=NOW + 4))
    others = [job("o", user="other", spec=spec(name="n")), job("m", spec=spec(name="m")), job("n")]

    def verdicts(*active: JobRecord) -> list[tuple[str, str]]:
        views = seen(*waits, *others, *active)
        return [(views[f"w{n}"].dependency, views[f"w{n}"].dependency_message) for n in range(4)]

    first = "singleton: waits for job w0 (PENDING)"
    assert verdicts() == [
        ("", ""), ("waiting", first), ("waiting", f"{first} and 1 more"), ("waiting", f"{first} and 2 more")
    ]  # fmt: skip
    on_r = "singleton: waits for job r (RUNNING)"
    runs = job("r", _S.RUNNING, spec=spec(name="n"), submit_time=NOW + 9)
    assert [message for _, message in verdicts(runs)] == [on_r, *(f"{on_r} and {n} more" for n in (1, 2, 3))]
    last = seen(*waits)
    assert last["a_4"].dependency_message == last["a_5"].dependency_message == f"{first} and 3 more"
    ours = msgspec.structs.replace(runs, id="a_3", array_id="a", submit_time=NOW + 4)
    alone_now = seen(*waits[4:], ours)
    assert [alone_now[name].dependency for name in ("a_4", "a_5")] == ["", ""], "tasks of an array run together"


def test_each_task_waits_for_its_own_partner_whether_asked_for_one_by_one_or_at_once() -> None:
    ends = {0: _S.COMPLETED, 1: _S.FAILED, 2: _S.RUNNING, 3: _S.COMPLETED, 7: _S.CANCELLED}
    others = [job(f"x_{i}", state, array_id="x", array_index=i) for i, state in ends.items()]
    others.append(restricted_row(job("x", array_id="x"), ((4, 5),)))

    def lookup(name: str) -> list[JobRecord]:
        return [one for one in others if name in (one.id, one.array_id)]

    def completed(array_id: str, indices: Sequence[int]) -> dict[int, bool]:
        assert array_id == "x"
        return {i: ends[i] is _S.COMPLETED for i in indices if i in ends and ends[i] is not _S.RUNNING}

    corr = (Dependency(DependencyKind.AFTERCORR, "x"),)
    row = restricted_row(job("w", array_id="w", spec=spec(dependencies=corr)), ((0, 7),))
    waits = {i: ("waiting", f"aftercorr: waits for job x_{i}") for i in (2, 4, 5)}
    failed, cancelled = (f"aftercorr:x_{index}: it did not complete" for index in (1, 7))
    missing = "aftercorr:x_6: no such job"
    for asked in (Dependencies(lookup, []), Dependencies(lookup, [], completed)):
        assert dict(asked.of_tasks(row, None)) == {
            0: ("", ""), 1: ("never", failed), 3: ("", ""), 6: ("never", missing), 7: ("never", cancelled),
            **waits,
        }  # fmt: skip
        assert asked.of_tasks(row, 1) == [(0, ("", ""))]
        assert asked.of_tasks(row, 2) == asked.of_tasks(row, 9) == [(0, ("", "")), (3, ("", ""))]
        assert asked.of_tasks(restricted_row(row, ((1, 2), (6, 6))), 9) == [(2, waits[2])], "one that has the reason"
        assert asked.of_tasks(restricted_row(row, ((1, 1), (6, 6))), 9) == [(6, ("never", missing))]


def test_a_job_that_names_nodes_in_slurm_awaits_the_end_of_their_reservations() -> None:
    held = [
        Reservation(name=name, nodes=(node,), begin=NOW + begin, end=NOW + end)
        for name, node, begin, end in (("a", "n0", 500, 900), ("b", "n1", 1000, 2000), ("c", "n2", -5, 9000))
    ]
    names = SlurmFacts(nodelist=("n0", "n1"))

    def when(held: Sequence[Reservation] = held, facts: SlurmFacts | None = names, **changes: Any) -> Any:
        view: PendingView = seen(job("w", slurm=facts, **changes), reservations=held)["w"]
        return view.eligible_time and view.eligible_time - NOW, view.awaits

    at, awaits = when()
    assert at == 2000, "its limit of ten minutes does not fit before, nor between"
    assert awaits.startswith("n0, which it names, is reserved")
    assert when(eligible_time=NOW + 1999)[0] == 2000
    assert when(eligible_time=NOW + 2001)[0] == 2001
    assert when(spec=spec(time_limit_s=500)) == (None, "")
    assert when(facts=None, eligible_time=NOW + 7) == when(held=(), eligible_time=NOW + 7) == (7, "")
    assert when(facts=SlurmFacts()) == when(spec=spec(nodelist=("n0",))) == (None, "")


def test_gpus_of_earlier_attempts_stay_taken_until_they_are_known_to_be_gone() -> None:
    active = [job("a", _S.RUNNING, attempt=2)]

    def left(**changes: Any) -> dict[str, dict[int, str]]:
        fields = {"job_id": "a", "attempt": 1, "rank": 0, "node": "n0", "runtime": "podman", "gpus": (1, 2)}
        return uncleaned_gpus(active, [RankRecord(**fields | changes)])

    why = "attempt 1 of job a may still be running there"
    assert left() == {"n0": {1: why, 2: why}}
    assert left(attempt=2) == {}, "the present one holds them itself"
    assert left(job_id="b", attempt=2) == {"n0": dict.fromkeys((1, 2), why.replace("1 of job a", "2 of job b"))}
    assert left(gone=True) == {}
    message = left(stuck=True, trouble="busy")["n0"][1]
    assert message == "attempt 1 of job a cannot be killed (busy); kill it there, or reboot"
    assert left(stuck=True)["n0"][2] == "attempt 1 of job a cannot be killed; kill it there, or reboot"


def test_which_gpus_two_jobs_may_share() -> None:
    """Whose memory is known, on which no stranger is, and of which nothing of an earlier attempt is left."""
    server = GpuProcess(pid=1, command="nvidia-cuda-mps-server")
    gpus = (
        Gpu(index=0, memory_total_mib=81920),
        Gpu(index=1, memory_total_mib=81920, processes=(GpuProcess(pid=9, command="x"),)),
        Gpu(index=2),
        Gpu(index=3, memory_total_mib=81920, processes=(server,)),
    )
    reading = msgspec.structs.replace(reading_of(Host("n0"), NOW), gpus=gpus)
    records = {"n0": NodeRecord(name="n0", state=NodeState.MIXED, reading=reading)}
    holds = job("a", _S.RUNNING, allocation=on("a", "n0", gpus=(0, 1, 2, 3)), start_time=NOW)
    left = RankRecord(job_id="old", attempt=1, rank=0, node="n0", runtime="podman", gpus=(0,))

    def shareable(mode: str, *ranks: RankRecord) -> dict[int, int]:
        declared = inventory(sharing=SharingSettings(mode=mode))  # type: ignore[arg-type]
        return dict(seen(holds, records=records, inventory=declared, ranks=ranks)["n0"].shareable)

    assert shareable("mps") == {0: 79 << 10, 3: 79 << 10}, "1 GiB is the driver's"
    assert shareable("time-slicing") == {0: 79 << 10}
    assert shareable("mps", left) == {3: 79 << 10}
    assert dict(seen(holds, records=records)["n0"].shareable) == {}


def test_which_nodes_and_gpus_new_jobs_may_have() -> None:
    def record(name: str, state: NodeState, reason: str = "", **fields: Any) -> NodeRecord:
        reading = reading_of(Host(name), NOW)
        return NodeRecord(name=name, state=state, reason=reason, reading=reading, **fields)

    closed = {NodeState.DOWN, NodeState.DRAINED, NodeState.DRAINING, NodeState.UNKNOWN}
    for state in NodeState:
        view: NodeView = seen(records={"n0": record("n0", state, "n0: no answer")})["n0"]
        assert (view.available, view.unavailable_reason) == (
            (False, f"{state}: no answer") if state in closed else (True, "")
        )
    assert seen(records={"n0": record("n0", NodeState.DRAINED)})["n0"].unavailable_reason == "DRAINED"
    unread: NodeView = seen()["n0"]
    assert (unread.available, unread.unavailable_reason) == (False, "not probed yet: is the controller running?")
    rank = RankRecord(job_id="old", attempt=1, rank=0, node="n0", runtime="podman", gpus=(3,))
    runs = job("r", _S.RUNNING, allocation=on("r", "n0", gpus=(0,)), start_time=NOW)
    view = seen(runs, records={"n0": record("n0", NodeState.MIXED, links={0: {1: 2}})}, ranks=[rank])["n0"]
    assert view.blocked == {3: "BUSY: attempt 1 of job old may still be running there"}
    assert (view.gpus, view.links) == (tuple(range(GPUS)), {0: {1: 2}})
    lost = NodeReading(node="n0", time=NOW, source="nvml", gpus=reading_of(Host("n0"), NOW).gpus[:3])
    view = seen(records={"n0": NodeRecord(name="n0", state=NodeState.IDLE, reading=lost)})["n0"]
    assert list(view.blocked) == [3]


def test_slices_of_a_reading_and_which_of_them_cannot_be_had() -> None:
    slices = tuple(MigSlice(gpu=1, start=n, profile="1g.10gb", uuid=f"MIG-{n}", gi=n, ci=0) for n in range(3))
    slices += (MigSlice(gpu=1, start=3, profile="1g.10gb", gi=3),)
    ours = GpuProcess(pid=6, container="gpusched-r-1-0", gi=1)
    gpus = (
        Gpu(index=0),
        Gpu(index=1, mig_mode=True, slices=slices, processes=(GpuProcess(pid=7, user="eve", gi=2), ours)),
        Gpu(index=2, mig_mode=True),
        Gpu(index=3),
    )
    records = {
        "n0": NodeRecord(
            name="n0", state=NodeState.IDLE, reading=NodeReading(node="n0", time=NOW, source="nvml", gpus=gpus)
        )
    }
    runs = job("r", _S.RUNNING, allocation=on("r", "n0", gpus=(2001,)), start_time=NOW)
    view: NodeView = seen(runs, records=records)["n0"]
    assert [(one.number, one.profile) for one in view.slices] == [(2000 + n, "1g.10gb") for n in range(4)]
    assert view.blocked == {
        2: "UNUSABLE: MIG is on, without slices; 'nvidia-smi -i 2 -mig 0' as root turns it off",
        2002: "BUSY: foreign: pid 7 (eve)",
        2003: "UNUSABLE: no compute instance spans it; 'nvidia-smi mig -cci' as root makes one",
    }
    unknown = msgspec.structs.replace(gpus[1], processes=(GpuProcess(pid=7, user="eve"),))
    reading = NodeReading(node="n0", time=NOW, source="nvml", gpus=(gpus[0], unknown))
    view = seen(runs, records={"n0": NodeRecord(name="n0", state=NodeState.IDLE, reading=reading)})["n0"]
    assert view.blocked.keys() == {2, 3, 2000, 2002, 2003}, "it may be in any that no job has"


def test_a_gpu_whose_cut_failed_can_be_cut_again_from_the_time_of_the_next_try() -> None:
    gpu = Gpu(index=1, mig_mode=True, mig_profiles=(SliceProfile(name="1g.10gb", compute=1, memory_units=1),))
    declared = on_demand()
    reading = NodeReading(node="n0", time=NOW, source="nvml", gpus=(gpu,))

    def cuttable(cut: CutState) -> set[int]:
        record = NodeRecord(name="n0", state=NodeState.IDLE, reading=reading, cuts={1: cut})
        return set(seen(records={"n0": record}, inventory=declared)["n0"].cuttable)

    failed = CutState(cut=Cut("n0", 1), began=NOW - 90, ended=NOW - 80, failures=1)
    tries = [msgspec.structs.replace(failed, retry_at=NOW + s) for s in (-1.0, 0.0, 1.0)]
    assert [cuttable(one) for one in (failed, *tries)] == [{1}, {1}, {1}, set()]


def test_running_jobs_release_at_their_limit_or_kill_time() -> None:
    timed = spec(time_limit_s=500)
    views = seen(
        job("a", _S.RUNNING, spec=timed, allocation=on("a", "n0", "gone"), start_time=NOW + 5),
        job("b", _S.STARTING, spec=timed, allocation=on("b", "n1")),
        job("c", _S.COMPLETING, spec=timed, allocation=on("c", "n2"), start_time=NOW,
            ending=Ending(outcome=_S.TIMEOUT, reason="", kill_at=NOW + 30)),
        job("d", _S.RUNNING, allocation=on("d", "gone"), start_time=NOW),
        job("e", _S.COMPLETING),
    )  # fmt: skip
    assert [(n, views[n].start_time - NOW, views[n].expected_end - NOW) for n in "abc"] == [
        ("a", 5, 505), ("b", 0, 500), ("c", 0, 30),
    ]  # fmt: skip
    assert [part.node for part in views["a"].allocation.parts] == ["n0"], "one has left the inventory"
    assert views.keys() & {"d", "e"} == set()


def test_a_jobs_end_is_by_the_progress_of_its_present_attempt_and_its_speed_by_all() -> None:
    """Ten steps in a hundred seconds on one GPU, of a hundred; before that twice as fast on two."""

    def said(attempt: int, gpus: int, seconds: float) -> JobProgress:
        return JobProgress(
            job_id="j", attempt=attempt, gpus=gpus, step=10.0, of=100.0, at=NOW, first_step=0.0, first_at=NOW - seconds,
            since_step=0.0, since=NOW - seconds,
        )  # fmt: skip

    runs = job("j", _S.RUNNING, attempt=2, start_time=NOW - 100, allocation=on("j", "n0"))
    both = (said(1, 2, 50), said(2, 1, 100))
    view = seen(runs, progress={"j": both})["j"]
    assert (view.own_end, view.left, view.speeds) == (NOW + 900, 90.0, {1: 0.1, 2: 0.2})
    for attempts in ((), both[:1], (both[1], msgspec.structs.replace(both[0], attempt=3))):
        view = seen(runs, progress={"j": attempts})["j"]
        assert (view.own_end, view.left) == (None, 90.0 if attempts else None)
    third = msgspec.structs.replace(runs, attempt=3)
    assert seen(third, progress={"j": (both[0], said(2, 1, 50), said(3, 1, 100))})["j"].own_end == NOW + 900
    waits = seen(job("j"), progress={"j": both})["j"]
    assert (waits.left, waits.speeds) == (90.0, {1: 0.1, 2: 0.2})


def test_an_arrays_room_is_what_its_limit_leaves() -> None:
    tasks = [job(f"x_{i}", _S.RUNNING, array_id="x", allocation=on(f"x_{i}", "n0")) for i in range(2)]
    waits = [job("x_9", array_id="x"), job("y_0", array_id="y"), job("z_0", array_id="z"), job("plain")]
    limits = {"x": 3, "y": 3}
    views = seen(*tasks, *waits, array_limits=limits, estimates={"plain": 7.0})
    assert [views[w.id].array_room for w in waits] == [1, 3, None, None]
    assert [views[w.id].estimate_s for w in waits] == [None, None, None, 7.0]
    assert seen(*tasks, *waits, array_limits={"x": 1})["x_9"].array_room == 0


@pytest.mark.parametrize(
    ("asked", "at_once"),
    [
        ({}, 11),  # 12 GPUs, 48 cores and 192 GiB, of which one job has a GPU, 15 cores and 32 GiB
        ({"gpus_per_node": 3}, 3),
        ({"nodes": 2}, 5),
        ({"gpus_per_node": 0, "cores_per_node": 11}, 3),
        ({"gpus_per_node": 0, "cores_per_node": 12}, 2),
        ({"memory_mib_per_node": 80 << 10}, 2),
        ({"memory_mib_per_node": (80 << 10) + 1}, 1),
        ({"cores_per_node": 34}, 0),
        ({"share": "pairs"}, 33),
        ({"partition": "left"}, 0),
        ({"elastic": Elastic(sizes=(2, 4), base_gpus=4, base_cores=40, base_memory_mib=1)}, 5),
    ],
)
def test_of_an_arrays_tasks_as_many_are_considered_as_could_start_and_twenty_more(
    asked: dict[str, Any], at_once: int
) -> None:
    part = NodeAllocation(rank=0, node="n0", gpus=(1,), cores=15, memory_mib=32 << 10)
    runs = job("r", _S.RUNNING, allocation=Allocation("r", (part,)))
    row = job("a", array_id="a", spec=spec(**asked))

    def considered(row: JobRecord, limit: int | None = None, running: int = 0) -> int:
        limits = {} if limit is None else {"a": limit}
        room = ArrayTaskLimit(inventory(), {"p": PolicySpec(name="easy")}, [runs], limits, {"a": running})
        return room.for_tasks(row, NOW)

    assert considered(row) == at_once + 20
    assert considered(msgspec.structs.replace(row, eligible_time=NOW)) == at_once + 20
    assert considered(msgspec.structs.replace(row, eligible_time=NOW + 1)) == 1
    assert considered(msgspec.structs.replace(row, held_by="user")) == 1
    assert considered(row, limit=9, running=4) == 6, "as many as its limit leaves, and one more"
    assert considered(row, limit=9, running=12) == 1
    assert considered(row, limit=99) == min(at_once + 20, 100)


@pytest.mark.parametrize(
    ("policy", "at_once"),
    [
        (PolicySpec(name="easy"), 8),
        (PolicySpec(name="elastic", sizes="greedy-gain"), 12),
        (PolicySpec(name="gist", agent="gist", fallback=PolicySpec(name="easy")), 12),
        (PolicySpec(name="easy", fallback=PolicySpec(name="elastic", sizes="greedy-gain")), 12),
    ],
)
def test_gpus_that_a_policy_may_take_back_count_as_free_for_tasks(policy: PolicySpec, at_once: int) -> None:
    runs = [job("r", _S.RUNNING, allocation=on("r", "n0", gpus=(0, 1, 2, 3))), job("s", _S.STARTING)]
    left = job("l", _S.RUNNING, allocation=on("l", "gone"))
    limit = ArrayTaskLimit(inventory(), {"p": policy}, [*runs, left], {}, {})
    assert limit.for_tasks(job("a", array_id="a"), NOW) == at_once + 20


def test_slices_count_by_their_part_of_a_gpu_for_tasks() -> None:
    whole, slices = (spec(profile=profile) for profile in ("", "3g.20gb"))
    runs = [job(f"r{i}", _S.RUNNING, spec=slices, allocation=on(f"r{i}", "n0")) for i in range(4)]
    limit = ArrayTaskLimit(inventory(), {"p": PolicySpec(name="easy")}, runs, {}, {})
    assert limit.for_tasks(job("a", array_id="a", spec=whole), NOW) == 10 + 20
    assert limit.for_tasks(job("a", array_id="a", spec=slices), NOW) == 20 + 20


@pytest.mark.parametrize(
    ("tasks", "simulated"),
    [
        (11, [(i, 0) for i in range(11)]),
        (12, [(0, 1), (2, 1), (4, 1), *((i, 0) for i in range(6, 12))]),
        (15, [(0, 2), (3, 2), (6, 2), *((i, 0) for i in range(9, 15))]),
    ],
)
def test_a_simulated_task_stands_for_its_followers_but_the_last_are_simulated_each(
    tasks: int, simulated: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three run at once; so in three parts, of two tasks or more, and the last six by themselves."""
    monkeypatch.setattr(array_limit, "MAX_SIMULATED_PARTS", 3)
    whole = job("a", array_id="a", attempt=0, spec=spec(gpus_per_node=GPUS))
    limit = array_limit.ArrayTaskLimit(inventory(), {}, (), {}, {})
    assert limit.ahead(restricted_row(whole, ((0, tasks - 1),))) == simulated


def test_at_least_as_many_parts_are_simulated_as_can_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    row = job("a", array_id="a", attempt=0, spec=spec(gpus_per_node=GPUS))
    for most, parts in ((7, 6), (2, 3)):
        monkeypatch.setattr(array_limit, "MAX_SIMULATED_PARTS", most)
        found = ArrayTaskLimit(inventory(), {}, (), {}, {}).ahead(restricted_row(row, ((0, 17),)))
        assert [behind for _, behind in found] == [12 // parts - 1] * parts + [0] * 6


@pytest.mark.parametrize(("asked", "at_once"), [({}, 1), ({"gpus_per_node": 5, "nodes": 3}, None), ({"nodes": 3}, 2)])
def test_of_an_array_of_which_one_runs_at_once_or_none_fits_one_is_simulated_after_the_other(
    asked: dict[str, Any], at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(array_limit, "MAX_SIMULATED_PARTS", 3)
    row = restricted_row(job("a", array_id="a", attempt=0, spec=spec(**{"gpus_per_node": GPUS} | asked)), ((5, 12),))
    limits = {} if at_once is None else {"a": at_once}
    simulated = [(5, 1), (7, 1), (9, 1), (11, 0), (12, 0)]
    assert ArrayTaskLimit(inventory(), {}, (), limits, {}).ahead(row) == simulated


@pytest.mark.parametrize(
    ("asked", "failed_on", "avoided"),
    [
        ({}, ("n0",), ("n0",)),
        ({"nodes": 2}, ("n0",), ("n0",)),
        ({"nodes": 3}, ("n0",), ()),
        ({"nodes": 2, "exclude": ("n1",)}, ("n0",), ()),
        ({"exclude": ("n1",)}, ("n0",), ("n0",)),
        ({"nodelist": ("n0",)}, ("n0",), ()),
        ({"nodelist": ("n0", "n2")}, ("n0",), ("n0",)),
        ({"gpu_types": ("A100",)}, ("n0",), ()),
        ({"gpu_types": ("A100", "H100")}, ("n0",), ("n0",)),
        ({"gpu_types": ("H100",)}, ("n0",), ("n0",)),
        ({"partition": "left"}, ("n0",), ()),
        ({}, (), ()),
    ],
)
def test_nodes_where_it_failed_are_avoided_while_enough_others_are_left(
    asked: dict[str, Any], failed_on: tuple[str, ...], avoided: tuple[str, ...]
) -> None:
    whole = inventory()
    (part,) = whole.partitions
    types = dict(zip(("n0", "n1", "n2"), ("A100", "H100", "H100"), strict=True))
    nodes = tuple(msgspec.structs.replace(n, gpu_type=types[n.name]) for n in part.nodes)
    declared = msgspec.structs.replace(whole, partitions=(msgspec.structs.replace(part, nodes=nodes),))
    waits = job("w", spec=spec(**asked), excluded_nodes=failed_on)
    assert seen(waits, inventory=declared)["w"].excluded_nodes == avoided


def test_a_requeued_resizable_job_starts_at_its_base_size_without_a_sizing_rule() -> None:
    sizes = Elastic(sizes=(2, 4, 8), base_gpus=2, base_cores=2, base_memory_mib=2048)
    last = spec(nodes=2, gpus_per_node=4, cores_per_node=4, memory_mib_per_node=4096, elastic=sizes)
    waits, rigid = job("w", spec=last), job("r", spec=spec(gpus_per_node=4))
    views = seen(waits, rigid, policies={"p": PolicySpec(name="easy")})
    found = views["w"].spec
    assert (found.nodes, found.gpus_per_node, found.cores_per_node, found.memory_mib_per_node) == (1, 2, 2, 2048)
    assert views["r"].spec.gpus == 4
    assert seen(waits, policies={"p": PolicySpec(name="elastic", sizes="greedy-gain")})["w"].spec == last
    wide = job("w", spec=spec(gpus_per_node=4, elastic=msgspec.structs.replace(sizes, sizes=(4, 8), base_gpus=8)))
    assert seen(wide, policies={"p": PolicySpec(name="easy")})["w"].spec.nodes == 2, "four on each node"


@pytest.mark.parametrize(
    ("policy", "finished", "believed"),
    [
        (PolicySpec(name="easy"), False, False),
        (PolicySpec(name="r", agent="rltune", fallback=PolicySpec(name="easy")), True, False),
        (PolicySpec(name="c", place="contention"), False, True),
        (PolicySpec(name="r", agent="rltune", fallback=PolicySpec(name="c", place="contention")), True, True),
    ],
)
def test_of_ended_jobs_and_classes_a_snapshot_has_what_its_policies_use(
    tmp_path: Path, policy: PolicySpec, finished: bool, believed: bool
) -> None:
    ended = job("e", _S.COMPLETED, start_time=NOW - 50, end_time=NOW - 9, spec=spec(nodes=2, gpus_per_node=3))
    with closing(Store.create_or_open(tmp_path)) as store:
        store.put_jobs([ended])
        run = RunRecord(job_id="e", attempt=1, user="u", partition="p", flavor=None, share=0.1, gpus=6,
                        start_time=NOW - 50, end_time=None, outcome=None, nodes={"n0": 3, "n1": 3})  # fmt: skip
        store.open_run(run)
        store.close_run("e", 1, NOW - 9, _S.COMPLETED)
        store.put_beliefs([JobClassEstimate(kind="k")])
        snapshot = snapshot_of_store(store, inventory(), {"p": policy}, NOW)
    assert [(one.gpus, one.nodes, one.cores, one.memory_mib, one.ran_s) for one in snapshot.finished] == (
        [(6, 2, 2, 2048, 41.0)] if finished else []
    )
    assert snapshot.beliefs == ({"k": JobClassEstimate(kind="k")} if believed else {})


def test_earlier_run_time_of_a_resized_job_is_subtracted_from_its_limit() -> None:
    resizes = Resizes(count=1, had_s=500.0)
    runs = job("j", _S.RUNNING, start_time=NOW - 10, allocation=on("j", "n0"), resizes=resizes)
    view = seen(runs)["j"]
    assert view.expected_end == NOW - 10 + 100
    assert seen(job("w", resizes=resizes))["w"].expected_s == 100.0
