"""Translate the values of sbatch's options into those of ours, perhaps followed by further options of ours.

Pure; an unsupported value raises `Unsupported`.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath

import msgspec

from gpusched.model.resources import Inventory
from gpusched.slurm.hostlist import expand

_PATTERNS = re.compile(r"%(.)")
_KIND = r"(?:[A-Za-z]|\dg\.)[\w.+-]*"  # a GPU type, perhaps with a profile of MIG slices: a100, 1g.10gb, a100_1g.10gb
_TYPED = re.compile(rf"(?:({_KIND})[:=])?(\d{{1,7}})")
_GPU = re.compile(rf"(?:gres/)?gpu(?:[:=]({_KIND}))?(?:[:=](\d{{1,7}}))?")
_PROFILE = re.compile(r"(?:(.+)[_-])?(\dg\.\d+gb.*)", re.IGNORECASE)
_UNITS = {"s": "s", "m": "m", "h": "h", "d": "d", "w": "w"}
_VENDORS = frozenset(("nvidia", "tesla", "geforce"))


class Unsupported(Exception):
    """An unsupported value or option: why, and what to do."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.why, self.hint = why, hint


class ScriptContext(msgspec.Struct, frozen=True):
    """The context of values: the inventory and the submission folder; translations append to ``notes``.

    ``used``: sbatch's options translated so far, by name, and their values as ours.
    """

    inventory: Inventory
    cwd: str
    notes: list[str]
    used: dict[str, list[str]] = {}

    def gpu_types(self, slurm_name: str) -> list[str]:
        """Return the inventory's GPU types that Slurm's name, such as ``a100`` or ``tesla_v100``, stands for."""
        words = _parts_of(slurm_name) - _VENDORS
        types = dict.fromkeys(node.gpu_type for node in self.inventory.nodes if node.gpu_type)
        found = [name for name in types if words and words <= _parts_of(name)]
        if not found:
            available = f"it has {', '.join(types)}" if types else "its inventory names no gpu_type"
            raise Unsupported(f"the cluster has no GPUs of type '{slurm_name[:40]}'", available)
        return found

    def if_declared(self, what: str, value: str, declared: object) -> list[str]:
        """Return the name of something that the inventory declares; with none declared it has no effect."""
        if declared:
            return [value]
        self.notes.append(f"{what} '{value[:40]}' is ignored: the inventory declares none")
        return []


