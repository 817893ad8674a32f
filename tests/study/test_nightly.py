"""The nightly report: its start, how it judges forecasts, and what it removes."""

from __future__ import annotations

import errno
import json
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import gpusched.data
from gpusched.config.inventory import load_inventory
from gpusched.model.interference import JobClassEstimate
from gpusched.model.jobs import Elastic, JobRecord, JobSpec, JobState
from gpusched.model.progress import JobProgress
from gpusched.nightly.replays import NightlyReport, nightly
from gpusched.queue.predictions import Prediction
from gpusched.queue.store import RunRecord, Store
from gpusched.sim.engine import build
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import Pool
from gpusched.sim.replay import Outage, replay
from gpusched.sim.result import ReplayResult
from gpusched.study.metrics import job_times, metrics_of
from gpusched.study.study import result_without
from gpusched.traces.trace import Trace
from tests.promotion import weights
from tests.sim.worlds import trace_of

NOW = 1_800_000_000.0
HOUR = 3600.0
INVENTORY = """\
settings: {keep_reports: 3d}
defaults: {runtime: process, gpus: 8, cores: 64, memory: 512G}
partitions:
  A: {policy: fifo, nodes: [a1], flavors: {all: {gpus: 8, cores: 64, memory: 512G, time: 72h}}}
"""


class Site:
    """A store with jobs as the controller leaves them; hours are before `NOW`."""

    def __init__(self, folder: Path) -> None:
        (folder / "inventory.yaml").write_text(INVENTORY)
        self.folder, self.state = folder, folder / "state"
        self.store = Store.create_or_open(self.state)

    def job(
        self, name: str, submit: float, start: float | None, end: float | None, gpus: int, limit: float = 24
    ) -> None:
        spec = JobSpec(
            name=name, partition="A", gpus_per_node=gpus, cores_per_node=gpus, memory_mib_per_node=1,
            time_limit_s=int(limit * HOUR),
        )  # fmt: skip
        state = JobState.COMPLETED if end is not None else JobState.RUNNING if start is not None else JobState.PENDING
        times = {k: None if v is None else NOW - v * HOUR for k, v in (("start_time", start), ("end_time", end))}
        job = JobRecord(id=name, user="ann", uid=0, spec=spec, state=state, submit_time=NOW - submit * HOUR, **times)
        self.store.put_jobs([job])
        if start is not None:
            self.store.open_run(
                RunRecord(job_id=name, attempt=1, user="ann", partition="A", flavor=None, share=gpus / 8, gpus=gpus,
                    start_time=NOW - start * HOUR, end_time=None, outcome=None, nodes={"a1": gpus})
            )  # fmt: skip
        if end is not None:
            self.store.close_run(name, 1, NOW - end * HOUR, JobState.COMPLETED)

    def predicted_starts(self, name: str, made: float, low: float, median: float, high: float | None) -> None:
        times = [None if h is None else NOW - h * HOUR for h in (median, low, high)]
        self.store.put_predictions([Prediction(name, "A", NOW - made * HOUR, *times, None)])  # type: ignore[arg-type]

    def report(self) -> NightlyReport:
        return nightly(load_inventory(self.folder / "inventory.yaml"), self.state, now=NOW)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_replay_begins_with_what_ran_and_waited_then(site: Site) -> None:
    site.job("long", submit=40, start=40, end=20, gpus=8)  # four of its twenty hours are in the window
    site.job("queued", submit=30, start=20, end=18, gpus=8)
    site.job("still", submit=25, start=18, end=None, gpus=4)  # never ends
    site.job("new", submit=23, start=18, end=17, gpus=4)
    report = site.report()
    (part,) = report.partitions
    live = part.runs[0]
    assert live["jobs"] == 1, "only the window's own job counts"
    assert live["mean_wait_s"] == pytest.approx(5 * HOUR), "behind what was left of the two before it"
    assert part.real_mean_wait_s == pytest.approx(5 * HOUR)
    assert any(note.startswith("3 jobs running or pending at the start") for note in live["notes"])
    assert live["lower_bound_mean_jct_s"] == pytest.approx(HOUR)
    assert live["fragmentation"] is None, "from its submission to its end the others leave no GPU free"
    assert live["energy_kwh"] == pytest.approx(6 * 3.5)
    assert live["gpu_hours"] == pytest.approx(4)


