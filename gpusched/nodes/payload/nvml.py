"""NVML's figures, one GPU at a time; runs in a child process because the driver may never return."""
# ruff: noqa: UP031

import _thread
import sys
import time
import types

from gpusched.nodes.payload.calls import attempt, code, either, read_memory, running, text, text_of

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from collections.abc import Iterator
    from typing import Any

# NVML error codes (nvml.h), by number: old and new pynvml name them alike, but not every one has all.
NOT_SUPPORTED_CODES = frozenset((2, 3, 4, 6, 7, 13, 25, 27))  # the figure is not to be had; the GPU is well
GONE_CODES = frozenset((15, 16))  # lost, reset required
UNCORRECTED, VOLATILE = 1, 0
ECC_LOCATIONS = (0, 1, 2, 3, 4, 5, 6, 7)
LINKS_MAX = 36
SHARES_OVER_S = 10.0
GPU_PEER, SWITCH_PEER = 0, 2
NVLINK_SCORE = 100
FABRIC_JOINED = 3
# nvmlGpuTopologyLevel_t: internal 0, single switch 10, several 20, host bridge 30, NUMA node 40, system 50
LEVEL_SCORE = {0: 60, 10: 50, 20: 40, 30: 30, 40: 20, 50: 10}


def load() -> "Any":
    """Load nvidia-ml-py without modules that it hardly uses: these alone cost as much as all the rest.

    It wants ctypes.util only on Windows, and of the others one function each.
    """
    little = {
        "ctypes.util": {"find_library": None},
        "functools": {"wraps": lambda wrapped: lambda wrapper: wrapper},
        "string": {"capwords": lambda words, sep: sep.join(word.capitalize() for word in words.split(sep))},
        "threading": {"Lock": _thread.allocate_lock},
    }  # type: dict[str, dict[str, Any]]
    missing = [name for name in little if name not in sys.modules]
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(little[name])
    try:
        import pynvml
    except (AttributeError, ImportError):  # another version, which wants more of them
        pynvml = None
    finally:  # other importers need them complete
        for name in missing:
            del sys.modules[name]
    if pynvml is None:
        import pynvml
    return pynvml


def messages(
    only: "list[int] | None", want_links: bool, want_bus: bool = False, want_profiles: bool = False
) -> "Iterator[dict[str, Any]]":
    """Yield what NVML reports: driver and count, then each GPU (``only`` these), then the links if wanted.

    ``want_bus``: with the GPUs' bus addresses, which messages in the kernel's log name. ``want_profiles``: also what
    GPUs with MIG mode off can be cut into.
    """
    try:
        nvml = load()
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except Exception as error:
        # NVML's own errors are pynvml's; others may come from a spoilt compiled file, for which there is no checksum.
        yield {"init_error": text_of(error), "spoilt": type(error).__module__ == "builtins"}
        return
    yield {"count": count, "driver_version": text(attempt([], nvml.nvmlSystemGetDriverVersion))}
    handles = {}  # type: dict[int, Any]
    tables = {}  # type: dict[Any, list[dict[str, Any]]]
    for index in range(count) if only is None else only:
        yield {"gpu": read_gpu(nvml, index, handles, tables, want_links or want_bus, want_profiles)}
    if want_links:
        yield {"links": links(nvml, handles), "places": places(nvml, handles)}
    yield {"done": True}


