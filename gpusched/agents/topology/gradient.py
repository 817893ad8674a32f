"""All layers by gradient: imitation of the best of several rollouts, then policy gradient.

In a rollout each job's worth of waiting for a place without cost is off by a random amount of its own (`tape`). What
the jobs submitted near it then take, against the mean over rollouts of the same jobs, says whether it had better wait
longer or shorter. Jobs go at their true speeds throughout. One scheduler is trained so, and the offers between several
are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpusched.agents.common import torch_
from gpusched.agents.common.vector import round_to_float32, split_vector, to_vector
from gpusched.agents.topology.learn import TrainingCase
from gpusched.agents.topology.network import PLACE, SHAPES, WAIT, TopologyWeights, weights_from
from gpusched.agents.topology.replay import new_replay_state, placed_by, run_agents
from gpusched.agents.topology.tape import DecisionTape
from gpusched.config.weights import Arrays
from gpusched.sched.state import Floats, Ints
from gpusched.sim.engine.build import ReplayOptions, log_of, result_of, world_of
from gpusched.sim.replay import to_the_end

if TYPE_CHECKING:
    from torch import Tensor

_GRAPH = ("on.bus", "on.nic", "server", "rack", "whole")
_ALIVE = 2
BEFORE_S, AFTER_S = 2 * 3600.0, 12 * 3600.0
"""A job's decision is judged by the jobs submitted so long before and after it."""


class GradientRecipe(NamedTuple):
    """Hyper-parameters.

    Attributes:
        steps: Of the gradient, each on ``batch`` workloads; the first ``imitate`` imitate the best rollout.
        rollouts: Of each workload, in mirrored pairs. noise: Standard deviation of what a job's waiting is off by.
        rate: Of learning. near: Weight of the squared distance from the rule.
    """

    steps: int = 60
    imitate: int = 10
    batch: int = 3
    rollouts: int = 8
    noise: float = 0.08
    rate: float = 0.01
    near: float = 0.5


def alive(numbers: Floats) -> Floats:
    """Return weights that say the same where outputs are 0, but two units of each graph layer get every input.

    Inputs are not negative: a unit of drawn weights, most of them negative, is 0 for every input, and never learns.
    """
    arrays: Arrays = dict(zip(SHAPES, split_vector(numbers.copy(), SHAPES), strict=True))
    for name in _GRAPH:
        arrays[name][:, :_ALIVE] = np.abs(arrays[name][:, :_ALIVE])
    return round_to_float32(to_vector(arrays, SHAPES))


class Rollout(NamedTuple):
    """One replay: ``jct: float64[jobs]`` (NaN: never ran), and the decisions recorded."""

    jct: Floats
    tape: DecisionTape


def rollout(case: TrainingCase, agent: TopologyWeights, noise: Floats) -> Rollout:
    """Replay a case with so much noise of each job, ``float64[jobs]``, and record decisions."""
    rule = placed_by("contention")
    world = world_of(case.trace, case.pool, rule, ReplayOptions(network=case.network))
    world, state = new_replay_state(world, agent, case.spec, noise)
    tape = state.auctions[0].tape
    assert tape is not None
    log = to_the_end(world, log_of(world), lambda log: run_agents(world.sim, log, world.passes, state))
    return Rollout(result_of(world, log, 0.0).end - case.trace.submit, tape)


def advantages(submit: Floats, jct: Floats) -> Floats:
    """Return by how much less than the mean rollout the jobs near each job took, ``float64[rollouts, jobs]``.

    ``jct``: the same shape. In standard deviations over all of it.
    """
    known = np.where(np.isfinite(jct).all(0), jct, 0.0)
    total = np.concatenate([np.zeros((len(known), 1)), np.cumsum(known, 1)], 1)
    first, last = np.searchsorted(submit, submit - BEFORE_S), np.searchsorted(submit, submit + AFTER_S, "right")
    near = total[:, last] - total[:, first]
    less = near.mean(0) - near
    return np.asarray(less / max(float(less.std()), 1e-9), np.float64)


