"""Training of DL2's agent: imitation of past decisions or a rule, then actor-critic learning with replayed experience.

As in the public code the critic's target is the reward of the slot alone. Each step has a reward: what it adds to the
sum over jobs of the epochs trained in this slot, relative to the job's best size, weighted more for jobs with little
left. The steps of a slot are one episode, and a step's advantage is computed from the rest of its slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from gpusched.agents.common.checkpoint import Checkpoint, with_prefix
from gpusched.agents.common.torch_ import Adam, pack_state, set_up, unpack_state
from gpusched.agents.dl2.agent import PlayableWorkload, Player, prepare
from gpusched.agents.dl2.decide import CRITIC, DONE_INPUT, INPUTS, SHARED, Actor, Reals, Tape, new_tape, seed_draws
from gpusched.agents.dl2.observed import new_observed
from gpusched.agents.dl2.rules import drf
from gpusched.agents.dl2.slots import simulate
from gpusched.agents.dl2.workloads import MAX_TASKS, Dl2Setting, draw
from gpusched.compiled import jit
from gpusched.config.weights import Arrays
from gpusched.estimation.speeds import SpeedLearner
from gpusched.sched.state import Floats, Ints

if TYPE_CHECKING:
    import torch

_STEPS, _ROWS = 100_000, 120  # maximum of a workload; average rows of a recorded step
_VALIDATE_EVERY = 10  # rounds
_SMALL_CLUSTER = 20  # nodes; up to here arrivals are fewer
_MOST_WEIGHT = 10.0  # of a step imitated by its advantage
_CRITIC_FITS, _CRITIC_STEPS = 3, 50
_VALIDATION_SEED = 1 << 20  # seeds of training are larger, those of the evaluation smaller


class Dl2Recipe(NamedTuple):
    """Hyper-parameters. The paper's: entropy 0.1, 200 warm-up steps of 256, 6,000 updates of one slot each.

    Attributes:
        hidden: Width of the network's one hidden layer.
        nodes: Cluster sizes of training workloads, drawn per workload.
        imitated: Workloads of the imitation. imitation_steps: Gradient steps on them.
        rounds: Of simulation and training. batch: Workloads of a round. kept: Recorded steps of each.
        gae_lambda: Lambda of generalised advantages, between steps of a slot.
        entropy: Initial and final weight of the entropy bonus.
        rate: Initial learning rate; it falls to 0. clip: Of importance weights. passes: Over the replayed experience.
        replayed: Rounds of experience replayed, the last one included.
        explore: Per job and slot, the probability of a random size, in the imitation and at first after it.
    """

    hidden: int = 32
    nodes: tuple[int, ...] = (8, 10, 12, 12, 16, 24, 32, 64, 96)
    imitated: int = 48
    imitation_steps: int = 2000
    rounds: int = 150
    batch: int = 18
    kept: int = 384
    gae_lambda: float = 0.85
    entropy: tuple[float, float] = (0.01, 0.001)
    rate: float = 0.02
    clip: float = 0.2
    passes: int = 3
    replayed: int = 2
    explore: tuple[float, float] = (0.1, 0.05)


class Dl2Result(NamedTuple):
    """Weights after each stage. best: those of the last stage with the best result on the validation workloads."""

    untrained: Actor
    warm: Actor
    best: Actor
    score: float


class Recording(NamedTuple):
    """The record of one simulated workload. slots: The first step of each slot."""

    tape: Tape
    slots: Ints


class Dl2World(Protocol):
    """The environment of a training."""

    def draw(self, rng: np.random.Generator) -> Any:
        """Draw a workload."""

    def validation_workloads(self) -> Sequence[Any]:
        """Return the workloads for the choice of weights; `draw` never returns them."""

    def record(self, actor: Actor, one: Any, tape: Tape, explore: float, seed: int, imitate: bool) -> Ints:
        """Run and record a workload, sampling each step; return the first step of each slot, ``int64[slots]``.

        ``imitate``: the steps are those of a rule.
        """

    def recorded(self, actor: Actor) -> list[Recording]:
        """Return recorded decisions to imitate; none: a rule is imitated in drawn workloads."""

    def join(self, seeds: Sequence[int]) -> None:
        """Share what was observed in parallel workloads, recorded with these seeds, with those that follow."""

    def jct(self, actor: Actor | None, one: Any) -> float:
        """Return the mean JCT with the best step taken each time; None: of the present policy."""


class PublicSetting:
    """DL2's public setting. Speeds reported in one workload are known in those that follow."""

    def __init__(self, recipe: Dl2Recipe, speeds: Mapping[str, Floats]) -> None:
        self._nodes, self._speeds = recipe.nodes, speeds
        self._observed = new_observed(MAX_TASKS)
        self._seen: dict[int, SpeedLearner] = {}

    def draw(self, rng: np.random.Generator) -> PlayableWorkload:
        """Draw a workload with random nodes, jobs and arrivals."""
        nodes, jobs = int(rng.choice(self._nodes)), int(rng.integers(30, 80))
        arrivals = int(rng.integers(2, 5)) if nodes > _SMALL_CLUSTER else int(rng.integers(1, 4))
        return prepare(draw(Dl2Setting(nodes, jobs, arrivals), int(rng.integers(1 << 40, 1 << 50))), self._speeds)

    def validation_workloads(self) -> list[PlayableWorkload]:
        """Return workloads of three of the settings."""
        names = ("96 nodes", "24 nodes", "12 nodes")
        return [prepare(draw(name, _VALIDATION_SEED + k), self._speeds) for name in names for k in range(4)]

    def record(self, actor: Actor, one: PlayableWorkload, tape: Tape, explore: float, seed: int, imitate: bool) -> Ints:
        """Run and record a workload; see `Dl2World`."""
        observed = self._observed.copy()
        teacher = drf if imitate else None
        player = Player(actor, observed, one, tape, explore, np.random.default_rng(seed), teacher)
        simulate(one.jobs, player)
        self._seen[seed] = observed
        return np.array(player.slots)

    def recorded(self, actor: Actor) -> list[Recording]:
        """Return none."""
        return []

    def join(self, seeds: Sequence[int]) -> None:
        """Share observed speeds; see `Dl2World`."""
        for seed in seeds:  # not as they ended: the first to report a size decides
            self._observed.join(self._seen[seed])
        self._seen.clear()

    def jct(self, actor: Actor | None, one: PlayableWorkload) -> float:
        """Return the mean JCT; see `Dl2World`."""
        policy = drf if actor is None else Player(actor, self._observed.copy(), one)
        return float(simulate(one.jobs, policy).jct.mean())


