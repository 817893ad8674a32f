"""An attempt with its output on a node."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from gpusched.model.jobs import JobState, container_name
from gpusched.model.resources import RuntimeName
from gpusched.nodes.local import LocalTransport
from gpusched.nodes.runtimes import LaunchRequest, runtime_for
from gpusched.queue.store import RankRecord
from tests.cli.nodes.conftest import Cluster, job, spec

ID = "0ddddddddda"


class Attempt:
    """A job of the process runtime as the controller would have launched it."""

    def __init__(self, cluster: Cluster, command: str, **fields: Any) -> None:
        self.cluster = cluster
        self.job = job(ID, JobState.RUNNING, {"here": (0,)}, spec=spec("x", 1, 1, "local", **fields))
        cluster.store.put_jobs([self.job])
        cluster.store.put_ranks([RankRecord(job_id=ID, attempt=1, rank=0, node="here", runtime="process")])
        self.runtime, self.transport = runtime_for(RuntimeName.PROCESS), LocalTransport("here")
        self.request = LaunchRequest(
            name=container_name(ID, 1, 0), cluster_id=cluster.store.meta("cluster_id") or "", node="here", job_id=ID,
            attempt=1, rank=0, command=("sh", "-c", command), cores=1, memory_mib=64, env={"COLOUR": "blue"},
        )  # fmt: skip
        result = self.transport.run(self.runtime.launch(self.request), 20)
        assert result.stdout.strip() == b"launched", result

    def end(self, state: JobState, exit_code: int | None) -> None:
        done = msgspec.structs.replace(self.job, state=state, exit_code=exit_code, end_time=time.time())
        self.cluster.store.put_jobs([done])

    def remove(self) -> None:
        self.transport.run(self.runtime.remove(self.request.ref), 20)
