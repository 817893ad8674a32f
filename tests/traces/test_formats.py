"""Every importer on a sample in its documented format: each field where it belongs."""

from __future__ import annotations

import gzip
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpusched.errors import FileError, GpuschedError, UsageError
from gpusched.traces import file as tracefile
from gpusched.traces.load import load
from gpusched.traces.readers.guess import detect_format
from gpusched.traces.slicing import gpu_seconds
from gpusched.traces.trace import Trace
from tests.traces import samples

Put = Callable[[str, str], Path]


def names(trace: Trace, column: str) -> list[str]:
    words = getattr(trace, tracefile.NAMES[column])
    return [words[i] if i >= 0 else "" for i in getattr(trace, column).tolist()]


def test_philly_csv(put: Put) -> None:
    trace = load(put("p.csv", samples.PHILLY_CSV))
    assert trace.ids == ("1", "2", "3")
    assert trace.epoch == 1504521041.0  # 2017-09-04 10:30:41 UTC
    assert trace.submit.tolist() == [0.0, 235696.0, 235696.0]
    assert trace.duration.tolist() == [2240194.0, 3256045.0, 12.5]
    assert trace.gpus.tolist() == [8, 1, 2]
    assert names(trace, "group") == ["7f04ca", "6214e9", "6214e9"]
    assert not trace.users
    assert not trace.rejected


def test_philly_json(put: Put) -> None:
    trace = load(put("cluster_job_log", samples.PHILLY))
    assert trace.ids == ("early", "application_1506638472019_14199")
    assert trace.submit.tolist() == [0.0, 99.0]
    assert trace.duration.tolist() == [3600.0, 74.0 + 60.0]
    assert trace.gpus.tolist() == [1, 4]
    assert trace.wait.tolist() == [0.0, 30.0]
    assert names(trace, "user") == ["b", "ce2f4c"]
    assert names(trace, "status") == ["Failed", "Pass"]
    assert [line for line, _ in trace.rejected] == [15, 17, 19]
    assert "never started" in trace.rejected[0][1]
    assert "still runs" in trace.rejected[1][1]
    assert "attempt 1 without a start_time" in trace.rejected[2][1]
    assert trace.notes == ("1 row not in submission order, now sorted",)


def test_philly_json_is_strict_about_flaws_only(put: Put) -> None:
    with pytest.raises(UsageError, match=r"cluster_job_log:19: attempts: found attempt 1 without a start_time"):
        load(put("cluster_job_log", samples.PHILLY), strict=True)
    cut = samples.PHILLY[: samples.PHILLY.index("11cb48")]
    with pytest.raises(UsageError, match=r"cluster_job_log:17: found a JSON error"):
        load(put("cluster_job_log", cut), "philly")


def test_helios(put: Put) -> None:
    trace = load(put("cluster_log.csv", samples.HELIOS), strict=True)
    assert trace.ids == ("1425511", "1425512", "1425513")
    assert trace.duration.tolist() == [36848.0, 249.0, 675233.0]
    assert trace.wait.tolist() == [0.0, 10.0, 0.0]
    assert trace.gpus.tolist() == [1, 4, 0]  # CPU-only jobs are legal here
    assert trace.cores.tolist() == [1, 16, 1]
    assert names(trace, "group") == ["vcJkd", "vchbv", "vcpDC"]
    assert [line for line, _ in trace.rejected] == [5]  # cancelled before it ran: no error even when strict


def test_acme_seren(put: Put) -> None:
    trace = load(put("trace_seren.csv", samples.SEREN), strict=True)
    assert trace.duration.tolist() == [117.0, 2693.0]
    assert trace.wait.tolist() == [32.0, 13.0]
    assert trace.epoch == 1677601102.0  # 2023-02-28 16:18:22 UTC
    assert names(trace, "group") == ["Other", "Pretrain"]


def test_acme_kalos_counts_run_time_without_the_queue(put: Put) -> None:
    trace = load(put("trace_kalos.csv", samples.KALOS))
    assert trace.duration.tolist() == [8.0, 70.0]
    assert trace.memory_mib.tolist() == [8 * 1000 * 1024, -1]
    assert trace.nodes.tolist() == [8, 8]
    assert trace.notes == ("2 rows with a duration other than end_time - start_time, which is used",)
    assert [line for line, _ in trace.rejected] == [4]


