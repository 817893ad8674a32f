"""Try what only a real GPU shows, on this machine: energy against NVML's own counter, and two jobs under MPS.

Needs an NVIDIA GPU that nobody uses, its driver, and torch with CUDA; MPS is tried where nvidia-cuda-mps-control is
installed. A controller runs in a temporary home on an inventory with this machine alone (``transport: local``).

    python -m benchmarks.real_gpu [--mig]

With --mig it only prints what gpusched's probe reads of each GPU's MIG profiles, placements and slices; nothing is
changed, and MIG mode may be off.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INVENTORY = """
settings: {{tick: 1s}}
defaults: {{transport: local, runtime: process}}
partitions:
  real:
    nodes:
      - {{name: here, gpus: {gpus}, cores: {cores}, memory: 32G, rated_power: 1kW, {sharing}}}
"""
JOB = """
import json, os, sys, time
import torch
import pynvml as nvml

seconds, size, pause = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
nvml.nvmlInit()
handle = nvml.nvmlDeviceGetHandleByIndex(int(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0]))
a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
begin, energy, done = time.time(), nvml.nvmlDeviceGetTotalEnergyConsumption(handle), 0
while time.time() - begin < seconds:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    done += 20
    time.sleep(pause)
took = time.time() - begin
joules = (nvml.nvmlDeviceGetTotalEnergyConsumption(handle) - energy) / 1000
print(json.dumps({"joules": joules, "per_s": done / took, "gpus": torch.cuda.device_count()}), flush=True)
"""
LOADS = (("20 s, busy", 20, 8192, 0), ("20 s, half idle", 20, 4096, 0.05), ("6 s, busy", 6, 8192, 0))
TOO_MUCH = "import torch; torch.empty(30 << 30, dtype=torch.uint8, device='cuda')"


class Installation:
    """A controller with this machine as its only node, in a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = os.environ | {
            "HOME": str(home), "GPUSCHED_STATE": str(home / "state"),
            "GPUSCHED_INVENTORY": str(home / "inventory.yaml"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }  # fmt: skip
        (home / "job.py").write_text(JOB)

    def gpusched(self, *words: str, check: bool = True) -> str:
        """Run a command and return what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "gpusched", *words], env=self.env, capture_output=True, text=True, check=False
        )
        if check and done.returncode != 0:
            raise SystemExit(f"gpusched {' '.join(words)}: {done.stderr or done.stdout}")
        return done.stdout

    def submit(self, *words: str) -> str:
        """Submit a job of one GPU and return its id."""
        return self.gpusched("submit", "--gpus", "1", "--cpus", "2", "--mem", "12G", "--time", "10m", *words).split()[
            -1
        ]

    def work(self, seconds: float, size: int, pause: float, *options: str) -> str:
        """Submit a job that multiplies matrices of ``size`` rows for ``seconds``, resting ``pause`` s each 20 times."""
        return self.submit(*options, "--", sys.executable, str(self.home / "job.py"), *map(str, (seconds, size, pause)))

    def result(self, job: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Wait for a job; return what it printed, and what ``show --json`` says."""
        self.gpusched("wait", job)
        return json.loads(self.gpusched("logs", job).splitlines()[-1]), json.loads(self.gpusched("show", job, "--json"))


def counter() -> float:
    """Return the energy that the first GPU has taken since its driver was loaded, in joules."""
    import pynvml

    pynvml.nvmlInit()
    return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0))) / 1000


@contextmanager
def installed(home: Path, sharing: str) -> Iterator[Installation]:
    import pynvml

    pynvml.nvmlInit()
    found = Installation(home)
    text = INVENTORY.format(gpus=pynvml.nvmlDeviceGetCount(), cores=os.cpu_count(), sharing=sharing)
    (home / "inventory.yaml").write_text(text)
    with open(home / "log", "w") as log:
        controller = subprocess.Popen([sys.executable, "-m", "gpusched", "controller"], env=found.env, stderr=log)
    try:
        while "IDLE" not in found.gpusched("nodes", check=False):
            if controller.poll() is not None:
                raise SystemExit((home / "log").read_text())
            time.sleep(0.5)
        yield found
    finally:
        controller.terminate()
        controller.wait()


