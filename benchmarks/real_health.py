"""Show what the probe reads of a real GPU's health, at what cost, and how it reports an illegal address (Xid 31).

`python -m benchmarks.real_gpu --health` runs it. Values that the GPU, its driver or this account does not give are
printed with the reason.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from benchmarks.real_gpu import Installation

ILLEGAL = {
    "cupy": """
import cupy
kernel = cupy.RawKernel('extern "C" __global__ void bad(int* p) { p[threadIdx.x] = 1; }', "bad")
kernel((1,), (32,), (cupy.uint64(16),))
cupy.cuda.Stream.null.synchronize()
""",
    "torch": """
import torch
from torch.utils.cpp_extension import load_inline
source = '''
#include <torch/extension.h>
__global__ void bad(int* p) { p[threadIdx.x] = 1; }
void run() { bad<<<1, 32>>>((int*)16); }
'''
torch.zeros(1, device="cuda")
load_inline("illegal", cpp_sources="void run();", cuda_sources=source, functions=["run"]).run()
torch.cuda.synchronize()
""",
}
"""Programs that write to address 16, by what they need; the first that can be imported is used."""
XID_EVENT = 8  # nvmlEventTypeXidCriticalError


def health(site: Installation) -> None:
    """Print what NVML gives, what the probe makes of it, and what an illegal address leads to."""
    values()
    kernel_messages()
    probes()
    library = next((name for name in ILLEGAL if _imports(name)), None)
    if library is None:
        print("\nNeither cupy nor torch: no illegal address is tried.")
        return
    events(library)
    job(site, library)


def values() -> None:
    """Print each value of the first GPU with the time that the call takes, and the whole as the probe reads it."""
    import pynvml as nvml

    from gpusched.nodes.payload import health as payload

    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    print(f"\n{nvml.nvmlDeviceGetName(handle)}, driver {nvml.nvmlSystemGetDriverVersion()}")
    print("| value | | ms |\n| --- | --- | --- |")
    names = {
        number: name for name, number in vars(nvml).items() if name.startswith("NVML_FI_") and isinstance(number, int)
    }
    links = [(field, 0) for field in (payload.LINK_REPLAY, payload.LINK_RECOVERY, payload.LINK_CRC, payload.LINK_STATE)]
    for field, scope in [*((field, 0) for field in payload.COUNTERS), *links]:
        found, took = _timed(lambda key=(field, scope): nvml.nvmlDeviceGetFieldValues(handle, [key]))
        _row(names.get(field, str(field)), found if isinstance(found, Exception) else _field(nvml, found[0]), took)
    for name, arguments in (
        ("nvmlDeviceGetCurrentClocksEventReasons", ()), ("nvmlDeviceGetCurrPcieLinkWidth", ()),
        ("nvmlDeviceGetMaxPcieLinkWidth", ()), ("nvmlDeviceGetCurrPcieLinkGeneration", ()),
        ("nvmlDeviceGetMaxPcieLinkGeneration", ()), ("nvmlDeviceGetMarginTemperature", ()),
        ("nvmlDeviceGetTemperatureThreshold", (payload.SLOWDOWN,)), ("nvmlDeviceGetPciInfo", ()),
        ("nvmlDeviceGetSupportedEventTypes", ()), ("nvmlDeviceGetRemappedRows", ()),
    ):  # fmt: skip
        _row(name, *_timed(lambda name=name, arguments=arguments: getattr(nvml, name)(handle, *arguments)))
    hot = {"utilization_pct": 100, "temperature_c": 100}  # so that every limit is asked for
    for title, figures in (("idle and cool", {"utilization_pct": 0, "temperature_c": 30}), ("loaded and hot", hot)):
        found, took = _timed(lambda figures=figures: payload.read(nvml, handle, figures, True))
        print(f"\nAs the probe reads it, {title}, in {took:.2f} ms: {found}")


def kernel_messages() -> None:
    """Print whether the driver's messages can be read here, and what that takes."""
    from gpusched.nodes.payload import kernel

    found, took = _timed(lambda: kernel.read({}))
    lines = [text for _, text in found["messages"]]
    source = found["source"] or "not readable by this account"
    print(f"\nKernel's log: {source}, {len(lines)} messages of the driver, {took:.2f} ms; the last: {lines[-1:]}")


