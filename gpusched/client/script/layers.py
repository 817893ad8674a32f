"""Combine the options of a job: the command line overrides ``#GPUSCHED`` lines, which override ``#SBATCH`` lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from gpusched.client.options import output_path
from gpusched.client.request import OPTIONS, SubmitRequest
from gpusched.client.script.lines import OptionLine, ScriptError, lines_of, notes_on_steps
from gpusched.client.script.sbatch import ParsedOption, translate_line
from gpusched.client.script.source import JobScript
from gpusched.client.script.values import ScriptContext
from gpusched.errors import UsageError, printable
from gpusched.model.resources import Inventory
from gpusched.model.units import count_of

Parser = Callable[[Sequence[str]], Mapping[str, Any]]
"""Words -> the options given by them, parsed, by field of `SubmitRequest`; a `UsageError` where they are wrong."""

GPUS = frozenset(("gpus", "gpus_per_node", "gpus_per_task", "sizes"))
CORES = frozenset(("cpus", "cpus_per_task", "cpus_per_gpu"))
MEMORY = frozenset(("mem", "mem_per_node", "mem_per_gpu", "mem_per_cpu"))
TASKS = frozenset(("ntasks", "ntasks_per_node"))
_OVERRIDES = (  # an option of the first set overrides lower layers' options of the second
    (GPUS, GPUS | {"flavor", "mig"}), (CORES, CORES), (MEMORY, MEMORY), (TASKS, TASKS),
    (frozenset(("flavor",)), GPUS | CORES | MEMORY | {"mig"}),
)  # fmt: skip
_MERGED_LISTS = {"env": "=", "secret": "=", "mount": None}  # merged entry by entry: name -> its separator


class Origin(NamedTuple):
    """Where an option was set: ``train.sh:4``, the text there, and our equivalent options."""

    where: str
    written: str
    words: tuple[str, ...]


class ScriptOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a script of ``user`` by parameter, their origins, and notes; ``slurm``: it has #SBATCH lines.

    ``used``: sbatch's options in these, see `ScriptContext`.
    """

    user: str
    given: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    notes: tuple[str, ...] = ()
    slurm: bool = False
    used: dict[str, list[str]] = {}


def read_options(script: JobScript, parse: Parser, inventory: Inventory, cwd: str, user: str) -> ScriptOptions:
    """Read all lines of a script that ``user`` submits in the folder ``cwd``.

    Raises:
        ScriptError: The first line that is not understood.
    """
    lines, notes = lines_of(script)
    site = ScriptContext(inventory, cwd, notes)
    origins: dict[str, Origin] = {}
    layers: dict[str, dict[str, Any]] = {"SBATCH": {}, "GPUSCHED": {}}
    for line in lines:
        for option in translate_line(line, site) if line.marker == "SBATCH" else _native_option(line):
            given = _parse_option(line, option, parse)
            layer = layers[line.marker]
            if line.marker == "SBATCH" and "gpu_type" in layer and "gpu_type" in given:
                given["gpu_type"] = _common_types(layer.pop("gpu_type"), given["gpu_type"], line, option)
            layers[line.marker] = _merge_lists(layer, given)
            origin = Origin(line.where, option.written, tuple(option.words))
            if line.marker == "GPUSCHED":
                origins |= dict.fromkeys(given, origin)
            else:
                origins |= {name: origin for name in given if name not in layers["GPUSCHED"]}
    if "nodelist" in (sbatch := layers["SBATCH"]):
        try:
            _need_all_named(sbatch, sbatch.get("nodes"), "it", "#GPUSCHED --nodelist")
        except UsageError as error:
            origin = origins["nodelist"]
            raise ScriptError(origin.where, origin.written, error.message, error.hint) from None
    notes += notes_on_steps(script)
    return ScriptOptions(
        user=user, given=merge(sbatch, layers["GPUSCHED"]), origins=origins, notes=tuple(notes),
        slurm=any(line.marker == "SBATCH" for line in lines), used=site.used,
    )  # fmt: skip


