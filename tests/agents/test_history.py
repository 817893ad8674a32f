"""Training on this cluster's own history: none yet is no error, an unreadable one is."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpusched.agents.common.data import load_training_data
from gpusched.agents.common.request import TrainRequest
from gpusched.cli import main as cli
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.jobs import JobState
from gpusched.queue.store import DATABASE, RunRecord, Store
from gpusched.traces import file as tracefile
from gpusched.traces.generate import generate
from gpusched.traces.workload import RunTime, SizeClass, Workload
from tests.builders import job, spec

INVENTORY = Path(__file__).parents[2] / "inventory.yaml"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(INVENTORY))
    monkeypatch.setenv("GPUSCHED_STATE", str(tmp_path / "state"))
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def garbage(state: Path) -> None:
    (state / DATABASE).write_bytes(b"no database " * 1000)


def torn(state: Path) -> None:
    """Its head is that of a store, and what comes after it is not."""
    Store.create_or_open(state).close()
    with sqlite3.connect(state / DATABASE) as db:
        db.execute("PRAGMA journal_mode=DELETE")
    db.close()
    content = (state / DATABASE).read_bytes()
    (state / DATABASE).write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))


@pytest.mark.parametrize("spoil", [garbage, torn])
def test_an_unreadable_store_is_an_error_and_not_an_empty_history(
    state: Path, spoil: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    spoil(state)
    for words in (["train", "gist", "--out", str(state / "out")], ["replay", "--policy", "fifo"]):
        assert cli.run(words) == 1
        (line,) = capfd.readouterr().err.splitlines()
        assert " cannot be read: " in line
        assert "see 'gpusched check'" in line
    assert not list((state / "out").glob("*.safetensors"))


def test_where_nothing_has_run_yet_the_flavors_are_learned_from(state: Path) -> None:
    for make in (lambda: None, lambda: Store.create_or_open(state).close()):
        make()
        names = [m.scenario.trace.name for m in load_training_data(TrainRequest(policy=""))]
        assert names == ["generated from the flavors of A100, seed 0", "generated from the flavors of V100, seed 0"]
        with pytest.raises(GpuschedError, match="no job of that period has run and ended"):
            load_training_data(TrainRequest(policy="", since="3d"))


def test_the_own_history_begins_with_what_its_users_had_before(state: Path) -> None:
    """Both parts of it: before the held-out one are also the jobs that are learned from."""
    now, store = time.time(), Store.create_or_open(state)
    with store.transaction():
        for name, ago_h in (("early", 100), *((f"j{i}", 40 - i) for i in range(10))):
            begin, end = now - ago_h * 3600.0, now - ago_h * 3600.0 + 1800.0
            asked, times = spec(partition="A100", gpus_per_node=2), {"start_time": begin, "end_time": end}
            store.put_jobs([job(name, JobState.COMPLETED, spec=asked, submit_time=begin, **times)])
            store.open_run(
                RunRecord(job_id=name, attempt=1, user="alice", partition="A100", flavor=None, share=1.0, gpus=2,
                    start_time=begin, end_time=None, outcome=None, nodes={})
            )  # fmt: skip
            store.close_run(name, 1, end, JobState.COMPLETED)
    store.close()
    (data,) = load_training_data(TrainRequest(policy="", partition="A100", since="2d", hold_out=0.2))
    (held_out,), half_life_h = data.held_out, 7 * 24
    assert data.scenario.usage == {"alice": pytest.approx(2 ** (-60 / half_life_h), rel=0.01)}
    ages_h = [100 - 32, *(40 - i - 32 for i in range(8))]  # of one GPU hour each when job 8 was submitted
    assert held_out.usage == {"alice": pytest.approx(sum(2 ** (-age / half_life_h) for age in ages_h), rel=0.01)}


def test_training_leaves_jobs_in_slices_out_but_for_agents_that_decide_about_them(tmp_path: Path) -> None:
    sizes = (SizeClass(gpus=1, share=1), SizeClass(gpus=2, share=1, profile="1g.10gb"))
    run_time = RunTime(parts=((1.0, 600.0, 1.0),))
    workload = Workload(jobs=200, start=0.0, per_hour=100.0, sizes=sizes, run_time=run_time)
    file, drawn = tmp_path / "t.gpusched.npz", generate(workload)
    tracefile.write(file, drawn)
    (data,) = load_training_data(TrainRequest(policy="", trace=str(file), nodes=1, hold_out=False))
    assert 0 < len(data.scenario.trace) < 200
    assert set(data.scenario.trace.gpus.tolist()) == {1}
    with pytest.raises(UsageError, match="has jobs in MIG slices"):
        load_training_data(TrainRequest(policy="", generate=workload, nodes=1))
    (kept,) = load_training_data(TrainRequest(policy="", trace=str(file), nodes=1, hold_out=False, slices=True))
    assert len(kept.scenario.trace) == 200, "by an agent that decides about slices"
    assert "GPUs that are cut on demand stay as they are in training: 2 into 1g.10gb" in kept.scenario.notes
    assert len(kept.scenario.pool.slices[0]) == 14


def test_training_knows_no_priorities_and_no_limits_of_arrays(tmp_path: Path) -> None:
    run_time, sizes = RunTime(parts=((1.0, 600.0, 1.0),)), (SizeClass(gpus=1, share=1),)
    drawn = generate(Workload(jobs=200, start=0.0, per_hour=100.0, sizes=sizes, run_time=run_time))
    file, some = tmp_path / "t.gpusched.npz", np.arange(200) % 2
    tracefile.write(file, replace(drawn, priority=some, array=some, array_limit=some + 1))
    (data,) = load_training_data(TrainRequest(policy="", trace=str(file), nodes=1))
    for trace in (data.scenario.trace, data.held_out[0].trace):
        assert (trace.priority, trace.array, trace.array_limit) == (None, None, None)
