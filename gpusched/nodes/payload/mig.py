"""A GPU in MIG mode: its GPU instances, the compute instances in them, and what its model can be cut into."""
# ruff: noqa: UP031

from gpusched.nodes.payload.calls import attempt, code, read_memory, running, text

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from typing import Any

PROFILES = 32  # NVML numbers them (NVML_GPU_INSTANCE_PROFILE_...); today there are 18
INSTANCE_IDS = 15  # of GPU instances: 0 is the whole GPU, the last seven are those of one unit
NO_PERMISSION = 4
MONITOR_HINT = "this account may not list GPU instances; it needs to read the device file of mig/monitor"


def read_mig(
    nvml: "Any", handle: "Any", gpu: "dict[str, Any]", tables: "dict[Any, list[dict[str, Any]]]"
) -> "list[dict[str, Any]]":
    """Put slices (and profiles, the first time for a model) into ``gpu``; return its processes.

    A GPU instance without a compute instance, as a cut that was broken off leaves it, is among the slices.
    """
    profiles = {profile["profile_id"]: profile for profile in add_profiles(nvml, handle, gpu, tables)}
    slices, processes = {}, []  # type: dict[int, dict[str, Any]], list[dict[str, Any]]
    for number in range(INSTANCE_IDS):
        errors = []  # type: list[Any]
        instance = attempt(errors, nvml.nvmlDeviceGetGpuInstanceById, handle, number)
        info = None if instance is None else attempt(errors, nvml.nvmlGpuInstanceGetInfo, instance)
        if info is not None:
            slices[number] = one_slice(gpu["index"], info, profiles)
        elif code(errors[0]) == NO_PERMISSION:
            gpu["mig_error"] = MONITOR_HINT
            break
    for index in range(attempt([], nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        device = attempt([], nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        gi = None if device is None else attempt([], nvml.nvmlDeviceGetGpuInstanceId, device)
        if gi is None:
            continue
        if gi in slices:
            add_device(nvml, device, slices[gi], index)
        processes += [dict(p, gi=gi) for p in running(nvml, device, ("Compute",), [])]
    gpu["slices"] = [slices[gi] for gi in sorted(slices, key=lambda gi: slices[gi]["start"])]
    return sorted(processes, key=lambda p: p["pid"])


def add_profiles(
    nvml: "Any", handle: "Any", gpu: "dict[str, Any]", tables: "dict[Any, list[dict[str, Any]]]"
) -> "list[dict[str, Any]]":
    """Return what a GPU can be cut into; of the first of a model it goes into ``gpu``."""
    model = gpu.get("name")
    if model not in tables:
        tables[model] = gpu["mig_profiles"] = read_profiles(nvml, handle)
    return tables[model]


def one_slice(gpu: int, info: "Any", profiles: "dict[int, dict[str, Any]]") -> "dict[str, Any]":
    """Return a GPU instance as a slice without a compute instance."""
    profile = profiles.get(info.profileId, {})
    return {
        "gpu": gpu, "gi": info.id, "start": info.placement.start, "size": info.placement.size,
        "profile": profile.get("name") or "profile %d" % info.profileId, "memory_mib": profile.get("memory_mib"),
    }  # fmt: skip


def add_device(nvml: "Any", device: "Any", found: "dict[str, Any]", index: int) -> None:
    """Add a MIG device to the slice of its GPU instance; one that has only a part of it is no device for jobs."""
    parts = attempt([], nvml.nvmlDeviceGetAttributes, device)
    if found.get("ci") is not None or (
        parts is not None and parts.computeInstanceSliceCount < parts.gpuInstanceSliceCount
    ):
        found["uuid"] = None
        return
    found["uuid"] = text(attempt([], nvml.nvmlDeviceGetUUID, device))
    found["ci"] = attempt([], nvml.nvmlDeviceGetComputeInstanceId, device)
    found["device"] = index
    memory = read_memory(nvml, device, [])
    if memory is not None:
        found["memory_used_mib"] = memory.used >> 20


def read_profiles(nvml: "Any", handle: "Any") -> "list[dict[str, Any]]":
    """Return the profiles that a GPU can be cut by, also where MIG mode is off."""
    found = []
    for number in range(PROFILES):
        info = attempt([], nvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, number)
        if info is None:  # a driver without the second version of the call has the first
            info = attempt([], nvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, number, 1)
        places = [] if info is None else read_placements(nvml, handle, info.id)
        if not places:
            continue
        found.append({
            "name": name_of(info), "compute": info.sliceCount,
            "memory_units": places[0][1], "memory_mib": info.memorySizeMB, "placements": places,
            "profile_id": info.id, "max_count": info.instanceCount,
        })  # fmt: skip
    return found


def read_placements(nvml: "Any", handle: "Any", profile: int) -> "list[tuple[int, int]]":
    """Return (start, size) of each place that a profile may take."""
    import ctypes  # as pynvml has done

    errors = []  # type: list[Any]
    count = ctypes.c_uint(0)
    call = nvml.nvmlDeviceGetGpuInstancePossiblePlacements
    attempt(errors, call, handle, profile, None, ctypes.byref(count))
    places = (nvml.c_nvmlGpuInstancePlacement_t * max(1, count.value))()
    attempt(errors, call, handle, profile, places, ctypes.byref(count))
    return [] if errors else sorted((place.start, place.size) for place in places[: count.value])


def name_of(info: "Any") -> str:
    """Return NVIDIA's name of a profile; made of its units where an old driver does not say it."""
    name = text(getattr(info, "name", "")) or "%dg.%dgb" % (info.sliceCount, -(-info.memorySizeMB // 1024))
    return str(name).replace("MIG ", "")
