"""`Cluster` without nodes: what is queued, how futures end, and that the command line asks for the same."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import os
import pickle
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import gpusched
from gpusched import Cluster, Executor, GpuschedError, Job, JobFailed, NoController, Options, UsageError
from gpusched.api import watching
from gpusched.api.executor import _translated
from gpusched.client.request import SubmitRequest
from gpusched.client.resolve import stored_jobs
from gpusched.config.paths import log_path, result_path
from gpusched.controller.secretfiles import SecretFiles
from gpusched.job.call import MAGIC
from gpusched.model.commands import Requeue, Submit
from gpusched.model.events import Event
from gpusched.model.jobs import JobRecord as JobRecord
from gpusched.model.jobs import JobState
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import RankRecord, Reader, Store
from tests import builders
from tests.cli.conftest import Site, site
from tests.testbed.waiting import wait_until

__all__ = ["site"]  # a fixture

SMALL: Options = {"flavor": "s-V100"}


@pytest.fixture
def cluster(site: Site) -> Cluster:
    site.apply_inbox()  # there is a store, and a controller lives
    return Cluster()


def leave(site: Site, job: Job[Any], value: object, outcome: str = "returned", rank: int = 0, **header: Any) -> None:
    """Write the result file that the controller would have collected."""
    data = pickle.dumps(value) if value is not None else b""
    path = result_path(site.state, job.id, 1, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(MAGIC + json.dumps({"outcome": outcome, "size": len(data), **header}).encode() + b"\n" + data)


def submitted(site: Site) -> Submit:
    """The only command in the inbox, which is taken out."""
    command = site.only_submit()
    for file in Inbox(site.state).new.iterdir():
        file.unlink()
    return command


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flavor": "s-A100", "image": "i:1"}, "-F s-A100 --image i:1"),
        ({"partition": "bare", "cpus": 4, "mem": "16G", "time": 90}, "-p bare --cpus 4 --mem 16G -t 90"),
        ({"partition": "bare", "gpus": 2, "mem": 2048, "time": timedelta(hours=2)}, "-p bare --gpus 2 --mem 2G -t 2h"),
        ({"partition": "bare", "gpus": "1-4", "resizable": True}, "-p bare --gpus 1-4 --resizable"),
        ({"partition": "bare", "sizes": [1, 2], "resizable": True}, "-p bare --sizes 1,2 --resizable"),
        ({"partition": "bare", "sizes": "1,2", "resizable": True, "cooldown": 60},
         "-p bare --sizes 1,2 --resizable --cooldown 1m"),
        ({"partition": "bare", "nodes": 3, "gpus_per_node": 4, "name": "two"}, "-p bare -N 3 --gpus-per-node 4 -J two"),
        (SMALL | {"env": {"A": "b=c", "D": "e f"}}, ["-F", "s-V100", "--env", "A=b=c", "--env", "D=e f"]),
        (SMALL | {"env": ["HOME"], "mount": {"/a": "/b:ro"}}, "-F s-V100 --env HOME --mount /a:/b:ro"),
        (SMALL | {"array": range(0, 9, 2), "max_running": 3}, "-F s-V100 --array 0-8:2%3"),
        (SMALL | {"nodelist": "dgx-1v-1", "exclude": ["dgx-1v-2"]}, "-F s-V100 --nodelist dgx-1v-1 -x dgx-1v-2"),
        (SMALL | {"begin": datetime(2031, 5, 6, 7, tzinfo=UTC)}, "-F s-V100 --begin 2031-05-06T07:00:00Z"),
        (SMALL | {"output": Path("/a/%j.txt"), "workdir": "/w"}, "-F s-V100 -o /a/%j.txt --workdir /w"),
        (SMALL | {"hold": True, "nice": 5, "requeue": False}, "-F s-V100 --hold --nice 5 --no-requeue"),
        (SMALL | {"name": None, "gpus": None}, "-F s-V100"),
        (SMALL | {"mail": "a@b.c", "notify": ["end", "fail"]}, "-F s-V100 --mail a@b.c --notify end,fail"),
        ({"partition": "bare", "gpus_per_node": 2, "cpus_per_task": 3, "mem_per_gpu": "4G", "slurm_env": True},
         "-p bare --gpus-per-node 2 -c 3 --mem-per-gpu 4G --slurm-env"),
        ({"partition": "bare", "nodes": "1", "cpus": 1, "priority": -1.0, "hold": 1, "requeue": 0},
         "-p bare -N 1 --cpus 1 --priority -1 --hold --no-requeue"),
        ({"partition": "bare", "nodes": np.int64(1), "cpus": np.int32(1), "exclusive": np.True_, "time": np.float64(2)},
         "-p bare -N 1 --cpus 1 --exclusive -t 2"),
        ({"partition": "bare", "sizes": np.array([1, 2]), "resizable": True}, "-p bare --sizes 1,2 --resizable"),
    ],
)  # fmt: skip
def test_it_asks_for_what_the_command_line_asks_for(
    site: Site, cluster: Cluster, options: Options, words: str | list[str]
) -> None:
    cluster.submit(["true", "it's"], **options)
    ours = submitted(site)
    site.submit(*(words.split() if isinstance(words, str) else words), "--", "true", "it's")
    theirs = submitted(site)
    assert (ours.spec, ours.array, ours.max_running) == (theirs.spec, theirs.array, theirs.max_running)


def test_a_begin_in_the_second_of_two_hours_is_not_in_the_first(
    site: Site, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Europe/Berlin")
        time.tzset()
        cluster.submit(["true"], begin=datetime(2031, 10, 26, 2, 30, fold=1), **SMALL)
    time.tzset()
    assert submitted(site).spec.begin_time == datetime(2031, 10, 26, 1, 30, tzinfo=UTC).timestamp()


def test_every_option_of_submit_can_be_given() -> None:
    # An option that is new in client.request.SubmitRequest belongs into gpusched.api.options.Options, too.
    own = {"python", "modules", "max_running", "result_dir"}
    assert set(Options.__annotations__) - own == set(SubmitRequest.__struct_fields__) - {"command"}
    documented = inspect.cleandoc(Options.__doc__ or "")  # from Python 3.13 on it comes without its indentation
    assert [name for name in Options.__annotations__ if f"\n    {name}: " not in documented] == []


def test_wrong_options_are_rejected_before_anything_is_queued(site: Site, cluster: Cluster) -> None:
    with pytest.raises(TypeError, match="no option 'gpu'; did you mean 'gpus'"):
        cluster.submit("true", gpu=1)  # type: ignore[call-overload]
    for options, said in (
        ({"partition": "nowhere", "gpus": 1}, "nowhere"), ({"flavor": "s-V100", "time": "soon"}, "--time"),
        ({"flavor": "s-V100", "max_running": 2}, "max_running is for arrays"),
        ({"flavor": "s-V100", "python": "python3"}, "python is for functions"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            cluster.submit("true", **options)  # type: ignore[arg-type]
    for name, value in (("array", "0-3"), ("ntasks", 2), ("script", "x")):
        with pytest.raises(UsageError, match=f"(?s){name} is for commands.*(map_array|ntasks_per_node|a command)"):
            cluster.submit(len, "x", **SMALL, **{name: value})  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"(?s)the maximum is 4194304.*pass file paths"):
        cluster.submit(len, os.urandom(4 << 20), **SMALL)
    with pytest.raises(TypeError, match="no further arguments"):
        cluster.submit(["true"], 1, **SMALL)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        cluster.set_priority([], 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dependency: expected a string or jobs"):
        cluster.submit("true", dependency=[3], **SMALL)  # type: ignore[list-item]
    assert site.commands() == []


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"requeue": 2}, TypeError, "requeue: expected bool, found 2"),
        ({"hold": "yes"}, TypeError, "hold: expected bool, found 'yes'"),
        ({"priority": 1.5}, TypeError, "priority: expected int, found 1.5"),
        ({"nodes": True}, TypeError, "nodes: expected int, found True"),
        ({"nodes": "two"}, TypeError, "nodes: expected int, found 'two'"),
        ({"name": 3}, TypeError, "name: expected str, found 3"),
        ({"time": True}, TypeError, "time: expected a value, found True"),
        ({"time": -5}, UsageError, "time: found -5, expected a time that is not negative"),
        ({"time": float("nan")}, UsageError, "time: found nan, expected a time that is not negative"),
        ({"time": float("inf")}, UsageError, "time: found inf, expected a time that is not negative"),
        ({"cooldown": timedelta(hours=-1)}, UsageError, "cooldown: found -1 day, 23:00:00, expected"),
        ({"placement_wait": -0.1}, UsageError, "placement_wait: found -0.1, expected"),
        ({"array": "0-3", "max_running": 1.5}, UsageError, "--array: % must be followed by the number of tasks"),
        ({"nodelist": 5}, TypeError, "nodelist: expected texts, found (5,)"),
        ({"dependency": 5}, TypeError, "dependency: expected a string or jobs, found 5"),
        ({"script": 5}, TypeError, "script: expected its text, found 5"),
    ],
)
def test_a_wrong_value_of_an_option_is_a_one_line_error(
    site: Site, cluster: Cluster, options: Options, error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as raised:
        cluster.submit("true", **{**SMALL, **options})
    assert (str(raised.value)[: len(said)], site.commands()) == (said, [])


def test_a_job_script(site: Site, cluster: Cluster) -> None:
    cluster.submit(["one"], script="#!/bin/sh\necho $1\n", **SMALL)
    spec = site.only_submit().spec
    assert (spec.command, spec.script) == (("one",), "#!/bin/sh\necho $1\n")


def test_a_function_travels_apart_from_what_others_see(site: Site, cluster: Cluster) -> None:
    job = cluster.submit(len, "very private", secret={"TOKEN": "s3cret"}, **SMALL)
    one = submitted(site)
    assert one.id == job.id == job.job_id
    assert (one.spec.name, one.spec.function, one.spec.command[0]) == ("len", "len", "sh")
    assert (one.secrets, one.spec.secret_names) == ({"TOKEN": "s3cret"}, ("TOKEN",))
    assert "private" not in msgspec.json.encode(one.spec).decode()
    assert one.program
    assert not one.task_programs
    jobs = cluster.map_array(divmod, [7, 8, 9], [2, 3, 4], max_running=2, name="dm", **SMALL)
    many = submitted(site)
    assert [j.id for j in jobs] == [f"{many.id}_{i}" for i in range(3)]
    assert (many.array, many.max_running, len(many.task_programs), many.spec.name) == ((0, 1, 2), 2, 3, "dm")
    assert cluster.map_array(len, [], **SMALL) == []


def test_a_functions_tasks_are_numbers_to_its_program(site: Site, cluster: Cluster) -> None:
    """With a text, which the command line takes, the job was started and failed."""
    programs = set()
    for tasks in (2, "2", np.int64(2)):
        cluster.submit(len, "x", partition="bare", nodes=1, cpus=2, ntasks_per_node=tasks)  # type: ignore[call-overload]
        programs.add(submitted(site).program)
    assert len(programs) == 1


def test_the_controller_keeps_a_program_until_its_job_has_ended(site: Site, cluster: Cluster) -> None:
    jobs = cluster.map_array(len, ["a", "bc"], **SMALL)
    single = cluster.submit(len, "def", **SMALL)
    site.apply_inbox()
    programs = SecretFiles(site.state).programs
    store = Store.create_or_open(site.state)
    first, second, third = (store.job(job.id) for job in (*jobs, single))
    assert first and second and third  # noqa: PT018
    texts = [programs.read(job) for job in (first, second, third)]
    assert all(texts)
    assert len(set(texts)) == 3
    assert texts[2] == (programs.of(os.getuid()).read(single.id) or {})[""]
    files = list((site.state / "programs").rglob("*"))
    assert {path.name for path in files} == {str(os.getuid()), f"{first.array_id}.json", f"{single.id}.json"}
    assert not any(path.stat().st_mode & 0o077 for path in files)
    assert b"zlib" not in (site.state / "gpusched.db").read_bytes()
    site.end(single.id)
    site.end(first.id)
    programs.delete_unless(store.has_unended)
    assert programs.read(second) == texts[1]
    assert not programs.of(os.getuid()).has(single.id)
    single.wait(300)
    with pytest.raises(GpuschedError, match="its function is no longer stored; submit it again"):
        cluster.requeue([single])
    Inbox(site.state).deliver(Requeue(time=time.time(), job_ids=(single.id,)))
    site.apply_inbox()
    assert [e.data["why"] for e in store.events() if e.kind == "refused"] == [
        f"job {single.id}: its function was deleted when it ended; submit it again"
    ]
    store.close()


def test_programs_count_as_what_waits(site: Site, cluster: Cluster) -> None:
    text = site.inventory.read_text()
    site.inventory.write_text("settings: {max_queued_size_per_user: 4M}\n" + text)
    jobs = [cluster.submit(len, os.urandom(1_000_000), **SMALL) for _ in range(4)]
    site.apply_inbox()
    for job in jobs[:3]:
        assert job.state == "PENDING"
    with pytest.raises(GpuschedError, match=r"was refused: the pending jobs of .* would take 5 MiB"):
        jobs[3].result(300)


@pytest.mark.parametrize(
    "forged",
    [{"program": ""}, {"function": ""}, {"task_programs": ("x",)}, {"task_programs": ("x", "y"), "array": (1, 2, 3)}],
)
def test_a_forged_program_is_refused(site: Site, cluster: Cluster, forged: dict[str, Any]) -> None:
    cluster.submit(len, "x", **SMALL)
    good = submitted(site)
    spec = msgspec.structs.replace(good.spec, function=forged.pop("function", good.spec.function))
    Inbox(site.state).deliver(msgspec.structs.replace(good, spec=spec, **forged))
    site.apply_inbox()
    store = Store.create_or_open(site.state)
    assert [e.kind for e in store.events(job_id=good.id)] == ["refused_command"]
    store.close()
    assert not (site.state / "programs").exists()


def test_futures_end_with_their_jobs(site: Site, cluster: Cluster) -> None:
    good, bad, out, killed, wide, plain = (
        *(cluster.submit(len, "four", **SMALL) for _ in range(4)),
        cluster.submit(len, "wide", partition="V100", gpus=2, nodes=2),
        cluster.submit("sh -c 'exit 3'", **SMALL),
    )
    everything = (good, bad, out, killed, wide, plain)
    site.apply_inbox()
    assert {job.state for job in everything} == {"PENDING"}
    site.start(good.id)
    assert good.running()
    for job in everything:
        site.change(job.id, attempt=1)
    leave(site, good, 4)
    leave(site, bad, KeyError("k"), "raised", error="KeyError: 'k'", traceback="Traceback: there\n")
    leave(site, wide, 1)
    leave(site, wide, 2, rank=1)
    site.end(good.id)
    done, left = wait(everything, 10, FIRST_COMPLETED)
    assert done == {good}
    assert good.result() == good.results()[0] == 4
    site.end(bad.id, JobState.FAILED, 1, "NonZeroExitCode")
    site.end(out.id, JobState.TIMEOUT, None, "TimeLimit")
    site.end(killed.id, JobState.CANCELLED, None, "Cancelled")
    site.end(wide.id)
    site.end(plain.id, JobState.FAILED, 3, "NonZeroExitCode")
    assert wait(left, 10).not_done == set()
    error = bad.exception()
    assert isinstance(error, KeyError)
    assert "Traceback: there" in str(error.__cause__)
    timeout = out.exception()
    assert isinstance(timeout, JobFailed)
    assert (timeout.state, timeout.returncode, timeout.reason) == ("TIMEOUT", 124, "TimeLimit")
    assert killed.cancelled()
    with pytest.raises(CancelledError):
        killed.result()
    assert wide.results() == [1, 2]
    with pytest.raises(JobFailed, match="ended FAILED") as failed:
        plain.result()
    assert failed.value.returncode == 3
    assert all(job.wait(0) for job in everything)
    # From elsewhere, by its id or a beginning of it, once more by a pickle of it.
    assert cluster.job(good.id).result(300) == pickle.loads(pickle.dumps(good)).result(300) == 4


def test_a_result_that_is_on_its_way_is_waited_for(site: Site, cluster: Cluster) -> None:
    job = cluster.submit(len, "four", **SMALL)
    site.apply_inbox()
    site.start(job.id)
    store = Store.create_or_open(site.state)
    rank = RankRecord(job_id=job.id, attempt=1, rank=0, node="dgx-1v-1", runtime="podman")
    store.put_ranks([rank])
    site.end(job.id)
    with pytest.raises(TimeoutError):
        job.result(0.6)
    leave(site, job, 4)
    store.put_ranks([msgspec.structs.replace(rank, collected=True)])
    assert job.result(300) == 4
    store.close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (MAGIC + b'{"outcome": "raised", "error": "Odd: x", "traceback": "t", "size": 3}\nabc', "COMPLETED .Odd: x."),
        (MAGIC + b'{"outcome": "raised", "error": "Odd: x", "size": 0}\n', "COMPLETED .Odd: x."),
        (b"", "its function left no result"),
        (b"junk", "left no valid function result"),
        (MAGIC + b"[]\n", "left no valid function result"),
        (
            MAGIC + b'{"outcome": "returned", "size": 99999999}\nshort',
            "has 99999999 bytes, more than is collected",
        ),
        (MAGIC + b'{"outcome": "returned", "size": 3, "python": [3, 99]}\nabc', "in Python 3.99, cannot be unpickled"),
        (MAGIC + b'{"outcome": "not run", "error": "too old", "size": 0}\n', "ended COMPLETED .too old."),
    ],
)
def test_an_invalid_result_is_a_one_line_error(site: Site, cluster: Cluster, content: bytes, said: str) -> None:
    job = cluster.submit(len, "four", **SMALL)
    site.apply_inbox()
    site.start(job.id)
    leave(site, job, None)
    result_path(site.state, job.id, 1, 0).write_bytes(content)
    site.end(job.id)
    with pytest.raises(GpuschedError, match=said) as error:
        job.result(300)
    assert "\n" not in error.value.line()


def test_anothers_result_is_not_unpickled(site: Site, cluster: Cluster) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(site.folder / "trapped"),)

    job = cluster.submit(len, "four", **SMALL)
    site.apply_inbox()
    site.start(job.id)
    leave(site, job, Trap())
    site.change(job.id, uid=4711)
    site.end(job.id)
    with pytest.raises(GpuschedError, match="could run code as you"):
        job.result(300)
    assert not (site.folder / "trapped").exists()


def test_a_larger_result_is_read_from_its_folder_checked_and_removed(site: Site, cluster: Cluster) -> None:
    shared = site.folder / "shared"
    site.inventory.write_text(f"settings: {{job_dirs: {shared}}}\n" + site.inventory.read_text())
    data = pickle.dumps("whole")
    header = {"outcome": "returned", "file": "result.1.0.data", "bytes": len(data),
              "sha256": hashlib.sha256(data).hexdigest()}  # fmt: skip
    for folder, content, expected in (
        ("", data, "whole"),
        (str(site.folder / "own"), data, "whole"),
        ("", pickle.dumps("other"), "its digest differs"),
        ("", None, "is no longer in"),
    ):
        job = cluster.submit(len, "four", **SMALL)
        site.apply_inbox()
        site.start(job.id)
        leave(site, job, None, folder=folder, **header)
        store = Store.create_or_open(site.state)
        place = Path(folder) if folder else shared / (store.meta("cluster_id") or "") / job.id
        store.close()
        place.mkdir(parents=True)
        if content is not None:
            (place / "result.1.0.data").write_bytes(content)
        site.end(job.id)
        if expected == "whole":
            assert (job.result(300), job.result(300)) == ("whole", "whole")
            assert os.listdir(place) == []
            with pytest.raises(GpuschedError, match=r"is no longer in .*data"):
                raise cluster.job(job.id).exception(10) or AssertionError
        else:
            with pytest.raises(GpuschedError, match=expected):
                job.result(300)


def test_the_last_lines_of_a_job_that_failed_come_with_its_exception(site: Site, cluster: Cluster) -> None:
    job = cluster.submit("true", **SMALL)
    site.apply_inbox()
    site.start(job.id)
    log = log_path(site.state, job.id, 1, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(f"line {n}\n" for n in range(100)) + "CUDA error\n")
    site.end(job.id, JobState.FAILED)
    failed = job.exception(300)
    assert isinstance(failed, JobFailed)
    assert failed.output.splitlines() == [*(f"line {n}" for n in range(81, 100)), "CUDA error"]
    assert str(failed).endswith("CUDA error")


def test_all_public_names_are_listed_without_being_loaded() -> None:
    code = "import gpusched, sys; print(*dir(gpusched)); print([m for m in sys.modules if m.startswith('gpusched')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, loaded = done.stdout.splitlines()
    assert set(gpusched.api.__all__) <= set(names.split())
    assert loaded == "['gpusched']"


def test_threads_share_a_cluster(site: Site, cluster: Cluster) -> None:
    with ThreadPoolExecutor(4) as threads:
        jobs = list(threads.map(lambda n: cluster.submit(abs, n, **SMALL), range(8)))
        site.apply_inbox()
        assert set(threads.map(lambda job: job.state, jobs)) == {"PENDING"}
        for job in jobs:
            site.start(job.id)
            leave(site, job, 3)
            site.end(job.id)
        assert set(threads.map(lambda job: job.result(300), jobs)) == {3}
    assert len({job.id for job in jobs}) == 8


def test_cancelling(site: Site, cluster: Cluster) -> None:
    job, other = cluster.submit("true", **SMALL), cluster.submit("true", **SMALL)
    assert job.cancel()
    assert (job.cancelled(), job.done()) == (True, True)
    assert job.cancel()
    site.apply_inbox()
    assert job.state == "CANCELLED"
    site.end(other.id)
    assert not other.cancel() or other.done()
    with pytest.raises(GpuschedError, match="has ended"):
        cluster.cancel([other])


@pytest.mark.parametrize("how", ["set_result", "set_exception"])
def test_cancelling_while_it_ends(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """In the program's thread, and in the one that waits for jobs."""
    job = Job[Any](cluster, "0123456789a")
    record = builders.job(state=JobState.COMPLETED, exit_code=0)

    def ends() -> None:
        job._end((record,)) if how == "set_result" else job._refused(GpuschedError("no"))

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "cancel", lambda jobs: ends())
        assert not job.cancel()
    assert not job.cancelled()
    job = Job[Any](cluster, "0123456789a")
    real = getattr(Job, how)

    def cancelled_first(self: Job[Any], *given: object) -> None:
        Future.cancel(self)
        real(self, *given)

    monkeypatch.setattr(Job, how, cancelled_first)
    ends()
    assert job.cancelled()


