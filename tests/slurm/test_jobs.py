"""The reader of squeue against a writer of its own, which prints jobs as squeue does."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.slurm.jobs import JobReader

PLAIN = {
    "JobID": "12", "ArrayTaskID": "N/A", "JobArrayID": "12", "ArrayJobID": "12", "UserName": "ann", "UserID": "1001",
    "Account": "(null)", "QOS": "normal", "Partition": "A100", "State": "PENDING", "Reason": "Priority",
    "PriorityLong": "4294901760", "SubmitTime": "1795404931", "EligibleTime": "1795404931", "StartTime": "N/A",
    "EndTime": "N/A", "TimeLimit": "1-02:04:00", "NumNodes": "1", "NodeList": "", "NumCPUs": "2", "NumTasks": "1",
    "tres-alloc": "cpu=2,mem=4000M,node=1,billing=2", "tres-per-job": "N/A", "tres-per-node": "N/A",
    "tres-per-socket": "N/A", "tres-per-task": "N/A", "Sockets": "*", "ReqNodes": "", "Feature": "(null)",
    "Reservation": "(null)", "Dependency": "(null)", "OverSubscribe": "OK", "Requeue": "1", "RestartCnt": "0",
    "exit_code": "0", "Name": "train",
}  # fmt: skip


def printed(format_: str, jobs: list[dict[str, str]]) -> str:
    """Return squeue's output: each field, then what the format has behind its colon; a newline after each job."""
    wanted = [item.split(":", 1) for item in format_.split(",")]
    return "".join("".join(({**PLAIN, **job})[field] + end for field, end in wanted) + "\n" for job in jobs)


def read(*jobs: dict[str, str], waiting: str = "", factors: dict[str, int] | None = None, memory: bool = True):
    reader = JobReader()
    return reader.read(printed(reader.format, list(jobs)), waiting, factors or {}, memory)


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=30), max_size=8))
def test_a_name_may_hold_anything(names):
    found = read(*({"JobID": str(at + 1), "Name": name} for at, name in enumerate(names)))
    assert [(job.id, job.name) for job in found] == [(str(at + 1), name) for at, name in enumerate(names)]


@pytest.mark.parametrize("begin", ["", "x\x1e\n", "\x1f", "\n"])
def test_names_are_not_taken_for_job_ids(begin):
    name = begin + printed(JobReader().format, [{"JobID": "99"}])
    assert [(job.id, job.name) for job in read({"Name": name}, {"JobID": "13"})] == [("12", name), ("13", "train")]


