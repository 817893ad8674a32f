"""The result of one probe of one node. Unknown is None, never 0."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from gpusched.model.slices import MigSlice, SliceProfile

FailureKind = Literal[
    "timeout", "refused", "unreachable", "auth", "host-key-unknown", "host-key-changed", "ssh", "protocol"
]


class GpuState(StrEnum):
    """State of a GPU for the scheduler."""

    FREE = "FREE"
    ALLOCATED = "ALLOCATED"  # held by one of our jobs
    BUSY = "BUSY"  # held by a process gpusched did not start (foreign)
    LOST = "LOST"  # NVML cannot talk to it, or it is not there
    SLICED = "SLICED"  # cut into MIG slices, each of which has a state of its own
    UNUSABLE = "UNUSABLE"  # there, but not to be allocated (MIG on and not cut, uncorrected ECC errors)
    UNKNOWN = "UNKNOWN"  # the node has not been read


class NodeState(StrEnum):
    """State of a node, named as in Slurm."""

    IDLE = "IDLE"
    MIXED = "MIXED"
    ALLOCATED = "ALLOCATED"
    DOWN = "DOWN"
    DRAINING = "DRAINING"
    DRAINED = "DRAINED"
    UNKNOWN = "UNKNOWN"


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process on a GPU. ``container`` is gpusched's name for its job there, None for a foreign one.

    ``utilization_pct``: its part of the GPU's, where several processes use it and NVML says so.
    ``gi``: id of the GPU instance that it runs in; None: of none, or not known.
    """

    pid: int
    user: str | None = None
    command: str | None = None
    memory_used_mib: int | None = None
    container: str | None = None
    utilization_pct: float | None = None
    gi: int | None = None


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What NVML says of a GPU's health; None: not supported, or not asked for.

    Attributes:
        bus: PCI address, ``0000:3b:00``.
        retired_pages: Memory pages that are no longer used (before Ampere).
        remap_pending, remap_failed: Rows or pages wait for a reset, and some could not be replaced.
        nvlinks: That are up. nvlink_errors, nvlink_recoveries: Counters over all of them.
        pcie_replays: A counter. pcie_width, pcie_gen: At present; the maximum only where it may differ.
        clocks: NVML's mask of the reasons why clocks are held down.
        thermal_margin_c: Degrees to the temperature that slows it down; None also while it is cool.
        recovery: NVML's recovery action: 0 none, 1 reset, 2 reboot ...
    """

    bus: str | None = None
    retired_pages: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    nvlinks: int | None = None
    nvlink_errors: int | None = None
    nvlink_recoveries: int | None = None
    pcie_replays: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    clocks: int | None = None
    thermal_margin_c: int | None = None
    recovery: int | None = None


class XidMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of NVIDIA's driver in the kernel's log.

    Attributes:
        at_us: Microseconds since boot.
        number: The Xid, or of a switch the SXid.
        bus: PCI address, ``0000:3b:00``. switch: It is of an NVSwitch; fatal: and it says so.
        pid, process: Of the program, where the message names it.
    """

    at_us: int
    number: int
    bus: str
    switch: bool = False
    fatal: bool = False
    pid: int | None = None
    process: str = ""


