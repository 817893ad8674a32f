"""Bad rows: counted, named by line, kept out, never guessed; strict stops at the first."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.errors import GpuschedError, UsageError
from gpusched.traces import file as tracefile
from gpusched.traces.load import load
from gpusched.traces.readers import cache
from gpusched.traces.readers.columns import _rows, read_csv
from gpusched.traces.readers.draft import sorted_order, to_numbers, to_times
from gpusched.traces.trace import Trace
from tests.traces import samples

Put = Callable[[str, str], Path]
GOOD = "2017-09-04 10:30:41,60,1,a"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("2017-09-04 10:30:41,-5,1,a", "duration_s: found -5, expected a run time of more than 0 s"),
        ("2017-09-04 10:30:41,0,1,a", "duration_s: found 0, expected a run time of more than 0 s"),
        ("2017-09-04 10:30:41,,1,a", "duration_s: found nothing, expected a run time of more than 0 s"),
        ("2017-09-04 10:30:41,nan,1,a", "duration_s: found nan, expected a run time of more than 0 s"),
        ("2017-09-04 10:30:41,inf,1,a", "duration_s: found inf, expected a run time of more than 0 s"),
        ("2017-09-04 10:30:41,60,0,a", "num_gpus: found 0, expected a whole number of GPUs, at least 1"),
        ("2017-09-04 10:30:41,60,1.5,a", "num_gpus: found 1.5, expected a whole number of GPUs, at least 1"),
        ("2017-09-04 10:30:41,60,1e30,a", "num_gpus: found 1e30, expected a whole number of GPUs, at least 1"),
        ("2017-09-04 10:30:41,60,1,", "vc: found nothing, expected a name"),
        ("2017-13-04 10:30:41,60,1,a", "submit_time: found 2017-13-04 10:30:41, expected a time such as"),
        ("yesterday,60,1,a", "submit_time: found yesterday, expected a time such as"),
        ("2017-09-04,60,1,a", "submit_time: found 2017-09-04, expected a time such as"),
        ("2017-09-04 10:30:41,60,1", "found 3 fields, expected 4 fields"),
        ("2017-09-04 10:30:41,60,1,a,b", "found 5 fields, expected 4 fields"),
    ],
)
def test_bad_row(put: Put, row: str, why: str) -> None:
    path = put("p.csv", "\n".join(["submit_time,duration_s,num_gpus,vc", GOOD, row, "", GOOD]) + "\n")
    trace = load(path)
    assert trace.ids == (("1", "2") if "fields" in why else ("1", "3"))
    ((line, found),) = trace.rejected
    assert line == 3
    assert found.startswith(why)
    with pytest.raises(UsageError) as error:
        load(path, strict=True)
    assert error.value.line().startswith(f"{path}:3: {why}")


@pytest.mark.parametrize("row", ["two,worker,2.0,Failed,1110.0,1300.0,400.0,10.0,1e308,V100",
                                 "two,worker,1e15,Failed,1110.0,1300.0,400.0,10.0,200.0,V100"])  # fmt: skip
def test_amounts_that_no_machine_has(put: Put, row: str) -> None:
    folder = put("pai_job_table.csv", samples.PAI_JOB).parent
    put("pai_task_table.csv", samples.PAI_TASK.replace(samples.PAI_TASK.splitlines()[1], row))
    assert load(folder).gpus.min() >= 0
    for amount in ("1e308", "1e15"):  # the second only in MiB, and of eight nodes
        trace = load(put("trace_kalos.csv", samples.KALOS.replace(",1000,", f",{amount},")))
        assert trace.ids == ("dlc1t2ypl09b8qtp",)
        tracefile.check(trace)


def test_lines_count_quoted_line_ends(put: Put) -> None:
    rows = ["submit_time,duration_s,num_gpus,vc", '2017-09-04 10:30:41,60,1,"a', 'b"', "2017-09-04 10:30:41,-1,1,a"]
    assert [line for line, _ in load(put("p.csv", "\r\n".join(rows))).rejected] == [4]


def test_duplicate_ids(put: Put) -> None:
    row = samples.HELIOS.splitlines()[1]
    trace = load(put("cluster_log.csv", samples.HELIOS + row + "\n"))
    assert trace.rejected[-1] == (6, "job_id: found 1425511 again (first on line 2), expected each id once")


def test_times_out_of_order_are_sorted_with_a_note(put: Put) -> None:
    rows = ["submit_time,duration_s,num_gpus", "2017-09-04 10:30:41,60,1", "2017-09-04 10:30:40,50,1"]
    trace = load(put("p.csv", "\n".join(rows)))
    assert trace.ids == ("2", "1")
    assert trace.duration.tolist() == [50.0, 60.0]
    assert trace.notes == ("1 row not in submission order, now sorted",)


@pytest.mark.parametrize(
    ("numeric", "order"), [(("10", "9", "2"), ("2", "9", "10")), (("b", "10", "a", "9"), ("a", "b", "9", "10"))]
)
def test_order_at_one_instant_is_by_id(put: Put, numeric: tuple[str, ...], order: tuple[str, ...]) -> None:
    rows = [f"2017-09-04 10:30:41,60,1,{job}" for job in numeric]
    assert load(put("p.csv", "\n".join(["submit_time,duration_s,num_gpus,job_id", *rows]))).ids == order


def test_openb_fractions(put: Put) -> None:
    rows = samples.OPENB.splitlines()
    bad = [rows[2].replace(",1,220,", ",1,0,"), rows[1].replace(",8,1000,", ",8,500,"), rows[2].replace("220", "1200")]
    bad = [row.replace("openb-pod", f"p{i}") for i, row in enumerate(bad)]
    trace = load(put("pods.csv", "\n".join([rows[0], rows[3], *bad])))
    assert [line for line, _ in trace.rejected] == [3, 4, 5]
    assert all(why.startswith("gpu_milli") for _, why in trace.rejected)


def verdicts(trace_of: Callable[[], Trace]) -> list[str]:
    """Why each row that is kept out is, by its key."""
    return [f"{line} {why.partition(':')[0]}" for line, why in trace_of().rejected]


def test_times_may_touch_but_not_overlap_openb(put: Put) -> None:
    """Created, deleted, scheduled."""
    rows = [samples.OPENB.splitlines()[0]]
    for number, times in enumerate(("5,9,5", "5,9,4", "5,5,5", "5,6,5", "0,1,0", "-1,1,0")):
        rows.append(f"p{number},1000,1,1,1000,,,,{times}")
    for number, milli in enumerate((0, 1, 1000, 1001)):
        rows.append(f"m{number},1001,1,1,{milli},,LS,Running,5,9,5")
    trace = load(put("pods.csv", "\n".join(rows)))
    assert verdicts(lambda: trace) == [
        "3 scheduled_time", "4 deletion_time", "7 creation_time", "8 gpu_milli", "11 gpu_milli",
    ]  # fmt: skip
    assert dict(zip(trace.ids, trace.cores.tolist(), strict=True)) == {"p0": 1, "p3": 1, "p4": 1, "m1": 2, "m2": 2}


def test_times_may_touch_but_not_overlap_helios(put: Put) -> None:
    """Submitted, started, ended; a cancelled job that never ran is of no use, and no mistake."""
    rows = [samples.HELIOS.splitlines()[0]]
    times = [("05", "05", "06"), ("05", "04", "09"), ("05", "06", "06"), ("05", "07", "06")]
    for number, moments in enumerate(times):
        at = ",".join(f"2020-06-09 18:41:{second}" for second in moments)
        rows.append(f"{number},u,v,1,1,1,COMPLETED,{at},1,0")
    rows.append("8,u,v,1,1,1,CANCELLED,2020-06-09 18:41:05,,,0,0")
    rows.append("9,u,v,1,1,1,running,2020-06-09 18:41:05,2020-06-09 18:41:05,,0,0")
    path = put("cluster_log.csv", "\n".join(rows))
    trace = load(path)
    assert trace.ids == ("0",)
    assert verdicts(lambda: trace) == [
        "3 start_time", "4 end_time", "5 end_time", "6 start_time", "7 state",
    ]  # fmt: skip
    assert "expected a job that ran before" in trace.rejected[3][1]
    with pytest.raises(UsageError, match=r"cluster_log.csv:3: start_time"):
        load(path, strict=True)


@pytest.mark.parametrize(("seconds", "notes"), [(35, 0), (36, 0), (34, 0), (37, 1), (33, 1)])
def test_a_duration_that_differs_by_more_than_a_second_gives_a_note(put: Put, seconds: int, notes: int) -> None:
    row = f"1,u,v,1,1,1,COMPLETED,2020-06-09 18:41:00,2020-06-09 18:41:00,2020-06-09 18:41:35,{seconds},0"
    trace = load(put("cluster_log.csv", samples.HELIOS.splitlines()[0] + "\n" + row))
    assert (len(trace.notes), trace.duration.tolist()) == (notes, [35.0])


def test_user_and_group_may_be_unknown(put: Put) -> None:
    row = "1,,,1,,,COMPLETED,2020-06-09 18:41:00,2020-06-09 18:41:00,2020-06-09 18:41:35,,"
    trace = load(put("cluster_log.csv", samples.HELIOS.splitlines()[0] + "\n" + row), strict=True)
    assert (trace.user.tolist(), trace.group.tolist(), trace.notes) == ([-1], [-1], ())
    assert (trace.cores.tolist(), trace.nodes.tolist()) == ([-1], [0])


def test_invalid_csv_is_reported_with_its_line(put: Put) -> None:
    head = "submit_time,duration_s,num_gpus"
    with pytest.raises(UsageError, match=r"p\.csv:3: found a CSV error \(.*\), expected valid CSV"):
        load(put("p.csv", f'{head}\n2017-09-04 10:30:41,60,1\n"x"y,60,1\n'), "philly-csv")


@pytest.mark.parametrize("text", ["[]", "[ ]", "[,]", " [\n\n]"])
def test_a_list_of_no_jobs(put: Put, text: str) -> None:
    with pytest.raises(GpuschedError, match="no job in it can be replayed"):
        load(put("cluster_job_log", text), "philly")


def test_unreadable_files_are_not_cached(tmp_path: Path) -> None:
    assert cache.place([tmp_path / "absent"], "swf") is None
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert cache.place([tmp_path / "loop"], "swf") is None
    assert cache.place([tmp_path], "swf") != cache.place([tmp_path], "philly") is not None


def test_memory_per_pod_needs_the_number_of_pods(put: Put) -> None:
    head, row = samples.KALOS.splitlines()[:2]
    none = row.replace(",8,64,960,1000,", ",0,64,960,1000,").replace("dlctk696s0jbvitv", "none")
    some = row.replace(",8,64,960,1000,", ",1,64,960,0.3,").replace("dlctk696s0jbvitv", "some")
    trace = load(put("trace_kalos.csv", "\n".join([head, none, some])))
    assert dict(zip(trace.ids, trace.memory_mib.tolist(), strict=True)) == {"none": -1, "some": 307}


def test_times_may_touch_but_not_overlap_philly(put: Put) -> None:
    def job(name: str, *attempts: tuple[int | None, int | None]) -> str:
        def time(second: int | None) -> str:
            return "null" if second is None else f'"2017-10-07 01:00:{second:02d}"'

        form = '{{"start_time": {}, "end_time": {}, "detail": [{{"gpus": ["x"]}}]}}'
        said = ",".join(form.format(time(a), time(b)) for a, b in attempts)
        return f'{{"jobid": "{name}", "submitted_time": {time(5)}, "attempts": [{said}]}}'

    jobs = [
        job("touch", (5, 6)), job("empty", (5, 5)), job("early", (4, 6)), job("back", (7, 6)),
        job("again", (5, 5), (8, 9)), job("runs", (5, 6), (7, None)), job("gap", (5, None), (7, 8)),
        job("second", (5, 6), (9, 8)),
    ]  # fmt: skip
    trace = load(put("cluster_job_log", "[" + ",\n".join(jobs) + "]"))
    assert sorted(zip(trace.ids, trace.duration.tolist(), strict=True)) == [("again", 1.0), ("touch", 1.0)]
    assert [(line, why.partition("found ")[2].partition(",")[0]) for line, why in trace.rejected] == [
        (2, "0.0"), (3, "an earlier one"), (4, "attempt 1 ending before it starts"), (6, "a job that still runs"),
        (7, "attempt 1 without an end_time"), (8, "attempt 2 ending before it starts"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("start", "end", "why"),
    [
        (1000, 1001, ""), (999, 1001, "found an earlier one, expected a start not before the job's"),
        (1001, 1001, "found none, expected an end after the start"), (1500, 1001, "found none, expected an end after"),
    ],
)  # fmt: skip
def test_times_may_touch_but_not_overlap_pai(put: Put, start: int, end: int, why: str) -> None:
    jobs = "one,i1,alice,Terminated,1000.0,2000.0\ntwo,i2,bob,Failed,1000.0,2000.0\n"
    folder = put("pai_job_table.csv", jobs).parent
    tasks = [f"{name},w,1,Terminated,1000,2000,600,1,50,T4\n" for name in ("nobody", "one", "two")]
    put("pai_task_table.csv", "".join(tasks))
    rows = [f"one,w,n,w,i,Terminated,{start}.0,{end}.0,m", "two,w,n,w,i,Failed,1001.0,1002.0,m"]
    put("pai_instance_table.csv", "\n".join(rows))
    trace = load(folder)
    assert trace.ids == (("two",) if why else ("one", "two"))
    *rejected, (line, found) = trace.rejected
    assert (line, found) == (1, "pai_task_table.csv: job_name: found nobody, expected a job of pai_job_table")
    assert [found.removeprefix("instances: ")[: len(why)] for _, found in rejected] == [why] * bool(why)


FORMATS = {
    "philly-csv": samples.PHILLY_CSV, "philly": samples.PHILLY, "helios": samples.HELIOS, "acme": samples.KALOS,
    "openb": samples.OPENB, "swf": samples.SWF, "gavel": samples.GAVEL_7, "sacct": samples.SACCT,
}  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_is_in_the_file(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A damaged file gives a sound trace or one error of ours."""
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    text = FORMATS[name]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 12))
        text = text[:at] + data.draw(st.text(max_size=6)) + text[at + cut :]
    path = tmp_path_factory.mktemp("damaged") / "file"
    path.write_bytes(text.encode("utf-8", "replace"))
    try:
        trace = load(path, name)
    except GpuschedError:
        return
    tracefile.check(trace)


