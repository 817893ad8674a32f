"""Conditions of GPUs and nodes: the table of kinds, what follows from each, and what is stored.

The kinds are data: a name, whose fault it is, what follows by default, and words for people. `Condition` is one of them
on one GPU or node, as a condition of a Kubernetes node. `gpusched.controller.health` finds them in readings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Literal

import msgspec


class HealthAction(StrEnum):
    """What follows from a condition, from the least to the most."""

    WARN = "warn"  # shown and notified
    NO_NEW_JOBS = "no-new-jobs"  # the GPU (of a node's condition: all its GPUs) gets no new job
    DRAIN = "drain"  # the node is drained until `gpusched resume`
    REQUEUE = "requeue"  # as no-new-jobs, and the jobs there end as at a node's failure


ACTIONS = tuple(HealthAction)
EVENT_S, LEVEL_S, LOST_S = 3600.0, 300.0, 10.0
"""A condition is over so long after it was last seen: of single messages, of values, of a GPU that answers again."""


class ConditionKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of condition.

    Attributes:
        about: What it takes out of service.
        fault: Who is at fault.
        action: What follows by default. most: The most that the operator may make of it.
        title: What it is, in a few words. advice: What to do.
        twice: It is a condition only if two readings in a row show it: these values waver.
        over_s: Seconds after it was last seen after which it is over.
    """

    name: str
    about: Literal["gpu", "node"] = "gpu"
    fault: Literal["program", "gpu", "machine"] = "gpu"
    action: HealthAction
    most: HealthAction = HealthAction.REQUEUE
    title: str
    advice: str
    twice: bool = False
    over_s: float = LEVEL_S


_WARN, _OUT = HealthAction.WARN, HealthAction.NO_NEW_JOBS
_RESET = "drain the node, and reset the GPU once it is idle (nvidia-smi --gpu-reset -i N as root)"
_REPLACE = "have the GPU replaced"
KINDS: tuple[ConditionKind, ...] = (
    ConditionKind(
        name="xid-program", fault="program", action=_WARN, most=_WARN, over_s=EVENT_S, title="a program's error (Xid)",
        advice="look at the program: compute-sanitizer finds illegal addresses",
    ),
    ConditionKind(
        name="xid-gpu", action=_OUT, title="an error of the GPU (Xid)",
        advice=f"{_RESET}, then gpusched resume NODE; {_REPLACE} if it comes again",
    ),
    ConditionKind(
        name="xid-machine", about="node", fault="machine", action=_WARN, over_s=EVENT_S,
        title="an error of the driver or of PCIe (Xid)",
        advice="look at the driver's version, the slot and the kernel's log",
    ),
    ConditionKind(
        name="xid-other", action=_WARN, over_s=EVENT_S, title="another message of the driver (Xid)",
        advice="look the number up in NVIDIA's catalog of Xid errors",
    ),
    ConditionKind(
        name="nvswitch", about="node", fault="machine", action=_OUT, title="a fatal error of an NVSwitch (SXid)",
        advice="reset the GPUs and switches, or reboot, then gpusched resume NODE",
    ),
    ConditionKind(
        name="off-bus", action=_OUT, twice=True, over_s=LOST_S, title="the GPU has fallen off the bus",
        advice="reboot the node, then gpusched resume NODE; check the slot and its power",
    ),
    ConditionKind(
        name="needs-reset", action=_OUT, title="the driver asks for a reset", advice="do what the driver asks for",
    ),
    ConditionKind(name="ecc", action=_OUT, title="uncorrectable memory errors since the last reset", advice=_RESET),
    ConditionKind(
        name="remap-pending", action=_OUT, title="memory rows or pages wait for a reset to be replaced", advice=_RESET,
    ),
    ConditionKind(name="remap-failed", action=_OUT, title="memory rows could not be replaced", advice=_REPLACE),
    ConditionKind(
        name="pages-retired", action=_WARN, title="many memory pages are retired",
        advice=f"{_REPLACE}: the driver retires 64 pages at most",
    ),
    ConditionKind(
        name="nvlink-down", action=_OUT, twice=True, title="NVLinks are down",
        advice="look at nvidia-smi nvlink -s and at the fabric manager",
    ),
    ConditionKind(
        name="nvlink-errors", action=_WARN, over_s=EVENT_S, title="errors on NVLinks",
        advice="look at nvidia-smi nvlink -e; reseat the GPU or the cable if they go on",
    ),
    ConditionKind(
        name="pcie-width", fault="machine", action=_WARN, twice=True, title="PCIe has fewer lanes than it could",
        advice="reseat the GPU or the riser",
    ),
    ConditionKind(
        name="pcie-speed", fault="machine", action=_WARN, twice=True,
        title="PCIe is slower under load than it could be",
        advice="reseat the GPU or the riser; look at the BIOS",
    ),
    ConditionKind(
        name="pcie-replays", fault="machine", action=_WARN, over_s=EVENT_S, title="PCIe repeats transfers",
        advice="reseat the GPU or the riser if it goes on",
    ),
    ConditionKind(
        name="clocks-thermal", fault="machine", action=_WARN, twice=True, title="clocks are held down by heat",
        advice="look at fans, filters and the room",
    ),
    ConditionKind(
        name="clocks-power", fault="machine", action=_WARN, twice=True, title="clocks are held down by the power brake",
        advice="look at the power supplies",
    ),
    ConditionKind(
        name="temperature", fault="machine", action=_WARN, twice=True, title="the temperature is near its limit",
        advice="look at fans, filters and the room",
    ),
)  # fmt: skip
"""All kinds, in the order of tables. Xids: `XIDS` says which kind each is."""
KIND = {kind.name: kind for kind in KINDS}