def test_forecasts_are_held_against_what_happened(site: Site) -> None:
    site.job("good", submit=10, start=8.0, end=7, gpus=1)
    site.predicted_starts("good", made=10, low=9.0, median=8.5, high=7.5)
    site.job("late", submit=10, start=5.0, end=4, gpus=1)
    site.predicted_starts("late", made=10, low=9.0, median=8.0, high=7.5)
    site.job("overdue", submit=10, start=None, end=None, gpus=1)
    site.predicted_starts("overdue", made=10, low=9.0, median=8.0, high=2.0)
    site.job("open", submit=10, start=None, end=None, gpus=1)
    site.predicted_starts("open", made=10, low=9.0, median=8.0, high=None)
    site.predicted_starts("gone", made=10, low=9.0, median=8.0, high=7.0)
    site.predicted_starts("long ago", made=30, low=29.0, median=28.0, high=27.0)
    report = site.report()
    (score,) = report.predictions
    assert (score.made, score.started, score.overdue, score.open, score.gone) == (5, 2, 1, 1, 1)
    assert score.median_abs_error_s == pytest.approx(3 * HOUR)  # of 0.5, 3 and 8 hours
    assert score.within_range == pytest.approx(1 / 3)
    assert score.median_wait_s == pytest.approx(3.5 * HOUR)
    (line,) = [line for line in report.more if line.startswith("A: ")]
    assert line == (
        "A: 2 of 5 predicted starts happened, half of them within 3.00 h of the predicted time, "
        "33% within the predicted range"
    )
    written = json.loads(Path(report.file).read_text())
    assert written["predictions"][0]["started"] == 2
    assert "2 of 5 predicted starts happened" in Path(report.partitions[0].page).read_text()


def test_old_reports_are_removed_and_nothing_else(site: Site) -> None:
    site.job("j", submit=5, start=5, end=4, gpus=1)
    reports = site.state / "reports"
    reports.mkdir()
    day = 86400.0

    def named(age: float, suffix: str) -> str:
        return time.strftime("%Y-%m-%d", time.gmtime(NOW - age * day)) + suffix

    kept = [named(1, ".json"), named(3, "-A.html"), "notes.txt", "2001-01-01.csv", "summary-2001-01-01.json"]
    gone = [named(4, ".json"), named(4, "-A.html"), "2020-01-01-A-b.html"]
    for name in (*kept, *gone):
        (reports / name).write_text("x")
    site.report()
    assert sorted(p.name for p in reports.iterdir()) == sorted([*kept, named(0, ".json"), named(0, "-A.html")])


