"""Charging the time between two readings to who held what, cycle by cycle."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpusched.accounting.usage import Counters, holdings, usage_between
from gpusched.cluster.base import NodeObservation
from gpusched.model.jobs import ENDED, JobRecord
from gpusched.model.readings import ProbeFailure
from gpusched.model.resources import Inventory
from gpusched.queue.store import NodeRecord, Store

REMEMBER_ENDED_S = 600.0  # how late the reading may come that covers a job's last seconds


class UsageWriter:
    """Writes usage rows, and the energy of jobs that have ended."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._counters = Counters()
        self._ended: list[JobRecord] = store.recently_ended(200)

    def charge(
        self,
        inventory: Inventory,
        before: Mapping[str, NodeRecord],
        observations: Mapping[str, NodeObservation],
        active: list[JobRecord],
        after: list[JobRecord],
        now: float,
    ) -> None:
        """Account for one cycle, inside its transaction.

        ``before``: the nodes' records before this cycle; ``observations``: its news. ``active``: the jobs that held
        something before it; ``after``: the same, in the same order, as they are now.
        """
        holders = self._holders(active, after, now)
        touched = {job.id for job in after if job.state in ENDED}
        for name, observation in observations.items():
            node, record = inventory.node(name), before.get(name)
            if node is None or isinstance(observation.result, ProbeFailure) or record is None:
                continue
            earlier = self._counters.bridged(name, record.reading, observation.result)
            rows = usage_between(node, earlier, observation.result, holdings(name, holders, now))
            self._store.add_usage(rows)
            touched |= {row.job_id for row in rows if row.job_id}
        self._refresh_energy(touched)

    def _holders(self, active: list[JobRecord], after: list[JobRecord], now: float) -> list[JobRecord]:
        holders = []
        for old, new in zip(active, after, strict=True):
            if new.state in ENDED:
                self._ended.append(new)
            elif new.allocation is None:  # back in the queue
                holders.append(msgspec.structs.replace(old, end_time=now))
            else:
                holders.append(new)
        horizon = now - REMEMBER_ENDED_S
        self._ended = [job for job in self._ended if job.end_time is not None and job.end_time > horizon]
        return [*holders, *self._ended]

    def _refresh_energy(self, job_ids: set[str]) -> None:
        changed = []
        for index, ended in enumerate(self._ended):
            if ended.id in job_ids and (job := self._store.job(ended.id)) is not None and job.state in ENDED:
                self._ended[index] = msgspec.structs.replace(job, energy_j=self._store.job_energy(job.id))
                changed.append(self._ended[index])
        self._store.put_jobs(changed)
