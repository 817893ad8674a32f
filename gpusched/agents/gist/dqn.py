"""DQN for the paper's setting (Algorithm 1), with replay buffer and target network, in one file to read top to bottom.

Details, each a field of `DQNSettings`:

- Q-learning (Watkins, Dayan, 1992) with a network, a replay buffer and a target network (Mnih et al., Nature 518,
  2015); double: the online network selects, the target network evaluates (van Hasselt, Guez, Silver, AAAI 2016);
  dueling: separate value and advantages (Wang et al., ICML 2016), saved as one linear layer.
- Huber loss, Adam, gradients clipped by norm, a soft update of the target network at every step.
- Exploration: epsilon falls linearly over the first part of the episodes; random actions are valid ones.
- Many clusters act in parallel, with one network call for all; then some updates.
- The greedy agent is evaluated regularly on all sequences of the setting (81 in the paper): the exact mean, not an
  estimate. The best weights are kept, and training stops early when the mean has not risen for a while.
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
from gpusched.agents.gist.clusters import Clusters, restore_clusters, save_clusters
from gpusched.agents.gist.setting import EpisodeSetting
from gpusched.config.weights import Arrays
from gpusched.sched.state import Floats, Ints

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DQNSettings:
    """Hyper-parameters.

    Attributes:
        episodes: Of training (the paper: 1000). clusters: Run in parallel.
        hidden, layers: Of the network. gamma: Discount. rate: Adam's learning rate, falling linearly to a tenth.
        memory: Size of the replay buffer. batch: Decisions per update. updates: After every step of all clusters.
        begin: Decisions before the first update. blend: Rate of the soft update of the target network.
        epsilon, epsilon_end: Exploration; explore: fraction of the episodes over which it falls.
        scale, offset: The network learns (reward - offset at the end of an episode) * scale.
        every: Episodes between exact evaluations. patience: Evaluations without a rise by 1e-4 until training stops.
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
"""For the variant that may keep a job waiting: one reward per episode, at its end, and small differences."""


class Evaluation(NamedTuple):
    """One evaluation: episodes and seconds so far; the exact mean U and hours over all sequences."""

    episodes: int
    seconds: float
    utilization: float
    hours: float


class DQNResult(NamedTuple):
    """A trained agent.

    Attributes:
        arrays: The network's weights as ``q.N.weight``, ``q.N.bias``.
        best: The evaluation of these weights. evaluations: All evaluations.
        by_sequence: ``float64[sequences]``: U of each sequence under these weights.
        episode_utilization: ``float64[episodes]``: U of the training episodes in order, exploration included.
        seconds: Wall time, evaluations included.
    """

    arrays: Arrays
    best: Evaluation
    evaluations: tuple[Evaluation, ...]
    by_sequence: Floats
    episode_utilization: Floats
    seconds: float


class ReplayBuffer:
    """The last ``size`` decisions, in preallocated arrays ``[size, ...]``."""

    def __init__(self, size: int, inputs: int, actions: int) -> None:
        self.observation, self.next_observation = np.zeros((2, size, inputs), np.float32)
        self.action, self.reward = np.zeros(size, np.int64), np.zeros(size, np.float32)
        self.done_flags, self.mask = np.zeros(size, np.float32), np.zeros((size, actions), np.uint8)
        self.count = 0

    @property
    def columns(self) -> Arrays:
        """The arrays, for a checkpoint."""
        return {f"memory.{name}": array for name, array in vars(self).items() if name != "count"}

    def add(self, observation: Any, action: Ints, reward: Any, next_observation: Any, mask: Any, done: Any) -> None:
        """Add one decision of every cluster."""
        at = (self.count + np.arange(len(action))) % len(self.action)
        self.observation[at], self.action[at], self.reward[at] = observation, action, reward
        self.next_observation[at], self.mask[at], self.done_flags[at] = next_observation, mask, done
        self.count += len(action)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """Draw rows with replacement."""
        return rng.integers(0, min(self.count, len(self.action)), count)


def network(inputs: int, actions: int, hyper: DQNSettings) -> Any:
    """Return ReLU layers and an output of Q; with ``dueling`` one more output, the value."""
    torch = torch_.require("torch")
    widths = [inputs, *[hyper.hidden] * hyper.layers]
    layers = [m for a, b in pairwise(widths) for m in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(widths[-1], actions + hyper.dueling))
    last = net[-1]
    torch.nn.init.zeros_(last.bias)
    with torch.no_grad():
        last.weight.mul_(0.01)  # almost "Q values are set to 0 in all states" (Section 5.2)
    return net


def q_of(net: Any, observation: torch.Tensor, hyper: DQNSettings) -> torch.Tensor:
    """Return Q, ``float32[rows, actions]``."""
    out: torch.Tensor = net(observation)
    if not hyper.dueling:
        return out
    value, advantage = out[:, :1], out[:, 1:]
    return value + advantage - advantage.mean(1, keepdim=True)