def test_a_report_that_cannot_be_written_leaves_no_file(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        site.report()
    assert not list((site.state / "reports").iterdir())


def test_taking_jobs_out_of_a_result_leaves_the_others_as_they_were() -> None:
    trace = trace_of([0.0, 0.0, 1.0, 2.0], [10.0, 3.0, 4.0, 5.0], [4, 4, 8, 2])
    whole = replay(trace, Pool.uniform(2, 4), "fifo-skip", failures=(Outage(0, 2.0, 3.0),))
    rest = result_without(whole, 2)
    assert rest.trace.ids == trace.ids[2:]
    assert [rest.nodes_of(j).tolist() for j in range(2)] == [whole.nodes_of(j + 2).tolist() for j in range(2)]
    for name in ("jct", "wait", "run", "slowdown"):
        np.testing.assert_array_equal(getattr(job_times(rest), name), getattr(job_times(whole), name)[2:])
    assert metrics_of(rest).jobs == 2
    assert rest.events.subject[rest.events.kind < 3].max() == 1
    assert result_without(whole, 0) is whole


@pytest.mark.parametrize("broken", ["sjf", "fifo"])
def test_a_policy_that_fails_costs_its_own_row(site: Site, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """A component of another package may raise anything; of the live policy it costs that partition's comparison."""

    def fails(trace: Trace, pool: Pool, policy: ReplayPolicy, **options: Any) -> ReplayResult:
        if policy.name == broken:
            raise ValueError("lost\nat all")
        return replay(trace, pool, policy, **options)

    monkeypatch.setattr("gpusched.sim.replay.replay", fails)
    site.job("j", submit=10, start=9, end=8, gpus=2)
    report = site.report()
    compared = {run["policy"] for part in report.partitions for run in part.runs}
    others = broken != "fifo"
    assert ("fifo" in compared, "sjf" in compared, "easy" in compared) == (others, False, others)
    assert (f"A since 1d: {broken} failed: ValueError: lost at all" in report.more) == others
    assert others or report.verdict == "A since 1d: fifo failed: ValueError: lost at all"


@pytest.mark.parametrize("agent", [False, True])
def test_a_live_policy_by_placement_costs_is_compared_with_all_others(site: Site, agent: bool) -> None:
    (site.folder / "policies/rings").mkdir(parents=True)
    if agent:
        (site.folder / "policies/own.yaml").write_text(f"{weights.YAML}place: contention\n")
        weights.write(site.folder / "policies/own/default.safetensors")
    else:
        (site.folder / "policies/own.yaml").write_text("place: contention\nsizes: drf\n")
    (site.folder / "policies/rings/policy.yaml").write_text("agent: topology\n")
    shutil.copy(Path(gpusched.data.__path__[0]) / "topology.safetensors",
                site.folder / "policies/rings/default.safetensors")  # fmt: skip
    inventory = site.folder / "inventory.yaml"
    inventory.write_text(inventory.read_text().replace("policy: fifo", "policy: own"))
    site.store.put_beliefs([JobClassEstimate(kind="ann/j")])
    site.job("j", submit=10, start=9, end=8, gpus=2)
    (part,) = site.report().partitions
    assert part.runs[0]["policy"] == "own"
    compared = {run["policy"] for run in part.runs}
    assert {"drf", "elastic", "rings", "rltune-preempt"} <= compared


def test_resizable_jobs_may_have_their_own_sizes_at_their_own_pace(site: Site) -> None:
    sizes = Elastic(sizes=(2, 8), base_gpus=2, base_cores=2, base_memory_mib=2)
    for name, begins, hours in (("before", 26.0, 3.0), ("j", 20.0, 4.0)):  # of the first one an hour is left
        site.job(name, submit=begins, start=begins, end=begins - hours, gpus=2)
        found = site.store.job(name)
        assert found is not None
        site.store.put_jobs([msgspec.structs.replace(found, spec=msgspec.structs.replace(found.spec, elastic=sizes))])
        for attempt, gpus, step in ((1, 2, 10.0), (2, 8, 40.0)):  # in ten seconds; once it was tried at 8, too
            progress = JobProgress(job_id=name, attempt=attempt, gpus=gpus)
            progress = progress.with_step(10.0 * (attempt - 1), 100, None, NOW - begins * HOUR)
            site.store.put_progress([progress.with_step(step, 100, None, NOW - begins * HOUR + 10)])
    (part,) = site.report().partitions
    rows = {row["policy"]: row for row in part.runs}
    assert rows["easy"]["mean_jct_s"] == pytest.approx(4 * HOUR)
    assert rows["elastic"]["mean_jct_s"] == pytest.approx(4 * HOUR / 3)
    assert rows["elastic"]["lower_bound_mean_jct_s"] is None, "the bound is of jobs that keep their size"


def test_cut_runs_keep_their_sizes_without_the_jobs_that_a_replay_begins_with() -> None:
    trace = trace_of([0, 0, 10], [4000, 800, 100], [4, 4, 2], limit=[9000] * 3)
    elastic = build.ResizableJobs(least=np.ones(3, np.int64), most=np.full(3, 8), linear=True)
    whole = replay(trace, Pool.uniform(1, 8), "elastic", elastic=elastic)
    assert whole.cut.part_gpus is not None
    for first in (1, 2):
        cut = result_without(whole, first).cut
        assert cut.part_gpus is not None
        assert cut.part_gpus.tolist() == whole.cut.part_gpus[whole.cut.job >= first].tolist()
    assert len(whole.cut.job) > 0
