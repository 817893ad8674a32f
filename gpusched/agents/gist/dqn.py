"""DQN for the paper's setting (Algorithm 1): replay memory, target network; one file, to be read from top to bottom.

Details, each a field of `DQNSettings`:

- Q-learning (Watkins, Dayan, 1992) with a network, a replay memory and a target network (Mnih et al., Nature 518,
  2015); double: the online network chooses, the target network values (van Hasselt, Guez, Silver, AAAI 2016); dueling:
  value and advantages apart (Wang et al., ICML 2016). The last layer of the two is one linear map, and saved as one.
- Huber loss, Adam, gradients clipped by norm, the target network moved a little at every update.
- Exploration: epsilon falls linearly over the first part of the episodes; drawn among what the mask allows.
- Many clusters act at once, one network call for all; then some updates.
- Every so often the greedy agent plays all sequences of the setting (81 in the paper): the exact mean, no estimate. The
  weights with the highest are kept, and training ends early when that has not risen for a while.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpusched.agents.common import torch_
from gpusched.agents.common.checkpoint import Checkpoint, with_prefix
from gpusched.agents.common.request import TrainingReport
from gpusched.agents.gist.clusters import Clusters, kept, put_back
from gpusched.agents.gist.setting import EpisodeSetting
from gpusched.config.weights import Arrays
from gpusched.sched.state import Floats, Ints

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DQNSettings:
    """Hyper-parameters.

    Attributes:
        episodes: To train for (the paper: 1000). clusters: That act at once.
        hidden, layers: Of the network. gamma: Discount. rate: Of Adam, falling linearly to a tenth.
        memory: Decisions remembered. batch: Drawn for one update. updates: After every step of all clusters.
        begin: Decisions before the first update. blend: By how much the target network moves.
        epsilon, epsilon_end: Exploration; explore: part of the episodes over which it falls.
        scale, offset: The network learns (reward - offset at the end of an episode) * scale.
        every: Episodes between two exact evaluations. patience: Of them without a rise by 1e-4; then it ends.
    """

    episodes: int = 1000
    clusters: int = 8
    hidden: int = 64
    layers: int = 2
    gamma: float = 0.95
    rate: float = 1e-3
    memory: int = 50_000
    batch: int = 128
    updates: int = 4
    begin: int = 128
    blend: float = 0.02
    epsilon: float = 1.0
    epsilon_end: float = 0.02
    explore: float = 0.5
    scale: float = 1.0
    offset: float = 0.0
    double: bool = True
    dueling: bool = True
    every: int = 20
    patience: int = 1000


WAIT = DQNSettings(
    episodes=30_000, clusters=64, hidden=128, gamma=1.0, rate=5e-4, batch=512, updates=4, memory=200_000, begin=4096,
    blend=0.01, explore=0.6, epsilon_end=0.03, scale=10.0, offset=0.7, every=1000, patience=12,
)  # fmt: skip
"""For the variant that may keep a job waiting: the reward comes once, at the end, and differences are small."""


class Point(NamedTuple):
    """One evaluation: after so many episodes and seconds, the exact mean U and hours over all sequences."""

    episodes: int
    seconds: float
    utilization: float
    hours: float


class DQNResult(NamedTuple):
    """A trained agent.

    Attributes:
        arrays: The network's weights as ``q.N.weight``, ``q.N.bias``.
        best: The evaluation of these weights. course: All evaluations.
        by_sequence: ``float64[sequences]``: U of each sequence under these weights.
        played: ``float64[episodes]``: U of the training episodes in their order, exploration included.
        seconds: Wall time, evaluations included.
    """

    arrays: Arrays
    best: Point
    course: tuple[Point, ...]
    by_sequence: Floats
    played: Floats
    seconds: float


class ReplayBuffer:
    """The last so many decisions, in arrays made once; ``[size, ...]``."""

    def __init__(self, size: int, inputs: int, actions: int) -> None:
        self.seen, self.then = np.zeros((2, size, inputs), np.float32)
        self.action, self.reward = np.zeros(size, np.int64), np.zeros(size, np.float32)
        self.over, self.mask = np.zeros(size, np.float32), np.zeros((size, actions), np.uint8)
        self.count = 0

    @property
    def columns(self) -> Arrays:
        """All of it, for a checkpoint."""
        return {f"memory.{name}": array for name, array in vars(self).items() if name != "count"}

    def add(self, seen: Any, action: Ints, reward: Any, then: Any, mask: Any, over: Any) -> None:
        """One decision of every cluster."""
        at = (self.count + np.arange(len(action))) % len(self.action)
        self.seen[at], self.action[at], self.reward[at] = seen, action, reward
        self.then[at], self.mask[at], self.over[at] = then, mask, over
        self.count += len(action)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Rows, drawn with replacement."""
        return rng.integers(0, min(self.count, len(self.action)), count)


