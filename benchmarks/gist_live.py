"""The GIST paper's episodes (figures 5 to 7) with real containers, beside the simulated ones.

    .venv/bin/python -m benchmarks.gist_live [--sequences 3] [--hour 0.1] [--seed 0]

Needs what the testbed needs (root, podman's packages) and torch. Two partitions as in the paper, each two nodes of
eight GPUs (which the testbed imagines), a tick of one second. The same drawn sequences of four jobs (s, m or l), all
eligible at once, then f, run under the naive scheme, first fit in order of submission, and the trained network; an hour
takes ``--hour`` seconds. U is the part of the GPU time until f starts in which jobs had GPUs, from the first start;
"simulated" is the replay of the paper's run times (naive: the mean of 300 draws). Energy as in the paper: kW of the
partition x 720 h x (1 - U). Three sequences take about nine minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean

import numpy as np

from gpusched.agents.gist import dqn, naive
from gpusched.agents.gist.setting import HOUR_S, Episodes, gist
from gpusched.config.weights import Arrays
from gpusched.model.jobs import ENDED
from tests.e2e import gist_episodes
from tests.e2e.conftest import SETTINGS, Cluster
from tests.e2e.decisions import TIMER
from tests.testbed import Testbed, wait_until

DRAWS = 300


def simulated(partition: str, sequence: list[int], policy: str, arrays: Arrays) -> tuple[float, float]:
    """U and hours of one sequence in the simulator."""
    setting = gist_episodes.on_nodes(partition)
    if policy == "naive":
        drawn: Episodes = naive.simulate(setting, np.array([sequence] * DRAWS), seed=0)
        return float(drawn.utilization.mean()), float(drawn.hours.mean())
    found = gist_episodes.simulated(setting, sequence, policy, arrays)
    return found.utilization, found.hours


def lived(
    testbed: Testbed, folder: Path, policy: str, arrays: Arrays, drawn: dict[str, list[list[int]]], hour_s: float
) -> dict[str, list[gist_episodes.Episode]]:
    """All episodes of one policy, one after the other, in both partitions at once."""
    cluster = Cluster(testbed, folder)
    cluster.settings = {**SETTINGS, "tick": "1s"}
    gist_episodes.write_site(cluster, policy, arrays)
    noted = folder / "decisions"
    cluster.start_controller(program=("-c", TIMER), DECISIONS=str(noted))
    found: dict[str, list[gist_episodes.Episode]] = {name: [] for name in drawn}
    try:
        for number in range(len(drawn["A100"])):
            ids = {name: gist_episodes.submit(cluster, name, own[number], hour_s) for name, own in drawn.items()}
            for own in ids.values():
                wait_until(lambda f=own[-1]: cluster.state_of(f) in ENDED, 600, "f to end")  # type: ignore[misc]
            decisions = np.array([float(line) for line in noted.read_text().splitlines()])
            for name, own in ids.items():
                assert {job.policy for i in own if (job := cluster.job(i))} == {policy}
                found[name].append(gist_episodes.lived(cluster, own, name, hour_s, decisions))
        return found
    finally:
        cluster.close()


def report(partition: str, policy: str, simulated: list[tuple[float, float]], live: list[gist_episodes.Episode]) -> str:
    """One line of the table."""
    use, real = mean(u for u, _ in simulated), mean(e.utilization for e in live)
    of = gist()
    kwh = of.servers * of.partitions[partition].rated_kw * of.published.energy_h
    return (
        f"{partition} {policy:9}  U {use:.3f} simulated, {real:.3f} live; until f "
        f"{mean(h for _, h in simulated):.0f} h, {mean(e.hours for e in live):.0f} h; inefficient energy "
        f"{kwh * (1 - use) / 1000:.2f} MWh, {kwh * (1 - real) / 1000:.2f} MWh"
    )


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sequences", type=int, default=3)
    options.add_argument("--hour", type=float, default=0.1)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    rng = np.random.default_rng(args.seed)
    drawn = {name: rng.integers(0, 3, (args.sequences, 4)).tolist() for name in gist_episodes.PARTITIONS}
    print("sequences:", {name: ["".join("sml"[k] for k in one) for one in own] for name, own in drawn.items()})
    setting = gist_episodes.on_nodes("A100")
    learned = dqn.train(setting, "masked", dqn.DQNSettings(episodes=200), args.seed)
    print(f"the network: U {learned.best.utilization:.4f} on all 81 sequences after {learned.best.episodes} episodes")
    with tempfile.TemporaryDirectory(dir="/tmp") as where, Testbed(Path(where) / "testbed") as testbed:
        for policy in gist_episodes.FILES:
            live = lived(testbed, Path(where) / policy, policy, learned.arrays, drawn, args.hour)
            for name, own in drawn.items():
                planned = [simulated(name, one, policy, learned.arrays) for one in own]
                print(report(name, policy, planned, live[name]), flush=True)
                runs = [[setting.kinds[k].run_s / HOUR_S for k in one] for one in own]
                more = [np.subtract(e.held, ran) * args.hour for e, ran in zip(live[name], runs, strict=True)]
                print(f"  starting and noticing the end take {np.mean(more):.1f} s a job; U live by episode: "
                      f"{', '.join(f'{e.utilization:.3f}' for e in live[name])}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
