"""Shadows: policies that are asked what they would do, after the live one has decided, and never obeyed."""

from __future__ import annotations

import msgspec

from gpusched.controller.deciding import AgentDecision, Weights, late_line, only
from gpusched.model.plan import Plan, Preempt, Start
from gpusched.model.resources import Inventory
from gpusched.model.snapshot import Snapshot
from gpusched.queue.promotions import Shadow, ShadowDifference
from gpusched.queue.snapshots import job_class_estimates, recent_usage, recently_finished
from gpusched.queue.store import Store
from gpusched.sched.check import check

MAX_NAMED = 50  # jobs of one difference that are written down

Deeds = dict[str, tuple[str, ...]]  # started jobs: their nodes; stopped ones: none


class Shadowing:
    """Asks the shadows and keeps count. A decision takes no longer than the slowest shadow's budget."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._weights = Weights()
        self._asked: dict[str, AgentDecision] = {}

    def ask(self, inventory: Inventory, snapshot: Snapshot, plan: Plan) -> None:
        """Ask every shadow in whose partition somebody waits; ``plan``: what was done by the live policies."""
        waiting = {job.spec.partition: job for job in snapshot.pending}
        shadows = [s for s in self._store.shadows().values() if s.until is None and s.partition in waiting]
        if not shadows:
            return
        asked = [(shadow, self._ask(shadow, self._seen_by(shadow, inventory, snapshot))) for shadow in shadows]
        answers = [(shadow, self._heard(shadow, question, snapshot)) for shadow, question in asked]
        with self._store.transaction():
            for shadow, deeds in answers:
                self._record(shadow, deeds, plan, snapshot)

    def _seen_by(self, shadow: Shadow, inventory: Inventory, snapshot: Snapshot) -> Snapshot:
        """With what the shadow wants to know and no live policy asked for."""
        policies = {shadow.partition: shadow.spec}
        usage = snapshot.usage or recent_usage(self._store, inventory, policies, snapshot.now)
        finished = snapshot.finished or recently_finished(self._store, policies)
        beliefs = snapshot.beliefs or job_class_estimates(self._store, policies, snapshot)
        return msgspec.structs.replace(snapshot, usage=usage, finished=finished, beliefs=beliefs)

    def _ask(self, shadow: Shadow, snapshot: Snapshot) -> AgentDecision | str:
        """Begin to ask, or why that is of no use."""
        name, spec, model = shadow.partition, shadow.spec, None
        if spec.agent is not None:
            weights = self._weights.of(name, spec, shadow.digest)
            if isinstance(weights, str):
                return weights
            model = weights
        before = self._asked.get(name)
        if before is not None and before.thinking:
            return late_line(spec.budget_s)
        self._asked[name] = AgentDecision(name, spec, model, snapshot)
        return self._asked[name]

    def _heard(self, shadow: Shadow, asked: AgentDecision | str, snapshot: Snapshot) -> Deeds | str:
        """What the shadow would start and stop, by the check of the live plan; or why it has no answer."""
        if isinstance(asked, str):
            return asked
        plan, trouble = asked.answer()
        if plan is None or trouble:
            return trouble
        sound, _ = check(plan, only(snapshot, shadow.partition, shadow.spec))
        return _deeds(sound, shadow.partition, snapshot)

    def _record(self, shadow: Shadow, deeds: Deeds | str, plan: Plan, snapshot: Snapshot) -> None:
        if isinstance(deeds, str):
            late = deeds == late_line(shadow.spec.budget_s)
            counted = {"late": shadow.late + late, "unusable": shadow.unusable + (not late)}
            self._store.put_shadow(msgspec.structs.replace(shadow, **counted, trouble=deeds))
            return
        live = _deeds(plan, shadow.partition, snapshot)
        same = live == deeds
        self._store.put_shadow(
            msgspec.structs.replace(
                shadow, decisions=shadow.decisions + 1, same=shadow.same + same, trouble="",
                live_starts=shadow.live_starts + _started(live), shadow_starts=shadow.shadow_starts + _started(deeds),
            )
        )  # fmt: skip
        if not same:
            only_live, only_shadow = _less(live, deeds), _less(deeds, live)
            found = ShadowDifference(partition=shadow.partition, time=snapshot.now, live=only_live, shadow=only_shadow)
            self._store.add_difference(found)


def _deeds(plan: Plan, partition: str, snapshot: Snapshot) -> Deeds:
    """Started jobs with their nodes, sorted: which rank is where makes no difference; stopped ones without any."""
    waiting = {j.id for j in snapshot.pending if j.spec.partition == partition}
    nodes = {node.name for node in snapshot.nodes if node.partition == partition}
    runs = {j.id for j in snapshot.running if any(part.node in nodes for part in j.allocation.parts)}
    found: Deeds = {}
    for action in plan.actions:
        if isinstance(action, Start) and action.job_id in waiting:
            found[action.job_id] = tuple(sorted(part.node for part in action.allocation.parts))
        elif isinstance(action, Preempt) and action.job_id in runs:
            found[action.job_id] = ()
    return found


def _started(deeds: Deeds) -> int:
    return sum(1 for nodes in deeds.values() if nodes)


def _less(deeds: Deeds, others: Deeds) -> Deeds:
    """What the others do not do likewise; the first `MAX_NAMED`."""
    found = {job: nodes for job, nodes in deeds.items() if others.get(job) != nodes}
    return dict(list(found.items())[:MAX_NAMED])