def merge(lower: Mapping[str, Any], higher: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both; the higher one wins where an option has one value."""
    overridden = {name for names, replaced in _OVERRIDES if names & higher.keys() for name in replaced}
    kept = {name: value for name, value in lower.items() if name not in overridden}
    for name, mark in _MERGED_LISTS.items():
        if name in kept and name in higher:
            identifiers = {_key(text, mark) for text in higher[name]}
            kept[name] = [text for text in kept[name] if _key(text, mark) not in identifiers]
    return _merge_lists({n: v for n, v in kept.items() if n in _MERGED_LISTS or n not in higher}, higher)


def request_of(given: Mapping[str, Any], script: JobScript) -> SubmitRequest:
    """Return the request for a script; the words after its name are its arguments."""
    own = {"command": given["command"][1:], "script": script.text}
    return SubmitRequest(**{"name": script.name, **given, **own})


def merge_typed(script: ScriptOptions, typed: Mapping[str, Any], sbatch: ScriptContext | None = None) -> dict[str, Any]:
    """Return all options: those typed override the script's; ``sbatch``: the context of sbatch's among those typed.

    A script with ``#SBATCH`` lines gets Slurm's variables and, if it requests no resources, one core per task, no GPU.

    Raises:
        UsageError: ``-w`` names another number of nodes than were requested.
    """
    options, used = merge(script.given, typed), sbatch.used if sbatch else {}
    if "nodelist" in used:
        nodes = options.get("nodes") if "nodes" in typed or "nodes" in script.origins else None
        _need_all_named(options, nodes, "-w", "--nodelist")
    if "mail-type" in used and "notify" not in typed:  # NONE
        options.pop("notify", None)
    _apply_slurm_rules(options, {**script.used, **used}, script.user)
    if script.slurm:
        options.setdefault("slurm_env", True)
        if not options.keys() & (GPUS | CORES | MEMORY | TASKS | {"flavor", "exclusive"}):
            options["ntasks_per_node"] = 1
    return options


def with_origin(error: UsageError, script: ScriptOptions, typed: Mapping[str, Any]) -> UsageError:
    """Return the error with the script line that caused it; unchanged if the option was typed or is unknown."""
    if isinstance(error, ScriptError):
        return error
    candidates = {n: o for n, o in script.origins.items() if n in script.given and n not in typed}
    quoted = re.findall(r"'([^']+)'", error.message)[:1]
    for origin in candidates.values():
        options = [word for word in origin.words if word.startswith("-")]
        if any(_is_named_in(option, error.message) for option in options) or any(
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


def _native_option(line: OptionLine) -> list[ParsedOption]:
    words = ["--hot" if pair == ("--resizable", "hot") else pair[1] for pair in pairwise(("", *line.words))]
    return [ParsedOption(f"#GPUSCHED {' '.join(line.words)}", words)]


def _parse_option(line: OptionLine, option: ParsedOption, parse: Parser) -> dict[str, Any]:
    try:
        return dict(parse(option.words))
    except UsageError as error:
        raise ScriptError(line.where, printable(option.written), error.message, error.hint) from None


def _merge_lists(lower: Mapping[str, Any], higher: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both; lists of repeatable options are concatenated, of other values the later wins."""
    joined = {n: (*lower[n], *v) for n, v in higher.items() if n in lower and OPTIONS[n].many}
    names = {n: tuple(dict.fromkeys(v)) for n, v in joined.items() if n not in _MERGED_LISTS}
    return {**lower, **higher, **joined, **names}


def _common_types(first: Sequence[str], second: Sequence[str], line: OptionLine, option: ParsedOption) -> Sequence[str]:
    both = tuple(name for name in first if name in second)
    if not both:
        raise ScriptError(line.where, option.written, f"another line sets {', '.join(first)}", "remove one")
    return both


def _apply_slurm_rules(options: dict[str, Any], used: Mapping[str, Sequence[str]], user: str) -> None:
    """Apply rules of Slurm: output is below --chdir, --gres=none is of GPUs per node, mail goes as requested."""
    if used.get("chdir") and options.get("workdir") in (*used["chdir"], *used.get("container-workdir", ())):
        for name in options.keys() & {"output", "error"}:
            options[name] = output_path(f"--{name}", options[name], used["chdir"][0])
    if used.get("gres") == ["0"] and options.keys() & {"gpus", "gpus_per_task"}:
        options.pop("gpus_per_node", None)
    if not options.get("notify"):
        if [options.get("mail")] == used.get("mail-user"):
            del options["mail"]
    elif "mail-type" in used:
        options.setdefault("mail", user)


def _need_all_named(options: dict[str, Any], nodes: int | None, shown: str, ours: str) -> None:
    """Apply a rule of Slurm: a nodelist names all nodes of a job; ``nodes``: as requested."""
    count = len(set(options["nodelist"]))
    if nodes not in (None, count):
        raise UsageError(
            f"{shown} names {count_of(count, 'node')}, and --nodes says {nodes}",
            f"to allow more nodes than needed use {ours}",
        )
    for name in ("gpus", "ntasks"):
        total = options.get(name) or 0
        total = max(total) if isinstance(total, tuple) else total
        if 0 < total < count:
            raise UsageError(
                f"{shown} names {count_of(count, 'node')}, all of which the job gets, and --{name} is {total}",
                f"to allow more nodes than needed use {ours}",
            )
    options["nodes"] = count


def _key(text: str, mark: str | None) -> str:
    """Return what identifies an entry: the name before ``=``; for a mount, its target."""
    if mark is not None:
        return text.partition(mark)[0]
    parts = text.removesuffix(":ro").removesuffix(":rw").split(":")
    return parts[-1]


def _is_named_in(option: str, message: str) -> bool:
    return option.startswith("-") and f"{option} " in f"{message.replace(':', ' ').replace(',', ' ')} "
