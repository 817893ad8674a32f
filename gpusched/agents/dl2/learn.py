"""How DL2's agent learns: it imitates the present policy, then plays itself, actor and critic, with experience replay.

As in the public code the critic's target is the reward of the slot alone. It is given choice by choice: what a step
adds to the sum over jobs of epochs trained in this slot, in parts of what the job's best size would train, more for
jobs with little left. So the steps of a slot are one episode, and a step's advantage is what the rest of its slot
brought.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from gpusched.agents.common.torch_ import begin, optimizer_arrays, restore_optimizer
from gpusched.agents.dl2.agent import PlayableWorkload, Player, prepare
from gpusched.agents.dl2.decide import CRITIC, DONE_ROW, INPUTS, SHARED, Actor, Reals, Tape, new_tape, seed_draws
from gpusched.agents.dl2.observed import new_observed
from gpusched.agents.dl2.rules import drf
from gpusched.agents.dl2.slots import play
from gpusched.agents.dl2.workloads import MOST_TASKS, Dl2Setting, draw
from gpusched.compiled import jit
from gpusched.config.weights import Arrays
from gpusched.estimation.speeds import SpeedLearner
from gpusched.sched.state import Floats, Ints

if TYPE_CHECKING:
    import torch

    from gpusched.agents.common.checkpoint import Checkpoint

_STEPS, _ROWS = 100_000, 120  # of a workload at most; rows of a step on the average that are kept
_LOOK_EVERY = 10  # rounds
_FEW = 20  # nodes, on which fewer jobs come
_CHOICE = 1 << 20  # seeds by which weights are chosen; those for learning are larger, those for judging smaller


class Dl2Recipe(NamedTuple):
    """Hyper-parameters. The paper's: entropy 0.1, 200 warm-up steps of 256, 6,000 updates of one slot each.

    Attributes:
        hidden: Width of the network's one hidden layer.
        nodes: Of workloads to learn from; one of these each.
        taught: Workloads whose decisions are imitated. teaching: Steps of gradient on them.
        rounds: Of play and learning. batch: Workloads of a round. kept: Their steps that are learned from, each.
        within: Lambda of generalised advantages, from step to step of a slot.
        entropy: Weight of the entropy bonus at first, and at the end.
        rate: Of learning at first; it falls to nothing. clip: Of importance weights. passes: Over what is replayed.
        replayed: Rounds whose experience is learned from, the last one included.
        explore: By job and slot, the chance of a drawn size, in the warm-up and at first after it.
    """

    hidden: int = 32
    nodes: tuple[int, ...] = (8, 10, 12, 12, 16, 24, 32, 64, 96)
    taught: int = 48
    teaching: int = 2000
    rounds: int = 150
    batch: int = 18
    kept: int = 384
    within: float = 0.85
    entropy: tuple[float, float] = (0.01, 0.001)
    rate: float = 0.02
    clip: float = 0.2
    passes: int = 3
    replayed: int = 2
    explore: tuple[float, float] = (0.1, 0.05)


class Dl2Result(NamedTuple):
    """Weights after each stage. best: of those of the last stage that did best on workloads drawn for the choice."""

    untrained: Actor
    warm: Actor
    best: Actor
    score: float


class Take(NamedTuple):
    """One workload, played and written down. slots: The step with which each slot begins."""

    tape: Tape
    slots: Ints


class Dl2World(Protocol):
    """What an agent learns in."""

    def draw(self, rng: np.random.Generator) -> Any:
        """A workload."""

    def choice(self) -> Sequence[Any]:
        """Workloads by which weights are chosen; `draw` never gives them."""

    def take(self, actor: Actor, one: Any, tape: Tape, explore: float, seed: int, taught: bool) -> Ints:
        """Plays a workload, each step drawn and written down; the step with which each slot begins, ``int64[slots]``.

        ``taught``: the steps are those of the present policy, that is DRF.
        """

    def join(self) -> None:
        """What was seen in workloads played side by side is known in those that follow."""

    def jct(self, actor: Actor | None, one: Any) -> float:
        """Mean JCT, the best step taken each time; None: of the present policy."""


class Public:
    """DL2's public setting. What jobs told in one workload is known in those that follow."""

    def __init__(self, recipe: Dl2Recipe, speeds: Mapping[str, Floats]) -> None:
        self._nodes, self._speeds = recipe.nodes, speeds
        self._observed = new_observed(MOST_TASKS)
        self._seen: list[SpeedLearner] = []

    def draw(self, rng: np.random.Generator) -> PlayableWorkload:
        """Other nodes, more or fewer jobs, denser or thinner, each time."""
        nodes, jobs = int(rng.choice(self._nodes)), int(rng.integers(30, 80))
        arrivals = int(rng.integers(2, 5)) if nodes > _FEW else int(rng.integers(1, 4))
        return prepare(draw(Dl2Setting(nodes, jobs, arrivals), int(rng.integers(1 << 40, 1 << 50))), self._speeds)

    def choice(self) -> list[PlayableWorkload]:
        """Of three of the settings."""
        names = ("96 nodes", "24 nodes", "12 nodes")
        return [prepare(draw(name, _CHOICE + k), self._speeds) for name in names for k in range(4)]

    def take(self, actor: Actor, one: PlayableWorkload, tape: Tape, explore: float, seed: int, taught: bool) -> Ints:
        """See `Dl2World`."""
        observed = self._observed.copy()
        teacher = drf if taught else None
        player = Player(actor, observed, one, tape, explore, np.random.default_rng(seed), teacher)
        play(one.jobs, player)
        self._seen.append(observed)
        return np.array(player.slots)

    def join(self) -> None:
        """See `Dl2World`."""
        for observed in self._seen:
            self._observed.join(observed)
        self._seen.clear()

    def jct(self, actor: Actor | None, one: PlayableWorkload) -> float:
        """See `Dl2World`."""
        policy = drf if actor is None else Player(actor, self._observed.copy(), one)
        return float(play(one.jobs, policy).jct.mean())