def read_gpu(
    nvml: "Any",
    index: int,
    handles: "dict[int, Any]",
    tables: "dict[Any, list[dict[str, Any]]]",
    want_bus: bool = False,
    want_profiles: bool = False,
) -> "dict[str, Any]":
    """Return all figures of one GPU; ``error`` where it cannot be talked to. Its handle goes into ``handles``.

    ``tables``: MIG profiles of the models seen so far.
    """
    gpu = {"index": index}  # type: dict[str, Any]
    errors = []  # type: list[Any]
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception as error:
        gpu["error"] = text_of(error)
        return gpu
    gpu["uuid"] = text(attempt(errors, nvml.nvmlDeviceGetUUID, handle))
    gpu["name"] = text(attempt(errors, nvml.nvmlDeviceGetName, handle))
    trouble = []  # type: list[Any]
    memory = read_memory(nvml, handle, trouble)
    errors += trouble
    if memory is not None:
        gpu["memory_total_mib"], gpu["memory_used_mib"] = memory.total >> 20, memory.used >> 20
    if not any(code(e) in GONE_CODES for e in errors):  # a GPU off the bus may take seconds to say so each time
        read_figures(nvml, handle, gpu, errors, tables)
        gpu["health"] = read_health(nvml, handle, gpu, want_bus)
    lost = [e for e in errors if code(e) in GONE_CODES]
    lost += [e for e in trouble if memory is None and code(e) not in NOT_SUPPORTED_CODES]
    if lost:
        return {"index": index, "uuid": gpu["uuid"], "name": gpu["name"], "error": text_of(lost[0])}
    if want_profiles and gpu.get("mig_mode") is False:
        from gpusched.nodes.payload.mig import add_profiles

        add_profiles(nvml, handle, gpu, tables)
    handles[index] = handle
    return gpu


def read_figures(
    nvml: "Any",
    handle: "Any",
    gpu: "dict[str, Any]",
    errors: "list[Any]",
    tables: "dict[Any, list[dict[str, Any]]]",
) -> None:
    """Return the figures that may be missing one by one."""
    utilization = attempt(errors, nvml.nvmlDeviceGetUtilizationRates, handle)
    gpu["utilization_pct"] = None if utilization is None else utilization.gpu
    gpu["power_w"] = thousandth(attempt(errors, nvml.nvmlDeviceGetPowerUsage, handle))
    gpu["power_limit_w"] = thousandth(attempt(errors, nvml.nvmlDeviceGetEnforcedPowerLimit, handle))
    gpu["energy_j"] = thousandth(attempt(errors, nvml.nvmlDeviceGetTotalEnergyConsumption, handle))
    gpu["temperature_c"] = either(nvml, ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), errors, handle, 0)
    gpu["ecc_errors"] = read_ecc(nvml, handle, errors)
    mig = attempt(errors, nvml.nvmlDeviceGetMigMode, handle)
    gpu["mig_mode"] = None if mig is None else bool(mig[0])
    if gpu["mig_mode"]:
        from gpusched.nodes.payload.mig import read_mig

        gpu["processes"] = read_mig(nvml, handle, gpu, tables)
    else:
        gpu["processes"] = running(nvml, handle, ("Compute", "Graphics"), errors)
        if len(gpu["processes"]) > 1:
            shares = process_shares(nvml, handle)
            for process in gpu["processes"] if shares else ():
                process["utilization_pct"] = shares.get(process["pid"], 0)


def read_health(nvml: "Any", handle: "Any", gpu: "dict[str, Any]", want_bus: bool) -> "dict[str, Any] | None":
    """See `gpusched.nodes.payload.health`; None on any error: the figures are worth more."""
    try:
        from gpusched.nodes.payload import health

        return health.read(nvml, handle, gpu, want_bus)
    except Exception:
        return None


def read_ecc(nvml: "Any", handle: "Any", errors: "list[Any]") -> "int | None":
    """Uncorrected errors since the driver was loaded; summed over the memories where the total is gone (CUDA 14)."""
    total = attempt(errors, nvml.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, VOLATILE)
    if total is not None or not hasattr(nvml, "nvmlDeviceGetMemoryErrorCounter"):
        return total  # type: ignore[no-any-return]
    if errors and code(errors[-1]) != 13:  # only where the function itself is missing
        return None
    each = [
        attempt([], nvml.nvmlDeviceGetMemoryErrorCounter, handle, UNCORRECTED, VOLATILE, place)
        for place in ECC_LOCATIONS
    ]
    known = [n for n in each if n is not None]
    return sum(known) if known else None


