"""Whether a policy proved better: replays on days outside its training data, with an interval over days."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import msgspec

from gpusched.config.weights import ModelError
from gpusched.errors import NoHistory
from gpusched.estimation.estimators import HistoryEstimator
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory, Partition
from gpusched.model.units import count_of, local_time_zone
from gpusched.queue.store import Reader
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.policies import ReplayPolicy, policy_of_spec
from gpusched.sim.power import power_model
from gpusched.study.compare import DAY_S, MIN_DAYS, MeanDifference
from gpusched.study.own import seen_slices, with_run_conditions
from gpusched.study.study import FROM_EMPTY, PlannedReplay, Scenario, changes, costs_for, run_all, scenario_of
from gpusched.traces.own import own_jobs
from gpusched.traces.slicing import slice_trace
from gpusched.traces.trace import Trace

_NOISE = 1e-9  # of a quotient of two means that are equal


class ProofVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One policy compared with another on one partition's jobs.

    Attributes:
        since, until: Submission of the first and of the last job, UTC; None where the trace has no calendar.
        days: Days with jobs. jobs: Jobs that ended in both replays.
        gain: By how much the mean JCT is shorter under ``candidate``: 0.1 is 10 %. low, high: its 95 % interval
            (bootstrap over days); None with too few days.
        passed: The lower end is no less than 0: no worse than the incumbent.
        line: The same as a sentence.
    """

    partition: str
    candidate: str
    candidate_version: str
    incumbent: str
    incumbent_version: str
    since: str | None
    until: str | None
    days: int
    jobs: int
    incumbent_mean_jct_s: float | None
    candidate_mean_jct_s: float | None
    gain: float | None
    low: float | None
    high: float | None
    passed: bool
    line: str
    changes: tuple[MeanDifference, ...] = ()


def first_held_out(last: float | None) -> float:
    """Return the start of the first day (UTC) after all training data; 0 without any."""
    return 0.0 if last is None else (math.floor(last / DAY_S) + 1) * DAY_S


def history_of(inventory: Inventory, reader: Reader, partition: str, since: float, until: float) -> Trace:
    """Return the partition's own jobs submitted in [since, until).

    Raises:
        NoHistory: None of them has run and ended.
    """
    nothing = NoHistory(
        f"{partition}: no job submitted since {_day(since)} has run and ended",
        "wait for some, or use --force REASON",
    )
    try:
        trace = own_jobs(inventory, reader, name=f"history of {partition}", since=since, until=until)
    except NoHistory:
        raise nothing from None
    if partition not in trace.groups:
        raise nothing
    return slice_trace(trace, vc=partition)


def scenario_for(
    trace: Trace,
    inventory: Inventory,
    partition: Partition,
    notes: Sequence[str] = (FROM_EMPTY,),
    reader: Reader | None = None,
) -> Scenario:
    """Return the trace on the partition's nodes, with these notes after its own.

    ``reader``: of the store of these jobs, see `with_run_conditions`.
    """
    only = msgspec.structs.replace(inventory, partitions=(partition,))
    scenario = scenario_of(
        trace, inventory=only, seen=seen_slices(reader, only),
        power=lambda pool: power_model(pool, inventory=inventory),
    )  # fmt: skip
    return with_run_conditions(scenario._replace(notes=(*scenario.notes, *notes)), inventory, reader)


def judge(
    scenario: Scenario,
    partition: str,
    incumbent: PolicySpec,
    candidate: PolicySpec,
    advance: Callable[[float, int], None] | None = None,
) -> ProofVerdict:
    """Replay both and compare them; a preempting policy has the restart cost and bounds of its file.

    ``advance``: See `gpusched.study.request.outcomes`.

    Raises:
        ModelError: The candidate's weights cannot be used.
        UsageError: One of them places by what places cost, and that is unknown, or the other cannot be replayed so.
    """
    policies = (incumbent_of(incumbent, partition, scenario), policy_of_spec(candidate, None, partition))
    network, _ = costs_for(policies, scenario)
    estimator, over = HistoryEstimator(), list[PlannedReplay]()  # as live
    runs = [
        PlannedReplay(scenario, p, ReplayOptions(restart_s=p.restart_s, estimator=estimator, network=network))
        for p in policies
    ]

    def watch(part: float) -> None:
        if advance is not None:
            advance(len(over) + part, len(runs))

    base, other = run_all(runs, done=over.append, progress=watch)
    found = changes([base, other])[1]
    jct = next((c for c in found if c.figure == "jct_s"), None)
    gain, high, low = (None if x is None else -x for x in (jct.relative, jct.low, jct.high)) if jct else (None,) * 3
    trace = scenario.trace
    times = [None if trace.epoch is None else trace.epoch + float(trace.submit[i]) for i in (0, -1)]
    verdict = ProofVerdict(
        partition=partition, candidate=candidate.name, candidate_version=candidate.version, incumbent=incumbent.name,
        incumbent_version=incumbent.version, since=_iso(times[0]), until=_iso(times[1]), days=jct.days if jct else 0,
        jobs=int((base.result.ran & other.result.ran).sum()), incumbent_mean_jct_s=jct.base if jct else None,
        candidate_mean_jct_s=jct.other if jct else None, gain=gain, low=low, high=high,
        passed=low is not None and low >= -_NOISE, line="", changes=found,
    )  # fmt: skip
    return msgspec.structs.replace(verdict, line=_line(verdict))


def incumbent_of(spec: PolicySpec, partition: str, scenario: Scenario) -> ReplayPolicy:
    """Return the live policy; if its agent cannot decide, its stand-in."""
    if not spec.traits.places or scenario.learned:
        with contextlib.suppress(ModelError):
            return policy_of_spec(spec, None, partition)
    return replace(policy_of_spec(spec.effective_fallback), name=spec.name)


def _line(verdict: ProofVerdict) -> str:
    days = f"{verdict.days} {'day' if verdict.days == 1 else 'days'}"
    against = f"{verdict.candidate} against {verdict.incumbent} on {count_of(verdict.jobs, 'job')} of {days}"
    if verdict.gain is None:
        return f"{against}: nothing to compare"
    mean = f"{against}: mean JCT {_percent(verdict.gain)}"
    if verdict.low is None or verdict.high is None:
        return f"{mean}; too few days for an interval ({MIN_DAYS} are needed)"
    result = "no worse" if verdict.passed else "not shown to be no worse"
    return f"{mean} (95 % interval {_percent(verdict.low)} to {_percent(verdict.high)}): {result}"


def _percent(gain: float) -> str:
    """Format a gain as the change of the mean JCT: shorter is negative."""
    return f"{-gain:+.1%}" if abs(gain) > _NOISE else "0.0%"


def _iso(moment: float | None) -> str | None:
    return None if moment is None else datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds")


def _day(moment: float) -> str:
    return "ever" if moment <= 0 else local_time_zone(moment)
