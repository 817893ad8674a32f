"""The state of each declared GPU: one rule for the scheduler and the screens."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gpusched.model.health import Condition, HealthAction, action_of, out_of_service
from gpusched.model.jobs import parse_container_name
from gpusched.model.readings import Gpu, GpuProcess, GpuState, NodeReading
from gpusched.model.resources import Node
from gpusched.model.slices import MigSlice

HIDDEN_PROCESS_MEMORY_MIB = 2048
"""More than a driver keeps for itself: the GPU is in use, though NVML shows no process (another PID namespace)."""

DRIVER_MEMORY_MIB = 1024
"""That the driver, and the server of MPS, may keep for themselves of a GPU that two jobs share."""

_COMMAND_CHARS = 60
_MPS_SERVER = "nvidia-cuda-mps-server"


class GpuStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One declared GPU, or a slice of one.

    Only FREE can be allocated. States of the hardware (LOST, UNUSABLE, UNKNOWN) come before that of its job, so
    ``job_id`` may be set with those states too.

    Attributes:
        index: NVML index; of a slice, its number.
        reason: Why it is not FREE, or what is odd about it; "" when nothing is.
        job_id: The job of ours that holds it, or None; ``partner_id``: the other one, where two share it.
        profile: Of a slice. slices: Of a GPU that is cut, in order of their place.
    """

    index: int
    state: GpuState
    reason: str = ""
    job_id: str | None = None
    partner_id: str | None = None
    profile: str = ""
    slices: tuple[GpuStatus, ...] = ()


def gpu_states(
    node: Node,
    reading: NodeReading | None,
    held: Mapping[int, tuple[str, ...]],
    conditions: tuple[Condition, ...] = (),
) -> tuple[GpuStatus, ...]:
    """Return the state of every GPU that ``node`` declares, in the order of `Node.indices`.

    A GPU with volatile uncorrected (double-bit) ECC errors is UNUSABLE, as DCGM's health check calls it a failure: a
    page waits for its retirement and the next job may die of it. It stays so until the GPU is reset. Conditions
    (`gpusched.model.health`) make a GPU UNUSABLE where the operator's action, or the default, says so.

    ``reading``: None when there is none, or none to be believed. ``held``: GPU index -> ids of the jobs that hold
    it: one, or two that share it. The server of MPS is not foreign where the GPUs are shared by it.
    ``conditions``: of the node and its GPUs.
    """
    if reading is None:
        return _all(node, held, "the node has not been probed")
    if reading.source == "none" or (reading.gpu_error and not reading.gpus):
        return _all(node, held, reading.gpu_error or "neither NVML nor nvidia-smi responds on the node")
    found = {gpu.index: gpu for gpu in reading.gpus}
    lister = "nvidia-smi" if reading.source == "nvidia-smi" else "NVML"
    mps = node.sharing is not None and node.sharing.mode == "mps"
    out = out_of_service(conditions, node.health, node.indices())
    return tuple(
        _with_condition(_status(node, index, found.get(index), held, lister, mps), out.get(index, ""))
        for index in node.indices()
    )


def _with_condition(status: GpuStatus, why: str) -> GpuStatus:
    """Return the status with the conditions that keep jobs off the GPU, which NVML's own words may leave out."""
    if not why or status.state is GpuState.UNKNOWN:
        return status
    if status.state in (GpuState.LOST, GpuState.UNUSABLE):
        known = status.reason and status.reason in why
        return msgspec.structs.replace(status, reason=why if known or not status.reason else f"{status.reason}; {why}")
    slices = tuple(msgspec.structs.replace(one, state=GpuState.UNUSABLE, reason=why) for one in status.slices)
    return msgspec.structs.replace(status, state=GpuState.UNUSABLE, reason=why, slices=slices)


class GpuFigures(msgspec.Struct, frozen=True, gc=False):
    """The part of a `Gpu` that decides the state of most, and what metrics sum up; quick to decode."""

    index: int
    error: str | None = None
    mig_mode: bool | None = None
    ecc_errors: int | None = None
    memory_used_mib: int | None = None
    utilization_pct: float | None = None
    power_w: float | None = None
    processes: msgspec.Raw = msgspec.Raw(b"[]")


def plain_states(
    indices: tuple[int, ...], gpus: Mapping[int, GpuFigures], held: Mapping[int, tuple[str, ...]]
) -> list[GpuState] | None:
    """Return the states of a node's GPUs without conditions; None: `gpu_states` must look at the whole reading."""
    found = []
    for index in indices:
        gpu = gpus.get(index)
        if gpu is None or gpu.error or gpu.mig_mode or gpu.ecc_errors:
            return None
        is_held = index in held
        if not is_held and (len(gpu.processes) > 2 or (gpu.memory_used_mib or 0) > HIDDEN_PROCESS_MEMORY_MIB):
            return None
        found.append(GpuState.ALLOCATED if is_held else GpuState.FREE)
    return found


def foreign_processes(gpu: Gpu, mps: bool) -> list[GpuProcess]:
    """Return processes that belong to no job. ``mps``: the GPU is shared by MPS; its server is excluded."""
    found = [p for p in gpu.processes if p.container is None]
    return [p for p in found if not (p.command or "").split(" ")[0].endswith(_MPS_SERVER)] if mps else found


