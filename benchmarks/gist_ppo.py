"""PPO in place of evolution for the order of the queue, on eight servers, in as many replayed jobs.

PPO (Schulman et al., arXiv:1707.06347) samples an order of the queue at every decision, by Gumbel noise on the agent's
scores, so that an order's probability is Plackett and Luce's; it learns the scores by what jobs wait and run from then
on. Evolution changes the same weights and looks at the mean JCT of whole replays. Both begin as WFP3 with EASY.

`.venv/bin/python -m benchmarks.gist_ppo [--rounds 60] [--jobs 1000] [--method ppo|evolution]`
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.agent_scale import workload
from gpusched.agents.common.evolve import Evolution
from gpusched.agents.common.queue_replay import AgentQueue, new_queue
from gpusched.agents.gist.decide import by_score, queue_inputs, run_queue, score_queue
from gpusched.agents.gist.networks import JOB_INPUTS, agent_of, heuristic, observation_of
from gpusched.agents.gist.replay import pass_arguments
from gpusched.agents.gist.scale import figures, policy_of
from gpusched.compiled import jit
from gpusched.sched.fit import fitting
from gpusched.sim.engine.build import ReplayOptions, log_of, world_of
from gpusched.sim.engine.loop import next_decision
from gpusched.sim.engine.queue import enter, remove_running, start_granted, state_of
from gpusched.sim.engine.state import DECIDE, IN_SYSTEM, READY, EventLog, Passes, Sim
from gpusched.sim.pool import Pool
from gpusched.traces.generate import generate

MOST, HOUR = 16, 3600.0  # jobs of an order that count for its probability


class Record(NamedTuple):
    """Observations and actions: ``seen: float32[n, MOST, inputs]`` in the order drawn, ``count``, ``area`` until then.

    ``area``: job seconds in the system since the first submission; ``total[0]``: decisions, ``total[1]``: area.
    """

    seen: npt.NDArray[np.float32]
    count: npt.NDArray[np.int64]
    area: npt.NDArray[np.float64]
    total: npt.NDArray[np.float64]


@jit
def play(sim: Sim, log: EventLog, passes: Passes, queue: AgentQueue, seed: int, record: Record) -> int:
    """One replay with orders drawn at random; returns as the engine does."""
    np.random.seed(seed)
    before, judged = 0.0, queue.agent
    while True:
        inside = sim.counter[IN_SYSTEM]
        code = next_decision(sim, log, passes)
        if code != DECIDE:
            return code
        now = sim.clock[0]
        record.total[1] += inside * (now - before)
        before = now
        for i in range(sim.counter[READY]):
            enter(sim, queue.waiting, queue.size, sim.ready[i])
        own = queue.waiting[: queue.size[0]].copy()
        if own.size == 0:
            continue
        state = state_of(sim, passes, queue.outcome)
        fits = fitting(state, own)
        if not fits.any():
            continue
        observation = observation_of(sim.resources, passes.usable, passes.releases, passes.requests, passes.jobs, own)
        inputs = np.zeros((own.size, len(JOB_INPUTS)), np.float32)
        queue_inputs(inputs, observation, passes.usable, passes.requests, passes.jobs, own, judged.submit, now, fits)
        scores, _ = score_queue(inputs, judged.agent)
        noisy = scores - np.log(-np.log(np.random.random(own.size)))
        ordered = by_score(own, noisy, judged.priority)
        if own.size > 1:
            at = int(record.total[0])
            drawn = np.argsort(-noisy, kind="mergesort")
            for k in range(min(own.size, MOST)):
                record.seen[at, k] = inputs[drawn[k]]
            record.count[at], record.area[at] = min(own.size, MOST), record.total[1]
            record.total[0] += 1
        queue.outcome.total[:] = 0
        run_queue(state, passes.usable, ordered, judged.submit, judged.agent, observation, fits)
        start_granted(sim, log, queue.outcome, None)
        remove_running(sim, queue.waiting, queue.size)


def roll_out(arrays: dict[str, Any], seed: int, jobs: int, servers: int) -> Record:
    """One workload played to its end."""
    trace = generate(workload(servers, jobs), seed)
    world = world_of(trace, Pool.uniform(servers, 8), policy_of(arrays), ReplayOptions())
    most, agent = 3 * jobs, agent_of(arrays)
    record = Record(
        np.zeros((most, MOST, len(JOB_INPUTS)), np.float32), np.zeros(most, np.int64), np.zeros(most), np.zeros(2)
    )
    play(world.sim, log_of(world), world.passes, new_queue(world.sim, pass_arguments(world, agent)), seed, record)
    n = int(record.total[0])
    return Record(record.seen[:n], record.count[:n], record.area[:n], record.total)


class Scores(torch.nn.Module):
    """The agent's job question: a linear part and a small network."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        super().__init__()
        width = len(arrays["job.0.bias"])
        self.base = torch.nn.Parameter(torch.tensor(arrays["job.base"]))
        self.job = torch.nn.Sequential(
            torch.nn.Linear(len(JOB_INPUTS), width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
        )
        with torch.no_grad():
            for i in (0, 1):
                self.job[2 * i].weight.copy_(torch.tensor(arrays[f"job.{i}.weight"]))
                self.job[2 * i].bias.copy_(torch.tensor(arrays[f"job.{i}.bias"]))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """Scores of jobs seen."""
        return seen @ self.base + self.job(seen).squeeze(-1)

    def into(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the weights' arrays with this question's replaced."""
        found = {"job.base": self.base, **{f"job.{i}.{k}": getattr(self.job[2 * i], k) for i in (0, 1)
                                           for k in ("weight", "bias")}}  # fmt: skip
        return {**arrays, **{n: p.detach().numpy().copy() for n, p in found.items()}}


def log_likelihood(scores: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Of the order in which the rows stand (Plackett, Luce)."""
    there = torch.arange(MOST) < count[:, None]
    scores = scores.masked_fill(~there, -1e9)
    rest = torch.logcumsumexp(scores.flip(-1), -1).flip(-1)
    return ((scores - rest) * there).sum(-1)


def ppo(rounds: int, jobs: int, servers: int, show: Any, batch: int = 8, clip: float = 0.2) -> None:
    """Train in rounds of ``batch`` workloads and four epochs of minibatches each; advantages by GAE(0.999, 0.95)."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    arrays: dict[str, Any] = heuristic()
    scores, critic = Scores(arrays), torch.nn.Sequential(
        torch.nn.Linear(2 * len(JOB_INPUTS) + 1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    )  # fmt: skip
    adam = torch.optim.Adam([{"params": scores.parameters(), "lr": 3e-3}, {"params": critic.parameters(), "lr": 3e-3}])
    for round_ in range(rounds):
        records = [roll_out(arrays, 1000 + round_ * batch + i, jobs, servers) for i in range(batch)]
        seen = torch.tensor(np.concatenate([r.seen for r in records]))
        count = torch.tensor(np.concatenate([r.count for r in records]))
        many = count[:, None].float()
        brief = torch.cat([seen.sum(1) / many, seen.amax(1), many / MOST], 1)
        with torch.no_grad():
            value, old = critic(brief).squeeze(-1).numpy(), log_likelihood(scores(seen), count)
        gains, returns, at = [], [], 0
        for r in records:
            reward = -np.diff(np.append(r.area, r.total[1])) / (100 * HOUR)
            v, gain = np.append(value[at : at + len(reward)], 0.0), np.zeros(len(reward) + 1)
            for i in range(len(reward) - 1, -1, -1):
                gain[i] = reward[i] + 0.999 * v[i + 1] - v[i] + 0.999 * 0.95 * gain[i + 1]
            gains.append(gain[:-1])
            returns.append(gain[:-1] + v[:-1])
            at += len(reward)
        gain, back = (torch.tensor(np.concatenate(x), dtype=torch.float32) for x in (gains, returns))
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        for _ in range(4):
            for rows in torch.randperm(len(gain)).split(512):
                ratio = (log_likelihood(scores(seen[rows]), count[rows]) - old[rows]).clamp(-5, 5).exp()
                gain_ = gain[rows]
                loss = -torch.minimum(ratio * gain_, ratio.clamp(1 - clip, 1 + clip) * gain_).mean()
                loss = loss + 0.5 * (critic(brief[rows]).squeeze(-1) - back[rows]).square().mean()
                adam.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(scores.parameters(), 0.5)
                adam.step()
        arrays = scores.into(arrays)
        show(round_, arrays)


def evolution(rounds: int, jobs: int, servers: int, show: Any, population: int = 8) -> None:
    """Train the same weights by CMA-ES, with as many replays per round."""
    start: dict[str, Any] = heuristic()
    names = [n for n in start if n.startswith("job.")]
    values = np.concatenate([start[n].ravel().astype(np.float64) for n in names])
    steps = np.concatenate([np.full(start[n].size, 0.4 if n.endswith("base") else 0.1) for n in names])

    def arrays_of(x: npt.NDArray[np.float64]) -> dict[str, Any]:
        cuts = np.cumsum([start[n].size for n in names])[:-1]
        return {**start, **{n: part.reshape(start[n].shape).astype(np.float32)
                            for n, part in zip(names, np.split(x, cuts), strict=True)}}  # fmt: skip

    search, pool = Evolution(values, steps, population, 0), Pool.uniform(servers, 8)
    for round_ in range(rounds):
        trace = generate(workload(servers, jobs), 1000 + round_)
        search.tell(np.array([figures(policy_of(arrays_of(x)), trace, pool).mean_jct_s for x in search.ask()]))
        show(round_, arrays_of(search.mean))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--method", choices=("ppo", "evolution"), default="ppo")
    args = parser.parse_args()
    pool = Pool.uniform(args.servers, 8)
    traces = [generate(workload(args.servers, 5000), 500_009 + i) for i in range(4)]
    start = [figures(policy_of(heuristic()), t, pool).mean_jct_s for t in traces]
    begin = time.process_time()

    def show(round_: int, arrays: dict[str, Any]) -> None:
        if round_ % 5 == 4:
            now = [figures(policy_of(arrays), t, pool).mean_jct_s for t in traces]
            change = np.exp(np.mean(np.log(np.array(now) / start))) - 1
            seconds = time.process_time() - begin
            print(f"round {round_ + 1:4}: mean JCT {100 * change:+.1f} % of the start's, {seconds:.0f} s", flush=True)

    {"ppo": ppo, "evolution": evolution}[args.method](args.rounds, args.jobs, args.servers, show)


if __name__ == "__main__":
    main()
