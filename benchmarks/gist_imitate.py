"""A "hold" network of the GIST agent that imitates the exact optimum of two servers, judged on 2, 8 and 100 servers.

    .venv/bin/python -m benchmarks.gist_imitate [--width 16] [--gap 24] [--jobs 5000] [--seeds 10]

In the paper's setting, jobs ``--gap`` hours apart, expectimax knows for each decision on its optimal path what starting
the job gains over keeping it waiting. From what the agent sees of these states a network of this width learns to hold
(and, beside it, a linear rule: width 0), weighted by what the choice is worth; ages are not imitated. On two servers
the figure is mean U over all 81 sequences, largest job first; on 8 and 100 mean JCT on `agent_workload.yaml`, in place
of the hold rule of the start `found, small` or `found, large`, which is width 0 as it comes. Untrained: a rule that
holds nothing, "start what fits".
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np

from benchmarks.agent_scale import workload
from gpusched.agents.common import torch_
from gpusched.agents.common.evaluate import interval
from gpusched.agents.gist.expectimax import Kinds, Servers, _Expectimax
from gpusched.agents.gist.networks import HOLD_INPUTS, heuristic, start
from gpusched.agents.gist.scale import figures, policy_of
from gpusched.agents.gist.section6 import replay_episodes
from gpusched.agents.gist.setting import paper
from gpusched.config.weights import Arrays
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import Pool
from gpusched.traces.generate import generate
from gpusched.traces.trace import Trace

PATIENCE_S = 90 * 86400.0
RULES = ("wfp3+easy", "sjf-limit+easy")  # the best at 8 and at 32 servers (`agent_scale`)
HOLDS_NOTHING = np.array([-0.5 if name == "one" else 0.0 for name in HOLD_INPUTS], np.float32)


class Teacher(_Expectimax):
    """Expectimax that notes the decisions on its optimal path: what the agent sees, and what a start gains in U."""

    def note_all(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``float32[decisions, inputs]`` and ``float64[decisions]``."""
        self.value()
        self.rows: list[np.ndarray] = []
        self.gains: list[float] = []
        self.seen: set[object] = set()
        self.follow(0.0, ((),) * self.servers, (), ())
        return np.array(self.rows, np.float32), np.array(self.gains)

    def follow(self, now: float, servers: Servers, waiting: Kinds, submitted: Kinds) -> None:
        """Go on as `advance` does, and note the decisions."""
        times = [end for server in servers for end, _ in server]
        times += [len(submitted) * self.gap] * (len(submitted) < self.jobs)
        if not times or (servers, waiting, submitted, now) in self.seen:
            return
        self.seen.add((servers, waiting, submitted, now))
        now = min(times)
        servers = tuple(sorted(tuple(run for run in server if run[0] != now) for server in servers))
        if len(submitted) == self.jobs or len(submitted) * self.gap > now:
            self.decide(now, servers, waiting, submitted)
            return
        for drawn in itertools.product(range(len(self.gpus)), repeat=self.jobs if self.gap == 0 else 1):
            queue = tuple(sorted((*waiting, *drawn), reverse=True))
            self.decide(now, servers, queue, tuple(sorted((*submitted, *drawn))))

    def decide(self, now: float, servers: Servers, waiting: Kinds, submitted: Kinds) -> None:
        """Take the best choice for each waiting job in turn, and note it."""
        at, head, first = 0, -1, (sum(map(self.free, servers)) / self.total, len(waiting))
        while at < len(waiting):
            kind, options = waiting[at], []
            for i, server in enumerate(servers):
                if self.free(server) >= self.gpus[kind]:
                    fuller = tuple(sorted((*server, (now + self.hours[kind], kind))))
                    after = tuple(sorted((*servers[:i], fuller, *servers[i + 1 :])))
                    rest = waiting[:at] + waiting[at + 1 :]
                    options.append((self.choose(now, after, rest, at, submitted), after, server))
            if not options:
                head, at = (kind if head < 0 else head), at + 1
                continue
            worth, after, server = max(options, key=lambda option: option[0])
            gain = worth - self.choose(now, servers, waiting, at + 1, submitted)
            if any(servers):  # with nothing running the agent is not asked
                self.rows.append(self.seen_by_agent(now, servers, server, kind, head, first))
                self.gains.append(gain)
            if gain >= 0:
                servers, waiting = after, waiting[:at] + waiting[at + 1 :]
            else:
                at += 1
        self.follow(now, servers, waiting, submitted)

    def free(self, server: tuple[tuple[float, int], ...]) -> int:
        """Return a server's free GPUs."""
        return self.size - sum(self.gpus[k] for _, k in server)

    def seen_by_agent(
        self, now: float, servers: Servers, server: object, kind: int, head: int, first: tuple[float, int]
    ) -> np.ndarray:
        """Return `HOLD_INPUTS`, as `networks.hold_inputs` writes them; ages count as an hour (0)."""
        row = dict.fromkeys(HOLD_INPUTS, 0.0)
        row |= {"one": 1.0, "log_limit": np.log(self.hours[kind]) / 4, "share": self.gpus[kind] / self.total}
        row |= {"free": first[0], "waiting": np.log1p(first[1]) / 8}
        row["breaks_empty"] = float(not server and self.gpus[kind] < self.size)
        if head >= 0:
            fits = [(self.fits_at(own, self.gpus[head], now), own) for own in servers]
            shadow, reserved = min(fits, key=lambda found: found[0])
            until = max(shadow - now, 1 / 3600)
            late = self.hours[kind] > until
            row |= {"head": 1.0, "head_share": self.gpus[head] / self.total, "late": float(late)}
            row["in_the_way"] = float(server == reserved)
            row["late_in_the_way"] = row["late"] * row["in_the_way"]
            row["over_shadow"] = float(np.clip(np.log(self.hours[kind] / until) / 4, -2, 2))
            row["shadow_in"] = np.log(until) / 4
        return np.array([row[name] for name in HOLD_INPUTS])

    def fits_at(self, server: tuple[tuple[float, int], ...], gpus: int, now: float) -> float:
        """Return when a server has so many GPUs free."""
        free = self.free(server)
        for end, kind in server:
            if free >= gpus:
                break
            now, free = end, free + self.gpus[kind]
        return now


