"""Parses the stdout of a probe: of payload/main.py, or of facts.sh on nodes without python3. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from gpusched.model.readings import ContainerReading, Gpu, KernelLog, NodeReading, Wiring, XidMessage
from gpusched.model.slices import with_gpu_units
from gpusched.model.units import whole_number
from gpusched.nodes.parse_smi import parse_gpus

MARK = b"@gpusched-probe@ "  # as in payload/main.py
_SECTIONS = "@gpusched-sections@"  # as in payload/facts.sh

_LOAD = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
_FACTS = (
    "boot_id", "hostname", "cores", "memory_total_mib", "memory_available_mib", "load1", "disk_free_mib",
    "source", "gpu_error", "driver_version", "runtime_error", "runtime_version",
)  # fmt: skip


def find_answer(stdout: bytes) -> dict[str, Any] | None:
    """Return the probe's line of JSON; None if there is none. The node's shell start-up files may print other lines.

    Raises:
        ValueError: The line is there, but malformed.
    """
    _, mark, rest = stdout.rpartition(b"\n" + MARK)
    if not mark:
        return None
    answer = msgspec.json.decode(rest.partition(b"\n")[0])
    if not isinstance(answer, dict):
        raise ValueError("the probe's answer is not an object")
    return answer


def parse_reading(node: str, answer: dict[str, Any], sent: float, received: float) -> NodeReading:
    """Return the reading in an answer (`find_answer`) of the python3 payload.

    ``sent`` and ``received``: when the request was sent and the answer had arrived (Unix seconds, our clock).

    Raises:
        ValueError: The answer does not have the payload's format.
    """
    facts = {key: answer[key] for key in _FACTS if key in answer}
    gpus: Any = answer.get("gpus", [])
    if answer.get("source") == "nvidia-smi":
        known = {whole_number(pid): process for pid, process in answer.get("processes", {}).items()}
        reading = parse_gpus(answer.get("smi_gpus", ""), answer.get("smi_apps", ""), known)
        gpus = reading.gpus
        facts.update(driver_version=reading.driver_version, gpu_error=reading.error)
        if not gpus:
            facts.update(source="none")
    # As NTP does: the mean of the differences at both ends cancels the network's delay, if equal in both directions.
    began, ended = answer["clock"]
    return msgspec.convert(
        {
            **facts,
            "node": node,
            "time": received,
            "clock_skew_s": ((began - sent) + (ended - received)) / 2,
            "gpus": _with_profiles(msgspec.convert(gpus, tuple[Gpu, ...], strict=False)),
            "job_folders": answer.get("job_folders", []),
            "wiring": _wiring(answer.get("wiring")),
            "kernel": _kernel(answer.get("kernel")),
            "containers": msgspec.convert(answer.get("containers"), tuple[ContainerReading, ...] | None, strict=False),
        },
        NodeReading,
    )


def _with_profiles(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Give each GPU its model's MIG profiles, which the payload sends once."""
    tables = {gpu.name: with_gpu_units(gpu.mig_profiles) for gpu in gpus if gpu.mig_profiles}
    if not tables:
        return gpus
    with_mig = (gpu.mig_mode is not None and gpu.error is None for gpu in gpus)
    return tuple(
        msgspec.structs.replace(gpu, mig_profiles=tables.get(gpu.name, ())) if mig else gpu
        for gpu, mig in zip(gpus, with_mig, strict=True)
    )


def _wiring(found: Any) -> Wiring | None:
    """Return the wiring in an answer; None if malformed: unexpected contents of sysfs must not fail the reading."""
    try:
        return msgspec.convert(found, Wiring | None, strict=False)
    except msgspec.ValidationError:
        return None


def _kernel(found: Any) -> KernelLog | None:
    """Return messages of the kernel's log; None if malformed: they must not fail the reading."""
    try:
        log = msgspec.convert(found, _RawKernelLog | None)
    except msgspec.ValidationError:
        return None
    if log is None:
        return None
    messages = with_events(parse_messages(log.messages), parse_messages(log.events))
    return KernelLog(source=log.source, now_us=log.now_us, messages=messages)


class _RawKernelLog(msgspec.Struct):
    source: str
    now_us: int
    messages: list[tuple[int, str]]
    events: list[tuple[int, str]] = []


def split_sections(text: str) -> dict[str, str] | None:
    """Return section name -> its lines; None if there is no answer in ``text``, which may hold other lines."""
    _, mark, body = text.rpartition("\n" + _SECTIONS + "\n")
    if not mark:
        return None
    parts = body.split("\n@@")[1:]
    return {name: content.strip("\n") for name, _, content in (part.partition("\n") for part in parts)}


def reading_of_sections(node: str, sections: Mapping[str, str], sent: float, received: float) -> NodeReading:
    """Return the reading in an answer (`split_sections`), without attempts (see `gpusched.nodes.runtimes.listing`).

    ``sent`` and ``received``: when the request was sent and the answer had arrived (Unix seconds, our clock).
    """
    clock = whole_number(sections.get("clock", "").strip())  # whole seconds, so half a second late on average
    return NodeReading(
        node=node,
        time=received,
        clock_skew_s=None if clock is None else clock + 0.5 - (sent + received) / 2,
        **_facts(sections),
    )