def energy(site: Installation) -> None:
    print("| job | NVML's counter, in the job | gpusched | NVML's counter, submit to end |")
    print("| --- | --- | --- | --- |")
    for text, seconds, size, pause in (
        ("20 s, full", 20, 8192, 0),
        ("20 s, half", 20, 4096, 0.05),
        ("6 s, full", 6, 8192, 0),
    ):
        before = counter()
        said, shown = site.result(site.work(seconds, size, pause))
        print(
            f"| {text} | {said['joules']:,.0f} J | {shown['energy_j']:,.0f} J | {counter() - before:,.0f} J |",
            flush=True,
        )


def shared(site: Installation, pipe: Path) -> None:
    alone, _ = site.result(site.work(15, 4096, 0))
    daemon = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(pipe)}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=os.environ | daemon, check=True)
    try:
        agreed = ("--share", "pairs", "--gpu-mem", "20G")
        jobs = [site.work(25, 4096, 0, *agreed) for _ in range(2)]
        results = [site.result(job) for job in jobs]
        assert all(shown["nodes"] == ["here"] for _, shown in results)
        rates = [said["per_s"] for said, _ in results]
        print(f"\nAlone {alone['per_s']:,.0f} products/s; two under MPS {rates[0]:,.0f} and {rates[1]:,.0f}.")
        joules = [shown["energy_j"] for _, shown in results]
        print(f"Energy of the two: {joules[0]:,.0f} and {joules[1]:,.0f} J.")
        job = site.submit(*agreed, "--", sys.executable, "-c", TOO_MUCH)
        site.gpusched("wait", job, check=False)
        found = re.search(r"OutOfMemory.*?free", site.gpusched("logs", job))
        print("30 GiB with --gpu-mem 20G:", found[0] if found else "NOT REFUSED")
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=os.environ | daemon, check=False)


def mig() -> None:
    """Print the MIG profiles, placements and slices of this machine's GPUs."""
    from gpusched.model.resources import MigSettings, Node, RuntimeName, Settings
    from gpusched.model.slices import share
    from gpusched.nodes.opening import open_transport
    from gpusched.nodes.probe import probe

    node = Node(
        name="here", partition="p", address="here", transport="local", gpus=64, cores=1, memory_mib=1024,
        runtime=RuntimeName.PROCESS, mig=MigSettings(),
    )  # fmt: skip
    reading = probe(open_transport(node, Settings()), node, "real", Settings(), time.time)
    print(f"driver {reading.driver_version}, read by {reading.source} {reading.gpu_error or ''}")
    for gpu in reading.gpus:
        state = {True: "on", False: "off", None: "not supported"}[gpu.mig_mode]
        print(f"\nGPU {gpu.index}: {gpu.name}, MIG {state} {gpu.mig_error or gpu.error or ''}")
        print("| profile | id | compute | memory units | MiB | at most | share | placements (start:size) |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for one in gpu.mig_profiles:
            places = " ".join(f"{start}:{size}" for start, size in one.placements)
            figures = (one.profile_id, one.compute, one.memory_units, one.memory_mib, one.max_count)
            print(f"| {one.name} | {' | '.join(map(str, figures))} | {share(one):.3f} | {places} |")
        for part in gpu.slices:
            print(part)
        print(f"utilization {gpu.utilization_pct}, power {gpu.power_w} W, processes {gpu.processes}")


def main() -> None:
    if sys.argv[1:] == ["--mig"]:
        mig()
        return
    with tempfile.TemporaryDirectory() as folder:
        home, pipe = Path(folder), Path(folder) / "mps"
        pipe.mkdir()
        has_mps = any(os.access(Path(p) / "nvidia-cuda-mps-control", os.X_OK) for p in os.environ["PATH"].split(":"))
        with installed(home, f"sharing: {{mode: mps, slowdown: 0.95, pipe: {pipe}}}" if has_mps else "") as site:
            energy(site)
            if has_mps:
                shared(site, pipe)


if __name__ == "__main__":
    main()
