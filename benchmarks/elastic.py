"""Resizable jobs against fixed sizes, live: real nodes, real saves, the same jobs at the same moments.

    .venv/bin/python -m benchmarks.elastic [--jobs 40] [--load 0.9] [--seeds 1,2,3] [--lasts 4-24]
        [--agent maifs --weights FILE]

Needs what the testbed needs (root, podman's packages). Two nodes of eight GPUs, plain processes, a tick of one second.
Jobs are drawn: one, two or four GPUs as a fixed size, ``--lasts`` seconds at that size; with g GPUs they make
g ** 0.9 as many steps a second. ``--load`` is what the fixed sizes would use of the GPUs. Resizable, the same jobs may
have 1, 2, 4 or 8 GPUs. Printed are the mean time from submission to end, in seconds, their ratio, and of the
controller's decisions on resizable jobs how many come out the same again from their snapshots, and in a replay that is
brought to the same state. With ``--agent`` its weights choose sizes, and decisions are not made again.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from gpusched.model.jobs import ENDED
from tests.e2e.conftest import SETTINGS, Cluster
from tests.e2e.decisions import RECORDER, Agreement, agreement
from tests.testbed import Testbed, wait_until

GPUS, SCALING, SIZES = 16, 0.9, (1, 2, 4, 8)
POLICY = (
    "order: fifo\nplace: best-fit\nbackfill: easy\nsizes: greedy-gain\n"
    "resize: {min_run: 4s, per_hour: 1000, start_timeout: 1m}\n"
)
# A thousandth of a step for each of a thousand: sh has no fractions.
JOB = """
cd "$GPUSCHED_JOB_DIR"
case $GPUSCHED_GPUS_TOTAL in 1) r=1000 ;; 2) r=1866 ;; 4) r=3482 ;; 8) r=6498 ;; esac
i=$(cat at 2>/dev/null || echo 0)
save() { echo $i >at.part && mv at.part at; echo "{\\"step\\": $i}" >s && mv s saved.json; }
trap 'save; exit 0' TERM
while [ $i -lt WORK ]; do
    sleep 0.25 & wait $!
    i=$((i + r / 4)); echo "{\\"step\\": $i, \\"of\\": WORK}" >p && mv p progress.json
done
"""


class Draw(NamedTuple):
    """One job: when it comes, its fixed size, and its work in thousandths of a step."""

    after_s: float
    gpus: int
    work: int


def drawn(seed: int, count: int, load: float, lasts_s: tuple[float, float]) -> list[Draw]:
    """Return jobs of ``lasts_s`` seconds, least and most, whose fixed sizes use ``load`` of the GPUs."""
    rng = random.Random(seed)
    shapes = [(rng.choice((1, 2, 4)), rng.uniform(*lasts_s)) for _ in range(count)]
    mean = statistics.mean(gpus * lasts for gpus, lasts in shapes)
    at, found = 0.0, []
    for gpus, lasts in shapes:
        found.append(Draw(at, gpus, int(1000 * gpus**SCALING * lasts)))
        at += rng.expovariate(load * GPUS / mean)
    return found


def mean_completion(
    testbed: Testbed, folder: Path, jobs: list[Draw], resizable: bool, agent: str | None = None, weights: str = ""
) -> tuple[float, int, Agreement | None]:
    """Mean seconds from submission to end, the number of resizes, and what becomes of the decisions made again."""
    cluster = Cluster(testbed, folder, ("A100",))
    cluster.runtime = "process"
    cluster.settings = {**SETTINGS, "tick": "1s", "grace": "10s", "job_dirs": str(folder / "jobs")}
    (folder / "policies" / "sized").mkdir(parents=True)
    policy = POLICY
    if agent is not None:
        policy = policy.replace("sizes: greedy-gain", f"agent: {agent}\nfallback: elastic\nbudget: 1m")
        shutil.copyfile(weights, folder / "policies" / "sized" / "default.safetensors")
    (folder / "policies" / "sized.yaml").write_text(policy)
    cluster.write_inventory(policies={"A100": "sized" if resizable else "easy"})
    noted = folder / "decisions"
    cluster.start_controller(program=("-c", RECORDER), DECISIONS=str(noted))
    try:
        began, ids = time.monotonic(), []
        for job in jobs:
            time.sleep(max(0.0, began + job.after_s - time.monotonic()))
            sizes = ("--resizable", "--cooldown", "4s", "--sizes", ",".join(map(str, SIZES))) if resizable else ()
            asked = sizes or ("--gpus", str(job.gpus))
            ids.append(cluster.sh(JOB.replace("WORK", str(job.work)), *asked))
        for job_id in ids:
            wait_until(lambda job_id=job_id: cluster.state_of(job_id) in ENDED, 3600, job_id)  # type: ignore[misc]
        found = [one for job_id in ids if (one := cluster.job(job_id)) is not None]
        assert all(one.state == "COMPLETED" for one in found), [one.message for one in found]
        times = [one.end_time - one.submit_time for one in found if one.end_time is not None]
        resizes = sum(one.resizes.count for one in found if one.resizes is not None)
        return statistics.mean(times), resizes, agreement(noted) if resizable and agent is None else None
    finally:
        cluster.close()


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=40)
    options.add_argument("--load", type=float, default=0.9)
    options.add_argument("--seeds", default="1,2,3")
    options.add_argument("--lasts", default="4-24")
    options.add_argument("--agent")
    options.add_argument("--weights", default="gpusched/data/maifs.safetensors")
    args = options.parse_args()
    shortest, longest = map(float, args.lasts.split("-"))
    ratios, decisions, agreed = [], 0, 0
    with tempfile.TemporaryDirectory(dir="/tmp") as where, Testbed(Path(where) / "testbed") as testbed:
        for seed in map(int, args.seeds.split(",")):
            jobs = drawn(seed, args.jobs, args.load, (shortest, longest))
            fixed, _, _ = mean_completion(testbed, Path(where) / f"fixed{seed}", jobs, resizable=False)
            own = Path(where) / f"sized{seed}"
            sized, resizes, found = mean_completion(testbed, own, jobs, True, args.agent, args.weights)
            ratios.append(sized / fixed)
            print(f"seed {seed}: fixed {fixed:.1f} s, resizable {sized:.1f} s ({resizes} resizes): {ratios[-1]:.2f}")
            if found is not None:
                print(f"  {found}", *(f"  {line}" for line in found.others), sep="\n", flush=True)
                decisions, agreed = decisions + found.decisions, agreed + found.replayed
    print(f"mean of the ratios: {statistics.mean(ratios):.2f} ({interval(ratios)})")
    if decisions:
        print(f"live and replay agree on {agreed} of {decisions} decisions")


def interval(ratios: list[float]) -> str:
    """Return the 95 % interval of their mean, by Student's t."""
    if len(ratios) < 2:
        return "one seed has no interval"
    t = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)[min(len(ratios) - 2, 8)]
    half, mean = t * statistics.stdev(ratios) / math.sqrt(len(ratios)), statistics.mean(ratios)
    return f"95 %: {mean - half:.2f} to {mean + half:.2f}"


if __name__ == "__main__":
    main()
