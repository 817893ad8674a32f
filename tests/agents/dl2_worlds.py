"""Workloads and rules that the tests of DL2 share."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from gpusched.agents.dl2.rules import policy_of
from gpusched.agents.dl2.slots import Policy, SlotJobs, SlotProgress, simulate
from gpusched.agents.dl2.workloads import SLOTS, Dl2Job, Dl2Workload, dl2
from gpusched.sched.state import Ints
from tests.agents import inside


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return inside.run("reproduce", "dl2", *words, cwd=cwd)


def workload(*jobs: tuple[int, float], nodes: int = 2, most: int = 4) -> tuple[Dl2Workload, dict[str, Any]]:
    """Jobs (arrival slot, epochs) of one model: an epoch a slot for each worker while a server is free."""
    listed = tuple(
        Dl2Job(arrival_slot=at, model="m", epochs=epochs, steps_per_epoch=1200.0, worker=(2, 4), server=(2, 0))
        for at, epochs in jobs
    )
    speed = np.zeros((most + 1, most + 1))
    speed[1:, 1:] = np.arange(1, most + 1)
    return Dl2Workload(setting="", nodes=nodes, seed=0, max_tasks=most, jobs=listed), {"m": speed}


def rule(name: str, jobs: SlotJobs) -> Policy:
    return policy_of(dl2().policies[name], jobs, np.random.default_rng(0))


def assert_within(jobs: SlotJobs, decide: Policy) -> None:
    """Plays it all; looks at every slot, of which many must be nearly full."""
    full = 0

    def looked_at(jobs: SlotJobs, course: SlotProgress, there: Ints) -> None:
        nonlocal full
        decide(jobs, course, there)
        sizes = course.sizes
        assert not np.delete(sizes, there, axis=0).any()
        assert ((sizes > 0).all(1) | (sizes == 0).all(1)).all()
        assert sizes.max() <= 16
        tasks = jobs.need[jobs.kind, sizes[:, 0], sizes[:, 1]]
        assert (tasks.sum(0) <= SLOTS * jobs.nodes).all()
        # No more than two tasks with GPUs, and four in all, on a node: so they can be placed.
        assert (sizes[:, 1] * (jobs.need[jobs.kind, 0, 1, 1] > 0)).sum() <= 2 * jobs.nodes
        full += bool((tasks.sum(0) >= 0.7 * SLOTS * jobs.nodes).any())

    simulate(jobs, looked_at)
    assert full > 20