def _all(node: Node, held: Mapping[int, tuple[str, ...]], reason: str) -> tuple[GpuStatus, ...]:
    return tuple(_held_by(index, GpuState.UNKNOWN, reason, held.get(index, ())) for index in node.indices())


def _held_by(index: int, state: GpuState, reason: str, jobs: tuple[str, ...]) -> GpuStatus:
    job, partner = (*jobs, None, None)[:2]
    return GpuStatus(index=index, state=state, reason=reason, job_id=job, partner_id=partner)


def _status(
    node: Node, index: int, gpu: Gpu | None, held: Mapping[int, tuple[str, ...]], lister: str, mps: bool
) -> GpuStatus:
    state, reason = _hardware(node, index, gpu, lister)
    jobs = held.get(index, ())
    if gpu is not None and state is GpuState.SLICED:
        slices = tuple(_slice_status(one, gpu, held) for one in sorted(gpu.slices, key=lambda one: one.start))
        return msgspec.structs.replace(_held_by(index, state, reason, jobs), slices=slices)
    if gpu is not None and state is GpuState.FREE:
        foreign = foreign_processes(gpu, mps)
        state, reason = _allocated(gpu, jobs, foreign) if jobs else _unallocated(gpu, foreign)
    return _held_by(index, state, reason, jobs)


def _hardware(node: Node, index: int, gpu: Gpu | None, lister: str) -> tuple[GpuState, str]:
    """Return FREE if the hardware is healthy, else its state and why."""
    if gpu is None:
        return GpuState.LOST, f"not listed by {lister}"
    if gpu.error:
        return GpuState.LOST, gpu.error
    if gpu.mig_mode and not gpu.slices and index not in node.cut_on_demand():
        return GpuState.UNUSABLE, f"MIG is on, without slices; 'nvidia-smi -i {index} -mig 0' as root turns it off"
    if gpu.ecc_errors and action_of("ecc", node.health) is not HealthAction.WARN:
        errors = "1 uncorrected ECC error" if gpu.ecc_errors == 1 else f"{gpu.ecc_errors} uncorrected ECC errors"
        return GpuState.UNUSABLE, f"{errors}; drain the node, then reset it: 'nvidia-smi --gpu-reset -i {index}'"
    if gpu.mig_mode:
        return GpuState.SLICED, "" if gpu.slices else "MIG is on, without slices"
    return GpuState.FREE, ""


def _slice_status(one: MigSlice, gpu: Gpu, held: Mapping[int, tuple[str, ...]]) -> GpuStatus:
    """Return the state of a slice. A process of an unknown instance may be in any that no job holds."""
    jobs = held.get(one.number, ())
    own = [p for p in gpu.processes if p.gi == one.gi or (p.gi is None and not jobs)]
    here = msgspec.structs.replace(gpu, processes=tuple(own), memory_used_mib=None)
    foreign = foreign_processes(here, False)
    if not one.usable:
        state, reason = GpuState.UNUSABLE, "no compute instance spans it; 'nvidia-smi mig -cci' as root makes one"
    else:
        state, reason = _allocated(here, jobs, foreign) if jobs else _unallocated(here, foreign)
    return msgspec.structs.replace(_held_by(one.number, state, reason, jobs), profile=one.profile)


def _unallocated(gpu: Gpu, foreign: list[GpuProcess]) -> tuple[GpuState, str]:
    if foreign:
        return GpuState.BUSY, _describe(foreign)
    if ours := [p for p in gpu.processes if p.container is not None]:
        return GpuState.BUSY, f"still being cleaned up: {_names(ours)}"
    if (gpu.memory_used_mib or 0) > HIDDEN_PROCESS_MEMORY_MIB:
        return GpuState.BUSY, f"memory in use by a process NVML does not show ({gpu.memory_used_mib} MiB)"
    return GpuState.FREE, ""


def _allocated(gpu: Gpu, jobs: tuple[str, ...], foreign: list[GpuProcess]) -> tuple[GpuState, str]:
    others = [p for p in gpu.processes if p.container is not None and _job_of(p.container) not in jobs]
    notes = [_describe(foreign)] if foreign else []
    if others:
        notes.append(f"still being cleaned up: {_names(others)}")
    return GpuState.ALLOCATED, "; ".join(notes)


def _job_of(container: str) -> str | None:
    parsed = parse_container_name(container)
    return parsed[0] if parsed else None


def _names(processes: list[GpuProcess] | tuple[GpuProcess, ...]) -> str:
    return ", ".join(sorted({p.container or "" for p in processes}))


def _describe(foreign: list[GpuProcess]) -> str:
    """Return ``foreign: pid 4711 (alice) python train.py and 2 more``."""
    first = foreign[0]
    user = f" ({first.user})" if first.user else ""
    command = first.command or ""
    if len(command) > _COMMAND_CHARS:
        command = command[: _COMMAND_CHARS - 3] + "..."
    more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
    return f"foreign: pid {first.pid}{user}{' ' + command if command else ''}{more}"
