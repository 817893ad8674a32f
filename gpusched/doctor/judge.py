"""Whether a node is in order. Pure: a declared node, an inspection and a reading in, findings out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gpusched.controller.health import judge_gpu
from gpusched.doctor.findings import Finding, Status
from gpusched.model.gpustates import foreign_processes
from gpusched.model.health import KIND, Condition, GpuCounters, HealthAction, action_of, text_of
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.resources import Node, RuntimeName
from gpusched.model.units import count_of, format_memory, local_time
from gpusched.nodes.inspection import Inspection, RuntimeFacts

_SKEW_WARN_S, _SKEW_FAIL_S = 2.0, 30.0
_DISK_WARN_MIB, _DISK_FAIL_MIB = 5 * 1024, 200
_MEMORY_SLACK = 0.9  # "1024 GB" of a data sheet shows as 1007 GiB: firmware and kernel keep some
_PODMAN_CDI = (4, 1)
_CDI_HINT = "on the node, as root: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
_TOOLKIT_HINT = "install nvidia-container-toolkit on the node, then: nvidia-ctk runtime configure --runtime=docker"


def judge_host(node: Node, seen: Inspection) -> list[Finding]:
    """Check shell, python3, flock, home, disk, kills at logout, and MPS where GPUs are shared by it."""
    return [*_shell(node, seen), *_flock(node, seen), *_home(node, seen), *_logout(node, seen), *_mps(node, seen)]


def judge_access(node: Node, seen: Inspection) -> list[Finding]:
    """Check what reading alone needs: the shell, python3, and a home for the cached probe."""
    return [*_shell(node, seen), *_home(node, seen)]


def judge_gpus(node: Node, reading: NodeReading, seen: Inspection, *, sizes: bool = True) -> list[Finding]:
    """Compare declared with found; check GPU health and the clock; with ``sizes`` also cores and memory."""
    found = [*_gpu_source(node, reading, seen)]
    if reading.source != "none":
        found += [*_gpu_count(node, reading), *_gpu_health(node, reading)]
    return [*found, *(_cores_and_memory(node, reading) if sizes else ()), *_clock(node, reading)]


def judge_health(node: Node, conditions: Iterable[Condition], reading: NodeReading | None) -> list[Finding]:
    """Return the conditions that the controller found, those of the reading, and whether Xids can be read."""
    conditions = tuple(conditions)
    found = [_condition(node, condition) for condition in conditions]
    if reading is not None:
        known = {(c.kind, c.index) for c in conditions}
        found += [_condition(node, c) for c in _seen_now(node, reading) if (c.kind, c.index) not in known]
    if reading is not None and reading.kernel is not None and not reading.kernel.source:
        hint = "let the account read it: sysctl kernel.dmesg_restrict=0, the group adm, or kernel_log: with a file"
        message = "the kernel's log cannot be read, so the driver's Xids are not seen"
        found.append(_finding(node, "kernel log", "warn", message, hint))
    return found


def _seen_now(node: Node, reading: NodeReading) -> Iterator[Condition]:
    """Yield what one reading proves and `_one_gpu` does not say: there may be no earlier reading."""
    for gpu in reading.gpus:
        if gpu.index not in node.indices():
            continue
        for kind, detail in judge_gpu(gpu.index, gpu, reading, GpuCounters()).kinds.items():
            if detail and not KIND[kind].needs_two and kind != "ecc":
                yield Condition(
                    kind=kind, gpu=gpu.uuid, index=gpu.index, detail=detail, since=reading.time, last_seen=reading.time
                )


def _condition(node: Node, condition: Condition) -> Finding:
    kind, action = KIND.get(condition.kind), action_of(condition.kind, node.health)
    where = f"{condition.where}: " if condition.where else ""
    message = f"{where}{text_of(condition)} since {local_time(condition.since)} ({condition.kind}: {action})"
    status: Status = "warn" if action is HealthAction.WARN else "fail"
    return _finding(node, "health", status, message, kind.advice if kind is not None else "")


def judge_runtime(node: Node, seen: Inspection, reading: NodeReading | None) -> list[Finding]:
    """Check that jobs can be started as declared, GPUs included."""
    if node.runtime == RuntimeName.PROCESS:
        return [_finding(node, "runtime", "ok", "process: jobs run without containers")]
    name = node.runtime
    if name not in tuple(RuntimeName):
        return [_finding(node, "runtime", "ok", f"{name}: from another package; only a job can test it")]
    facts = seen.runtime(name)
    if facts is None:
        hint = f"install {name} on the node, or declare another runtime (podman, docker, apptainer, process)"
        return [_finding(node, "runtime", "fail", f"{name} is not installed", hint)]
    if facts.error:
        return [_finding(node, "runtime", "fail", f"{name} does not work: {facts.error}", _works_hint(node, seen))]
    problems = [*_runtime_gpus(node, facts), *_runtime_limits(node, facts, seen)]
    if facts.disk_free_mib is not None and facts.disk_free_mib < _DISK_WARN_MIB:
        problems.append(_disk(node, "images", f"{name}'s storage", facts.disk_free_mib))
    if reading is not None and reading.runtime_error:
        problems.append(_finding(node, "runtime", "fail", f"{name}: {reading.runtime_error}", _works_hint(node, seen)))
    return problems or [_finding(node, "runtime", "ok", f"{name} {facts.version}".strip())]


# The host


def _shell(node: Node, seen: Inspection) -> Iterator[Finding]:
    if seen.noise:
        hint = "make the account's start-up files print nothing without a terminal (~/.bashrc, ~/.profile)"
        yield _finding(node, "shell", "warn", f'logging in prints "{seen.noise.splitlines()[0]}"', hint)
    if seen.python3 is None and node.gpus and not node.simulated_gpus:
        hint = "install python3 (Debian: python3-minimal) to read NVML directly"
        yield _finding(node, "python3", "warn", "not installed; GPUs are read by parsing nvidia-smi", hint)


def _flock(node: Node, seen: Inspection) -> Iterator[Finding]:
    if not seen.flock:
        yield _finding(node, "flock", "fail", "not installed; no job can start", "install util-linux on the node")


def _home(node: Node, seen: Inspection) -> Iterator[Finding]:
    where = f"the home {seen.home or 'folder'}"
    if seen.home_error:
        hint = "give the account a writable home: gpusched keeps a few small files per job there"
        yield _finding(node, "home", "fail", f"{where} cannot be written: {seen.home_error}", hint)
    elif seen.home_free_mib is not None:
        yield _disk(node, "disk", where, seen.home_free_mib)


def _logout(node: Node, seen: Inspection) -> Iterator[Finding]:
    if not seen.uid or seen.linger is not False:
        return
    hint = f"on the node, as root: loginctl enable-linger {seen.user or seen.uid}"
    if node.runtime == RuntimeName.PROCESS and seen.kill_user_processes:
        yield _finding(node, "logout", "fail", "systemd-logind ends the account's processes when SSH disconnects", hint)
    elif node.runtime == RuntimeName.PODMAN:
        message = "rootless podman loses its runtime folder when the account's last SSH session ends"
        yield _finding(node, "logout", "warn", message, hint)


def _clock(node: Node, reading: NodeReading) -> Iterator[Finding]:
    skew = reading.clock_skew_s
    if skew is None:
        return
    status: Status = "fail" if abs(skew) > _SKEW_FAIL_S else "warn" if abs(skew) > _SKEW_WARN_S else "ok"
    message = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine"
    hint = "" if status == "ok" else "run a time service on both (chrony or systemd-timesyncd)"
    yield _finding(node, "clock", status, message, hint)


def _cores_and_memory(node: Node, reading: NodeReading) -> Iterator[Finding]:
    if reading.cores is not None and reading.cores < node.cores:
        message = f"{count_of(node.cores, 'core')} declared, {reading.cores} found"
        yield _finding(node, "cores", "fail", message, f"set cores: {reading.cores} in the inventory")
    total = reading.memory_total_mib
    if total is not None and total < node.memory_mib:
        status: Status = "fail" if total < node.memory_mib * _MEMORY_SLACK else "warn"
        message = f"{format_memory(node.memory_mib)} of memory declared, {format_memory(total)} found"
        yield _finding(node, "memory", status, message, f"set memory: {total >> 10 or 1}G in the inventory")


def _mps(node: Node, seen: Inspection) -> Iterator[Finding]:
    if node.sharing is None or node.sharing.mode != "mps":
        return
    pipe = node.sharing.pipe
    if seen.mps:
        yield _finding(node, "mps", "ok", f"the control daemon's pipe is in {pipe}")
    else:
        message = f"sharing mode is MPS, but there is no control daemon's pipe in {pipe}"
        hint = f"on the node: CUDA_MPS_PIPE_DIRECTORY={pipe} nvidia-cuda-mps-control -d, or sharing: mode: time-slicing"
        yield _finding(node, "mps", "fail", message, hint)


# The GPUs


def _gpu_source(node: Node, reading: NodeReading, seen: Inspection) -> Iterator[Finding]:
    if reading.source == "simulated":
        hint = "remove simulated_gpus to use real GPUs"
        yield _finding(node, "nvml", "warn", "figures are simulated, as declared", hint)
    elif reading.source == "none" and node.gpus:
        why = reading.gpu_error or "neither libnvidia-ml.so.1 nor nvidia-smi found"
        missing = reading.gpu_error is None or "Library Not Found" in why
        hint = "install the NVIDIA driver, which includes both" if missing else "run nvidia-smi on the node"
        yield _finding(node, "nvml", "fail", why, hint)
    elif reading.source == "nvidia-smi":
        why = f" ({reading.gpu_error})" if reading.gpu_error else ""
        hint = "" if seen.python3 is None else "check libnvidia-ml.so.1 on the node: it comes with the NVIDIA driver"
        yield _finding(node, "nvml", "warn", f"NVML cannot be used{why}; parsing nvidia-smi instead", hint)
    elif reading.source == "nvml":
        yield _finding(node, "nvml", "ok", f"driver {reading.driver_version or 'of unknown version'}")


def _gpu_count(node: Node, reading: NodeReading) -> Iterator[Finding]:
    present = {g.index: g for g in reading.gpus}
    missing = [i for i in node.indices() if i not in present]
    if missing:
        numbers, are = ", ".join(map(str, missing)), "is" if len(missing) == 1 else "are"
        message = f"GPU {numbers} {are} declared but missing ({len(present)} found)"
        hint = "set gpus: or gpu_indices: as found, or check why the driver does not see it: dmesg | grep -i nvrm"
        yield _finding(node, "gpus", "fail", message, hint)
    elif len(present) > node.gpus and node.gpu_indices is None:
        message = f"{node.gpus} declared, {len(present)} found"
        hint = f"set gpus: {len(present)}, or gpu_indices: with those to use"
        yield _finding(node, "gpus", "warn", message, hint)
    names = {g.name for g in reading.gpus if g.name}
    wanted = re.split(r"[\s_-]", node.gpu_type.lower())[0]  # A100 of A100-80GB
    if names and not any(wanted in re.sub(r"[\s-]+", "", n).lower() for n in names):
        message = f"gpu_type is {node.gpu_type}, the driver reports {', '.join(sorted(names))}"
        yield _finding(node, "gpu type", "warn", message, "fix gpu_type in the inventory")


def _gpu_health(node: Node, reading: NodeReading) -> Iterator[Finding]:
    handed_out = [g for g in reading.gpus if g.index in node.indices()]
    problems_found = [f for gpu in handed_out for f in _one_gpu(node, gpu)]
    yield from problems_found
    if handed_out and not problems_found:
        names = ", ".join(sorted({g.name for g in handed_out if g.name}))
        yield _finding(node, "gpus", "ok", f"{len(handed_out)} {names}".strip())


def _one_gpu(node: Node, gpu: Gpu) -> Iterator[Finding]:
    if gpu.error:
        hint = f"nvidia-smi -r -i {gpu.index} on the node, or reboot it; the other GPUs stay in use"
        yield _finding(node, "gpus", "fail", f"GPU {gpu.index} is lost: {gpu.error}", hint)
    if gpu.ecc_errors:
        hint = f"reset it when idle (nvidia-smi -r -i {gpu.index}); if they recur, have it replaced"
        yield _finding(node, "ecc", "fail", f"GPU {gpu.index} has {gpu.ecc_errors} uncorrected memory errors", hint)
    foreign = foreign_processes(gpu, node.sharing is not None and node.sharing.mode == "mps")
    if foreign:
        process = foreign[0]
        message = f"GPU {gpu.index} is used by pid {process.pid} of {process.user or 'an unknown user'}, not by a job"
        yield _finding(node, "foreign", "warn", message, "it is not allocated until that process ends")


# The runtime


def _runtime_gpus(node: Node, facts: RuntimeFacts) -> Iterator[Finding]:
    if not node.gpus or node.simulated_gpus:
        return
    if node.runtime == RuntimeName.PODMAN:
        version = tuple(int(n) for n in re.findall(r"[0-9]+", facts.version)[:2])
        if version < _PODMAN_CDI:
            message = f"podman {facts.version or '?'} cannot give GPUs to containers (CDI came with 4.1)"
            yield _finding(node, "runtime", "fail", message, "install podman 4.1 or later there, or declare docker")
        if not facts.cdi:
            yield _finding(node, "cdi", "fail", "no CDI spec for nvidia.com/gpu, so podman cannot give GPUs", _CDI_HINT)
    elif node.runtime == RuntimeName.DOCKER and not facts.toolkit:
        message = "the NVIDIA container toolkit is missing, so docker cannot give GPUs"
        yield _finding(node, "toolkit", "fail", message, _TOOLKIT_HINT)


def _runtime_limits(node: Node, facts: RuntimeFacts, seen: Inspection) -> Iterator[Finding]:
    missing = [c for c in ("cpu", "memory") if facts.controllers is not None and c not in facts.controllers]
    if seen.uid and missing:
        hint = (
            "on the node, as root: /etc/systemd/system/user@.service.d/delegate.conf with "
            "[Service] Delegate=cpu cpuset io memory pids, then systemctl daemon-reload and log in again"
        )
        message = f"rootless podman may not limit {' and '.join(missing)} here, and refuses jobs with such limits"
        yield _finding(node, "limits", "fail", message, hint)


def _works_hint(node: Node, seen: Inspection) -> str:
    if node.runtime == RuntimeName.DOCKER:
        return f"is dockerd running, and is {seen.user or 'the account'} in the group docker?"
    return f"run `{node.runtime} info` on the node as {seen.user or 'the account'}"


# Words


def _disk(node: Node, check: str, where: str, free_mib: int) -> Finding:
    status: Status = "fail" if free_mib < _DISK_FAIL_MIB else "warn" if free_mib < _DISK_WARN_MIB else "ok"
    hint = "" if status == "ok" else f"free space in {where} on the node"
    return _finding(node, check, status, f"{format_memory(free_mib)} free in {where}", hint)


def _finding(node: Node, check: str, status: Status, message: str, hint: str = "") -> Finding:
    return Finding(node.name, check, status, message, hint)
