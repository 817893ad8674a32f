"""What nvidia-smi prints, for nodes on which NVML's own library interface cannot be used. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpusched.model.readings import Gpu, GpuProcess
from gpusched.model.units import whole_number

_NO_HANDLE = re.compile(r"Unable to determine the device handle for (?:GPU|gpu)\s*(?P<index>\d{1,3}\b(?!:))?.*")
_LOST = re.compile(r"\[?(?:GPU is lost|GPU requires reset)\]?|\[?ERR!\]?|\[?Unknown Error\]?", re.IGNORECASE)
_BEYOND = float(1 << 53)  # no figure of a GPU is that large


class SmiReading(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs, the driver's version, and why some GPUs may be missing."""

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    error: str | None = None


def parse_gpus(
    text: str, apps: str = "", processes: Mapping[int | None, Mapping[str, Any]] | None = None
) -> SmiReading:
    """GPUs from ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``.

    Args:
        text: Lines of 12 columns (payload/gpus.py, GPU_FIELDS) or 9 (OLD_GPU_FIELDS), and complaints among them.
        apps: Output of ``--query-compute-apps=gpu_uuid,pid,used_memory``.
        processes: What /proc says of the pids in ``apps``: user, command, container.

    Returns:
        Figures that are ``[N/A]``, ``[Not Supported]`` and the like are None; a GPU that is lost has an error.
    """
    on_gpu = _parse_apps(apps, processes or {})
    gpus: list[Gpu] = []
    complaints: list[str] = []
    driver = None
    for line in filter(None, (line.strip() for line in text.splitlines())):
        row = [field.strip() for field in line.split(",")]
        if len(row) in (9, 12) and whole_number(row[0]) is not None:
            gpus.append(_gpu(row, on_gpu.get(row[1], ())))
            driver = driver or (_text(row[11]) if len(row) == 12 else None)
        elif (match := _NO_HANDLE.match(line)) and match["index"]:
            gpus.append(Gpu(index=int(match["index"]), error=f"nvidia-smi: {line}"))
        else:
            complaints.append(line if line.startswith("nvidia-smi") else f"nvidia-smi: {line}")
    gpus.sort(key=lambda g: g.index)
    return SmiReading(gpus=tuple(gpus), driver_version=driver, error="; ".join(complaints[:3]) or None)


def _gpu(row: Sequence[str], processes: tuple[GpuProcess, ...]) -> Gpu:
    index, uuid, name = int(row[0]), _text(row[1]), _text(row[2])
    lost = next((field.strip("[]") for field in row[1:7] if _LOST.fullmatch(field)), None)
    if lost is not None and _number(row[3]) is None:
        return Gpu(index=index, uuid=uuid, name=name, error=f"nvidia-smi: {lost}")
    new = len(row) == 12
    mig = row[10].lower() if new else ""
    return Gpu(
        index=index,
        uuid=uuid,
        name=name,
        memory_total_mib=_integer(row[3]),
        memory_used_mib=_integer(row[4]),
        utilization_pct=_number(row[5]),
        power_w=_number(row[6]),
        power_limit_w=_number(row[7]),
        temperature_c=_integer(row[8]),
        ecc_errors=_integer(row[9]) if new else None,
        mig_mode={"enabled": True, "disabled": False}.get(mig),
        mig_error="slices are read by NVML only" if mig == "enabled" else None,
        processes=processes,
    )


def _parse_apps(text: str, known: Mapping[int | None, Mapping[str, Any]]) -> dict[str, tuple[GpuProcess, ...]]:
    found: dict[str, list[GpuProcess]] = {}
    for line in text.splitlines():
        row = [field.strip() for field in line.split(",")]
        pid = whole_number(row[1]) if len(row) == 3 else None
        if pid is None:
            continue
        facts = known.get(pid, {})
        process = GpuProcess(
            pid=pid,
            memory_used_mib=_integer(row[2]),
            user=facts.get("user"),
            command=facts.get("command"),
            container=facts.get("container"),
        )
        found.setdefault(row[0], []).append(process)
    return {gpu: tuple(processes) for gpu, processes in found.items()}


def _text(field: str) -> str | None:
    return None if not field or field.startswith("[") or _LOST.fullmatch(field) or field == "N/A" else field


def _number(field: str) -> float | None:
    try:
        value = float(field.split()[0])  # drivers before 352 print units in spite of nounits
    except (ValueError, IndexError):
        return None
    return value if abs(value) < _BEYOND else None  # neither inf nor NaN


def _integer(field: str) -> int | None:
    value = _number(field)
    return None if value is None else int(value)
