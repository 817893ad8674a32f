"""gpusched's engine beside AccaSim (PyPI `accasim` 1.1.3) on the same trace, machines and policies, in one run.

AccaSim goes into a virtual environment of its own, since it brings packages that we do not need:

    python3.11 -m venv /tmp/accasim-venv
    /tmp/accasim-venv/bin/pip install accasim==1.1.3
    .venv/bin/python benchmarks/accasim.py --accasim /tmp/accasim-venv/bin/python

Both read the same SWF log: submissions and run times in whole seconds, one processor = one GPU, jobs of 1, 2, 4 or 8
GPUs on one node, larger ones on whole nodes. FIFO and SJF are strict in both (the head of the queue blocks), placed by
first fit (AccaSim's best fit breaks ties by what was allocated before, so schedules would differ). "Inside" is what
each says of its own simulation, after warm-up; "whole" is the process as a user starts it: for us `gpusched replay`
with its metrics and bounds, compiled code cached.
"""

from __future__ import annotations

import argparse
import collections.abc
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GPUS_PER_NODE = 8
SIZES, WEIGHTS = (1, 2, 4, 8, 16, 32), (0.60, 0.12, 0.12, 0.12, 0.03, 0.01)
POLICIES = ("fifo", "sjf")


def write_log(path: Path, jobs: int, load: float, nodes: int) -> None:
    """Poisson arrivals at an offered load, lognormal run times, everything in whole seconds."""
    rng = random.Random(0)
    gpus = rng.choices(SIZES, WEIGHTS, k=jobs)
    durations = [1 + int(rng.lognormvariate(7.0, 1.5)) for _ in range(jobs)]
    gap = sum(g * d for g, d in zip(gpus, durations, strict=True)) / jobs / (load * nodes * GPUS_PER_NODE)
    now = 1.0
    with path.open("w") as file:
        for number, (size, seconds) in enumerate(zip(gpus, durations, strict=True), 1):
            now += rng.expovariate(1 / gap)
            file.write(f"{number} {int(now)} -1 {seconds} {size} -1 -1 {size} {seconds} -1 1 1 1 1 1 1 -1 -1\n")


# AccaSim's side, run by the other interpreter


def run_accasim(log: Path, policy: str, nodes: int, folder: Path) -> dict[str, float]:
    """One simulation in this process; its own seconds and the mean JCT."""
    sys.path = [p for p in sys.path if Path(p).resolve() != Path(__file__).parent.resolve()]  # this file's name
    collections.Mapping = collections.abc.Mapping  # type: ignore[attr-defined]  # where it was until Python 3.9
    from accasim.base.allocator_class import FirstFit
    from accasim.base.scheduler_class import FirstInFirstOut, ShortestJobFirst
    from accasim.base.simulator_class import Simulator
    from accasim.utils.reader_class import Tweaker

    class Gpus(Tweaker):
        """A job of an SWF log as nodes and GPUs ("core" is what AccaSim calls a resource that every job has)."""

        def tweak_function(self, job: dict[str, Any]) -> dict[str, Any]:
            gpus = job["total_processors"]
            parts = max(1, gpus // GPUS_PER_NODE)
            return {**job, "core": gpus, "requested_nodes": parts, "requested_resources": {"core": gpus // parts},
                    "queue": job["queue_number"]}  # fmt: skip

    config = folder / "machines.json"
    groups = {"groups": {"g": {"core": GPUS_PER_NODE}}, "resources": {"g": nodes}}
    config.write_text(json.dumps(groups | {"equivalence": {"processor": {"core": 1}}, "start_time": 0}))
    scheduler = {"fifo": FirstInFirstOut, "sjf": ShortestJobFirst}[policy](FirstFit())
    simulator = Simulator(
        str(log), str(config), scheduler, tweak_function=Gpus(), RESULTS_FOLDER_PATH=str(folder / "results"),
        scheduling_output=False, statistics_output=False, show_statistics=False, LOG_LEVEL="ERROR",
    )  # fmt: skip
    simulator.start_simulation()
    waits = simulator.mapper.wtimes
    durations = [int(line.split()[3]) for line in log.read_text().splitlines()]
    assert len(waits) == len(durations), "not every job ran"
    inside = simulator.end_simulation_time - simulator.start_simulation_time
    return {"inside_s": inside, "mean_jct_s": (sum(waits) + sum(durations)) / len(durations)}


# ours


def run_gpusched(log: Path, policy: str, nodes: int) -> dict[str, float]:
    """``gpusched replay`` as a user starts it."""
    pool = ["--nodes", str(nodes), "--gpus-per-node", str(GPUS_PER_NODE), "--placement", "first-fit"]
    command = [str(Path(sys.executable).parent / "gpusched"), "replay", str(log), *pool, "--policy", f"{policy}+none"]
    command += ["--json"]
    (row,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"inside_s": row["sim_seconds"], "mean_jct_s": row["mean_jct_s"]}


def compare(log: Path, jobs: int, nodes: int, accasim: str, folder: Path, rounds: int) -> None:
    """Both by turns; medians."""
    print(f"{'policy':7}{'simulator':11}{'inside s':>10}{'jobs/s':>12}{'whole s':>10}{'jobs/s':>10}{'mean JCT s':>14}")
    for policy in POLICIES:
        rows: dict[str, list[dict[str, float]]] = {"accasim": [], "gpusched": []}
        run_gpusched(log, policy, nodes)  # compiles, once after installation
        for _ in range(rounds):
            begin = time.perf_counter()
            child = [accasim, __file__, "--child", policy, str(nodes), str(log), str(folder)]
            row = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            rows["accasim"].append(row | {"whole_s": time.perf_counter() - begin})
            begin = time.perf_counter()
            row = run_gpusched(log, policy, nodes)
            rows["gpusched"].append(row | {"whole_s": time.perf_counter() - begin})
        middle = {name: sorted(found, key=lambda r: r["inside_s"])[rounds // 2] for name, found in rows.items()}
        for name, row in middle.items():
            inside, whole = row["inside_s"], row["whole_s"]
            print(
                f"{policy:7}{name:11}{inside:10.4f}{jobs / inside:12,.0f}{whole:10.2f}{jobs / whole:10,.0f}"
                f"{row['mean_jct_s']:14.2f}"
            )
        ratio = {k: middle["accasim"][k] / middle["gpusched"][k] for k in ("inside_s", "whole_s")}
        same = abs(middle["accasim"]["mean_jct_s"] - middle["gpusched"]["mean_jct_s"]) < 0.005
        verdict = "the same mean JCT" if same else "ANOTHER MEAN JCT"
        print(f"{policy:7}inside {ratio['inside_s']:,.0f} times, whole {ratio['whole_s']:,.0f} times, {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--accasim", default="/tmp/accasim-venv/bin/python", help="interpreter that has accasim")
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.7, 0.9, 1.1], help="offered; queues grow with it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=4, metavar=("POLICY", "NODES", "LOG", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        policy, nodes, log, folder = args.child
        print(json.dumps(run_accasim(Path(log), policy, int(nodes), Path(folder))))
        return
    for load in args.loads:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log.swf"
            write_log(log, args.jobs, load, args.nodes)
            print(f"{args.jobs:,} jobs, {args.nodes} nodes of {GPUS_PER_NODE} GPUs, offered load {load}", flush=True)
            compare(log, args.jobs, args.nodes, args.accasim, Path(folder), args.rounds)


if __name__ == "__main__":
    main()
