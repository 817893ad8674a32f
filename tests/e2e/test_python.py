"""`from gpusched import Cluster`: functions as jobs in containers, and what they return."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, as_completed

import pytest

import gpusched
from gpusched import JobFailed, Options
from tests.e2e.conftest import Cluster, functions
from tests.testbed import wait_until

pytestmark = pytest.mark.one_partition
IN_IMAGE: Options = {
    "partition": "A100", "gpus": 1, "python": "/usr/bin/python3", "env": {"PYTHONHOME": "/usr"},
    "mount": ("/usr:/usr:ro", "/usr/lib:/lib:ro", "/usr/lib64:/lib64:ro"),
}  # fmt: skip
"""The testbed's image has no Python; by these mounts it has the machine's."""
PATIENCE_S = 300


class Odd(Exception):
    """Has no way back from its pickle but that of its class, which the image does not have."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(what, number)
        self.number = number


def raising(number: int) -> None:
    raise Odd("not even", number)


def square(number: int, plus: int = 0) -> int:
    return number * number + plus


def where() -> tuple[str, str, list[str]]:
    print("on", os.environ["GPUSCHED_NODE"])
    return os.environ["NODE_RANK"], os.environ["GPUSCHED_NODE"], sorted(os.listdir(os.environ["GPUSCHED_JOB_DIR"]))


def sleeping() -> None:
    time.sleep(9999)


@pytest.fixture
def python(house: Cluster) -> gpusched.Cluster:
    """The cluster as a Python program has it."""
    return gpusched.Cluster(state=house.state, inventory=house.inventory)


@functions
def test_functions_in_containers(
    house: Cluster, python: gpusched.Cluster, record_property: Callable[[str, object], None]
) -> None:
    began = time.monotonic()
    assert python.submit(square, 2, **IN_IMAGE).result(PATIENCE_S) == 4
    took = time.monotonic() - began
    record_property("figure", f"a function in a container: {took:.1f} s from submit to its result")
    # All at once: the testbed has room for them.
    answer = python.submit(lambda: 6 * 7, **IN_IMAGE)
    large = python.submit(lambda: os.urandom(8) * 500_000, **IN_IMAGE)
    wrong = python.submit(raising, 3, **IN_IMAGE)
    gang = python.submit(where, **IN_IMAGE | {"nodes": 2, "gpus": 2})
    squares = python.map_array(square, range(4), [1] * 4, **IN_IMAGE, max_running=2)
    bare = python.submit(square, 2, partition="A100", gpus=1)
    slow = python.submit(sleeping, **IN_IMAGE)
    after = python.submit(square, 5, dependency=[answer, *squares], **IN_IMAGE)

    assert answer.result(PATIENCE_S) == 42
    value = large.result(PATIENCE_S)
    assert (len(value), value) == (4_000_000, value[:8] * 500_000)
    with pytest.raises(Odd, match="not even") as raised:
        wrong.result(PATIENCE_S)
    assert raised.value.number == 3
    assert "raise Odd" in str(raised.value.__cause__)
    assert "raise Odd" in wrong.output()
    assert wrong.state == "FAILED"
    ranks = gang.results(PATIENCE_S)
    assert [(rank, node) for rank, node, _ in ranks] == [("0", "dgx001"), ("1", "dgx003")]
    assert gang.output() == "[0] on dgx001\n[1] on dgx003\n"
    assert sorted(job.result() for job in as_completed(squares, PATIENCE_S)) == [1, 2, 5, 10]
    assert [job.id for job in squares] == [f"{squares[0].id[:-2]}_{i}" for i in range(4)]
    assert after.result(PATIENCE_S) == 25
    with pytest.raises(JobFailed, match="no python3 here: use an image with Python") as failed:
        bare.result(PATIENCE_S)
    assert (failed.value.state, failed.value.returncode) == ("FAILED", 127)

    wait_until(slow.running, PATIENCE_S, "the sleeper to run")
    assert slow.cancel()
    with pytest.raises(CancelledError):
        slow.result(0)
    wait_until(lambda: slow.state == "CANCELLED", PATIENCE_S, "its end")
    assert not slow.cancel() or slow.cancelled()
    # By the id another program gets the same result; the command line shows the same job.
    program = f"from gpusched import Cluster; print(Cluster().job({answer.id!r}).result(9))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=house.env(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == "42\n"
    shown = house.json("show", answer.id)
    assert (shown["name"], shown["spec"]["function"]) == (
        "lambda",
        f"{__name__}.test_functions_in_containers.<locals>.<lambda>",
    )
