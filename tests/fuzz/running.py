"""Runs a target on many inputs, each within limits; a defect is kept with its seed and the shortest input found."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpusched.errors import MAX_LINE, GpuschedError

CPU_S, WALL_S = 10.0, 120.0
"""Limits of an input: CPU seconds of this process, so that a busy machine does not count; and of waiting."""
MEMORY = 1 << 30
"""Bytes that this process may grow."""
SHORTEN_CPU_S = 20.0
MAX_DEFECTS = 20


class Defect(Exception):
    """An outcome that is neither a value nor an error of one clear line."""


class TooSlow(BaseException):
    """An input that exceeds its limits. No handler of the product's may take it for an error of its own."""


@dataclass
class Found:
    """A defect: the number of the input that showed it, where, and the shortest input that still does."""

    number: int
    what: str
    data: bytes


@dataclass
class Report:
    """The outcomes of a run."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    defects: list[Found] = field(default_factory=list)


def check_line(error: GpuschedError) -> None:
    """Raise `Defect` unless the error is one printable line of bounded length."""
    line = error.line()
    if not line.isprintable() or len(line) > MAX_LINE:
        raise Defect(f"{type(error).__name__} that is too long or not printable: {_place(error)}")


def run(
    target: str,
    make: Callable[[random.Random], bytes],
    ask: Callable[[bytes], str],
    extremes: list[Callable[[], bytes]],
    inputs: int,
    seed: int,
    first: int = 0,
) -> Report:
    """Ask a door about ``inputs`` inputs from number ``first`` on, the ``extremes`` first; N and the seed make input N.

    ``ask`` returns how the door answered, in a word; whatever it raises is a defect.
    """
    report, began, known = Report(target), time.process_time(), set[str]()
    with _limits():
        for number, extreme in enumerate(extremes, 1):
            _one(report, known, ask, -number, extreme())
        for number in range(first, first + inputs):
            if len(report.defects) >= MAX_DEFECTS:
                break
            _one(report, known, ask, number, make(random.Random(f"{target} {seed} {number}")))
    report.seconds = time.process_time() - began
    return report


def _one(report: Report, known: set[str], ask: Callable[[bytes], str], number: int, data: bytes) -> None:
    report.inputs += 1
    answer, where = _asked(ask, data)
    report.outcomes[answer if where is None else "DEFECT"] += 1
    if where is not None and where not in known:
        known.add(where)
        until = time.process_time() + SHORTEN_CPU_S
        short = shortened(data, lambda part: time.process_time() < until and _asked(ask, part)[1] == where)
        report.defects.append(Found(number, where, short))


def _asked(ask: Callable[[bytes], str], data: bytes) -> tuple[str, str | None]:
    """Return the answer; and what makes it a defect, if anything."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    try:
        return ask(data), None
    except TooSlow as error:
        return "", f"hang: {_place(error)}"
    except MemoryError as error:
        return "", f"memory: {_place(error)}"
    except Exception as error:
        return "", f"{type(error).__name__}: {_place(error) or str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _place(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/gpusched/" in f.filename]
    return " < ".join(f"{f.filename.rpartition('gpusched/')[2]}:{f.lineno}" for f in frames[-2:][::-1])


def shortened(data: bytes, still: Callable[[bytes], bool], tries: int = 200) -> bytes:
    """Return a shorter input with the same property: parts are left out, halves first."""
    size = len(data) // 2
    while size and tries > 0:
        at = 0
        while at < len(data) and tries > 0:
            tries -= 1
            shorter = data[:at] + data[at + size :]
            if still(shorter):
                data = shorter
            else:
                at += size
        size //= 2
    return data


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TooSlow

    before = [(number, signal.signal(number, late)) for number in (signal.SIGPROF, signal.SIGALRM)]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in before:
            signal.signal(number, handler)
