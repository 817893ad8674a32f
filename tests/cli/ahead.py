"""A cluster on which commands look ahead."""

from __future__ import annotations

import time
from typing import Any

from gpusched.config.inventory import load_inventory
from gpusched.config.users import user_name
from gpusched.model.jobs import Allocation, JobState, NodeAllocation
from gpusched.model.readings import Gpu, NodeReading, NodeState
from gpusched.queue.store import NodeRecord, Store
from tests.cli.conftest import Site

HOUR = 3600.0


INVENTORY = """\
settings: {tick: 5s}
defaults: {runtime: process, gpus: 8, cores: 64, memory: 512G}
partitions:
  A100: {policy: easy, nodes: [a1, a2], flavors: {all: {gpus: 16, cores: 128, memory: 1024G, time: 72h}}}
  V100: {policy: fifo, nodes: [v1], flavors: {all: {gpus: 8, cores: 64, memory: 512G, time: 72h}}}
"""


class Cluster:
    """A site whose nodes have answered, with jobs put on them."""

    def __init__(self, site: Site) -> None:
        self.site = site
        site.inventory.write_text(INVENTORY)
        site.apply_inbox()
        self.well()

    def well(self, *away: str) -> None:
        """All nodes have answered and are well; those named are drained."""
        store = Store.create_or_open(self.site.state)
        for node in load_inventory(self.site.inventory).nodes:
            gpus = tuple(
                Gpu(index=i, uuid=f"{node.name}-{i}", memory_total_mib=40_000) for i in node.indices()
            )  # fmt: skip
            reading = NodeReading(node=node.name, time=time.time(), source="nvml", gpus=gpus, containers=())
            state, reason = (NodeState.DRAINED, "fan") if node.name in away else (NodeState.IDLE, "")
            store.put_nodes([NodeRecord(name=node.name, state=state, reason=reason, last_seen=1.0, reading=reading)])
        store.close()

    def wait(self, gpus: int, limit: str = "1h", *options: str, partition: str = "A100") -> str:
        """A job in the queue."""
        job = self.site.submit("-p", partition, "--gpus", str(gpus), "-t", limit, *options, "--", "x")
        self.site.apply_inbox()
        return job

    def run(self, node: str, gpus: int, ran_h: float, limit: str) -> str:
        """A job that has run for so many hours."""
        job = self.wait(gpus, limit, partition=node[0].upper() + "100")
        spec = self.site.change(job).spec
        part = NodeAllocation(
            rank=0, node=node, gpus=tuple(range(gpus)), cores=spec.cores_per_node, memory_mib=spec.memory_mib_per_node
        )
        began, place = time.time() - ran_h * HOUR, Allocation(job, (part,))
        self.site.change(job, state=JobState.RUNNING, start_time=began, attempt=1, allocation=place)
        return job

    def past(self, hours: list[float], user: str = "") -> None:
        """Ended runs of so many hours."""
        name, now = user or user_name(0), time.time() - 99 * HOUR
        for ran_h in hours:
            job = self.wait(8, "10h", partition="V100")
            times = {"submit_time": now, "start_time": now, "end_time": now + ran_h * HOUR}
            self.site.change(job, state=JobState.COMPLETED, user=name, **times)

    def why(self, job: str) -> dict[str, Any]:
        answer = self.site.call("why", "--json", job).ok().json
        assert isinstance(answer, dict)
        return answer