@given(
    limit=st.none() | st.integers(0, 100 * 86400).map(lambda s: s // 60 * 60),
    start=st.none() | st.integers(1, 2**32),
    memory_mib=st.none() | st.integers(1, 10**7),
    counts=st.tuples(st.integers(1, 5000), st.integers(1, 100_000), st.integers(0, 9)),
    nodes=st.lists(st.integers(0, 999), unique=True, max_size=5),
)
def test_figures_are_read_back(limit, start, memory_mib, counts, nodes):
    days, rest = divmod(limit or 0, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    shown = "UNLIMITED" if limit is None else f"{days}-{clock}" if days else clock
    tres = "cpu=2,node=1" if memory_mib is None else f"cpu=2,mem={memory_mib}M,node=1"
    (job,) = read(
        {
            "TimeLimit": shown, "StartTime": "N/A" if start is None else str(start), "tres-alloc": tres,
            "NumNodes": str(counts[0]), "NumCPUs": str(counts[1]), "RestartCnt": str(counts[2]),
            "NodeList": f"n[{','.join(f'{n:03}' for n in nodes)}]" if nodes else "(null)",
        }
    )  # fmt: skip
    assert (job.time_limit_s, job.start_time, job.memory_mib) == (limit, start, memory_mib)
    assert (job.nodes, job.cpus, job.restarts) == counts
    assert job.node_names == tuple(f"n{n:03}" for n in nodes)


@pytest.mark.parametrize(
    ("fields", "gpus"),
    [
        ({}, {}),
        ({"tres-per-node": "gres:gpu:a100:2", "NumNodes": "3"}, {"a100": 6}),
        ({"tres-per-node": "gres/gpu:a100=2", "NumNodes": "3"}, {"a100": 6}),  # as newer versions print it
        ({"tres-per-node": "gres:gpu", "NumNodes": "2"}, {"": 2}),
        ({"tres-per-node": "gres:gpu:1g.5gb", "NumNodes": "2"}, {"1g.5gb": 2}),
        ({"tres-per-node": "gres:gpu:1,gres:shard:4"}, {"": 1}),
        ({"tres-per-job": "gres:gpu:a100:3,gres:gpu:v100:1", "NumNodes": "2"}, {"a100": 3, "v100": 1}),
        ({"tres-per-task": "gres:gpu:2", "NumTasks": "4"}, {"": 8}),
        ({"tres-per-socket": "gres:gpu:1", "NumNodes": "3", "Sockets": "2"}, {"": 6}),
        ({"tres-per-job": "gres:gpu:8", "tres-per-node": "gres:gpu:4", "NumNodes": "2"}, {"": 8}),
        ({"tres-alloc": "cpu=1,node=1,gres/gpu=4", "tres-per-node": "gres:gpu:a100:4"}, {"a100": 4}),
        ({"tres-alloc": "cpu=1,gres/gpu=4,gres/gpu:a100=4", "tres-per-node": "gres:gpu:4"}, {"a100": 4}),
        ({"tres-alloc": "gres/gpu=8,node=1"}, {"": 8}),  # alone on its node, so it has what it did not ask for
        ({"tres-alloc": "gres/gpu=8", "tres-per-node": "gres:gpu:a100:4"}, {"a100": 8}),
    ],
)
def test_gpus_of_the_whole_job(fields, gpus):
    assert read(fields)[0].gpus == gpus


def test_tasks_of_an_array_have_its_limit_also_once_one_of_them_is_a_job_of_its_own():
    reader = JobReader()
    wait = [{"JobID": "7", "ArrayTaskID": str(n), "JobArrayID": f"7_{n}", "ArrayJobID": "7"} for n in (3, 5, 8)]
    first = reader.read(printed(reader.format, wait), "7 7 3,5,8%2 dgx[1-2]\n", {}, True)
    assert [(job.id, job.raw_id, job.array_id, job.array_index, job.array_limit) for job in first] == [
        ("7_3", "7", "7", 3, 2), ("7_5", "7", "7", 5, 2), ("7_8", "7", "7", 8, 2)
    ]  # fmt: skip
    assert first[0].exc_nodes == ("dgx1", "dgx2")
    wait[1] |= {"JobID": "19", "ReqNodes": "dgx4"}
    second = reader.read(printed(reader.format, wait), "7 7 3,8%2 dgx[1-2]\n19 7 5 \n", {}, True)
    assert [(job.id, job.raw_id, job.array_limit) for job in second] == [
        ("7_3", "7", 2), ("7_5", "19", 2), ("7_8", "7", 2)
    ]  # fmt: skip
    assert (second[1].req_nodes, second[1].exc_nodes) == (("dgx4",), ())
    third = reader.read(printed(reader.format, wait), "7 7 3,8 dgx[1-2]\n19 7 5 \n", {}, True)
    assert [job.array_limit for job in third] == [None, None, None], "its user has taken it back"


def test_tasks_that_squeue_leaves_out_are_there():
    reader = JobReader()
    wait = [{"JobID": "7", "ArrayTaskID": str(n), "JobArrayID": f"7_{n}", "ArrayJobID": "7"} for n in range(1, 95, 3)]
    wait[5] |= {"JobID": "19", "State": "RUNNING"}
    found = reader.read(printed(reader.format, wait), "7 7 1-13:3,19-97:3%4 dgx1\n", {}, True)
    assert [job.array_index for job in found] == list(range(1, 98, 3))
    assert (found[-1].id, found[-1].raw_id, found[-1].array_limit, found[-1].exc_nodes) == ("7_97", "7", 4, ("dgx1",))


def test_tasks_that_wait_together_share_nothing_that_differs():
    wait = [{"JobID": "7", "ArrayTaskID": str(n), "JobArrayID": f"7_{n}", "ArrayJobID": "7"} for n in range(3)]
    wait[1] |= {"Reason": "BeginTime", "RestartCnt": "1"}
    assert [(job.reason, job.restarts) for job in read(*wait)] == [("Priority", 0), ("BeginTime", 1), ("Priority", 0)]


def test_only_unchanged_jobs_are_the_same_object():
    reader = JobReader()
    jobs = [{"JobID": "1"}, {"JobID": "2"}, {"JobID": "3"}, {"JobID": "4"}]
    before = reader.read(printed(reader.format, jobs), "4 4 N/A dgx1\n", {}, True)
    jobs[1]["Reason"] = "Resources"
    after = reader.read(printed(reader.format, jobs), "4 4 N/A dgx2\n", {"3": 5}, True)
    assert after[0] is before[0]
    assert msgspec.structs.replace(before[1], reason="Resources") == after[1]
    assert (before[2].site_factor, after[2].site_factor) == (0, 5)
    assert (before[3].exc_nodes, after[3].exc_nodes) == (("dgx1",), ("dgx2",))


@pytest.mark.parametrize(("status", "state", "code"), [
    ("768", "FAILED", 3), ("9", "FAILED", 137), ("15", "CANCELLED", 143), ("0", "COMPLETED", 0), ("0", "RUNNING", None)
])  # fmt: skip
def test_exit_codes(status, state, code):
    assert read({"exit_code": status, "State": state})[0].exit_code == code


def test_components_of_a_heterogeneous_job_have_names_that_scontrol_takes():
    assert [job.id for job in read({"JobArrayID": "12+0"}, {"JobID": "13", "JobArrayID": "12+1"})] == ["12+0", "12+1"]


def test_memory_is_unknown_where_slurm_does_not_count_it():
    assert read({}, memory=False)[0].memory_mib is None
    assert read({})[0].memory_mib == 4000


@pytest.mark.parametrize("field", ["PriorityLong", "TimeLimit", "NodeList", "SubmitTime", "tres-alloc"])
def test_the_error_of_an_unreadable_job_names_it(field):
    with pytest.raises(ValueError, match="job 12: "):
        read({field: "mem=b-["})
