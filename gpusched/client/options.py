"""Parse the option values of ``submit``: (option, text) -> value.

Pure, except for the clock, and at the end of the file, for values that depend on where a job is submitted: files,
variables and the current folder.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from gpusched.config.openers import open_input
from gpusched.config.validate import MAX_ARRAY_TASKS, MAX_LINKS, MAX_SIZES, MAX_VALUE_BYTES, SIGNALS, check_text
from gpusched.errors import UsageError
from gpusched.model.jobs import WITHOUT_ID, Dependency, DependencyKind, Mount
from gpusched.model.notices import NoticeKind, is_address, kinds_of
from gpusched.model.slices import is_profile
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import parse_duration, parse_memory_mib, parse_time

T = TypeVar("T")
_SPAN = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([0-9]{1,7}))?)?")


def duration(option: str, text: str | None) -> int | None:
    """Return seconds, or None if the option is not given."""
    return None if text is None else _parse(option, text, parse_duration)


def unix_time(option: str, text: str, now: float) -> float:
    """Return a Unix time in seconds."""
    return _parse(option, text, lambda t: parse_time(t, now))


def begin(option: str, text: str) -> float:
    """Return a Unix time in seconds."""
    return unix_time(option, text, time.time())


def duration_or_zero(option: str, text: str) -> int | None:
    """Return seconds; 0 for ``0``."""
    return 0 if text in ("0", "0s") else duration(option, text)


def memory(option: str, text: str) -> int:
    """Return MiB."""
    return _parse(option, text, parse_memory_mib)


def memory_or_zero(option: str, text: str) -> int:
    """Return MiB; 0 for ``0``."""
    return 0 if text == "0" else memory(option, text)


def one_of(*allowed: str, note: str = "") -> Callable[[str, str], Any]:
    """Return a parser of words; ``note`` follows them in its error."""
    expected = " or ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1]))) + note

    def word(option: str, text: str) -> str:
        if text not in allowed:
            raise UsageError(f"{option}: found {text[:40]!r}, expected {expected}")
        return text

    return word


def _parse(option: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: found {text[:80]!r}, expected {error}") from None


class ArrayTasks(NamedTuple):
    """The indices of an array, and how many of its tasks may run at once (None: all)."""

    indices: tuple[int, ...]
    max_running: int | None = None


def array(option: str, text: str) -> ArrayTasks:
    """Return the tasks of ``0-9``, ``0-30:5`` or ``1,3,7-9``, perhaps with ``%2``: how many may run at once."""
    indices, percent, max_running = text.partition("%")
    found: set[int] = set()
    count = 0
    for part in indices.split(","):
        match = _SPAN.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{option}: found {text[:80]!r}, expected such as 0-9, 0-30:5, 1,3,7 or 0-99%10")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step < 1:
            raise UsageError(f"{option}: {part.strip()} contains no index", "write the smaller number first")
        count += (last - first) // step + 1
        if count > MAX_ARRAY_TASKS:  # before they are made
            raise UsageError(f"{option}: at most {MAX_ARRAY_TASKS} tasks")
        found.update(range(first, last + 1, step))
    if percent and not (re.fullmatch(r"[0-9]{1,7}", max_running) and int(max_running) > 0):
        raise UsageError(
            f"{option}: % must be followed by the number of tasks that may run at once, found {max_running[:40]!r}"
        )
    return ArrayTasks(tuple(sorted(found)), int(max_running) if percent else None)


def sizes(option: str, text: str) -> tuple[int, ...]:
    """Return the possible GPU counts, ascending, of ``--gpus 4``, ``--gpus 1-8`` or ``--sizes 1,2,4``."""
    expected = "a number, or with --resizable 1-8" if option == "--gpus" else "numbers such as 1,2,4,8"
    words = text.split(",") if option == "--sizes" else [text]
    found: set[int] = set()
    for match in [re.fullmatch(r"(-?[0-9]{1,9})(?:-([0-9]{1,9}))?", word.strip()) for word in words]:
        if match is None or (option == "--sizes" and match[2]):
            raise UsageError(f"{option}: found {text[:80]!r}, expected {expected}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_SIZES:
            raise UsageError(
                f"{option}: {match[0]} is not a range of at most {MAX_SIZES} sizes", "write the smaller number first"
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def count(option: str, text: str) -> int:
    """Return a number of GPUs."""
    if not re.fullmatch(r"-?[0-9]{1,9}", text.strip()):
        raise UsageError(f"{option}: found {text[:80]!r}, expected a number, or slices such as 1g.10gb:2")
    return int(text)


def mig(option: str, text: str) -> str:
    """Return the name of a profile of MIG slices."""
    name = text.strip().lower()
    if not is_profile(name):
        raise UsageError(f"{option}: found {text[:80]!r}, expected a profile such as 1g.10gb")
    return name


def with_slices(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options where ``--gpus 1g.10gb:2`` has become ``--gpus 2 --mig 1g.10gb``; one slice if no number is said.

    Raises:
        UsageError: Two different profiles.
    """
    found = dict(given)
    for name, option in (("gpus", "--gpus"), ("gpus_per_node", "--gpus-per-node")):
        profile, _, number = str(found.get(name, "")).strip().partition(":")
        if not is_profile(profile.lower()):
            continue
        if mig(option, str(found.get("mig", profile))) != profile.lower():
            raise UsageError(f"{option} {profile} and --mig {found['mig']} are two kinds of slices", "ask for one kind")
        found |= {name: number or "1", "mig": profile.lower()}
    return found