def _facts(sections: Mapping[str, str]) -> dict[str, Any]:
    memory = dict(_meminfo_line(line) for line in sections.get("meminfo", "").splitlines() if ":" in line)
    load = sections.get("loadavg", "").split()
    df = sections.get("df", "").splitlines()
    disk = df[-1].split() if len(df) > 1 else []
    return {
        "boot_id": sections.get("boot_id") or None,
        "hostname": sections.get("hostname") or None,
        "cores": whole_number(sections.get("cores", "").strip()),
        "memory_total_mib": memory.get("MemTotal"),
        "memory_available_mib": memory.get("MemAvailable"),
        "load1": float(load[0]) if load and _LOAD.fullmatch(load[0]) else None,
        "disk_free_mib": _mib(disk[3]) if len(disk) >= 6 else None,
        **_gpu_facts(sections),
    }


def _gpu_facts(sections: Mapping[str, str]) -> dict[str, Any]:
    text = sections.get("smi_gpus")
    if text is None:
        return {"source": "none", "gpu_error": "the node has neither python3 nor nvidia-smi", "gpus": ()}
    known = dict(_process_line(line) for line in sections.get("processes", "").splitlines() if line.count("\t") == 3)
    reading = parse_gpus(text, sections.get("smi_apps", ""), known)
    source = "nvidia-smi" if reading.gpus else "none"
    return {
        "source": source, "gpu_error": reading.error, "driver_version": reading.driver_version, "gpus": reading.gpus,
    }  # fmt: skip


def _meminfo_line(line: str) -> tuple[str, int | None]:
    key, _, value = line.partition(":")
    return key, _mib(value.split()[0]) if value.split() else None


def _process_line(line: str) -> tuple[int | None, dict[str, str | None]]:
    pid, user, container, command = line.split("\t", 3)
    printable = "".join(c if c.isprintable() else "?" for c in command).strip()
    return whole_number(pid), {"user": user or None, "container": container or None, "command": printable or None}


def _mib(kib: str) -> int | None:
    return None if (number := whole_number(kib)) is None else number // 1024


# Messages of NVIDIA's driver in the kernel's log, and NVML's events in the same form

# NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault: ...
# Drivers before 2013 leave out PCI:, those with MIG add the instance; unknown programs are in quotes and brackets.
_PCI = r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
_BUS = r"\((?:PCI:)?(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]{0,40}\)"
_XID = re.compile(rf"NVRM: Xid {_BUS}: (\d{{1,5}}),?(.*)")
_SXID = re.compile(rf"nvidia-nvswitch\d*: SXid {_BUS}: (\d{{1,6}}),?(.*)")
_GONE = re.compile(rf"NVRM: GPU (?:at )?(?:PCI:)?{_PCI}[.:0-9]{{0,9}}.{{0,80}}fallen off the bus")
_PID = re.compile(r"\bpid='?(\d+)'?")
_NAME = re.compile(r"\bname='?([^,'<]{1,64})")
OFF_BUS = 79
_SAME_US = 5_000_000  # at most between NVML's event and the kernel's message about the same Xid


def parse_messages(lines: Iterable[tuple[int, str]]) -> tuple[XidMessage, ...]:
    """Return the Xids among messages with their times (microseconds since boot); skip other messages."""
    return tuple(_messages(lines))


def with_events(log: tuple[XidMessage, ...], events: tuple[XidMessage, ...]) -> tuple[XidMessage, ...]:
    """Return both by time, without events that are also in the log: its messages may name the process."""

    def is_logged(event: XidMessage) -> bool:
        return any(
            (m.number, m.bus) == (event.number, event.bus) and abs(m.at_us - event.at_us) <= _SAME_US for m in log
        )

    return tuple(sorted((*log, *(e for e in events if not is_logged(e))), key=lambda m: m.at_us))


def _messages(lines: Iterable[tuple[int, str]]) -> Iterator[XidMessage]:
    for at_us, text in lines:
        if match := _XID.match(text):
            rest = match[4]
            pid, name = _PID.search(rest), _NAME.search(rest)
            yield XidMessage(
                at_us=at_us, number=int(match[3]), bus=_bus(match[1], match[2]), pid=int(pid[1]) if pid else None,
                process=name[1].strip() if name else "",
            )  # fmt: skip
        elif match := _SXID.match(text):
            fatal = re.match(r"\s*fatal\b", match[4], re.IGNORECASE) is not None
            yield XidMessage(
                at_us=at_us, number=int(match[3]), bus=_bus(match[1], match[2]), switch=True, fatal=fatal
            )  # fmt: skip
        elif match := _GONE.match(text):
            yield XidMessage(at_us=at_us, number=OFF_BUS, bus=_bus(match[1], match[2]))


def _bus(domain: str | None, rest: str) -> str:
    """Return an address as ``0000:3b:00``, the form used for NVML's addresses."""
    return f"{int(domain or '0', 16):04x}:{rest.lower()}"
