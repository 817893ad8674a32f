"""What srun is asked for: its options, and which tasks that makes on which nodes. Pure."""

import getopt
import re

MYPY = False
if MYPY:
    from collections.abc import Mapping, Sequence

# Long name -> its letter; ":" behind the name: it has a value. The first group has a meaning here.
_USED_OPTIONS = {
    "nodes:": "N", "ntasks:": "n", "ntasks-per-node:": "", "tasks-per-node:": "", "gpus-per-task:": "", "gpus:": "G",
    "gpus-per-node:": "", "gres:": "", "nodelist:": "w", "exclude:": "x", "chdir:": "D", "output:": "o", "error:": "e",
    "input:": "i", "label": "l", "export:": "", "time:": "t", "wait:": "W", "cpus-per-task:": "c", "quiet": "Q",
    "kill-on-bad-exit": "K", "no-kill-on-bad-exit": "",
}  # fmt: skip
# These change nothing: the job has its nodes, cores and memory as a whole, and its steps share them.
_IGNORED_OPTIONS = {
    "unbuffered": "u", "verbose": "v", "exclusive": "", "exact": "", "overlap": "", "overcommit": "O", "no-kill": "k",
    "job-name:": "J", "partition:": "p", "account:": "A", "qos:": "q", "mem:": "", "mem-per-cpu:": "", "hint:": "",
    "mem-per-gpu:": "", "mem-bind:": "", "cpu-bind:": "", "cpu_bind:": "", "cpus-per-gpu:": "", "comment:": "",
    "threads-per-core:": "", "immediate:": "I", "propagate:": "",
}  # fmt: skip
_ONE_VALUE = {"mpi:": ("none",), "distribution:": ("block",), "gpu-bind:": ("none", "closest")}
_SHORT_OPTIONS = {"distribution:": "m"}
_ALL_OPTIONS = {**_USED_OPTIONS, **_IGNORED_OPTIONS, **{name: _SHORT_OPTIONS.get(name, "") for name in _ONE_VALUE}}
_LONG = {letter: name for name, letter in _ALL_OPTIONS.items() if letter}
_GPUS = re.compile(r"(?:gres[/:])?(?:gpu:)?(?:[A-Za-z][\w.-]*:)?(\d+)")


class StepOptionError(Exception):
    """One line: what cannot be."""


def parse(words: "Sequence[str]") -> "tuple[dict[str, str], list[str]]":
    """Options by long name (flags: ""), and the command.

    Raises:
        Refused: An option is not known, or its value makes no sense.
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
    asked = {}  # type: dict[str, str]
    for option, value in found:
        name = option[2:] if option.startswith("--") else _LONG[option[1:]].rstrip(":")
        allowed = _ONE_VALUE.get(name + ":")
        if allowed is not None and value not in allowed:
            raise StepOptionError("--{}={}: only {} is supported here".format(name, value, " or ".join(allowed)))
        asked[{"tasks-per-node": "ntasks-per-node"}.get(name, name)] = value
    if not command:
        raise StepOptionError("no command given")
    return asked, command


def _without_optional(words: "Sequence[str]") -> "list[str]":
    """Getopt knows no option whose value may be left out."""
    simple = []  # type: list[str]
    for at, word in enumerate(words):
        if word == "--" or not word.startswith("-"):
            # The command begins here, unless this is the value of what came before; getopt finds that out.
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


def number(asked: "Mapping[str, str]", name: str) -> "int | None":
    """Return an option's value as a number from 1 up; None if it is not given."""
    if name not in asked:
        return None
    if not re.match(r"[0-9]{1,7}$", asked[name]) or int(asked[name]) < 1:
        raise StepOptionError(f"--{name}={asked[name]}: expected a number, at least 1")
    return int(asked[name])


def layout(asked: "Mapping[str, str]", names: "Sequence[str]", tasks_per_node: int) -> "list[tuple[int, list[int]]]":
    """(index of a node, numbers of its tasks) for all nodes of the step: in blocks, as even as can be.

    Args:
        asked: Options.
        names: The job's nodes.
        tasks_per_node: Of each node where the step does not say.

    Raises:
        Refused: It cannot be had on these nodes.
    """
    chosen = list(range(len(names)))
    if "nodelist" in asked:
        wanted = hostnames(asked["nodelist"])
        strangers = [name for name in wanted if name not in names]
        if strangers:
            raise StepOptionError(f"--nodelist: {strangers[0]} is not a node of this job")
        chosen = [i for i in chosen if names[i] in wanted]
    left_out = hostnames(asked.get("exclude", ""))
    chosen = [i for i in chosen if names[i] not in left_out]
    tasks, each = number(asked, "ntasks"), number(asked, "ntasks-per-node")
    count = len(chosen)
    if "nodes" in asked:
        least, _, most = asked["nodes"].partition("-")
        low = number({"nodes": least}, "nodes") or 1
        high = number({"nodes": most or least}, "nodes") or 1
        if low > len(chosen):
            raise StepOptionError("--nodes={}: this job has {} nodes for the step".format(asked["nodes"], len(chosen)))
        count = min(high, count)
    if not count:
        raise StepOptionError("no node left for the step")
    if tasks is not None:
        if each is not None and tasks > each * count:
            raise StepOptionError(f"--ntasks={tasks}: {count} nodes with {each} each are fewer")
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


def gpus(asked: "Mapping[str, str]", nodes: int, tasks: int, per_task: int) -> "tuple[int | None, int]":
    """(GPUs of the step on a node with so many of its tasks, of each task); None: all; 0: not distinguished."""
    if "gpus-per-task" in asked:
        per_task = _gpus(asked, "gpus-per-task")
    for name in ("gpus-per-node", "gres"):
        if name in asked and (name != "gres" or "gpu" in asked[name]):
            return _gpus(asked, name), per_task if "gpus-per-task" in asked else 0
    if "gpus" in asked:
        total = _gpus(asked, "gpus")
        if total % nodes:
            raise StepOptionError(f"--gpus={total}: cannot be divided by {nodes} nodes; use --gpus-per-node")
        return total // nodes, per_task if "gpus-per-task" in asked else 0
    return (per_task * tasks, per_task) if per_task else (None, 0)


def _gpus(asked: "Mapping[str, str]", name: str) -> int:
    found = _GPUS.match(asked[name])
    if found is None or found.end() != len(asked[name]):
        if asked[name] == "gpu":
            return 1
        raise StepOptionError(f"--{name}={asked[name]}: expected a number of GPUs")
    return int(found.group(1))


def hostnames(text: str) -> "list[str]":
    """``a[1-3],b`` as names.

    Raises:
        Refused: It is not such a list.
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


def seconds(asked: "Mapping[str, str]", name: str, unit_s: int) -> "float | None":
    """Return seconds: a number in its unit, ``MIN:SEC``, ``HOURS:MIN:SEC``, ``DAYS-HOURS...``; None: none, 0."""
    if name not in asked:
        return None
    text = asked[name]
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


def exported(asked: "Mapping[str, str]") -> "dict[str, str]":
    """Variables that --export sets besides all that are there.

    Raises:
        Refused: It asks for less than all.
    """
    items = asked.get("export", "ALL").split(",")
    if items[0] not in ("ALL", "") and "=" not in items[0]:
        raise StepOptionError("--export={}: only ALL[,NAME=VALUE...] is supported here".format(asked["export"]))
    return dict(item.split("=", 1) for item in items if "=" in item)
