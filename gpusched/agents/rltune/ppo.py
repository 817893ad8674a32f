"""PPO over picks (Schulman et al., 2017), with advantages relative to other simulations of the same sequence.

All picks of a simulation share its advantage: the cost below the policy's average over the same sequence, in standard
deviations (as in group-relative variants: Shao et al., 2024); the reward is the relative gain over the base policy.
The network is first trained to predict the error of the estimate from the recorded run times: imitation of an oracle's
shortest-job-first, as far as the features allow.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpusched.agents.common.attention import PARTS
from gpusched.agents.common.torch_ import Adam, pack_state, unpack_state
from gpusched.agents.rltune.candidates import INPUTS, with_net
from gpusched.agents.rltune.decide import PreparedScorer
from gpusched.agents.rltune.episodes import Episode, SimulatedEpisode, simulate
from gpusched.agents.rltune.history import ESTIMATE
from gpusched.agents.rltune.live import OUTPUTS
from gpusched.agents.rltune.settings import RltuneSettings
from gpusched.config.weights import Arrays

if TYPE_CHECKING:
    import torch

_MOST_PICKS = 256  # written down of one play
_MOST_ROWS = 60_000  # learned from at once
_SPREAD = 1e-3
_RAW = np.float32(0.01)  # before the scales are known: so small that nothing is cut off


class PPONetwork:
    """The network of `agents.common.nets` and `agents.common.attention`, in torch.

    Its output is 0 before training. ``attention``: whether jobs of a window attend to each other.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, attention: bool) -> None:
        import torch

        self._torch = torch
        linears = [torch.nn.Linear(inputs, hidden), torch.nn.Linear(hidden, hidden), torch.nn.Linear(hidden, outputs)]
        with torch.no_grad():
            linears[-1].weight.zero_()
            linears[-1].bias.zero_()
        heads = [(part, torch.nn.Linear(hidden, hidden, bias=False).weight) for part in PARTS if attention]
        self._net, self._heads = torch.nn.Sequential(*linears), torch.nn.ParameterDict(heads)
        # so that its state has the names of a weights file; pairs keep their order, a dict would be sorted
        self._parts = torch.nn.ModuleDict({"net": self._net, "attention": self._heads})
        self.attends = attention

    def __call__(self, rows: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """Return ``[..., outputs]`` for ``rows: [..., window, inputs]`` (without attention any rows).

        ``present: bool[..., window]``: which rows are jobs; outputs of others are undefined.
        """
        first, second, last = self._net
        hidden = second(first(rows).relu()).relu()
        if self.attends:
            query, key, value = (self._torch.nn.functional.linear(hidden, self._heads[part]) for part in PARTS)
            likeness = query @ key.transpose(-1, -2) / math.sqrt(hidden.shape[-1])
            likeness = likeness.masked_fill(~present[..., None, :], -1e9)
            hidden = hidden + likeness.softmax(dim=-1) @ value
        answers: torch.Tensor = last(hidden)
        return answers

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the parameters of all layers."""
        found: Iterator[torch.nn.Parameter] = self._parts.parameters()  # typed where torch is not
        return found

    def arrays(self) -> Arrays:
        """Return the weights as in a file."""
        return {name: array.numpy().copy() for name, array in self._parts.state_dict().items()}

    def load(self, arrays: Arrays) -> None:
        """Load the weights of `arrays`."""
        self._parts.load_state_dict({name: self._torch.as_tensor(arrays[name]) for name in self._parts.state_dict()})


class Learner:
    """The network and its optimiser.

    Attributes:
        mean, scale: ``float32[FEATURES]`` each: the network's input is ``(x - mean) * scale``.
    """

    def __init__(self, base: PreparedScorer, settings: RltuneSettings, seed: int) -> None:
        import torch

        self._torch = torch
        self._generator = torch.Generator().manual_seed(seed)
        self._settings, self._base, self._seed = settings, base, seed
        self.net = PPONetwork(INPUTS, settings.hidden, OUTPUTS, settings.attention)
        self.optimiser = Adam((self.net.parameters(), settings.learning_rate))
        self.mean, self.scale = np.zeros(INPUTS, np.float32), np.full(INPUTS, _RAW, np.float32)
        self.steps = self._plays = 0

    def policy(self, strength: float = 1.0, arrays: Arrays | None = None) -> PreparedScorer:
        """Return the base with the network's output added; ``arrays``: other weights of the network."""
        return with_net(self._base, arrays or self.net.arrays(), self.mean, self.scale, strength)

    def state(self) -> tuple[Arrays, dict[str, int]]:
        """Return the state to resume from: arrays and integers."""
        arrays = self.net.arrays() | {"mean": self.mean, "scale": self.scale}
        arrays |= pack_state(optimiser=self.optimiser.state_dict(), generator=self._generator.get_state())
        return arrays, {"steps": self.steps, "plays": self._plays}

    def restore(self, arrays: Arrays, numbers: dict[str, int]) -> None:
        """Restore a `state`."""
        learned = unpack_state(arrays)
        self.net.load(arrays)
        self.optimiser.load_state_dict(learned["optimiser"])
        self.mean, self.scale = (arrays[name].astype(np.float32) for name in ("mean", "scale"))
        self._generator.set_state(learned["generator"])
        self.steps, self._plays = numbers["steps"], numbers["plays"]

    def plays(self, episodes: list[Episode], rollouts: int) -> list[list[SimulatedEpisode]]:
        """Simulate every sequence ``rollouts`` times with sampled picks."""
        settings, policy = self._settings, self.policy()
        window = np.array([settings.train_window], np.int64)
        small = policy._replace(scorer=policy.scorer._replace(window=window))
        todo = [episode for episode in episodes for _ in range(rollouts)]
        seeds = [self._seed * 1_000_003 + self._plays + i for i in range(1, len(todo) + 1)]
        self._plays += len(todo)

        def one(episode: Episode, seed: int) -> SimulatedEpisode:
            return simulate(episode, small, settings.temperature, seed, _MOST_PICKS, settings.train_window)

        # Compiled code releases the GIL and every simulation has its own generator: results do not depend on threads.
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            found = list(pool.map(one, todo, seeds))
        self.steps += sum(int(p.trajectory.used[2]) for p in found)
        return [found[i : i + rollouts] for i in range(0, len(found), rollouts)]

    def imitate(self, episodes: list[Episode], advance: Any) -> None:
        """Set the feature scale from data under the base, and train the network on the error of the estimate."""
        torch, settings = self._torch, self._settings
        recorded = self.plays(episodes, 1)
        rows = np.concatenate([p.trajectory.rows[: p.trajectory.used[0]] for mine in recorded for p in mine]) / _RAW
        jobs = ((e, p.trajectory) for e, mine in zip(episodes, recorded, strict=True) for p in mine)
        truth = np.concatenate([e.truth[played.job[: played.used[0]]] for e, played in jobs])
        if not len(rows):
            return
        deviation = rows.std(axis=0)
        scale = np.where(deviation > _SPREAD, 1.0 / np.maximum(deviation, _SPREAD), 0.0).astype(np.float32)
        self.mean, self.scale = rows.mean(axis=0).astype(np.float32), scale
        if settings.knows != "estimate":
            return
        weight = self._base.scorer.linear[0, ESTIMATE] or -1.0
        inputs = np.clip((rows - self.mean) * scale, -5, 5)
        off = (weight * (truth - rows[:, ESTIMATE])).clip(-1, 1).astype(np.float32)
        if self.net.attends:
            inputs, off, present = _windows(recorded, inputs, off, settings.train_window)
        else:
            inputs, off, present = inputs[:_MOST_ROWS], off[:_MOST_ROWS], np.ones(len(off), np.bool_)[:_MOST_ROWS]
        self._fit(torch.from_numpy(inputs), torch.from_numpy(off), torch.from_numpy(present), advance)

    def _fit(self, inputs: torch.Tensor, off: torch.Tensor, present: torch.Tensor, advance: Any) -> None:
        torch, settings = self._torch, self._settings
        at_once = max(settings.batch // (settings.train_window if self.net.attends else 1), 1)
        for epoch in range(settings.imitation):
            for part in torch.randperm(len(inputs), generator=self._generator).split(at_once):
                there = present[part]
                answers = torch.tanh(self.net(inputs[part], there)[..., 0])
                self._step(torch.nn.functional.smooth_l1_loss(answers[there], off[part][there]))
            advance(epoch + 1)

    def improve(self, episodes: list[Episode], base: list[float]) -> float:
        """Run one iteration; return the mean relative gain over the base policy before it."""
        played = self.plays(episodes, self._settings.rollouts)
        objective = self._settings.objective
        costs = np.array([[p.figures.cost(objective) for p in mine] for mine in played])
        gains = np.array(base)[:, None] - costs
        spread = np.maximum(costs.std(axis=1, keepdims=True), _SPREAD)
        advantages = (costs.mean(axis=1, keepdims=True) - costs) / spread
        picks = [(p.trajectory, i, float(a)) for mine, row in zip(played, advantages, strict=True)
                 for p, a in zip(mine, row, strict=True) for i in range(p.trajectory.used[1])]  # fmt: skip
        order = self._torch.randperm(len(picks), generator=self._generator).tolist()
        most = max(_MOST_ROWS // self._settings.train_window, 1)
        if picks:
            self._update([picks[i] for i in order[:most]])
        return float(1.0 - np.exp(-gains.mean()))

    def _update(self, picks: list[tuple[Any, int, float]]) -> None:
        torch, settings = self._torch, self._settings
        rows, score, present, mask, choice, advantage = (
            torch.from_numpy(x) for x in _batch(picks, settings.train_window)
        )
        with torch.no_grad():
            linear = score - torch.tanh(self.net(rows, present)[..., 0])
            before = _log_prob(score / settings.temperature, mask, choice)[0]
        for _ in range(settings.passes):
            for part in torch.randperm(len(choice), generator=self._generator).split(settings.batch):
                logits = (linear[part] + torch.tanh(self.net(rows[part], present[part])[..., 0])) / settings.temperature
                now, entropy = _log_prob(logits, mask[part], choice[part])
                ratio = torch.exp(now - before[part])
                held = torch.clamp(ratio, 1 - settings.clip, 1 + settings.clip)
                gain = torch.minimum(ratio * advantage[part], held * advantage[part])
                self._step(-(gain + settings.entropy * entropy).mean())

    def _step(self, loss: Any) -> None:  # torch's `backward` has no types
        self.optimiser.zero_grad()
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimiser.step()


def _batch(picks: list[tuple[Any, int, float]], window: int) -> tuple[npt.NDArray[Any], ...]:
    """Return ``float32[n, window, FEATURES]`` network inputs, scores, present, mask, choice, advantage."""
    n = len(picks)
    rows, score = np.zeros((n, window, INPUTS), np.float32), np.zeros((n, window), np.float32)
    present, mask = np.zeros((n, window), np.bool_), np.zeros((n, window), np.bool_)
    choice = np.zeros(n, np.int64)
    advantage = np.zeros(n, np.float32)
    for k, (trajectory, i, of) in enumerate(picks):
        first, size = trajectory.first[i], trajectory.size[i]
        rows[k, :size], score[k, :size] = trajectory.rows[first : first + size], trajectory.score[first : first + size]
        present[k, :size] = True
        mask[k, :size], choice[k], advantage[k] = trajectory.mask[i, :size] != 0, trajectory.choice[i], of
    return rows, score, present, mask, choice, advantage


def _windows(
    recorded: list[list[SimulatedEpisode]], rows: npt.NDArray[Any], off: npt.NDArray[Any], most: int
) -> tuple[npt.NDArray[Any], ...]:
    """Return rows by window, ``float32[windows, most, FEATURES]``, their estimate's error, and which rows are jobs."""
    bounds, at = [], 0
    for trajectory in (p.trajectory for mine in recorded for p in mine):
        first, pick = np.unique(
            trajectory.first[: trajectory.used[1]], return_index=True
        )  # a window's picks have the same rows
        bounds += list(zip(at + first, at + first + trajectory.size[pick], strict=True))
        at += int(trajectory.used[0])
    bounds = bounds[: max(_MOST_ROWS // most, 1)]
    windows, target = np.zeros((len(bounds), most, INPUTS), np.float32), np.zeros((len(bounds), most), np.float32)
    present = np.zeros((len(bounds), most), np.bool_)
    for k, (first, end) in enumerate(bounds):
        windows[k, : end - first], target[k, : end - first] = rows[first:end], off[first:end]
        present[k, : end - first] = True
    return windows, target, present


def _log_prob(logits: torch.Tensor, mask: torch.Tensor, choice: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probability of the picks among valid jobs, and the entropy."""
    import torch

    logs = torch.log_softmax(logits.masked_fill(~mask, -1e9), dim=1)
    entropy = -(logs.exp() * logs.masked_fill(~mask, 0.0)).sum(dim=1)
    return logs.gather(1, choice[:, None])[:, 0], entropy
