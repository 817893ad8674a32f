"""Mode advise: sets priorities so that Slurm follows the policy's order; Slurm places and backfills.

The order is that of the queue in the policy's file (`sched.alone.in_order`). An agent has no order of its own: the jobs
that it would start now go first, then its file's order. Only the first `HEAD` jobs are prioritised; they start before
the others, and then the next ones are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from gpusched.controller.slurm.advised import ORDERED, advised_jobs, without_advice
from gpusched.controller.slurm.cycle import SlurmDecision
from gpusched.model.ids import slurm_id
from gpusched.model.plan import Start
from gpusched.model.slurm import SlurmJob, SlurmMode
from gpusched.queue.store import Store
from gpusched.sched.alone import in_order
from gpusched.sched.turns import partition_snapshot
from gpusched.slurm import lease
from gpusched.slurm.commands import Slurm

HEAD = lease.MAX_UPDATES
_CONFIG_S = 600.0
_log = logging.getLogger(__name__)


class Ordering:
    """Applies the order of queues to Slurm's priorities, and reverts it."""

    def __init__(self, store: Store, slurm: Slurm) -> None:
        self._store, self._slurm = store, slurm
        self._config: tuple[float, dict[str, str]] | None = None
        self._logged_plugin = ""

    def order(
        self,
        modes: Mapping[str, SlurmMode],
        waiting: Mapping[str, SlurmJob],
        decision: SlurmDecision | None,
        room: int,
        now: float,
    ) -> None:
        """Update at most ``room`` jobs whose position differs from their policy's order.

        Args:
            modes: Partition -> its mode. In modes other than advise, earlier changes are reverted.
            waiting: Slurm's id -> pending job.
            decision: The plan; None: set no order.
            room: How many jobs may be updated.
            now: Unix seconds.

        Raises:
            NoAnswer: Slurm does not respond.
        """
        before = advised_jobs(self._store)
        advised = [name for name, mode in modes.items() if mode is SlurmMode.ADVISE]
        if not before and not advised:
            return
        basic = self._is_basic(now)
        if basic is None:
            return
        lines: dict[str, tuple[str, str]] = {}  # job -> partition, line
        after = {name: [job for job in jobs if job in waiting] for name, jobs in before.items()}
        prioritised = {job.id: job.priority for job in waiting.values() if job.priority > 0}
        changed = {job for jobs in after.values() for job in jobs}
        bases = without_advice(waiting, changed, basic)

        def as_waiting(job: SlurmJob) -> lease.PendingSlurmJob:
            base = bases.get(job.id, job.priority if basic or job.priority > 1 else 0)
            added = job.priority - base if basic else job.site_factor if job.id in changed else 0
            return lease.PendingSlurmJob(job.id, job.priority, base, added)

        # Reverts come first, so that they are not delayed when ``room`` is short.
        for name in after.keys() - set(advised):
            for job in after[name]:
                restored = lease.priority(job, bases[job]) if basic and job in bases else lease.site_factor(job, 0)
                lines[job] = name, restored
        for name in advised if decision is not None else ():
            assert decision is not None
            ids = {view.id: slurm_id(view.id) for view in decision.snapshot.pending if view.spec.partition == name}
            queue = {job: as_waiting(waiting[job]) for job in ids.values() if job in prioritised}
            order = [ids[view] for view in policy_order(decision, name)]
            for job, addition in lease.priority_additions(queue.values(), order).items():
                value = queue[job].base + addition
                lines[job] = name, lease.priority(job, value) if basic else lease.site_factor(job, addition)
        updates = list(lines.items())[:room]
        for job, (name, _) in updates:
            if name in advised and job not in after.setdefault(name, []):
                after[name].append(job)
        self._store_changes(before, after)  # before the update, so that it can be reverted
        errors = self._slurm.update([line for _, (_, line) in updates])
        done = {job for at, (job, (name, _)) in enumerate(updates) if name not in advised and at not in errors}
        self._store_changes(after, {name: [job for job in jobs if job not in done] for name, jobs in after.items()})

    def _store_changes(self, before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> None:
        remaining = {name: jobs for name, jobs in after.items() if jobs}
        if remaining != before:
            self._store.set_meta(ORDERED, msgspec.json.encode(remaining).decode() if remaining else "")

    def _is_basic(self, now: float) -> bool | None:
        """Return whether Slurm orders by submission alone; None: by a site's own plugin, which is left alone."""
        if self._config is None or not 0 <= now - self._config[0] < _CONFIG_S:
            self._config = now, self._slurm.config()
        config = self._config[1]
        plugin = config.get("PrioritySiteFactorPlugin", "(null)")
        if plugin not in ("", "(null)", "site_factor/none"):
            if plugin != self._logged_plugin:
                self._logged_plugin = plugin
                _log.warning("no advice: SiteFactor is set by the site's own %s", plugin)
            return None
        return config.get("PriorityType", "") == "priority/basic"


def policy_order(decision: SlurmDecision, partition: str) -> list[str]:
    """Return the store's ids of a partition's first `HEAD` jobs in its policy's order."""
    policy = decision.deciders.get(partition) or decision.snapshot.policies[partition]
    part = partition_snapshot(decision.snapshot, partition, policy)
    queue = [job.id for job in in_order(part, partition)]
    if policy.agent is not None:
        in_queue = set(queue)
        now = [a.job_id for a in decision.plan.actions if isinstance(a, Start) and a.job_id in in_queue]
        queue = list(dict.fromkeys([*now, *queue]))
    return queue[:HEAD]
