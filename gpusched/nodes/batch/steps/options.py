"""Parses srun's options and lays out a step's tasks on nodes. Pure."""

import getopt
import re

MYPY = False
if MYPY:
    from collections.abc import Mapping, Sequence

# Long name -> its letter. ":" after the name: it takes a value. These options have an effect.
_USED_OPTIONS = {
    "nodes:": "N", "ntasks:": "n", "ntasks-per-node:": "", "tasks-per-node:": "", "gpus-per-task:": "", "gpus:": "G",
    "gpus-per-node:": "", "gres:": "", "nodelist:": "w", "exclude:": "x", "chdir:": "D", "output:": "o", "error:": "e",
    "input:": "i", "label": "l", "export:": "", "time:": "t", "wait:": "W", "cpus-per-task:": "c", "quiet": "Q",
    "kill-on-bad-exit": "K", "no-kill-on-bad-exit": "",
}  # fmt: skip
# These are accepted without effect: steps share the nodes, cores and memory of their job.
_IGNORED_OPTIONS = {
    "unbuffered": "u", "verbose": "v", "exclusive": "", "exact": "", "overlap": "", "overcommit": "O", "no-kill": "k",
    "job-name:": "J", "partition:": "p", "account:": "A", "qos:": "q", "mem:": "", "mem-per-cpu:": "", "hint:": "",
    "mem-per-gpu:": "", "mem-bind:": "", "cpu-bind:": "", "cpu_bind:": "", "cpus-per-gpu:": "", "comment:": "",
    "threads-per-core:": "", "immediate:": "I", "propagate:": "",
}  # fmt: skip
# Option -> the only values accepted.
_ALLOWED_VALUES = {"mpi:": ("none",), "distribution:": ("block",), "gpu-bind:": ("none", "closest")}
_SHORT_OPTIONS = {"distribution:": "m"}
_ALL_OPTIONS = {**_USED_OPTIONS, **_IGNORED_OPTIONS, **{name: _SHORT_OPTIONS.get(name, "") for name in _ALLOWED_VALUES}}
_LONG = {letter: name for name, letter in _ALL_OPTIONS.items() if letter}
_GPUS = re.compile(r"(?:gres[/:])?(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d+)")


class StepOptionError(Exception):
    """A step cannot run as requested; the message is one line."""


def parse(words: "Sequence[str]") -> "tuple[dict[str, str], list[str]]":
    """Return the options by long name (value "" for flags), and the command.

    Raises:
        StepOptionError: An option or its value is not supported, or there is no command.
    """
    short = "".join(letter + (":" if name.endswith(":") else "") for letter, name in _LONG.items())
    try:
        long = [name.replace(":", "=") for name in _ALL_OPTIONS]
        found, command = getopt.getopt(_without_optional(words), short, long)
    except getopt.GetoptError as error:
        if error.opt.startswith("container-"):
            raise StepOptionError(
                f"--{error.opt}: a step runs in its job's image; see gpusched submit --image"
            ) from None
        raise StepOptionError(f"{error.msg}; not supported by srun inside a job of gpusched") from None
    given = {}  # type: dict[str, str]
    for option, value in found:
        name = option[2:] if option.startswith("--") else _LONG[option[1:]].rstrip(":")
        allowed = _ALLOWED_VALUES.get(name + ":")
        if allowed is not None and value not in allowed:
            raise StepOptionError("--{}={}: only {} is supported here".format(name, value, " or ".join(allowed)))
        given[{"tasks-per-node": "ntasks-per-node"}.get(name, name)] = value
    if not command:
        raise StepOptionError("no command given")
    return given, command


def _without_optional(words: "Sequence[str]") -> "list[str]":
    """Rewrite options with an optional value, which getopt does not support."""
    simple = []  # type: list[str]
    for at, word in enumerate(words):
        if word == "--" or not word.startswith("-"):
            # The command begins here, unless this word is the value of the option before it.
            previous = words[at - 1] if at else ""
            takes = previous[1:] in _LONG and _LONG[previous[1:]].endswith(":")
            if not takes and previous[2:] + ":" not in _ALL_OPTIONS:
                return simple + list(words[at:])
        if word in ("-K0", "--kill-on-bad-exit=0"):
            word = "--no-kill-on-bad-exit"
        elif word in ("-K1", "--kill-on-bad-exit=1"):
            word = "-K"
        elif word.startswith("--exclusive="):
            word = "--exclusive"
        elif word.startswith("-I") and word[2:].isdigit():
            continue
        simple.append(word)
    return simple


def number(given: "Mapping[str, str]", name: str) -> "int | None":
    """Return an option's value as a number; None if it is not given.

    Raises:
        StepOptionError: It is not a number of at least 1.
    """
    if name not in given:
        return None
    if not re.match(r"[0-9]{1,7}$", given[name]) or int(given[name]) < 1:
        raise StepOptionError(f"--{name}={given[name]}: expected a number, at least 1")
    return int(given[name])