def either_sizes(gpus: tuple[int, ...] | None, listed: tuple[int, ...] | None, resizable: bool) -> tuple[int, ...]:
    """Return the GPU counts of ``--gpus`` or ``--sizes``; () if neither is given."""
    found = (gpus if listed is None else listed) or ()
    if len(found) > 1 and not resizable:
        option = "--gpus" if listed is None else "--sizes"
        raise UsageError(f"{option}: several sizes are only for resizable jobs", "add --resizable")
    if listed is not None and gpus is not None:
        raise UsageError("--sizes and --gpus cannot be combined", "use one of the two")
    return found


Amount = int | tuple[int, int] | None
"""A number, or of a resizable job (minimum, maximum)."""


def cores(option: str, text: str) -> Amount:
    """Return the cores of ``12`` or ``2-12``."""
    return _amount(option, text, _parse_int)


def memory_or_range(option: str, text: str) -> Amount:
    """Return the MiB of ``64G`` or ``16G-64G``."""
    return _amount(option, text, parse_memory_mib)


def _amount(option: str, text: str, parse: Callable[[str], int]) -> Amount:
    minimum, is_range, maximum = text.strip().partition("-")
    if not is_range or not minimum:
        return _parse(option, text, parse)
    found = _parse(option, minimum, parse), _parse(option, maximum, parse)
    if found[0] > found[1]:
        raise UsageError(f"{option}: {text[:80]} is no range", "write the smaller number first")
    return found


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", text.strip()):
        raise ValueError("a number of CPU cores, or with --resizable 2-12")
    return int(text)


def split_amount(option: str, amount: Amount, resizable: bool) -> tuple[int | None, tuple[int, int] | None]:
    """Return the number and the range, of which one at most is given."""
    if not isinstance(amount, tuple):
        return amount, None
    if not resizable:
        raise UsageError(f"{option}: a range is only for resizable jobs", "add --resizable")
    return None, amount


def base_size(found: tuple[int, ...], base: int | None) -> int | None:
    """Return the size that the job was tuned for: as given, else the smallest of its sizes."""
    if base is not None and base not in found:
        raise UsageError(f"--base-gpus {base} is not one of its sizes", "see --gpus and --sizes")
    return base if base is not None else found[0] if found else None


class WarningSignal(NamedTuple):
    """A name without SIG, the seconds before the limit, and whether only the script gets it (``B:``)."""

    name: str = "TERM"
    before_s: int | None = None
    batch: bool = False


def signal(option: str, text: str) -> WarningSignal:
    """Return the signal of ``USR1``, ``10@60`` or ``B:USR1@60``."""
    batch = text.startswith("B:")
    name, has_seconds, seconds = text.removeprefix("B:").partition("@")
    name = name.strip().upper().removeprefix("SIG")
    if re.fullmatch(r"[0-9]+", name):
        import signal as signals

        number = int(name[:4])
        name = next((s.name.removeprefix("SIG") for s in signals.Signals if s == number), name)
    if name not in SIGNALS or (has_seconds and not re.fullmatch(r"[0-9]{1,9}", seconds)):
        raise UsageError(f"{option}: found {text[:80]!r}, expected such as TERM, USR1@60, 10@60 or B:USR1@60")
    return WarningSignal(name, int(seconds) if has_seconds else None, batch)


def dependencies(option: str, text: str) -> tuple[Dependency, ...]:
    """Return the dependencies of ``afterok:ID[:ID],singleton``, ids as typed; a bare ``ID`` means afterany."""
    found = []
    kinds = [kind for kind in DependencyKind if kind not in WITHOUT_ID]
    for clause in re.split(r",(?![^\[]*\])", text.strip()):  # at commas outside brackets: ID_[1,3] is one clause
        clause = clause.strip()
        if clause.lower() == DependencyKind.SINGLETON:
            found.append(Dependency(DependencyKind.SINGLETON))
            continue
        word, colon, rest = clause.partition(":")
        kind, names = (word.lower(), rest.split(":")) if colon else ("afterany", [word])
        if kind not in kinds or not all(names):
            listed = ", ".join(kinds)
            raise UsageError(
                f"{option}: found {clause[:80]!r}, expected KIND:ID[:ID...] with KIND one of {listed}; or singleton"
            )
        found += [Dependency(DependencyKind(kind), name) for name in names]
    return tuple(found)


