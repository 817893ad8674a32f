"""Tasks of an array that share a row: everything is as if each had its own, and no row is read that need not be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gpusched.controller.estimating import EstimateWriter
from gpusched.controller.predicting import StartPredictor, compile_for
from gpusched.model.arrays import task_of
from gpusched.model.commands import AnyCommand, Cancel, Hold, Release, Requeue, SetPriority, Submit
from gpusched.model.jobs import Dependency, DependencyKind, JobState
from gpusched.model.policy import PolicySpec
from gpusched.queue import rows
from gpusched.queue.array_limit import SPARE_TASKS, ArrayTaskLimit
from gpusched.queue.dependencies import Dependencies
from gpusched.queue.snapshots import snapshot_of_store
from gpusched.queue.store import Reader
from gpusched.sched.warming import small_snapshot
from tests import builders
from tests.builders import spec
from tests.controller.applying import ALICE, NOW, InboxWorld, fresh_id
from tests.controller.imagined import GPUS, inventory
from tests.controller.site import Site

_S = JobState
ARRAY, OTHER, LAST = "0000000000a", "0000000000b", "0000000000c"
CHAIN = (Dependency(DependencyKind.CHAIN),)


@pytest.fixture
def inbox_world(tmp_path: Path) -> Iterator[InboxWorld]:
    inbox_world = InboxWorld(tmp_path)
    yield inbox_world
    inbox_world.store.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    site.turn()
    yield site
    site.store.close()


def lay(site: Site, command: AnyCommand) -> None:
    site.inbox.deliver(command)


def submit(site: Site, job_id: str = ARRAY, tasks: int = 9, **changes: Any) -> str:
    more = {k: changes.pop(k) for k in ("array", "max_running") if k in changes}
    lay(site, Submit(time=site.world.now, id=job_id, spec=spec(**changes), **{"array": tuple(range(tasks))} | more))
    return job_id


def shared(site: Site | InboxWorld) -> dict[str, str]:
    """The rows that several tasks share, and their states."""
    return {job.id: str(job.state) for job in site.store.rows() if job.tasks}


def end(site: Site, job_id: str, code: int = 0) -> None:
    (box,) = (box for _, box in site.world.running() if box.name.startswith(f"gpusched-{job_id}-"))
    site.world.end(box, code)


# -- as if each had its own row ----------------------------------------------------------------------------------

IDS = st.sampled_from((ARRAY, OTHER))
PARTS = st.one_of(
    IDS,
    st.builds("{}_{}".format, IDS, st.integers(0, 11)),
    st.builds(
        lambda a, i, n: f"{a}_[{i}-{i + n}]", IDS, st.integers(0, 9), st.integers(1, 5)
    ),
    st.builds(lambda a, i, n: f"{a}_[{i},{i + 2}-{i + 2 + n}]", IDS, st.integers(0, 6), st.integers(1, 3)),
)  # fmt: skip
COMMANDS = st.one_of(
    st.builds(lambda j: Cancel(time=NOW, job_ids=(j,)), PARTS),
    st.builds(lambda j: Hold(time=NOW, job_ids=(j,)), PARTS),
    st.builds(lambda j: Release(time=NOW, job_ids=(j,)), PARTS),
    st.builds(lambda j: Requeue(time=NOW, job_ids=(j,)), PARTS),
    st.builds(lambda j, p: SetPriority(time=NOW, job_ids=(j,), priority=p), PARTS, st.integers(-2, 2)),
)
STEPS = st.lists(st.one_of(COMMANDS, COMMANDS, st.integers(0, 3), st.none()), max_size=12)
ASKED = st.fixed_dictionaries(
    {
        "tasks": st.integers(2, 12),
        "gpus_per_node": st.sampled_from((0, 1, 3)),
        "max_running": st.sampled_from((None, None, 1, 3)),
        "hold": st.booleans(),
        "nodes": st.sampled_from((1, 1, 2)),
    }
)
NEEDS = st.sampled_from(("", "afterok", "afterany", "after", "aftercorr", "singleton", "chain"))


def played(folder: Path, first: dict[str, Any], second: dict[str, Any], needs: str, steps: list[Any]) -> Any:
    folder.mkdir(parents=True)
    site = Site(folder)
    try:
        site.turn()
        submit(site, ARRAY, **first)
        whom = "" if needs in ("singleton", "chain") else ARRAY
        submit(site, OTHER, **second, dependencies=(Dependency(DependencyKind(needs), whom),) if needs else ())
        submit(site, LAST, array=None, dependencies=(Dependency(DependencyKind.AFTERANY, ARRAY),))
        for step in steps:
            if isinstance(step, int) and (running := site.world.running()):
                site.world.end(running[step % len(running)][1], step % 2)
            elif step is not None and not isinstance(step, int):
                lay(site, step)
            site.turn()
        site.turn(2)
        shown = ("reason", "message")
        jobs = [msgspec.structs.replace(job, **dict.fromkeys(shown, "")) for job in site.store.jobs()]
        known = {job.id for job in site.store.jobs()}
        stories = {name: [(e.kind, e.time, e.user) for e in site.store.events(job_id=name)] for name in known}
        assert len(jobs) == len(known) == sum(site.store.counts().values())
        assert all(job == site.store.job(job.id) for job in site.store.jobs())
        return sorted(jobs, key=lambda job: job.id), site.world.starts, stories
    finally:
        site.store.close()


@settings(
    max_examples=10,
    deadline=None,
    phases=(Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(first=ASKED, second=ASKED, needs=NEEDS, steps=STEPS)
def test_as_if_each_task_had_its_own_row(
    tmp_path_factory: pytest.TempPathFactory,
    first: dict[str, Any],
    second: dict[str, Any],
    needs: str,
    steps: list[Any],
) -> None:
    folder = tmp_path_factory.mktemp("arrays")
    together = played(folder / "together", first, second, needs, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "MAX_SHARED_ROWS", 0)
        apart = played(folder / "apart", first, second, needs, steps)
    for here, there in zip(together, apart, strict=True):
        assert here == there


# -- rows --------------------------------------------------------------------------------------------------------


def test_a_large_array_is_one_row_until_its_tasks_start(site: Site) -> None:
    submit(site, tasks=100_000)
    site.turn(2)
    held = 3 * GPUS
    assert shared(site) == {f"{ARRAY}_[{held}-99999]": "PENDING"}
    assert site.store.counts() == {"RUNNING": held, "PENDING": 100_000 - held}
    assert len(site.store.rows()) == held + 1
    snapshot = snapshot_of_store(site.store, inventory(), {"p": PolicySpec(name="f")}, NOW)
    assert [view.id for view in snapshot.pending] == [f"{ARRAY}_{held + i}" for i in range(20)], (
        "what could start, and some"
    )
    assert snapshot.pending[-1].behind == 100_000 - held - 20
    (row,) = site.store.pending_rows()
    assert (row.reason, row.message[:15]) == ("Resources", "waits for 1 GPU")
    (submitted,) = site.store.events(job_id=ARRAY)
    assert (submitted.kind, submitted.data["tasks"]) == ("submitted", "0-99999"), "once for all"
    assert site.store.has_unended(f"{ARRAY}_500")
    assert not site.store.has_unended(f"{ARRAY}_100000")
    assert [e.kind for e in site.store.events(job_id=f"{ARRAY}_7")][:2] == ["submitted", "starting"]


def test_of_an_array_on_slices_as_many_tasks_are_considered_as_gpus_have_slices() -> None:
    """12 GPUs of seven slices each, with cores for all; seven are held, and so is a GPU."""
    (partition,) = inventory().partitions
    nodes = tuple(msgspec.structs.replace(node, cores=100) for node in partition.nodes)
    small = spec(profile="1g.10gb", memory_mib_per_node=1)
    row = builders.job("a", _S.PENDING, spec=small, array_id="a", tasks=((0, 999),))
    held = [
        builders.job("b", nodes={"n0": tuple(range(1000, 1007))}, spec=small),
        builders.job("c", nodes={"n0": (1,)}),
    ]
    asked = msgspec.structs.replace(inventory(), partitions=(msgspec.structs.replace(partition, nodes=nodes),))
    limit = ArrayTaskLimit(asked, {partition.name: PolicySpec(name="f")}, held, {}, {})
    assert limit.for_tasks(row, NOW) == 10 * 7 + SPARE_TASKS


def test_changed_tasks_get_their_own_row_and_the_rest_stays_one(site: Site) -> None:
    submit(site, tasks=1000, gpus_per_node=GPUS, nodes=2)
    site.turn(2)
    for command in (
        Hold(time=NOW, job_ids=(f"{ARRAY}_[10-19,30]",)),
        SetPriority(time=NOW, job_ids=(f"{ARRAY}_500",), priority=-5),
        Cancel(time=NOW, job_ids=(f"{ARRAY}_[900-2000]",)),
    ):
        lay(site, command)
    site.turn()
    assert shared(site) == {
        f"{ARRAY}_[1-9,20-29,31-499,501-899]": "PENDING",
        f"{ARRAY}_[10-19,30]": "PENDING",
        f"{ARRAY}_[900-999]": "CANCELLED",
    }
    reasons = {row.id: row.reason for row in site.store.pending_rows()}
    assert reasons[f"{ARRAY}_[10-19,30]"] == "JobHeldUser"
    assert reasons[f"{ARRAY}_[1-9,20-29,31-499,501-899]"] in ("Resources", "Priority")
    assert {site.store.job(f"{ARRAY}_{i}").held_by for i in (10, 19, 30)} == {"user"}  # type: ignore[union-attr]
    assert site.store.job(f"{ARRAY}_500").priority == -5  # type: ignore[union-attr]
    lay(site, Requeue(time=NOW, job_ids=(f"{ARRAY}_[990-995]",)))
    site.turn()
    assert shared(site)[f"{ARRAY}_[990-995]"] == "PENDING"
    assert shared(site)[f"{ARRAY}_[900-989,996-999]"] == "CANCELLED"
    lay(site, Cancel(time=NOW, job_ids=(ARRAY,)))
    site.turn(3)
    assert site.store.counts() == {"CANCELLED": 1000}
    assert site.store.rows_recently_ended(3)[-1].end_time is not None
    assert len(site.store.recently_ended(7)) == 7


def test_an_array_in_too_many_pieces_is_a_row_for_each_task(inbox_world: InboxWorld) -> None:
    array = inbox_world.submit(array=tuple(range(4000)))
    assert len(inbox_world.store.rows()) == 1
    assert inbox_world.say(Hold(time=NOW, job_ids=tuple(f"{array}_{i}" for i in range(0, 4000, 3)))) == ""
    assert len(inbox_world.store.rows()) == 4000
    assert {job.held_by for job in inbox_world.store.jobs()} == {"user", ""}
    assert sum(1 for job in inbox_world.store.jobs() if job.held_by) == 1334
    some = inbox_world.submit(array=tuple(range(0, 4000, 2)))
    assert len(inbox_world.store.jobs_of_array(some)) == 2000


def test_commands_on_anothers_tasks_change_nothing(inbox_world: InboxWorld) -> None:
    array = inbox_world.submit(array=tuple(range(100)))
    before = inbox_world.store.rows()
    assert "belongs to" in inbox_world.say(Cancel(time=NOW, job_ids=(f"{array}_[3-9]",)), ALICE)
    assert inbox_world.store.rows() == before
    assert "no such job" in inbox_world.say(Cancel(time=NOW, job_ids=(f"{array}_[100-200]",)))
    assert "no such job" in inbox_world.say(Cancel(time=NOW, job_ids=(f"{array}_[9-3]", f"{array}_x", f"{array}_")))


def test_tasks_count_for_what_a_user_may_queue(inbox_world: InboxWorld) -> None:
    inbox_world.submit(array=tuple(range(60_000)), uid=ALICE)
    refused = inbox_world.say(Submit(time=NOW, id=fresh_id(NOW), spec=spec(), array=tuple(range(60_000))), ALICE)
    assert "has 60000 of 100,000 pending jobs; 60000 more exceed the limit" in refused
    assert inbox_world.store.waiting_of_users()[str(ALICE)][0] == 60_000


def test_a_controller_that_dies_after_any_write_goes_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies within the transaction that takes tasks out of their row, and after it, before the file is removed."""
    array, kept = submit(site, tasks=50), site.inbox.remove
    monkeypatch.setattr(site.cycle.inbox, "remove", lambda name: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        site.turn()
    monkeypatch.undo()
    assert kept
    site.restart()
    put = site.store.put_ranks
    monkeypatch.setattr(site.store, "put_ranks", lambda ranks: (put(ranks), (_ for _ in ()).throw(KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        site.turn()
    monkeypatch.undo()
    site.restart()
    assert site.store.counts() == {"PENDING": 50}, "applied once, and nothing was half taken out"
    site.turn(3)
    assert site.store.counts() == {"PENDING": 50 - 3 * GPUS, "RUNNING": 3 * GPUS}
    assert len(site.world.starts) == len(set(site.world.starts)) == 3 * GPUS
    assert array in next(iter(shared(site)))


# -- dependencies ------------------------------------------------------------------------------------------------


def test_aftercorr_starts_each_task_after_its_partner(site: Site) -> None:
    submit(site, ARRAY, tasks=6, gpus_per_node=2)
    submit(site, OTHER, tasks=8, dependencies=(Dependency(DependencyKind.AFTERCORR, ARRAY),))
    site.turn(3)
    assert shared(site) == {f"{OTHER}_[0-7]": "PENDING"}
    end(site, f"{ARRAY}_4")
    end(site, f"{ARRAY}_2", 1)
    site.turn(3)
    started = [job.id for job in site.store.active() if job.array_id == OTHER]
    assert started == [f"{OTHER}_4"], "2 failed, so its partner never starts; 6 and 7 have none"
    (row,) = (job for job in site.store.pending_rows() if job.array_id == OTHER)
    assert row.reason == "Dependency"
    for index in (0, 1, 3, 5):
        end(site, f"{ARRAY}_{index}")
    site.turn(3)
    assert sorted(job.id for job in site.store.active()) == [f"{OTHER}_{i}" for i in (0, 1, 3, 4, 5)]
    (row,) = site.store.pending_rows()
    assert (row.id, row.reason) == (f"{OTHER}_[2,6-7]", "DependencyNeverSatisfied")


@pytest.mark.parametrize(("code", "verdict"), [(0, ""), (1, "never")])
def test_aftercorr_of_one_task_is_of_that_task_for_all(site: Site, code: int, verdict: str) -> None:
    submit(site, ARRAY, tasks=2)
    corr = tuple(Dependency(DependencyKind.AFTERCORR, name) for name in (f"{ARRAY}_1", LAST))
    submit(site, LAST, array=None)
    submit(site, OTHER, tasks=3, dependencies=corr)
    site.turn(3)
    (row,) = (job for job in site.store.pending_rows() if job.array_id == OTHER)

    def verdicts() -> list[tuple[int, str]]:
        asked = Dependencies(site.store.dependency_rows, [], site.store.completed_tasks)
        return [(index, verdict) for index, (verdict, _) in asked.of_tasks(row, None)]

    end(site, LAST)
    site.turn(3)
    assert verdicts() == [(index, "waiting") for index in range(3)]
    end(site, f"{ARRAY}_1", code)
    site.turn(3)
    assert verdicts() == [(index, verdict) for index in range(3)]


def test_a_single_job_with_aftercorr_waits_for_all_tasks_and_tasks_for_theirs(site: Site) -> None:
    submit(site, ARRAY, tasks=2)
    corr = (Dependency(DependencyKind.AFTERCORR, ARRAY),)
    submit(site, LAST, array=None, dependencies=corr)
    submit(site, OTHER, tasks=2, dependencies=corr)
    site.turn(3)
    end(site, f"{ARRAY}_1")
    site.cycle.inventory = msgspec.structs.replace(site.cycle.inventory, partitions=())  # nothing starts
    site.turn(1)
    rows = {job.array_id or job.id: job for job in site.store.pending_rows()}
    asked = Dependencies(site.store.dependency_rows, [])
    found = [asked.of(job)[0] for job in (rows[LAST], task_of(rows[OTHER], 1), task_of(rows[OTHER], 0))]
    assert found == ["waiting", "", "waiting"]


def test_dependencies_of_each_task_for_decisions_and_forecasts(site: Site) -> None:
    submit(site, ARRAY, tasks=12, gpus_per_node=3)
    corr = (Dependency(DependencyKind.AFTERCORR, ARRAY),)
    submit(site, OTHER, tasks=14, dependencies=corr, max_running=1)
    site.turn(3)
    for index, code in ((0, 0), (1, 1), (2, 0)):
        end(site, f"{ARRAY}_{index}", code)
    site.turn(2)
    (row,) = (job for job in site.store.pending_rows() if job.array_id == OTHER)
    (first,) = (job for job in site.store.active() if job.array_id == OTHER)
    assert first.id == f"{OTHER}_0"
    asked = Dependencies(site.store.dependency_rows, [], site.store.completed_tasks)
    assert asked.of_tasks(row, 5) == [(2, ("", ""))], "as many as could start"
    assert len(asked.of_tasks(row, None)) == row.count, "each once"
    verdicts = {index: verdict for index, (verdict, _) in asked.of_tasks(row, None)}
    assert verdicts == {1: "never", 2: "", **dict.fromkeys(range(3, 12), "waiting"), 12: "never", 13: "never"}
    snapshot = snapshot_of_store(site.store, inventory(), {"p": PolicySpec(name="f")}, NOW)
    assert [view.id for view in snapshot.pending if view.array_id == OTHER] == [f"{OTHER}_2"]


def test_a_bound_of_an_array_bounds_what_is_looked_at(site: Site) -> None:
    submit(site, tasks=100, max_running=5, gpus_per_node=0)
    site.turn(3)
    snapshot = snapshot_of_store(site.store, inventory(), {"p": PolicySpec(name="f")}, NOW)
    assert [(view.id, view.array_room) for view in snapshot.pending] == [(f"{ARRAY}_5", 0)]


@pytest.mark.parametrize(("began", "verdict"), [(NOW, ""), (None, "never")])
def test_after_an_array_of_which_a_task_never_began(site: Site, began: float | None, verdict: str) -> None:
    submit(site, tasks=6)
    site.turn(3)
    jobs = site.store.jobs_of_array(ARRAY)
    ended = [msgspec.structs.replace(job, state=_S.FAILED, end_time=NOW) for job in jobs]
    site.store.put_jobs([*ended[:4], msgspec.structs.replace(ended[4], start_time=began), ended[5]])
    waits = msgspec.structs.replace(
        jobs[0], id=LAST, array_id=None, spec=spec(dependencies=(Dependency(DependencyKind.AFTER, ARRAY),))
    )
    assert Dependencies(site.store.dependency_rows, []).of(waits)[0] == verdict
    assert len(site.store.dependency_rows(ARRAY)) <= 2, "not each of the tasks that have ended"


def test_an_array_counts_once_where_ids_are_looked_for(site: Site) -> None:
    submit(site, ARRAY, tasks=30)
    submit(site, OTHER, array=None)
    site.turn(3)
    assert site.store.matching("0", limit=2) == [ARRAY, OTHER]
    assert site.store.matching(ARRAY) == [ARRAY]


def test_singleton_runs_one_at_a_time_in_order(site: Site) -> None:
    alone = (Dependency(DependencyKind.SINGLETON),)
    for job_id in ("00000000001", "00000000002"):
        submit(site, job_id, array=None, name="train", dependencies=alone)
    submit(site, "00000000003", array=None, name="other", dependencies=alone)
    submit(site, "00000000004", tasks=3, name="train", max_running=2, dependencies=alone)
    site.turn(3)
    assert [job.id for job in site.store.active()] == ["00000000001", "00000000003"]
    assert site.store.job("00000000004_1").reason == "Dependency"  # type: ignore[union-attr]
    end(site, "00000000001", 1)
    site.turn(3)
    assert [job.id for job in site.store.active()] == ["00000000002", "00000000003"]
    lay(site, Requeue(time=NOW, job_ids=("00000000001",)))
    site.turn(2)
    assert site.state_of("00000000001") is _S.PENDING, "one that runs goes before one that was submitted earlier"
    end(site, "00000000002")
    site.turn(3)
    assert {job.id for job in site.store.active()} == {"00000000001", "00000000003"}
    end(site, "00000000001")
    site.turn(3)
    end(site, "00000000004_0")
    site.turn(3)
    running = [job.id for job in site.store.active() if job.array_id]
    assert running == ["00000000004_1", "00000000004_2"], "the tasks of one array are one job in this"


@pytest.mark.parametrize("outcome", [_S.COMPLETED, _S.TIMEOUT, _S.NODE_FAIL, _S.FAILED, _S.CANCELLED, _S.OUT_OF_MEMORY])
def test_a_chain_goes_on_after_the_limit_and_not_after_a_failure(site: Site, outcome: JobState) -> None:
    submit(site, ARRAY, array=(1, 2, 3, 4), max_running=1, dependencies=CHAIN)
    site.turn(3)
    assert [job.id for job in site.store.active()] == [f"{ARRAY}_1"]
    assert shared(site) == {f"{ARRAY}_[2-4]": "PENDING"}
    first = site.store.job(f"{ARRAY}_1")
    assert first is not None
    for host, box in site.world.running():
        del host.boxes[box.name]
    ended = {"state": outcome, "end_time": site.world.now, "allocation": None, "ending": None}
    site.store.put_jobs([msgspec.structs.replace(first, **ended)])
    for rank in site.store.ranks():
        site.store.remove_rank(rank)
    site.turn(2)
    goes_on = outcome in (_S.COMPLETED, _S.TIMEOUT, _S.NODE_FAIL)
    assert [job.id for job in site.store.active()] == ([f"{ARRAY}_2"] if goes_on else [])
    if not goes_on:
        (row,) = site.store.pending_rows()
        assert (row.id, row.reason) == (f"{ARRAY}_[2-4]", "DependencyNeverSatisfied")
        assert f"chain:{ARRAY}_1: job {ARRAY}_1 ended {outcome}" in row.message


# -- forecasts ---------------------------------------------------------------------------------------------------


def test_an_array_is_estimated_once(site: Site) -> None:
    estimator, policy = EstimateWriter(site.store), PolicySpec(name="s", order="sjf-estimate")
    submit(site, tasks=1000)
    site.turn(2)
    for _ in range(2):
        estimator.run([policy], NOW)
        lay(site, Hold(time=NOW, job_ids=(f"{ARRAY}_77",)))
        site.turn()
    (known,) = site.store._db.execute("SELECT count(*) FROM estimates").fetchone()
    assert known == 1
    snapshot = snapshot_of_store(site.store, inventory(), {"p": policy}, NOW)
    assert len({view.estimate_s for view in snapshot.pending}) == 1
    assert snapshot.pending[0].estimate_s


def test_a_long_array_is_run_forward_in_parts_that_end_when_it_does(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpusched.forecast.queue import QueueForecast
    from gpusched.queue import array_limit

    submit(site, ARRAY, tasks=700)
    submit(site, OTHER, array=None, gpus_per_node=1)
    site.turn(3)

    def start_of_other(most: int) -> tuple[float, int]:
        monkeypatch.setattr(array_limit, "MAX_SIMULATED_PARTS", most)
        now = site.world.now
        snapshot = snapshot_of_store(
            site.store, inventory(), {"p": PolicySpec(name="e", backfill="easy")}, now, whole=True
        )
        ahead = QueueForecast(snapshot, half_life_s=1e6, tick_s=5.0)
        return float(ahead.run(ahead.by_limits).start[ahead.index[OTHER]]) - now, len(snapshot.pending)

    exact, all_of_them = start_of_other(1000)
    rough, few = start_of_other(60)
    assert all_of_them == 700 - 12 + 1
    assert few < 120
    assert exact > 30_000
    assert abs(rough / exact - 1) < 0.05, (rough, exact)


DECLARED = """
partitions:
  p:
    defaults: {gpus: 4, cores: 16, memory: 64G, runtime: podman}
    nodes: [n0, n1, n2]
"""


def test_why_knows_where_a_task_stands_and_when_it_starts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpusched.client.context import Client
    from gpusched.client.why import why

    (site.state / "inventory.yaml").write_text(DECLARED)
    monkeypatch.setenv("GPUSCHED_STATE", str(site.state))
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(site.state / "inventory.yaml"))
    monkeypatch.setattr("time.time", lambda: site.world.now)
    submit(site, tasks=90_000)
    submit(site, OTHER, array=None)
    site.turn(3)
    waves = {f"{ARRAY}_12": 1, f"{ARRAY}_600": 50, f"{ARRAY}_60000": 5000, OTHER: 7500}
    for job_id, wave in waves.items():
        answer = why(Client(), job_id)
        index = 90_000 if job_id == OTHER else int(job_id.partition("_")[2])
        assert (answer.position, answer.queue_length) == (index - 11, 90_000 - 12 + 1)
        assert answer.expected is not None
        assert answer.expected.by_limits is not None
        assert (answer.expected.by_limits - site.world.now) / 600 == pytest.approx(wave, rel=0.05), job_id
    assert "tasks of large arrays are projected in groups" in answer.expected.assumptions
    assert "at least 89000 jobs" in site.store.job(OTHER).message  # type: ignore[union-attr]


def test_what_runs_alone_or_in_a_chain_is_run_forward_so(site: Site) -> None:
    from gpusched.forecast.queue import QueueForecast

    alone = (Dependency(DependencyKind.SINGLETON),)
    submit(site, "00000000001", array=None, name="t")
    site.turn(2)
    submit(site, "00000000002", array=None, name="t", dependencies=alone)
    submit(site, "00000000003", tasks=2, name="t", dependencies=alone)
    submit(site, "00000000004", array=None, name="t", dependencies=alone)
    submit(site, ARRAY, array=(1, 2, 3, 4), max_running=1, dependencies=CHAIN)
    submit(site, OTHER, array=(1, 2, 3, 4), dependencies=(Dependency(DependencyKind.AFTERCORR, ARRAY),))
    site.turn(3)
    snapshot = snapshot_of_store(site.store, inventory(), {"p": PolicySpec(name="e", backfill="skip")}, NOW, whole=True)
    ahead = QueueForecast(snapshot, half_life_s=1e6, tick_s=1.0)
    starts = ahead.run(ahead.by_limits).start - site.world.now
    waves = {view.id: round(start / 600) for view, start in zip(ahead.views, starts.tolist(), strict=True)}
    assert waves == {
        "00000000002": 1, "00000000003_0": 2, "00000000003_1": 2, "00000000004": 3,
        **{f"{ARRAY}_{link}": link - 1 for link in (2, 3, 4)}, **{f"{OTHER}_{link}": link for link in (1, 2, 3, 4)},
    }  # fmt: skip


def test_predictions_of_an_arrays_tasks_are_made_once(site: Site) -> None:
    submit(site, tasks=40)
    site.turn(3)
    waiting, new = site.store.unpredicted()
    assert (waiting, new) == (28, [f"{ARRAY}_12"])
    predictor = StartPredictor(site.store, clock=iter(range(10_000)).__next__)
    compile_for(small_snapshot(PolicySpec(name="warm-up")))  # else another process compiles first
    for _ in range(30):
        predictor.step(inventory(), site.world.now, budget_s=1e9)
    assert site.store.unpredicted() == (28, [])
    assert len(site.store.predicted_starts(0.0, 1e12)) == 28
    predictor.close()


def test_an_older_store_goes_on_with_a_row_for_each_task(site: Site) -> None:
    submit(site, tasks=30)
    site.turn(3)
    apart = [job for job in site.store.jobs() if job.state is _S.PENDING]
    (row,) = site.store.pending_rows()
    with site.store.transaction():
        site.store._db.execute("DELETE FROM jobs WHERE id = ?", (row.id,))
        site.store.put_jobs(apart)
    assert not shared(site)
    lay(site, Hold(time=NOW, job_ids=(f"{ARRAY}_[20-29]",)))
    site.turn()
    assert sum(1 for job in site.store.pending() if job.held_by) == 10
    reader = Reader.open(site.state)
    assert reader is not None
    assert reader.jobs() == site.store.jobs()
    reader.close()
