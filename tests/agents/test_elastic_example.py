"""The example of a training that changes its size: grown and shrunk, it ends with the same loss."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import wait_until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/elastic_train.py"
STEPS = 400

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")]


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def start(folder: Path, processes: int, pause: float) -> subprocess.Popen[str]:
    """With torchrun, as a job does; one process also works alone, which starts sooner."""
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GPUSCHED_JOB_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *run, str(EXAMPLE), "--steps", str(STEPS), "--pause", str(pause)],
        env=env | (ALONE if processes == 1 else {}), cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def said(folder: Path, name: str) -> dict[str, Any]:
    """What the job wrote last; whatever is there is whole."""
    path = folder / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {"step": 0}


def loss_of(run: subprocess.Popen[str]) -> float:
    out, err = run.communicate(timeout=120)
    found = re.search(rf"step {STEPS}: loss ([\d.]+)", out)
    assert found, (out, err)
    return float(found[1])


def test_growing_and_shrinking_change_nothing_but_the_order_of_sums(tmp_path: Path) -> None:
    plain, resized = tmp_path / "plain", tmp_path / "resized"
    plain.mkdir()
    resized.mkdir()
    expected = loss_of(start(plain, 1, 0.0))
    saved = [0.0]
    for part, processes in enumerate((1, 2), start=1):
        run = start(resized, processes, 0.02)
        try:
            wait_until(lambda goal=saved[-1] + 20: said(resized, "progress")["step"] >= goal, 90, f"part {part}")  # type: ignore[misc]
            run.send_signal(signal.SIGTERM)
            run.communicate(timeout=90)
        finally:
            run.kill()
        saved.append(said(resized, "saved")["step"])
        assert said(resized, "saved")["gpus"] == processes
        assert said(resized, "progress") | {"samples_per_s": 0} == {"step": saved[-1], "of": STEPS, "samples_per_s": 0}
    assert 0 < saved[1] < saved[2] < STEPS, "each part went on where the one before had saved"
    assert loss_of(start(resized, 1, 0.0)) == pytest.approx(expected, abs=1e-10)
