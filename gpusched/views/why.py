"""Why a job waits or ended: text, a table of nodes, and next steps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from gpusched.model.forecast import ExpectedStart, Sooner, SpreadStart
from gpusched.model.jobs import JobRecord
from gpusched.model.slurm import SlurmFacts
from gpusched.model.units import format_duration, in_calendar, iso_utc
from gpusched.views import common
from gpusched.views.jobs import job_dict, job_nodes, preemptions_line, resources_line

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from gpusched.sched.explain import NodeVerdict
    from gpusched.sched.sizing.explain import SizesNow


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The explanation.

    Attributes:
        reason: The main reason, in Slurm's words.
        message: The reason as a sentence.
        position, queue_length: The position in its partition's queue, 1 for the first; None if it is not queued.
        next_steps: What would help, most useful first.
        warning: Why the queue does not advance at all, or "".
        fallback: Why the fallback of its partition's agent decides, or "".
        partner: The job that shares its GPUs.
        spreads: When it would start at each spread, the nearest first.
        sizes: Of a pending resizable job, the sizes that its policy would give it.
    """

    job: JobRecord
    reason: str
    message: str
    now: float
    nodes: tuple[NodeVerdict, ...] = ()
    position: int | None = None
    queue_length: int = 0
    next_steps: tuple[str, ...] = ()
    expected: ExpectedStart | None = None
    spreads: tuple[SpreadStart, ...] = ()
    sooner: tuple[Sooner, ...] = ()
    warning: str = ""
    fallback: str = ""
    partner: str | None = None
    sizes: SizesNow | None = None

    @property
    def stopped(self) -> str:
        """Return how often a policy preempted it, and when and for which job last; or ""."""
        return preemptions_line(self.job)


def why_dict(why: Why) -> dict[str, Any]:
    """Return the explanation as JSON; the job's own keys are those of ``status --json``."""
    return {
        "id": why.job.id,
        "state": str(why.job.state),
        "reason": why.reason or None,
        "message": why.message or None,
        "exit_code": why.job.exit_code,
        "position": why.position,
        "queue_length": why.queue_length,
        "nodes": [{"name": n.node, "fits": n.fits, "message": n.text} for n in why.nodes],
        "next_steps": list(why.next_steps),
        "expected_start": None if why.expected is None else _expected_dict(why.expected),
        "spreads": [spread_dict(s) for s in why.spreads],
        "sooner": [_sooner_dict(s) for s in why.sooner],
        "warning": why.warning or None,
        "fallback": why.fallback or None,
        "stopped": why.stopped or None,
        "sizes_now": None if why.sizes is None else sizes_dict(why.sizes),
        "job": job_dict(why.job, why.now, partner=why.partner),
    }


def sizes_dict(sizes: SizesNow) -> dict[str, Any]:
    """Return the sizes that a pending resizable job would get, as JSON."""
    return {
        "fits": list(sizes.fits),
        "least": sizes.least,
        "given": sizes.given,
        "shrinks": [{"id": job, "from": old, "to": new} for job, (old, new) in sizes.shrinks.items()],
        "message": sizes.message,
    }


def _expected_dict(expected: ExpectedStart) -> dict[str, Any]:
    return {
        "median": iso_utc(expected.median),
        "low": iso_utc(expected.low),
        "high": iso_utc(expected.high),
        "by_limits": iso_utc(expected.by_limits),
        "nodes": list(expected.nodes),
        "nodes_share": expected.certain if expected.nodes else None,
        "runs": expected.runs,
        "never": expected.never or None,
        "assumptions": list(expected.assumptions),
    }


def spread_dict(start: SpreadStart) -> dict[str, Any]:
    """Return when a job would start at this spread, as JSON."""
    return {
        "spread": start.spread,
        "how": start.how,
        "start": iso_utc(start.median),
        "low": iso_utc(start.low),
        "high": iso_utc(start.high),
        "nodes": list(start.nodes),
        "racks": start.racks or None,
        "cost": None if start.cost is None else msgspec.to_builtins(start.cost),
        "message": start.message or None,
    }


def _sooner_dict(sooner: Sooner) -> dict[str, Any]:
    return {
        "what": sooner.what,
        "how": sooner.how or None,
        "start": iso_utc(sooner.start),
        "now": sooner.now,
        "nodes": list(sooner.nodes),
    }


def expected_lines(why: Why) -> list[str]:
    """Return when the job starts, and what would start it sooner, for people."""
    if why.expected is None:
        return []
    spread, sooner = spread_lines(why.spreads, why.now), [_sooner_line(s, why.now) for s in why.sooner]
    return [_expected_line(why.expected, why.now), *spread, *sooner]


def spread_lines(spreads: Sequence[SpreadStart], now: float) -> list[str]:
    """Return the choices: ``in one rack from 14:20``, ``on 2 racks at once, about 18 % slower than in one (...)``.

    A wider spread is listed only if it starts sooner; nothing is listed if the nearest one can start at once.
    """
    lines: list[str] = []
    fewest = float("inf")
    for start in spreads:
        begins = float("inf") if start.median is None else max(start.median, now)
        if begins < fewest or not lines:
            fewest = min(fewest, begins)
            lines.append(_spread_line(start, now))
    return lines if fewest > now or len(lines) > 1 else []


def _spread_line(start: SpreadStart, now: float) -> str:
    slowdown = f"on {start.racks} racks" if start.racks > 1 else f"on {len(start.nodes)} nodes"
    if start.spread != "any":
        where = f"in one {start.spread}"
    elif not start.nodes:
        where = "anywhere"
    else:
        where = slowdown if len(start.nodes) > 1 else "in one server"
    when = f"from {_clock(start.median, now)}"
    if start.median is None:
        when = "too far ahead to predict"
    elif start.median <= now:
        when = "at once"
    cost = start.message.removeprefix(f"{where} ")
    return f"{where} {when}" + (f", {cost}" if cost else "") + f" ({start.how})"


