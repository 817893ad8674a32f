"""Parse the option values of ``submit``. Pure, except for reading files and variables that an option names."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

from gpusched.config.validate import MAX_ARRAY_TASKS, MAX_LINKS, MAX_SIZES, MAX_VALUE_BYTES, SIGNALS, check_text
from gpusched.errors import UsageError
from gpusched.model.jobs import WITHOUT_ID, Dependency, DependencyKind, Mount
from gpusched.model.notices import NoticeKind, is_address, kinds_of
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


def begin(text: str | None, now: float) -> float | None:
    """Return a Unix time in seconds, or None if the option is not given."""
    return None if text is None else _parse("--begin", text, lambda t: parse_time(t, now))


def _parse(option: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: found {text[:80]!r}, expected {error}") from None


def array(text: str | None) -> tuple[tuple[int, ...] | None, int | None]:
    """Return the indices and how many tasks may run at once, of ``0-9``, ``0-30:5`` or ``1,3,7-9``, perhaps ``%2``."""
    if text is None:
        return None, None
    indices, percent, max_running = text.partition("%")
    found: set[int] = set()
    count = 0
    for part in indices.split(","):
        match = _SPAN.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"--array: found {text[:80]!r}, expected such as 0-9, 0-30:5, 1,3,7 or 0-99%10")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step < 1:
            raise UsageError(f"--array: {part.strip()} contains no index", "write the smaller number first")
        count += (last - first) // step + 1
        if count > MAX_ARRAY_TASKS:  # before they are made
            raise UsageError(f"--array: at most {MAX_ARRAY_TASKS} tasks")
        found.update(range(first, last + 1, step))
    if percent and not (re.fullmatch(r"[0-9]{1,7}", max_running) and int(max_running) > 0):
        raise UsageError(
            f"--array: % must be followed by the number of tasks that may run at once, found {max_running[:40]!r}"
        )
    return tuple(sorted(found)), int(max_running) if percent else None


def sizes(gpus: str | None, listed: str | None, resizable: bool) -> tuple[int, ...]:
    """Return the possible GPU counts, ascending, of ``--gpus 4``, ``--gpus 1-8`` and ``--sizes 1,2,4``; () if unset."""
    text, option = (gpus, "--gpus") if listed is None else (listed, "--sizes")
    if text is None:
        return ()
    expected = "a number, or with --resizable 1-8" if option == "--gpus" else "numbers such as 1,2,4,8"
    words = text.split(",") if option == "--sizes" else [text]
    matches = [re.fullmatch(r"(-?[0-9]{1,9})(?:-([0-9]{1,9}))?", word.strip()) for word in words]
    found: set[int] = set()
    for match in matches:
        if match is None or (option == "--sizes" and match[2]):
            raise UsageError(f"{option}: found {text[:80]!r}, expected {expected}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_SIZES:
            raise UsageError(
                f"{option}: {match[0]} is not a range of at most {MAX_SIZES} sizes", "write the smaller number first"
            )
        found.update(range(first, last + 1))
    if len(found) > 1 and not resizable:
        raise UsageError(f"{option}: several sizes are only for resizable jobs", "add --resizable")
    if listed is not None and gpus is not None:
        raise UsageError("--sizes and --gpus cannot be combined", "use one of the two")
    return tuple(sorted(found))


Amount = int | tuple[int, int] | None
"""A number, or (minimum, maximum)."""


def cores(text: str | None, resizable: bool) -> Amount:
    """Return the cores of ``12``, or for a resizable job of ``2-12``; None if the option is not given."""
    return _amount("--cpus", text, _parse_int, resizable)


def memory(text: str | None, resizable: bool) -> Amount:
    """Return the MiB of ``64G``, or for a resizable job of ``16G-64G``; None if the option is not given."""
    return _amount("--mem", text, parse_memory_mib, resizable)


def _amount(option: str, text: str | None, parse: Callable[[str], int], resizable: bool) -> Amount:
    if text is None:
        return None
    minimum, is_range, maximum = text.strip().partition("-")
    if not is_range or not minimum:
        return _parse(option, text, parse)
    found = _parse(option, minimum, parse), _parse(option, maximum, parse)
    if found[0] > found[1]:
        raise UsageError(f"{option}: {text[:80]} is no range", "write the smaller number first")
    if not resizable:
        raise UsageError(f"{option}: a range is only for resizable jobs", "add --resizable")
    return found


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", text.strip()):
        raise ValueError("a number of CPU cores, or with --resizable 2-12")
    return int(text)


def base_size(found: tuple[int, ...], base_gpus: int | None) -> int | None:
    """Return the size that the job was tuned for: as given, else the smallest of its sizes."""
    if base_gpus is not None and base_gpus not in found:
        raise UsageError(f"--base-gpus {base_gpus} is not one of its sizes", "see --gpus and --sizes")
    return base_gpus if base_gpus is not None else found[0] if found else None


def max_spread(text: str | None) -> Literal["", "server", "rack", "any"]:
    """Return how far apart the nodes may be; "" if the option is not given."""
    if text is None:
        return ""
    if text not in ("server", "rack", "any"):
        raise UsageError(f"--max-spread: found {text[:40]!r}, expected server, rack or any")
    return text  # type: ignore[return-value]


def share(text: str | None) -> Literal["", "pairs"]:
    """Return with whom the job may share its GPUs; "" if the option is not given."""
    if text not in (None, "pairs"):
        raise UsageError(f"--share: found {text[:40]!r}, expected pairs (with one other job)")
    return "pairs" if text else ""


def memory_of(option: str, text: str | None) -> int | None:
    """Return the MiB per GPU, core or node; None if the option is not given."""
    return None if text is None else _parse(option, text, parse_memory_mib)


def placement_wait(text: str | None) -> int | None:
    """Return seconds, 0 for no wait; None if the option is not given."""
    return 0 if text in ("0", "0s") else duration("--placement-wait", text)


def batch(text: str | None) -> Literal["fixed", "scale"] | None:
    """Return whether the batch is fixed or scales with the size; None if the option is not given."""
    if text is None:
        return None
    if text not in ("fixed", "scale"):
        raise UsageError(f"--batch: found {text[:40]!r}, expected fixed or scale")
    return text  # type: ignore[return-value]


def signal(text: str | None) -> tuple[str, int | None, bool]:
    """Return the name without SIG, the seconds before the limit, and whether only the script gets it (``B:``)."""
    if text is None:
        return "TERM", None, False
    batch = text.startswith("B:")
    name, has_seconds, seconds = text.removeprefix("B:").partition("@")
    name = name.strip().upper().removeprefix("SIG")
    if name.isdecimal():
        import signal as signals

        number = int(name[:4])
        name = next((s.name.removeprefix("SIG") for s in signals.Signals if s == number), name)
    if name not in SIGNALS or (has_seconds and not re.fullmatch(r"[0-9]{1,9}", seconds)):
        raise UsageError(f"--signal: found {text[:80]!r}, expected such as TERM, USR1@60, 10@60 or B:USR1@60")
    return name, int(seconds) if has_seconds else None, batch


def dependencies(text: str | None, resolve: Callable[[str], str]) -> tuple[Dependency, ...]:
    """Return the dependencies of ``afterok:ID[:ID],singleton``; a bare ``ID`` means afterany."""
    found = []
    kinds = [kind for kind in DependencyKind if kind not in WITHOUT_ID]
    for clause in _clauses(text):
        if clause.lower() == DependencyKind.SINGLETON:
            found.append(Dependency(DependencyKind.SINGLETON))
            continue
        word, colon, rest = clause.partition(":")
        kind, names = (word.lower(), rest.split(":")) if colon else ("afterany", [word])
        if kind not in kinds or not all(names):
            listed = ", ".join(kinds)
            raise UsageError(
                f"--dependency: found {clause[:80]!r}, expected KIND:ID[:ID...] with KIND one of {listed}; or singleton"
            )
        found += [Dependency(DependencyKind(kind), resolve(name)) for name in names]
    return tuple(found)


def _clauses(text: str | None) -> list[str]:
    """Split at commas outside brackets: ``ID_[1,3]`` is one clause."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text)] if text is not None else []


