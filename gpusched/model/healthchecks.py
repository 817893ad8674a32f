"""The site's own checks of its nodes: what is declared, what one run of a check is, and what is known of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

CheckAction = Literal["warn", "no-new-jobs", "drain"]
CheckKind = Literal["check-failed", "check-hung", "check-slow"]

DRAINED_BY = "health check"
"""`NodeRecord.drained_by` of a node that a check drained; it stays so until it is resumed."""
RECHECK_S = 600
"""Interval of a check without ``every`` that holds a node: no job can start there to run it again."""
COMPARED_VALUES = 20
MIN_COMPARED_VALUES = 5
SLOW_BELOW = 0.8
"""A value is slow below this part of the median of the node's last `COMPARED_VALUES` values of the same check."""
KEPT_VALUES = 200


class HealthCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A check that the inventory declares for a node.

    Attributes:
        command: For ``sh -c``, run as the account that gpusched logs in with.
        every_s: Interval by the controller's clock; None: before jobs only.
        timeout_s: It is killed after that time, and counts as hung.
        before_job: It must pass on all nodes of a job before the job's ranks start.
        then: What a failed or hung check does to its node.
    """

    name: str
    command: str
    every_s: int | None = None
    timeout_s: int = 60
    before_job: bool = False
    then: CheckAction = "no-new-jobs"


class CheckRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a check on one node.

    Attributes:
        id: Of this run on this node; to ask for the same id again starts nothing, and returns its result.
        env: Variables of the command.
        rank: (job id, attempt, rank) that waits for it; None: it runs by its interval.
        adopt: Only ask for the result: the job that it was started for has ended.
    """

    id: str
    node: str
    check: HealthCheck
    env: dict[str, str] = {}
    rank: tuple[str, int, int] | None = None
    adopt: bool = False


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """A node's answer.

    Attributes:
        exit_code: None: it was killed, or (``lost``) the node has no trace of it any more, as after a reboot.
        line: The last line of its output that says something; of one that passed, before its value.
        value, unit: Of its last line ``value=NUMBER UNIT``; None: it printed none.
    """

    exit_code: int | None = None
    lost: bool = False
    line: str = ""
    value: float | None = None
    unit: str = ""


class CheckRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the store knows of one check on one node.

    Attributes:
        run: Id of the run that has no result yet; "": none.
        rank: (job id, attempt, rank) that waits for that run.
        began: Start of the last run; None: it has never run, or must run again now.
        ended: End of the last run with a result.
        state: Of that result; "": there was none yet.
        since: Since when it has been in this state. All times are Unix seconds.
        exit_code, line, value, unit: As in `CheckResult`.
        values: Latest measured values, oldest first.
        slow_since: Since when values have been below `SLOW_BELOW` of ``median``; None: the last one is not.
        lost: The node had no trace of the last run.
    """

    node: str
    check: str
    run: str = ""
    rank: tuple[str, int, int] | None = None
    began: float | None = None
    ended: float | None = None
    state: Literal["", "ok", "failed", "hung"] = ""
    since: float | None = None
    exit_code: int | None = None
    line: str = ""
    value: float | None = None
    unit: str = ""
    values: tuple[float, ...] = ()
    median: float | None = None
    slow_since: float | None = None
    lost: bool = False

    @property
    def is_bad(self) -> bool:
        """Return whether its last run failed or hung."""
        return self.state in ("failed", "hung")


class CheckCondition(msgspec.Struct, frozen=True, kw_only=True):
    """An open condition of a node that a check found; ``gpu`` is None, since a check is of a whole node.

    Attributes:
        since, last_seen: Unix seconds.
        detail: One line.
        then: What it does to the node.
    """

    kind: CheckKind
    node: str
    gpu: int | None = None
    since: float
    last_seen: float
    detail: str
    check: str
    then: CheckAction


def with_result(record: CheckRecord, check: HealthCheck, result: CheckResult, now: float) -> CheckRecord:
    """Return the record after a run's result. One lost run, as by a reboot, says nothing; the next one is a failure."""
    if result.lost and not record.lost:
        return msgspec.structs.replace(record, run="", rank=None, began=None, lost=True)
    if result.lost:
        result = CheckResult(exit_code=1, line="the node has no trace of two runs in a row")
    state: Literal["ok", "failed", "hung"] = (
        "hung" if result.exit_code is None else "ok" if result.exit_code == 0 else "failed"
    )
    line = result.line or (f"still running after {check.timeout_s} s" if state == "hung" else "")
    record = msgspec.structs.replace(
        record, run="", rank=None, ended=now, exit_code=result.exit_code, line=line, state=state,
        since=record.since if record.state == state else now, value=result.value, unit=result.unit, lost=False,
    )  # fmt: skip
    return _with_value(record, result.value, now) if state == "ok" and result.value is not None else record


def _with_value(record: CheckRecord, value: float, now: float) -> CheckRecord:
    """Compare a value with those before it, then add it to them."""
    from statistics import median as median_of  # commands start faster without it

    before = record.values[-COMPARED_VALUES:]
    median = median_of(before) if len(before) >= MIN_COMPARED_VALUES else None
    is_slow = median is not None and value < SLOW_BELOW * median
    since = (record.slow_since or now) if is_slow else None
    values = (*record.values, value)[-KEPT_VALUES:]
    return msgspec.structs.replace(record, values=values, median=median, slow_since=since)


def open_conditions(
    records: Iterable[CheckRecord], declared: Iterable[tuple[str, HealthCheck]]
) -> list[CheckCondition]:
    """Return the open conditions that checks found, of checks that are still declared: (node, check)."""
    checks = {(node, check.name): check for node, check in declared}
    found = []
    for record in records:
        check = checks.get((record.node, record.check))
        if check is None:
            continue
        if record.is_bad:
            found.append(
                CheckCondition(
                    kind="check-hung" if record.state == "hung" else "check-failed",
                    node=record.node, since=record.since or 0.0, last_seen=record.ended or 0.0, detail=_detail(record),
                    check=check.name, then=check.then,
                )
            )  # fmt: skip
        if record.slow_since is not None and record.values:
            unit = f" {record.unit}" if record.unit else ""
            detail = f"check {check.name}: {record.values[-1]:.6g}{unit}, its median is {record.median:.6g}{unit}"
            found.append(
                CheckCondition(
                    kind="check-slow", node=record.node, since=record.slow_since, last_seen=record.ended or 0.0,
                    detail=detail, check=check.name, then="warn",
                )
            )  # fmt: skip
    return found


def _detail(record: CheckRecord) -> str:
    what = f"check {record.check}"
    if record.state == "hung":
        return f"{what} hangs: {record.line}"
    code = f"exit code {record.exit_code}"
    return f"{what} failed: {record.line} ({code})" if record.line else f"{what} failed: {code}"


def holding_reasons(conditions: Iterable[CheckCondition]) -> dict[str, str]:
    """Return node -> why it takes no new jobs, while a condition holds it; one that was drained has to be resumed."""
    held: dict[str, list[str]] = {}
    for condition in conditions:
        if condition.then == "no-new-jobs":
            held.setdefault(condition.node, []).append(condition.detail)
    return {
        node: details[0] if len(details) == 1 else f"{details[0]}; {len(details) - 1} more"
        for node, details in held.items()
    }
