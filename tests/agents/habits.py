"""A history of users with habits, and the commands on it, that the tests of predictions share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusched.traces.readers.draft import assemble, intern
from gpusched.traces.trace import Trace
from tests import commands

DATA = Path(__file__).parents[3] / "shared" / "data" / "traces"


FAST = {"NUMBA_DISABLE_JIT": "0"}  # thousands of jobs


EPOCH = 1_750_000_000.0


def habits(jobs: int = 1200, seed: int = 0, epoch: float | None = EPOCH) -> Trace:
    """Users who run few things: short tests of 1 GPU, trainings of 4 whose length is the user's own."""
    rng = np.random.default_rng(seed)
    user, big = rng.integers(0, 6, jobs), rng.random(jobs) < 0.4
    submit = np.sort(rng.uniform(0, 14 * 86400, jobs))
    submit -= submit[0]
    typical = np.where(big, 3600.0 * (1 + user), 60.0)
    return assemble(
        name="habits", epoch=epoch, ids=tuple(f"j{i}" for i in range(jobs)), submit=submit,
        duration=typical * rng.lognormal(0.0, 0.25, jobs), gpus=np.where(big, 4, 1),
        names={"user": intern([f"u{u}" for u in user]), "model": intern([f"run-{i}" for i in range(jobs)])},
        columns={"wait": np.zeros(jobs), "limit": np.full(jobs, 86400.0)},
    )  # fmt: skip


class Cli:
    """The commands as processes of their own, with the compiler switched off."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: str, code: int = 0, **more: str) -> Any:
        env = os.environ | {"GPUSCHED_STATE": str(self.folder / "state"), "XDG_CACHE_HOME": str(self.folder / "c"),
                            "NUMBA_DISABLE_JIT": "1"} | more  # fmt: skip
        done = commands.run(*words, "--json", env=env)
        assert done.returncode == code, done.stderr or done.stdout
        return json.loads(done.stdout)

    def predict(self, *words: str, code: int = 0, **more: str) -> Any:
        return self.run("predict", *words, code=code, **more)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)
