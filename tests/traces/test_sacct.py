"""Slurm's accounting as a trace: every field where it belongs, what is left out, and what cannot be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpusched.errors import GpuschedError, NoHistory, UsageError
from gpusched.traces.load import load
from gpusched.traces.own import between
from gpusched.traces.readers.guess import detect_format
from gpusched.traces.readers.history import EARLIER_S
from gpusched.traces.trace import Trace
from tests.traces import samples

Put = Callable[[str, str], Path]
HEAD, *ROWS = samples.SACCT.splitlines()
T0 = 1795405827.0  # 2026-11-23T03:50:27 UTC
YEAR = 365 * 86400.0


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def put(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    put("UTC")
    yield put
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(autouse=True)
def utc(zone: Callable[[str], None]) -> None:
    """Times without a zone are of this machine's."""


def row(**changes: str) -> str:
    """The first row with other fields."""
    return "|".join((dict(zip(HEAD.split("|"), ROWS[0].split("|"), strict=True)) | changes).values())


def text(*rows: str, head: str = HEAD) -> str:
    return "\n".join((head, *rows)) + "\n"


def by_id(trace: Trace, column: str) -> dict[str, float]:
    return dict(zip(trace.ids, getattr(trace, column).tolist(), strict=True))


def test_every_field(put: Put) -> None:
    path = put("f", samples.SACCT)
    assert detect_format(path) == "sacct"
    trace = load(path, strict=True)
    assert trace.ids == ("1", "2", "6_0", "7", "8", "12", "4", "3", "6_2", "8~2")
    assert trace.epoch == T0
    assert by_id(trace, "submit") == {
        "1": 0, "2": 0, "12": 1, "6_0": 1, "7": 1, "8": 1, "4": 3, "3": 5, "6_2": 6, "8~2": 124,
    }, "from when they were eligible: after a hold, a dependency, a limit of the array, a requeue's pause"  # fmt: skip
    assert by_id(trace, "wait") == {
        "1": 1, "2": 1, "12": 0, "6_0": 0, "7": 7, "8": 0, "4": 3, "3": 0, "6_2": 0, "8~2": 0,
    }  # fmt: skip
    assert by_id(trace, "duration") == {
        "1": 6, "2": 4, "12": 9, "6_0": 2, "7": 2, "8": 2, "4": 2, "3": 1, "6_2": 2, "8~2": 8,
    }  # fmt: skip
    limits = by_id(trace, "limit")
    assert np.isnan(limits.pop("8")), "the partition's, which the row does not say"
    assert limits == {
        "1": 300, "2": 3600, "12": 603, "6_0": 120, "7": 60, "4": YEAR, "3": YEAR, "6_2": 120, "8~2": YEAR,
    }, "without a limit a year, as in Slurm's backfill; longer by the time that it was suspended"  # fmt: skip
    assert by_id(trace, "gpus") == {
        "1": 2, "2": 4, "12": 1, "6_0": 8, "7": 16, "8": 3, "4": 1, "3": 1, "6_2": 8, "8~2": 3,
    }  # fmt: skip
    assert (by_id(trace, "nodes")["7"], by_id(trace, "cores")["7"]) == (2, 2)
    assert set(trace.memory_mib.tolist()) == {-1}, "ReqTRES has a whole node's where memory is not counted"
    assert trace.gpu_types == ("a100",)
    assert {i: trace.gpu_types[t] for i, t in by_id(trace, "gpu_type").items() if t >= 0} == {"2": "a100"}, "as asked"
    assert trace.groups == ("A100", "V100")
    assert trace.ids[trace.depends_on[9]] == "8", "a run that was requeued comes before the next"
    assert [(line, why.partition(":")[0]) for line, why in trace.rejected] == [(9, "End"), (10, "State")]
    assert set(trace.notes) == {
        "4 jobs eligible only after submission, counted as submitted then",
        "3 jobs without a time limit: a year, as Slurm assumes",
        "1 job without a time limit in the file",
        "1 job suspended: GPUs were kept, and the limit is longer by that time",
        "1 job run again after a requeue, or under an id that was used before",
        "6 rows not in submission order, now sorted",
    }


def test_jobs_of_one_second_are_in_the_order_of_their_numbers(put: Put) -> None:
    """Also beside tasks and runs again, whose ids are no numbers."""
    again = {"Start": "2026-11-23T15:24:20", "End": "2026-11-23T15:24:30"}
    same = dict.fromkeys(("Submit", "Eligible", "Start"), "2026-11-23T15:24:00") | {"End": "2026-11-23T15:24:10"}
    ids = ["100", "36", "36_10", "36_2", "9"]
    trace = load(put("f", text(*(row(JobID=job, **same) for job in ids), row(JobID="9", **same | again))))
    assert trace.ids == ("9", "9~2", "36", "36_2", "36_10", "100")