def process_shares(nvml: "Any", handle: "Any") -> "dict[int, int]":
    """Pid -> its part of the GPU's utilization lately, in percent; of a GPU in use those that did nothing are left out.

    Empty where it is not known: NVML then answers that it is not supported, or as if no process had run.
    """
    function = getattr(nvml, "nvmlDeviceGetProcessUtilization", None)
    since = int((time.time() - SHARES_OVER_S) * 1e6)
    samples = None if function is None else attempt([], function, handle, since)
    return {sample.pid: sample.smUtil for sample in samples or ()}


def links(nvml: "Any", handles: "dict[int, Any]") -> "dict[int, dict[int, int]]":
    """Return the closeness of every two GPUs: 100 for each NVLink (through a switch too), plus the PCIe level."""
    buses, peers, switched = {}, {}, {}
    for index, handle in handles.items():
        pci = attempt([], nvml.nvmlDeviceGetPciInfo, handle)
        if pci is not None:
            buses[(pci.domain, pci.bus, pci.device)] = index
        peers[index], switched[index] = read_nvlinks(nvml, handle)
    result = {i: {} for i in handles}  # type: dict[int, dict[int, int]]
    for i in handles:
        direct = [buses.get(peer) for peer in peers[i]]
        for j in handles:
            if i == j:
                continue
            count = direct.count(j) or min(switched[i], switched[j])
            level = attempt([], nvml.nvmlDeviceGetTopologyCommonAncestor, handles[i], handles[j])
            result[i][j] = NVLINK_SCORE * count + LEVEL_SCORE.get(-1 if level is None else level, 0)
    return result


def places(nvml: "Any", handles: "dict[int, Any]") -> "list[dict[str, Any]]":
    """Bus address, NVLink domain and device file's number of every GPU."""
    found = []
    for index, handle in handles.items():
        pci = attempt([], nvml.nvmlDeviceGetPciInfo, handle)
        bus = None if pci is None else "%08x:%02x:%02x.0" % (pci.domain, pci.bus, pci.device)
        minor = attempt([], nvml.nvmlDeviceGetMinorNumber, handle)
        found.append({"index": index, "bus": bus, "domain": attempt([], fabric, nvml, handle), "minor": minor})
    return found


def fabric(nvml: "Any", handle: "Any") -> "str | None":
    """``clusterUuid.cliqueId`` of the NVLink domain a GPU has joined; None: of none that goes beyond its server."""
    import ctypes  # as pynvml has done

    errors = []  # type: list[Any]
    info = None
    for call, kind in (("V", "nvmlGpuFabricInfo_v2_t"), ("", "nvmlGpuFabricInfo_t")):
        if not hasattr(nvml, "c_" + kind) or not hasattr(nvml, "nvmlDeviceGetGpuFabricInfo" + call):
            continue
        info = getattr(nvml, "c_" + kind)()
        errors = []
        attempt(errors, getattr(nvml, "nvmlDeviceGetGpuFabricInfo" + call), handle, ctypes.byref(info))
        if not errors:
            break
    if info is None or errors or info.state != FABRIC_JOINED or info.status != 0:
        return None
    raw = ctypes.string_at(ctypes.addressof(info) + type(info).clusterUuid.offset, 16)  # may hold zeros: not a C string
    if not any(raw):
        return None
    digits = "".join("%02x" % byte for byte in bytearray(raw))
    uuid = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    return "%s.%d" % (uuid, info.cliqueId)


def read_nvlinks(nvml: "Any", handle: "Any") -> "tuple[list[tuple[int, int, int]], int]":
    """Bus addresses at the far ends of a GPU's active NVLinks, and how many of them lead to a switch."""
    ends, switches = [], 0
    for link in range(LINKS_MAX):
        errors = []  # type: list[Any]
        active = attempt(errors, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if errors:
            break
        if not active:
            continue
        kind = attempt([], nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == SWITCH_PEER:
            switches += 1
            continue
        pci = attempt([], nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if pci is not None:
            ends.append((pci.domain, pci.bus, pci.device))
    return ends, switches


def thousandth(value: "Any") -> "Any":
    """Milliwatts to W, millijoules to J."""
    return None if value is None else value / 1000.0
