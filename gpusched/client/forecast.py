"""When a waiting job is expected to start, from what the store holds: the queue run forward under the live policies."""

from __future__ import annotations

import sys

import msgspec

from gpusched.client.context import Client
from gpusched.model.forecast import ExpectedStart, Sooner
from gpusched.model.snapshot import Snapshot
from gpusched.sched.advice import refuted
from gpusched.sched.explain import Explanation


def look_ahead(
    client: Client, snapshot: Snapshot, explanation: Explanation
) -> tuple[ExpectedStart, tuple[Sooner, ...], tuple[str, ...]]:
    """The forecast, what would start the job sooner, and the explanation's next steps that the forecast bears out.

    Runs the queue forward; the first time after an installation or upgrade this compiles for some seconds.
    """
    _say_if_slow()
    from gpusched.client.alternatives import alternatives_of
    from gpusched.forecast.assumptions import assumptions, why_never
    from gpusched.forecast.limit_use import LimitUse
    from gpusched.forecast.start_times import StartForecast

    job = next(j for j in snapshot.pending if j.id == explanation.job_id)
    habits = LimitUse(client.reader.past_runs() if client.reader else [])
    alternatives = alternatives_of(client.inventory, snapshot, job)
    settings = client.inventory.settings
    foresight = StartForecast(
        snapshot, job, habits, alternatives, half_life_s=settings.fairshare_half_life_s, tick_s=settings.tick_s
    )
    expected = foresight.expected()
    if expected.median is None and expected.by_limits is None:
        expected = msgspec.structs.replace(expected, never=why_never(snapshot, job, explanation.reason))
    expected = msgspec.structs.replace(
        expected, assumptions=assumptions(snapshot, job, habits.count, habits.known(job.user))
    )
    sooner = foresight.sooner()
    now = {s.what for s in sooner if s.now}  # a step may claim a start at once only where the run ahead has one
    return expected, sooner, tuple(step for step in explanation.next_steps if not refuted(step, now))


def _say_if_slow() -> None:
    """A word for people before the compiler takes its time."""
    from gpusched.compiled import kept_on_disk
    from gpusched.forecast.run import run_forward

    if sys.stderr.isatty() and hasattr(run_forward, "signatures") and not kept_on_disk(run_forward):
        print("gpusched: compiling the forecast, once after installation or upgrade ...", file=sys.stderr, flush=True)
