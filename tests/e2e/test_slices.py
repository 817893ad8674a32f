"""MIG slices as users have them: jobs in slices that are there, and in slices that are cut for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster
from tests.testbed import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.one_partition]

CORES = {"dgx001": {"cores": 64}}
"""A slice has a seventh of its GPU's cores."""
SHOW_GPUS = "echo $CUDA_VISIBLE_DEVICES $GPUSCHED_GPUS; until [ -e /share/$GPUSCHED_JOB_NAME ]; do sleep 0.1; done"


def uuids(cluster: Cluster, node: str, gpu: int) -> dict[int, str]:
    """Start of each slice of a GPU -> its UUID, as the node has them."""
    with cluster.reader() as reader:
        assert reader is not None
        reading = reader.node_records()[node].reading
    assert reading is not None
    return {one.start: one.uuid or "" for one in reading.gpus[gpu].slices}


NVML = """
import ctypes, os
nvml = ctypes.CDLL("libnvidia-ml.so.1")
nvml.nvmlInit_v2()
device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
for uuid in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
    assert nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) == 0
    name = ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetName(device, name, 96)
    nvml.nvmlDeviceGetMemoryInfo(device, memory)
    print(name.value.decode(), memory[0] >> 20)
"""


@pytest.mark.processes
def test_nvml_knows_the_devices_that_a_job_sees(stopped: Cluster) -> None:
    stopped.node("dgx001").cut_gpu(3, "1g.10gb:0", "2g.20gb:2", "2g.20gb:4")
    stopped.write_inventory(nodes=CORES, leave_out=["dgx003"])
    stopped.start_controller()
    job = stopped.submit("--gpus", "2g.20gb:2", command=("/usr/bin/python3", "-c", NVML))
    stopped.wait_state(job, "COMPLETED")
    assert stopped.logs(job).splitlines() == ["NVIDIA A100-SXM4-80GB MIG 2g.20gb 19968"] * 2


@pytest.mark.processes
def test_jobs_have_slices_of_their_own(stopped: Cluster, share: Path) -> None:
    stopped.node("dgx001").cut_gpu(3, "1g.10gb:0", "1g.10gb:1", "3g.40gb:4")
    stopped.write_inventory(nodes=CORES)
    stopped.start_controller()
    names = ("a", "b", "c")
    jobs = [stopped.shared(SHOW_GPUS, share, "--gpus", "1g.10gb", "-J", name) for name in names]
    for job in jobs[:2]:
        stopped.wait_state(job, "RUNNING")
    there = uuids(stopped, "dgx001", 3)
    assert set(there) == {0, 1, 4}
    said = [wait_until(lambda job=job: stopped.logs(job).split(), what="its output") for job in jobs[:2]]
    assert sorted(said) == sorted([there[start], f"3:1g.10gb@{start}"] for start in (0, 1))
    wait_until(lambda: (found := stopped.job(jobs[2])) and found.reason, what="why the third waits")
    assert stopped.state_of(jobs[2]) == "PENDING"
    big = stopped.shared(SHOW_GPUS, share, "--gpus", "3g.40gb", "-J", "big")
    whole = stopped.shared(SHOW_GPUS, share, "--gpus", "8", "--nodelist", "dgx003", "-J", "whole")
    for job in (big, whole):
        stopped.wait_state(job, "RUNNING")
    assert wait_until(lambda: stopped.logs(big).split(), what="its output")[0] == there[4]
    for name in (*names, "big", "whole"):
        (share / name).touch()
    for job in (*jobs, big, whole):
        stopped.wait_state(job, "COMPLETED")
    assert stopped.logs(jobs[2]).split()[0] in (there[0], there[1])


def test_a_container_is_given_its_slice(stopped: Cluster, share: Path) -> None:
    node = stopped.node("dgx001")
    node.cut_gpu(3, "1g.10gb:0", "1g.10gb:1")
    node.run(["nvidia-ctk", "cdi", "generate", "--output=/var/run/cdi/nvidia.yaml"])
    stopped.write_inventory(nodes=CORES)
    stopped.start_controller()
    job = stopped.sh("ls /dev | grep nvidia[0-9]; ls /dev/nvidia-caps; env | grep ^GPU_", "--gpus", "1g.10gb")
    stopped.wait_state(job, "COMPLETED")
    node.run(["rm", "/var/run/cdi/nvidia.yaml"])
    assert stopped.logs(job).split() in (
        ["nvidia3", "nvidia-cap307", "GPU_3_0=present"], ["nvidia3", "nvidia-cap308", "GPU_3_1=present"],
    )  # fmt: skip
    assert json.loads(stopped.cli("nodes", "--json").stdout)