def test_lines_are_counted_as_an_editor_does(tmp_path: Path) -> None:
    """From 1, empty ones too; a row that spans lines is at its first."""
    rows, lines = _rows(tmp_path, io.StringIO('a,b\n\n1,2\n"x\ny",3\n4,5\n'))
    assert [row[-1] for row in rows] == ["b", "2", "3", "5"]
    assert lines.tolist() == [1, 3, 4, 6]


@given(st.lists(st.tuples(st.integers(0, 3).map(float), st.integers(0, 12)), max_size=12), st.booleans())
def test_rows_are_in_order_of_submission_then_of_id(rows: list[tuple[float, int]], text: bool) -> None:
    """Whole numbers by their value, all others as text; equal ones as they came."""
    ids = [f"j{n}" if text else str(n) for _, n in rows]
    order = sorted_order(np.array([at for at, _ in rows]), ids)
    key = {i: (at, ids[i] if text else n) for i, (at, n) in enumerate(rows)}
    assert order.tolist() == sorted(range(len(rows)), key=lambda i: key[i])


def test_numbers_too_long_for_64_bits_are_numbers_all_the_same() -> None:
    at = np.zeros(2)
    assert sorted_order(at, ["1" + "0" * 17, "2"]).tolist() == [1, 0]
    assert sorted_order(at, ["9" * 19, "10"]).tolist() == [1, 0]


@pytest.mark.parametrize(("text", "first"), [("a,b\n1,2\n3,4\n", 2), ("1,2\n3,4\n", 1), (" a ,b,c\n1,2\n3,4\n", 2)])
def test_a_header_may_stand_where_none_is_needed(tmp_path: Path, text: str, first: int) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    table = read_csv(path, "a table", ["b"], header=["a", "b"])
    assert (table.columns, table.lines.tolist()) == ({"b": ["2", "4"]}, [first, first + 1])


def test_a_time_with_a_zone_in_as_many_characters_is_read_as_what_it_says() -> None:
    texts = ["2017-10-03T14+02:00", "2017-10-03T14+00:00"]
    assert {len(text) for text in texts} == {19}
    assert to_times(texts).tolist() == [1507032000.0, 1507039200.0]


def test_numbers_that_floats_do_not_distinguish_from_the_next_are_none() -> None:
    most = 1 << 53
    assert to_numbers([str(most), str(-most)]).tolist() == [most, -most]
    assert np.isnan(to_numbers([str(most + 2), str(-most - 2), "1e400"])).all()
