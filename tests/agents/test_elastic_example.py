"""The example of a training that changes its size: grown and shrunk, it ends with the same loss.

Under torchrun it runs in tests/e2e/test_hot.py. Here its ranks fork from a process that has imported torch once.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import re
import runpy
import signal
import socket
import sys
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.testbed import wait_until

EXAMPLE = Path(__file__).parents[2] / "docs/examples/elastic_train.py"
STEPS = 400

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")]


def rank(folder: Path, pause: float, variables: dict[str, str]) -> None:
    """Run one rank of the example in this process, as torchrun starts it; it writes ``out.RANK``."""
    os.environ.update(variables, GPUSCHED_JOB_DIR=str(folder))
    import torch

    torch.set_num_threads(1)  # OMP_NUM_THREADS counted when torch was imported; threads wait for each other by spinning
    with open(folder / f"out.{variables['RANK']}", "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = [str(EXAMPLE), "--steps", str(STEPS), "--pause", str(pause)]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


def start(folder: Path, processes: int, pause: float) -> list[BaseProcess]:
    context = mp.get_context("forkserver")
    # An optimizer imports torch._dynamo at its first step, which takes each rank longer than its training.
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "gpusched.job", __name__])
    with socket.create_server(("127.0.0.1", 0)) as free:
        common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [{**common, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(processes)]
    started: list[BaseProcess] = [context.Process(target=rank, args=(folder, pause, own)) for own in ranks]
    for process in started:
        process.start()
    return started


def said(folder: Path, name: str) -> dict[str, Any]:
    """Return what the job wrote last; the file is always whole."""
    path = folder / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {"step": 0}


def end(folder: Path, run: list[BaseProcess]) -> str:
    """Wait until all ranks have ended well; return what the first one printed."""
    for process in run:
        process.join(300)
    out = (folder / "out.0").read_text()
    assert [process.exitcode for process in run] == [0] * len(run), out
    return out


def loss_of(folder: Path) -> float:
    """The loss at the end of a training by one process."""
    out = end(folder, start(folder, 1, 0.0))
    found = re.search(rf"step {STEPS}: loss ([\d.]+)", out)
    assert found, out
    return float(found[1])


def test_growing_and_shrinking_change_nothing_but_the_order_of_sums(tmp_path: Path) -> None:
    plain, resized = tmp_path / "plain", tmp_path / "resized"
    plain.mkdir()
    resized.mkdir()
    expected = loss_of(plain)
    saved = [0.0]
    for part, processes in enumerate((1, 2), start=1):
        run = start(resized, processes, 0.02)
        try:
            wait_until(lambda goal=saved[-1] + 20: said(resized, "progress")["step"] >= goal, 90, f"part {part}")  # type: ignore[misc]
            for process in run:
                os.kill(int(process.pid or 0), signal.SIGTERM)
            end(resized, run)
        finally:
            for process in run:
                process.kill()
        saved.append(said(resized, "saved")["step"])
        assert said(resized, "saved")["gpus"] == processes
        assert said(resized, "progress") | {"samples_per_s": 0} == {"step": saved[-1], "of": STEPS, "samples_per_s": 0}
    assert 0 < saved[1] < saved[2] < STEPS, "each part went on where the one before had saved"
    assert loss_of(resized) == pytest.approx(expected, abs=1e-10)
