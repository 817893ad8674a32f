"""A GPU in MIG mode: its GPU instances, the compute instances in them, and what its model can be cut into."""
# ruff: noqa: UP031

from gpusched.nodes.payload.calls import attempt, code, read_memory, running, text

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from typing import Any

PROFILES = 24  # NVML numbers them (NVML_GPU_INSTANCE_PROFILE_...); today there are 18
NO_PERMISSION = 4
UNKNOWN_CALL_CODES = (13, 25)
MONITOR_HINT = "this account may not list GPU instances; it needs to read the device file of mig/monitor"


def read_mig(
    nvml: "Any", handle: "Any", gpu: "dict[str, Any]", tables: "dict[Any, list[dict[str, Any]]]"
) -> "list[dict[str, Any]]":
    """Put slices (and profiles, the first time for a model) into ``gpu``; return its processes.

    A GPU instance without a compute instance, as a cut that was broken off leaves it, is among the slices.
    """
    profiles = {profile["profile_id"]: profile for profile in add_profiles(nvml, handle, gpu, tables)}
    slices, processes = {}, []  # type: dict[int, dict[str, Any]], list[dict[str, Any]]
    errors = []  # type: list[Any]
    for index in range(attempt([], nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        device = attempt([], nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        gi = None if device is None else attempt([], nvml.nvmlDeviceGetGpuInstanceId, device)
        if gi is None:
            continue
        processes += [dict(p, gi=gi) for p in running(nvml, device, ("Compute",), [])]
        if gi not in slices:
            instance = attempt(errors, nvml.nvmlDeviceGetGpuInstanceById, handle, gi)
            add_instance(nvml, instance, gpu["index"], profiles, slices)
        if gi in slices:
            add_device(nvml, device, slices[gi], index, profiles)
    if any(code(error) == NO_PERMISSION for error in errors):
        gpu["mig_error"] = MONITOR_HINT
    elif sum(profiles[s["id"]]["compute"] for s in slices.values()) < most_compute(profiles):
        for profile in profiles:  # what has no compute instance is no MIG device
            for instance in instances_of(nvml, handle, profile, profiles[profile]["max_count"]):
                add_instance(nvml, instance, gpu["index"], profiles, slices)
    for found in slices.values():
        del found["id"]
    gpu["slices"] = sorted(slices.values(), key=lambda found: found["start"])
    return sorted(processes, key=lambda p: p["pid"])


def most_compute(profiles: "dict[int, dict[str, Any]]") -> int:
    """Return the compute units of a whole GPU."""
    return max([int(profile["compute"]) for profile in profiles.values()] or [0])


def instances_of(nvml: "Any", handle: "Any", profile: int, most: int) -> "list[Any]":
    """Return a GPU's instances of a profile."""
    import ctypes  # as pynvml has done

    count = ctypes.c_uint(0)
    found = (nvml.c_nvmlGpuInstance_t * max(1, most))()
    done = attempt([], nvml.nvmlDeviceGetGpuInstances, handle, profile, found, ctypes.byref(count))
    return [] if done is None else list(found[: count.value])


def add_instance(
    nvml: "Any", instance: "Any", gpu: int, profiles: "dict[int, dict[str, Any]]", slices: "dict[int, dict[str, Any]]"
) -> None:
    """Add a GPU instance to the slices, as one without a compute instance; those known stay as they are."""
    info = None if instance is None else attempt([], nvml.nvmlGpuInstanceGetInfo, instance)
    if info is None or info.id in slices or info.profileId not in profiles:
        return
    profile = profiles[info.profileId]
    slices[info.id] = {
        "gpu": gpu, "gi": info.id, "start": info.placement.start, "size": info.placement.size, "id": info.profileId,
        "profile": profile["name"], "memory_mib": profile["memory_mib"],
    }  # fmt: skip


def add_device(
    nvml: "Any", device: "Any", found: "dict[str, Any]", index: int, profiles: "dict[int, dict[str, Any]]"
) -> None:
    """Add a MIG device to the slice of its GPU instance; one that has only a part of it is no device for jobs."""
    if profiles[found["id"]]["compute"] > 1:
        parts = attempt([], nvml.nvmlDeviceGetAttributes, device)
        if parts is not None and parts.computeInstanceSliceCount < parts.gpuInstanceSliceCount:
            return
    found["uuid"] = text(attempt([], nvml.nvmlDeviceGetUUID, device))
    found["ci"] = attempt([], nvml.nvmlDeviceGetComputeInstanceId, device)
    found["device"] = index
    memory = read_memory(nvml, device, [])
    if memory is not None:
        found["memory_used_mib"] = memory.used >> 20


def add_profiles(
    nvml: "Any", handle: "Any", gpu: "dict[str, Any]", tables: "dict[Any, list[dict[str, Any]]]"
) -> "list[dict[str, Any]]":
    """Return what a GPU can be cut into; of the first of a model it goes into ``gpu``."""
    model = gpu.get("name")
    if model not in tables:
        tables[model] = gpu["mig_profiles"] = read_profiles(nvml, handle)
    return tables[model]


def read_profiles(nvml: "Any", handle: "Any") -> "list[dict[str, Any]]":
    """Return the profiles that a GPU can be cut by, also where MIG mode is off."""
    found = []
    for number in range(PROFILES):
        errors = []  # type: list[Any]
        info = attempt(errors, nvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, number)
        if errors and code(errors[0]) in UNKNOWN_CALL_CODES:  # an old driver has the first version of the call
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
