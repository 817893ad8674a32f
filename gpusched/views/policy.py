"""Screens and JSON of ``policy list``, ``show`` and ``history``, and of verdicts.

The rows are built in `client.policies`; their field names are those of the JSON. Times of rows are ISO 8601 in UTC.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from gpusched.model.policy import PolicySpec
from gpusched.model.slurm import SlurmMode
from gpusched.model.units import count_of, iso_utc, local_time
from gpusched.views import common

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from gpusched.nightly.proof import ProofVerdict
    from gpusched.queue.promotions import Shadow, ShadowDifference

PolicyState = Literal["live", "shadow", "candidate", "retired"]
STATE_STYLE = {"live": "green", "shadow": "cyan", "candidate": "yellow", "retired": "dim"}


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy in one partition.

    Attributes:
        partition: None: it is live in none, and could be in any.
        state: ``live``; ``shadow``: asked beside the live one; ``candidate``: could be promoted; ``retired``: was live.
        agent: Name of its agent; None: it decides by its stages (order, place, backfill).
        trained_at, trace, trace_sha256: From its training card: when, and on what.
        verdict: The evidence: the replay of its promotion, or of the last night.
        since, by: When it was put into this state, and the user.
        note: The reason of this state.
        fallback: Why its fallback decides, or why it had no answer as a shadow; or which of its components is broken.
        kept_anyway: Why the gate of its training was closed, if its weights were saved all the same.
        path: Where its file or its weights are.
        origin: The package that its order, placement, sizing rule and agent come from; the others' if there are any.
        mode: Of a live policy of a Slurm partition, what it may do there; UNSET otherwise, which JSON omits.
    """

    name: str
    partition: str | None
    state: PolicyState
    version: str
    agent: str | None
    trained_at: str | None = None
    trace: str | None = None
    trace_sha256: str | None = None
    verdict: str | None = None
    since: str | None = None
    by: str | None = None
    note: str | None = None
    fallback: str | None = None
    kept_anyway: str | None = None
    path: str | None = None
    origin: str = "gpusched"
    mode: SlurmMode | msgspec.UnsetType = msgspec.UNSET


class ChangeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a partition's live policy.

    Attributes:
        act: ``promote``, ``rollback``; ``inventory``, ``files``: one of these was edited.
        user: The user who did it; None: files were edited.
        from_name, from_version: The policy before; None: there was none.
        forced: Whether the evidence was overruled.
        verdict: The evidence, as a sentence.
        mode: Of a Slurm partition, what the policy may do from then on; UNSET otherwise.
    """

    time: str
    partition: str
    act: str
    user: str | None
    from_name: str | None
    from_version: str | None
    name: str
    version: str
    forced: bool
    reason: str
    verdict: str | None
    mode: SlurmMode | msgspec.UnsetType = msgspec.UNSET


class PolicyPage(msgspec.Struct, frozen=True, kw_only=True):
    """All details of one policy.

    Attributes:
        path: Its file. origin: Where that comes from, in words.
        live: Partitions where exactly this version is live. other_versions: where another version is.
        modes: Slurm partition where it is live -> what it may do there.
        weights: Partition -> what decides in its weights, in words, or why they cannot be used.
        cards: Partition -> training card, as in its file.
        shadows: Where it is or was a shadow; differences: the last ones.
        verdicts: Partition -> the last night's verdict on the shadow.
    """

    spec: PolicySpec
    path: str
    origin: str
    live: tuple[str, ...]
    other_versions: tuple[str, ...]
    weights: Mapping[str, str]
    cards: Mapping[str, dict[str, Any]]
    shadows: tuple[Shadow, ...]
    differences: tuple[ShadowDifference, ...]
    verdicts: Mapping[str, str | None]
    modes: Mapping[str, SlurmMode] = {}


def table(rows: Iterable[PolicyRow]) -> Table:
    """Return the ``policy list`` screen."""
    from rich.text import Text

    found = common.plain_table(
        "NAME", "PARTITION", "STATE", "VERSION", "AGENT", "FROM", "TRAINED", "NOTE", "VERDICT",
        wrap=("STATE", "NOTE", "VERDICT"), drop=("TRAINED", "AGENT", "VERDICT", "FROM", "VERSION"),
    )  # fmt: skip
    for row in rows:
        kept = f"kept anyway, {row.kept_anyway}" if row.kept_anyway else None
        note = "; ".join(common.clean(t) for t in (row.fallback, kept, row.note) if t)
        found.add_row(
            Text(row.name, style="bold" if row.state == "live" else ""),
            Text(row.partition or common.UNKNOWN),
            Text(f"{row.state}, {row.mode}" if row.mode else row.state, style=STATE_STYLE[row.state]),
            Text(row.version),
            Text(row.agent or common.UNKNOWN),
            Text(common.clean(row.origin)),
            Text((_local_time_of(row.trained_at) or common.UNKNOWN)[:10]),
            Text(note or common.UNKNOWN, style="bold red" if row.fallback else ""),
            Text(common.clean(row.verdict or common.UNKNOWN)),
        )
    return found


def change_table(rows: Sequence[ChangeRow]) -> Table | Text:
    """Return the ``policy history`` screen."""
    from rich.text import Text

    if not rows:
        return Text("no policy has been promoted yet")
    columns = ("TIME", "PARTITION", "ACT", "BY", "FROM", "TO", "WHY")
    found = common.plain_table(*columns, wrap=("FROM", "TO", "WHY"), drop=("FROM", "BY"))
    for row in rows:
        before = f"{row.from_name} {row.from_version}" if row.from_name else common.UNKNOWN
        forced = "forced: " if row.forced else ""
        cells = (
            _local_time_of(row.time), row.partition, row.act, row.user or common.UNKNOWN, before,
            f"{row.name} {row.version}" + (f", {row.mode}" if row.mode else ""), common.clean(forced + row.reason),
        )  # fmt: skip
        found.add_row(*map(Text, cells))
    return found


def verdict_table(verdicts: Iterable[ProofVerdict]) -> Table:
    """Return the verdicts as a table of two rows each: the incumbent, and the candidate with its change in mean JCT."""
    from rich.text import Text

    found = common.plain_table(
        "PARTITION", "JOBS", "DAYS", "POLICY", "MEAN JCT", "CHANGE", "95 % INTERVAL", right=("JOBS", "DAYS"),
        wrap=("POLICY", "95 % INTERVAL"), drop=("DAYS", "JOBS"),
    )  # fmt: skip
    for v in verdicts:
        incumbent, candidate = f"{v.incumbent} {v.incumbent_version}", f"{v.candidate} {v.candidate_version}"
        cells = (v.partition, str(v.jobs), str(v.days), incumbent, _duration(v.incumbent_mean_jct_s), "", "")
        found.add_row(*map(Text, cells))
        # A gain is a shorter JCT, so the change has the other sign, and its bounds change places.
        interval = common.UNKNOWN if v.low is None or v.high is None else f"{-v.high:+.1%} to {-v.low:+.1%}"
        change = common.UNKNOWN if v.gain is None else f"{-v.gain:+.1%}"
        found.add_row(*map(Text, ("", "", "", candidate, _duration(v.candidate_mean_jct_s), change, interval)))
    return found


def _duration(seconds: float | None) -> str:
    """Return minutes, from ten hours on hours."""
    if seconds is None:
        return common.UNKNOWN
    return f"{seconds / 60:.1f} min" if seconds < 10 * 3600 else f"{seconds / 3600:.1f} h"


def page_dict(page: PolicyPage) -> dict[str, Any]:
    """Return ``policy show --json``."""
    spec = page.spec
    return {
        **common.fields_of(spec, "name", "version", "description", "agent", "order", "place", "backfill", "sizes"),
        **common.fields_of(page, "origin", "path"),
        "fallback": spec.fallback.name if spec.fallback else None,
        "budget_s": spec.budget_s if spec.agent else None,
        "schedulers": spec.schedulers if spec.traits.places else None,
        "live": list(page.live),
        **({"modes": dict(page.modes)} if page.modes else {}),
        "weights": dict(page.weights),
        "cards": dict(page.cards),
        "shadows": [_shadow_dict(s, page.verdicts.get(s.partition)) for s in page.shadows],
        "differences": [
            {"partition": d.partition, "time": iso_utc(d.time), "live": d.live, "shadow": d.shadow}
            for d in page.differences
        ],
    }


def _shadow_dict(shadow: Shadow, verdict: str | None) -> dict[str, Any]:
    return {
        **common.fields_of(shadow, "partition", "by", "decisions", "same", "late", "unusable"),
        **common.fields_of(shadow, "live_starts", "shadow_starts"),
        "version": shadow.spec.version,
        "since": iso_utc(shadow.since),
        "until": iso_utc(shadow.until),
        "trouble": shadow.trouble or None,
        "verdict": verdict,
    }


def page_screen(page: PolicyPage) -> Group:
    """Return the ``policy show`` screen."""
    from rich.console import Group
    from rich.text import Text

    spec = page.spec
    parts: list[Text | Table] = [Text(f"{spec.name} {spec.version}", style="bold")]
    parts += [Text(common.clean(spec.description))] if spec.description else []
    parts += [Text(f"decides by: {_decides_by(spec)}")]
    parts += [Text(f"  in {partition}: {common.clean(words)}") for partition, words in page.weights.items()]
    if spec.agent is not None and not page.weights:
        parts.append(Text("  untrained: no weights, so its fallback decides"))
    parts.append(Text(f"from: {page.origin}, {page.path}"))
    live = [f"{name} ({page.modes[name]})" if name in page.modes else name for name in page.live]
    parts.append(Text(f"live in: {', '.join(live) or 'no partition'}"))
    if page.other_versions:
        parts.append(Text(f"another version is live in: {', '.join(page.other_versions)}"))
    for partition, card in page.cards.items():
        parts += [Text(""), Text(f"training card of {partition}", style="bold"), *_card_lines(card)]
    for shadow in page.shadows:
        parts += [Text(""), *_shadow_lines(shadow, page.verdicts.get(shadow.partition))]
    if page.differences:
        parts += [Text(""), _difference_table(page.differences)]
    return Group(*parts)


def _decides_by(spec: PolicySpec) -> str:
    """Return the stages by which a policy decides, and what its agent decides instead of them."""
    ties = f" (of equals the {spec.ties} first)" if spec.ties != "first" else ""
    stages = f"order {spec.order}{ties}, place {spec.place}, backfill {spec.backfill}"
    stages += f", sizes {spec.sizes}" if spec.sizes != "base" else ""
    if spec.agent is None:
        return stages
    left = ""  # the stages that an agent leaves: all, if it chooses sizes; all but the places, if it chooses nodes
    if spec.traits.sizes:
        left = f"{stages}, chosen by "
    if spec.traits.places:
        schedulers = f" of {spec.schedulers} schedulers" if spec.schedulers > 1 else ""
        left = f"order {spec.order}, backfill {spec.backfill}, nodes{schedulers} chosen by "
    return f"{left}agent {spec.agent}, within {spec.budget_s:g} s, else {spec.effective_fallback.name}"


def _card_lines(card: Mapping[str, Any]) -> list[Text]:
    from rich.text import Text

    trace = card.get("trace") or {}
    last = _local_time_of(trace.get("last")) or "an unknown date"
    whose = ", public traces, not this cluster's jobs" if trace.get("public") else ""
    facts = {
        "trained": f"{_local_time_of(card.get('trained_at'))} on {card.get('device')}, {card.get('wall_time_s')} s",
        "on": f"{trace.get('name')}: {trace.get('jobs')} jobs until {last}{whose}",
        "trace sha256": trace.get("sha256"),
        "code": card.get("code_version"),
        "seeds": f"{card.get('seeds')}, best {card.get('seed')}",
        "knows": card.get("knows"),
    }
    gate = card.get("gate")
    if isinstance(gate, Mapping):  # older cards have none
        line = gate_words(str(gate.get("outcome")), str(gate.get("line")), gate.get("kept_anyway") is True)
        facts["gate"] = line
    lines = [Text(f"{key}: {common.clean(str(value))}") for key, value in facts.items()]
    lines += [Text(f"  {common.clean(_metric(row))}") for row in card.get("metrics") or ()]
    return lines + [Text(common.clean(str(note))) for note in card.get("notes") or ()]


def gate_words(outcome: str, line: str, kept_anyway: bool) -> str:
    """Return the verdict of the gate of ``gpusched train`` in one line."""
    return f"{outcome}{', kept anyway' if kept_anyway else ''}: {line}"


def _local_time_of(text: object) -> str:
    """Return an ISO 8601 time as local time; a text that is none, as a card may have, unchanged; "" for None."""
    try:
        return local_time(datetime.fromisoformat(str(text)).timestamp())
    except ValueError:
        return "" if text is None else str(text)


def _metric(row: Mapping[str, Any]) -> str:
    """Return one row of a training card's evaluation; cards are files, so any field may be missing."""
    value = row.get("value")
    figure = f"{value:.4g}" if isinstance(value, (int, float)) else common.UNKNOWN
    low, high = row.get("low"), row.get("high")
    interval = f" ({low:.4g} to {high:.4g})" if low is not None and high is not None else ""
    return f"{row.get('policy')}: {row.get('figure')} {figure}{interval}"


