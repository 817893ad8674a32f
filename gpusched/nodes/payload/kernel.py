"""NVIDIA's messages in the kernel's log, and NVML's events: the newest ones. Little is read, nothing is waited for."""

import os
import time

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from typing import Any

TAIL = 256 << 10  # bytes of the log's end that are looked at; a part of them is no cheaper
MAX_MESSAGES = 100
MAX_CHARS = 300
JOURNAL_LIMIT_S = 2.0
OVERLAP_US = 10 * 1000 * 1000  # further back than the events, each of which may come later than its message
READ_ALL = 3  # of syslog(2): the last bytes of the log, which stays as it is
# `<4>[  966.503025] NVRM: ...` of the kernel; `[  966.503025] host kernel: NVRM: ...` of journalctl and rsyslog.
_LINE = rb"(?:<(\d+)>)?\[ *(\d+)\.(\d{6})\](?:\[[^\]]{1,20}\])? (?:\S+ kernel: )?((?:NVRM|nvidia-nvswitch\d*): .*)"


def read(request: "dict[str, Any]") -> "dict[str, Any]":
    """Return the messages after ``kernel_after_us`` (microseconds since boot), else all; ``source`` "": not readable.

    ``events``: those of NVML. The log is read only if ``want_kernel``; without it the source is "nvml" where a listener
    is at work. ``kernel_log``: a file to read instead, in which lines carry the kernel's times.
    """
    from gpusched.nodes.payload import events

    now_us = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    path, after, root = request.get("kernel_log"), request.get("kernel_after_us"), events.root_of(request)
    after = -1 if after is None else after
    answer = {"source": "", "now_us": now_us, "messages": []}  # type: dict[str, Any]
    answer["events"] = messages(events.heard(root), after)  # first: the log then has what they are about
    sources = [(path, tail_of)] if path else [("kernel", ring), ("journal", journal)]  # type: list[Any]
    for source, reader in sources if request.get("want_kernel") else ():
        text = reader(path) if path else reader()
        if text:
            return dict(answer, source=source, messages=messages(text, after - OVERLAP_US))
    return dict(answer, source="nvml" if answer["events"] or events.is_listening(root) else "")


def messages(text: bytes, after: int) -> "list[list[Any]]":
    """Return (microseconds since boot, message) of the newest lines of NVIDIA's driver."""
    found = []  # type: list[list[Any]]
    for line in text.splitlines() if b"NVRM" in text or b"nvswitch" in text else ():
        if b"NVRM" not in line and b"nvswitch" not in line:
            continue
        import re  # as it is seldom needed

        match = re.search(_LINE, line)
        if match is None or (match.group(1) and int(match.group(1)) >> 3):  # a program's, not the kernel's
            continue
        at = int(match.group(2)) * 1000000 + int(match.group(3))
        if at > after:
            found.append([at, match.group(4)[:MAX_CHARS].decode("utf-8", "replace")])
    return found[-MAX_MESSAGES:]


def ring() -> bytes:
    """Return the end of the kernel's own buffer; nothing where the account may not read it (dmesg_restrict)."""
    try:
        import ctypes

        buffer = ctypes.create_string_buffer(TAIL)
        return ctypes.string_at(buffer, max(0, ctypes.CDLL(None).klogctl(READ_ALL, buffer, TAIL)))
    except (ImportError, OSError, AttributeError):
        return b""


def journal() -> bytes:
    """Return the end of journald's copy, which members of adm and systemd-journal may read."""
    import subprocess

    command = ["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-monotonic", "-n", "1000"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=JOURNAL_LIMIT_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return b""
    return done.stdout[-TAIL:]


def tail_of(path: str) -> bytes:
    """Return the end of a file, of this boot: after its last time 0, which the kernel's first lines have."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        length = os.fstat(fd).st_size
        os.lseek(fd, max(0, length - TAIL), os.SEEK_SET)
        return os.read(fd, TAIL).rpartition(b"[    0.000000]")[2]
    except OSError:
        return b""
    finally:
        os.close(fd)