def network(inputs: int, actions: int, hyper: DQNSettings) -> Any:
    """ReLU layers, and on top Q; with ``dueling`` one output more, the value."""
    torch = torch_.require("torch")
    widths = [inputs, *[hyper.hidden] * hyper.layers]
    layers = [m for a, b in pairwise(widths) for m in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(widths[-1], actions + hyper.dueling))
    last = net[-1]
    torch.nn.init.zeros_(last.bias)
    with torch.no_grad():
        last.weight.mul_(0.01)  # "Q values are set to 0 in all states" (Section 5.2), nearly
    return net


def q_of(net: Any, seen: torch.Tensor, hyper: DQNSettings) -> torch.Tensor:
    """``float32[rows, actions]``."""
    out: torch.Tensor = net(seen)
    if not hyper.dueling:
        return out
    value, advantage = out[:, :1], out[:, 1:]
    return value + advantage - advantage.mean(1, keepdim=True)


def arrays_of(net: Any, hyper: DQNSettings) -> Arrays:
    """The layers as `gpusched.agents.common.nets.net_of` reads them; the dueling heads folded into one layer."""
    found: Arrays = {}
    linear = [layer for layer in net if hasattr(layer, "weight")]
    for i, layer in enumerate(linear):
        weight, bias = (p.detach().cpu().numpy().astype(np.float64) for p in (layer.weight, layer.bias))
        if hyper.dueling and i == len(linear) - 1:
            weight = weight[1:] - weight[1:].mean(0) + weight[0]
            bias = bias[1:] - bias[1:].mean() + bias[0]
        found[f"q.{i}.weight"], found[f"q.{i}.bias"] = weight.astype(np.float32), bias.astype(np.float32)
    return found


