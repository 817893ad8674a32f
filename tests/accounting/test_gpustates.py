"""Which GPUs may be handed out, and why the others may not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.gpustates import gpu_states
from gpusched.model.readings import Gpu, GpuProcess, GpuState, NodeReading
from gpusched.model.resources import Node, RuntimeName, SharingSettings

JOB = "3k9x2m7p0ab"
FOREIGN = GpuProcess(pid=4711, user="alice", command="python train.py")
OWN = GpuProcess(pid=99, container=f"gpusched-{JOB}-1-0")


def node(gpus: int = 1, **fields: Any) -> Node:
    return Node(
        name="dgx1", partition="A100", address="dgx1", gpus=gpus, cores=8, memory_mib=1024, runtime=RuntimeName.PODMAN,
        **fields,
    )  # fmt: skip


def reading(*gpus: Gpu, **fields: Any) -> NodeReading:
    return NodeReading(**({"node": "dgx1", "time": 0.0, "source": "nvml", "gpus": gpus} | fields))


def one(gpu: Gpu, holder: str | None = None) -> tuple[GpuState, str, str | None]:
    (status,) = gpu_states(node(), reading(gpu), {0: (holder,)} if holder else {})
    return status.state, status.reason, status.job_id


def test_quiet_gpu_is_free() -> None:
    assert one(Gpu(index=0, memory_used_mib=500, ecc_errors=0, mig_mode=False)) == (GpuState.FREE, "", None)


def test_a_gpu_of_which_nothing_is_known_but_that_it_is_there_is_free() -> None:
    assert one(Gpu(index=0)) == (GpuState.FREE, "", None)


def test_held() -> None:
    assert one(Gpu(index=0, processes=(OWN,), memory_used_mib=70000), JOB) == (GpuState.ALLOCATED, "", JOB)


def test_a_partners_process_is_no_strangers() -> None:
    theirs = GpuProcess(pid=2, container="gpusched-other-1-0")
    (status,) = gpu_states(node(), reading(Gpu(index=0, processes=(OWN, theirs))), {0: (JOB, "other")})
    assert (status.state, status.reason, status.job_id, status.partner_id) == (GpuState.ALLOCATED, "", JOB, "other")
    (status,) = gpu_states(node(), reading(Gpu(index=0, processes=(OWN, theirs))), {0: (JOB,)})
    assert status.reason == "still being cleaned up: gpusched-other-1-0"


def test_the_server_of_mps_is_no_stranger_where_gpus_are_shared_by_it() -> None:
    server = GpuProcess(pid=3, user="root", command="/usr/bin/nvidia-cuda-mps-server -force-tegra")
    busy = reading(Gpu(index=0, processes=(server,), memory_used_mib=418))
    for mode, state in (("mps", GpuState.FREE), ("time-slicing", GpuState.BUSY)):
        sharing = SharingSettings(mode=mode)  # type: ignore[arg-type]
        assert gpu_states(node(sharing=sharing), busy, {})[0].state is state
    both = reading(Gpu(index=0, processes=(server, FOREIGN)))
    assert gpu_states(node(sharing=SharingSettings(mode="mps")), both, {})[0].state is GpuState.BUSY


def test_missing_index_is_lost_and_the_others_stay() -> None:
    states = gpu_states(node(3), reading(Gpu(index=0), Gpu(index=2)), {})
    assert [(s.index, s.state, s.reason) for s in states] == [
        (0, GpuState.FREE, ""),
        (1, GpuState.LOST, "not listed by NVML"),
        (2, GpuState.FREE, ""),
    ]


def test_gpu_error_is_lost_with_its_reason_even_when_held() -> None:
    assert one(Gpu(index=0, error="GPU is lost"), JOB) == (GpuState.LOST, "GPU is lost", JOB)


def test_mig_is_unusable() -> None:
    state, reason, _ = one(Gpu(index=0, mig_mode=True))
    assert state is GpuState.UNUSABLE
    assert "nvidia-smi -i 0 -mig 0" in reason


def test_uncorrected_ecc_errors_are_unusable_and_say_what_to_do() -> None:
    state, reason, _ = one(Gpu(index=0, ecc_errors=2))
    assert state is GpuState.UNUSABLE
    assert "2 uncorrected ECC errors" in reason
    assert "--gpu-reset" in reason


def test_foreign_process_is_busy() -> None:
    assert one(Gpu(index=0, processes=(FOREIGN, GpuProcess(pid=5)))) == (
        GpuState.BUSY,
        "foreign: pid 4711 (alice) python train.py and 1 more",
        None,
    )


def test_foreign_process_beside_our_job_is_noted() -> None:
    assert one(Gpu(index=0, processes=(OWN, FOREIGN)), JOB) == (
        GpuState.ALLOCATED,
        "foreign: pid 4711 (alice) python train.py",
        JOB,
    )


def test_leftover_of_our_own_is_never_foreign() -> None:
    state, reason, _ = one(Gpu(index=0, processes=(OWN,)))
    assert (state, reason) == (GpuState.BUSY, f"still being cleaned up: gpusched-{JOB}-1-0")


def test_leftover_under_another_job() -> None:
    state, reason, job = one(Gpu(index=0, processes=(OWN,)), "other")
    assert (state, job) == (GpuState.ALLOCATED, "other")
    assert "still being cleaned up" in reason


def test_memory_without_a_process_is_busy() -> None:
    state, reason, _ = one(Gpu(index=0, memory_used_mib=2049))
    assert state is GpuState.BUSY
    assert reason.startswith("memory in use by a process NVML does not show")
    assert one(Gpu(index=0, memory_used_mib=2048))[0] is GpuState.FREE


@pytest.mark.parametrize(
    "read",
    [
        None,
        NodeReading(node="dgx1", time=0.0, source="none", gpu_error="no driver"),
        NodeReading(node="dgx1", time=0.0, source="none"),
        NodeReading(node="dgx1", time=0.0, source="nvml", gpu_error="Driver/library version mismatch"),
    ],
)
def test_without_figures_everything_is_unknown_with_a_reason(read: NodeReading | None) -> None:
    for status in gpu_states(node(2), read, {1: (JOB,)}):
        assert status.state is GpuState.UNKNOWN
        assert status.reason
        assert status.job_id == (JOB if status.index == 1 else None)


def test_why_nvml_failed_does_not_condemn_what_nvidia_smi_lists() -> None:
    (status,) = gpu_states(node(), reading(Gpu(index=0), source="nvidia-smi", gpu_error="no python3"), {})
    assert status.state is GpuState.FREE


def test_long_commands_are_cut() -> None:
    _, reason, _ = one(Gpu(index=0, processes=(GpuProcess(pid=1, command="x" * 100000),)))
    assert len(reason) < 100


gpus = st.builds(
    Gpu,
    index=st.integers(0, 7),
    memory_used_mib=st.none() | st.integers(0, 80000),
    ecc_errors=st.none() | st.integers(0, 3),
    mig_mode=st.none() | st.booleans(),
    error=st.none() | st.just("lost"),
    processes=st.lists(st.sampled_from([FOREIGN, OWN]), max_size=2).map(tuple),
)


@given(st.lists(gpus, max_size=8, unique_by=lambda g: g.index), st.dictionaries(st.integers(0, 7), st.just((JOB,))))
def test_every_declared_gpu_once_and_free_only_when_truly_quiet(
    found: list[Gpu], held: dict[int, tuple[str, ...]]
) -> None:
    states = gpu_states(node(8), reading(*found), held)
    assert [s.index for s in states] == list(range(8))
    by_index = {g.index: g for g in found}
    for status in states:
        assert (status.state is not GpuState.FREE) or (
            status.index not in held
            and not by_index[status.index].processes
            and not by_index[status.index].error
            and not by_index[status.index].mig_mode
            and not by_index[status.index].ecc_errors
        )
        assert status.reason or status.state in (GpuState.FREE, GpuState.ALLOCATED)