def test_openb(put: Put) -> None:
    trace = load(put("pods.csv", samples.OPENB))
    assert trace.epoch is None
    assert trace.ids == ("openb-pod-0017", "openb-pod-0022", "openb-pod-0035", "openb-pod-0005")
    assert trace.submit[0] == 9437497.0
    assert trace.gpus.tolist() == [8, 1, 1, 0]
    assert trace.gpu_milli.tolist() == [1000, 220, 1000, 1000]
    assert trace.cores.tolist() == [88, 4, 12, 20]  # rounded up
    assert trace.wait.tolist() == [0.0, 0.0, 5.0, 4.0]
    assert names(trace, "gpu_type") == ["", "", "V100M16|V100M32", ""]
    assert gpu_seconds(trace) == pytest.approx(8 * 1332357 + 0.22 * 294651 + 1512)
    assert [line for line, _ in trace.rejected] == [6]


@pytest.mark.parametrize("with_instances", [True, False])
def test_pai2020(put: Put, with_instances: bool) -> None:
    folder = put("pai_job_table.csv", samples.PAI_JOB).parent
    put("pai_task_table.csv", samples.PAI_TASK)
    if with_instances:
        put("pai_instance_table.csv", samples.PAI_INSTANCE)
    trace = load(folder, strict=True)
    assert trace.ids == ("one", "two", "mixed")
    assert trace.epoch == 8 * 3600.0, "0 is eight in the morning in Shanghai"
    assert trace.gpus.tolist() == [1, 4, 2]
    assert trace.gpu_milli.tolist() == [500, 1000, 500]
    assert trace.cores.tolist() == [6, 8, 14]  # 600 % + 2 x 400 %, as in the source's README
    assert trace.memory_mib.tolist() == [30000, 20480, 30720]
    assert trace.duration.tolist() == ([970.0, 175.0, 285.0] if with_instances else [990.0, 190.0, 290.0])
    assert trace.wait.tolist() == ([20.0, 20.0, 15.0] if with_instances else [10.0, 10.0, 10.0])
    assert names(trace, "user") == ["alice", "bob", "bob"]
    assert [line for line, _ in trace.rejected] == [4, 5]
    assert load(folder / "pai_job_table.csv").ids == trace.ids
    put("pai_task_table.csv", samples.PAI_TASK.replace(",50.0,MISC", ",0.1,MISC"))
    assert load(folder).gpu_milli.tolist()[0] == 1, "a thousandth is the least"


def test_pai2020_counts_instances_that_say_nothing(put: Put) -> None:
    folder = put("pai_job_table.csv", samples.PAI_JOB).parent
    put("pai_task_table.csv", samples.PAI_TASK)
    bad = "one,t,n,w,i,Failed,x,2.0,m\none,t,n,w,i,Failed\none,t,n,w,i,Failed,nan,2.0,m\nno,t,n,w,i,Failed,1.0,2.0,m\n"
    before = _skipped(samples.PAI_INSTANCE, folder, put)
    assert _skipped(samples.PAI_INSTANCE + bad, folder, put) == before + 4


def _skipped(text: str, folder: Path, put: Put) -> int:
    put("pai_instance_table.csv", text)
    said = [re.match(r"(\d+) rows? of pai_instance_table.csv without a start", note) for note in load(folder).notes]
    return sum(int(found[1]) for found in said if found is not None)


def test_pai2020_jobs_without_gpus_and_tasks_without_times(put: Put) -> None:
    """Of the second job one task has no end; the first asks for no GPU."""
    folder = put("pai_job_table.csv", "cpu,i1,a,Terminated,10,90\ntwo,i2,a,Terminated,10,90\n").parent
    tasks = [
        "cpu,w,2,Terminated,20,80,150,1,,",
        "two,w,1,Terminated,30,80,100,1,50,T4",
        "two,x,1,Failed,15,,100,1,50,T4",
    ]
    put("pai_task_table.csv", "\n".join(tasks))
    trace = load(folder)
    assert (trace.ids, trace.gpus.tolist(), trace.gpu_milli.tolist()) == (("cpu", "two"), [0, 2], [1000, 500])
    assert (trace.cores.tolist(), trace.wait.tolist(), trace.duration.tolist()) == ([3, 2], [10.0, 20.0], [60.0, 50.0])