class _StepBatch(NamedTuple):
    """Steps to learn from, rows padded to the most: float32[steps, most, INPUTS], bool[steps, most] and so on."""

    rows: Reals
    there: Any
    shared: Reals
    chosen: Ints
    chance: Reals
    advantage: Reals


def learn(
    recipe: Dl2Recipe, world: Dl2World, seed: int, device: str = "cpu", workers: int = 2,
    tell: Callable[[str, float], None] = lambda text, done: None, checkpoint: Checkpoint | None = None,
) -> Dl2Result:  # fmt: skip
    """Trains an agent, from where ``checkpoint`` left it. Same seed, same weights, bit for bit on a CPU.

    Args:
        recipe: How.
        world: In what.
        seed: Of all draws.
        device: ``cpu`` or ``cuda``.
        workers: Threads that play.
        tell: Called with what was reached, and the part that is done.
        checkpoint: For worlds that remember nothing between workloads (`Dl2World.join`); None: there is none.

    Raises:
        GpuschedError: Torch is not installed, or there is no such device.
    """
    where = begin(seed, device)
    school = _School(recipe, world, seed, workers, where)
    untrained = school.networks.weights()
    saved = checkpoint.load() if checkpoint is not None else None
    first = school.restore(*saved) if saved is not None else 0
    if saved is None:
        school.imitate()
    warm = _actor_of(saved[0], "warm.") if saved is not None else school.networks.weights()
    choice = world.choice()
    present = [world.jct(None, one) for one in choice]

    def score(actor: Actor) -> float:
        return float(np.mean([world.jct(actor, one) / jct for one, jct in zip(choice, present, strict=True)]))

    if saved is not None:
        best, least = _actor_of(saved[0], "best."), saved[1]["least"]
    else:
        best, least = warm, score(warm)
        tell(f"after the warm-up {least - 1:+.1%} against DRF", 0.0)
    for number in range(first, recipe.rounds):
        school.round(number / recipe.rounds)
        if number % _LOOK_EVERY == _LOOK_EVERY - 1 or number == recipe.rounds - 1:
            now = score(school.networks.weights())
            if now < least:
                best, least = school.networks.weights(), now
            tell(
                f"after round {number + 1} {now - 1:+.1%} against DRF, best {least - 1:+.1%}",
                (number + 1) / recipe.rounds,
            )
        if checkpoint is not None and checkpoint.due():
            arrays, state = school.state()
            kept = {
                f"{of}.{n}": a for of, actor in (("warm", warm), ("best", best)) for n, a in actor._asdict().items()
            }
            checkpoint.save(arrays | kept, {**state, "done": number + 1, "least": least})
    return Dl2Result(untrained, warm, best, -least)


