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
from gpusched.sim import tracefile
from gpusched.sim.traces import load
from gpusched.sim.traces.draft import sorted_order, to_times
from gpusched.sim.traces.reading import _rows, read_csv
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
    assert trace.notes == ("1 rows were out of order of submission and have been sorted",)


@pytest.mark.parametrize(
    ("numeric", "order"), [(("10", "9", "2"), ("2", "9", "10")), (("b", "a", "10"), ("10", "a", "b"))]
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


FORMATS = {
    "philly-csv": samples.PHILLY_CSV, "philly": samples.PHILLY, "helios": samples.HELIOS, "acme": samples.KALOS,
    "openb": samples.OPENB, "swf": samples.SWF, "gavel": samples.GAVEL_7,
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


def test_numbers_too_long_for_64_bits_are_text() -> None:
    at = np.zeros(2)
    assert sorted_order(at, ["1" + "0" * 17, "2"]).tolist() == [1, 0]
    assert sorted_order(at, ["1" + "0" * 18, "2"]).tolist() == [0, 1]
    assert sorted_order(at, ["9" * 20, "10"]).tolist() == [1, 0]


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
