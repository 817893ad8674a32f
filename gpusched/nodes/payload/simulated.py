"""Made-up GPU figures for a demonstration on a machine without GPUs; marked as simulated wherever they go."""
# ruff: noqa: UP031

import json
import math
import os
import time

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from typing import Any

NAME = "Simulated A100-like"
MEMORY_MIB, LIMIT_W, IDLE_W, BUSY_W, BUSY_PCT = 81920, 400.0, 55.0, 320.0, 92.0
ENERGY_FILE = "simulated-energy.json"


def read(root: str, request: "dict[str, Any]", containers: "Any") -> "dict[str, Any]":
    """Figures of the declared GPUs: busy where a running attempt holds them. ``root`` keeps the energy counters."""
    now = time.time()
    busy = jobs_by_gpu(root, containers or [])
    indices = request.get("indices") or []
    powers = {i: (BUSY_W + jitter(now, i, 12.0) if i in busy else IDLE_W) for i in indices}
    energy = integrate(os.path.join(root, ENERGY_FILE), powers, now)
    figures = [simulated_gpu(i, busy.get(i), powers[i], energy[i], now, request["node"]) for i in indices]
    return {"source": "simulated", "gpu_error": None, "driver_version": "simulated", "gpus": figures}


def simulated_gpu(
    index: int, job: "dict[str, Any] | None", power: float, energy: float, now: float, node: str
) -> "Any":
    """Return one GPU. Links: pairs under a switch, quads on a socket, as on an 8-GPU server."""
    near = {j: 50 if j // 2 == index // 2 else 20 if j // 4 == index // 4 else 10 for j in range(8) if j != index}
    used = int(MEMORY_MIB * 0.6) if job else 0
    process = None
    if job and job.get("pid"):
        process = {"pid": job["pid"], "memory_used_mib": used, "container": job["name"]}
    return {
        "index": index, "uuid": "SIM-%s-%d" % (node, index), "name": NAME,
        "memory_total_mib": MEMORY_MIB, "memory_used_mib": used,
        "utilization_pct": round(BUSY_PCT + jitter(now, index, 5.0), 1) if job else 0.0,
        "power_w": round(power, 1), "power_limit_w": LIMIT_W, "energy_j": round(energy, 1),
        "temperature_c": 64 if job else 31, "ecc_errors": 0, "mig_mode": False,
        "processes": [process] if process else [], "links": near,
    }  # fmt: skip


def jobs_by_gpu(root: str, containers: "list[dict[str, Any]]") -> "dict[int, dict[str, Any]]":
    """GPU index -> the running attempt that holds it, by its ``meta`` file."""
    found = {}
    for container in containers:
        if container.get("phase") != "running":
            continue
        try:
            with open(os.path.join(root, container["name"], "meta"), encoding="utf-8") as file:
                meta = dict(line.rstrip("\n").split("=", 1) for line in file if "=" in line)
            found.update({int(i): container for i in meta.get("gpus", "").split(",") if i.strip()})
        except (OSError, ValueError):
            continue
    return found


def jitter(now: float, index: int, size: float) -> float:
    """Return a small swing that depends only on time and index."""
    return size * math.sin(now / 7.0 + 1.7 * index)


def integrate(path: str, powers: "dict[int, float]", now: float) -> "dict[int, float]":
    """Energy counters in J: the last ones plus what was drawn since, at the power seen last."""
    try:
        with open(path, encoding="utf-8") as file:
            last = json.load(file)
        since = max(0.0, now - last["time"])
        energy = {i: last["energy_j"].get(str(i), 0.0) + since * last["power_w"].get(str(i), IDLE_W) for i in powers}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        energy = dict.fromkeys(powers, 0.0)
    part = "%s.%d" % (path, os.getpid())
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(part, "w", encoding="utf-8") as file:
            json.dump({"time": now, "power_w": powers, "energy_j": energy}, file)
        os.rename(part, path)
    except OSError:
        pass
    return energy