def test_a_run_after_the_first_row_s_is_one_again(put: Put) -> None:
    times = dict.fromkeys(("Submit", "Eligible", "Start"), "2026-11-23T15:24:00")
    later = {"Start": "2026-11-23T15:24:20", "End": "2026-11-23T15:24:30"}
    first, second = row(JobID="9", **times, End="2026-11-23T15:24:10"), row(JobID="9", **times | later)
    trace = load(put("f", text(first, second)))
    assert "1 job run again after a requeue, or under an id that was used before" in trace.notes


@pytest.mark.parametrize("separator", ["|", "\x1f", "\t"])
def test_columns_in_any_order_with_any_separator(put: Put, separator: str) -> None:
    """Only what is needed, as ``sacct -p`` ends lines; a name that holds another separator is no trouble."""
    names = ["State", "End", "ReqTRES", "JobName", "Start", "Submit", "JobIDRaw", ""]
    other = "|" if separator != "|" else "\t"
    fields = [
        "CANCELLED by 1000",
        "1795405837",
        "gres/gpu=3,node=1",
        f"my{other}job",
        "1795405830",
        "1795405827",
        "77",
        "",
    ]
    trace = load(put("f", "\n".join(separator.join(line) for line in (names, fields))), "sacct", strict=True)
    assert (trace.ids, trace.gpus.tolist(), trace.duration.tolist()) == (("77",), [3], [7.0])
    assert (trace.wait.tolist(), trace.statuses, trace.models) == ([3.0], ("CANCELLED",), (f"my{other}job",))
    assert np.isnan(trace.limit[0])
    assert trace.users == trace.groups == ()


def test_times_are_of_this_machines_zone(put: Put, zone: Callable[[str], None]) -> None:
    """An hour later in winter than in summer; what is in Unix time is no zone's."""
    summer = row(**dict.fromkeys(("Submit", "Eligible", "Start"), "2026-07-01T12:00:00"), End="2026-07-01T12:00:10")
    winter = row(
        JobID="2", **dict.fromkeys(("Submit", "Eligible", "Start"), "2026-12-01T12:00:00"), End="2026-12-01T12:00:10"
    )
    spans, path = [], put("f", text(summer, winter))
    for name in ("UTC", "Europe/Berlin"):
        zone(name)
        trace = load(path)
        assert trace.epoch == 1782907200.0 - (7200 if name == "Europe/Berlin" else 0)
        spans.append(trace.submit[1])
    assert spans == [153 * 86400, 153 * 86400 + 3600]
    again = row(Submit="2026-10-25T02:58:00", Eligible="2026-10-25T02:58:00", Start="2026-10-25T02:01:00",
                End="2026-10-25T03:00:00")  # fmt: skip
    trace = load(put("f", text(again)), strict=True)  # submitted in the first of two such hours, begun in the second
    assert (trace.wait.tolist(), trace.duration.tolist()) == ([180.0], [3540.0])
    unix = row(Submit="1782907200", Eligible="1782907200", Start="1782907201", End="1782907210")
    assert load(put("f", text(unix))).epoch == 1782907200.0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"Start": "2026-11-23T03:50:26"}, "Start: found 2026-11-23T03:50:26, expected a time not before Submit"),
        ({"End": "2026-11-23T03:50:27"}, "End: found 2026-11-23T03:50:27, expected a time not before Start"),
        ({"Start": "soon"}, "Start: found soon, expected a time such as 2026-11-20T18:00:00, or seconds since 1970"),
        ({"Submit": "Unknown"}, "Submit: found Unknown, expected a time"),
        ({"State": ""}, "State: found nothing, expected a state such as COMPLETED"),
        ({"JobID": ""}, "JobID: found nothing, expected a job id"),
        ({"TimelimitRaw": "short"}, "TimelimitRaw: found short, expected minutes, a time such as 1-00:00:00"),
        ({"Suspended": "x"}, "Suspended: found x, expected a time such as 00:10:00"),
        ({"AllocTRES": "gres/gpu=two"}, "AllocTRES: found gres/gpu=two, expected gres/gpu as a number"),
        ({"AllocTRES": "gres/gpu"}, "AllocTRES: found gres/gpu, expected resources such as cpu=8"),
        ({"AllocTRES": "gres/gpu=1,mem=lots"}, "AllocTRES: found gres/gpu=1,mem=lots, expected mem as a number"),
        ({"NNodes": "1.5"}, "NNodes: found 1.5, expected a whole number"),
        ({"User": "a|b"}, "found 17 fields, expected 16 fields"),
        ({"JobID": "4"}, "JobID: found 4, expected each run of a job once"),
    ],
)
def test_bad_rows(put: Put, changes: dict[str, str], why: str) -> None:
    path = put("f", text(row(JobID="4"), row(**changes), row(JobID="5")))
    trace = load(path)
    assert trace.ids == ("4", "5")
    ((line, found),) = trace.rejected
    assert (line, found[: len(why)]) == (3, why)
    with pytest.raises(UsageError) as error:
        load(path, strict=True)
    assert error.value.line().startswith(f"{path}:3: {why}")


