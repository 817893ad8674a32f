"""The reservations that stood while this cluster's own jobs ran, for their replays."""

from __future__ import annotations

from gpusched.queue.store import Reader
from gpusched.sim.reserving import bookings_of
from gpusched.study.study import Scenario

NOTE = "the replay includes {} reservations of nodes"


def with_own_reservations(scenario: Scenario, reader: Reader | None) -> Scenario:
    """The scenario, of jobs of this store on their own nodes, with what was reserved then."""
    epoch = scenario.trace.epoch
    if reader is None or epoch is None or not (there := reader.reservations(epoch)):
        return scenario
    found = bookings_of(there, reader.jobs_of_reservations(), scenario.trace, scenario.pool)
    if not found:
        return scenario
    return scenario._replace(reserved=found, notes=(*scenario.notes, NOTE.format(len(found))))
