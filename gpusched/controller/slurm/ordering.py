"""Mode advise: the policy's order of the queue, as priorities by which Slurm goes; Slurm places and backfills.

Which order that is: the one in which the policy's file has its queue (`sched.alone.in_order`). An agent has none
of its own, so what it would start now goes first, then its file's order. Only the first `HEAD` jobs of it are told to
Slurm: they start before the others, and by then the next ones are told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from gpusched.controller.deciding import only
from gpusched.controller.slurm.advised import ORDERED, ordered, without_advice
from gpusched.controller.slurm.cycle import SlurmDecision
from gpusched.model.ids import slurm_id
from gpusched.model.plan import Start
from gpusched.model.slurm import SlurmJob, SlurmMode
from gpusched.queue.store import Store
from gpusched.sched.alone import in_order
from gpusched.slurm import lease
from gpusched.slurm.commands import Slurm

HEAD = lease.MAX_UPDATES
_CONFIG_S = 600.0


class Ordering:
    """Tells Slurm the order of queues, and takes it back."""

    def __init__(self, store: Store, slurm: Slurm, say: Callable[[str], None]) -> None:
        self._store, self._slurm, self._say = store, slurm, say
        self._config: tuple[float, dict[str, str]] | None = None
        self._said = ""

    def order(
        self,
        modes: Mapping[str, SlurmMode],
        waiting: Mapping[str, SlurmJob],
        decided: SlurmDecision | None,
        room: int,
        now: float,
    ) -> None:
        """At most ``room`` updates: of jobs that stand elsewhere than their policy would have them.

        Args:
            modes: Partition -> its mode. In the others what was told earlier is taken back.
            waiting: Slurm's id -> job that waits.
            decided: The plan; None: no order is told.
            room: How many jobs may be updated.
            now: Unix seconds.

        Raises:
            NoAnswer: Slurm does not answer.
        """
        ours = ordered(self._store)
        advised = [name for name, mode in modes.items() if mode is SlurmMode.ADVISE]
        if not ours and not advised:
            return
        basic = self._is_basic(now)
        if basic is None:
            return
        lines: dict[str, tuple[str, str]] = {}  # job -> partition, line
        after = {name: [job for job in jobs if job in waiting] for name, jobs in ours.items()}
        everyone = {job.id: job.priority for job in waiting.values() if job.priority > 0}
        changed = {job for jobs in after.values() for job in jobs}
        bases = without_advice(waiting, changed, basic)

        def as_waiting(job: SlurmJob) -> lease.PendingSlurmJob:
            base = bases.get(job.id, job.priority if basic or job.priority > 1 else 0)
            added = job.priority - base if basic else job.site_factor if job.id in changed else 0
            return lease.PendingSlurmJob(job.id, job.priority, base, added)

        for name in after.keys() - set(advised):
            for job in after[name]:
                back = lease.priority(job, bases[job]) if basic and job in bases else lease.site_factor(job, 0)
                lines[job] = name, back
        for name in advised if decided is not None else ():
            assert decided is not None
            ids = {view.id: slurm_id(view.id) for view in decided.snapshot.pending if view.spec.partition == name}
            queue = {job: as_waiting(waiting[job]) for job in ids.values() if job in everyone}
            for job, more in lease.raised(queue.values(), [ids[view] for view in wanted(decided, name)]).items():
                value = queue[job].base + more
                lines[job] = name, lease.priority(job, value) if basic else lease.site_factor(job, more)
        some = list(lines.items())[:room]
        for job, (name, _) in some:
            if name in advised and job not in after.setdefault(name, []):
                after[name].append(job)
        self._keep(ours, after)  # before it is done: what is taken back must be known
        errors = self._slurm.update([line for _, (_, line) in some])
        done = {job for at, (job, (name, _)) in enumerate(some) if name not in advised and at not in errors}
        self._keep(after, {name: [job for job in jobs if job not in done] for name, jobs in after.items()})

    def _keep(self, before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> None:
        kept = {name: jobs for name, jobs in after.items() if jobs}
        if kept != before:
            self._store.set_meta(ORDERED, msgspec.json.encode(kept).decode() if kept else "")

    def _is_basic(self, now: float) -> bool | None:
        """Whether Slurm orders by submission alone; None: by a plugin of the site's, with which nobody interferes."""
        if self._config is None or not 0 <= now - self._config[0] < _CONFIG_S:
            self._config = now, self._slurm.config()
        config = self._config[1]
        plugin = config.get("PrioritySiteFactorPlugin", "(null)")
        if plugin not in ("", "(null)", "site_factor/none"):
            said = f"no advice: SiteFactor is set by the site's own {plugin}"
            if said != self._said:
                self._said = said
                self._say(said)
            return None
        return config.get("PriorityType", "") == "priority/basic"


def wanted(decided: SlurmDecision, partition: str) -> list[str]:
    """The store's ids of the first `HEAD` jobs of a partition in the order of its policy."""
    policy = decided.deciders.get(partition) or decided.snapshot.policies[partition]
    part = only(decided.snapshot, partition, policy)
    queue = [job.id for job in in_order(part, partition)]
    if policy.agent is not None:
        own = set(queue)
        now = [a.job_id for a in decided.plan.actions if isinstance(a, Start) and a.job_id in own]
        queue = list(dict.fromkeys([*now, *queue]))
    return queue[:HEAD]