def probes(count: int = 10) -> None:
    """Print what whole probes take and find."""
    found = [_probe() for _ in range(count)]
    took = statistics.median(seconds for seconds, _ in found)
    reading = found[-1][1]
    print(f"\nA probe takes {1000 * took:.0f} ms; health of GPU 0: {msgspec.to_builtins(reading.gpus[0].health)}")
    print(f"Conditions after {count} probes: {_conditions([reading for _, reading in found]) or 'none'}")


def events(library: str) -> None:
    """Print the NVML events that a process receives, and what the next probes find."""
    import pynvml as nvml

    nvml.nvmlInit()
    handle, waiting = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlEventSetCreate()
    nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, waiting)
    before = _probe()[1]
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", ILLEGAL[library]], capture_output=True, text=True, check=False)
    last = (done.stderr.strip().splitlines() or ["(nothing)"])[-1]
    print(f"\nA program with an illegal address ({library}) ended with {done.returncode}: {last}")
    try:
        event = nvml.nvmlEventSetWait_v2(waiting, 5000)
        took = time.monotonic() - began
        print(f"NVML's event: type {event.eventType}, data {event.eventData}, {took:.1f} s after the program's start")
    except nvml.NVMLError as error:
        print(f"NVML's event: {error}")
    time.sleep(1.5)  # two readings count as two only if they are so far apart
    print(f"Conditions after it: {_conditions([before, _probe()[1]]) or 'none'}")


def job(site: Installation, library: str) -> None:
    """Print what gpusched says of a job that does the same."""
    program = site.home / "illegal.py"
    program.write_text(ILLEGAL[library])
    job = site.submit("--", sys.executable, str(program))
    site.gpusched("wait", job, check=False)
    time.sleep(5)  # some ticks more, for its message
    lines = [line for line in site.gpusched("show", job).splitlines() if "condition" in line]
    print(f"\ngpusched show says of such a job: {lines or 'nothing of a condition'}")
    print(site.gpusched("nodes"))


def _probe() -> tuple[float, Any]:
    from gpusched.model.resources import Node, Settings
    from gpusched.nodes.opening import open_transport
    from gpusched.nodes.probe import probe

    node = Node(
        name="here", partition="p", address="here", transport="local", gpus=1, cores=1, memory_mib=1, runtime="process"
    )
    transport = open_transport(node, Settings())
    try:
        began = time.perf_counter()
        reading = probe(transport, node, "health", Settings(), time.time)
        return time.perf_counter() - began, reading
    finally:
        transport.close()


def _conditions(readings: list[Any]) -> list[str]:
    from gpusched.controller.health import observe_health
    from gpusched.model.health import NodeHealth
    from gpusched.model.resources import Node

    node = Node(name="here", partition="p", address="here", gpus=1, cores=1, memory_mib=1, runtime="process")
    health = NodeHealth()
    for number, reading in enumerate(readings):
        health = observe_health(health, node, reading, {}, reading.time + number, dict).health
    return [f"{c.kind}: {c.detail}" for c in health.conditions]


def _field(nvml: Any, value: Any) -> object:
    if value.nvmlReturn:
        return nvml.NVMLError(value.nvmlReturn)
    return getattr(value.value, ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")[value.valueType])


def _timed(call: Callable[[], Any], rounds: int = 5) -> tuple[Any, float]:
    """Return a call's value, or its error, and the median of what it takes in ms."""
    took, found = [], None
    for _ in range(rounds):
        began = time.perf_counter()
        try:
            found = call()
        except Exception as error:
            found = error
        took.append(1000 * (time.perf_counter() - began))
    return found, statistics.median(took)


def _row(name: str, value: object, took: float) -> None:
    print(f"| {name} | {str(value).strip() or repr(value)} | {took:.2f} |", flush=True)


def _imports(name: str) -> bool:
    code = f"import {name}" + ("; assert torch.cuda.is_available()" if name == "torch" else "")
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
