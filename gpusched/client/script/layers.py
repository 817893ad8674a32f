"""What is asked for in all: the command line goes before ``#GPUSCHED`` lines, these before ``#SBATCH`` lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gpusched.client.script.lines import OptionLine, ScriptError, lines_of, notes_on_steps
from gpusched.client.script.sbatch import ParsedOption, translated
from gpusched.client.script.source import JobScript
from gpusched.client.script.values import ScriptContext
from gpusched.errors import UsageError, printable
from gpusched.model.resources import Inventory

Parser = Callable[[Sequence[str]], Mapping[str, Any]]
"""Words -> the options given by them, by the parameter that each fills; a `UsageError` where they are wrong."""

GPUS = frozenset(("gpus", "gpus_per_node", "gpus_per_task", "sizes"))
CORES = frozenset(("cpus", "cpus_per_task", "cpus_per_gpu"))
MEMORY = frozenset(("mem", "mem_per_node", "mem_per_gpu", "mem_per_cpu"))
TASKS = frozenset(("ntasks", "ntasks_per_node"))
_REPLACES = (  # who gives one of the first goes before whoever gave any of the second
    (GPUS, GPUS | {"flavor"}), (CORES, CORES), (MEMORY, MEMORY), (TASKS, TASKS),
    (frozenset(("flavor",)), GPUS | CORES | MEMORY),
)  # fmt: skip
_ADDED = {"env": "=", "secret": "=", "mount": None}  # not replaced as a whole; by what comes before this


class Origin(NamedTuple):
    """Where an option stands: ``train.sh:4``, as it is written there, and the options of ours that it means."""

    where: str
    written: str
    words: tuple[str, ...]


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """What a script asks for: options by their parameter, where each stands, notes; ``slurm``: it has #SBATCH lines."""

    given: dict[str, Any]
    origins: dict[str, Origin]
    notes: tuple[str, ...]
    slurm: bool


def read(script: JobScript, parse: Parser, inventory: Inventory, cwd: str, user: str) -> Read:
    """All lines of a script, which ``user`` submits in the folder ``cwd``.

    Raises:
        ScriptError: The first line that is not understood.
    """
    lines, notes = lines_of(script)
    site = ScriptContext(inventory, cwd, notes)
    origins: dict[str, Origin] = {}
    layers: dict[str, dict[str, Any]] = {"SBATCH": {}, "GPUSCHED": {}}
    for line in lines:
        for asked in translated(line, site) if line.marker == "SBATCH" else _own(line):
            given = _parsed(line, asked, parse)
            layer = layers[line.marker]
            if line.marker == "SBATCH" and "gpu_type" in layer and "gpu_type" in given:
                given["gpu_type"] = _in_both(layer.pop("gpu_type"), given["gpu_type"], line, asked)
            layers[line.marker] = _together(layer, given)
            origin = Origin(line.where, asked.written, tuple(asked.words))
            if line.marker == "GPUSCHED":
                origins |= dict.fromkeys(given, origin)
            else:
                origins |= {name: origin for name in given if name not in layers["GPUSCHED"]}
    slurm = any(line.marker == "SBATCH" for line in lines)
    sbatch = _as_slurm_counts(layers["SBATCH"], origins, user) if slurm else {}
    notes += notes_on_steps(script)
    return Read(given=over(sbatch, layers["GPUSCHED"]), origins=origins, notes=tuple(notes), slurm=slurm)


def over(lower: Mapping[str, Any], higher: Mapping[str, Any]) -> dict[str, Any]:
    """Both, where one option can only have one value the higher one's."""
    gone = {name for names, replaced in _REPLACES if names & higher.keys() for name in replaced}
    kept = {name: value for name, value in lower.items() if name not in gone}
    for name, mark in _ADDED.items():
        if name in kept and name in higher:
            named = {_key(text, mark) for text in higher[name]}
            kept[name] = [text for text in kept[name] if _key(text, mark) not in named]
    return _together({n: v for n, v in kept.items() if n in _ADDED or n not in higher}, higher)