# Names and faults after NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors), in our words. The program's: where it
# says to restart the application and to check it. The GPU's: where it asks for a reset, or a reboot because of the GPU.
_PROGRAM = {
    8: "the GPU stopped processing",
    11: "invalid command stream",
    13: "exception in a kernel",
    25: "invalid command stream",
    31: "memory page fault",
    43: "stopped after a fault of the program",
    45: "cleaned up after the program was ended",
    60: "exception of the video processor",
    68: "exception of the video decoder",
    69: "invalid class in the command stream",
    80: "corrupted data sent to the GPU",
    137: "illegal access over NVLink",
}
_GPU = {
    46: "the GPU stopped processing",
    48: "uncorrectable memory error",
    54: "auxiliary power is not connected",
    62: "the internal controller has halted",
    74: "NVLink error",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "timeout of a context switch",
    110: "security fault",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    136: "NVLink training failed",
    140: "unrecovered memory error",
    143: "the GPU could not be initialized",
    156: "a part was retired",
    158: "fatal timeout",
    167: "fatal timeout of PCIe",
    169: "the security processor has halted",
    171: "uncorrectable error of the DRAM",
    172: "uncorrectable error of the SRAM",
    **dict.fromkeys(range(144, 151), "NVLink error"),
}
_MACHINE = {
    32: "corrupted command stream, mostly of PCIe",
    37: "error of the driver's firmware",
    38: "error of the driver's firmware",
    66: "illegal access by the driver",
    67: "illegal access by the driver",
    151: "error of key rotation",
}
_OTHER = {
    44: "fault during a context switch",
    92: "many correctable memory errors",
    93: "limit of writes to the InfoROM",
    121: "corrected errors on the link to the CPU",
    141: "error of CUDA's fast path",
    155: "an NVLink was taken down",
    **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85), "exception of a copy engine"),
}
SILENT_XIDS = frozenset({14, 63, 106, 107, 154})
"""Tests, and what NVML's values show better: a row to be remapped, a changed recovery action."""


class Xid(msgspec.Struct, frozen=True):
    """A number of NVIDIA's catalog: the kind of condition that it is, and its meaning."""

    kind: str
    title: str


