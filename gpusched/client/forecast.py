"""When a waiting job is expected to start, from what the store holds: the queue run forward under the live policies."""

from __future__ import annotations

import sys
from typing import NamedTuple

import msgspec

from gpusched.client.context import Client
from gpusched.model.forecast import ExpectedStart, Sooner, SpreadStart
from gpusched.model.jobs import JobRecord
from gpusched.model.snapshot import Snapshot
from gpusched.sched.advice import refuted
from gpusched.sched.explain import Explanation


class JobForecast(NamedTuple):
    """The forecast, when the job would start nearer together or further apart, and what would start it sooner.

    ``next_steps``: of the explanation's those that the forecast bears out.
    """

    expected: ExpectedStart
    spreads: tuple[SpreadStart, ...]
    sooner: tuple[Sooner, ...]
    next_steps: tuple[str, ...]


def look_ahead(client: Client, snapshot: Snapshot, job: JobRecord, explanation: Explanation) -> JobForecast:
    """What the queue run forward says of a waiting job.

    The first time after an installation or upgrade this compiles for some seconds.
    """
    _say_if_slow()
    from gpusched.client.alternatives import alternatives_of, spreads_of
    from gpusched.estimation.limit_use import LimitUse
    from gpusched.forecast.assumptions import assumptions, why_never
    from gpusched.forecast.start_times import StartForecast

    view = next(j for j in snapshot.pending if j.id == explanation.job_id)
    habits = LimitUse(client.reader.run_times() if client.reader else [])
    alternatives = alternatives_of(client.inventory, snapshot, view, explanation)
    settings = client.inventory.settings
    foresight = StartForecast(
        snapshot, view, habits, alternatives, spreads_of(snapshot, view),
        half_life_s=settings.fairshare_half_life_s, tick_s=settings.tick_s,
    )  # fmt: skip
    expected = foresight.expected()
    if expected.median is None and expected.by_limits is None:
        expected = msgspec.structs.replace(expected, never=why_never(snapshot, view, explanation.reason))
    expected = msgspec.structs.replace(
        expected, assumptions=assumptions(snapshot, view, habits.count, habits.known(job.user))
    )
    spreads = _with_costs(client, snapshot, job, foresight.by_spread())
    sooner = foresight.sooner()
    now = {s.what for s in sooner if s.now}  # a step may claim a start at once only where the run ahead has one
    steps = tuple(step for step in explanation.next_steps if not refuted(step, now))
    return JobForecast(expected, spreads, sooner, steps)


def _with_costs(
    client: Client, snapshot: Snapshot, job: JobRecord, spreads: tuple[SpreadStart, ...]
) -> tuple[SpreadStart, ...]:
    """With the racks, and what is believed that they and more nodes cost the job."""
    if not spreads:
        return ()
    from gpusched.client.predict import cost_at

    beliefs, names, found = client.reader.beliefs() if client.reader else {}, snapshot.topology.racks(), []
    for start in spreads:
        racks = len({names.get(node, f" {node}") for node in start.nodes}) if names else 0
        nearer = racks > 1 or job.spec.max_nodes is not None  # on one node or in one rack, where it may be
        message, cost = (nearer and cost_at(beliefs, job, len(start.nodes), racks)) or ("", None)
        found.append(msgspec.structs.replace(start, racks=racks, cost=cost, message=message))
    return tuple(found)


def _say_if_slow() -> None:
    """A word for people before the compiler takes its time."""
    from gpusched.compiled import is_on_disk
    from gpusched.forecast.run import run_forward

    if sys.stderr.isatty() and hasattr(run_forward, "signatures") and not is_on_disk(run_forward):
        print("gpusched: compiling the forecast (once after installation or upgrade) ...", file=sys.stderr, flush=True)
