"""Training the agent at scale: repeatable, resumable, and never worse than what it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusched.agents.common.checkpoint import Checkpoint
from gpusched.agents.common.request import TrainerResult, TrainingProgress, TrainingReport, TrainJob
from gpusched.agents.common.vector import to_arrays, to_vector
from gpusched.agents.gist import scale
from gpusched.agents.gist.networks import QUESTIONS, STARTS, agent_of, heuristic
from gpusched.agents.gist.train import train_agent
from gpusched.config.policies import load_policy
from gpusched.config.weights import load_model, save_model
from gpusched.errors import UsageError
from gpusched.model.policy import PolicySpec
from gpusched.model.slices import slice_index
from gpusched.model.snapshot import SliceView
from gpusched.sim.policies import policy_of_spec
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.power import power_model
from gpusched.sim.replay import replay
from gpusched.study.study import Scenario
from gpusched.traces.generate import generate
from gpusched.traces.workload import RequestedTimes, RunTime, SizeClass, Workload, load_workload

WORKLOAD = Workload(
    jobs=120, start=0.0, load=0.9, load_gpus=16, name="small",
    sizes=tuple(SizeClass(gpus=g, share=s) for g, s in ((1, 0.4), (2, 0.2), (4, 0.2), (8, 0.1), (16, 0.1))),
    run_time=RunTime(parts=((1.0, 1800.0, 1.2),)), limits=RequestedTimes(menu_s=(3600.0, 14400.0, 86400.0)),
)  # fmt: skip
QUICK = {"generations": 4, "population": 4, "jobs": 80, "validation": 2, "validation_jobs": 100, "validate_every": 1}


def job(folder: Path, workload: Workload | None = WORKLOAD, seed: int = 0, **settings: Any) -> TrainJob:
    pool = Pool.uniform(2, 8)
    scenario = Scenario(generate(WORKLOAD, 0), pool, power_model(pool))
    return TrainJob(
        spec=PolicySpec(name="gist", agent="gist", settings={**QUICK, **settings}), partition="default",
        scenario=scenario, held_out=(), workload=workload, declared=None, seed=seed, device="cpu",
        checkpoint=Checkpoint(folder / "checkpoint", "key", every_s=0.0),
    )  # fmt: skip


def bits(trained: TrainerResult) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in trained.arrays.items()}


@pytest.mark.parametrize("recorded", [False, True])
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path, recorded: bool) -> None:
    workload = None if recorded else WORKLOAD
    one = train_agent(job(tmp_path / "a", workload, give_up=9), TrainingReport())
    assert bits(train_agent(job(tmp_path / "b", workload, give_up=9), TrainingReport())) == bits(one)
    wide = train_agent(job(tmp_path / "c", workload, seed=1, give_up=9, width=3), TrainingReport())
    assert bits(wide) != bits(one)
    agent_of(one.arrays)
    agent_of(wide.arrays)
    assert one.about["knows"] == "limit"


def test_a_log_that_is_drawn_whole_is_replayed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[int] = []

    def counted(policy: Any, trace: Any, *rest: Any) -> Any:
        played.append(len(trace))
        return figures(policy, trace, *rest)

    figures = scale.figures
    monkeypatch.setattr(scale, "figures", counted)
    (note,) = train_agent(job(tmp_path, None, jobs=120, validation_jobs=120, generations=1), TrainingReport()).notes
    assert "on 1 validation workload (" in note
    starts, candidates, references = len(STARTS), QUICK["population"], 2
    assert played == [120] * (references + starts + candidates + 1)


def test_kept_weights_are_never_worse_on_validation_than_any_start(tmp_path: Path) -> None:
    trained = train_agent(job(tmp_path, generations=6, use_weight=0.0), TrainingReport())
    pool = Pool.uniform(2, 8)
    workloads = [generate(scale.replace(WORKLOAD, jobs=100), 500_009 + i) for i in range(2)]

    def log_jct(policy: Any) -> float:
        return float(np.mean([np.log(scale.figures(policy, t, pool).mean_jct_s) for t in workloads]))

    mine = log_jct(scale.policy_of(trained.arrays))
    assert mine <= min(log_jct(scale.policy_of(heuristic(0, 0, **w))) for w in scale.STARTS.values())
    assert trained.score == pytest.approx(log_jct("wfp3+easy") - mine)


class Killed(BaseException):
    pass


def test_it_goes_on_after_a_kill_and_ends_where_it_would_have_ended(tmp_path: Path) -> None:
    whole = train_agent(job(tmp_path / "whole", give_up=9), TrainingReport())

    def die(progress: TrainingProgress) -> None:
        if progress.done == 3:
            raise Killed

    with pytest.raises(Killed):
        train_agent(job(tmp_path / "cut", give_up=9), TrainingReport(show=die))
    seen: list[int] = []
    again = train_agent(job(tmp_path / "cut", give_up=9), TrainingReport(show=lambda p: seen.append(p.done)))
    assert seen[0] == 4, "it went on after the last checkpoint"
    assert bits(again) == bits(whole)


def test_other_sizes_and_what_cannot_be(tmp_path: Path) -> None:
    trained = train_agent(job(tmp_path, servers="4", generations=1), TrainingReport())
    assert trained.hyper_parameters["servers"] == "4"
    with pytest.raises(UsageError, match="'four', expected numbers"):
        train_agent(job(tmp_path, servers="four"), TrainingReport())
    with pytest.raises(UsageError, match="needs a workload generated for a load"):
        train_agent(job(tmp_path, None, servers="4"), TrainingReport())
    with pytest.raises(UsageError, match="no hyper-parameter 'generation'"):
        train_agent(job(tmp_path, generation=3), TrainingReport())


def test_it_trains_on_jobs_in_slices_by_their_share_of_a_gpu(tmp_path: Path) -> None:
    sizes = (SizeClass(gpus=1, share=0.5), SizeClass(gpus=1, share=0.5, profile="3g.40gb"))
    slices = tuple(SliceView(slice_index(0, start), "3g.40gb") for start in (0, 4))
    pool = Pool.of([NodeSpec(2, gpu_type="A100-80GB", slices=slices)])
    workload = scale.replace(WORKLOAD, sizes=sizes, load_gpus=2)
    trace = generate(workload, 0)
    found = scale.figures("fifo", trace, pool)
    assert trace.profile is not None
    work = float((trace.duration * np.where(trace.profile >= 0, 0.5, 1.0)).sum())
    done = replay(trace, pool, "fifo")
    assert found.utilization == pytest.approx(work / 2 / float(done.end.max() - done.start.min()))
    asked = scale.replace(job(tmp_path, workload, generations=1), scenario=Scenario(trace, pool, power_model(pool)))
    agent_of(train_agent(asked, TrainingReport()).arrays)


def test_the_row_of_numbers_and_the_weights_are_the_same(tmp_path: Path) -> None:
    arrays = heuristic(3)
    shapes = {name: array.shape for name, array in arrays.items()}
    begin, steps = to_vector(arrays, shapes), to_vector(scale._first_steps(arrays, 3), shapes)
    assert {n: a.tobytes() for n, a in to_arrays(begin, shapes).items()} == {n: a.tobytes() for n, a in arrays.items()}
    moved = to_arrays(begin + (steps > 0), shapes)
    for question, inputs in QUESTIONS.items():
        changed = moved[f"{question}.base"] != arrays[f"{question}.base"]
        assert {name for name, c in zip(inputs, changed, strict=True) if c} == set(scale.STEPS[question])
    save_model(tmp_path / "default.safetensors", "gist", moved, {})
    assert {n: a.tobytes() for n, a in load_model(tmp_path, "p", "gist").arrays.items()} == {
        n: a.tobytes() for n, a in moved.items()
    }


@pytest.mark.parametrize("servers", [8, 32])
def test_the_measured_agents_are_read_and_beat_their_reference_on_a_workload_of_their_own(servers: int) -> None:
    """A small piece of benchmarks/agent_scale.py, on a seed that the documented figures are made on."""
    root = Path(__file__).parents[2] / "benchmarks"
    policy = policy_of_spec(load_policy(root / f"agents/{servers}"))
    workload = scale.replace(load_workload(root / "agent_workload.yaml"), jobs=4000, load_gpus=8 * servers)
    trace, pool = generate(workload, 9000), Pool.uniform(servers, 8)
    mine, reference = (scale.figures(p, trace, pool) for p in (policy, scale.REFERENCE))
    assert mine.mean_jct_s < reference.mean_jct_s
