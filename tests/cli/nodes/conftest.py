"""A state folder with four nodes and a few jobs, written with `Store` as the controller would."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from gpusched.model.jobs import JobRecord, JobSpec, JobState
from gpusched.model.readings import Gpu, GpuProcess, NodeReading, NodeState
from gpusched.queue.store import NodeRecord, RankRecord, RunRecord, Store, UsageRow
from tests import builders, commands

JOB_A, JOB_B = "0aaaaaaaaaa", "0bbbbbbbbbb"
INVENTORY = """\
settings: {power_price: 0.25 EUR/kWh}
partitions:
  A100:
    defaults: {gpus: 8, cores: 256, memory: 1024G, rated_power: 6.5kW, gpu_type: A100, runtime: podman}
    nodes: [{name: dgx1, address: 127.0.0.1, port: 9}, {name: dgx2, address: 127.0.0.3, port: 9}]
    flavors:
      s-A100: {gpus: 2, cores: 64, memory: 256G, time: 72h}
      f-A100: {gpus: 16, cores: 512, memory: 2048G, time: 504h}
  local:
    defaults: {gpus: 2, cores: 8, memory: 16G, runtime: process}
    nodes: [{name: here, transport: local}, {name: gone, address: 127.0.0.2}]
    flavors:
      one: {gpus: 1, cores: 1, memory: 1G, time: 1h}