class _StepBatch(NamedTuple):
    """Steps to learn from; rows are padded: float32[steps, max_rows, INPUTS], ``valid`` bool[steps, max_rows]."""

    rows: Reals
    valid: Any
    shared: Reals
    chosen: Ints
    log_prob: Reals
    advantage: Reals


def learn(
    recipe: Dl2Recipe, world: Dl2World, seed: int, device: str = "cpu", workers: int = 2,
    report: Callable[[str, float], None] = lambda text, done: None, checkpoint: Checkpoint | None = None,
) -> Dl2Result:  # fmt: skip
    """Train an agent, resuming from ``checkpoint``. The same seed gives the same weights, bit for bit on a CPU.

    Args:
        recipe: Hyper-parameters.
        world: The environment.
        seed: Of all random draws.
        device: ``cpu`` or ``cuda``.
        workers: Threads that simulate.
        report: Called with a message on the results and the fraction done.
        checkpoint: For worlds without state between workloads (see `Dl2World.join`); None: not used.

    Raises:
        GpuschedError: Torch is not installed, or no such device exists.
    """
    where = set_up(seed, device)
    trainer = Dl2Trainer(recipe, world, seed, workers, where)
    untrained = trainer.networks.weights()
    saved = checkpoint.load() if checkpoint is not None else None
    first = trainer.restore(*saved) if saved is not None else 0
    if saved is None:
        trainer.imitate()
    warm = Actor(**with_prefix("warm.", saved[0])) if saved is not None else trainer.networks.weights()
    validation_workloads = world.validation_workloads()
    present = [world.jct(None, one) for one in validation_workloads]

    def score(actor: Actor) -> float:
        return float(
            np.mean([world.jct(actor, one) / jct for one, jct in zip(validation_workloads, present, strict=True)])
        )

    if saved is not None:
        best, least = Actor(**with_prefix("best.", saved[0])), saved[1]["least"]
    else:
        best, least = warm, score(warm)
        report(f"after the warm-up {least - 1:+.1%} against DRF", 0.0)
    for number in range(first, recipe.rounds):
        trainer.round(number / recipe.rounds)
        if number % _VALIDATE_EVERY == _VALIDATE_EVERY - 1 or number == recipe.rounds - 1:
            now = score(trainer.networks.weights())
            if now < least:
                best, least = trainer.networks.weights(), now
            report(
                f"after round {number + 1} {now - 1:+.1%} against DRF, best {least - 1:+.1%}",
                (number + 1) / recipe.rounds,
            )
        if checkpoint is not None and checkpoint.due():
            arrays, state = trainer.state()
            kept = {
                f"{of}.{n}": a for of, actor in (("warm", warm), ("best", best)) for n, a in actor._asdict().items()
            }
            checkpoint.save(arrays | kept, {**state, "done": number + 1, "least": least})
    return Dl2Result(untrained, warm, best, -least)


