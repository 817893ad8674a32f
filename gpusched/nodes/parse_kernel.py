"""Messages of NVIDIA's driver in the kernel's log, and NVML's events as such. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gpusched.model.readings import XidMessage

# NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault: ...
# Drivers before 2013 leave out PCI:, those of MIG add the instance, quotes and brackets stand around unknown programs.
_PCI = r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
_BUS = r"\((?:PCI:)?(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]{0,40}\)"
_XID = re.compile(rf"NVRM: Xid {_BUS}: (\d{{1,5}}),?(.*)")
_SXID = re.compile(rf"nvidia-nvswitch\d*: SXid {_BUS}: (\d{{1,6}}),?(.*)")
_GONE = re.compile(rf"NVRM: GPU (?:at )?(?:PCI:)?{_PCI}[.:0-9]{{0,9}}.{{0,80}}fallen off the bus")
_PID = re.compile(r"\bpid='?(\d+)'?")
_NAME = re.compile(r"\bname='?([^,'<]{1,64})")
OFF_BUS = 79
_SAME_US = 5_000_000  # an event of NVML comes so close to the kernel's message about the same


def parse_messages(lines: Iterable[tuple[int, str]]) -> tuple[XidMessage, ...]:
    """Return the Xids among messages, each with its microseconds since boot; others are left out."""
    return tuple(_messages(lines))


def with_events(log: tuple[XidMessage, ...], events: tuple[XidMessage, ...]) -> tuple[XidMessage, ...]:
    """Return both, in order of time, without the events that the log has, too: its messages may name the process."""

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
    """Return ``0000:3b:00``, as NVML's address is written here."""
    return f"{int(domain or '0', 16):04x}:{rest.lower()}"
