"""Health conditions of GPUs and nodes: the kinds, their actions, and what is stored.

A kind has a name, a cause, a default action, and texts for people. `Condition` is a kind observed on one GPU or node,
like a node condition in Kubernetes. `gpusched.controller.health` finds conditions in readings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Literal

import msgspec


class HealthAction(StrEnum):
    """The action that a condition leads to, from the mildest to the most severe."""

    WARN = "warn"  # shown and notified
    NO_NEW_JOBS = "no-new-jobs"  # the GPU gets no new job; for a node's condition, none of its GPUs
    DRAIN = "drain"  # the node is drained until `gpusched resume`
    REQUEUE = "requeue"  # as no-new-jobs, and the jobs there are requeued as after a node failure


ACTIONS = tuple(HealthAction)
EVENT_S, LEVEL_S, LOST_S = 3600.0, 300.0, 10.0
"""Seconds after which a condition that is no longer seen is over: from messages, from values, of a GPU off the bus."""


class ConditionKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of condition.

    Attributes:
        scope: What it concerns.
        fault: The cause: the job's program, the GPU, or the rest of the machine.
        action: The default action. max_action: The most severe one that the operator may choose.
        title: A short description. advice: What to do.
        needs_two: Two readings in a row must show it, since its values fluctuate.
        over_s: Seconds after it was last seen when it is over.
    """

    name: str
    scope: Literal["gpu", "node"] = "gpu"
    fault: Literal["program", "gpu", "machine"] = "gpu"
    action: HealthAction
    max_action: HealthAction = HealthAction.REQUEUE
    title: str
    advice: str
    needs_two: bool = False
    over_s: float = LEVEL_S


_WARN, _OUT = HealthAction.WARN, HealthAction.NO_NEW_JOBS
_RESET = "drain the node, and reset the GPU once it is idle (nvidia-smi --gpu-reset -i N as root)"
_REPLACE = "have the GPU replaced"
KINDS: tuple[ConditionKind, ...] = (
    ConditionKind(
        name="xid-program", fault="program", action=_WARN, max_action=_WARN, over_s=EVENT_S,
        title="error of a program (Xid)",
        advice="debug the program, for example with compute-sanitizer",
    ),
    ConditionKind(
        name="xid-gpu", action=_OUT, title="error of the GPU (Xid)",
        advice=f"{_RESET}, then gpusched resume NODE; {_REPLACE} if it recurs",
    ),
    ConditionKind(
        name="xid-machine", scope="node", fault="machine", action=_WARN, over_s=EVENT_S,
        title="error of the driver or of PCIe (Xid)",
        advice="check the driver version, the PCIe slot and the kernel log",
    ),
    ConditionKind(
        name="xid-other", action=_WARN, over_s=EVENT_S, title="other message of the driver (Xid)",
        advice="see NVIDIA's catalog of Xid errors",
    ),
    ConditionKind(
        name="nvswitch", scope="node", fault="machine", action=_OUT, title="fatal error of an NVSwitch (SXid)",
        advice="reset the GPUs and switches, or reboot, then gpusched resume NODE",
    ),
    ConditionKind(
        name="off-bus", action=_OUT, needs_two=True, over_s=LOST_S, title="GPU has fallen off the bus",
        advice="reboot the node, then gpusched resume NODE; check the PCIe slot and its power",
    ),
    ConditionKind(
        name="needs-reset", action=_OUT, title="the driver requests a reset",
        advice="do what the driver requests (nvidia-smi -q)",
    ),
    ConditionKind(name="ecc", action=_OUT, title="uncorrectable memory errors since the last reset", advice=_RESET),
    ConditionKind(
        name="remap-pending", action=_OUT, title="memory rows or pages are replaced at the next reset", advice=_RESET,
    ),
    ConditionKind(name="remap-failed", action=_OUT, title="memory rows could not be replaced", advice=_REPLACE),
    ConditionKind(
        name="pages-retired", action=_WARN, title="many memory pages retired",
        advice=f"{_REPLACE}: the driver can retire at most 64 pages",
    ),
    ConditionKind(
        name="nvlink-down", action=_OUT, needs_two=True, title="NVLinks are down",
        advice="check nvidia-smi nvlink -s and the fabric manager",
    ),
    ConditionKind(
        name="nvlink-errors", action=_WARN, over_s=EVENT_S, title="errors on NVLinks",
        advice="check nvidia-smi nvlink -e; reseat the GPU or the cable if they continue",
    ),
    ConditionKind(
        name="pcie-width", fault="machine", action=_WARN, needs_two=True,
        title="PCIe link has fewer lanes than it supports",
        advice="reseat the GPU or the riser",
    ),
    ConditionKind(
        name="pcie-speed", fault="machine", action=_WARN, needs_two=True,
        title="PCIe link is slower under load than it supports",
        advice="reseat the GPU or the riser; check the BIOS settings",
    ),
    ConditionKind(
        name="pcie-replays", fault="machine", action=_WARN, over_s=EVENT_S, title="PCIe replays transfers",
        advice="reseat the GPU or the riser if it continues",
    ),
    ConditionKind(
        name="clocks-thermal", fault="machine", action=_WARN, needs_two=True, title="clocks reduced by heat",
        advice="check fans, filters and the room's cooling",
    ),
    ConditionKind(
        name="clocks-power", fault="machine", action=_WARN, needs_two=True, title="clocks reduced by the power brake",
        advice="check the power supplies",
    ),
    ConditionKind(
        name="temperature", fault="machine", action=_WARN, needs_two=True, title="temperature near its limit",
        advice="check fans, filters and the room's cooling",
    ),
)  # fmt: skip
"""All kinds, in the order shown in tables. `XIDS` maps each Xid to its kind."""
KIND = {kind.name: kind for kind in KINDS}