def imitated(rows: np.ndarray, gains: np.ndarray, width: int, seed: int = 0) -> Arrays:
    """Return the arrays of a hold rule (linear part, and a network of ``width``) by weighted logistic regression."""
    torch = torch_.require("torch")
    torch_.set_up(seed, "cpu")
    base = torch.zeros(rows.shape[1], requires_grad=True)
    net = torch.nn.Sequential(torch.nn.Linear(rows.shape[1], max(width, 1)), torch.nn.ReLU(),
                              torch.nn.Linear(max(width, 1), 1))  # fmt: skip
    x, holds = torch.from_numpy(rows), torch.from_numpy((gains < 0).astype(np.float32))
    weight = torch.from_numpy((np.abs(gains) / np.abs(gains).mean()).astype(np.float32))
    optimizer = torch.optim.Adam([base, *(net.parameters() if width else [])], lr=0.01)
    for _ in range(3000):
        logit = x @ base + (net(x).squeeze(1) if width else 0.0)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, holds, weight=weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = float(((logit > 0) == (holds > 0)).float().mul(weight).sum() / weight.sum())
    print(f"width {width}: {len(gains)} decisions, {float(holds.mean()):.0%} hold; {right:.1%} of the worth right")
    arrays: Arrays = {"hold.base": base.detach().numpy()}
    layers = [net[0], net[2]] if width else []
    for i, layer in enumerate(layers):
        arrays |= {f"hold.{i}.weight": layer.weight.detach().numpy(), f"hold.{i}.bias": layer.bias.detach().numpy()}
    return arrays


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("--width", 16), ("--jobs", 5000), ("--seeds", 10)):
        options.add_argument(name, type=int, default=value)
    options.add_argument("--gap", type=float, default=24.0)
    args = options.parse_args()
    teacher = Teacher(paper("A100", args.gap), may_wait=True)
    rows, gains = teacher.note_all()
    learned = {width: imitated(rows, gains, width) for width in (0, args.width)}
    print(f"2 servers, mean U: the optimum {teacher.value():.4f}")
    imitations = {f"imitation, width {width}": arrays for width, arrays in learned.items()}
    rules: dict[str, Arrays] = {"start what fits": {"hold.base": HOLDS_NOTHING}, "EASY": {}, **imitations}
    for name, arrays in rules.items():
        weights = {**heuristic(0, 0, log_gpus=1.0), **arrays}
        u = replay_episodes(policy_of(weights, name, PATIENCE_S), "best-fit", args.gap).utilization.mean()
        print(f"  {name}: {u:.4f}", flush=True)
    for servers, begin in ((8, "found, small"), (100, "found, large")):
        pool, comes = Pool.uniform(servers, 8), start(begin, 0)
        traces = [generate(workload(servers, args.jobs), 9300 + seed) for seed in range(args.seeds)]

        def jct(policy: ReplayPolicy | str, traces: list[Trace] = traces, pool: Pool = pool) -> np.ndarray:
            return np.array([figures(policy, trace, pool).mean_jct_s / 3600 for trace in traces])

        best, rule = min(((jct(rule), rule) for rule in RULES), key=lambda found: found[0].mean())
        print(f"{servers} servers, best rule {rule}: {best.mean():.2f} h", flush=True)
        policies = {"width 0 as it comes": {}} | {name: rules[name] for name in ("start what fits", *imitations)}
        for name, arrays in policies.items():
            hours = jct(policy_of({**comes, **arrays}, name))
            change = 100 * (hours / best - 1)
            low, high = interval(change.tolist())
            between = "" if low is None else f" ({low:+.1f} to {high:+.1f})"
            print(f"  {name}: {hours.mean():.2f} h, {change.mean():+.1f} %{between} against it", flush=True)


if __name__ == "__main__":
    main()
