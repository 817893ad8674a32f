"""sbatch's options: our equivalent of each, or why it is refused. The guide's table is generated from this one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from gpusched.client.script import values
from gpusched.client.script.lines import OptionLine, ScriptError
from gpusched.client.script.values import ScriptContext, Unsupported
from gpusched.errors import UsageError
from gpusched.model.resources import Inventory
from gpusched.model.suggest import did_you_mean

Words = list[str]


class SupportedOption(NamedTuple):
    """A supported option.

    ``words``: its value ("" if it has none) -> our own options; ``means``: the same for people.
    ``value``: whether it takes one; ``maybe``: the value is optional and follows ``=``. ``result``: whether it means
    the same as in Slurm, something else (for some values at least), or nothing, which a note says.
    """

    means: str
    words: Callable[[str, ScriptContext], Words]
    short: str = ""
    value: bool = True
    maybe: bool = False
    result: Literal["as Slurm", "different", "warned"] = "as Slurm"


class RefusedOption(NamedTuple):
    """An option of sbatch that is not supported: why, and what to do."""

    why: str
    hint: str = ""
    short: str = ""


def _same(option: str, short: str = "", means: str = "") -> SupportedOption:
    return SupportedOption(means or f"{option}", lambda value, site: [option, value], short)


def _flag(words: Words, means: str, short: str = "") -> SupportedOption:
    return SupportedOption(means, lambda value, site: words, short, value=False)


def _translated(means: str, words: Callable[[str], Words], short: str = "") -> SupportedOption:
    return SupportedOption(means, lambda value, site: words(value), short)


def _different(option: SupportedOption) -> SupportedOption:
    return option._replace(result="different")


def _no_effect(why: str, short: str = "", value: bool = True, maybe: bool = False) -> SupportedOption:
    """Return an option that is accepted without effect, with a note; no job can depend on it."""

    def words(value: str, site: ScriptContext) -> Words:
        site.notes.append(f"no effect: {why}")
        return []

    return SupportedOption(f"no effect: {why}", words, short, value, maybe, "warned")


def _groups(inventory: Inventory) -> object:
    return inventory.groups.groups


def _classes(inventory: Inventory) -> object:
    return inventory.quotas.qos


def _label(what: str, option: str, declared: Callable[[Inventory], object]) -> Callable[[str, ScriptContext], Words]:
    def words(value: str, site: ScriptContext) -> Words:
        if declared(site.inventory):
            return [option, value]
        site.notes.append(f"{what} '{value[:40]}' is ignored: the inventory declares none")
        return []

    return words


_NOT_PLACED = "cores, sockets and threads are chosen by the node's system"
_ON_COMMAND_LINE = "it is for the command line"

OPTIONS: dict[str, SupportedOption | RefusedOption] = {
    "account": SupportedOption(
        "--group, where the inventory has groups",
        _label("the account", "--group", _groups),
        "A",
    ),
    "acctg-freq": _no_effect("jobs are always measured; see gpusched show and gpusched power"),
    "array": _same("--array", "a"),
    "begin": _translated("--begin; now+60 are seconds, as in Slurm", values.begin, "b"),
    "chdir": SupportedOption("--workdir", values.folder, "D"),
    "comment": _same("--comment"),
    "constraint": _different(SupportedOption("--gpu-type: types of GPUs, with | between them", values.constraint, "C")),
    "container-image": _different(_translated("--image (of Pyxis); not a .sqsh file", values.image)),
    "container-mounts": _translated("--mount for each (of Pyxis)", values.mounts),
    "container-workdir": _same("--workdir", means="--workdir (of Pyxis)"),
    "cpus-per-gpu": _same("--cpus-per-gpu"),
    "cpus-per-task": _same("--cpus-per-task", "c"),
    "dependency": _same("--dependency", "d"),
    "error": _translated("--error", lambda value: values.path("--error", value), "e"),
    "distribution": _different(
        _translated(
            "block, which is how tasks go to nodes; others are refused",
            lambda value: values.only(("block", "block:block"), "tasks go to nodes by blocks", "leave it out", value),
            "m",
        )
    ),
    "exclude": _translated("--exclude", lambda value: values.hosts("--exclude", value), "x"),
    "exclusive": _different(
        SupportedOption(
            "--exclusive: whole nodes, their memory, too; not user, mcs",
            lambda value, site: values.exclusive(value or None),
            maybe=True,
        )
    ),
    "export": _different(
        SupportedOption(
            "--env for each name; the image's variables take the place of ALL, as without it", values.export
        )
    ),
    "gpus": SupportedOption(
        "--gpus; a100:4 with --gpu-type", lambda value, site: values.typed_number("--gpus", value, site), "G"
    ),
    "gpus-per-node": SupportedOption(
        "--gpus-per-node", lambda value, site: values.typed_number("--gpus-per-node", value, site)
    ),
    "gpus-per-task": SupportedOption(
        "--gpus-per-task", lambda value, site: values.typed_number("--gpus-per-task", value, site)
    ),
    "gres": _different(SupportedOption("--gpus-per-node; gpu:a100:4 with --gpu-type; none; only GPUs", values.gres)),
    "hold": _flag(["--hold"], "--hold", "H"),
    "ignore-pbs": _flag([], "ignored: #PBS lines are comments"),
    "input": _different(
        _translated(
            "only /dev/null, which is what jobs have",
            lambda value: values.only(
                ("/dev/null", "none"), "a job has no stdin", "read the file in the script", value
            ),
            "i",
        )
    ),
    "job-name": _same("--job-name", "J"),
    "kill-on-invalid-dep": _no_effect("a job whose dependency cannot be met stays queued and says so", value=True),
    "mail-type": _different(
        SupportedOption(
            "--notify begin, end, fail, requeue; ALL: all these; TIME_LIMIT: fail; TIME_LIMIT_90: limit; others have "
            "no effect",
            values.mail,
        )
    ),
    "mail-user": _same("--mail", means="--mail; default: who submits; needs mail-type"),
    "mem": _translated(
        "--mem-per-node (our --mem is the whole job's); 0: all of it",
        lambda value: values.memory("--mem-per-node", value),
    ),
    "mem-per-cpu": _translated("--mem-per-cpu", lambda value: values.memory("--mem-per-cpu", value)),
    "mem-per-gpu": _translated("--mem-per-gpu", lambda value: values.memory("--mem-per-gpu", value)),
    "nice": SupportedOption("--nice; without a number 100", lambda value, site: ["--nice", value or "100"], maybe=True),
    "nodelist": _translated("--nodelist: these, all of them", lambda value: values.hosts("--nodelist", value), "w"),
    "nodes": _different(SupportedOption("--nodes; of 2-4 the least, 2", values.nodes, "N")),
    "no-requeue": _flag(["--no-requeue"], "--no-requeue"),
    "ntasks": _same("--ntasks", "n"),
    "ntasks-per-node": _same("--ntasks-per-node"),
    "open-mode": _same("--open-mode"),
    "output": _different(
        _translated(
            "--output; without it the output is kept for gpusched logs, no slurm-%j.out is written",
            lambda value: values.path("--output", value),
            "o",
        )
    ),
    "parsable": SupportedOption("ignored: submit prints only the id", lambda value, site: [], maybe=True),
    "partition": _different(_same("--partition", "p", "--partition; of several the first that can hold the job")),
    "priority": _same("--priority"),
    "qos": SupportedOption("--qos, where the inventory has some", _label("the QOS", "--qos", _classes), "q"),
    "quiet": _flag([], "ignored", "Q"),
    "requeue": _flag(["--requeue"], "--requeue"),
    "reservation": _same("--reservation"),
    "signal": _translated(
        "--signal; without @ 60 s before the limit; without B: what srun started gets it; R: is refused", values.signal
    ),
    "switches": _different(_translated("--placement-wait; 1 or 1@TIME", values.switches)),
    "tasks-per-node": _same("--ntasks-per-node"),
    "time": _same("--time", "t"),
    "use-min-nodes": _flag([], "ignored: a job gets the fewest nodes"),
    "verbose": _flag([], "ignored", "v"),
    "wait-all-nodes": _translated(
        "ignored: a job starts when all of its nodes are ready",
        lambda value: values.only(("0", "1"), "expected 0 or 1", "remove it", value),
    ),
    "workdir": SupportedOption("--workdir", values.folder),
    # What changes nothing that a job could miss
    "contiguous": _no_effect("nodes have no order; use --switches=1@TIME or #GPUSCHED --max-spread rack", value=False),
    "core-spec": _no_effect(_NOT_PLACED, "S"),
    "cores-per-socket": _no_effect(_NOT_PLACED),
    "cpu-freq": _no_effect("clock frequencies are not set"),
    "delay-boot": _no_effect("nodes are not booted"),
    "extra": _no_effect("nothing reads it"),
    "extra-node-info": _no_effect(_NOT_PLACED, "B"),
    "get-user-env": _no_effect("a job has its image's environment, not your login's", maybe=True),
    "gpu-bind": _no_effect("every task sees the GPUs that srun gives it"),
    "gpu-freq": _no_effect("clock frequencies are not set"),
    "gres-flags": _no_effect(_NOT_PLACED),
    "hint": _no_effect(_NOT_PLACED),
    "mem-bind": _no_effect(_NOT_PLACED),
    "network": _no_effect("networks of nodes are set in the inventory"),
    "ntasks-per-core": _no_effect(_NOT_PLACED),
    "ntasks-per-socket": _no_effect(_NOT_PLACED),
    "oom-kill-step": _no_effect("the system ends processes that run out of memory", maybe=True),
    "overcommit": _no_effect("each task has a core of its own", "O", value=False),
    "oversubscribe": _no_effect("no core is given twice; to share GPUs use --share pairs", "s", maybe=True),
    "power": _no_effect("power is not managed"),
    "prefer": _no_effect("nodes have no features; to insist use --gpu-type"),
    "profile": _no_effect("jobs are always measured; see gpusched show and gpusched power"),
    "propagate": _no_effect("limits are those of the node", maybe=True),
    "resv-ports": _no_effect("MASTER_PORT is the job's own", maybe=True),
    "sockets-per-node": _no_effect(_NOT_PLACED),
    "spread-job": _no_effect("a job has the fewest nodes, or those of --nodes", value=False),
    "stepmgr": _no_effect("there is none", value=False),
    "thread-spec": _no_effect(_NOT_PLACED),
    "threads-per-core": _no_effect(_NOT_PLACED),
    "time-min": _no_effect("limits are not shortened; the job has --time"),
    "tmp": _no_effect("disks are not counted"),
    "tres-bind": _no_effect("every task sees the GPUs that srun gives it"),
    "wckey": _no_effect("usage is counted by user and group"),
    # What would be another job without it
    "batch": RefusedOption("nodes have no features", "use --nodelist"),
    "bb": RefusedOption("there are no burst buffers"),
    "bbf": RefusedOption("there are no burst buffers"),
    "cluster-constraint": RefusedOption("there is one cluster"),
    "clusters": RefusedOption("there is one cluster", short="M"),
    "container": RefusedOption("images are named differently", "use #GPUSCHED --image IMAGE"),
    "container-id": RefusedOption("images are named differently", "use #GPUSCHED --image IMAGE"),
    "deadline": RefusedOption("jobs that cannot end in time are not removed"),
    "export-file": RefusedOption("variable files are not read", "use --export=NAME=VALUE"),
    "gid": RefusedOption("jobs run as the submitting user"),
    "gpus-per-socket": RefusedOption(_NOT_PLACED, "use --gpus-per-node"),
    "help": RefusedOption(_ON_COMMAND_LINE, short="h"),
    "licenses": RefusedOption("licenses are not counted", short="L"),
    "mcs-label": RefusedOption("there are no such labels"),
    "mincpus": RefusedOption("every node gives the same amount", "use --cpus-per-task"),
    "no-kill": RefusedOption("a job ends when any of its nodes fails", short="k"),
    "nodefile": RefusedOption("host files are not read", "use --nodelist", short="F"),
    "ntasks-per-gpu": RefusedOption("tasks are counted per node", "use --ntasks-per-node and --gpus-per-task"),
    "reboot": RefusedOption("nodes are not booted"),
    "test-only": RefusedOption(_ON_COMMAND_LINE, "gpusched submit --dry-run says when it would start"),
    "tres-per-task": RefusedOption("it combines other options", "use --gpus-per-task and --cpus-per-task"),
    "uid": RefusedOption("jobs run as the submitting user"),
    "usage": RefusedOption(_ON_COMMAND_LINE),
    "version": RefusedOption(_ON_COMMAND_LINE, short="V"),
    "wait": RefusedOption(_ON_COMMAND_LINE, "gpusched submit --wait", short="W"),
    "wrap": RefusedOption(_ON_COMMAND_LINE, "gpusched submit --wrap COMMAND"),
}
_SHORT = {option.short: name for name, option in OPTIONS.items() if option.short}


class ParsedOption(NamedTuple):
    """One option of a line: as written, and our equivalent options."""

    written: str
    words: Words


class _OptionError(Exception):
    """An option, as shown to the user, that cannot be accepted: why, and what to do."""

    def __init__(self, shown: str, why: str, hint: str) -> None:
        super().__init__(why)
        self.shown, self.why, self.hint = shown, why, hint


def translate_line(line: OptionLine, site: ScriptContext) -> list[ParsedOption]:
    """Return the options of one ``#SBATCH`` line.

    Raises:
        ScriptError: An option is unknown or not supported, or its value is invalid.
    """
    found, rest = [], list(line.words)
    while rest:
        before = len(site.notes)
        try:
            option = _next(rest, site)
        except _OptionError as error:
            raise ScriptError(line.where, f"#SBATCH {error.shown}", error.why, error.hint) from None
        found.append(ParsedOption(f"#SBATCH {option.written}", option.words))
        site.notes[before:] = [f"{line.where}: #SBATCH {option.written}: {note}" for note in site.notes[before:]]
    return found


def _next(rest: Words, site: ScriptContext) -> ParsedOption:
    """Take the first option off ``rest``, with its value."""
    shown = rest.pop(0)
    name, value = _option(shown)
    option = OPTIONS[name]
    if isinstance(option, RefusedOption):
        raise _OptionError(shown, f"not supported: {option.why}", option.hint or "remove it")
    if option.value and not option.maybe and value is None:
        if not rest:
            raise _OptionError(shown, "missing value", f"expected --{name}=VALUE")
        value = rest.pop(0)
        shown = f"{shown} {value}"
    elif value is not None and not option.value:
        raise _OptionError(shown, "takes no value", f"use --{name}")
    try:
        return ParsedOption(shown, option.words(value or "", site))
    except Unsupported as error:
        raise _OptionError(shown, error.why, error.hint) from None


def _option(word: str) -> tuple[str, str | None]:
    """Return name and attached value of ``--name=value``, ``--name``, ``-n4``; unique abbreviations are allowed."""
    if word.startswith("--") and len(word) > 2:
        name, equals, value = word[2:].partition("=")
        names = [name] if name in OPTIONS else [known for known in OPTIONS if name and known.startswith(name)]
        if len(names) > 1:
            raise _OptionError(word, f"may mean --{' or --'.join(names[:6])}", "write it in full")
        if not names:
            near = did_you_mean(name, OPTIONS).partition("; ")[2]
            raise _OptionError(word, "sbatch has no such option", near or "take it out")
        return names[0], value if equals else None
    if word.startswith("-") and len(word) > 1:
        if word[1] not in _SHORT:
            raise _OptionError(word, "sbatch has no such option", "remove it")
        return _SHORT[word[1]], word[2:] or None
    raise _OptionError(word, "not an option", "quote values that contain spaces")


# Options that `gpusched submit` has, too, by those of sbatch's values that it does not know itself.
_SBATCH_VALUES = {
    "gpus": r"[A-Za-z].*[:=].*", "gpus-per-node": r"[A-Za-z].*[:=].*", "gpus-per-task": r"[A-Za-z].*[:=].*",
    "nodes": r"\d+-\d*",
    "nodelist": r".*\[.*", "exclude": r".*\[.*", "mem-per-cpu": r"\d+[kK][bB]?", "mem-per-gpu": r"\d+[kK][bB]?",
    "begin": r"now\s*\+\s*\d+\s*[a-z]{2,}",
}  # fmt: skip
_COMMAND_LINE_ONLY = {"test-only": ["--dry-run"], "wait": ["--wait"], "help": ["--help"], "usage": ["--help"]}


def translate_command_line(
    words: Sequence[str], own: Mapping[str, bool], site: Callable[[], ScriptContext]
) -> tuple[Words, list[str]]:
    """Return a command line of ``submit`` with sbatch's options translated, and notes on those without effect.

    Args:
        words: As typed; after the options a script, or ``--`` and a command.
        own: Options of ``submit`` itself, including dashes, and whether each takes a value.
        site: Called once there is something to translate.

    Raises:
        UsageError: An option of sbatch is not supported, or its value is invalid.
    """
    found: Words = []
    rest, context = list(words), None
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        if not _is_sbatch_option(rest, own):
            word = rest.pop(0)
            found.append(word)
            name, equals, _ = word.partition("=") if word.startswith("--") else (word[:2], word[2:], "")
            if own.get(name) and not equals and rest:
                found.append(rest.pop(0))
            continue
        name = _option(rest[0])[0]
        if name in _COMMAND_LINE_ONLY:
            del rest[0]
            found += _COMMAND_LINE_ONLY[name]
            continue
        context = context or site()
        before = len(context.notes)
        try:
            option = _next(rest, context)
        except _OptionError as error:
            raise UsageError(f"{error.shown}: {error.why}", error.hint) from None
        found += option.words
        context.notes[before:] = [f"{option.written}: {note}" for note in context.notes[before:]]
    return [*found, *rest], context.notes if context is not None else []


def _is_sbatch_option(rest: Words, own: Mapping[str, bool]) -> bool:
    """Return whether the first word is an option of sbatch alone, or has a value that only sbatch accepts."""
    word = rest[0]
    long = word.startswith("--")
    name, equals, value = word.partition("=") if long else (word[:2], word[2:], word[2:])
    sbatchs = name[2:] if long else _SHORT.get(name[1:], "")
    if name not in own:
        return sbatchs in OPTIONS
    if sbatchs in ("exclusive", "nice") and (sbatchs == "exclusive") == bool(equals):
        return sbatchs == "exclusive" or not (len(rest) > 1 and re.fullmatch(r"[+-]?\d+", rest[1]))
    given = value if equals else rest[1] if len(rest) > 1 else ""
    return sbatchs in _SBATCH_VALUES and re.fullmatch(_SBATCH_VALUES[sbatchs], given) is not None


def all_names() -> Sequence[str]:
    """Return all known options, sorted."""
    return sorted(OPTIONS)