class _School:
    """What goes on while an agent learns."""

    def __init__(self, recipe: Dl2Recipe, world: Dl2World, seed: int, workers: int, device: Any) -> None:
        import torch

        self.torch, self._recipe, self._world, self._workers, self._device = torch, recipe, world, workers, device
        self.networks = _Networks(recipe.hidden, seed, device)
        self._rng = np.random.default_rng(seed)
        critic = {"params": self.networks.critic.parameters(), "lr": 1e-3}
        self._optimiser = torch.optim.Adam([{"params": self.networks.actor, "lr": recipe.rate}, critic])
        self._memory: deque[tuple[_StepBatch, Reals, Reals]] = deque(maxlen=recipe.replayed)

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """Everything, for a checkpoint."""
        arrays = {f"actor.{i}": part.detach().cpu().numpy() for i, part in enumerate(self.networks.actor)}
        arrays |= {f"critic.{name}": value.cpu().numpy() for name, value in self.networks.critic.state_dict().items()}
        for k, (batch, states, targets) in enumerate(self._memory):
            arrays |= {f"memory.{k}.{i}": part for i, part in enumerate((*batch, states, targets))}
        rounds = {"rng": self._rng.bit_generator.state, "memory": len(self._memory)}
        return arrays | optimizer_arrays(self._optimiser), rounds

    def restore(self, arrays: Arrays, state: dict[str, Any]) -> int:
        """The other way; rounds that are done."""
        torch = self.torch
        with torch.no_grad():
            for i, part in enumerate(self.networks.actor):
                part.copy_(self._there(arrays[f"actor.{i}"]))
        critic = {n: torch.from_numpy(arrays[f"critic.{n}"].copy()) for n in self.networks.critic.state_dict()}
        self.networks.critic.load_state_dict(critic)
        restore_optimizer(self._optimiser, arrays)
        for k in range(state["memory"]):
            parts: list[Any] = [arrays[f"memory.{k}.{i}"] for i in range(len(_StepBatch._fields) + 2)]
            self._memory.append((_StepBatch(*parts[:-2]), parts[-2], parts[-1]))
        self._rng.bit_generator.state = state["rng"]
        return int(state["done"])

    def imitate(self) -> None:
        """Warm-up: cross-entropy on DRF's decisions, written as steps to the smallest share."""
        recipe, networks, torch = self._recipe, self.networks, self.torch
        taught = self._play(recipe.taught, recipe.explore[0], True)
        data = _batch_of(taught, [np.zeros(0, np.float32)] * len(taught))
        optimiser = torch.optim.Adam(networks.actor, lr=0.01)
        for step in range(recipe.teaching):
            for group in optimiser.param_groups:
                group["lr"] = 0.01 * (1.0 - step / recipe.teaching) + 1e-4
            i = self._rng.integers(0, len(data.chosen), 256)
            loss = torch.nn.functional.cross_entropy(self._scores(data, i), self._there(data.chosen[i]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    def round(self, part: float) -> None:
        """Workloads played with the present weights, and what is learned from them and from earlier ones."""
        recipe, rng, torch = self._recipe, self._rng, self.torch
        played = self._play(recipe.batch, recipe.explore[1] * (1.0 - part))
        advantages, states, targets = [], [], []
        for one in played:
            state = one.tape.state[: one.tape.number[0]]
            with torch.no_grad():
                value = self.networks.critic(self._there(state)).squeeze(-1).cpu().numpy()
            advantage = np.zeros(len(state), np.float32)
            _advantages(one.tape.reward, value, one.slots, recipe.within, advantage)
            advantages.append(advantage)
            some = rng.random(len(state)) < min(1.0, 2000.0 / len(state))
            states.append(state[some])
            targets.append((advantage + value)[some])
        data = _batch_of(played, advantages)
        scaled = (data.advantage - data.advantage.mean()) / (data.advantage.std() + 1e-8)
        self._memory.append(
            (data._replace(advantage=scaled.clip(-4, 4)), np.concatenate(states), np.concatenate(targets))
        )
        self._optimiser.param_groups[0]["lr"] = recipe.rate * (1.0 - part) + 1e-5
        bonus = recipe.entropy[0] + (recipe.entropy[1] - recipe.entropy[0]) * part
        for _ in range(recipe.passes):
            for batch, state, target in self._memory:
                order = rng.permutation(len(batch.chosen))
                for at in range(0, len(order), 512):
                    self._step(batch, order[at : at + 512], state, target, bonus)

    def _step(self, batch: _StepBatch, i: Ints, state: Reals, target: Reals, bonus: float) -> None:
        torch, clip = self.torch, self._recipe.clip
        chances = self._scores(batch, i).log_softmax(-1)
        chosen = chances.gather(1, self._there(batch.chosen[i])[:, None]).squeeze(1)
        weight, advantage = (chosen - self._there(batch.chance[i])).exp(), self._there(batch.advantage[i])
        gain = torch.minimum(weight * advantage, weight.clamp(1.0 - clip, 1.0 + clip) * advantage).mean()
        entropy = -(chances.exp() * chances.clamp(min=-20.0)).sum(-1).mean()
        j = self._rng.integers(0, len(target), 4096)
        value = self.networks.critic(self._there(state[j])).squeeze(-1)
        loss = -gain - bonus * entropy + 0.5 * (value - self._there(target[j])).pow(2).mean()
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.networks.actor, 1.0)
        self._optimiser.step()

    def _play(self, count: int, explore: float, taught: bool = False) -> list[Take]:
        """So many drawn workloads, side by side."""
        world, weights, kept = self._world, self.networks.weights(), self._recipe.kept
        ones = [world.draw(self._rng) for _ in range(count)]
        seeds = [int(seed) for seed in self._rng.integers(0, 1 << 31, count)]

        def take(one: Any, seed: int) -> Take:
            seed_draws(seed)
            tape = new_tape(_STEPS, kept, kept * _ROWS)
            return Take(tape, world.take(weights, one, tape, explore, seed, taught))

        with ThreadPoolExecutor(self._workers) as pool:
            found = list(pool.map(take, ones, seeds))
        world.join()
        return found

    def _scores(self, data: _StepBatch, i: Ints) -> torch.Tensor:
        return self.networks.scores(*(self._there(a[i]) for a in (data.rows, data.shared, data.there)))

    def _there(self, array: Any) -> torch.Tensor:
        return self.torch.as_tensor(array, device=self._device)


class _Networks:
    """Actor (what `decide` computes) and critic, to be learned."""

    def __init__(self, hidden: int, seed: int, device: Any) -> None:
        import torch

        draws = torch.Generator().manual_seed(seed)

        def drawn(*shape: int, scale: float) -> torch.Tensor:
            return (torch.randn(*shape, generator=draws) * scale).to(device).requires_grad_()

        self.actor = [
            drawn(INPUTS, scale=0.01), drawn(SHARED, scale=0.01), drawn(INPUTS, hidden, scale=INPUTS**-0.5),
            drawn(SHARED, hidden, scale=SHARED**-0.5), drawn(hidden, scale=0.01), drawn(hidden, scale=0.05),
        ]  # fmt: skip
        layers = [torch.nn.Linear(CRITIC, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU()]
        self.critic = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1)).to(device)

    def weights(self) -> Actor:
        """The actor's, for compiled passes."""
        return Actor(*(np.ascontiguousarray(part.detach().cpu().numpy().copy(), np.float32) for part in self.actor))

    def scores(self, rows: torch.Tensor, shared: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """As `decide.allocate` has them; of rows that are none, so low that they have no chance."""
        linear, done, own, common, bias, out = self.actor
        hidden = (rows @ own + (shared @ common)[:, None] + bias).relu()
        score = rows @ linear + hidden @ out + rows[..., DONE_ROW] * (shared @ done)[:, None]
        return score.masked_fill(~there, -1e9)


def _actor_of(arrays: Mapping[str, Any], prefix: str) -> Actor:
    return Actor(*(arrays[prefix + name] for name in Actor._fields))


def _batch_of(played: Sequence[Take], advantages: Sequence[Reals]) -> _StepBatch:
    counts = [int(one.tape.number[1]) for one in played]
    kept = sum(counts)
    most = max(int(one.tape.kept[:n, 2].max()) for one, n in zip(played, counts, strict=True))
    rows, there = np.zeros((kept, most, INPUTS), np.float32), np.zeros((kept, most), bool)
    advantage, i = np.zeros(kept, np.float32), 0
    for one, n, of in zip(played, counts, advantages, strict=True):
        for step, first, count, _ in one.tape.kept[:n].tolist():
            rows[i, :count], there[i, :count] = one.tape.rows[first : first + count], True
            advantage[i] = of[step] if len(of) else 0.0
            i += 1
    shared, chance = (
        np.concatenate([part[:n] for part, n in zip(parts, counts, strict=True)])
        for parts in ([one.tape.shared for one in played], [one.tape.chance for one in played])
    )
    chosen = np.concatenate([one.tape.kept[:n, 3] for one, n in zip(played, counts, strict=True)])
    return _StepBatch(rows, there, shared, chosen, chance, advantage)


@jit
def _advantages(reward: Reals, value: Reals, slots: Ints, within: float, advantage: Reals) -> None:
    """Generalised advantages (Schulman et al., 2016), a slot an episode, undiscounted."""
    slot, ahead, after = slots.size - 1, 0.0, 0.0
    for step in range(value.size - 1, -1, -1):
        ahead = reward[step] + after - value[step] + within * ahead
        advantage[step], after = ahead, value[step]
        while slot >= 0 and slots[slot] == step:  # the first of its slot
            ahead, after = 0.0, 0.0
            slot -= 1