class KernelLog(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe found in the kernel's log and among NVML's events. ``now_us``: since boot.

    ``source``: of the log; "nvml": it cannot be read, but NVML's events are received; "": neither.
    """

    source: str = ""
    now_us: int = 0
    messages: tuple[XidMessage, ...] = ()


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU in one reading. ``error``: why NVML could not read it (then the figures are None).

    ``ecc_errors`` counts volatile uncorrected errors; ``energy_j`` is NVML's counter since driver load.
    ``links[i]`` is the closeness to GPU index i (0 none .. larger is nearer; NVLink above PCIe switch above socket).
    ``slices`` are its MIG instances, ``mig_profiles`` what it can be cut into (where MIG is on, or could be switched on
    by gpusched); ``mig_error``: why they could not be read.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    utilization_pct: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_c: int | None = None
    ecc_errors: int | None = None
    mig_mode: bool | None = None
    processes: tuple[GpuProcess, ...] = ()
    links: dict[int, int] = {}
    slices: tuple[MigSlice, ...] = ()
    mig_profiles: tuple[SliceProfile, ...] = ()
    mig_error: str | None = None
    health: GpuHealth | None = None
    error: str | None = None


class GpuWiring(msgspec.Struct, frozen=True, kw_only=True):
    """The position of one GPU in its server.

    Attributes:
        pci_path: From the root to the GPU, as sysfs names its bridges: ``pci0000:16``, ``0000:16:02.0``, ...
        numa: The NUMA node that is nearest.
        domain: The NVLink domain it belongs to, which may span nodes: NVML's ``clusterUuid.cliqueId``.
        minor: Of its device file: 3 is /dev/nvidia3.
    """

    index: int
    pci_path: tuple[str, ...] = ()
    numa: int | None = None
    domain: str | None = None
    minor: int | None = None


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """One port of a network card, as known to the kernel.

    Attributes:
        name: ``mlx5_0`` (``mlx5_0/2`` is its second port), or ``eth0`` where there is no RDMA device.
        interface: The network interface of the same port.
        up: Whether there is a link; ``rate_gbps`` is its rate then, one direction, in Gbit/s.
        pci_path, numa: As in `GpuWiring`.
        switch, switch_port: The neighbour that LLDP reports: the switch's name, else its id.
    """

    name: str
    kind: Literal["infiniband", "roce", "rdma", "ethernet"]
    interface: str | None = None
    up: bool | None = None
    rate_gbps: float | None = None
    pci_path: tuple[str, ...] = ()
    numa: int | None = None
    switch: str | None = None
    switch_port: str | None = None


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """Hardware facts that rarely change: positions and connections of GPUs and NICs."""

    gpus: tuple[GpuWiring, ...] = ()
    nics: tuple[Nic, ...] = ()

    def fabric_nics(self) -> tuple[Nic, ...]:
        """Return the NICs for traffic between nodes: RDMA ones, else the fastest."""
        up = [nic for nic in self.nics if nic.up and nic.rate_gbps]
        fastest = max((nic.rate_gbps or 0.0 for nic in up), default=0.0)
        return tuple(n for n in up if n.kind != "ethernet") or tuple(n for n in up if n.rate_gbps == fastest)

    def domains(self) -> tuple[str, ...]:
        """Return the distinct NVLink domains of its GPUs."""
        return tuple(sorted({gpu.domain for gpu in self.gpus if gpu.domain}))


class ProgressReading(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a job's progress.json, and its age. None: not given.

    Attributes:
        of: Total steps.
        nodes: Of the group that made the step (torchrun's); ``ran_s``: since the group's first report, before which
            there was none for ``paused_s``.
    """

    step: float
    of: float | None = None
    samples_per_s: float | None = None
    nodes: float | None = None
    ran_s: float | None = None
    paused_s: float | None = None
    age_s: float


class SavedReading(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a job's saved.json: the last saved step, and its age."""

    step: float
    gpus: float | None = None
    age_s: float


class AskReading(msgspec.Struct, frozen=True, kw_only=True):
    """A job's request to the controller: a Slurm command that ran inside it (`gpusched.nodes.batch`).

    Attributes:
        cwd: The folder that it ran in, as the job has it.
        script: Of sbatch, the text of the job script; None: it was not asked for yet.
        script_word: Which word named the script, counted from 1; 0: none, it came from stdin.
        age_s: How long ago it was written.
    """

    id: str
    attempt: int
    words: tuple[str, ...]
    cwd: str = ""
    script: str | None = None
    script_word: int = 0
    age_s: float = 0.0


class ContainerReading(msgspec.Struct, frozen=True, kw_only=True):
    """One of gpusched's attempts on a node (a container, or a process-runtime folder).

    Attributes:
        name: ``gpusched-<job>-<attempt>-<rank>``.
        phase: ``preparing`` the launcher is at work (pulling, creating); ``ready`` created, waits for the start of its
            gang; ``running``; ``exited``; ``failed`` the launcher gave up (see ``error``); ``lost`` the launcher died
            without a result and there is no container.
        exit_code: The job's own, when exited; the launcher's, when failed.
        started_at, finished_at: Unix seconds by the node's clock.
        cluster_id: Which gpusched installation it belongs to.
        ran_s: How long it has run by the node's boot clock, which cannot be set; None: not known, or not running.
        attached_s: Seconds since a terminal was last attached, by the boot clock; None: never.
        progress, saved: What the job wrote into its folder (rank 0's node); None: nothing that can be used.
        ask: What it asks, from there as well.
        job_file_error: What is wrong with one of these files; None: nothing.
    """

    name: str
    phase: Literal["preparing", "ready", "running", "exited", "failed", "lost"]
    exit_code: int | None = None
    oom_killed: bool = False
    started_at: float | None = None
    finished_at: float | None = None
    error: str | None = None
    cluster_id: str | None = None
    pid: int | None = None
    ran_s: float | None = None
    attached_s: float | None = None
    progress: ProgressReading | None = None
    saved: SavedReading | None = None
    ask: AskReading | None = None
    job_file_error: str | None = None


class NodeReading(msgspec.Struct, frozen=True, kw_only=True):
    """The complete result of one probe of one node.

    Attributes:
        time: Unix seconds by the controller's clock when the answer came.
        clock_skew_s: Node's clock minus ours (round trip halved).
        source: ``nvml``, ``nvidia-smi``, ``none`` (neither is there; ``gpu_error`` says why), ``simulated``, or
            ``slurm``: the node was not asked, its GPUs are there as Slurm has them.
        runtime_error: Why the runtime could not be asked (then ``containers`` is not to be trusted and is None).
        job_folders: Ids of jobs that have a folder of their own here and no attempt.
        wiring: None where it was not asked for, or not to be had.
        kernel: None where it was not read.
    """

    node: str
    time: float
    boot_id: str | None = None
    hostname: str | None = None
    clock_skew_s: float | None = None
    source: Literal["nvml", "nvidia-smi", "none", "simulated", "slurm"] = "none"
    gpu_error: str | None = None
    driver_version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    containers: tuple[ContainerReading, ...] | None = None
    runtime_error: str | None = None
    runtime_version: str | None = None
    cores: int | None = None
    memory_total_mib: int | None = None
    memory_available_mib: int | None = None
    load1: float | None = None
    disk_free_mib: int | None = None
    job_folders: tuple[str, ...] = ()
    wiring: Wiring | None = None
    kernel: KernelLog | None = None


class ProbeFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failed probe. ``kind`` is for programs, ``reason`` and ``hint`` for people."""

    node: str
    time: float
    kind: FailureKind
    reason: str
    hint: str = ""