def _parts_of(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def typed_number(value: str, site: ScriptContext) -> list[str]:
    """Translate ``4`` or ``a100:4``."""
    match = _TYPED.fullmatch(value)
    if match is None:
        raise Unsupported("expected a number of GPUs, such as 4 or a100:4", "one type for each job")
    return [match[2], *_of_types(match[1], site)]


def gres(value: str, site: ScriptContext) -> list[str]:
    """Translate ``gpu:4``, ``gpu:a100:4`` and ``none``: GPUs per node."""
    if value.lower() == "none":
        return ["0"]
    match = _GPU.fullmatch(value)
    if match is None:
        raise Unsupported("the only generic resource is GPUs of one type", "expected such as gpu:a100:4")
    return [match[2] or "1", *_of_types(match[1], site)]


def _of_types(name: str | None, site: ScriptContext) -> list[str]:
    """Translate ``a100``, ``1g.10gb`` and, as Slurm detects MIG slices, ``a100_1g.10gb``."""
    match = _PROFILE.fullmatch(name or "")
    if match is not None:
        return ["--mig", match[2].lower(), *_of_types(match[1], site)]
    return [] if name is None else ["--gpu-type", ",".join(site.gpu_types(name))]


def constraint(value: str, site: ScriptContext) -> list[str]:
    """Translate ``a100``, ``a100|v100`` and ``[a100|v100]``: GPU types; no other features are known."""
    inner = value[1:-1] if value[:1] in "[(" and value[-1:] in "])" else value
    if not re.fullmatch(r"[\w.+-]+(\|[\w.+-]+)*", inner):
        raise Unsupported("only GPU types are supported, separated by |", "use --gpu-type or --nodelist")
    found: dict[str, None] = {}
    for name in inner.split("|"):
        try:
            found |= dict.fromkeys(site.gpu_types(name))
        except Unsupported as error:
            why = f"'{name[:40]}' is not a GPU type here, and nodes have no other features"
            raise Unsupported(why, f"{error.hint}; use --gpu-type or --nodelist") from None
    return [",".join(found)]


def memory(value: str, site: ScriptContext) -> list[str]:
    """Translate sizes; K is rounded up to M."""
    match = re.fullmatch(r"(\d{1,15})[kK][bB]?", value)
    return [f"{max(1, -(-int(match[1]) // 1024))}M" if match else value]


def nodes(value: str, site: ScriptContext) -> list[str]:
    """Translate ``4`` and ``4-4``; ``2-4`` requests the minimum, 2."""
    minimum, is_range, maximum = value.partition("-")
    if not re.fullmatch("[0-9]{1,9}-?|[0-9]{1,9}-[0-9]{1,9}", value):
        raise Unsupported("expected a number of nodes, or the least and the most, such as 2-4")
    if maximum and int(maximum) < int(minimum):
        raise Unsupported("not a range", "put the smaller number first")
    if is_range and minimum != maximum:
        site.notes.append(
            f"the job gets {minimum}, the minimum; for a size that may change use #GPUSCHED --resizable --gpus MIN-MAX"
        )
    return [minimum]


def hosts(value: str, site: ScriptContext) -> list[str]:
    """Translate host lists such as ``node[01-04],login``."""
    if "/" in value:
        raise Unsupported("host files are not read", "list the nodes")
    try:
        found = expand(value)
    except (ValueError, IndexError) as error:
        raise Unsupported(f"invalid node list: {error}", "expected such as node[01-04]") from None
    return [",".join(found)]


def begin(value: str, site: ScriptContext) -> list[str]:
    """Translate ``now+2hours`` and ``now+60`` (seconds); dates need no translation."""
    match = re.fullmatch(r"now\s*\+\s*(\d{1,9})\s*([a-z]*)", value)
    if match is None:
        return [value]
    unit = match[2] or "s"
    words = ("seconds", "minutes", "hours", "days", "weeks")
    full = next((word for word in words if word.startswith(unit)), None)
    if full is None:
        raise Unsupported(f"'{unit[:20]}' is not a unit of time", "expected such as now+2hours")
    return [f"now+{match[1]}{_UNITS[full[0]]}"]


def signal(value: str, site: ScriptContext) -> list[str]:
    """Translate ``B:USR1@90``; without ``@`` the signal is sent 60 seconds before the limit, as in Slurm."""
    target, colon, rest = value.rpartition(":")
    if colon and target != "B":
        raise Unsupported("R: is for overlapping reservations", "omit R:")
    return [f"{target}{colon}{rest}" + ("" if "@" in rest else "@60")]


def path(value: str, site: ScriptContext) -> list[str]:
    """Return the output path; raise for unsupported patterns."""
    for letter in _PATTERNS.findall(value):
        if letter not in "jAaxunNt%":
            raise Unsupported(f"%{letter} is not supported", "supported: %j %A %a %x %u %n %t %N %%")
    return [value]


def folder(value: str, site: ScriptContext) -> list[str]:
    """Resolve a folder relative to the submission folder."""
    return [str(PurePosixPath(os.path.normpath(os.path.join(site.cwd, value))))]


def export(value: str, site: ScriptContext) -> list[str]:
    """Translate ``NONE`` and ``NAME,NAME=VALUE``; the caller's whole environment is never exported."""
    found: list[str] = []
    for name in value.split(","):
        if name.upper() == "ALL":
            site.notes.append(
                "ALL means the image's environment, not your shell's: name the variables that the job needs "
                "(--export=ALL,NAME)"
            )
        elif name and name.upper() not in ("NONE", "NIL"):
            found += ["--env", name]
    return found[1:]


def exclusive(value: str, site: ScriptContext) -> list[str]:
    """Accept only an option without a value."""
    if value:
        raise Unsupported(f"'{value[:20]}' is not supported, only whole nodes", "use --exclusive")
    return ["--exclusive"]


def switches(value: str, site: ScriptContext) -> list[str]:
    """Translate ``1@2:00:00``, the time to wait for one rack, and ``1``, which waits Slurm's default of 5 minutes."""
    count, has_wait, wait = value.partition("@")
    if count != "1" or (has_wait and not wait):
        raise Unsupported(
            "expected 1 or 1@TIME", "--switches=1@2:00:00 waits 2 hours for one rack, --max-spread rack always"
        )
    return [wait or "5m"]


def image(value: str, site: ScriptContext) -> list[str]:
    """Translate Pyxis' names: ``nvcr.io#nvidia/pytorch:24.11-py3`` is ``nvcr.io/nvidia/pytorch:24.11-py3``."""
    name = value.removeprefix("docker://").replace("#", "/", 1)
    if name.endswith(".sqsh"):
        raise Unsupported("an enroot file", "name the image in its registry")
    return [name]


def mounts(value: str, site: ScriptContext) -> list[str]:
    """Translate ``SRC:DST`` and ``SRC:DST:ro``, comma-separated."""
    return [word for part in value.split(",") if part for word in ("--mount", part)][1:]


MAIL = {
    "BEGIN": ("begin",), "END": ("end",), "FAIL": ("fail",), "REQUEUE": ("requeue",), "TIME_LIMIT": ("fail",),
    "TIME_LIMIT_90": ("limit",), "NONE": (), "ALL": ("begin", "end", "fail", "requeue"),
}  # fmt: skip


_NO_MAIL = ("ARRAY_TASKS", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT_50", "TIME_LIMIT_80")


def mail(value: str, site: ScriptContext) -> list[str]:
    """Translate the types of mail to kinds of notices."""
    words: dict[str, None] = {}
    for kind in value.upper().split(","):
        if kind in _NO_MAIL:
            site.notes.append(f"no effect: {kind} is not supported; supported: {', '.join(MAIL)}")
        elif kind not in MAIL:
            raise Unsupported(f"'{kind[:20]}' is not supported", f"supported: {', '.join(MAIL)}")
        else:
            words |= dict.fromkeys(MAIL[kind])
    return [",".join(words)] if words else []
