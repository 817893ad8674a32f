"""No command file and no row of an old store ends the controller, or keeps it from the others' jobs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusched.config import validate
from gpusched.config.validate import (
    MAX_COUNT,
    MAX_DEPENDENCIES,
    MAX_MEMORY_MIB,
    MAX_NAMES,
    validate_spec,
)
from gpusched.controller import launcher
from gpusched.controller.planning import failing_alone
from gpusched.controller.ranks import ReconcileResult
from gpusched.controller.reconcile import reconcile_job
from gpusched.errors import UsageError
from gpusched.model import ids
from gpusched.model.commands import AnyCommand
from gpusched.model.jobs import Dependency, DependencyKind, Elastic, JobRecord, JobState
from gpusched.queue import snapshots
from tests.builders import spec
from tests.controller.applying import NOW
from tests.controller.imagined import inventory
from tests.controller.site import Site
from tests.logged import messages

HUGE = 10**400


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.store.close()


# -- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "beyond"),
    [
        ("nodes", MAX_COUNT + 1), ("gpus_per_node", HUGE), ("cores_per_node", HUGE), ("memory_mib_per_node", HUGE),
        ("memory_mib_per_node", MAX_MEMORY_MIB + 1), ("time_limit_s", 2**62), ("time_limit_s", HUGE),
        ("time_limit_s", 10**5000), ("signal_before_s", HUGE), ("signal_before_s", -HUGE), ("begin_time", 1e300),
        ("begin_time", -1e300), ("begin_time", float("nan")), ("begin_time", float("inf")), ("priority", HUGE),
        ("nice", -HUGE), ("nodelist", ("n0",) * (MAX_NAMES + 1)), ("exclude", ("n0",) * (MAX_NAMES + 1)),
        ("dependencies", (Dependency(DependencyKind.AFTER, ids.mint(NOW)),) * (MAX_DEPENDENCIES + 1)),
        ("nodelist", ("n0", "n0")), ("exclude", ("n0", "n0")),
    ],
    ids=map(str, range(21)),
)  # fmt: skip
def test_a_number_beyond_reason_is_refused_in_one_line(field: str, beyond: object) -> None:
    with pytest.raises(UsageError) as caught:
        validate_spec(spec(**{field: beyond}), inventory())
    assert len(caught.value.line()) < 200


def test_only_numbers_of_nodes_that_can_hold_a_size_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1,000 nodes a submission with 1,000 sizes took two seconds, in which the controller did nothing else."""
    looked_at, part_of = [], validate._part_of
    monkeypatch.setattr(validate, "_part_of", lambda asked: looked_at.append(part_of(asked)) or part_of(asked))
    elastic = Elastic(sizes=(240,), base_gpus=240, base_cores=60, base_memory_mib=60 << 10)
    shape = validate.shape_on(validate.node_kinds(inventory(100).nodes), spec(elastic=elastic), 240)
    assert shape is not None
    assert (shape.nodes, looked_at) == (60, [(4, 1, 1024)])


def test_numbers_within_reason_are_taken() -> None:
    validate_spec(spec(begin_time=NOW, signal_before_s=3600, time_limit_s=3600), inventory())


# -- a job whose step raises -------------------------------------------------------------------------------------


def story(site: Site, job_id: str) -> str:
    job = site.store.job(job_id)
    assert job is not None
    assert (job.state, job.reason) == (JobState.FAILED, "InternalError"), job
    assert job.end_time is not None
    (ended,) = [e for e in site.store.events(job_id=job_id) if e.kind == "ended"]
    assert ended.data["message"] == job.message
    return job.message