ON_DEMAND = {
    "mode": "on-demand", "gpus": "0-1", "command": "nvidia-smi",
    "cdi_command": "nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml",
}  # fmt: skip


def on_demand(cluster: Cluster, **keys: object) -> None:
    """Declare dgx001 alone, whose GPUs 0 and 1 may be cut."""
    cluster.node("dgx001").install_nvidia_smi()
    cluster.write_inventory(nodes={"dgx001": {"cores": 64, "mig": ON_DEMAND, **keys}}, leave_out=["dgx003"])


def modes(cluster: Cluster) -> list[bool | None]:
    """MIG mode of dgx001's GPUs 0 to 2, as last read."""
    with cluster.reader() as reader:
        assert reader is not None
        reading = reader.node_records()["dgx001"].reading
    assert reading is not None
    return [gpu.mig_mode for gpu in reading.gpus[:3]]


@pytest.mark.processes
def test_gpus_are_cut_for_jobs_and_whole_again_for_others(stopped: Cluster, share: Path) -> None:
    on_demand(stopped)
    stopped.start_controller()
    names = [f"j{i}" for i in range(3)]
    jobs = [stopped.shared(SHOW_GPUS, share, "--gpus", "3g.40gb", "-J", name) for name in names]
    for job in jobs:
        stopped.wait_state(job, "RUNNING", timeout=60)
    said = [wait_until(lambda job=job: stopped.logs(job).split(), what="its output") for job in jobs]
    assert len({uuid for uuid, _ in said}) == 3
    assert all(uuid.startswith("MIG-") for uuid, _ in said)
    assert modes(stopped) == [True, True, False]
    whole = stopped.shared(SHOW_GPUS, share, "--gpus", "8", "-J", "whole")
    wait_until(lambda: (found := stopped.job(whole)) and found.reason, what="why it waits")
    assert stopped.state_of(whole) == "PENDING"
    for name in names:
        (share / name).touch()
    stopped.wait_state(whole, "RUNNING", timeout=60)
    assert modes(stopped) == [False] * 3
    assert wait_until(lambda: stopped.logs(whole).split(), what="its output")[0] == "0,1,2,3,4,5,6,7"
    (share / "whole").touch()
    stopped.wait_state(whole, "COMPLETED")


@pytest.mark.processes
@pytest.mark.parametrize("delay_ms", [200, 600])
def test_a_controller_killed_in_the_middle_of_a_cut(stopped: Cluster, share: Path, delay_ms: int) -> None:
    on_demand(stopped)
    node = stopped.node("dgx001")
    node.nvml_set({"gpu*.smi_delay_ms": delay_ms})
    stopped.start_controller()
    jobs = [stopped.shared(SHOW_GPUS, share, "--gpus", "1g.10gb", "-J", f"j{i}") for i in range(2)]

    def half_cut() -> bool:
        return ".gis=" in (node.disk / "nvml" / "nvml.conf").read_text()

    wait_until(half_cut, 60, "the first instance")
    stopped.kill_controller()
    stopped.start_controller()
    for job in jobs:
        stopped.wait_state(job, "RUNNING", timeout=60)
    said = {tuple(wait_until(lambda job=job: stopped.logs(job).split(), what="its output")) for job in jobs}
    assert len(said) == 2
    assert sum(mode is True for mode in modes(stopped)) == 1, "two slices are on one GPU"
    for i in range(2):
        (share / f"j{i}").touch()
    for job in jobs:
        stopped.wait_state(job, "COMPLETED")
    wait_until(lambda: modes(stopped) == [False] * 3, 60, "the GPUs to be whole")


def test_podman_knows_the_devices_of_a_gpu_that_was_cut_for_the_job(stopped: Cluster) -> None:
    on_demand(stopped)
    stopped.start_controller()
    job = stopped.sh("ls /dev | grep nvidia[0-9]; ls /dev/nvidia-caps; env | grep ^GPU_", "--gpus", "2g.20gb:2")
    stopped.wait_state(job, "COMPLETED", timeout=60)
    gpu, first, second, *variables = stopped.logs(job).split()
    assert gpu in ("nvidia0", "nvidia1")
    assert {first[:10], second[:10]} == {"nvidia-cap"}
    assert first != second
    assert len(variables) == 2
    wait_until(lambda: modes(stopped) == [False] * 3, 60, "the GPU to be whole")
    whole = stopped.sh("ls /dev | grep nvidia[0-9]", "--gpus", "8")
    stopped.wait_state(whole, "COMPLETED", timeout=60)
    assert stopped.logs(whole).split() == [f"nvidia{index}" for index in range(8)]
    stopped.node("dgx001").run(["rm", "/var/run/cdi/nvidia.yaml"])
