"""Check that GPUs in MIG mode can be used: their slices, and what cutting on demand needs on the node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from gpusched.doctor.findings import Finding, Status
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.resources import Node
from gpusched.nodes.cutting import permission_script, sudo_lines
from gpusched.nodes.transport import CommandResult, Transport

_TRIAL_S = 30.0


def examine_mig(transport: Transport, node: Node, reading: NodeReading, user: str) -> list[Finding]:
    """Return findings about the node's GPUs in MIG mode, and about those that are cut on demand.

    Raises:
        TransportError: The node could not be asked.
    """
    tried = None
    if node.mig is not None and node.cut_on_demand():
        tried = transport.run(permission_script(node.mig, node.runtime), _TRIAL_S)
    return judge_mig(node, reading, tried, user)


def judge_mig(node: Node, reading: NodeReading, tried: CommandResult | None, user: str) -> list[Finding]:
    """Return the findings; ``tried``: of `permission_script`, None where nothing is cut on demand."""
    gpus = [gpu for gpu in reading.gpus if gpu.index in node.indices()]
    found = [*_unreadable(node, gpus), *_slices(node, gpus), *_unable(node, gpus)]
    if tried is not None:
        found.append(_permission(node, tried, user))
    return found


def _unreadable(node: Node, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    failed = [gpu for gpu in gpus if gpu.mig_error]
    if failed:
        hint = "make NVML and python3 work on the node"
        if "mig/monitor" in (failed[0].mig_error or ""):
            hint = "as root on the node: chmod a+r /dev/nvidia-caps/nvidia-capN (N: mig/monitor's number in mig-minors)"
        yield _finding(node, "fail", f"the slices of {_names(failed)} cannot be read: {failed[0].mig_error}", hint)


def _slices(node: Node, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    cut = [gpu for gpu in gpus if gpu.slices]
    if cut:
        counts = Counter(one.profile for gpu in cut for one in gpu.slices if one.usable)
        words = ", ".join(f"{number} {profile}" for profile, number in sorted(counts.items()))
        yield _finding(node, "ok", f"{_names(cut)} cut into {words or 'no slices for jobs'}")
    parts = [one for gpu in cut for one in gpu.slices if not one.usable and gpu.index not in node.cut_on_demand()]
    if parts:
        where = f"GPU instance {parts[0].gi} of GPU {parts[0].gpu}"
        message = f"{where} has no compute instance of its full size, so jobs cannot get it"
        yield _finding(node, "warn", message, f"nvidia-smi mig -i {parts[0].gpu} -gi {parts[0].gi} -cci as root")
    empty = [gpu for gpu in gpus if gpu.mig_mode and not gpu.slices and not gpu.mig_error]
    for gpu in empty:
        if gpu.index not in node.cut_on_demand():
            smi = f"nvidia-smi -i {gpu.index} -mig 0"
            hint = f"to use it whole: {smi}; to cut it: nvidia-smi mig -i {gpu.index} -cgi PROFILES -C"
            yield _finding(node, "fail", f"GPU {gpu.index} is in MIG mode without slices, and runs nothing", hint)


def _unable(node: Node, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    without = [g for g in gpus if g.index in node.cut_on_demand() and g.mig_mode is None and not g.error]
    if without:
        hint = "leave it out of mig: {mode: on-demand, gpus: [...]}"
        yield _finding(node, "fail", f"{_names(without)} cannot be cut: {without[0].name or 'it'} has no MIG", hint)


def _permission(node: Node, tried: CommandResult, user: str) -> Finding:
    assert node.mig is not None
    if tried.exit_code == 0:
        return _finding(node, "ok", "GPUs may be cut on demand")
    line = sudo_lines(node.mig, node.runtime, user or "USER")
    return _finding(node, "fail", f"GPUs cannot be cut on demand: {tried.complaint}", f"in sudoers on the node: {line}")


def _names(gpus: Sequence[Gpu]) -> str:
    return f"GPU {', '.join(str(gpu.index) for gpu in gpus)}"


def _finding(node: Node, status: Status, message: str, hint: str = "") -> Finding:
    return Finding(node.name, "mig", status, message, hint)
