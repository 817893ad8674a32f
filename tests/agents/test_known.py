"""A training knows of run times what had come to light by its cut, and nothing more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusched.agents.common.checkpoint import Checkpoint
from gpusched.agents.common.data import TrainingData, known_at, load_training_data
from gpusched.agents.common.request import TrainingReport, TrainJob, TrainRequest
from gpusched.agents.rltune.evaluation import windows
from gpusched.agents.rltune.preempting import learned_odds, odds_of
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.agents.rltune.train import train_agent
from gpusched.errors import UsageError
from gpusched.estimation.estimators import ends_of
from gpusched.model.policy import PolicySpec
from gpusched.sim.pool import Pool
from gpusched.sim.power import power_model
from gpusched.study.study import Scenario
from gpusched.traces import file as tracefile
from gpusched.traces.trace import Trace
from tests.sim.worlds import trace_of

HOUR_S = 3600.0
JOBS = 100
QUICK: dict[str, Any] = {"iterations": 1, "sequences": 2, "sequence": 16, "rollouts": 2, "imitation": 1, "hidden": 4}


def log(long_s: float) -> Trace:
    """A job an hour, of five minutes; every tenth runs for ``long_s``. No limits: these would give it away."""
    submit = np.arange(JOBS) * HOUR_S
    ran = np.where(np.arange(JOBS) % 10 == 3, long_s, 300.0)
    return trace_of(submit.tolist(), ran.tolist(), [1, 2] * (JOBS // 2), limit=[np.nan] * JOBS)


def material(folder: Path, trace: Trace, **request: Any) -> TrainingData:
    file = folder / "log.gpusched.npz"
    tracefile.write(file, trace)
    return load_training_data(TrainRequest(policy="", trace=str(file), nodes=4, gpus_per_node=8, **request))[0]


def job(folder: Path, trace: Trace, **settings: object) -> TrainJob:
    of = material(folder, trace)
    return TrainJob(
        spec=PolicySpec(name="p", agent="rltune", settings=dict(settings)), partition="default", scenario=of.scenario,
        held_out=(), workload=None, declared=None, seed=0, device="cpu",
        checkpoint=Checkpoint(folder / "checkpoint", "key"), ended=of.ended,
    )  # fmt: skip


def test_jobs_that_end_after_the_cut_count_as_running() -> None:
    trace = trace_of([0.0, 10.0, 20.0, 30.0], [5.0, 500.0, 80.0, 1.0], [1, 2, 4, 8])
    seen, ended = known_at(trace, 100.0)
    assert seen.duration.tolist() == [5.0, 90.0, 80.0, 1.0]
    assert ended.tolist() == [True, False, True, True]
    waited = replace(trace, wait=np.array([0.0, 95.0, 0.0, 69.5]))  # the second had not begun, the last one just had
    seen, ended = known_at(waited, 100.0)
    assert seen.gpus.tolist() == [1, 4, 8]
    assert seen.duration.tolist() == [5.0, 80.0, 0.5]
    assert ended.tolist() == [True, True, False]


def test_a_running_job_counts_for_the_levels_it_has_outrun_and_ends_in_none() -> None:
    gpus, ran = np.ones(40, np.int64), np.full(40, 1000.0)
    over, running = odds_of(gpus, ran).prior[0], odds_of(gpus, ran, np.zeros(40, np.bool_)).prior[0]
    level = int(np.argmax(over))
    assert over[level] > 0.9
    assert running[level] == 0.5, "nobody has been seen to come to the end of it"
    assert np.all(running[:level] < 0.1)


def test_run_times_that_came_to_light_after_the_cut_change_no_training(tmp_path: Path) -> None:
    """Jobs that still ran at the cut end sooner or later after it: the same is learned from, to the bit."""
    sooner, later = log(100 * HOUR_S), log(1000 * HOUR_S)
    assert not np.array_equal(sooner.duration, later.duration)
    found = [material(tmp_path, trace) for trace in (sooner, later)]
    assert [len(m.scenario.trace) for m in found] == [80, 80]
    assert np.array_equal(found[0].scenario.trace.duration, found[1].scenario.trace.duration)
    assert (ends_of(found[0].scenario.trace) <= found[0].held_out[0].trace.submit[0]).all()
    assert found[0].ended is not None
    assert int((~found[0].ended).sum()) == 8
    assert "8 jobs still running" in found[0].scenario.notes[-1]
    assert np.array_equal(found[0].held_out[0].trace.submit, sooner.submit[80:])
    for preempt in (False, True):
        settings = {"preempt": True, "search": 1} if preempt else QUICK
        one, two = (train_agent(job(tmp_path, trace, **settings), TrainingReport()) for trace in (sooner, later))
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(array, two.arrays[name], err_msg=name)


def test_learning_before_the_choice_knows_nothing_of_the_validation_part(tmp_path: Path) -> None:
    trace = log(60.0)
    longer = trace.duration.copy()
    longer[[40, 50]] = [30 * HOUR_S, 25 * HOUR_S]  # both end within the last three tenths of what is learned from
    other = longer.copy()
    other[[40, 50]] += 2 * HOUR_S
    pair = [replace(trace, duration=ran) for ran in (longer, other)]
    odds = [learned_odds(job(tmp_path, one)) for one in pair]
    assert np.array_equal(odds[0][0].prior, odds[1][0].prior)
    pool = Pool.uniform(4, 8)
    early = [windows(Scenario(one, pool, power_model(pool)), RltuneSettings())[0] for one in pair]
    for mine, theirs in zip(*early, strict=True):
        assert np.array_equal(mine.duration, theirs.duration)


@pytest.mark.parametrize(("until", "ended"), [(None, None), ("80h", 72), ("40h", 36)])
def test_without_a_held_out_part_until_is_the_cut(tmp_path: Path, until: str | None, ended: int | None) -> None:
    found = material(tmp_path, log(1000 * HOUR_S), hold_out=0.0, until=until)
    assert not found.held_out
    if ended is None:
        assert found.ended is not None
        assert found.ended.all()
        assert found.scenario.trace.duration.max() == 1000 * HOUR_S
    else:
        assert found.ended is not None
        assert int(found.ended.sum()) == ended
        assert found.scenario.trace.duration.max() < 80 * HOUR_S


def test_jobs_that_can_never_run_are_no_training_data(tmp_path: Path) -> None:
    trace = log(300.0)
    trace = replace(trace, gpus=np.where(np.arange(JOBS) < 60, trace.gpus, 64))
    of = material(tmp_path, trace)
    assert len(of.scenario.trace) + len(of.held_out[0].trace) == 60
    assert "40 jobs excluded that can never run on these nodes" in of.scenario.notes
    with pytest.raises(UsageError, match="no job can ever run on these nodes"):
        material(tmp_path, replace(trace, gpus=0 * trace.gpus + 64))
