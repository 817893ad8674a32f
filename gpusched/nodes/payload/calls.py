"""Calls of NVML that may fail one by one, and what is read alike of a whole GPU and of a part of one."""
# ruff: noqa: UP031

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from collections.abc import Callable
    from typing import Any


def read_memory(nvml: "Any", handle: "Any", errors: "list[Any]") -> "Any":
    """Memory without what the driver reserves (v2), else with it; None and the errors where neither is to be had."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    memory = None if version is None else attempt([], nvml.nvmlDeviceGetMemoryInfo, handle, version)
    return attempt(errors, nvml.nvmlDeviceGetMemoryInfo, handle) if memory is None else memory


def running(nvml: "Any", handle: "Any", kinds: "tuple[str, ...]", errors: "list[Any]") -> "list[dict[str, Any]]":
    """Compute and graphics processes, each pid once with the larger of its two figures."""
    used = {}  # type: dict[int, int | None]
    for kind in kinds:
        name = "nvmlDeviceGet%sRunningProcesses" % kind
        for process in either(nvml, (name, name + "_v2"), errors, handle) or ():
            memory = process.usedGpuMemory
            mib = None if memory is None else memory >> 20
            old = used.get(process.pid)
            used[process.pid] = mib if old is None else old if mib is None else max(old, mib)
    return [{"pid": pid, "memory_used_mib": mib} for pid, mib in sorted(used.items())]


def either(nvml: "Any", names: "tuple[str, str]", errors: "list[Any]", *args: "Any") -> "Any":
    """Return the first of two calls that both this pynvml and this driver have."""
    for name in names:
        function = getattr(nvml, name, None)
        if function is None:
            continue
        trouble = []  # type: list[Any]
        value = attempt(trouble, function, *args)
        if not trouble:
            return value
        errors += trouble
        if code(trouble[0]) not in (13, 25):  # function or version unknown to the driver
            return None
    return None


def attempt(errors: "list[Any]", function: "Callable[..., Any]", *args: "Any") -> "Any":
    """Return a call's value; None, with the exception added to ``errors``, if it fails."""
    try:
        return function(*args)
    except Exception as error:
        errors.append(error)
        return None


def code(error: "Any") -> "Any":
    """Return NVML's error number, None for another exception."""
    return getattr(error, "value", None)


def text_of(error: "Any") -> str:
    """Return an exception as one line for people."""
    message = str(error) or type(error).__name__
    return "NVML: %s" % message if code(error) is not None else "%s: %s" % (type(error).__name__, message)


def text(value: "Any") -> "Any":
    """Old pynvml answers bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