def _expected_line(expected: ExpectedStart, now: float) -> str:
    where = f" on {common.compress_names(expected.nodes)}" if expected.nodes else ""
    if expected.never:
        return f"expected to start: {expected.never}"
    if expected.median is None:
        latest = f"{_clock(expected.by_limits, now)} at the latest, by time limits"
        return f"expected to start: too far ahead to predict; {latest}"
    if expected.median <= now:
        return f"expected to start at once{where}"
    low, high = _clock(expected.low, now), _clock(expected.high, now)
    between = f" (between {low} and {high})" if low != high else ""
    by_limits = _clock(expected.by_limits, now)
    latest = f"; {by_limits} at the latest, if every job uses its time limit" if expected.by_limits else ""
    return f"expected to start about {_clock(expected.median, now)}{between}{where}{latest}"


def _sooner_line(sooner: Sooner, now: float) -> str:
    when = "at once" if sooner.now else f"about {_clock(sooner.start, now)}"
    where = f" on {common.compress_names(sooner.nodes)}" if sooner.nodes else ""
    return f"sooner {sooner.what}: {when}{where}" + (f" ({sooner.how})" if sooner.how else "")


def _clock(time: float | None, now: float) -> str:
    """Return the local time, with the date if it is another day."""
    if time is None:
        return "later"
    moment, today = datetime.fromtimestamp(in_calendar(time)), datetime.fromtimestamp(now)
    return moment.strftime("%H:%M" if moment.date() == today.date() else "%Y-%m-%d %H:%M")


def why_screen(why: Why) -> Group:
    """Return the explanation for people."""
    from rich.console import Group
    from rich.text import Text

    job = why.job
    head = Text(f"{job.id} ", style="bold")
    head.append(f"({common.clean(job.spec.name)}) is ")
    head.append(job.state, style=common.state_style(job.state))
    reason = ": ".join(common.clean(t) for t in (why.reason, why.message) if t)
    parts: list[Text | Table] = [head]
    if job.slurm is not None:
        parts.append(Text(f"Slurm says:    {common.clean(slurm_line(job.slurm))}"))
        parts += [Text(f"gpusched says: {reason}")] if reason else []
    elif reason.startswith("completed normally"):
        head = Text.assemble((f"{job.id} ", "bold"), f"({common.clean(job.spec.name)}) {reason}")
        parts = [head]
    elif reason:
        head.append(f": {reason}")
    parts += [Text(f"requested: {resources_line(job)}, in {job.spec.partition}")]
    if job.exit_code is not None:
        parts.append(Text(f"exit code: {job.exit_code}"))
    if nodes := job_nodes(job):
        parts.append(Text(f"nodes: {common.compress_names(nodes)}"))
    if why.stopped:
        parts.append(Text(f"preempted: {common.clean(why.stopped)}"))
    if why.sizes is not None:
        parts.append(Text(f"sizes: {common.clean(why.sizes.message)}"))
    if why.position is not None:
        parts.append(Text(f"position in queue: {why.position} of {why.queue_length}"))
    parts += [Text(common.clean(line)) for line in expected_lines(why)]
    if why.expected is not None and why.expected.assumptions:
        parts.append(Text(f"assumed: {common.clean('; '.join(why.expected.assumptions))}", style="dim"))
    if why.nodes:
        parts += [Text(""), _node_table(why.nodes)]
    if why.next_steps:
        parts += [Text(""), *(Text(f"-> {common.clean(step)}", style="cyan") for step in why.next_steps)]
    if why.fallback:
        parts.append(Text(f"warning: {common.clean(why.fallback)}", style="bold red"))
    if why.warning:
        parts.append(Text(f"warning: {why.warning}", style="bold red"))
    return Group(*parts)


def slurm_line(facts: SlurmFacts) -> str:
    """Return Slurm's own words for a job: ``PENDING (Priority)``."""
    sent = f", sent to {common.compress_names(facts.pinned)}" if facts.pinned else ""
    return f"{facts.state}{f' ({facts.reason})' if facts.reason else ''}, priority {facts.priority}{sent}"


def _node_table(nodes: tuple[NodeVerdict, ...]) -> Table:
    from rich.text import Text

    table = common.plain_table("NODE", "FITS", "WHY", wrap=("WHY",))
    for line in nodes:
        fits = Text("yes", style="green") if line.fits else Text("no", style="red")
        table.add_row(Text(line.node), fits, Text(common.clean(line.text)))
    return table


def dry_run_dict(why: Why) -> dict[str, Any]:
    """Return ``submit --dry-run --json``: the request, and its forecast."""
    answer = why_dict(why)
    del answer["id"], answer["job"]
    return {"dry_run": True, "spec": msgspec.to_builtins(why.job.spec)} | answer


def dry_run_lines(why: Why) -> list[str]:
    """Return the lines of ``submit --dry-run``."""
    spec = why.job.spec
    flavor = f", flavor {spec.flavor}" if spec.flavor else ""
    return [
        f"would request: {resources_line(why.job)}, {format_duration(spec.time_limit_s)}, in {spec.partition}{flavor}",
        f"would wait: {why.reason}: {why.message}",
        *([f"sizes: {why.sizes.message}"] if why.sizes is not None else []),
        *expected_lines(why),
        *(f"  {n.node}: {n.text}" for n in why.nodes),
        *(f"-> {step}" for step in why.next_steps),
        "nothing was queued (--dry-run)",
    ]
