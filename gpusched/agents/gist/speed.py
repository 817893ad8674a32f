"""How many decisions a second the batched clusters make with a network that decides for all of them in one call."""

from __future__ import annotations

import time

import numpy as np

from gpusched.agents.common import torch_
from gpusched.agents.gist import dqn
from gpusched.agents.gist.clusters import Clusters
from gpusched.agents.gist.setting import Setting

ROUNDS = 10


def decisions_per_s(
    setting: Setting, variant: str = "masked", clusters: int = 4096, seconds: float = 2.0
) -> tuple[float, float]:  # fmt: skip
    """Decisions per second of wall time, and per second of CPU time of all threads, by an untrained network.

    Compiling is left out, and the best of some rounds counts (``seconds``: of all of them together): what else runs on
    the machine only ever takes away.
    """
    torch_.begin(0)
    torch = torch_.need("torch")
    hyper = dqn.Hyper()
    many = Clusters(setting, variant, clusters, 0)
    batch = many.begin()
    net = dqn.network(batch.observation.shape[1], many.actions, hyper)
    seen = torch.from_numpy(batch.observation)  # the same memory: what the clusters write, the network reads

    def step() -> None:
        with torch.inference_mode():
            q = dqn.q_of(net, seen, hyper).numpy()
        many.step(np.where(batch.mask > 0, q, -np.inf).argmax(axis=1))

    step()
    rounds = []
    for _ in range(ROUNDS):
        done, wall, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - wall < seconds / ROUNDS:
            step()
            done += clusters
        rounds.append((done / (time.perf_counter() - wall), done / (time.process_time() - cpu)))
    return max(wall for wall, _ in rounds), max(cpu for _, cpu in rounds)