def test_pai2020_names_the_table_of_a_bad_row(put: Put) -> None:
    folder = put("pai_job_table.csv", samples.PAI_JOB).parent
    put("pai_task_table.csv", samples.PAI_TASK.replace("two,worker,2.0", "two,worker,x"))
    trace = load(folder)
    assert trace.ids == ("one", "mixed")
    assert (2, "tasks: found a bad one, expected tasks that say what they ask for") in trace.rejected
    assert (
        2,
        "pai_task_table.csv: inst_num: found x, expected a whole number of instances, at least 1",
    ) in trace.rejected
    with pytest.raises(UsageError, match=r"pai_task_table.csv:2: inst_num"):
        load(folder, strict=True)
    (folder / "pai_task_table.csv").unlink()
    with pytest.raises(UsageError, match=r"no pai_task_table.csv"):
        load(folder)


def test_swf(put: Put) -> None:
    trace = load(put("log.swf", samples.SWF), strict=True)
    assert trace.ids == ("1", "2", "3")
    assert trace.epoch == 1e9
    assert trace.submit.tolist() == [0.0, 5.0, 6.0]
    assert trace.duration.tolist() == [100.0, 50.5, 60.0]
    assert trace.gpus.tolist() == [8, 2, 2]  # requested; allocated where that is unknown
    np.testing.assert_array_equal(trace.limit, [3600.0, np.nan, 100.0])
    np.testing.assert_array_equal(trace.wait, [10.0, np.nan, 7.0])
    assert trace.memory_mib.tolist() == [8, -1, -1]
    assert trace.depends_on.tolist() == [-1, 0, -1]
    assert names(trace, "user") == ["3", "4", ""]
    assert names(trace, "status") == ["COMPLETED", "FAILED", "COMPLETED"]
    assert [line for line, _ in trace.rejected] == [7, 8]
    assert set(trace.notes) == {
        "1 job with a preceding job; think times are dropped", "the log's machine has 128 processors",
    }  # fmt: skip


def test_swf_waits_for_no_later_job(put: Put) -> None:
    lines = ["1 0 -1 9 1 -1 -1 1 -1 -1 1 -1 -1 -1 -1 -1 2 -1", "2 1 -1 9 1 -1 -1 1 -1 -1 1 -1 -1 -1 -1 -1 1 -1"]
    assert load(put("log.swf", "\n".join(lines))).depends_on.tolist() == [-1, 0]


def test_swf_dependencies_on_jobs_outside_the_file_are_ignored(put: Put) -> None:
    lines = [f"{job} 0 -1 9 1 -1 -1 1 -1 -1 1 -1 -1 -1 -1 -1 {before} -1" for job, before in ((1, 9), (2, 9), (3, 1))]
    assert load(put("log.swf", "\n".join(lines))).depends_on.tolist() == [-1, -1, 0]


def test_swf_dependencies_on_job_0_are_ignored(put: Put) -> None:
    lines = [f"{job} 0 -1 9 1 -1 -1 1 -1 -1 1 -1 -1 -1 -1 -1 {before} -1" for job, before in ((0, -1), (1, 0), (2, 1))]
    assert load(put("log.swf", "\n".join(lines))).depends_on.tolist() == [-1, -1, 1]


def test_a_log_of_remarks_only_is_swf(put: Put) -> None:
    for text in ("; Version: 2.2\n", "; a\n; b\n"):
        assert detect_format(put("log", text)) == "swf"
    assert detect_format(put("log", "a remark\n")) is None
    assert detect_format(put("log", "; a\n1 2 3\n")) is None


