"""Trained agents in place of a policy's stages, and what happens when one cannot decide.

The folder of an agent, ``gpusched.agents.NAME``, has a module ``live`` with two functions::

    prepare(model: Model) -> Any                      # its arrays, checked; ValueError: of another shape
    decide_queue(prepared, context: Context) -> tuple[list[int], Block]

``decide_queue`` takes started jobs off ``world.resources`` and notes them in ``releases`` and ``outcome``, as
`kernel.queue_pass` does, and returns the queue in its order with what blocked it. It raises `Unusable` when what comes
out of its network is no number; what it has changed by then is undone here. Where the weights stop running jobs, the
module that decides is ``live_preempt``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gpusched.config.weights import Model
from gpusched.model.plan import Preempt, Reason
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.sched.arrays import NodeArrays, Waiting
from gpusched.sched.reasons import Block
from gpusched.sched.state import ClusterState, Outcome, Releases, Scratch, Words
from gpusched.sched.topology.queue import Costs

PREEMPT = "preempt"  # of the weights' metadata: "yes" where the agent stops running jobs

Staged = Callable[["Context"], tuple[list[int], Block]]


class Unusable(ValueError):
    """An agent that cannot decide; its message is one line."""


class Context(NamedTuple):
    """One partition's decision: whose it is, the snapshot, and the arrays that the passes work on.

    ``costs``: what places cost, where the policy goes by it and anything was learned (`topology.live`).
    ``remarks``: partition -> what the plan is to say of its mapping. ``stops``: running jobs to be stopped. ``own``:
    job -> a reason that goes before that of its code in ``outcome``.
    """

    partition: str
    policy: PolicySpec
    snapshot: Snapshot
    world: NodeArrays
    waiting: Waiting
    releases: Releases
    rng: Words
    scratch: Scratch
    outcome: Outcome
    remarks: dict[str, str]
    stops: list[Preempt]
    own: dict[str, Reason]
    costs: Costs | None = None

    @property
    def state(self) -> ClusterState:
        """What the passes read and change."""
        return ClusterState(
            self.world.resources, self.releases, self.waiting.requests, self.waiting.jobs, self.scratch, self.outcome,
            float(self.snapshot.now),
        )  # fmt: skip


def by_agent(
    context: Context, model: Model | None, staged: Staged, troubles: dict[str, str]
) -> tuple[list[int], Block]:
    """One partition by its agent; where that cannot decide, by the fallback, with the reason in ``troubles``."""
    policy = context.policy
    assert policy.agent is not None
    before = [array.copy() for array in _changed(context)]
    try:
        if model is None:
            raise Unusable("no weights")
        weights = prepared(model)
        live = "live_preempt" if model.about.get(PREEMPT) == "yes" else "live"
        return part_of(policy.agent, live).decide_queue(weights, context)  # type: ignore[no-any-return]
    except ValueError as error:
        for array, old in zip(_changed(context), before, strict=True):
            array[:] = old
        fallback = policy.fallback or PolicySpec(name="fifo")
        troubles[context.partition] = str(error)
        return staged(context._replace(policy=fallback))


def part_of(agent: str, module: str) -> Any:
    """A module of the agent's folder; by name, for agents stand above all that they are called by."""
    return importlib.import_module(f"gpusched.agents.{agent}.{module}")


_prepared: dict[str, tuple[Model, Any]] = {}


def prepared(model: Model) -> Any:
    """The model's arrays as its agent's passes take them; those of the last few models are kept.

    Raises:
        ValueError: They are of another shape.
    """
    kept = _prepared.get(model.path)
    if kept is None or kept[0] is not model:
        kept = _prepared[model.path] = (model, part_of(model.agent, "live").prepare(model))
    return kept[1]


def _changed(context: Context) -> list[np.ndarray[Any, Any]]:
    """Everything that a pass changes."""
    resources, jobs = context.world.resources, context.waiting.jobs
    return [*resources, *context.releases, *context.outcome, context.rng, jobs.room]
