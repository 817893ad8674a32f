"""The types of `gpusched`'s public names: read by mypy --strict, never run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, assert_type

from gpusched import Cluster, Executor, Job, JobState, Options


def train(rate: float, epochs: int = 1) -> dict[str, float]:
    return {"loss": rate / epochs}


async def everything(cluster: Cluster) -> None:
    job = cluster.submit(train, 3e-4, gpus=2, time=timedelta(hours=4), env={"A": "b"})
    assert_type(job, Job[dict[str, float]])
    assert_type(job.result(), dict[str, float])
    assert_type(await job, dict[str, float])
    assert_type(job.state, JobState)
    assert_type(job.exception(1), BaseException | None)
    assert_type(cluster.map_array(train, [1e-3], [2]), list[Job[dict[str, float]]])
    assert_type(cluster.submit(["true"], nodes=2), Job[int])
    assert_type(cluster.submit("true", dependency=[job], mount={"/a": "/b"}).result(), int)
    assert_type(cluster.job("1qe"), Job[Any])
    options: Options = {"gpus": 1, "nodelist": ["dgx1"]}
    cluster.submit(train, 1.0, **options)
    cluster.submit(train, 1.0, gpu=1)  # type: ignore[call-overload]
    cluster.submit(train, 1.0, gpus=1.5)  # type: ignore[call-overload]
    cluster.submit(3)  # type: ignore[call-overload]
    with Executor(cluster, **options) as pool:
        assert_type(pool.submit(train, 1.0, epochs=3), Job[dict[str, float]])
        assert_type(pool.map(train, [1.0], chunksize=2), Iterator[dict[str, float]])
        future: Future[dict[str, float]] = pool.submit(train, 1.0)
        future.add_done_callback(print)
