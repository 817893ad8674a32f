"""Live decisions by a trained agent instead of a policy's stages, and by its fallback if the agent cannot decide.

`gpusched.agents.base` says what an agent offers. One that cannot decide raises ValueError (`Unusable` if it notices so
itself); what it has changed in the arrays by then is undone here.
"""

from __future__ import annotations

from collections.abc import Callable
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

StagedPass = Callable[["Context"], tuple[list[int], QueueBlock]]
"""Decides for one partition by the stages of its policy; returns its queue in order, and what blocked it."""

NAN_OUTPUT = "its network returned NaN"
"""The message of `Unusable` where an output is NaN."""


class Unusable(ValueError):
    """An agent that cannot decide; its message is one line."""


class Context(NamedTuple):
    """The arguments of the decision for one partition; all but the first two are shared by all partitions.

    Attributes:
        partition: Its name.
        policy: What decides in it.
        snapshot: The state from which is decided.
        world: The nodes as arrays. Started jobs are subtracted from ``world.resources``.
        waiting: The pending jobs as arrays.
        releases: When running jobs give back what they hold.
        rng: State of the random numbers (`state.seed_words`).
        scratch: Working memory of the passes.
        outcome: Per pending job whether it starts, and where; see `PassOutcome`.
        remarks: Partition -> what the plan is to say of its placement.
        stops: Running jobs to be preempted.
        reasons: Job id -> why it stays pending, instead of the reason by its code in ``outcome``.
        waits: As `Plan.waits`.
        costs: What places cost; None: the policy does not need it, or nothing was learned (`topology.live`).
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
    reasons: dict[str, Reason]
    waits: dict[str, float]
    costs: Costs | None = None

    @property
    def state(self) -> ClusterState:
        """Return what the passes read and change."""
        return ClusterState(
            self.world.resources, self.releases, self.waiting.requests, self.waiting.jobs, self.scratch, self.outcome,
            float(self.snapshot.now),
        )  # fmt: skip


def decide_by_agent(
    context: Context, model: TrainedModel | None, staged: StagedPass, troubles: dict[str, str]
) -> tuple[list[int], QueueBlock]:
    """Decide for one partition by its agent; if it cannot, by the fallback, with the cause in ``troubles``.

    Agents write to ``remarks``, ``stops`` and ``reasons`` only when nothing can fail any more: these are not undone.

    Args:
        context: The decision; its policy has an agent.
        model: The agent's weights; None: there are none.
        staged: Decides by the stages of a policy.
        troubles: Partition -> cause.
    """
    policy = context.policy
    assert policy.agent is not None
    before = [array.copy() for array in _changed_arrays(context)]
    try:
        if model is None:
            raise Unusable("no weights")
        own = prepared_weights(model)
        with ComponentErrors(policy.agent):
            live = agent_parts(policy.agent).live
            assert live is not None
            return live().decide_queue(own, context)
    except (ValueError, ComponentError) as error:
        for array, old in zip(_changed_arrays(context), before, strict=True):
            array[:] = old
        troubles[context.partition] = str(error)
        return staged(context._replace(policy=policy.effective_fallback))


def agent_parts(agent: str) -> AgentParts:
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
            agent_parts(name)
        elif not callable(component.load()):
            raise component.error("it cannot be called")
    except ComponentError as error:
        return error.line()
    return None


class ComponentErrors:
    """Raise `ComponentError` for what another package's agent raises, but for `Unusable`: it cannot decide now."""

    def __init__(self, agent: str) -> None:
        self._agent = agent

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        known = isinstance(error, GpuschedError | Unusable | NotCached)
        if isinstance(error, Exception) and not known and self._agent not in AGENTS:
            raise installed("agents", self._agent).failed(error) from error


_prepared: dict[str, tuple[TrainedModel, Any]] = {}  # path of the weights -> the model last loaded from it, prepared


def prepared_weights(model: TrainedModel) -> Any:
    """Return the model's arrays in the form that its agent's passes take, cached until its file is loaded anew.

    Raises:
        ValueError: They are of another shape, or the agent is another package's and does not work.
    """
    kept = _prepared.get(model.path)
    if kept is None or kept[0] is not model:
        try:
            with ComponentErrors(model.agent):
                parts = agent_parts(model.agent)
                made = parts.live or parts.sizes
                assert made is not None
                kept = _prepared[model.path] = (model, made().prepare(model))
        except ComponentError as error:
            raise Unusable(error.line()) from error
    return kept[1]


def _changed_arrays(context: Context) -> list[np.ndarray[Any, Any]]:
    """Return the arrays with results of a pass; ``scratch`` is working memory, which the next pass sets anew."""
    resources, jobs = context.world.resources, context.waiting.jobs
    turns = context.waiting.calendar.turns
    by_calendar = (jobs.masks, jobs.feasibility, turns) if turns.size else ()  # only where nodes are reserved
    return [*resources.columns, *context.releases, *context.outcome, context.rng, jobs.room, *by_calendar]
