"""Shadows: policies that are run after the live one has decided, for comparison only."""

from __future__ import annotations

import msgspec

from gpusched.controller.deciding import AgentDecision, Weights, timeout_message
from gpusched.model.plan import Plan, Preempt, Start
from gpusched.model.resources import Inventory
from gpusched.model.snapshot import Snapshot
from gpusched.queue.promotions import Shadow, ShadowDifference
from gpusched.queue.snapshots import job_class_estimates, recent_usage, recently_finished
from gpusched.queue.store import Store
from gpusched.sched.check import check
from gpusched.sched.turns import partition_snapshot

MAX_RECORDED = 50  # jobs recorded per difference

JobActions = dict[str, tuple[str, ...]]  # started jobs: their nodes; stopped jobs: ()


class Shadowing:
    """Runs the shadows and counts differences. A cycle waits no longer than the slowest shadow's budget."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._weights = Weights()
        self._decisions: dict[str, AgentDecision] = {}

    def ask(self, inventory: Inventory, snapshot: Snapshot, plan: Plan) -> None:
        """Run the shadows of partitions with pending jobs; ``plan``: of the live policies."""
        waiting = {job.spec.partition: job for job in snapshot.pending}
        shadows = [s for s in self._store.shadows().values() if s.until is None and s.partition in waiting]
        if not shadows:
            return
        started = [(shadow, self._start(shadow, self._snapshot_for(shadow, inventory, snapshot))) for shadow in shadows]
        answers = [(shadow, self._checked_answer(shadow, decision, snapshot)) for shadow, decision in started]
        with self._store.transaction():
            for shadow, actions in answers:
                self._record(shadow, actions, plan, snapshot)

    def _snapshot_for(self, shadow: Shadow, inventory: Inventory, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with what the shadow needs and no live policy requested."""
        policies = {shadow.partition: shadow.spec}
        usage = snapshot.usage or recent_usage(self._store, inventory, policies, snapshot.now)
        finished = snapshot.finished or recently_finished(self._store, policies)
        beliefs = snapshot.beliefs or job_class_estimates(self._store, policies, snapshot)
        return msgspec.structs.replace(snapshot, usage=usage, finished=finished, beliefs=beliefs)

    def _start(self, shadow: Shadow, snapshot: Snapshot) -> AgentDecision | str:
        """Start the shadow's decision, or return why there is no point in it."""
        name, spec, model = shadow.partition, shadow.spec, None
        if spec.agent is not None:
            weights = self._weights.get(name, spec, shadow.digest)
            if isinstance(weights, str):
                return weights
            model = weights
        previous = self._decisions.get(name)
        if previous is not None and previous.is_running:
            return timeout_message(spec.budget_s)
        self._decisions[name] = AgentDecision(name, spec, model, snapshot)
        return self._decisions[name]

    def _checked_answer(self, shadow: Shadow, decision: AgentDecision | str, snapshot: Snapshot) -> JobActions | str:
        """Return what the shadow would start and stop, checked like a live plan; or why it has no answer."""
        if isinstance(decision, str):
            return decision
        plan, trouble = decision.answer()
        if plan is None or trouble:
            return trouble
        sound, _ = check(plan, partition_snapshot(snapshot, shadow.partition, shadow.spec))
        return _actions_of(sound, shadow.partition, snapshot)

    def _record(self, shadow: Shadow, actions: JobActions | str, plan: Plan, snapshot: Snapshot) -> None:
        if isinstance(actions, str):
            late = actions == timeout_message(shadow.spec.budget_s)
            counted = {"late": shadow.late + late, "unusable": shadow.unusable + (not late)}
            self._store.put_shadow(msgspec.structs.replace(shadow, **counted, trouble=actions))
            return
        live = _actions_of(plan, shadow.partition, snapshot)
        same = live == actions
        self._store.put_shadow(
            msgspec.structs.replace(
                shadow, decisions=shadow.decisions + 1, same=shadow.same + same, trouble="",
                live_starts=shadow.live_starts + _started(live), shadow_starts=shadow.shadow_starts + _started(actions),
            )
        )  # fmt: skip
        if not same:
            only_live, only_shadow = _differing(live, actions), _differing(actions, live)
            found = ShadowDifference(partition=shadow.partition, time=snapshot.now, live=only_live, shadow=only_shadow)
            self._store.add_difference(found)


def _actions_of(plan: Plan, partition: str, snapshot: Snapshot) -> JobActions:
    """Return started jobs with their nodes, sorted since the order of ranks does not matter; stopped ones with none."""
    waiting = {j.id for j in snapshot.pending if j.spec.partition == partition}
    nodes = {node.name for node in snapshot.nodes if node.partition == partition}
    runs = {j.id for j in snapshot.running if any(part.node in nodes for part in j.allocation.parts)}
    found: JobActions = {}
    for action in plan.actions:
        if isinstance(action, Start) and action.job_id in waiting:
            found[action.job_id] = tuple(sorted(part.node for part in action.allocation.parts))
        elif isinstance(action, Preempt) and action.job_id in runs:
            found[action.job_id] = ()
    return found


def _started(actions: JobActions) -> int:
    return sum(1 for nodes in actions.values() if nodes)


def _differing(actions: JobActions, others: JobActions) -> JobActions:
    """Return the first `MAX_RECORDED` actions that the others do not have."""
    found = {job: nodes for job, nodes in actions.items() if others.get(job) != nodes}
    return dict(list(found.items())[:MAX_RECORDED])
