"""Trained agents in place of a policy's stages, and what happens when one cannot decide.

`gpusched.agents.base` says what an agent offers. It raises `Unusable` when what comes out of its network is no number;
what it has changed by then is undone here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpusched.compiled import NotCached
from gpusched.config.plugins import ComponentError, installed
from gpusched.config.weights import TrainedModel
from gpusched.errors import GpuschedError
from gpusched.model.plan import Preempt, Reason
from gpusched.model.policy import AGENTS, PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.sched.arrays import NodeArrays, PendingArrays
from gpusched.sched.reasons import QueueBlock
from gpusched.sched.state import ClusterState, PassOutcome, Releases, Scratch, Words
from gpusched.sched.topology.queue import Costs

if TYPE_CHECKING:
    from gpusched.agents.base import AgentParts

Staged = Callable[["Context"], tuple[list[int], QueueBlock]]


NO_NUMBER = "its network's answer is no number"


class Unusable(ValueError):
    """An agent that cannot decide; its message is one line."""


class Context(NamedTuple):
    """The decision for one partition: its policy, the snapshot, and the arrays that the passes work on.

    ``costs``: what places cost, where the policy goes by it and anything was learned (`topology.live`).
    ``remarks``: partition -> what the plan is to say of its mapping. ``stops``: running jobs to be stopped. ``own``:
    job -> a reason that goes before that of its code in ``outcome``.
    """

    partition: str
    policy: PolicySpec
    snapshot: Snapshot
    world: NodeArrays
    waiting: PendingArrays
    releases: Releases
    rng: Words
    scratch: Scratch
    outcome: PassOutcome
    remarks: dict[str, str]
    stops: list[Preempt]
    own: dict[str, Reason]
    costs: Costs | None = None

    @property
    def state(self) -> ClusterState:
        """Return what the passes read and change."""
        return ClusterState(
            self.world.resources, self.releases, self.waiting.requests, self.waiting.jobs, self.scratch, self.outcome,
            float(self.snapshot.now),
        )  # fmt: skip


def by_agent(
    context: Context, model: TrainedModel | None, staged: Staged, troubles: dict[str, str]
) -> tuple[list[int], QueueBlock]:
    """Decide for one partition by its agent; if that fails, by the fallback, with the reason in ``troubles``."""
    policy = context.policy
    assert policy.agent is not None
    before = [array.copy() for array in _changed(context)]
    try:
        if model is None:
            raise Unusable("no weights")
        own = prepared(model)
        with component_errors(policy.agent):
            live = parts_of(policy.agent).live
            assert live is not None
            return live().decide_queue(own, context)
    except (ValueError, ComponentError) as error:
        for array, old in zip(_changed(context), before, strict=True):
            array[:] = old
        troubles[context.partition] = str(error)
        return staged(context._replace(policy=policy.effective_fallback))


def parts_of(agent: str) -> AgentParts:
    """Import an agent's parts. Agents sit above every caller of theirs: this is the only upward import.

    Raises:
        ComponentError: It is another package's, and does not work.
    """
    from gpusched.agents.base import installed_parts

    return installed_parts(agent)


def why_broken(group: str, name: str) -> str | None:
    """Return the line on another package's component that does not work; None: it can be imported."""
    try:
        component = installed(group, name)
        if group == "agents":
            parts_of(name)
        elif not callable(component.load()):
            raise component.error("it cannot be called")
    except ComponentError as error:
        return error.line()
    return None


@contextmanager
def component_errors(agent: str) -> Iterator[None]:
    """Raise `ComponentError` for what another package's agent raises, but for `Unusable`: it cannot decide now."""
    try:
        yield
    except (GpuschedError, Unusable, NotCached):
        raise
    except Exception as error:
        if agent in AGENTS:
            raise
        raise installed("agents", agent).error(f"{type(error).__name__}: {error}") from error


_prepared: dict[str, tuple[TrainedModel, Any]] = {}


def prepared(model: TrainedModel) -> Any:
    """Return the model's arrays as its agent's passes take them, cached for the most recent models.

    Raises:
        ValueError: They are of another shape, or the agent is another package's and does not work.
    """
    kept = _prepared.get(model.path)
    if kept is None or kept[0] is not model:
        try:
            with component_errors(model.agent):
                parts = parts_of(model.agent)
                made = parts.live or parts.sizes
                assert made is not None
                kept = _prepared[model.path] = (model, made().prepare(model))
        except ComponentError as error:
            raise Unusable(error.line()) from error
    return kept[1]


def _changed(context: Context) -> list[np.ndarray[Any, Any]]:
    """Return everything that a pass changes."""
    resources, jobs = context.world.resources, context.waiting.jobs
    turns = context.waiting.calendar.turns
    closed = (jobs.masks, jobs.feasibility, turns) if turns.size else ()  # only where nodes are reserved
    return [*resources, *context.releases, *context.outcome, context.rng, jobs.room, *closed]