def test_an_unreadable_result_is_read_again(site: Site, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    looked, real, failed = list[str](), Reader.ended_since, list[int]()

    def looking(reader: Reader, job_id: str) -> list[JobRecord]:
        looked.append(job_id)
        return stored_jobs(reader, job_id)

    def failing(reader: Reader, last: int) -> Any:
        found = real(reader, last)
        if job.id in found[1] and not failed:
            failed.append(1)
            raise GpuschedError("the disk is busy")
        return found

    monkeypatch.setattr(watching, "stored_jobs", looking)
    monkeypatch.setattr(Reader, "ended_since", failing)
    monkeypatch.setattr(watching, "RETRY_S", 0.0)
    monkeypatch.setattr(watching, "REOPEN_S", 1e9)
    monkeypatch.setattr(watching, "MAX_SAMPLED", 0)
    job = cluster.submit("true", **SMALL)
    site.apply_inbox()
    wait_until(lambda: job.id in looked)  # from now on it is looked at again when it has ended
    site.end(job.id)
    assert wait([job], 120).not_done == set()
    assert failed


def test_refusals_end_futures(site: Site, cluster: Cluster) -> None:
    job = cluster.submit("true", priority=0, **SMALL)
    site.inventory.write_text(site.inventory.read_text().replace("s-V100", "other"))
    site.apply_inbox()
    error = job.exception(300)
    assert isinstance(error, GpuschedError)
    assert f"job {job.id} was refused" in str(error)
    with pytest.raises(GpuschedError, match="was refused"):
        job.state  # noqa: B018


def test_an_executor_behaves_as_others_do(site: Site, cluster: Cluster) -> None:
    pool = Executor(cluster, **SMALL, max_running=2)
    job = pool.submit(divmod, 7, 2)
    assert not submitted(site).array
    with pool.batch():
        gathered = [pool.submit(len, "a"), pool.submit(abs, -1)]
        with pytest.raises(UsageError, match="a batch within a batch"), pool.batch():
            pass
    many = submitted(site)
    assert ([j.id for j in gathered], many.max_running) == ([f"{many.id}_0", f"{many.id}_1"], 2)
    with pytest.raises(ValueError, match="chunksize"):
        pool.map(len, ["a"], chunksize=0)
    assert list(pool.map(len, [])) == []
    pool.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(len, "a")
    assert not job.cancelled()


def test_a_batch_that_ends_in_another_thread(site: Site, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, real = Executor(cluster, **SMALL), Job.__init__
    batch = pool.batch()
    batch.__enter__()

    def interrupted(self: Job[Any], *given: Any) -> None:
        real(self, *given)
        if pool._batch is not None:
            batch.__exit__(None, None, None)

    monkeypatch.setattr(Job, "__init__", interrupted)
    assert pool.submit(len, "a").id == site.only_submit().id


def test_an_exception_leaves_an_executor_at_once(site: Site, cluster: Cluster) -> None:
    def leave_it() -> None:
        with Executor(cluster, **SMALL) as pool:
            pool.submit(abs, 1)  # nobody starts it
            with pool.batch():
                pool.submit(len, "never queued")
                raise KeyError

    with pytest.raises(KeyError):
        leave_it()
    assert site.only_submit().spec.function == "abs"


def test_jobs_that_a_failed_batch_did_not_queue_are_cancelled(site: Site, cluster: Cluster) -> None:
    """Otherwise another thread that waits for its futures would wait for ever."""
    pool, made = Executor(cluster, **SMALL), list[Job[Any]]()

    def leave_it(argument: object, error: type[Exception] | None) -> None:
        with pool.batch():
            made.append(pool.submit(len, argument))  # type: ignore[arg-type]
            if error is not None:
                raise error

    with pytest.raises(KeyError):
        leave_it("a", KeyError)
    with pytest.raises(UsageError, match="cannot be pickled"):
        leave_it(sys.stdout, None)
    assert wait(made, 10).not_done == set()
    assert [job.cancelled() for job in made] == [True, True]
    assert site.commands() == []
    pool.shutdown()


def test_shutdown_cancels_what_has_not_started(site: Site, cluster: Cluster) -> None:
    with Executor(cluster, **SMALL) as pool:
        first, second = pool.submit(len, "a"), pool.submit(len, "b")
        site.apply_inbox()
        site.start(first.id)
        pool.shutdown(wait=False, cancel_futures=True)
        assert (first.cancelled(), second.cancelled()) == (False, True)
        leave(site, first, 1)
        site.end(first.id)
    assert first.result(0) == 1


def test_shutdown_cancels_all_by_one_command(site: Site, cluster: Cluster) -> None:
    """For each job the whole inbox was read again: 1,000 jobs took minutes."""
    with Executor(cluster, **SMALL) as pool:
        jobs = [pool.submit(len, "a") for _ in range(3)] + pool.map_array(len, "bc")
        site.apply_inbox()
        pool.shutdown(wait=False, cancel_futures=True)
    assert all(job.cancelled() for job in jobs)
    assert len(list(Inbox(site.state).new.iterdir())) == 1
    site.apply_inbox()
    assert {job.state for job in jobs} == {JobState.CANCELLED}


def test_names_of_submitit() -> None:
    given = {
        "timeout_min": 90, "slurm_partition": "A100", "gpus_per_node": 2, "nodes": 2, "cpus_per_task": 4, "mem_gb": 8,
        "tasks_per_node": 1, "slurm_array_parallelism": 3, "name": "n", "stderr_to_stdout": True,
    }  # fmt: skip
    assert _translated(given) == {
        "time": 90, "partition": "A100", "gpus_per_node": 2, "nodes": 2, "cpus_per_task": 4, "mem_per_node": "8192M",
        "max_running": 3, "name": "n", "ntasks_per_node": None,
    }  # fmt: skip
    assert _translated({"tasks_per_node": 4}) == {"ntasks_per_node": 4}
    pool = Executor(Cluster())
    with pytest.raises(TypeError, match="no option 'slurm_wckey'"):
        pool.update_parameters(slurm_wckey="x")


def test_a_job_of_submitits_goes_on_while_its_state_cannot_be_read(site: Site, cluster: Cluster) -> None:
    from gpusched.integrations import submitit as plugin

    plugin._cluster.cache_clear()
    ids = cluster.submit("true", **SMALL).id, "0" * 11
    made, missing = (plugin.GpuschedJob[int](site.state, job_id) for job_id in ids)
    assert (made.done(), missing.done()) == (False, True)
    site.apply_inbox()
    for _ in range(20):  # as submitit does while it waits
        assert not made.done()
        assert made.state == "PENDING"
    watched = plugin._cluster()._watcher._waiting
    assert not watched  # futures would be kept until its end
    store = site.state / "gpusched.db"
    kept = store.read_bytes()
    store.write_bytes(b"no database" * 1000)
    assert not made.done()
    store.write_bytes(kept)
    plugin._cluster.cache_clear()


def test_a_worker_of_dask_s_whose_job_was_refused_is_replaced_later(site: Site, cluster: Cluster) -> None:
    from distributed.core import Status

    from gpusched.integrations.dask import WorkerJob

    job = cluster.submit("true", **SMALL)
    site.inventory.write_text(site.inventory.read_text().replace("s-V100", "other"))
    site.apply_inbox()
    assert isinstance(job.exception(300), GpuschedError)
    replaced, worker = [], object.__new__(WorkerJob)
    worker.name, worker._job = "w-0", job
    owner = SimpleNamespace(
        workers={"w-0": worker}, worker_spec={"w-0": {}},
        replace_worker=lambda name, at_once: replaced.append((name, at_once)),
    )  # fmt: skip
    worker._cluster = lambda: owner  # type: ignore[attr-defined]
    worker._has_ended()
    assert (worker.status, replaced) == (Status.closed, [("w-0", False)])


def test_a_forked_process_has_futures_of_its_own(site: Site, cluster: Cluster) -> None:
    job = cluster.submit(len, "a", **SMALL)
    site.apply_inbox()  # a thread waits for it, which the other process will lack
    if not (child := os.fork()):
        code = 1
        try:
            code = int(not cluster.job(job.id).wait(120))
        finally:
            os._exit(code)
    site.start(job.id)
    leave(site, job, 1)
    site.end(job.id)
    assert job.result(300) == 1
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_asyncio(site: Site, cluster: Cluster) -> None:
    job, slow = cluster.submit(len, "four", **SMALL), cluster.submit(len, "four", **SMALL)

    async def main() -> tuple[int, list[bool]]:
        ticks = []

        async def tick() -> None:
            while True:
                ticks.append(True)
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        site.apply_inbox()
        site.start(job.id)
        leave(site, job, 4)
        site.end(job.id)
        value = await asyncio.wait_for(job, 300)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slow, 0.05)
        ticking.cancel()
        return value, ticks

    value, ticks = asyncio.run(main())
    assert value == 4
    assert len(ticks) > 1
    assert (slow.done(), slow.state) == (False, "PENDING")  # giving up the wait does not end the job


def test_no_controller_is_a_warning(site: Site) -> None:
    site.apply_inbox(alive=False)
    with pytest.warns(NoController, match="the controller is not running") as warned:
        Cluster().submit("true", **SMALL)
    assert warned[0].filename == __file__


def test_it_looks_at_what_the_commands_show(site: Site, cluster: Cluster) -> None:
    job = cluster.submit(len, "four", name="mine", **SMALL)
    site.apply_inbox()
    assert [j["id"] for j in cluster.jobs()] == [job.id]
    assert cluster.jobs(state="RUNNING") == []
    shown = site.call("show", job.id, "--json").ok().json
    info = job.info()
    assert {k: info[k] for k in ("id", "name", "spec")} == {k: shown[k] for k in ("id", "name", "spec")}
    assert "function:     len (python3)\n" in site.call("show", job.id).ok().out
    assert [n["name"] for n in cluster.nodes()] == [n["name"] for n in site.call("nodes", "--json").ok().json]
    assert cluster.why(job)["job"]["id"] == job.id
    with pytest.raises(UsageError, match="there is no job"):
        cluster.job("zzzzzzz")


def test_slurm_s_jobs_are_left_to_it(site: Site) -> None:
    site.inventory.write_text("engine: slurm\n" + site.inventory.read_text())
    with pytest.raises(UsageError, match="managed by Slurm"):
        Cluster().submit("true", **SMALL)


def test_only_what_changed_is_looked_at(site: Site, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def counted(reader: Reader, job_id: str) -> list[JobRecord]:
        looked.append(job_id)
        return stored_jobs(reader, job_id)

    monkeypatch.setattr(watching, "stored_jobs", counted)
    monkeypatch.setattr(watching, "MAX_SAMPLED", 0)
    jobs = cluster.map_array(abs, range(2000), **SMALL)
    own = {job.id for job in jobs}  # threads of other tests may still wait for theirs
    wait_until(lambda: own <= set(looked))
    assert len([job_id for job_id in looked if job_id in own]) == 2000, "each once"
    site.apply_inbox()
    looked.clear()
    for job in jobs[:3]:
        site.start(job.id)
        site.end(job.id, JobState.TIMEOUT)
    assert wait(jobs[:3], 300).not_done == set()
    assert own & set(looked) == {job.id for job in jobs[:3]}
    assert not any(job.done() for job in jobs[3:])


def test_of_an_array_only_the_named_task_is_read(
    site: Site, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each task the whole array was: to list 10,000 tasks took 20 minutes."""
    jobs, asked, rows_of = cluster.map_array(len, "abc", **SMALL), list[str](), Reader.rows_of
    site.apply_inbox()
    monkeypatch.setattr(Reader, "rows_of", lambda reader, job_id: asked.append(job_id) or rows_of(reader, job_id))
    assert jobs[1].state is JobState.PENDING
    assert asked
    assert jobs[1].id.partition("_")[0] not in asked


def test_an_end_is_not_compared_with_every_task_that_is_waited_for() -> None:
    """An array of 100,000 tasks took a quarter of an hour of CPU time in its user's program."""

    class Waiting(dict[str, list[Job[Any]]]):
        def __iter__(self) -> Any:
            raise AssertionError

    watcher = watching.Watcher(gpusched.client.context.Client)
    watcher._waiting = {"a": Waiting(a_1=[], a_2=[]), "b": Waiting(b=[])}
    assert watcher._affected(["a_2", "a_3", "b_7", "c"]) == {"a_2", "b"}
    assert watcher._affected(["a"]) == {"a_1", "a_2"}


def test_jobs_that_ended_between_two_polls_complete_in_order_of_their_ends(site: Site, cluster: Cluster) -> None:
    jobs = [cluster.submit("true", **SMALL) for _ in range(8)]
    done: list[str] = []
    for job in jobs:
        job.add_done_callback(lambda future: done.append(future.id))
    site.apply_inbox()
    store = Store.create_or_open(site.state)
    now = time.time()
    order = [jobs[i] for i in (5, 2, 7, 0, 6, 1, 3, 4)]
    records = {job.id: store.job(job.id) for job in jobs}
    ended = [
        msgspec.structs.replace(records[job.id], state=JobState.COMPLETED, exit_code=0, end_time=now + place)
        for place, job in enumerate(order)
    ]
    with store.transaction():
        store.put_jobs(sorted(ended, key=lambda job: job.id))
        store.append([Event(time=now, kind="ended", job_id=job.id) for job in ended])
    store.close()
    assert wait(jobs, 300).not_done == set()
    assert done == [job.id for job in order]


LIGHT = """
import sys
import gpusched
assert not [name for name in sys.modules if name.startswith("gpusched.")], sys.modules.keys()
assert "typing" not in sys.modules
from gpusched import Cluster
heavy = ("numpy", "numba", "paramiko", "torch", "typer", "rich", "asyncio", "cloudpickle")
print([name for name in heavy if name in sys.modules])
"""


def test_importing_is_quick() -> None:
    done = subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path = {sys.path!r}\n{LIGHT}"], text=True,
                          capture_output=True, check=True, cwd="/")  # fmt: skip
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'Clusters'"):
        gpusched.Clusters  # type: ignore[attr-defined]  # noqa: B018