@pytest.mark.parametrize(
    "changes",
    [
        {"State": "PENDING", "Start": "Unknown", "End": "Unknown"},
        {"State": "CANCELLED by 1000", "Start": "None"},
        {"State": "SUSPENDED", "End": "Unknown"},
        {"JobID": "1.batch"},
        {"End": "2026-11-23T03:50:28"},
    ],
)
def test_jobs_that_never_ran_or_have_not_ended_are_no_error(put: Put, changes: dict[str, str]) -> None:
    path = put("f", text(row(JobID="4"), row(**changes)))
    assert load(path, strict=True).ids == ("4",)
    with pytest.raises(GpuschedError, match=r"no job in it can be replayed \(1 row rejected; line 2"):
        load(put("f", text(row(**changes))))


def test_gpus_by_their_types_and_limits_as_text(put: Put) -> None:
    tres = {
        "AllocTRES": "cpu=8,gres/gpu:a100=2,gres/gpu:v100=1,mem=7.50G",
        "ReqTRES": "gres/gpu:a100=2,gres/gpu:v100=1",
    }
    head = HEAD.replace("TimelimitRaw", "Timelimit").replace("AllocCPUS", "x")
    trace = load(put("f", text(row(TimelimitRaw="1-02:03:04", **tres), head=head)), strict=True)
    assert (trace.gpus.tolist(), trace.cores.tolist(), trace.memory_mib.tolist()) == ([3], [8], [7680])
    assert trace.gpu_type.tolist() == [-1], "no single type"
    assert trace.limit.tolist() == [86400 + 2 * 3600 + 3 * 60 + 4]


@pytest.mark.parametrize(
    ("said", "mib"),
    [
        ("512", 512), ("1.5", 2), ("2048K", 2), ("7.50G", 7680), ("300M", 300), ("2T", 2 << 20), ("1P", 1 << 30),
        ("0.25P", 1 << 28), ("1K", -1), ("0", -1), ("0G", -1), ("931322P", 931322 << 30),
    ],
)  # fmt: skip
def test_memory_is_in_mebibytes_whatever_its_unit(put: Put, said: str, mib: int) -> None:
    """Less than half of one is unknown, as is none."""
    trace = load(put("f", text(row(AllocTRES=f"gres/gpu=1,mem={said}"))), strict=True)
    assert trace.memory_mib.tolist() == [mib]


@pytest.mark.parametrize("said", ["1E", "1KB", "-1", "1.", "1.5.1G", "931323P", "M", " 1G"])
def test_memory_in_other_words_or_of_no_machine_is_refused(put: Put, said: str) -> None:
    with pytest.raises(UsageError, match="expected mem as a number"):
        load(put("f", text(row(AllocTRES=f"gres/gpu=1,mem={said}"))), strict=True)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("05:06", 306), ("04:05:06", 14706), ("3-04:05:06", 273906), ("3-00:00:00", 259200), ("00:10", 10),
        ("01:00.5", 60.5), ("UNLIMITED", YEAR), ("Unlimited", YEAR), ("90", 5400), ("1", 60),
        ("", np.nan), ("Partition_Limit", np.nan), ("0", np.nan), ("00:00", np.nan),
    ],
)  # fmt: skip
def test_limits_are_minutes_or_a_clocks_time(put: Put, said: str, seconds: float) -> None:
    head = HEAD.replace("TimelimitRaw", "Timelimit").replace("Suspended", "x")
    trace = load(put("f", text(row(TimelimitRaw=said), head=head)), strict=True)
    np.testing.assert_array_equal(trace.limit, [seconds])