def _shadow_lines(shadow: Shadow, verdict: str | None) -> list[Text]:
    from rich.text import Text

    # Not counted as decisions: those that came too late, and those that could not be used.
    total = shadow.decisions + shadow.late + shadow.unusable
    ended = f" until {local_time(shadow.until)}" if shadow.until is not None else ""
    head = f"shadow in {shadow.partition} since {local_time(shadow.since)}{ended}, by {shadow.by}"
    counts = (
        f"{count_of(total, 'decision')}: {shadow.same} as the live policy, {shadow.decisions - shadow.same} different, "
        f"{shadow.late} late, {shadow.unusable} unusable; "
        f"it would have started {count_of(shadow.shadow_starts, 'job')}, "
        f"the live policy started {shadow.live_starts}"
    )
    lines = [Text(head, style="bold"), Text(counts)]
    if shadow.trouble:
        lines.append(Text(f"warning: {common.clean(shadow.trouble)}", style="bold red"))
    return [*lines, Text(f"verdict: {common.clean(verdict or 'none yet; run gpusched replay --nightly')}")]


def _difference_table(differences: Iterable[ShadowDifference]) -> Table:
    from rich.text import Text

    found = common.plain_table(
        "TIME", "PARTITION", "LIVE STARTED", "SHADOW WOULD START", wrap=("LIVE STARTED", "SHADOW WOULD START")
    )
    for d in differences:
        found.add_row(Text(local_time(d.time)), Text(d.partition), Text(_starts(d.live)), Text(_starts(d.shadow)))
    return found


def _starts(starts: Mapping[str, tuple[str, ...]]) -> str:
    words = [f"{job} on {common.compress_names(nodes)}" if nodes else f"{job} stopped" for job, nodes in starts.items()]
    return ", ".join(words) or "nothing"
