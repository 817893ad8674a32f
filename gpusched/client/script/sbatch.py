"""sbatch's options: the row of our table that each fills, or why it is refused.

The guide's table is generated from this one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from gpusched.client.request import OPTIONS as JOB_OPTIONS
from gpusched.client.script import values
from gpusched.client.script.lines import OptionLine, ScriptError
from gpusched.client.script.values import ScriptContext, Unsupported
from gpusched.errors import UsageError
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


def _ours(
    field: str, how: Callable[[str, ScriptContext], Words] | None = None, means: str = "", short: str = "", *,
    different: bool = False,
) -> SupportedOption:  # fmt: skip
    """Return what fills a field of our request.

    ``how``: the value -> the value of our option, perhaps followed by further options; [] for none of them.
    """
    ours = JOB_OPTIONS[field]

    def words(value: str, site: ScriptContext) -> Words:
        if not value and field in ("comment", "exclude", "reservation"):  # for sbatch as if they were not there
            return []
        found = [value] if how is None else how(value, site)
        return [ours.long, *found] if found else []

    result: Literal["as Slurm", "different"] = "different" if different else "as Slurm"
    return SupportedOption(means or ours.long, words, short or ours.short, result=result)


def _flag(words: Words, means: str, short: str = "") -> SupportedOption:
    return SupportedOption(means, lambda value, site: words, short, value=False)


def _only(
    means: str, allowed: Sequence[str], why: str, hint: str, short: str = "", *, different: bool = True
) -> SupportedOption:
    """Return an option that is accepted with the values that state the default."""

    def words(value: str, site: ScriptContext) -> Words:
        if value not in allowed:
            raise Unsupported(why, hint)
        return []

    return SupportedOption(means, words, short, result="different" if different else "as Slurm")


def _no_effect(why: str, short: str = "", value: bool = True, maybe: bool = False) -> SupportedOption:
    """Return an option that is accepted without effect, with a note; no job can depend on it."""

    def words(value: str, site: ScriptContext) -> Words:
        site.notes.append(f"no effect: {why}")
        return []

    return SupportedOption(f"no effect: {why}", words, short, value, maybe, "warned")


_NOT_PLACED = "cores, sockets and threads are chosen by the node's system"
_ON_COMMAND_LINE = "it is valid only on the command line"

# fmt: off
OPTIONS: dict[str, SupportedOption | RefusedOption] = {
    "account": _ours(
        "group", lambda value, site: site.if_declared("the account", value, site.inventory.groups.groups),
        "--group, where the inventory has groups",
    ),
    "acctg-freq": _no_effect("jobs are always measured; see gpusched show and gpusched power"),
    "array": _ours("array"),
    "begin": _ours("begin", values.begin, "--begin; now+60 are seconds, as in Slurm", "b"),
    "chdir": _ours("workdir", values.folder, "--workdir; a relative --output or --error is below it", "D"),
    "comment": _ours("comment"),
    "constraint": _ours(
        "gpu_type", values.constraint, "--gpu-type: types of GPUs, with | between them", "C", different=True
    ),
    "container-image": _ours("image", values.image, "--image (of Pyxis); not a .sqsh file", different=True),
    "container-mounts": _ours("mount", values.mounts, "--mount for each (of Pyxis)"),
    "container-workdir": _ours("workdir", means="--workdir (of Pyxis)"),
    "cpus-per-gpu": _ours("cpus_per_gpu"),
    "cpus-per-task": _ours("cpus_per_task"),
    "dependency": _ours("dependency"),
    "error": _ours("error", values.path),
    "distribution": _only(
        "block, the only distribution; others are refused",
        ("block", "block:block"), "tasks go to nodes by blocks", "leave it out", "m",
    ),
    "exclude": _ours("exclude", values.hosts),
    "exclusive": SupportedOption(
        "--exclusive: whole nodes, their memory, too; not user, mcs", values.exclusive, maybe=True, result="different"
    ),
    "export": _ours(
        "env", values.export, "--env for each name; the image's variables take the place of ALL, as without it",
        different=True,
    ),
    "gpus": _ours("gpus", values.typed_number, "--gpus; a100:4 with --gpu-type, 1g.10gb:2 with --mig"),
    "gpus-per-node": _ours("gpus_per_node", values.typed_number),
    "gpus-per-task": _ours("gpus_per_task", values.typed_number),
    "gres": _ours(
        "gpus_per_node", values.gres,
        "--gpus-per-node; gpu:a100:4 with --gpu-type, gpu:1g.10gb:2 with --mig; none; only GPUs", different=True,
    ),
    "hold": _flag(["--hold"], "--hold", "H"),
    "ignore-pbs": _flag([], "ignored: #PBS lines are comments"),
    "input": _only(
        "only /dev/null, which is what jobs have",
        ("/dev/null", "none"), "a job has no stdin", "read the file in the script", "i",
    ),
    "job-name": _ours("name"),
    "kill-on-invalid-dep": _no_effect("a job whose dependency cannot be met stays pending with that reason"),
    "mail-type": _ours(
        "notify", values.mail,
        "--notify begin, end, fail, requeue; ALL: all these; TIME_LIMIT: fail; TIME_LIMIT_90: limit; others have no "
        "effect",
        different=True,
    ),
    "mail-user": _ours("mail", means="--mail; default: who submits; needs mail-type"),
    "mem": _ours("mem_per_node", values.memory, "--mem-per-node (our --mem is the whole job's); 0: all of it"),
    "mem-per-cpu": _ours("mem_per_cpu", values.memory),
    "mem-per-gpu": _ours("mem_per_gpu", values.memory),
    "nice": _ours("nice", lambda value, site: [value or "100"], "--nice; without a number 100")._replace(maybe=True),
    "nodelist": _ours("nodelist", values.hosts, "--nodelist: these, all of them", "w"),
    "nodes": _ours("nodes", values.nodes, "--nodes; of 2-4 the least, 2", different=True),
    "no-requeue": _flag(["--no-requeue"], "--no-requeue"),
    "ntasks": _ours("ntasks"),
    "ntasks-per-node": _ours("ntasks_per_node"),
    "open-mode": _ours("open_mode"),
    "output": _ours(
        "output", values.path, "--output; without it the output is kept for gpusched logs, no slurm-%j.out is written",
        different=True,
    ),
    "parsable": _flag([], "ignored: submit prints only the id")._replace(value=True, maybe=True),
    "partition": _ours("partition", means="--partition; of several the first that can hold the job", different=True),
    "priority": _ours("priority"),
    "qos": _ours(
        "qos", lambda value, site: site.if_declared("the QOS", value, site.inventory.quotas.qos),
        "--qos, where the inventory has some",
    ),
    "quiet": _flag([], "ignored", "Q"),
    "requeue": _flag(["--requeue"], "--requeue"),
    "reservation": _ours("reservation"),
    "signal": _ours(
        "signal", values.signal,
        "--signal; without @ 60 s before the limit; without B: what srun started gets it; R: is refused",
    ),
    "switches": _ours("placement_wait", values.switches, "--placement-wait; 1 or 1@TIME", different=True),
    "tasks-per-node": _ours("ntasks_per_node"),
    "time": _ours("time"),
    "use-min-nodes": _flag([], "ignored: a job gets the fewest nodes"),
    "verbose": _flag([], "ignored", "v"),
    "wait-all-nodes": _only(
        "ignored: a job starts when all of its nodes are ready", ("0", "1"), "expected 0 or 1", "remove it",
        different=False,
    ),
    "workdir": _ours("workdir", values.folder),
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
    "oversubscribe": _no_effect("cores are never shared; to share GPUs use --share pairs", "s", maybe=True),
    "power": _no_effect("power is not managed"),
    "prefer": _no_effect("nodes have no features; to require a GPU type use --gpu-type"),
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
# fmt: on
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
        words = option.words(value or "", site)
    except Unsupported as error:
        raise _OptionError(shown, error.why, error.hint) from None
    site.used[name] = words[1:]
    return ParsedOption(shown, words)


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
) -> tuple[Words, ScriptContext | None]:
    """Return a command line of ``submit`` with sbatch's options translated, and the context if there were any.

    ``--resizable hot`` becomes ``--resizable --hot``: a switch of ours has no value.

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
            elif word == "--resizable" and rest[:1] == ["hot"]:
                rest[0] = "--hot"
            continue
        word, name = rest[0], _option(rest[0])[0]
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
        if word.partition("=")[0] in own:  # ours, with a value that only sbatch has: sbatch's rules do not apply
            del context.used[name]
        context.notes[before:] = [f"{option.written}: {note}" for note in context.notes[before:]]
    return [*found, *rest], context


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