class Dl2Trainer:
    """The state of a training."""

    def __init__(self, recipe: Dl2Recipe, world: Dl2World, seed: int, workers: int, device: Any) -> None:
        import torch

        self.torch, self._recipe, self._world, self._workers, self._device = torch, recipe, world, workers, device
        self.networks = _Networks(recipe.hidden, seed, device)
        self._rng = np.random.default_rng(seed)
        self._optimiser = Adam((self.networks.actor, recipe.rate), (self.networks.critic.parameters(), 1e-3))
        self._memory: deque[tuple[_StepBatch, Reals, Reals]] = deque(maxlen=recipe.replayed)

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the state, for a checkpoint."""
        actor = [part.detach() for part in self.networks.actor]
        critic, optimiser = self.networks.critic.state_dict(), self._optimiser.state_dict()
        arrays = pack_state(actor=actor, critic=critic, optimiser=optimiser)
        for k, (batch, states, targets) in enumerate(self._memory):
            arrays |= {f"memory.{k}.{i}": part for i, part in enumerate((*batch, states, targets))}
        rounds = {"rng": self._rng.bit_generator.state, "memory": len(self._memory)}
        return arrays, rounds

    def restore(self, arrays: Arrays, state: dict[str, Any]) -> int:
        """Restore the state; return the number of finished rounds."""
        learned = unpack_state(arrays)
        with self.torch.no_grad():
            for part, kept in zip(self.networks.actor, learned["actor"], strict=True):
                part.copy_(kept)
        self.networks.critic.load_state_dict(learned["critic"])
        self._optimiser.load_state_dict(learned["optimiser"])
        for k in range(state["memory"]):
            parts: list[Any] = [arrays[f"memory.{k}.{i}"] for i in range(len(_StepBatch._fields) + 2)]
            self._memory.append((_StepBatch(*parts[:-2]), parts[-2], parts[-1]))
        self._rng.bit_generator.state = state["rng"]
        return int(state["done"])

    def imitate(self) -> None:
        """Warm up by cross-entropy on recorded decisions, or a rule's, written as steps to the smallest share."""
        recipe, networks, torch = self._recipe, self.networks, self.torch
        imitated = self._world.recorded(networks.weights())
        imitated = imitated or self._simulate(recipe.imitated, recipe.explore[0], True)
        data = _batch_of(imitated, [np.zeros(0, np.float32)] * len(imitated))
        optimiser = Adam((networks.actor, 0.01))
        for step in range(recipe.imitation_steps):
            optimiser.rates[0] = 0.01 * (1.0 - step / recipe.imitation_steps) + 1e-4
            i = self._rng.integers(0, len(data.chosen), 256)
            loss = torch.nn.functional.cross_entropy(self._scores(data, i), self._tensor(data.chosen[i]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    def start_from(self, actor: Actor, critic: Arrays) -> None:
        """Go on from these weights. ``critic``: its arrays, as of `critic_arrays`; empty: it starts anew."""
        with self.torch.no_grad():
            for part, kept in zip(self.networks.actor, actor, strict=True):
                part.copy_(self._tensor(kept))
        if critic:
            self.networks.critic.load_state_dict({name: self._tensor(kept) for name, kept in critic.items()})

    def critic_arrays(self) -> Arrays:
        """Return the critic's weights, by name."""
        return {name: part.cpu().numpy().copy() for name, part in self.networks.critic.state_dict().items()}

    def round(self, part: float) -> None:
        """Simulate workloads with the present weights; train on them and on earlier ones."""
        self.improve(self._simulate(self._recipe.batch, self._recipe.explore[1] * (1.0 - part)), part)

    def improve(self, played: Sequence[Recording], part: float) -> None:
        """Train on steps sampled with the present weights, and on earlier ones. ``part``: of the training done."""
        recipe = self._recipe
        self._memory.append(self._with_advantages(played))
        self._optimiser.rates[0] = recipe.rate * (1.0 - part) + 1e-5
        bonus = recipe.entropy[0] + (recipe.entropy[1] - recipe.entropy[0]) * part
        for _ in range(recipe.passes):
            for batch, state, target in self._memory:
                order = self._rng.permutation(len(batch.chosen))
                for at in range(0, len(order), 512):
                    self._step(batch, order[at : at + 512], state, target, bonus)

    def fit_critic(self, played: Sequence[Recording]) -> None:
        """Train the critic alone, before anything is judged by it."""
        for _ in range(_CRITIC_FITS):
            _, state, target = self._with_advantages(played)
            for _ in range(_CRITIC_STEPS):
                self._descend(self._value_loss(state, target))

    def imitate_by_advantage(self, played: Sequence[Recording]) -> None:
        """Imitate steps of another policy that brought more than the critic expects of this one, and those the more.

        The steps were not sampled with these weights, and with which probabilities that policy took them is unknown (a
        rule has none), so that importance weights cannot be had. Weighting by exp(advantage) needs none: Peng et al.,
        "Advantage-Weighted Regression", 2019. Steps that brought less get no weight, since the other policy may be the
        worse one in most states.
        """
        batch, _, _ = self._with_advantages(played, centred=False)
        order = self._rng.permutation(len(batch.chosen))
        for at in range(0, len(order), 512):
            i = order[at : at + 512]
            chances = self._scores(batch, i).log_softmax(-1)
            chosen = chances.gather(1, self._tensor(batch.chosen[i])[:, None]).squeeze(1)
            advantage = self._tensor(batch.advantage[i])
            weight = (advantage > 0.0) * advantage.exp().clamp(max=_MOST_WEIGHT)
            self._descend(-(weight * chosen).mean())

    def _with_advantages(self, played: Sequence[Recording], centred: bool = True) -> tuple[_StepBatch, Reals, Reals]:
        """Return the steps with their advantages, in standard deviations; and inputs and targets of the critic."""
        rng, advantages, states, targets = self._rng, [], [], []
        for one in played:
            state = one.tape.state[: one.tape.number[0]]
            with self.torch.no_grad():
                value = self.networks.critic(self._tensor(state)).squeeze(-1).cpu().numpy()
            advantage = np.zeros(len(state), np.float32)
            _advantages(one.tape.reward, value, one.slots, self._recipe.gae_lambda, advantage)
            advantages.append(advantage)
            some = rng.random(len(state)) < min(1.0, 2000.0 / len(state))
            states.append(state[some])
            targets.append((advantage + value)[some])
        data = _batch_of(played, advantages)
        scaled = (data.advantage - (data.advantage.mean() if centred else 0.0)) / (data.advantage.std() + 1e-8)
        return data._replace(advantage=scaled.clip(-4, 4)), np.concatenate(states), np.concatenate(targets)

    def _step(self, batch: _StepBatch, i: Ints, state: Reals, target: Reals, bonus: float) -> None:
        torch, clip = self.torch, self._recipe.clip
        chances = self._scores(batch, i).log_softmax(-1)
        chosen = chances.gather(1, self._tensor(batch.chosen[i])[:, None]).squeeze(1)
        weight, advantage = (chosen - self._tensor(batch.log_prob[i])).exp(), self._tensor(batch.advantage[i])
        gain = torch.minimum(weight * advantage, weight.clamp(1.0 - clip, 1.0 + clip) * advantage).mean()
        entropy = -(chances.exp() * chances.clamp(min=-20.0)).sum(-1).mean()
        self._descend(-gain - bonus * entropy + self._value_loss(state, target))

    def _value_loss(self, state: Reals, target: Reals) -> torch.Tensor:
        """Return the critic's error on some of these."""
        j = self._rng.integers(0, len(target), 4096)
        value = self.networks.critic(self._tensor(state[j])).squeeze(-1)
        error: torch.Tensor = 0.5 * (value - self._tensor(target[j])).pow(2).mean()
        return error

    def _descend(self, loss: Any) -> None:
        """Do one step of the optimiser."""
        self._optimiser.zero_grad()
        loss.backward()
        self.torch.nn.utils.clip_grad_norm_(self.networks.actor, 1.0)
        self._optimiser.step()

    def _simulate(self, count: int, explore: float, imitate: bool = False) -> list[Recording]:
        """Simulate and record ``count`` drawn workloads in parallel."""
        world, weights, kept = self._world, self.networks.weights(), self._recipe.kept
        ones = [world.draw(self._rng) for _ in range(count)]
        seeds = [int(seed) for seed in self._rng.integers(0, 1 << 31, count)]

        def record(one: Any, seed: int) -> Recording:
            seed_draws(seed)
            tape = new_tape(_STEPS, kept, kept * _ROWS)
            return Recording(tape, world.record(weights, one, tape, explore, seed, imitate))

        with ThreadPoolExecutor(self._workers) as pool:
            found = list(pool.map(record, ones, seeds))
        world.join(seeds)
        return found

    def _scores(self, data: _StepBatch, i: Ints) -> torch.Tensor:
        return self.networks.scores(*(self._tensor(a[i]) for a in (data.rows, data.shared, data.valid)))

    def _tensor(self, array: Any) -> torch.Tensor:
        return self.torch.as_tensor(array, device=self._device)


class _Networks:
    """The actor (the network of `decide`) and the critic, in torch."""

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
        """Return the actor's weights for compiled passes."""
        return Actor(*(np.ascontiguousarray(part.detach().cpu().numpy().copy(), np.float32) for part in self.actor))

    def scores(self, rows: torch.Tensor, shared: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Return scores as in `decide.allocate`; -1e9 for padding rows."""
        linear, done, own, common, bias, out = self.actor
        hidden = (rows @ own + (shared @ common)[:, None] + bias).relu()
        score = rows @ linear + hidden @ out + rows[..., DONE_INPUT] * (shared @ done)[:, None]
        return score.masked_fill(~valid, -1e9)


def _batch_of(played: Sequence[Recording], advantages: Sequence[Reals]) -> _StepBatch:
    counts = [int(one.tape.number[1]) for one in played]
    kept = sum(counts)
    most = max(int(one.tape.kept[:n, 2].max()) for one, n in zip(played, counts, strict=True))
    rows, valid = np.zeros((kept, most, INPUTS), np.float32), np.zeros((kept, most), bool)
    advantage, i = np.zeros(kept, np.float32), 0
    for one, n, of in zip(played, counts, advantages, strict=True):
        for step, first, count, _ in one.tape.kept[:n].tolist():
            rows[i, :count], valid[i, :count] = one.tape.rows[first : first + count], True
            advantage[i] = of[step] if len(of) else 0.0
            i += 1
    shared, log_prob = (
        np.concatenate([part[:n] for part, n in zip(parts, counts, strict=True)])
        for parts in ([one.tape.shared for one in played], [one.tape.log_prob for one in played])
    )
    chosen = np.concatenate([one.tape.kept[:n, 3] for one, n in zip(played, counts, strict=True)])
    return _StepBatch(rows, valid, shared, chosen, log_prob, advantage)


@jit
def _advantages(reward: Reals, value: Reals, slots: Ints, gae_lambda: float, advantage: Reals) -> None:
    """Compute generalised advantages (Schulman et al., 2016); a slot is an episode, without discount."""
    slot, ahead, after = slots.size - 1, 0.0, 0.0
    for step in range(value.size - 1, -1, -1):
        ahead = reward[step] + after - value[step] + gae_lambda * ahead
        advantage[step], after = ahead, value[step]
        while slot >= 0 and slots[slot] == step:  # slots end here: no value flows back into the slot before
            ahead, after = 0.0, 0.0
            slot -= 1