def test_gavel(put: Put) -> None:
    trace = load(put("msr.trace", samples.GAVEL_7), strict=True)
    assert trace.ids == ("0", "1")
    assert trace.duration.tolist() == pytest.approx([1000.0, 10.0])
    assert trace.gpus.tolist() == [1, 4]
    assert names(trace, "model") == ["A3C", "LM (batch size 5)"]
    assert trace.rejected == ((3, "job_type: found A3C on 4 GPUs, expected a model measured on that many GPUs"),)
    ten = load(put("new.trace", samples.GAVEL_10))
    assert (ten.submit.tolist(), ten.duration.tolist()) == ([12.5], pytest.approx([1000.0]))
    with pytest.raises(FileError, match=r"none\.trace:1: .*7 or 10 tab-separated fields"):
        load(put("none.trace", "a\tb\n"), "gavel")


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".gz", lzma.compress)])
def test_compressed_by_content(put: Put, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    path = put("p.csv" + suffix, "")
    path.write_bytes(pack(samples.PHILLY_CSV.encode()))
    assert len(load(path)) == 3
    path.write_bytes(pack(samples.PHILLY_CSV.encode())[:-12])
    with pytest.raises(GpuschedError, match="cannot be unpacked"):
        load(path)


def test_a_small_file_may_unpack_to_any_times_its_size(put: Put) -> None:
    path = put("p.csv.gz", "")
    text = samples.PHILLY_CSV + 1_000_000 * "\n"
    path.write_bytes(gzip.compress(text.encode()))
    assert path.stat().st_size * 500 < len(text)
    assert len(load(path)) == 3


def test_folder_with_one_trace(put: Put) -> None:
    path = put("cluster_log.csv", samples.HELIOS)
    assert len(load(path.parent)) == 3
    put("trace_seren.csv", samples.SEREN)
    with pytest.raises(UsageError, match="found 2 traces"):
        load(path.parent)
    assert len(load(path.parent, "acme")) == 2


def test_unknown_formats_are_said_in_one_line(put: Put, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be detected"):
        load(put("x", "hello\n"))
    with pytest.raises(UsageError, match="no trace format 'phily'; did you mean 'philly'"):
        load(put("x", "hello\n"), "phily")
    with pytest.raises(GpuschedError, match="No such file"):
        load(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"x:1: found no column submit_time, duration_s, num_gpus"):
        load(put("x", "a,b\n1,2\n"), "philly-csv")
    with pytest.raises(GpuschedError, match="no job in it can be replayed"):
        load(put("x", samples.PHILLY_CSV.splitlines()[0] + "\n"))


@pytest.mark.parametrize(
    ("name", "jobs", "kept_out"),
    [
        ("philly_2017.csv.gz", 54290, 0), ("openb_pod_list_default.csv.gz", 7255, 897),
        ("lublin_256.swf.gz", 10000, 0), ("gavel_msr_seed0_103959.trace.gz", 861, 125),
    ],
)  # fmt: skip
def test_real_traces(name: str, jobs: int, kept_out: int) -> None:
    trace = load(samples.real(name), strict=True)
    assert (len(trace), len(trace.rejected)) == (jobs, kept_out)
    tracefile.check(trace)


def test_swf_distinguishes_zero_from_unknown(put: Put) -> None:
    """A wait of 0 is known; a memory or a limit of 0 is not."""
    lines = ["1 0 0 9 1 -1 1 1 1 0 1 -1 -1 -1 -1 -1 -1 -1", "2 1 0.5 9 0 -1 -1 3 0.5 -1 1 -1 -1 -1 -1 -1 -1 -1"]
    trace = load(put("log.swf", "\n".join(lines)))
    assert trace.wait.tolist() == [0.0, 0.5]
    np.testing.assert_array_equal(trace.limit, [1.0, 0.5])
    assert trace.gpus.tolist() == [1, 3]


SWF_ROW = {
    "job": "1", "submit": "5", "wait": "2", "run": "9", "allocated": "4", "cpu": "-1", "used": "-1", "requested": "8",
    "limit": "60", "memory": "2048", "status": "1", "user": "3", "group": "-1", "exe": "-1", "queue": "2",
    "partition": "-1", "before": "-1", "think": "-1",
}  # fmt: skip


def swf(**changes: str) -> str:
    return " ".join((SWF_ROW | changes).values()) + "\n"


@pytest.mark.parametrize(
    ("changes", "column", "value"),
    [
        ({}, "gpus", 8),
        ({"requested": "-1"}, "gpus", 4),
        ({"requested": "0"}, "gpus", 4),
        ({"requested": "-1", "allocated": "1"}, "gpus", 1),
        ({"requested": "1"}, "gpus", 1),
        ({"allocated": "-1"}, "gpus", 8),
        ({"limit": "0"}, "limit", np.nan),
        ({"limit": "-1"}, "limit", np.nan),
        ({"limit": "0.5"}, "limit", 0.5),
        ({"wait": "0"}, "wait", 0.0),
        ({"wait": "-1"}, "wait", np.nan),
        ({}, "memory_mib", 16),
        ({"memory": "1"}, "memory_mib", 1),
        ({"memory": "129"}, "memory_mib", 2),
        ({"memory": "0"}, "memory_mib", -1),
        ({"memory": "-1"}, "memory_mib", -1),
        ({"submit": "0"}, "submit", 0.0),
        ({"run": "0.5"}, "duration", 0.5),
    ],
)
def test_swf_fields(put: Put, changes: dict[str, str], column: str, value: float) -> None:
    """Memory is in KiB of each processor."""
    trace = load(put("log.swf", swf(**changes)), strict=True)
    np.testing.assert_array_equal(getattr(trace, column), [value])


@pytest.mark.parametrize(
    ("changes", "jobs", "error"),
    [
        *(({"status": status}, 2, "") for status in ("-1", "0", "1", "5")),
        *(({"status": status}, 1, "") for status in ("2", "3", "4")),
        ({"status": "6"}, 1, "status: found 6, expected a status from -1 to 5"),
        ({"status": "-2"}, 1, "status: found -2, expected a status from -1 to 5"),
        ({"status": "5", "run": "0"}, 1, ""),
        ({"status": "5", "run": "-1"}, 1, ""),
        ({"status": "1", "run": "0"}, 1, "run time: found 0, expected a run time of more than 0 s"),
        ({"run": "-1"}, 1, "run time: found -1, expected a run time of more than 0 s"),
        ({"requested": "-1", "allocated": "0"}, 1, "allocated processors: found 0, expected at least one processor"),
        ({"requested": "1.5"}, 1, "requested processors: found 1.5, expected a whole number, or -1"),
        ({"requested": "-2"}, 1, "requested processors: found -2, expected a whole number, or -1"),
        ({"allocated": "-2"}, 1, "allocated processors: found -2, expected a whole number, or -1"),
        ({"submit": "-1"}, 1, "submit time: found -1, expected seconds since the log's start"),
        ({"limit": "-2"}, 1, "requested time: found -2, expected a number, or -1"),
        (
            {"memory": "9e15", "requested": "4096"},
            1,
            "requested memory: found 9e15, expected an amount that a machine can have",
        ),
    ],
)
def test_swf_rows_that_are_jobs_parts_of_jobs_and_wrong(
    put: Put, changes: dict[str, str], jobs: int, error: str
) -> None:
    path = put("log.swf", "; Version: 2.2\n" + swf(job="7") + swf(**changes))
    assert len(load(path)) == jobs
    if error:
        with pytest.raises(UsageError) as found:
            load(path, strict=True)
        assert found.value.line().startswith(f"{path}:3: {error}")
    else:
        assert len(load(path, strict=True)) == jobs


def test_swf_statuses_users_and_groups_by_partition_else_by_queue(put: Put) -> None:
    rows = [swf(job=str(i), status=str(status)) for i, status in enumerate((-1, 0, 1, 5), 1)]
    trace = load(put("log.swf", "".join(rows)))
    assert [trace.statuses[i] if i >= 0 else "" for i in trace.status.tolist()] == [
        "", "FAILED", "COMPLETED", "CANCELLED",
    ]  # fmt: skip
    trace = load(put("log.swf", swf(user="-1") + swf(job="2", user="30") + swf(job="3", user="0", queue="-1")))
    assert [trace.users[i] if i >= 0 else "" for i in trace.user.tolist()] == ["", "30", "0"]
    assert [trace.groups[i] if i >= 0 else "" for i in trace.group.tolist()] == ["2", "2", ""]
    trace = load(put("log.swf", swf(partition="5") + swf(job="2")))
    assert [trace.groups[i] if i >= 0 else "" for i in trace.group.tolist()] == ["5", ""], "no mixture of the two"


@pytest.mark.parametrize("think", ["-1", "0", "5"])
def test_swf_says_that_think_times_are_dropped_where_there_are_any(put: Put, think: str) -> None:
    trace = load(put("log.swf", swf() + swf(job="2", submit="6", before="1", think=think) + swf(job="3", submit="7")))
    assert trace.depends_on.tolist() == [-1, 0, -1]
    assert [note for note in trace.notes if "think" in note] == (
        ["1 job with a preceding job; think times are dropped"] if think == "5" else []
    )


def test_swf_headers_count_until_the_first_job(put: Put) -> None:
    head = "; UnixStartTime: 1000\n\n;MaxProcs :  64\n"
    trace = load(put("log.swf", head + swf() + "; UnixStartTime: 7\n"))
    assert trace.epoch == 1000.0
    assert "the log's machine has 64 processors" in trace.notes
    assert load(put("log.swf", swf() + head)).epoch is None
