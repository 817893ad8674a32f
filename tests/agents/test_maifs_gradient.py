"""The benchmark of policy gradient for MAIFS' agents: it runs, and its steps rise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.maifs_gradient import Critic, GradientSettings, gradient, main, run_noisy
from gpusched.agents.maifs.engine import simulate_agent
from gpusched.agents.maifs.joint import GRAPH
from gpusched.agents.maifs.kinds import SERVER, read_kinds
from gpusched.agents.maifs.learn import MaifsTrainingCase
from gpusched.agents.maifs.network import JOB, untrained
from gpusched.agents.maifs.workloads import MaifsJobs
from gpusched.agents.maifs.world import world_of
from tests.traces.samples import real


def test_a_step_lets_the_short_one_of_two_jobs_pass() -> None:
    """Both need the whole node and arrive at once; untrained agents run the long one first."""
    kinds = read_kinds()
    fastest = kinds.speed[0].max()
    both = np.ones(2, np.int64)
    jobs = MaifsJobs(
        arrival=np.zeros(2), kind=0 * both, steps=np.array([36_000.0, 1200.0]) * fastest, requested=3 * both,
        least=8 * both, most=8 * both, noise=np.ones(2), node=np.array([SERVER], np.float64), group=np.array([0, 1]),
    )  # fmt: skip
    start, settings = untrained(0), GradientSettings()
    case = MaifsTrainingCase(world_of(jobs, kinds), 20_000.0, 1000)
    runs = [run_noisy(case.world, start, settings, seed, case.decisions) for seed in range(40)]
    critic = Critic()
    for _ in range(2):  # first without a critic, then with what it has learned
        rise = gradient(case, runs, critic, settings)
        by_time_left = rise[: 2 * JOB].reshape(JOB, 2)[1, 0]
        assert by_time_left < 0  # the weight is to fall with the time left
        step = np.where(np.arange(len(rise)) < 2 * JOB, rise, 0.0) / np.abs(rise[: 2 * JOB]).max()
        jct = [simulate_agent(case.world, start + sign * step, GRAPH).jct.mean() for sign in (-1, 0, 1)]
        assert jct[0] == jct[1] > 1.5 * jct[2]
    assert critic.weights.all()


def test_it_trains_and_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = real("philly_2017.csv.gz").parent
    main([
        str(folder), "--quick", "--seeds", "0", "--trace", "philly", "--test", "10", "12", "--test-loads", "0.9",
        "--out", str(tmp_path),
    ])  # fmt: skip
    found = capsys.readouterr().out
    assert [line.split(":")[0] for line in found.splitlines()] == ["gradient 0", "cma-es 0"] + 4 * ["philly 0.9"]
    assert {file.name for file in tmp_path.iterdir()} == {"gradient_0.safetensors", "cma-es_0.safetensors"}