def check_not_empty(option: str, text: str, separator: str = " ") -> None:
    """Raise UsageError for a blank text: mostly a variable that was not set."""
    if not text.replace(separator, " ").strip():
        raise UsageError(f"{option}: found {text[:80]!r}, expected a value", "leave it out for none")


def names(option: str, values: Sequence[str]) -> tuple[str, ...]:
    """Return the names of repeated and comma-separated options, without repeats, in order."""
    for text in values:
        check_not_empty(option, text, ",")
    return tuple(dict.fromkeys(n.strip() for v in values for n in v.split(",") if n.strip()))


def mail(option: str, address: str) -> str:
    """Return the mail address."""
    if not is_address(address):
        raise UsageError(f"{option}: found {address[:80]!r}, expected an address such as ada@example.org, or a user")
    return address


def notify(option: str, values: Sequence[str]) -> tuple[NoticeKind, ...]:
    """Return the kinds of notices."""
    try:
        return kinds_of(word.strip() for value in values for word in value.split(","))
    except ValueError as error:
        word, known = str(error), (*NoticeKind, "all")
        raise UsageError(f"{option}: there is no notice '{word[:40]}'{did_you_mean(word, known)}") from None


def chain(links: int | None, array_tasks: ArrayTasks | None) -> ArrayTasks | None:
    """Return the tasks of a chain: an array that runs one at a time."""
    if links is None:
        return array_tasks
    if array_tasks is not None:
        raise UsageError("--chain and --array cannot be combined", "use one of them")
    if not 1 < links <= MAX_LINKS:
        raise UsageError(f"--chain: 2 to {MAX_LINKS} jobs, found {links}")
    return ArrayTasks(tuple(range(1, links + 1)), 1)


def environment(values: Sequence[str], caller: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``NAME=VALUE``, or of ``NAME`` with the caller's value."""
    found: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals:
            if name not in caller:
                raise UsageError(f"--env {name[:80]}: no such variable in your environment", "use --env NAME=VALUE")
            value = caller[name]
        found[name] = value
    return found


def secrets(values: Sequence[str], caller: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of ``NAME`` (caller's variable), ``NAME=@FILE`` or ``NAME=-`` (stdin); argv is public."""
    if not values:
        return {}
    from gpusched.nodes.runtimes.checks import secret_name_error

    found: dict[str, str] = {}
    for text in values:
        name, equals, source = text.partition("=")
        if why := secret_name_error(name):
            raise UsageError(f"--secret {name[:80]!r} {why}")
        if name in found:
            raise UsageError(f"--secret {name} is given twice")
        if source == "-" and sum(other.endswith("=-") for other in values) > 1:
            raise UsageError(f"--secret {name}=-: stdin holds one secret", "use NAME or NAME=@FILE for the others")
        found[name] = _secret_value(name, source, caller) if equals else _inherited(name, caller)
        check_text(f"secret {name}", found[name])
    return found


def _inherited(name: str, caller: Mapping[str, str]) -> str:
    if name not in caller:
        raise UsageError(
            f"--secret {name}: no such variable in your environment", f"set it, or use --secret {name}=@FILE"
        )
    return caller[name]


def _secret_value(name: str, source: str, caller: Mapping[str, str]) -> str:
    try:
        if source == "-":
            content = sys.stdin.buffer.read(MAX_VALUE_BYTES + 2)
        elif source.startswith("@") and len(source) > 1:
            with open_input(source[1:]) as file:
                content = file.read(MAX_VALUE_BYTES + 2)
        else:
            raise UsageError(
                f"--secret {name}: a value on the command line is visible to everyone on this machine",
                f"use {name} (from your environment), {name}=@FILE or {name}=- (stdin)",
            )
        return content.decode().removesuffix("\n")
    except OSError as error:
        raise UsageError(f"--secret {name}: {source[1:]}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"secret {name} is not valid UTF-8") from None


def mounts(values: Sequence[str], cwd: str) -> tuple[Mount, ...]:
    """Return the mounts of ``SRC:DST[:ro]``; a relative SRC is below the current folder; ``SRC`` alone mounts there."""
    found = []
    for text in values:
        source, *rest = text.split(":")
        mode = rest.pop() if rest and rest[-1] in ("ro", "rw") else "rw"
        if not source or len(rest) > 1 or (rest and not rest[0]):
            raise UsageError(f"--mount: found {text[:80]!r}, expected SRC:DST or SRC:DST:ro")
        source = os.path.normpath(os.path.join(cwd, source))
        found.append(Mount(source, rest[0] if rest else source, mode == "ro"))
    return tuple(found)


def output_path(option: str, text: str | None, cwd: str) -> str | None:
    """Return the absolute path of the output file; a ``%`` in the current folder's name is escaped."""
    if text is None:
        return None
    if not text:
        raise UsageError(f"{option} is empty")
    return text if os.path.isabs(text) else os.path.normpath(os.path.join(cwd.replace("%", "%%"), text))
