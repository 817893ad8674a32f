"""``make demo``: the main job on an embedded cluster, this machine playing two small nodes.

Local transport, process runtime, the real controller and the real command line. GPUs are real where NVML finds some;
elsewhere their figures are made up by the probe and marked as simulated on every screen.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from gpusched.model.jobs import ENDED, JobState
from gpusched.model.units import count_of
from gpusched.queue.store import NodeRecord, Reader

FOLDER = Path(".demo")
WAIT_S = 120.0
T = TypeVar("T")

_TRAIN = (
    'echo "$GPUSCHED_JOB_NAME: rank $RANK of $WORLD_SIZE on $GPUSCHED_NODE, GPUs $CUDA_VISIBLE_DEVICES"; '
    'i=0; while [ $i -lt {steps} ]; do i=$((i+1)); echo "step $i loss 0.$((900/(i+1)))"; sleep 0.5; done; echo done'
)


def main() -> int:
    """Run the demo; 0 when every job ended as it should."""
    if FOLDER.exists():
        shutil.rmtree(FOLDER)
    FOLDER.mkdir()
    gpus = _real_gpus()
    _inventory(gpus)
    here = FOLDER.absolute()
    os.environ["GPUSCHED_STATE"], os.environ["GPUSCHED_INVENTORY"] = str(here / "state"), str(here / "inventory.yaml")
    os.environ["NUMBA_DISABLE_JIT"] = "1"  # the same functions; to compile them takes longer than two nodes do
    figures = f"{count_of(gpus, 'real GPU')}" if gpus else "no GPU here, so GPU figures are SIMULATED and marked so"
    print(f"Embedded cluster in {FOLDER}/: this machine as two nodes, process runtime; {figures}.\n", flush=True)
    log = (FOLDER / "controller.log").open("w")
    controller = subprocess.Popen([*_CLI, "controller"], stdout=log, stderr=subprocess.STDOUT)
    try:
        return _run_demo(gpus)
    finally:
        controller.terminate()
        controller.wait()
        log.close()
        print(f"\nThe controller is stopped. Its folder is {FOLDER}/; what you saw is the real thing.")


_CLI = (sys.executable, "-m", "gpusched")


def _run_demo(gpus: int) -> int:
    _until("both nodes respond", lambda: [node.state for node in _read(_nodes)] == ["IDLE", "IDLE"])
    _show("flavors")
    small = _submit("-J", "finetune", "--flavor", "small", steps=8)
    _submit("-J", "pretrain", "--flavor", "medium", steps=9)
    gang = _submit("-J", "gang", "--flavor", "full", steps=3)
    sweep = _submit("-J", "sweep", "--flavor", "small", "--array", "0-3%2", steps=2)
    _submit("-J", "evaluate", "--cpus", "1", "--gpus", "0", "--dependency", f"afterok:{small}", steps=1)
    bad = _submit("-J", "typo", "--flavor", "small", command="echo starting; sleep 1; nosuchprogram --train")
    _until("jobs run", lambda: any(job.state is JobState.RUNNING for job in _read(Reader.jobs)))
    _until("the multi-node job has its reason", lambda: any(job.reason for job in _read(Reader.jobs) if job.id == gang))
    time.sleep(1.5)  # let the simulated GPUs show some work: this is a show, not a test
    _show("nodes")
    _show("status")
    _show("why", gang)
    print("... waiting for all jobs to end ...\n", flush=True)
    _until("all jobs ended", lambda: all(job.state in ENDED for job in _read(Reader.jobs)))
    _until("the output is home", lambda: _run("logs", small).stdout.endswith("done\n"))
    _show("status")
    _show("logs", small)
    _show("why", bad)
    _show("power", "--since", "1h", "--by", "job")
    _show("power", "--since", "1h", "--by", "partition")
    states = {job.spec.name: job.state for job in _read(Reader.jobs)}
    expected = dict.fromkeys(("finetune", "pretrain", "gang", "sweep", "evaluate"), "COMPLETED") | {"typo": "FAILED"}
    if states != expected:
        print(f"Not as expected: {states}; see {FOLDER}/controller.log (the sweep was {sweep})")
        return 1
    return 0


def _inventory(gpus: int) -> None:
    """Two nodes: with two or more real GPUs each node gets a half, with one the second node has none."""
    halves = [list(range(gpus // 2 + gpus % 2)), list(range(gpus // 2 + gpus % 2, gpus))] if gpus else [[], []]
    each = 2 if not gpus else max(1, len(halves[1]))
    nodes = []
    for name, indices in zip(("alpha", "beta"), halves, strict=True):
        has = f"gpus: {each}, simulated_gpus: true" if not gpus else f"gpus: {len(indices)}, gpu_indices: {indices}"
        nodes.append(f"      - {{name: {name}, address: localhost, transport: local, {has}}}")
    full = 2 * each if not gpus or len(halves[1]) == each else each
    text = f"""# Written by 'make demo'.
settings: {{tick: 1s, grace: 5s, power_price: 0.30 EUR/kWh}}
partitions:
  demo:
    policy: easy
    defaults: {{cores: 4, memory: 8G, rated_power: 1kW, runtime: process}}
    nodes:
{chr(10).join(nodes)}
    flavors:
      small: {{gpus: 1, cores: 1, memory: 1G, time: 10m}}
      medium: {{gpus: {each}, cores: 2, memory: 2G, time: 20m}}
      full: {{gpus: {full}, cores: 4, memory: 4G, time: 30m}}
"""
    (FOLDER / "inventory.yaml").write_text(text)


def _real_gpus() -> int:
    """Return how many GPUs NVML sees on this machine; 0 without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # no library, no driver, no permission: it is a machine without usable GPUs
        return 0


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_CLI, *arguments], capture_output=True, text=True, check=False)


def _read(what: Callable[[Reader], Iterable[T]]) -> list[T]:
    """Read from the state folder; nothing before there is something."""
    if (reader := Reader.open(FOLDER / "state")) is None:
        return []
    with contextlib.closing(reader):
        return list(what(reader))


def _nodes(reader: Reader) -> Iterable[NodeRecord]:
    return reader.node_records().values()


def _submit(*options: str, steps: int = 1, command: str = "") -> str:
    script = command or _TRAIN.replace("{steps}", str(steps))
    print("$ gpusched submit", *options, "-- sh -c '...'", flush=True)
    result = _run("submit", *options, "--", "sh", "-c", script)
    if result.returncode:
        raise SystemExit(result.stderr)
    return result.stdout.strip()


def _show(*arguments: str) -> None:
    print("$ gpusched", *arguments, flush=True)
    subprocess.run([*_CLI, *arguments], check=False)
    print(flush=True)


def _until(what: str, ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if ready():
            return
        time.sleep(0.1)
    raise SystemExit(f"timed out waiting until {what}; see {FOLDER}/controller.log")


if __name__ == "__main__":
    sys.exit(main())