class DQNAgent:
    """One agent in training."""

    def __init__(self, setting: EpisodeSetting, variant: str, hyper: DQNSettings, seed: int, device: str) -> None:
        self.device = torch_.set_up(seed, device)
        self.torch = torch_.require("torch")
        self.hyper = hyper
        self.rng = np.random.default_rng([seed, 1])
        self.clusters = Clusters(setting, variant, hyper.clusters, seed)
        self.judge = Clusters(setting, variant, len(setting.sequences()), seed, setting.sequences())
        inputs, actions = self.clusters.batch.observation.shape[1], self.clusters.actions
        self.online = network(inputs, actions, hyper).to(self.device)
        self.target = copy.deepcopy(self.online)
        self.optimizer = self.torch.optim.Adam(self.online.parameters(), lr=hyper.rate, eps=1e-5)
        self.memory = ReplayBuffer(hyper.memory, inputs, actions)
        self.played: list[float] = []
        self.best_arrays: Arrays = {}
        self.by_sequence = np.zeros(len(self.judge.batch.job))
        self.course: list[Point] = []
        self.judge.begin()
        self.judge.step(np.zeros(len(self.judge.batch.job), np.int64))
        self.clusters.begin()
        self.earlier_s, self.since = 0.0, time.monotonic()  # compiling is over by now

    @property
    def seconds(self) -> float:
        """Trained so far, earlier runs included."""
        return self.earlier_s + time.monotonic() - self.since

    @property
    def best(self) -> Point:
        """The evaluation of the weights that are kept: the highest, the first of equals."""
        return max(self.course, key=lambda point: point.utilization)

    def greedy(self, seen: Any, mask: Any) -> Ints:
        """``int64[rows]``: the allowed actions of the highest Q."""
        torch = self.torch
        with torch.inference_mode():
            q = q_of(self.online, torch.from_numpy(seen).to(self.device), self.hyper).cpu().numpy()
        chosen: Ints = np.argmax(np.where(mask > 0, q, -np.inf), axis=1)
        return chosen

    def act(self) -> None:
        """One decision of every cluster, remembered."""
        hyper, batch = self.hyper, self.clusters.batch
        done = len(self.played) / max(1.0, hyper.explore * hyper.episodes)
        epsilon = hyper.epsilon + (hyper.epsilon_end - hyper.epsilon) * min(1.0, done)
        actions = self.greedy(batch.observation, batch.mask)
        draws = self.rng.random((len(actions), batch.mask.shape[1])) * batch.mask
        actions = np.where(self.rng.random(len(actions)) < epsilon, np.argmax(draws, axis=1), actions)
        seen = batch.observation.copy()
        self.clusters.step(actions)
        over = batch.done != 0
        reward = (batch.reward - hyper.offset * over) * hyper.scale
        self.memory.add(seen, actions, reward, batch.observation, batch.mask, over)
        self.played.extend(batch.utilization[over].tolist())

    def update(self) -> None:
        """One step of Adam on a batch of the memory."""
        torch, hyper, memory = self.torch, self.hyper, self.memory
        rows = memory.draw(self.rng, hyper.batch)
        columns = (memory.seen, memory.then, memory.action, memory.reward, memory.over, memory.mask)
        seen, then, action, reward, over, mask = (torch.from_numpy(c[rows]).to(self.device) for c in columns)
        with torch.no_grad():
            barred = mask == 0
            after = q_of(self.target, then, hyper)
            chooser = q_of(self.online, then, hyper) if hyper.double else after
            choice = chooser.masked_fill(barred, -torch.inf).argmax(1, keepdim=True)
            wanted = reward + hyper.gamma * (1 - over) * after.gather(1, choice).squeeze(1)
        q = q_of(self.online, seen, hyper).gather(1, action.unsqueeze(1)).squeeze(1)
        loss = torch.nn.functional.smooth_l1_loss(q, wanted)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, hyper.blend)

    def evaluate(self) -> Point:
        """All sequences, greedily; keeps the weights if they are the best so far."""
        batch = self.judge.begin()
        while (batch.job >= 0).any():
            self.judge.step(self.greedy(batch.observation, batch.mask))
        mean, hours = float(batch.utilization.mean()), float(batch.hours.mean())
        if not self.course or mean > self.best.utilization:
            self.best_arrays, self.by_sequence = arrays_of(self.online, self.hyper), batch.utilization.copy()
        self.course.append(Point(len(self.played), self.seconds, mean, hours))
        return self.course[-1]

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """Everything, for a checkpoint."""
        arrays = {**self.memory.columns, **kept(self.clusters.batch), "played": np.array(self.played)}
        arrays["by_sequence"] = self.by_sequence
        learned = {"online": self.online, "target": self.target, "optimizer": self.optimizer}
        arrays |= torch_.pack_state(**{name: of.state_dict() for name, of in learned.items()})
        arrays |= {f"best.{key}": value for key, value in self.best_arrays.items()}
        return arrays, {
            "rng": self.rng.bit_generator.state, "course": self.course, "seconds": self.seconds,
            "count": self.memory.count,
        }  # fmt: skip

    def restore(self, arrays: Arrays, state: dict[str, Any]) -> None:
        """The other way."""
        for name, array in self.memory.columns.items():
            array[:] = arrays[name]
        put_back(self.clusters.batch, arrays)
        self.played, self.memory.count = arrays["played"].tolist(), state["count"]
        self.by_sequence = np.array(arrays["by_sequence"], np.float64)
        self.rng.bit_generator.state = state["rng"]
        self.course = [Point(*point) for point in state["course"]]
        self.earlier_s = state["seconds"]
        learned = torch_.unpack_state(arrays)
        self.online.load_state_dict(learned["online"])
        self.target.load_state_dict(learned["target"])
        self.optimizer.load_state_dict(learned["optimizer"])
        self.best_arrays = with_prefix("best.", arrays)


