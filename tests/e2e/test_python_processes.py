"""`from gpusched import Cluster` with plain processes, as what is tried here is the same with every runtime."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpusched
from gpusched import Again, Executor, JobFailed, Options
from tests.e2e.conftest import Cluster, functions
from tests.e2e.people import NOBODY, nobody
from tests.testbed import Testbed, wait_until

pytestmark = [pytest.mark.one_partition, pytest.mark.processes, functions]

PATIENCE_S = 300


def square(number: int, plus: int = 0) -> int:
    return number * number + plus


def files() -> list[str]:
    return sorted(os.listdir(os.environ["GPUSCHED_JOB_DIR"]))


def sleeping() -> None:
    time.sleep(9999)


@pytest.fixture
def python(house: Cluster) -> gpusched.Cluster:
    """The cluster as a Python program has it."""
    return gpusched.Cluster(state=house.state, inventory=house.inventory)


def test_an_executor(python: gpusched.Cluster, tmp_path: Path) -> None:
    with Executor(python, partition="A100", gpus=1, time="10m") as pool:
        assert list(pool.map(square, [1, 2, 3, 4, 5], chunksize=2, timeout=PATIENCE_S)) == [1, 4, 9, 16, 25]
        named = pool.submit(square, 3, plus=1)
        pool.update_parameters(output=str(tmp_path / "%j.txt"), timeout_min=5)
        with pool.batch():
            batched = [pool.submit(square, 4), pool.submit(files)]
    assert named.result(0) == 10
    assert batched[0].result(0) == 16
    assert batched[1].id.endswith("_1")
    # Its own program only: that of the other task is in another folder, and neither is left behind.
    assert batched[1].result(0) == ["program.1.0.py"]


def test_awaited(python: gpusched.Cluster) -> None:
    async def both() -> tuple[int, int, str]:
        first, second = (python.submit(square, n, partition="A100", gpus=1) for n in (6, 7))
        slow = python.submit(sleeping, partition="A100", gpus=1)
        values = await asyncio.wait_for(asyncio.gather(first, second), PATIENCE_S)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slow, 0.01)
        state = slow.state
        slow.cancel()
        return values[0], values[1], state

    *values, state = asyncio.run(both())
    assert (values, state in ("PENDING", "STARTING", "RUNNING")) == ([36, 49], True)


def second_time() -> str:
    if os.environ["GPUSCHED_ATTEMPT"] == "1":
        time.sleep(9999)
    return os.environ["GPUSCHED_ATTEMPT"]


def test_another_attempt_beside_another_controller(house: Cluster, python: gpusched.Cluster) -> None:
    job = python.submit(second_time, partition="A100", gpus=1)
    wait_until(job.running, PATIENCE_S, "its first attempt")
    python.requeue([job])
    house.kill_controller()
    house.start_controller()
    assert job.result(PATIENCE_S) == "2"


def test_commands(python: gpusched.Cluster) -> None:
    good = python.submit("sh -c 'echo \"$WORD\"'", partition="A100", gpus=1, env={"WORD": "it's"})
    bad = python.submit(["sh", "-c", "exit 3"], partition="A100", gpus=1)
    tasks = python.submit(["sh", "-c", "exit $GPUSCHED_ARRAY_INDEX"], partition="A100", gpus=1, array=range(2))
    assert good.result(PATIENCE_S) == 0
    assert good.output() == "it's\n"
    with pytest.raises(JobFailed, match="exited with 3"):
        bad.result(PATIENCE_S)
    assert isinstance(tasks.exception(PATIENCE_S), JobFailed)
    assert [task.wait(PATIENCE_S) and str(task.state) for task in tasks.tasks] == ["COMPLETED", "FAILED"]
    assert tasks.state == "FAILED"


class Training:
    """Go on from its checkpoint; the first start waits for the checkpoint request."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch

    def __call__(self, up: str) -> tuple[int, str, str]:
        if not self.epoch:
            Path(up).touch()
            sleeping()
        return self.epoch, os.environ["SLURM_RESTART_COUNT"], os.environ["WORLD_SIZE"]

    def checkpoint(self, up: str) -> Again:
        print("saving")
        return Again(Training(7), up)


