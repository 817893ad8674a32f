"""Estimated run times in replays: renewed while jobs wait, by what ends and what runs on; or made at submission."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.compiled.arrays import Floats, Ints
from gpusched.estimation.groups import NARROW
from gpusched.estimation.last_two import PastRunTimes, last_two_s, note_run
from gpusched.estimation.quantiles import RunTimes, expected_s, note_age, note_end, note_stop, state
from gpusched.sim.engine.build import SimWorld, estimator_for
from gpusched.sim.engine.pace import elapsed_run_s, total_run_s
from gpusched.sim.engine.state import DONE, ENDED, READY, Passes, Sim

_STALE_S = 600.0  # after which an estimate is renewed though nothing of its user has changed


class Renewed(NamedTuple):
    """Estimates that change while jobs wait; jobs of the same groups have the same.

    Attributes:
        alike: ``int64[jobs]``: number of the jobs with the same groups. value: ``float64[alike]``: their estimate.
        changes: ``int64[alike]``: what had changed in their groups by then; -1: no estimate. at: ``float64[alike]``.
    """

    known: RunTimes
    alike: Ints
    value: Floats
    changes: Ints
    at: Floats


class Estimates(NamedTuple):
    """What run times are estimated by: ``renewed``, or where that is None (nothing of it is compiled) ``past``."""

    past: PastRunTimes
    renewed: Renewed | None


def new_estimates(world: SimWorld) -> Estimates:
    """Return the estimates before the first event."""
    past, known = estimator_for(world).in_replay(world.trace)
    if known is None:
        return Estimates(past, None)
    alike = np.unique(np.column_stack((known.group, known.limit)), axis=0, return_inverse=True)[1].reshape(-1)
    kinds = int(alike.max(initial=-1)) + 1
    value, at = np.zeros((2, kinds))
    return Estimates(past, Renewed(known, alike.astype(np.int64), value, np.full(kinds, -1, np.int64), at))


@jit
def note_ends(of: Estimates | None, sim: Sim) -> None:
    """Record how long jobs have run by now, and which ended at this instant; None: nothing is estimated."""
    if of is not None:
        note_ages(of.renewed, sim)
        note_ended(of.renewed, of.past, sim)


@jit
def note_arrivals(of: Estimates | None, sim: Sim, passes: Passes) -> None:
    """Estimate the jobs that came to wait at this instant."""
    if of is not None:
        for i in range(sim.counter[READY]):
            note_submitted(of.renewed, of.past, sim, passes, sim.ready[i])


@jit
def renew_waiting(of: Estimates | None, sim: Sim, passes: Passes, waiting: Ints) -> None:
    """Renew the estimates of waiting jobs; see `renew`."""
    if of is not None:
        renew(of.renewed, sim, passes, waiting)


@jit
def note_begin(of: Estimates | None, job: int) -> None:
    """Record that a job runs from now on."""
    if of is not None:
        note_started(of.renewed, job)


@jit
def note_ended(renewed: Renewed | None, past: PastRunTimes, sim: Sim) -> None:
    """Record the jobs that stopped running at this instant."""
    for i in range(sim.counter[ENDED]):
        job = sim.ended[i]
        over = sim.state[job]["status"] == DONE
        if renewed is None:
            if over:
                note_run(past, job, total_run_s(sim.pace, sim, job))
        elif over:
            note_end(renewed.known, job, total_run_s(sim.pace, sim, job))
        else:
            note_stop(renewed.known, job)


@jit
def note_submitted(renewed: Renewed | None, past: PastRunTimes, sim: Sim, passes: Passes, job: int) -> None:
    """Estimate a job that came to wait."""
    if renewed is None:
        sim.jobs[job]["expected"] = passes.jobs.limit[job] = last_two_s(past, job)
    elif sim.state[job]["restarts"] == 0:
        state(renewed.known, job)


@jit
def note_started(renewed: Renewed | None, job: int) -> None:
    """Record that a job runs from now on."""
    if renewed is not None:
        note_age(renewed.known, job, 0.0)


@jit
def note_ages(renewed: Renewed | None, sim: Sim) -> None:
    """Record how long jobs have run by now."""
    if renewed is not None:
        for i in range(sim.ends.size[0]):
            job = sim.ends.item[i]
            note_age(renewed.known, job, elapsed_run_s(sim.pace, sim, job, 0.0))


@jit
def renew(renewed: Renewed | None, sim: Sim, passes: Passes, waiting: Ints) -> None:
    """Renew the estimates of waiting jobs, ``int64[n]``, where their user's jobs have changed, or long ago."""
    if renewed is None:
        return
    known, now = renewed.known, sim.clock[0]
    for job in waiting:
        alike, changes = renewed.alike[job], 0
        for kind in range(NARROW):
            if known.group[job, kind] >= 0:
                changes += known.changes[known.group[job, kind]]
        if changes != renewed.changes[alike] or now - renewed.at[alike] > _STALE_S:
            renewed.value[alike] = expected_s(known, job)
            renewed.changes[alike], renewed.at[alike] = changes, now
        # Backfill and the order must use the same end: a release is found by it.
        sim.jobs[job]["expected"] = passes.jobs.limit[job] = renewed.value[alike]