def layout(given: "Mapping[str, str]", names: "Sequence[str]", tasks_per_node: int) -> "list[tuple[int, list[int]]]":
    """Return (index into ``names``, numbers of its tasks) for each node of the step: in blocks, as even as possible.

    Args:
        given: Options as from `parse`.
        names: The job's nodes.
        tasks_per_node: Tasks on each node if no option sets their number.

    Raises:
        StepOptionError: The job's nodes do not allow it.
    """
    chosen = list(range(len(names)))
    if "nodelist" in given:
        wanted = hostnames(given["nodelist"])
        strangers = [name for name in wanted if name not in names]
        if strangers:
            raise StepOptionError(f"--nodelist: {strangers[0]} is not a node of this job")
        chosen = [i for i in chosen if names[i] in wanted]
    left_out = hostnames(given.get("exclude", ""))
    chosen = [i for i in chosen if names[i] not in left_out]
    tasks, each = number(given, "ntasks"), number(given, "ntasks-per-node")
    count = len(chosen)
    if "nodes" in given:
        least, _, most = given["nodes"].partition("-")
        low = number({"nodes": least}, "nodes") or 1
        high = number({"nodes": most or least}, "nodes") or 1
        if low > len(chosen):
            raise StepOptionError("--nodes={}: the step can use {} nodes".format(given["nodes"], len(chosen)))
        count = min(high, count)
    if not count:
        raise StepOptionError("--nodelist and --exclude leave no node for the step")
    if tasks is not None:
        if each is not None and tasks > each * count:
            raise StepOptionError(f"--ntasks={tasks}: {count} nodes with {each} tasks each have only {each * count}")
        # No more nodes than tasks, and with --ntasks-per-node no more than these need.
        count = min(count, tasks)
        if each is not None:
            count = min(count, -(-tasks // each))
    else:
        tasks = count * (each or tasks_per_node)
    found, first = [], 0
    for position, index in enumerate(chosen[:count]):
        here = tasks // count + (position < tasks % count)
        found.append((index, list(range(first, first + here))))
        first += here
    return found


def gpus(given: "Mapping[str, str]", nodes: int, tasks: int, per_task: int) -> "tuple[int | None, int]":
    """Return the GPUs of a step: of all its tasks on a node, and of each task.

    The first is None if the step shares all GPUs of the job, the second 0 if its tasks share those of the step.

    Args:
        given: Options as from `parse`.
        nodes: Number of nodes of the step.
        tasks: Number of its tasks on this node.
        per_task: GPUs per task if no option sets them; 0: shared.

    Raises:
        StepOptionError: An option is not a number of GPUs, or cannot be divided by the nodes.
    """
    if "gpus-per-task" in given:
        per_task = _gpus(given, "gpus-per-task")
    for name in ("gpus-per-node", "gres"):
        if name in given and (name != "gres" or "gpu" in given[name]):
            return _gpus(given, name), per_task if "gpus-per-task" in given else 0
    if "gpus" in given:
        total = _gpus(given, "gpus")
        if total % nodes:
            raise StepOptionError(f"--gpus={total}: cannot be divided by {nodes} nodes; use --gpus-per-node")
        return total // nodes, per_task if "gpus-per-task" in given else 0
    return (per_task * tasks, per_task) if per_task else (None, 0)


def _gpus(given: "Mapping[str, str]", name: str) -> int:
    found = _GPUS.match(given[name])
    if found is None or found.end() != len(given[name]):
        if given[name] == "gpu":
            return 1
        raise StepOptionError(f"--{name}={given[name]}: expected a number of GPUs")
    return int(found.group(1))


def hostnames(text: str) -> "list[str]":
    """Expand a list such as ``a[1-3],b`` into names.

    Raises:
        StepOptionError: It is not such a list.
    """
    found = []  # type: list[str]
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for part in re.findall(r"\[[^\]]*\]|[^\[]+", item):
            names = [name + piece for name in names for piece in _pieces(part, text)]
        found += names
    return found


def _pieces(part: str, text: str) -> "list[str]":
    if not part.startswith("["):
        return [part]
    pieces = []
    for item in part[1:-1].split(","):
        first, _, last = item.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) - int(first) > 65536:
            raise StepOptionError(f"{text}: not a list of nodes")
        pieces += [str(i).zfill(len(first)) for i in range(int(first), int(last or first) + 1)]
    return pieces


def seconds(given: "Mapping[str, str]", name: str, unit_s: int) -> "float | None":
    """Return an option's time in seconds; None if it is not given, or 0.

    Forms: a number of ``unit_s`` seconds, ``MIN:SEC``, ``HOURS:MIN:SEC``, ``DAYS-HOURS[:MIN[:SEC]]``.
    """
    if name not in given:
        return None
    text = given[name]
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(p.isdigit() for p in [*parts, days or "0"]) or len(parts) > 3:
        raise StepOptionError(f"--{name}={text}: expected a time")
    values = [int(p) for p in parts]
    if dash:
        values += [0] * (3 - len(values))
        return float(int(days) * 86400 + values[0] * 3600 + values[1] * 60 + values[2]) or None
    if len(values) == 1:
        return float(values[0] * unit_s) or None
    values = [0] * (3 - len(values)) + values
    return float(values[0] * 3600 + values[1] * 60 + values[2]) or None


def exported(given: "Mapping[str, str]") -> "dict[str, str]":
    """Return the variables that --export sets in addition to the whole environment.

    Raises:
        StepOptionError: It would export only part of the environment.
    """
    items = given.get("export", "ALL").split(",")
    if items[0] not in ("ALL", "") and "=" not in items[0]:
        raise StepOptionError("--export={}: only ALL[,NAME=VALUE...] is supported here".format(given["export"]))
    return dict(item.split("=", 1) for item in items if "=" in item)