XIDS: Mapping[int, Xid] = {
    **{number: Xid("xid-program", title) for number, title in _PROGRAM.items()},
    **{number: Xid("xid-gpu", title) for number, title in _GPU.items()},
    **{number: Xid("xid-machine", title) for number, title in _MACHINE.items()},
    **{number: Xid("xid-other", title) for number, title in _OTHER.items()},
    64: Xid("remap-failed", "a memory row could not be replaced"),
    157: Xid("remap-failed", "a part could not be retired"),
    79: Xid("off-bus", "the GPU has fallen off the bus"),
}
STAYING = frozenset({"xid-gpu", "nvswitch", "off-bus", "remap-failed"})
"""Kinds that, when they come from a message, stay until the node is resumed or rebooted, or the GPU reset."""


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One condition of a GPU or a node.

    Attributes:
        kind: Of `KINDS`.
        gpu: UUID of the GPU; None: of the node. index: Its NVML index when it was last seen.
        since, last_seen: Unix seconds.
        detail: What was seen: ``Xid 79 (the GPU has fallen off the bus)``.
        job: The job on the GPU then, where it is the program's fault.
        stays: Until the node is resumed or rebooted, or the GPU reset.
    """

    kind: str
    gpu: str | None = None
    index: int | None = None
    since: float
    last_seen: float
    detail: str
    job: str | None = None
    stays: bool = False

    @property
    def key(self) -> tuple[str, str | None]:
        """Return what it is about: no two conditions of a node have the same."""
        return self.kind, self.gpu

    @property
    def where(self) -> str:
        """Return ``GPU 3``, or "" for the node itself."""
        return "" if self.index is None else f"GPU {self.index}"


class GpuCounters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the last readings of a GPU said, to distinguish a rise from a level; ``nvlinks``: the most that were up."""

    uuid: str | None = None
    bus: str | None = None
    energy_j: float | None = None
    nvlinks: int | None = None
    nvlink_errors: int | None = None
    nvlink_recoveries: int | None = None
    pcie_replays: int | None = None


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a node's health between two probes.

    Attributes:
        conditions: That it has now.
        suspected: Seen in one reading only, of kinds that must be seen twice.
        counters: By the GPU's NVML index.
        boot_id: Of the boot that the rest is about.
        log_us: Kernel messages up to then (microseconds since boot) are taken in.
        log_source: Where kernel messages come from (`KernelLog.source`).
    """

    conditions: tuple[Condition, ...] = ()
    suspected: tuple[Condition, ...] = ()
    counters: dict[int, GpuCounters] = {}
    boot_id: str | None = None
    log_us: int | None = None
    log_source: str = ""


def action_of(kind: str, asked: Mapping[str, HealthAction]) -> HealthAction:
    """Return what follows from a kind; ``asked``: the operator's choices, by kind."""
    known = KIND.get(kind)
    return HealthAction.WARN if known is None else asked.get(kind, known.action)


def text_of(condition: Condition) -> str:
    """Return the condition for people: ``Xid 48 (uncorrectable memory error)``."""
    known = KIND.get(condition.kind)
    return condition.detail or (known.title if known else condition.kind)


def out_of_service(
    conditions: tuple[Condition, ...], asked: Mapping[str, HealthAction], indices: tuple[int, ...]
) -> dict[int, str]:
    """Return GPU index -> why it gets no new job, by the node's conditions."""
    found: dict[int, list[str]] = {}
    for condition in conditions:
        if action_of(condition.kind, asked) in (HealthAction.NO_NEW_JOBS, HealthAction.REQUEUE):
            for index in indices if condition.index is None else (condition.index,):
                found.setdefault(index, []).append(text_of(condition))
    return {index: "; ".join(dict.fromkeys(texts)) for index, texts in found.items()}


def to_requeue(
    conditions: tuple[Condition, ...], asked: Mapping[str, HealthAction], indices: tuple[int, ...]
) -> dict[int, str]:
    """Return GPU index -> why the jobs on it end as at a node's failure."""
    found: dict[int, str] = {}
    for condition in _with_action(conditions, asked, HealthAction.REQUEUE):
        for index in indices if condition.index is None else (condition.index,):
            found.setdefault(index, text_of(condition))
    return found


def _with_action(
    conditions: tuple[Condition, ...], asked: Mapping[str, HealthAction], action: HealthAction
) -> Iterator[Condition]:
    return (c for c in conditions if action_of(c.kind, asked) is action)