class TorchNetwork:
    """The network of `network`, differentiable: the same sums, by rows of a `DecisionTape`."""

    def __init__(self, numbers: Floats) -> None:
        import torch

        self._torch = torch
        arrays = split_vector(numbers, SHAPES)
        self.weights: dict[str, Tensor] = {
            name: torch.tensor(array, dtype=torch.float32, requires_grad=not name.startswith("hand."))
            for name, array in zip(SHAPES, arrays, strict=True)
        }

    @property
    def learned(self) -> list[Tensor]:
        """Return what the gradient changes."""
        return [tensor for tensor in self.weights.values() if tensor.requires_grad]

    def numbers(self) -> Floats:
        """Return the weights, ``float64[numbers]``, as in a weights file."""
        arrays: Arrays = {name: tensor.detach().numpy() for name, tensor in self.weights.items()}
        return round_to_float32(to_vector(arrays, SHAPES))

    def outputs(self, tape: DecisionTape, rows: Ints) -> tuple[Tensor, Tensor]:
        """Return the values of places and of waiting on top of the rule, one of each row."""
        torch, of = self._torch, self.weights

        def known(array: Any) -> Tensor:
            found: Tensor = torch.as_tensor(np.asarray(array[rows], np.float32))
            return found

        on = known(tape.on)
        heard = [torch.relu(on[:, :, i] @ of[name]).sum(2) for i, name in enumerate(("on.bus", "on.nic"))]
        server = torch.relu(torch.cat([known(tape.server), *heard], 2) @ of["server"])
        share = torch.as_tensor(tape.share.astype(np.float32))  # [racks, nodes]
        rack = torch.relu(torch.cat([known(tape.rack), share @ server], 2) @ of["rack"])
        weight = torch.as_tensor(tape.weight.astype(np.float32))  # [racks]
        whole = torch.relu(torch.cat([known(tape.whole), (weight[:, None] * rack).sum(1)], 1) @ of["whole"])
        picked = known(tape.picked)  # [rows, nodes]
        in_rack = picked @ torch.as_tensor((tape.share > 0).T.astype(np.float32))
        mean = (picked[:, :, None] * server).sum(1), (in_rack[:, :, None] * rack).sum(1)
        place = self._out("place", PLACE, torch.cat([known(tape.place), *mean, whole], 1))
        return place, self._out("wait", WAIT, torch.cat([known(tape.wait), whole], 1))

    def _out(self, name: str, skip: int, inputs: Tensor) -> Tensor:
        of = self.weights
        hidden = self._torch.relu(inputs @ of[f"{name}.in"])
        value: Tensor = inputs[:, :skip] @ of[f"{name}.skip"] + hidden @ of[f"{name}.out"]
        return value


def learn_by_gradient(
    start: Floats, recipe: GradientRecipe, cases: Callable[[int], Sequence[TrainingCase]], seed: int, pool: Executor,
    on_step: Callable[[int, Floats], None],
) -> Floats:  # fmt: skip
    """Train from ``start``; ``cases``: the workloads of a step. ``on_step`` is called with (step, weights)."""
    torch_.set_up(seed)
    import torch

    network = TorchNetwork(start)
    optimizer = torch_.Adam((network.learned, recipe.rate))
    for step in range(recipe.steps):
        optimizer.zero_grad()
        for at, case in enumerate(cases(step)):
            rng = np.random.default_rng((seed, step, at))
            half = rng.normal(0.0, recipe.noise, (recipe.rollouts // 2, len(case.trace)))
            noise = np.concatenate([half, -half])
            agent = weights_from(network.numbers())
            played = list(pool.map(lambda own, c=case, a=agent: rollout(c, a, own), noise))
            gain = advantages(case.trace.submit, np.array([one.jct for one in played]))
            loss = _loss(network, played, noise, gain, recipe, step < recipe.imitate)
            if loss.requires_grad:  # else no decision had alternatives
                loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.learned, 1.0)
        optimizer.step()
        on_step(step + 1, network.numbers())
    return network.numbers()


def _loss(
    network: TorchNetwork, played: Sequence[Rollout], noise: Floats, gain: Floats, recipe: GradientRecipe,
    imitates: bool,
) -> Tensor:  # fmt: skip
    """Return the loss over the recorded decisions of a workload's rollouts."""
    import torch

    total, count = torch.zeros(()), 1
    for number, one in enumerate(played):
        rows = np.arange(int(one.tape.used[0]))
        if not len(rows):
            continue
        job = one.tape.job[rows]
        place, wait = network.outputs(one.tape, rows)
        longer = wait - place  # by so much waiting is worth more than the rule says
        off, better = (torch.as_tensor(a[number, job].astype(np.float32)) for a in (noise, gain))
        if imitates:
            best = torch.as_tensor((gain[:, job].argmax(0) == number).astype(np.float32))
            loss = best * better * (longer - (longer.detach() + off)) ** 2 / recipe.noise**2
        else:
            loss = -better * off / recipe.noise**2 * longer
        total = total + (loss + recipe.near * longer**2).sum()
        count += len(rows)
    return total / count