@pytest.mark.parametrize("asked", ["its own limit", "a requeue", "a cancel"])
def test_a_checkpoint_brings_the_job_back_unless_it_is_cancelled(
    python: gpusched.Cluster, share: Path, asked: str
) -> None:
    more: Options = {"signal": "USR1@3645", "time": "61m"} if asked == "its own limit" else {}
    up = share / "up"
    job = python.submit(Training(), str(up), partition="A100", nodes=1, gpus=1, result_dir=share, **more)
    wait_until(up.exists, PATIENCE_S, "its first start")
    if asked == "a cancel":
        job.cancel()
        wait_until(lambda: job.state == "CANCELLED", PATIENCE_S, "its end")
        assert "was cancelled" in job.output()
        return
    if asked == "a requeue":
        python.requeue([job])
    assert job.result(PATIENCE_S) == (7, "1", "1")
    assert os.listdir(share) == ["up"]


def large() -> tuple[str, bytes]:
    return os.environ["RANK"], os.environ["RANK"].encode() * (3 << 20)


def test_tasks_on_two_nodes_return_more_than_is_collected(house: Cluster, share: Path) -> None:
    house.write_inventory({"logs": {"max_per_job": "1M"}})  # the controller's own limit does not matter
    python = gpusched.Cluster(state=house.state, inventory=house.inventory)
    job = python.submit(large, partition="A100", nodes=2, gpus_per_node=2, ntasks_per_node=2, result_dir=share)
    assert [(rank, len(data)) for rank, data in job.results(PATIENCE_S)] == [(str(n), 3 << 20) for n in range(4)]
    assert os.listdir(share) == []
    logs = house.state / "logs" / job.id
    assert max(path.stat().st_size for path in logs.iterdir()) < 10_000
    house.write_inventory()


@pytest.fixture
def shared(testbed: Testbed) -> Iterator[Cluster]:
    """An installation for many users, of plain processes."""
    folder = Path(tempfile.mkdtemp(prefix="gpusched-e2e-", dir="/tmp"))
    folder.chmod(0o755)
    cluster = Cluster(testbed, folder, ("A100",))
    cluster.runtime = "process"
    cluster.write_inventory({"shared": True})
    cluster.start_controller()
    yield cluster
    cluster.close()
    shutil.rmtree(folder)


HOSTILE = """
import os
from gpusched import Cluster
def linked():
    folder = os.environ["GPUSCHED_JOB_DIR"]
    os.symlink("/etc/hostname", folder + "/result.1.0")
    os._exit(0)
def who():
    import sys
    return os.getuid(), os.environ["GPUSCHED_USER"], os.stat(sys.argv[0]).st_uid
job = Cluster().submit(who, partition="A100", gpus=1, workdir="/tmp")
link = Cluster().submit(linked, partition="A100", gpus=1, workdir="/tmp")
print(job.result(90), link.exception(90))
print(job.id, link.id)
"""


def test_a_result_is_its_users_own(shared: Cluster) -> None:
    done = subprocess.run(
        [*nobody(), sys.executable, "-c", HOSTILE], env=shared.env(HOME="/nonexistent"), cwd="/", capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    said, named = done.stdout.splitlines()
    job, link = named.split()
    assert said == f"({NOBODY}, 'nobody', {NOBODY}) job {link} ended COMPLETED (its function left no result)"
    assert (shared.state / "logs" / link / "1.0.result").read_bytes() == b""
    left = shared.state / "logs" / job / "1.0.result"
    assert (left.stat().st_uid, left.stat().st_mode & 0o007) == (0, 0)
    plain = ("setpriv", "--regid", str(NOBODY), "--clear-groups", "--reuid")
    read = [subprocess.run([*plain, uid, "cat", left], check=False, capture_output=True) for uid in ("65534", "99")]
    assert [r.returncode for r in read] == [0, 1]
    # Root could read it, and is not made to run it.
    with pytest.raises(gpusched.GpuschedError, match="belongs to nobody: its result could run code as you"):
        gpusched.Cluster(state=shared.state, inventory=shared.inventory).job(job).result(9)
    shared.wait_clean()
    kept = shared.state / "programs" / str(NOBODY)
    assert [path.stat().st_mode & 0o077 for path in (kept, *kept.iterdir())] == [0, 0, 0]