# Meanings and causes are from NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors), reworded. A program's error is
# one for which it advises to restart and check the application; a GPU's, one that needs a reset or reboot for the GPU.
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
"""Xids that are ignored: tests, and changes that NVML's values show better (row remapping, recovery action)."""


class Xid(msgspec.Struct, frozen=True):
    """The kind of condition that an Xid is, and its meaning."""

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
STICKY_KINDS = frozenset({"xid-gpu", "nvswitch", "off-bus", "remap-failed"})
"""Kinds that stay, if found in a message, until the node is resumed or rebooted, or the GPU reset."""


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One condition of a GPU or a node.

    Attributes:
        kind: A name of `KINDS`.
        gpu: UUID of the GPU; None: it is the node's. index: The GPU's NVML index when last seen.
        since, last_seen: Unix seconds.
        detail: What was seen: ``Xid 79 (the GPU has fallen off the bus)``.
        job: The job that was on the GPU, if its program is the cause.
        stays: It is over only when the node is resumed or rebooted, or the GPU reset.
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
        """Return its key, unique among the conditions of a node."""
        return self.kind, self.gpu

    @property
    def where(self) -> str:
        """Return ``GPU 3``, or "" for the node itself."""
        return "" if self.index is None else f"GPU {self.index}"


class GpuCounters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters of a GPU as last read, so that an increase can be seen; ``nvlinks``: the most that were ever up."""

    uuid: str | None = None
    bus: str | None = None
    energy_j: float | None = None
    nvlinks: int | None = None
    nvlink_errors: int | None = None
    nvlink_recoveries: int | None = None
    pcie_replays: int | None = None


class NodeHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The health of a node as stored between two probes.

    Attributes:
        conditions: Its present conditions.
        suspected: Conditions seen in one reading only, of kinds that need two.
        counters: Counters by the GPU's NVML index.
        boot_id: The boot in which the rest was read.
        log_us: Kernel messages up to this time (microseconds since boot) are processed.
        log_source: Where kernel messages come from (`KernelLog.source`).
    """

    conditions: tuple[Condition, ...] = ()
    suspected: tuple[Condition, ...] = ()
    counters: dict[int, GpuCounters] = {}
    boot_id: str | None = None
    log_us: int | None = None
    log_source: str = ""


def action_of(kind: str, overrides: Mapping[str, HealthAction]) -> HealthAction:
    """Return the action for a kind; ``overrides``: the operator's choices, by kind. Kinds of a newer version warn."""
    known = KIND.get(kind)
    return HealthAction.WARN if known is None else overrides.get(kind, known.action)


def text_of(condition: Condition) -> str:
    """Return the condition for people: ``Xid 48 (uncorrectable memory error)``."""
    known = KIND.get(condition.kind)
    return condition.detail or (known.title if known else condition.kind)


def out_of_service(
    conditions: tuple[Condition, ...], overrides: Mapping[str, HealthAction], indices: tuple[int, ...]
) -> dict[int, str]:
    """Return GPU index -> why it gets no new job, from the node's conditions; ``indices``: all its GPUs."""
    found: dict[int, list[str]] = {}
    for condition in conditions:
        if action_of(condition.kind, overrides) in (HealthAction.NO_NEW_JOBS, HealthAction.REQUEUE):
            for index in indices if condition.index is None else (condition.index,):
                found.setdefault(index, []).append(text_of(condition))
    return {index: "; ".join(dict.fromkeys(texts)) for index, texts in found.items()}


def to_requeue(
    conditions: tuple[Condition, ...], overrides: Mapping[str, HealthAction], indices: tuple[int, ...]
) -> dict[int, str]:
    """Return GPU index -> why jobs on it are requeued; ``indices``: all GPUs of the node."""
    found: dict[int, str] = {}
    for condition in _with_action(conditions, overrides, HealthAction.REQUEUE):
        for index in indices if condition.index is None else (condition.index,):
            found.setdefault(index, text_of(condition))
    return found


def _with_action(
    conditions: tuple[Condition, ...], overrides: Mapping[str, HealthAction], action: HealthAction
) -> Iterator[Condition]:
    return (c for c in conditions if action_of(c.kind, overrides) is action)