def test_a_running_job_whose_step_raises_is_set_aside_and_fenced(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    other = site.submit()
    job = site.submit()
    site.turn(3)

    def step_of(found: JobRecord, *more: Any) -> ReconcileResult:
        if found.id == job:
            raise OverflowError("cannot fit")
        return reconcile_job(found, *more)

    monkeypatch.setattr("gpusched.controller.cycle.reconcile_job", step_of)
    site.turn()
    assert "OverflowError" in story(site, job)
    assert {r.outcome for r in site.store.runs(0, 4e9)} == {None, "FAILED"}
    site.turn(4)
    assert [box.name.split("-")[1] for _, box in site.world.running()] == [other], "what was left of it was fenced"
    assert {r.job_id for r in site.store.ranks()} == {other}
    last = site.submit()
    site.turn(2)
    assert {box.name.split("-")[1] for _, box in site.world.running()} == {other, last}


@pytest.mark.parametrize(
    "fields",
    [{"time_limit_s": HUGE}, {"memory_mib_per_node": HUGE}, {"nodes": HUGE}, {"cores_per_node": 2**63}],
    ids=["limit", "memory", "nodes", "cores"],
)
def test_waiting_jobs_that_cannot_be_decided_about_are_set_aside(site: Site, fields: dict[str, Any]) -> None:
    held = [site.submit(spec=spec(hold=True)) for _ in range(9)]
    site.turn()
    for job_id in (held[2], held[7]):
        job = site.store.job(job_id)
        assert job is not None
        job = msgspec.structs.replace(job, held_by="", spec=msgspec.structs.replace(job.spec, **fields))
        site.store.put_jobs([job])
    good = site.submit()
    site.turn(4)
    for job_id in (held[2], held[7]):
        assert "OverflowError" in story(site, job_id)
    assert [box.name.split("-")[1] for _, box in site.world.running()] == [good]
    assert site.store.counts() == {"PENDING": 7, "FAILED": 2, "RUNNING": 1}


def test_a_running_job_that_keeps_others_from_being_decided_about_is_set_aside(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = site.submit()
    site.turn(3)
    real = snapshots.expected_end

    def fault(job: JobRecord, start: float) -> float:
        if job.id == bad:
            raise OverflowError("cannot fit")
        return real(job, start)

    monkeypatch.setattr(snapshots, "expected_end", fault)
    good = site.submit()
    site.turn(4)
    assert "OverflowError" in story(site, bad)
    assert [(r.job_id, r.outcome) for r in site.store.runs(0, 4e9)] == [(bad, "FAILED"), (good, None)]
    assert [box.name.split("-")[1] for _, box in site.world.running()] == [good]


def test_a_job_whose_launch_raises_an_unexpected_error_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = site.submit(spec=spec(name="bad"))
    good = site.submit()
    real = launcher.launch_request

    def fault(job: Any, *rest: Any, **more: Any) -> Any:
        if job.spec.name == "bad":
            raise ZeroDivisionError("of no use")
        return real(job, *rest, **more)

    monkeypatch.setattr(launcher, "launch_request", fault)
    site.turn(4)
    job = site.store.job(bad)
    assert job is not None
    assert (job.state, job.reason, job.attempt) == (JobState.FAILED, "LaunchFailed", 1)
    assert "ZeroDivisionError" in job.message
    assert [box.name.split("-")[1] for _, box in site.world.running()] == [good]


def test_a_decision_that_fails_without_a_culprit_is_skipped(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = site.submit()

    def fault(*_: object) -> None:
        raise ZeroDivisionError("of no use")

    monkeypatch.setattr(site.cycle._decider, "decide", fault)
    site.turn(3)
    (line,) = messages(caplog)
    assert "no decision was made" in line
    monkeypatch.undo()
    site.turn(3)
    assert [box.name.split("-")[1] for _, box in site.world.running()] == [job]


@pytest.mark.parametrize("bad", [(), (0,), (3, 4, 99), tuple(range(20))])
def test_culprits_are_found_by_halving(bad: tuple[int, ...]) -> None:
    asked = 0

    def fails(items: Any) -> bool:
        nonlocal asked
        asked += 1
        return any(item in bad for item in items)

    assert failing_alone(list(range(100)), fails) == list(bad)
    assert asked <= 1 + 14 * max(1, len(bad))


# -- anything at all ---------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from(
    [0, 1, -1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**25, 10**308, HUGE, -HUGE, 0.5, -0.0, 1e-320, 1e300, -1e308]
)
TEXTS = st.sampled_from(["", "p", "n0", "0", "\0", "\x9b2J", "\u202e", "../..", "%j" * 50, "a" * 300, "0" * 11, "\n"])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
KINDS = {kind.__struct_config__.tag: kind for kind in AnyCommand.__args__}
SPEC = msgspec.to_builtins(spec())


def mutated(fields: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Some fields given extreme values: of their own type mostly, which is what gets past the decoder."""

    def like(value: Any) -> st.SearchStrategy[Any]:
        if isinstance(value, bool):
            return st.booleans()
        if isinstance(value, (int, float)):
            return NUMBERS
        if isinstance(value, str):
            return TEXTS
        return NUMBERS | TEXTS | JSON if value is None else JSON

    numbers = [name for name, value in fields.items() if value is None or isinstance(value, (int, float))]
    name = st.sampled_from(numbers) | st.sampled_from(sorted(fields))
    some = st.lists(name, max_size=2, unique=True)  # with more, nothing would be valid
    return some.flatmap(lambda names: st.fixed_dictionaries({n: like(fields[n]) for n in names})).map(
        lambda chosen: fields | chosen
    )


@st.composite
def command_files(draw: st.DrawFn) -> bytes:
    kind = draw(st.just("submit") | st.sampled_from(sorted(KINDS)))
    base: dict[str, Any] = {"time": NOW}
    for field in msgspec.structs.fields(KINDS[kind]):
        if field.name == "spec":
            base["spec"] = draw(mutated(SPEC))
        elif field.name == "id":
            base["id"] = "0123456789a"
        elif field.name in ("job_ids", "nodes"):
            base[field.name] = draw(st.lists(st.sampled_from(["0123456789a", "n0"]) | TEXTS, max_size=3))
        elif field.name == "array":
            base["array"] = draw(st.none() | st.lists(NUMBERS | st.integers(0, 3), max_size=4))
        elif field.name in ("secrets", "evidence"):
            base[field.name] = draw(st.sampled_from([{}, None]) | JSON)
        elif field.required or draw(st.booleans()):
            base[field.name] = draw(NUMBERS if field.type is not str else TEXTS)
    return msgspec.json.encode(draw(mutated(base)) | {"command": kind})


EXTREMES = (0, -1, 2**31, 2**63, 10**25, 10**308, HUGE, -HUGE, 0.5, 1e300, -1e300)


@pytest.mark.parametrize("value", EXTREMES, ids=map(str, range(len(EXTREMES))))
def test_no_number_in_any_field_ends_the_controller(site: Site, value: float) -> None:
    good = site.submit(spec=spec(gpus_per_node=0))
    fields = [*(name for name, was in SPEC.items() if was is None or type(was) in (int, float)), "time", "max_running"]
    for number, field in enumerate(fields):
        job_id = f"0{number:010d}"
        command = {"command": "submit", "time": NOW, "id": job_id, "spec": dict(SPEC), "array": [0, 1]}
        (command["spec"] if field in SPEC else command)[field] = value  # type: ignore[index]
        (site.inbox.new / f"{job_id}.submit").write_bytes(msgspec.json.encode(command))
    site.turn(4)
    assert not os.listdir(site.inbox.new)
    assert "InternalError" not in {job.reason for job in site.store.jobs()}
    found = site.store.job(good)
    assert found is not None
    assert found.state is JobState.RUNNING


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(files=st.lists(command_files(), min_size=1, max_size=4))
def test_no_command_file_ends_the_controller(files: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder))
        site.submit()
        for number, content in enumerate(files):
            (site.inbox.new / f"x{number}.submit").write_bytes(content)
        site.turn(3)
        assert not os.listdir(site.inbox.new)
        for job in site.store.jobs():
            assert job.reason != "InternalError", job
        last = site.submit(spec=spec(gpus_per_node=0))
        site.turn(2)
        assert (found := site.store.job(last)) is not None
        assert found.state in (JobState.RUNNING, JobState.STARTING, JobState.COMPLETED), found
        site.store.close()
