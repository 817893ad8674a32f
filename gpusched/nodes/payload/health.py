"""What NVML says of a GPU's health. Few calls: one for all counters, and limits only where they may be near."""
# ruff: noqa: UP031

import struct

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from typing import Any

# nvmlFieldValue ids (nvml.h), by number: an old pynvml has no names for the new ones.
RETIRED_SBE, RETIRED_DBE, RETIRED_PENDING = 29, 30, 31
CRC_FLIT, CRC_DATA, REPLAY, RECOVERY = 38, 45, 52, 59  # of all NVLinks
PCIE_REPLAYS = 94
REMAP_PENDING, REMAP_FAILED = 144, 145
LINK_REPLAY, LINK_RECOVERY, LINK_CRC, LINK_STATE = 161, 162, 163, 165  # of one NVLink, the scope
RECOVERY_ACTION = 230
LINKS_MAX = 18
COUNTERS = (
    RETIRED_SBE, RETIRED_DBE, RETIRED_PENDING, CRC_FLIT, CRC_DATA, REPLAY, RECOVERY, PCIE_REPLAYS, REMAP_PENDING,
    REMAP_FAILED, RECOVERY_ACTION,
)  # fmt: skip
FIELD = "24xIi8s"  # of nvmlFieldValue_t: its type, the error code, the value
KINDS = "dIQQqiH"  # by nvmlValueType_t
MAX_WIDTH = 16
LOADED_PCT = 50  # an idle GPU lowers its PCIe generation
HOT_C = 70  # below, no limit is near
SLOWDOWN = 1  # nvmlTemperatureThresholds_t


def read(nvml: "Any", handle: "Any", gpu: "dict[str, Any]", want_bus: bool) -> "dict[str, Any]":
    """Return the fields of `gpusched.model.readings.GpuHealth` that are known; ``gpu``: its figures so far."""
    links = [(LINK_STATE, link) for link in range(LINKS_MAX)]
    values = field_values(nvml, handle, list(COUNTERS) + links)
    found = {  # type: dict[str, Any]
        "retired_pages": total(values, RETIRED_SBE, RETIRED_DBE),
        "remap_pending": either(values, REMAP_PENDING, RETIRED_PENDING),
        "remap_failed": either(values, REMAP_FAILED),
        "nvlinks": total(values, *links),
        "nvlink_errors": total(values, CRC_FLIT, CRC_DATA, REPLAY),
        "nvlink_recoveries": values.get(RECOVERY),
        "pcie_replays": values.get(PCIE_REPLAYS),
        "recovery": values.get(RECOVERY_ACTION),
        "clocks": clocks(nvml, handle),
    }
    if found["nvlinks"] and found["nvlink_recoveries"] is None:  # Hopper counts by link only
        each = [(kind, link) for kind in (LINK_REPLAY, LINK_RECOVERY, LINK_CRC) for link in range(LINKS_MAX)]
        values = field_values(nvml, handle, each)
        found["nvlink_errors"] = total(values, *(k for k in each if k[0] != LINK_RECOVERY))
        found["nvlink_recoveries"] = total(values, *(k for k in each if k[0] == LINK_RECOVERY))
    found.update(pcie(nvml, handle, gpu.get("utilization_pct")))
    found["thermal_margin_c"] = margin(nvml, handle, gpu.get("temperature_c"))
    if want_bus:
        pci = ask(nvml.nvmlDeviceGetPciInfo, handle)
        found["bus"] = None if pci is None else "%04x:%02x:%02x" % (pci.domain, pci.bus, pci.device)
    return {key: value for key, value in found.items() if value is not None}


def field_values(nvml: "Any", handle: "Any", wanted: "list[Any]") -> "dict[Any, int]":
    """Return the values that this GPU has of many fields, in one call; ``wanted``: ids, or ids with a scope."""
    function = getattr(nvml, "nvmlDeviceGetFieldValues", None)
    found = {}
    scoped = [key if isinstance(key, tuple) else (key, 0) for key in wanted]
    values = None if function is None else ask(function, handle, scoped)
    if values is None:
        return {}
    # All at once: to take ctypes' fields one by one takes longer than the call.
    for key, (kind, code, raw) in zip(wanted, struct.iter_unpack(FIELD, bytes(values))):  # noqa: B905
        if code == 0 and kind < len(KINDS):
            found[key] = int(struct.unpack_from(KINDS[kind], raw)[0])
    return found


def total(values: "dict[Any, int]", *keys: "Any") -> "int | None":
    """Sum of those that are known; None where none is."""
    known = [values[key] for key in keys if key in values]
    return sum(known) if known else None


def either(values: "dict[Any, int]", *keys: "Any") -> "bool | None":
    """Return whether one of those that are known is set; None where none is known."""
    count = total(values, *keys)
    return None if count is None else count > 0


def clocks(nvml: "Any", handle: "Any") -> "int | None":
    """Mask of the reasons why clocks are held down, under its new or its old name."""
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        if hasattr(nvml, name):
            value = ask(getattr(nvml, name), handle)
            if value is not None:
                return int(value)
    return None


def pcie(nvml: "Any", handle: "Any", utilization: "Any") -> "dict[str, Any]":
    """Width, and under load the generation; the maximum only where the value may be below it."""
    found = {"pcie_width": ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)}
    if found["pcie_width"] is not None and found["pcie_width"] < MAX_WIDTH:
        found["pcie_width_max"] = ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    if (utilization or 0) >= LOADED_PCT:
        found["pcie_gen"] = ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)
        found["pcie_gen_max"] = ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    return found


def margin(nvml: "Any", handle: "Any", temperature: "Any") -> "int | None":
    """Degrees to the temperature that slows a hot GPU down; newer GPUs report the margin, older ones the limit."""
    if temperature is None or temperature < HOT_C:
        return None
    if hasattr(nvml, "nvmlDeviceGetMarginTemperature"):
        value = ask(nvml.nvmlDeviceGetMarginTemperature, handle)
        if value is not None:
            return int(value)
    limit = ask(nvml.nvmlDeviceGetTemperatureThreshold, handle, SLOWDOWN)
    return None if not limit else int(limit - temperature)


def ask(function: "Any", *args: "Any") -> "Any":
    """Return a call's value; None if it fails, as one does that this GPU or this driver does not have."""
    try:
        return function(*args)
    except Exception:
        return None
