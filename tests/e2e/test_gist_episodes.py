"""One episode of the GIST paper in each partition, on real nodes, decided by its network; and simulated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpusched.config.weights import Arrays
from gpusched.model.jobs import ENDED
from tests.e2e import gist_episodes
from tests.e2e.conftest import Cluster
from tests.e2e.decisions import TIMER
from tests.testbed import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.processes]
HOUR_S = 1 / 24
"""Seconds that an hour takes: 3, 7 and 14 seconds for s, m and l."""
EPISODES = {"A100": (0, 1, 0, 0), "V100": (1, 0, 1, 2)}


def second_server_first() -> Arrays:
    """A network that prefers the second server, as no built-in rule does, and never lets a job wait."""
    bias = np.array([0, 1] * 3 + [-1] * 3, np.float32)
    return {"q.0.weight": np.zeros((9, 6), np.float32), "q.0.bias": bias}


def test_live_utilization_is_the_simulated_one_where_starts_are_alike(stopped: Cluster, tmp_path: Path) -> None:
    """The simulator gets how long each job held its GPUs, from its start until its end was noticed."""
    arrays = second_server_first()
    stopped.settings = {**stopped.settings, "tick": "1s"}
    gist_episodes.write_site(stopped, "agent", arrays)
    stopped.start_controller(program=("-c", TIMER), DECISIONS=str(tmp_path / "decisions"))
    ids = {name: gist_episodes.submit(stopped, name, jobs, HOUR_S) for name, jobs in EPISODES.items()}
    for own in ids.values():
        wait_until(lambda f=own[-1]: stopped.state_of(f) in ENDED, 180, "f to end")  # type: ignore[misc]
    decisions = np.array([float(line) for line in (tmp_path / "decisions").read_text().splitlines()])
    for name, jobs in EPISODES.items():
        assert [job.policy for i in ids[name] if (job := stopped.job(i))] == ["agent"] * 5
        live = gist_episodes.lived(stopped, ids[name], name, HOUR_S, decisions)
        setting = gist_episodes.on_nodes(name)
        planned = gist_episodes.simulated(setting, jobs, "agent", arrays)
        other = gist_episodes.simulated(setting, jobs, "first-fit", arrays)
        assert planned.servers != other.servers, "in this episode the network decides as first fit does"
        simulated = gist_episodes.simulated(setting, jobs, "agent", arrays, live.held)
        assert simulated.servers == live.servers
        assert live.starts == pytest.approx(simulated.starts, abs=24)  # a second
        assert live.utilization == pytest.approx(simulated.utilization, abs=0.02)