"""


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # EIO: the other side is closed
        return b""


class Cluster:
    """The folders, and ``gpusched`` run on them."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.inventory = folder / "inventory.yaml"
        self.inventory.write_text(INVENTORY)
        self.store = Store.create_or_open(self.state)

    def env(self, **more: str) -> dict[str, str]:
        return os.environ | {"GPUSCHED_STATE": str(self.state), "GPUSCHED_INVENTORY": str(self.inventory)} | more

    def run(self, *argv: str, code: int | None = 0, input: str = "") -> subprocess.CompletedProcess[str]:
        done = commands.run(*argv, env=self.env(), input=input)
        assert code is None or done.returncode == code, done
        return done

    def screen(self, *argv: str, columns: int) -> str:
        """Return the screen of a terminal of that width, without colours."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        environment = {k: v for k, v in self.env(TERM="xterm").items() if k not in ("COLUMNS", "LINES")}
        process = subprocess.Popen(
            [sys.executable, "-m", "gpusched.cli.main", *argv], env=environment,
            stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE,
        )  # fmt: skip
        os.close(theirs)
        shown = b"".join(iter(lambda: _read(ours), b""))
        os.close(ours)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n")

    def age(self) -> None:
        """As if nobody had written the store for an hour."""
        for name in ("gpusched.db", "gpusched.db-wal"):
            os.utime(self.state / name, (time.time() - 3600,) * 2)

    def json(self, *argv: str, code: int = 0) -> Any:
        return json.loads(self.run(*argv, "--json", code=code).stdout)

    def beat(self) -> None:
        self.store.set_meta("heartbeat", str(time.time()))
        self.store.set_meta("tick_s", "5")


def spec(name: str, nodes: int, gpus: int, partition: str = "A100", **fields: Any) -> JobSpec:
    return JobSpec(
        name=name, partition=partition, nodes=nodes, gpus_per_node=gpus, cores_per_node=64,
        memory_mib_per_node=262144, time_limit_s=3600, **fields,
    )  # fmt: skip


def job(job_id: str, state: JobState, parts: dict[str, tuple[int, ...]], **fields: Any) -> JobRecord:
    given = {
        "user": "ann", "uid": os.getuid(), "submit_time": time.time() - 9000, "start_time": time.time() - 8000,
        "allocation": builders.allocation(job_id, parts, cores=64, memory_mib=262144),
        "spec": spec("train", max(1, len(parts)), len(next(iter(parts.values()), ()))),
    }  # fmt: skip
    return builders.job(job_id, state, **given | fields)


def gpu(index: int, **fields: Any) -> Gpu:
    return Gpu(**({
        "index": index, "uuid": f"GPU-{index}", "name": "NVIDIA A100-SXM4-80GB", "memory_total_mib": 81920,
        "memory_used_mib": 500, "utilization_pct": 0.0, "power_w": 60.0, "power_limit_w": 400.0, "temperature_c": 33,
        "energy_j": 1e9, "ecc_errors": 0, "mig_mode": False,
    } | fields))  # fmt: skip


def busy(index: int, job_id: str, use: float) -> Gpu:
    own = GpuProcess(pid=100 + index, user="ann", command="python train.py", container=f"gpusched-{job_id}-1-0")
    figures = {"utilization_pct": use, "power_w": 60 + 3.4 * use, "memory_used_mib": 70000, "temperature_c": 66}
    return gpu(index, processes=(own,), **figures)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """No node was read, nothing was submitted, no controller ran."""
    return Cluster(tmp_path)


@pytest.fixture
def living(cluster: Cluster) -> Cluster:
    """dgx1: a job on 0-3, a foreign process, a lost GPU; dgx2: idle; here: simulated; gone: down."""
    now = time.time()
    foreign = GpuProcess(pid=4711, user="alice", command="python x.py", memory_used_mib=9000)
    dgx1 = (
        *(busy(i, JOB_A, u) for i, u in enumerate((97.0, 95.0, 60.0, 2.0))),
        gpu(4, processes=(foreign,), memory_used_mib=9000, utilization_pct=40.0),
        Gpu(index=5, error="GPU is lost"),
        gpu(6),
        gpu(7, utilization_pct=None, power_w=None, temperature_c=None),
    )
    cluster.beat()
    cluster.store.put_jobs([
        job(JOB_A, JobState.RUNNING, {"dgx1": (0, 1, 2, 3)}),
        job(JOB_B, JobState.RUNNING, {"here": (0,)}, user="bob", spec=spec("idle", 1, 1, "local")),
    ])  # fmt: skip
    cluster.store.put_nodes([
        NodeRecord(name="dgx1", state=NodeState.MIXED, last_seen=now, reading=reading("dgx1", now, dgx1)),
        NodeRecord(name="dgx2", state=NodeState.IDLE, last_seen=now,
                   reading=reading("dgx2", now, tuple(gpu(i) for i in range(8)), clock_skew_s=-7.25)),
        NodeRecord(name="here", state=NodeState.MIXED, last_seen=now,
                   reading=reading("here", now, (busy(0, JOB_B, 50.0), gpu(1)), source="simulated")),
        NodeRecord(name="gone", state=NodeState.DOWN, reason="no answer since 5 min: timed out", last_seen=now - 300,
                   down_since=now - 300, reading=reading("gone", now - 300, (gpu(0), gpu(1)))),
    ])  # fmt: skip
    cluster.store.put_ranks([
        RankRecord(job_id=JOB_A, attempt=1, rank=0, node="dgx1", runtime="podman", gpus=(0, 1, 2, 3)),
        RankRecord(job_id="0cccccccccc", attempt=2, rank=0, node="dgx2", runtime="podman", gpus=(7,)),
    ])  # fmt: skip
    return cluster


def reading(node: str, now: float, gpus: tuple[Gpu, ...], **fields: Any) -> NodeReading:
    return NodeReading(**({"node": node, "time": now, "source": "nvml", "gpus": gpus, "clock_skew_s": 0.01} | fields))


@pytest.fixture
def used(living: Cluster) -> Cluster:
    """Two hours of usage: ann on four GPUs of dgx1 (busy), bob on one of here (idle), the rest nobody's."""
    now = time.time()
    begin = int((now - 7200) // 300) * 300
    with living.store.transaction():
        for job_id, user, nodes, share, partition in (
            (JOB_A, "ann", {"dgx1": 4}, 0.25, "A100"), (JOB_B, "bob", {"here": 1}, 0.25, "local"),
        ):  # fmt: skip
            living.store.open_run(RunRecord(
                job_id=job_id, attempt=1, user=user, partition=partition, flavor=None, share=share,
                gpus=sum(nodes.values()), start_time=now - 7200, end_time=None, outcome=None, nodes=nodes,
            ))  # fmt: skip
        for bucket in range(begin, int(now), 300):
            span = min(300.0, now - bucket)
            living.store.add_usage([
                usage(bucket, "dgx1", 4, span, 350, 0.8, JOB_A, "ann"), usage(bucket, "dgx1", 4, span, 60, 0.0),
                usage(bucket, "dgx2", 8, span, 60, 0.0),
                usage(bucket, "here", 1, span, 60, 0.0, JOB_B, "bob", partition="local"),
                usage(bucket, "here", 1, span, None, None, partition="local"),
            ])  # fmt: skip
    return living


def usage(
    bucket: int, node: str, gpus: int, span: float, watts: float | None, use: float | None, job_id: str = "",
    user: str = "", partition: str = "A100",
) -> UsageRow:  # fmt: skip
    seconds, idle = gpus * span, float(use == 0.0)
    return UsageRow(
        bucket=bucket, node=node, job_id=job_id, user=user, partition=partition, gpu_s=seconds,
        energy_j=seconds * (watts or 0.0), energy_unknown_s=0.0 if watts is not None else seconds,
        util_s=seconds * (use or 0.0), util_known_s=0.0 if use is None else seconds,
        idle_s=idle * seconds, idle_energy_j=idle * seconds * (watts or 0.0),
    )  # fmt: skip