def train(
    setting: EpisodeSetting, variant: str, hyper: DQNSettings, seed: int, *, device: str = "cpu",
    report: TrainingReport | None = None,
    checkpoint: Checkpoint | None = None, until: Callable[[Point], bool] = lambda point: False,
) -> DQNResult:  # fmt: skip
    """Trains one agent, from where ``checkpoint`` left it. Same seed, same weights, bit for bit on a CPU.

    Variants: ``masked``, ``paper`` (what is impossible can be chosen and is punished), ``wait`` (rewarded with the
    episode's utilization, free to keep a job waiting). Ends early where ``until`` is true of an evaluation.
    """
    report = report or TrainingReport()
    agent = DQNAgent(setting, variant, hyper, seed, device)
    if checkpoint is not None and (saved := checkpoint.load()) is not None:
        agent.restore(*saved)
        report.note(f"goes on from episode {len(agent.played)} of {hyper.episodes}")
    if not agent.course:
        agent.evaluate()
    while len(agent.played) < hyper.episodes:
        before = len(agent.played)
        agent.act()
        if agent.memory.count >= hyper.begin:
            for _ in range(hyper.updates):
                agent.update()
        done = len(agent.played)
        if done // hyper.every > before // hyper.every or done >= hyper.episodes:
            for group in agent.optimizer.param_groups:
                group["lr"] = hyper.rate * max(0.1, 1 - done / hyper.episodes)
            point = agent.evaluate()
            report.step(done, hyper.episodes, float(np.mean(agent.played[-100:])), point.utilization)
            if until(point) or _settled(agent.course, hyper.patience):
                break
            if checkpoint is not None and checkpoint.due():
                checkpoint.save(*agent.state())
    course, played = tuple(agent.course), np.array(agent.played)
    return DQNResult(agent.best_arrays, agent.best, course, agent.by_sequence, played, agent.seconds)


def _settled(course: list[Point], patience: int) -> bool:
    """Whether the last ``patience`` evaluations brought nothing."""
    if len(course) <= patience:
        return False
    best = max(point.utilization for point in course[:-patience])
    return max(point.utilization for point in course[-patience:]) < best + 1e-4


def decisions_per_s(
    setting: EpisodeSetting, variant: str = "masked", clusters: int = 4096, seconds: float = 2.0
) -> tuple[float, float]:  # fmt: skip
    """Decisions per second of wall time, and per second of CPU time of all threads, by an untrained network.

    Compiling is left out, and the best of some rounds counts (``seconds``: of all of them together): what else runs on
    the machine only ever takes away.
    """
    torch_.set_up(0)
    torch = torch_.require("torch")
    hyper = DQNSettings()
    many = Clusters(setting, variant, clusters, 0)
    batch = many.begin()
    net = network(batch.observation.shape[1], many.actions, hyper)
    seen = torch.from_numpy(batch.observation)  # the same memory: what the clusters write, the network reads

    def step() -> None:
        with torch.inference_mode():
            q = q_of(net, seen, hyper).numpy()
        many.step(np.where(batch.mask > 0, q, -np.inf).argmax(axis=1))

    step()
    rounds = []
    for _ in range(10):
        done, wall, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - wall < seconds / 10:
            step()
            done += clusters
        rounds.append((done / (time.perf_counter() - wall), done / (time.process_time() - cpu)))
    return max(wall for wall, _ in rounds), max(cpu for _, cpu in rounds)