def chain(links: int | None, request_array: str | None) -> int | None:
    """Return the number of jobs in a chain; None for a single job."""
    if links is None:
        return None
    if request_array is not None:
        raise UsageError("--chain and --array cannot be combined", "use one of them")
    if not 1 < links <= MAX_LINKS:
        raise UsageError(f"--chain: 2 to {MAX_LINKS} jobs, found {links}")
    return links


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
            with open(source[1:], "rb") as file:
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


def names(values: Sequence[str]) -> tuple[str, ...]:
    """Return the names of repeated and comma-separated options, without repeats, in order."""
    return tuple(dict.fromkeys(n.strip() for v in values for n in v.split(",") if n.strip()))


def output_path(option: str, text: str | None, cwd: str) -> str | None:
    """Return the absolute path of the output file; a ``%`` in the current folder's name is escaped."""
    if text is None:
        return None
    if not text:
        raise UsageError(f"{option} is empty")
    return text if os.path.isabs(text) else os.path.normpath(os.path.join(cwd.replace("%", "%%"), text))


def appends(text: str | None) -> bool:
    """Return whether a start of the job appends to its output files; by default each start truncates them."""
    if text not in (None, "append", "truncate"):
        raise UsageError(f"--open-mode: found {text[:40]!r}, expected append or truncate")
    return text == "append"


def mail(address: str | None, notify: Sequence[str]) -> str:
    """Return the mail address for notices about the job; "" for none."""
    if address is None:
        if notify:
            raise UsageError("--notify: nobody to notify", "add --mail ADDRESS")
        return ""
    if not is_address(address):
        raise UsageError(f"--mail: found {address[:80]!r}, expected an address such as ada@example.org, or a user")
    return address


def notify(values: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of notices; () for the default ones."""
    try:
        return kinds_of(word.strip() for value in values for word in value.split(","))
    except ValueError as error:
        word, known = str(error), (*NoticeKind, "all")
        raise UsageError(f"--notify: there is no notice '{word[:40]}'{did_you_mean(word, known)}") from None