def arrays_of(net: Any, hyper: DQNSettings) -> Arrays:
    """Return the layers as read by `gpusched.agents.common.nets.net_of`, the dueling heads merged into one layer."""
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
    """An agent in training."""

    def __init__(self, setting: EpisodeSetting, variant: str, hyper: DQNSettings, seed: int, device: str) -> None:
        self.device = torch_.set_up(seed, device)
        self.torch = torch_.require("torch")
        self.hyper = hyper
        self.rng = np.random.default_rng([seed, 1])
        self.clusters = Clusters(setting, variant, hyper.clusters, seed)
        self.evaluation_clusters = Clusters(setting, variant, len(setting.sequences()), seed, setting.sequences())
        inputs, actions = self.clusters.batch.observation.shape[1], self.clusters.actions
        self.online = network(inputs, actions, hyper).to(self.device)
        self.target = copy.deepcopy(self.online)
        self.optimizer = torch_.Adam((self.online.parameters(), hyper.rate), eps=1e-5)
        self.memory = ReplayBuffer(hyper.memory, inputs, actions)
        self.episode_utilization: list[float] = []
        self.best_arrays: Arrays = {}
        self.by_sequence = np.zeros(len(self.evaluation_clusters.batch.job))
        self.evaluations: list[Evaluation] = []
        self.evaluation_clusters.begin()
        self.evaluation_clusters.step(np.zeros(len(self.evaluation_clusters.batch.job), np.int64))
        self.clusters.begin()
        self.earlier_s, self.since = 0.0, time.monotonic()  # excludes compilation

    @property
    def seconds(self) -> float:
        """Training time so far, earlier runs included."""
        return self.earlier_s + time.monotonic() - self.since

    @property
    def best(self) -> Evaluation:
        """The evaluation of the kept weights: the highest, the first of equals."""
        return max(self.evaluations, key=lambda point: point.utilization)

    def greedy(self, observation: Any, mask: Any) -> Ints:
        """Return the valid actions with the highest Q, ``int64[rows]``."""
        torch = self.torch
        with torch.inference_mode():
            q = q_of(self.online, torch.from_numpy(observation).to(self.device), self.hyper).cpu().numpy()
        chosen: Ints = np.argmax(np.where(mask > 0, q, -np.inf), axis=1)
        return chosen

    def act(self) -> None:
        """Take one decision in every cluster and add it to the replay buffer."""
        hyper, batch = self.hyper, self.clusters.batch
        done = len(self.episode_utilization) / max(1.0, hyper.explore * hyper.episodes)
        epsilon = hyper.epsilon + (hyper.epsilon_end - hyper.epsilon) * min(1.0, done)
        actions = self.greedy(batch.observation, batch.mask)
        draws = self.rng.random((len(actions), batch.mask.shape[1])) * batch.mask
        actions = np.where(self.rng.random(len(actions)) < epsilon, np.argmax(draws, axis=1), actions)
        observation = batch.observation.copy()
        self.clusters.step(actions)
        done_flags = batch.done != 0
        reward = (batch.reward - hyper.offset * done_flags) * hyper.scale
        self.memory.add(observation, actions, reward, batch.observation, batch.mask, done_flags)
        self.episode_utilization.extend(batch.utilization[done_flags].tolist())

    def update(self) -> None:
        """Make one step of Adam on a batch of the replay buffer."""
        torch, hyper, memory = self.torch, self.hyper, self.memory
        rows = memory.draw(self.rng, hyper.batch)
        columns = (
            memory.observation, memory.next_observation, memory.action, memory.reward, memory.done_flags, memory.mask
        )  # fmt: skip
        observation, next_observation, action, reward, done, mask = (
            torch.from_numpy(column[rows]).to(self.device) for column in columns
        )
        with torch.no_grad():
            invalid = mask == 0
            after = q_of(self.target, next_observation, hyper)
            chooser = q_of(self.online, next_observation, hyper) if hyper.double else after
            choice = chooser.masked_fill(invalid, -torch.inf).argmax(1, keepdim=True)
            target_q = reward + hyper.gamma * (1 - done) * after.gather(1, choice).squeeze(1)
        q = q_of(self.online, observation, hyper).gather(1, action.unsqueeze(1)).squeeze(1)
        loss = torch.nn.functional.smooth_l1_loss(q, target_q)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.optimizer.step()
        with torch.no_grad():
            for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                target.lerp_(online, hyper.blend)

    def evaluate(self) -> Evaluation:
        """Evaluate greedily on all sequences; keep the weights if they are the best so far."""
        batch = self.evaluation_clusters.begin()
        while (batch.job >= 0).any():
            self.evaluation_clusters.step(self.greedy(batch.observation, batch.mask))
        mean, hours = float(batch.utilization.mean()), float(batch.hours.mean())
        if not self.evaluations or mean > self.best.utilization:
            self.best_arrays, self.by_sequence = arrays_of(self.online, self.hyper), batch.utilization.copy()
        self.evaluations.append(Evaluation(len(self.episode_utilization), self.seconds, mean, hours))
        return self.evaluations[-1]

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the state, for a checkpoint."""
        arrays = {
            **self.memory.columns,
            **save_clusters(self.clusters.batch),
            "played": np.array(self.episode_utilization),
        }
        arrays["by_sequence"] = self.by_sequence
        learned = {"online": self.online, "target": self.target, "optimizer": self.optimizer}
        arrays |= torch_.pack_state(**{name: of.state_dict() for name, of in learned.items()})
        arrays |= {f"best.{key}": value for key, value in self.best_arrays.items()}
        return arrays, {
            "rng": self.rng.bit_generator.state, "course": self.evaluations, "seconds": self.seconds,
            "count": self.memory.count,
        }  # fmt: skip

    def restore(self, arrays: Arrays, state: dict[str, Any]) -> None:
        """Restore the state."""
        for name, array in self.memory.columns.items():
            array[:] = arrays[name]
        restore_clusters(self.clusters.batch, arrays)
        self.episode_utilization, self.memory.count = arrays["played"].tolist(), state["count"]
        self.by_sequence = np.array(arrays["by_sequence"], np.float64)
        self.rng.bit_generator.state = state["rng"]
        self.evaluations = [Evaluation(*point) for point in state["course"]]
        self.earlier_s = state["seconds"]
        learned = torch_.unpack_state(arrays)
        self.online.load_state_dict(learned["online"])
        self.target.load_state_dict(learned["target"])
        self.optimizer.load_state_dict(learned["optimizer"])
        self.best_arrays = with_prefix("best.", arrays)


def train(
    setting: EpisodeSetting, variant: str, hyper: DQNSettings, seed: int, *, device: str = "cpu",
    report: TrainingReport | None = None,
    checkpoint: Checkpoint | None = None, until: Callable[[Evaluation], bool] = lambda point: False,
) -> DQNResult:  # fmt: skip
    """Train an agent, resuming from ``checkpoint``. The same seed gives the same weights, bit for bit on a CPU.

    Variants: ``masked``, ``paper`` (invalid actions are possible and penalized), ``wait`` (rewarded with the episode's
    utilization, may keep a job waiting). Training stops early if ``until`` is true of an evaluation.
    """
    report = report or TrainingReport()
    agent = DQNAgent(setting, variant, hyper, seed, device)
    if checkpoint is not None and (saved := checkpoint.load()) is not None:
        agent.restore(*saved)
        report.note(f"goes on from episode {len(agent.episode_utilization)} of {hyper.episodes}")
    if not agent.evaluations:
        agent.evaluate()
    while len(agent.episode_utilization) < hyper.episodes:
        before = len(agent.episode_utilization)
        agent.act()
        if agent.memory.count >= hyper.begin:
            for _ in range(hyper.updates):
                agent.update()
        done = len(agent.episode_utilization)
        if done // hyper.every > before // hyper.every or done >= hyper.episodes:
            agent.optimizer.rates[0] = hyper.rate * max(0.1, 1 - done / hyper.episodes)
            point = agent.evaluate()
            report.step(done, hyper.episodes, float(np.mean(agent.episode_utilization[-100:])), point.utilization)
            if until(point) or _has_converged(agent.evaluations, hyper.patience):
                break
            if checkpoint is not None and checkpoint.due():
                checkpoint.save(*agent.state())
    course, played = tuple(agent.evaluations), np.array(agent.episode_utilization)
    return DQNResult(agent.best_arrays, agent.best, course, agent.by_sequence, played, agent.seconds)


def _has_converged(course: list[Evaluation], patience: int) -> bool:
    """Return whether the last ``patience`` evaluations brought no improvement."""
    if len(course) <= patience:
        return False
    best = max(point.utilization for point in course[:-patience])
    return max(point.utilization for point in course[-patience:]) < best + 1e-4


def decisions_per_s(
    setting: EpisodeSetting, variant: str = "masked", clusters: int = 4096, seconds: float = 2.0
) -> tuple[float, float]:  # fmt: skip
    """Measure decisions per second of wall time, and of CPU time of all threads, with an untrained network.

    Compilation is excluded. The best of several rounds counts (``seconds``: all together), since other load on the
    machine can only slow a round down.
    """
    torch_.set_up(0)
    torch = torch_.require("torch")
    hyper = DQNSettings()
    parallel = Clusters(setting, variant, clusters, 0)
    batch = parallel.begin()
    net = network(batch.observation.shape[1], parallel.actions, hyper)
    observation = torch.from_numpy(batch.observation)  # shared memory: the network reads what the clusters write

    def step() -> None:
        with torch.inference_mode():
            q = q_of(net, observation, hyper).numpy()
        parallel.step(np.where(batch.mask > 0, q, -np.inf).argmax(axis=1))

    step()
    rounds = []
    for _ in range(10):
        done, wall, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - wall < seconds / 10:
            step()
            done += clusters
        rounds.append((done / (time.perf_counter() - wall), done / (time.process_time() - cpu)))
    return max(wall for wall, _ in rounds), max(cpu for _, cpu in rounds)