def complete(read: Read, typed: Mapping[str, Any]) -> dict[str, Any]:
    """All that is asked for: what was typed over what the script says.

    A script with ``#SBATCH`` lines has Slurm's variables, and where nobody says how much it needs, one core for each
    task: none asks for GPUs by saying nothing.
    """
    found = over(read.given, typed)
    if read.slurm:
        found.setdefault("slurm_env", True)
        if not found.keys() & (GPUS | CORES | MEMORY | TASKS | {"flavor", "exclusive"}):
            found["ntasks_per_node"] = 1
    return found


def blamed(error: UsageError, read: Read, typed: Mapping[str, Any]) -> UsageError:
    """The error with the line of the script that it is about; as it is where that was typed, or cannot be told."""
    if isinstance(error, ScriptError):
        return error
    candidates = {n: o for n, o in read.origins.items() if n in read.given and n not in typed}
    quoted = re.findall(r"'([^']+)'", error.message)[:1]
    for origin in candidates.values():
        options = [word for word in origin.words if word.startswith("-")]
        if any(_stands_in(option, error.message) for option in options) or any(
            re.search(rf"(?<![\w.-]){re.escape(value)}(?![\w.-])", origin.written) for value in quoted
        ):
            return ScriptError(origin.where, printable(origin.written), error.message, error.hint)
    if quoted or not re.search(r"GPU|cores|nodes|tasks", error.message):
        return error
    shape = [o for n, o in candidates.items() if n in GPUS | CORES | MEMORY | TASKS | {"nodes", "nodelist", "exclude"}]
    if not shape or any(n in GPUS | CORES | MEMORY | TASKS | {"nodes"} for n in typed):
        return error
    first = dict.fromkeys(f"{o.where.rpartition(':')[2]} ({o.written.partition(' ')[2]})" for o in shape)
    file = shape[0].where.rpartition(":")[0]
    return UsageError(f"{file}, lines {', '.join(first)}: {error.message}", error.hint)


def _own(line: OptionLine) -> list[ParsedOption]:
    return [ParsedOption(f"#GPUSCHED {' '.join(line.words)}", list(line.words))]


def _parsed(line: OptionLine, asked: ParsedOption, parse: Parser) -> dict[str, Any]:
    try:
        return dict(parse(asked.words))
    except UsageError as error:
        hint = error.hint or "'gpusched submit --help' has all options"
        raise ScriptError(line.where, asked.written, error.message, hint) from None


def _together(lower: Mapping[str, Any], higher: Mapping[str, Any]) -> dict[str, Any]:
    """Both; lists are joined, of other values the later counts."""
    joined = {n: [*lower[n], *v] for n, v in higher.items() if isinstance(v, (list, tuple)) and n in lower}
    return {**lower, **higher, **joined}


def _in_both(one: Sequence[str], other: Sequence[str], line: OptionLine, asked: ParsedOption) -> list[str]:
    first, second = (",".join(names).split(",") for names in (one, other))
    both = [name for name in first if name in second]
    if not both:
        raise ScriptError(line.where, asked.written, f"another line sets {', '.join(first)}", "remove one")
    return [",".join(both)]


def _as_slurm_counts(given: dict[str, Any], origins: Mapping[str, Origin], user: str) -> dict[str, Any]:
    """In Slurm a nodelist names all nodes of a job, and mail goes to its user, of what is said only."""
    if given.get("notify"):
        given.setdefault("mail", user)
    else:
        given.pop("mail", None)
    if "nodelist" not in given:
        return given
    names = list(dict.fromkeys(",".join(given["nodelist"]).split(",")))
    if given.setdefault("nodes", len(names)) != len(names):
        origin = origins["nodelist"]
        raise ScriptError(
            origin.where, origin.written, f"it names {len(names)} nodes, and --nodes says {given['nodes']}",
            "to allow more nodes than needed use #GPUSCHED --nodelist",
        )  # fmt: skip
    return given


def _key(text: str, mark: str | None) -> str:
    """What an entry is told apart by: the name before ``=``; of a mount its target."""
    if mark is not None:
        return text.partition(mark)[0]
    parts = text.removesuffix(":ro").removesuffix(":rw").split(":")
    return parts[-1]


def _stands_in(option: str, message: str) -> bool:
    return option.startswith("-") and f"{option} " in f"{message.replace(':', ' ').replace(',', ' ')} "