@pytest.mark.parametrize(
    ("given", "asked", "gpus"),
    [
        ("gres/gpu=3,gres/gpu:a=1,gres/gpu:b=2", "gres/gpu=8", 3),
        ("gres/gpu:a=1,gres/gpu:b=2", "gres/gpu=8", 3),
        ("cpu=4", "gres/gpu=8", 8),
        ("gres/gpu=0", "gres/gpu=8", 0),
        ("cpu=4", "cpu=4", 0),
    ],
)
def test_gpus_are_those_allocated_else_those_requested(put: Put, given: str, asked: str, gpus: int) -> None:
    path = put("f", text(row(AllocTRES=given, ReqTRES=asked), row(JobID="77")))
    assert by_id(load(path, strict=True), "gpus")["1"] == gpus


def test_cores_and_memory_that_no_column_has_are_unknown(put: Put) -> None:
    head, tres = HEAD.replace("AllocCPUS", "x").replace("NNodes", "y"), {"ReqTRES": "gres/gpu=1,mem=9G"}
    rows = [row(AllocTRES="gres/gpu=1", **tres), row(JobID="2", AllocTRES="gres/gpu=1,cpu=4,node=3", **tres)]
    trace = load(put("f", text(*rows, head=head)), strict=True)
    assert (by_id(trace, "cores"), by_id(trace, "nodes")) == ({"1": -1, "2": 4}, {"1": 0, "2": 3})
    assert trace.memory_mib.tolist() == [-1, -1], "what was requested is all that a node has where it is not counted"


def test_a_site_that_does_not_count_gpus(put: Put) -> None:
    path = put("f", text(row(AllocTRES="cpu=1,node=1", ReqTRES="cpu=1,node=1")))
    with pytest.raises(GpuschedError) as error:
        load(path)
    assert error.value.line() == (
        f"{path}: no row has gres/gpu in AllocTRES or ReqTRES; add gres/gpu to AccountingStorageTRES in slurm.conf: "
        "jobs from then on have their GPUs"
    )


def test_a_column_that_is_missing(put: Put) -> None:
    path = put("f", "JobID|Submit|Start|State\n1|2|3|COMPLETED\n")
    with pytest.raises(UsageError, match=r"f:1: found no column End, AllocTRES or ReqTRES, expected what sacct -X -P"):
        load(path)


# The own history under Slurm


def ended(job: str, eligible: float, start: float, end: float | None, limit: int = 10, **more: str) -> str:
    times = {"Submit": eligible, "Eligible": eligible, "Start": start, "End": end}
    stamps = {key: "Unknown" if at is None else str(int(T0 + at)) for key, at in times.items()}
    return row(
        JobID=job, TimelimitRaw=str(limit), State="COMPLETED" if end is not None else "RUNNING", **stamps, **more
    )


LINES = text(
    ended("1", -50, -40, -10),  # over
    ended("2", -50, -20, 30),  # runs
    ended("3", -40, -30, None),  # runs, and still does
    ended("4", -30, 10, 20),  # waits
    ended("5", -20, 40, None),  # waits, and runs at the end
    ended("6", 0, 1, 2),
    ended("7", 50, 60, 70),
    ended("8", 55, 60, None),
    ended("9", 100, 101, 102),  # later
    ended("10", 5, 6, 7, Partition="cpu"),
).splitlines()


def test_the_own_history_is_of_the_inventorys_partitions_and_of_that_time() -> None:
    trace, carried = between(LINES, "own", T0, T0 + 100, ["A100"])
    assert (trace.ids, carried, trace.epoch, trace.rejected) == (("6", "7"), 0, T0, ())
    assert trace.submit.tolist() == [0, 50]
    assert trace.wait.tolist() == [1, 10]


def test_a_window_begins_with_what_ran_and_waited() -> None:
    trace, carried = between(LINES, "own", T0, T0 + 100, ["A100"], carry=True)
    assert (trace.ids, carried, trace.epoch) == (("3", "2", "4", "5", "6", "7"), 4, T0 - EARLIER_S), "as they began"
    arrivals = [0, 0, *[EARLIER_S] * 3, 50 + EARLIER_S]
    assert trace.arrivals.tolist() == pytest.approx(arrivals, abs=1e-6), "what ran has its GPUs first"
    assert (trace.submit - EARLIER_S).tolist() == pytest.approx([-40, -50, -30, -20, 0, 50], abs=1e-6)
    assert (np.diff(trace.arrivals) >= 0).all()
    assert trace.duration.tolist() == [100, 30, 10, 60, 1, 10], "what was left; what runs ends with the window"
    assert trace.limit.tolist() == [570, 580, 600, 600, 600, 600]
    assert trace.wait.tolist() == [10, 30, 40, 60, 1, 10]


@pytest.mark.parametrize("carry", [True, False])
def test_a_night_without_jobs(carry: bool) -> None:
    with pytest.raises(NoHistory):
        between(LINES, "own", T0 + 3, T0 + 40, ["A100"], carry=carry)
