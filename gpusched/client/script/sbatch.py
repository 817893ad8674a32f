"""sbatch's options: what each means as one of ours, or why it is refused. The guide's table is made of this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpusched.client.script import values
from gpusched.client.script.lines import Line, ScriptError
from gpusched.client.script.values import NotUnderstood, Site
from gpusched.model.suggest import did_you_mean

Words = list[str]


class Understood(NamedTuple):
    """An option that means something here.

    ``words``: its value (None where it has none) -> words of our own options; ``means``: the same for people.
    ``value``: whether it takes one; ``maybe``: it may be left out, and stands behind ``=``.
    """

    means: str
    words: Callable[[str, Site], Words]
    short: str = ""
    value: bool = True
    maybe: bool = False


class Refused(NamedTuple):
    """An option of sbatch that has no meaning here: why, and what to do."""

    why: str
    hint: str = ""
    short: str = ""


def _same(option: str, short: str = "", means: str = "") -> Understood:
    return Understood(means or f"{option}", lambda value, site: [option, value], short)


def _flag(words: Words, means: str, short: str = "") -> Understood:
    return Understood(means, lambda value, site: words, short, value=False)


def _by(means: str, words: Callable[[str], Words], short: str = "") -> Understood:
    return Understood(means, lambda value, site: words(value), short)


def _label(what: str, option: str, declared: str) -> Callable[[str, Site], Words]:
    def words(value: str, site: Site) -> Words:
        found: object = site.inventory
        for name in declared.split("."):
            found = getattr(found, name, None)
        if found:
            return [option, value]
        site.notes.append(f"{what} '{value[:40]}' counts for nothing: the inventory declares none")
        return []

    return words


_NOT_PLACED = "which cores, sockets and threads of a node a job has is the system's affair here"
_ON_COMMAND_LINE = "it is for the command line"

OPTIONS: dict[str, Understood | Refused] = {
    "account": Understood("--group, where the inventory has groups", _label("the account", "--group", "groups"), "A"),
    "array": _same("--array", "a"),
    "begin": _by("--begin; now+60 are seconds", values.begin, "b"),
    "chdir": Understood("--workdir", values.folder, "D"),
    "comment": _same("--comment"),
    "constraint": Understood("--gpu-type: types of GPUs, with | between them", values.constraint, "C"),
    "container-image": _by("--image (of Pyxis); not a .sqsh file", values.image),
    "container-mounts": _by("--mount for each (of Pyxis)", values.mounts),
    "container-workdir": _same("--workdir", means="--workdir (of Pyxis)"),
    "cpus-per-gpu": _same("--cpus-per-gpu"),
    "cpus-per-task": _same("--cpus-per-task", "c"),
    "dependency": _same("--dependency", "d"),
    "error": _by("--error", lambda value: values.path("--error", value), "e"),
    "exclude": _by("--exclude", lambda value: values.hosts("--exclude", value), "x"),
    "exclusive": Understood(
        "--exclusive: whole nodes, their memory, too", lambda value, site: values.exclusive(value or None), maybe=True
    ),
    "export": _by("--env for each name; NONE: nothing, as without it; not ALL", values.export),
    "gpus": Understood(
        "--gpus; a100:4 with --gpu-type", lambda value, site: values.typed_number("--gpus", value, site), "G"
    ),
    "gpus-per-node": Understood(
        "--gpus-per-node", lambda value, site: values.typed_number("--gpus-per-node", value, site)
    ),
    "gpus-per-task": Understood(
        "--gpus-per-task", lambda value, site: values.typed_number("--gpus-per-task", value, site)
    ),
    "gres": Understood("--gpus-per-node; gpu:a100:4 with --gpu-type; only GPUs", values.gres),
    "hold": _flag(["--hold"], "--hold", "H"),
    "ignore-pbs": _flag([], "nothing: #PBS lines are comments"),
    "input": _by(
        "nothing: /dev/null is what jobs have",
        lambda value: values.only(("/dev/null", "none"), "a job has no stdin", "read the file in the script", value),
        "i",
    ),
    "job-name": _same("--job-name", "J"),
    "kill-on-invalid-dep": _by(
        "nothing: no is what is done; yes is refused",
        lambda value: values.only(
            ("no",), "a job whose dependency cannot be met stays and says so", "cancel it by hand", value
        ),
    ),
    "mail-type": _by(
        "--notify begin, end, fail, requeue; ALL: all these; TIME_LIMIT: fail; TIME_LIMIT_90: limit", values.mail
    ),
    "mail-user": _same("--mail", means="--mail; without it who submits; of nothing without mail-type"),
    "mem": _by(
        "--mem-per-node (our --mem is the whole job's); 0: all of it",
        lambda value: values.memory("--mem-per-node", value),
    ),
    "mem-per-cpu": _by("--mem-per-cpu", lambda value: values.memory("--mem-per-cpu", value)),
    "mem-per-gpu": _by("--mem-per-gpu", lambda value: values.memory("--mem-per-gpu", value)),
    "nice": Understood("--nice; without a number 100", lambda value, site: ["--nice", value or "100"], maybe=True),
    "nodelist": _by("--nodelist: these, all of them", lambda value: values.hosts("--nodelist", value), "w"),
    "nodes": _by("--nodes; 2-4 is refused", values.nodes, "N"),
    "no-requeue": _flag(["--no-requeue"], "--no-requeue"),
    "ntasks": _same("--ntasks", "n"),
    "ntasks-per-node": _same("--ntasks-per-node"),
    "open-mode": _by(
        "nothing: truncate is what is done; append is refused",
        lambda value: values.only(
            ("truncate",), "the file is emptied at each start", "leave it out, and use %j in the file's name", value
        ),
    ),
    "output": _by(
        "--output; without it the output is kept for gpusched logs, no slurm-%j.out is written",
        lambda value: values.path("--output", value),
        "o",
    ),
    "parsable": Understood("nothing: the id is all that submit prints", lambda value, site: [], maybe=True),
    "partition": _by("--partition; one", values.one_partition, "p"),
    "priority": _same("--priority"),
    "qos": Understood("--qos, where the inventory has some", _label("the QOS", "--qos", "quotas.qos"), "q"),
    "quiet": _flag([], "nothing", "Q"),
    "requeue": _flag(["--requeue"], "--requeue"),
    "reservation": _same("--reservation"),
    "signal": _by(
        "--signal; without @ 60 s before the limit; without B: what srun started gets it; R: is refused", values.signal
    ),
    "switches": _by("--wait-for-placement; 1@TIME", values.switches),
    "tasks-per-node": _same("--ntasks-per-node"),
    "time": _same("--time", "t"),
    "use-min-nodes": _flag([], "nothing: a job has the fewest nodes"),
    "verbose": _flag([], "nothing", "v"),
    "wait-all-nodes": _by(
        "nothing: 1 is what is done; 0 is refused",
        lambda value: values.only(("1",), "a job starts when all of its nodes are ready", "leave it out", value),
    ),
    "workdir": Understood("--workdir", values.folder),
    # What has no meaning here
    "batch": Refused("nodes have no features", "use --nodelist"),
    "bb": Refused("there are no burst buffers"),
    "bbf": Refused("there are no burst buffers"),
    "cluster-constraint": Refused("there is one cluster"),
    "clusters": Refused("there is one cluster", short="M"),
    "container": Refused("images are named otherwise", "use #GPUSCHED --image IMAGE"),
    "container-id": Refused("images are named otherwise", "use #GPUSCHED --image IMAGE"),
    "contiguous": Refused("nodes have no order", "use --switches=1@TIME or #GPUSCHED --max-spread rack"),
    "core-spec": Refused(_NOT_PLACED, short="S"),
    "cores-per-socket": Refused(_NOT_PLACED),
    "cpu-freq": Refused("clocks are not set"),
    "deadline": Refused("jobs that cannot end by then are not removed"),
    "delay-boot": Refused("nodes are not booted"),
    "distribution": Refused("tasks go to nodes by blocks", short="m"),
    "export-file": Refused("no file of variables is read", "use --export=NAME=VALUE"),
    "extra": Refused("nothing reads it", "use --comment"),
    "extra-node-info": Refused(_NOT_PLACED, short="B"),
    "get-user-env": Refused("a job has its image's environment, not that of your login", "use --export=NAME=VALUE"),
    "gid": Refused("jobs run as who submits them"),
    "gpu-bind": Refused("every task sees the GPUs that srun gives it"),
    "gpu-freq": Refused("clocks are not set"),
    "gpus-per-socket": Refused(_NOT_PLACED, "use --gpus-per-node"),
    "gres-flags": Refused(_NOT_PLACED),
    "help": Refused(_ON_COMMAND_LINE, short="h"),
    "hint": Refused(_NOT_PLACED),
    "licenses": Refused("licenses are not counted", short="L"),
    "mcs-label": Refused("there are no such labels"),
    "mem-bind": Refused(_NOT_PLACED),
    "mincpus": Refused("every node gives the same", "use --cpus-per-task"),
    "network": Refused("networks of nodes are the inventory's affair"),
    "no-kill": Refused("a job ends with any of its nodes", short="k"),
    "nodefile": Refused("a file of names is not read", "use --nodelist", short="F"),
    "ntasks-per-core": Refused(_NOT_PLACED),
    "ntasks-per-gpu": Refused("tasks are counted by node", "use --ntasks-per-node and --gpus-per-task"),
    "ntasks-per-socket": Refused(_NOT_PLACED, "use --ntasks-per-node"),
    "oom-kill-step": Refused("what runs out of memory is ended by the system"),
    "overcommit": Refused("no core is given twice", short="O"),
    "oversubscribe": Refused("no core is given twice", "to share GPUs use #GPUSCHED --share pairs", short="s"),
    "power": Refused("power is not managed"),
    "prefer": Refused("nodes have no features", "use #GPUSCHED --gpu-type"),
    "profile": Refused("jobs are always measured", "see gpusched show and gpusched power"),
    "propagate": Refused("limits are those of the node"),
    "reboot": Refused("nodes are not booted"),
    "resv-ports": Refused("MASTER_PORT is the job's own"),
    "sockets-per-node": Refused(_NOT_PLACED),
    "spread-job": Refused("a job has the fewest nodes, or -N", "use --nodes"),
    "stepmgr": Refused("there is none"),
    "test-only": Refused(_ON_COMMAND_LINE, "gpusched submit --dry-run says when it would start"),
    "thread-spec": Refused(_NOT_PLACED),
    "threads-per-core": Refused(_NOT_PLACED),
    "time-min": Refused("limits are not shortened", "use --time"),
    "tmp": Refused("disks are not counted"),
    "tres-bind": Refused("every task sees the GPUs that srun gives it"),
    "tres-per-task": Refused("it says in one what others say", "use --gpus-per-task and --cpus-per-task"),
    "uid": Refused("jobs run as who submits them"),
    "usage": Refused(_ON_COMMAND_LINE),
    "version": Refused(_ON_COMMAND_LINE, short="V"),
    "wait": Refused(_ON_COMMAND_LINE, "gpusched submit --wait", short="W"),
    "wckey": Refused("usage is counted by user and group", "use --comment"),
    "wrap": Refused(_ON_COMMAND_LINE, "gpusched submit --wrap COMMAND"),
}
_SHORT = {option.short: name for name, option in OPTIONS.items() if option.short}


class Asked(NamedTuple):
    """One option of a line: as written, and as words of ours."""

    written: str
    words: Words


def translated(line: Line, site: Site) -> list[Asked]:
    """The options of one ``#SBATCH`` line.

    Raises:
        ScriptError: One is not known, has no meaning here, or its value has none.
    """
    found, rest = [], list(line.words)
    while rest:
        word = rest.pop(0)
        name, value = _option(word, line)
        shown = f"#SBATCH {word}"
        option = OPTIONS[name]
        if isinstance(option, Refused):
            raise ScriptError(line.where, shown, f"not understood: {option.why}", option.hint or "leave it out")
        if option.value and not option.maybe and value is None:
            if not rest:
                raise ScriptError(line.where, shown, "its value is missing", f"expected --{name}=VALUE")
            value = rest.pop(0)
            shown = f"{shown} {value}"
        elif value is not None and not option.value:
            raise ScriptError(line.where, shown, "it takes no value", f"say --{name}")
        before = len(site.notes)
        try:
            found.append(Asked(shown, option.words(value or "", site)))
        except NotUnderstood as error:
            raise ScriptError(line.where, shown, error.why, error.hint) from None
        site.notes[before:] = [f"{line.where}: {shown}: {note}" for note in site.notes[before:]]
    return found


def _option(word: str, line: Line) -> tuple[str, str | None]:
    """Name and attached value of ``--name=value``, ``--name``, ``-n4``; a name may be cut short where that is clear."""
    if word.startswith("--") and len(word) > 2:
        name, equals, value = word[2:].partition("=")
        names = [name] if name in OPTIONS else [known for known in OPTIONS if name and known.startswith(name)]
        if len(names) > 1:
            raise ScriptError(
                line.where, f"#SBATCH {word}", f"may mean --{' or --'.join(names[:6])}", "write it in full"
            )
        if not names:
            near = did_you_mean(name, OPTIONS).partition("; ")[2]
            raise ScriptError(line.where, f"#SBATCH {word}", "sbatch has no such option", near or "take it out")
        return names[0], value if equals else None
    if word.startswith("-") and len(word) > 1:
        if word[1] not in _SHORT:
            raise ScriptError(line.where, f"#SBATCH {word}", "sbatch has no such option", "take it out")
        return _SHORT[word[1]], word[2:] or None
    raise ScriptError(line.where, f"#SBATCH {word}", "it is no option", "put values with blanks into quotes")


def all_names() -> Sequence[str]:
    """All options that are known, as the guide has them: those understood, then those refused."""
    return sorted(OPTIONS, key=lambda name: (isinstance(OPTIONS[name], Refused), name))
