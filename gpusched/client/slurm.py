"""Under ``engine: slurm`` jobs are Slurm's: what of gpusched's commands is its business, and its own command for it."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from gpusched.config.paths import find_inventory
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.ids import slurm_id

if TYPE_CHECKING:
    from gpusched.client.context import Client

_ENGINE = rb"""["']?engine["']?[ \t]*:[ \t]*["']?slurm\b"""
_UNLIKE = {  # options of `submit` that Slurm has nothing like, by parameter
    "image": "--image", "secret": "--secret", "mount": "--mount", "preemptible": "--preemptible",
    "resizable": "--resizable", "sizes": "--sizes", "base": "--base", "batch": "--batch", "cooldown": "--cooldown",
    "share": "--share", "gpu_mem": "--gpu-mem", "chain": "--chain",
}  # fmt: skip

_GIVES_WAY_S = 300.0
"""The lease is at an end on nodes that are reserved from then on."""

_NOT_OF_RUN: dict[str, Any] = {
    **dict.fromkeys(("array", "output_file", "error", "wrap", *_UNLIKE)),
    "requeue": True, "hold": False, "wait": False, "dry_run": False,
}  # fmt: skip


def in_charge() -> bool:
    """Whether the inventory says so, or did before its file was gone.

    Mostly it is not parsed for that, which is fast, and a broken one will do.
    """
    with suppress(GpuschedError, OSError):
        text = re.sub(rb"(?m)^[ \t]*#.*", b"", find_inventory().read_bytes())
        if re.search(rb"^" + _ENGINE, text, re.MULTILINE):
            return True
        if text.strip() and not re.search(_ENGINE, text):
            return False
    from gpusched.client.context import Client

    with suppress(GpuschedError):
        return Client().inventory.engine == "slurm"
    return False


def in_its_words(text: str) -> str:
    """A line that names commands of ours, with Slurm's in their place."""
    return re.sub(r"gpusched (cancel|hold|release|requeue)\b", lambda m: _VERBS[m[1]], text)


_VERBS = {"cancel": "scancel", "hold": "scontrol hold", "release": "scontrol release", "requeue": "scontrol requeue"}


def modes_line(client: Client) -> str:
    """Who decides what, for people."""
    from gpusched.model.slurm import SlurmMode
    from gpusched.promotion.live import live_modes

    try:
        modes = live_modes(client.inventory, client.reader)
    except GpuschedError:
        return "jobs are managed by Slurm"
    words = {SlurmMode.DECIDE: "decides", SlurmMode.ADVISE: "advises", SlurmMode.OBSERVE: "observes"}
    told = ((word, [name for name, own in modes.items() if own is mode]) for mode, word in words.items())
    return "jobs are managed by Slurm; gpusched " + ", ".join(
        f"{word} in {', '.join(names)}" for word, names in told if names
    )


def refuse(name: str, given: Mapping[str, Any]) -> NoReturn:
    """Say Slurm's command in place of ours, called ``name``, with the parameters that it was given.

    Raises:
        UsageError: Always.
    """
    argv, unlike = _INSTEAD[name](given)
    but = f", which has no equivalent of {', '.join(unlike)}" if unlike else ""
    raise UsageError(f"use Slurm's command{but}: {' '.join(argv)}")


_BY_TASK = (
    ("--ntasks", "ntasks"), ("--ntasks-per-node", "ntasks_per_node"), ("--cpus-per-task", "cpus_per_task"),
    ("--cpus-per-gpu", "cpus_per_gpu"), ("--gpus-per-task", "gpus_per_task"), ("--mem", "mem_per_node"),
    ("--mem-per-gpu", "mem_per_gpu"), ("--mem-per-cpu", "mem_per_cpu"),
)  # fmt: skip

Said = tuple[list[str], list[str]]  # words for a shell; options of ours that these leave out


def _cancel(given: Mapping[str, Any]) -> Said:
    words = ["scancel"]
    words += ["-s", "KILL"] if given["now"] else []
    words += ["-u", _quoted(given["user"])] if given["user"] else []
    words += ["-t", _quoted(",".join(given["state"]).upper())] if given["state"] else []
    return words + _ids(given["jobs"] or ()), ["--wait"] * bool(given["wait"])


def _on_jobs(verb: str) -> Callable[[Mapping[str, Any]], Said]:
    return lambda given: (["scontrol", verb, ",".join(_ids(given["jobs"]))], [])


def _priority(given: Mapping[str, Any]) -> Said:
    # Nice, not Priority: that would freeze the job's, and 0 there means held
    return ["scontrol", "update", f"JobId={_ids([given['job']])[0]}", f"Nice={-given['number']}"], []


def _on_nodes(state: str) -> Callable[[Mapping[str, Any]], Said]:
    def words(given: Mapping[str, Any]) -> Said:
        names = _quoted(",".join(given["nodes"]))
        why = [f"Reason={_quoted(given['reason'])}"] if "reason" in given else []
        return ["scontrol", "update", f"NodeName={names}", f"State={state}", *why], []

    return words


def _logs(given: Mapping[str, Any]) -> Said:
    unlike = [f"--{name}" for name in ("rank", "attempt") if given[name] is not None]
    (job,) = _ids([given["job"]])
    path = _stdout_of(job)
    if not path:  # Slurm has forgotten it; its database knows where it was submitted, and how
        return ["sacct", "-X", "-P", "-j", job, "--format=WorkDir,SubmitLine"], unlike
    lines = ["-n", str(given["tail"])] if given["tail"] is not None else []
    program = ["tail", *lines, *["-f"] * given["follow"]] if lines or given["follow"] else ["cat"]
    return [*program, _quoted(path)], unlike


def _stdout_of(job: str) -> str:
    """The file of the job's output; "" where Slurm does not say, or does not know the job any more."""
    from gpusched.slurm.commands import Slurm

    try:
        told = Slurm().ask("scontrol", "--details", "show", "job", job)
    except GpuschedError:
        return ""
    found = re.findall(r"^   StdOut=(.*)$", told, re.MULTILINE)  # the last: a name with line breaks may say it, too
    return found[-1] if found else ""


def _exec(given: Mapping[str, Any]) -> Said:
    rank = ["-r", str(given["rank"])] if given["rank"] else []
    words = ["srun", f"--jobid={_ids([given['job']])[0]}", "--overlap", "-N", "1", "-n", "1", *rank]
    return [*words, *["--pty"] * given["tty"], *map(_quoted, given["command"])], []


def _submit(given: Mapping[str, Any]) -> Said:
    unlike = [option for name, option in _UNLIKE.items() if given[name] not in (None, [], ())]
    return [*_environment(given["env"] or ()), "sbatch", *_sbatch(given)], unlike


def _run(given: Mapping[str, Any]) -> Said:
    given = {**_NOT_OF_RUN, **given}
    unlike = [option for name, option in _UNLIKE.items() if given[name] not in (None, [], ())]
    unlike += ["--forward"] * bool(given["forward"])
    words = [*_environment(given["env"] or ()), "srun", *_options(given, sbatch=False)]
    return [*words, *["--pty"] * given["pty"], *map(_quoted, given["command"] or ())], unlike


def _sbatch(given: Mapping[str, Any]) -> Iterator[str]:
    """The options, then the command."""
    nodes = yield from _options(given, sbatch=True)
    command = shlex.join(given["command"] or ())
    if _has_script(given):
        yield command if given["wrap"] is None else f"--wrap {_quoted(given['wrap'])}"
        return
    if nodes > 1:
        command = f"srun {command}"  # one on each node, as ours
    elif given["signal"]:
        command = f"exec {command}"  # the signal is the script's
    yield f"--wrap {_quoted(command)}" if given["command"] else "SCRIPT"


def _has_script(given: Mapping[str, Any]) -> bool:
    return given["wrap"] is not None or bool(given["command"] and _is_script(given["command"][0]))


def _options(given: Mapping[str, Any], *, sbatch: bool) -> Generator[str, None, int]:
    """In sbatch's order of importance, for it or for srun. Returns the number of nodes."""
    from gpusched.client import options
    from gpusched.client.script.values import MAIL
    from gpusched.model.notices import DEFAULT_NOTICE_KINDS

    for option, name in (("-J", "name"), ("--comment", "comment")):
        if given[name]:
            yield f"{option} {_quoted(given[name])}"
    nodes = yield from _resources(given)
    for option, name in (
        ("--array", "array"),
        ("--dependency", "dependency"),
        ("--reservation", "reservation"),
        ("--account", "group"),
        ("--qos", "qos"),
        ("--mail-user", "mail"),
        ("-o", "output_file"),
        ("-e", "error"),
    ):
        if given[name]:
            yield f"{option}{'=' * option.startswith('--')}{' ' * (len(option) == 2)}{_quoted(given[name])}"
    if given["mail"]:
        told = options.notify(given["notify"] or ()) or DEFAULT_NOTICE_KINDS
        types = [next((name for name, words in MAIL.items() if words == (kind,)), "") for kind in told]
        yield f"--mail-type={','.join(filter(None, types)) or 'NONE'}"
    if given["begin"]:
        yield f"--begin={_begin(given['begin'])}"
    nice = given["nice"] - given["priority"]
    yield from [f"--nice={nice}"] * bool(nice)
    yield from ["--no-requeue"] * (not given["requeue"])
    signal, before_s, batch = options.signal(given["signal"])
    if given["signal"]:
        direct = batch if _has_script(given) else nodes == 1
        yield f"--signal={'B:' * (sbatch and direct)}{signal}{'' if before_s is None else f'@{before_s}'}"
    if given["workdir"]:
        yield f"-D {_quoted(given['workdir'])}"
    for option, name in (("--exclusive", "exclusive"), ("-H", "hold"), ("-W", "wait"), ("--test-only", "dry_run")):
        yield from [option] * given[name]
    return nodes


def _resources(given: Mapping[str, Any]) -> Generator[str, None, int]:
    """What of the size was asked for, in Slurm's words: equal parts on nodes. Returns the number of nodes."""
    from gpusched.client import options
    from gpusched.client.context import Client
    from gpusched.client.sizing import ResourceRequest, partition_of, size
    from gpusched.config.validate import usable_nodes
    from gpusched.views.common import compress_names

    by_task = [f"{option}={_quoted(str(given[name]))}" for option, name in _BY_TASK if given[name] is not None]
    inventory = Client().inventory
    sizes = options.sizes(given["gpus"], given["sizes"], bool(given["resizable"] or given["sizes"]))
    cores = options.cores(given["cpus"], False)
    memory = options.memory(given["mem"], False)
    limit_s = options.duration("--time", given["time"])
    asked = ResourceRequest(
        partition=given["partition"], flavor=given["flavor"], nodes=given["nodes"],
        gpus=options.base_size(sizes, given["base"]), gpus_per_node=given["gpus_per_node"],
        cores=cores if isinstance(cores, int) else None, memory_mib=memory if isinstance(memory, int) else None,
        time_limit_s=limit_s or 60,  # of no account here; Slurm has defaults of its own
        nodelist=options.names(given["nodelist"] or ()), exclude=options.names(given["exclude"] or ()),
        gpu_types=options.names(given["gpu_type"] or ()),
    )  # fmt: skip
    try:
        partition = partition_of(asked, inventory)
    except UsageError:
        if given["command"] and _is_script(given["command"][0]) and not given["partition"]:  # its lines say
            yield from [f"-N {given['nodes']}"] * bool(given["nodes"]) + by_task
            return given["nodes"] or 1
        raise
    yield f"-p {partition.name}"
    flavor = partition.flavor(given["flavor"]) if given["flavor"] else None
    said = (flavor, asked.gpus, asked.gpus_per_node, asked.cores, asked.memory_mib)
    parts = size(asked, inventory) if any(value is not None for value in said) else None
    nodes = parts.nodes if parts else given["nodes"] or 1
    if given["nodes"] or nodes > 1:
        yield f"-N {nodes}"
    yield from by_task
    if nodes > 1 and not (given["ntasks"] or given["ntasks_per_node"]):
        yield "--ntasks-per-node=1"
    if parts is not None and parts.gpus_per_node:
        kind = f"{asked.gpu_types[0]}:" if len(asked.gpu_types) == 1 else ""
        yield f"--gpus-per-node={_quoted(f'{kind}{parts.gpus_per_node}')}"
    if parts is not None and (flavor or asked.cores):
        yield f"-c {parts.cores_per_node}"
    if parts is not None and (flavor or asked.memory_mib):
        mib = parts.memory_mib_per_node
        yield f"--mem={mib}M" if mib % 1024 else f"--mem={mib >> 10}G"
    if limit_s or flavor:
        yield f"-t {_time(limit_s or (flavor.time_limit_s if flavor else 0))}"
    few = 0 < len(asked.nodelist) <= nodes
    if few:
        yield f"-w {_quoted(compress_names(asked.nodelist))}"
    left = usable_nodes(partition, () if few else asked.nodelist, asked.exclude, asked.gpu_types)
    out = [node.name for node in partition.nodes if node not in left]
    if out and (asked.exclude or len(asked.gpu_types) > 1 or (asked.nodelist and not few)):
        yield f"-x {_quoted(compress_names(out))}"
    yield from _spread(given, nodes)
    return nodes


def _is_script(word: str) -> bool:
    from gpusched.client.script import source

    return source.from_word(word) is not None


def _spread(given: Mapping[str, Any], nodes: int) -> Iterator[str]:
    from gpusched.client import options

    spread = options.max_spread(given["max_spread"])
    wait_s = options.wait_for_placement(given["wait_for_placement"])
    if spread == "server" and nodes == 1 and not given["nodes"]:
        yield "-N 1"
    if spread == "rack":
        yield "--switches=1" + (f"@{_time(wait_s)}" if wait_s else "")


def _environment(values: Iterable[str]) -> Iterator[str]:
    """Set for sbatch, which passes on all that it has; ``NAME`` alone is passed on already."""
    for name, equals, value in (text.partition("=") for text in values):
        if equals:
            yield f"{name}={_quoted(value)}"


def _ids(jobs: Iterable[str]) -> list[str]:
    return [_quoted(slurm_id(job.strip())) for job in jobs]


def _time(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    return (f"{days}-" if days else "") + f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"


def _begin(text: str) -> str:
    """Slurm knows neither our units nor time zones."""
    from gpusched.client import options

    at = options.begin(text.strip(), 0.0) or 0.0
    return f"now+{at:.0f}" if text.strip().startswith("now") else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))


def _quoted(text: str) -> str:
    """One word for a shell, in one line."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = (f"\\{c}" if c in "\\'" else c if c.isprintable() else _escaped(c) for c in text)
    return f"$'{''.join(escaped)}'"


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))


def _reserve(maintenance: bool) -> Callable[[Mapping[str, Any]], Said]:
    def words(given: Mapping[str, Any]) -> Said:
        own = "MAINT" if maintenance else "OVERLAP" if _begins_in_lease(given) else ""
        flags = [f"Flags={','.join(filter(None, (own, 'IGNORE_JOBS')))}"]
        name = [f"ReservationName={_quoted(given['name'])}"] if given["name"] else []
        nodes = ",".join(given["nodes"] or ())
        if given.get("gpus"):
            nodes = _nodes_of(given)  # Slurm reserves no GPUs
        elif not nodes:
            nodes = "ALL"
            flags += [f"PartitionName={_quoted(given['partition'])}"] if given["partition"] else []
        times = _times(given["begin"] or "now", given["until"], given["lasts"])
        whose = [f"Users={_quoted(','.join(given['users']))}"] if given["users"] else []
        whose += [f"Accounts={_quoted(','.join(given['groups']))}"] if given["groups"] else []
        whose = whose or ["Users=root"]
        what = f"Nodes={_quoted(nodes)}"
        return ["scontrol", "create", "reservation", *name, *times, *whose, what, *flags], []

    return words


def _begins_in_lease(given: Mapping[str, Any]) -> bool:
    """Whether it begins so soon that the lease of mode decide has not given way yet: Slurm would refuse it."""
    from gpusched.client import options
    from gpusched.client.context import Client
    from gpusched.model.slurm import SlurmMode
    from gpusched.promotion.live import live_modes

    now = time.time()
    if given["begin"] and options.moment("--from", given["begin"], now) > now + _GIVES_WAY_S:
        return False
    client = Client()
    return SlurmMode.DECIDE in live_modes(client.inventory, client.reader).values()


def _nodes_of(given: Mapping[str, Any]) -> str:
    """The fewest nodes with so many GPUs that nobody has reserved then."""
    from gpusched.client import options
    from gpusched.client.context import Client
    from gpusched.config.reservations import fewest_nodes

    client, now = Client(), time.time()
    begin = options.moment("--from", given["begin"], now) if given["begin"] else now
    lasts_s = options.duration("--for", given["lasts"])
    end = options.moment("--to", given["until"], now) if given["until"] else begin + (lasts_s or 0)
    taken = client.reader.reservations(now) if client.reader is not None else ()
    return ",".join(fewest_nodes(client.inventory, given["partition"], given["gpus"], taken, (), (), begin, end))


def _times(begin: str | None, until: str | None, lasts: str | None) -> list[str]:
    """When, as Slurm reads it: in local time."""
    from gpusched.client import options
    from gpusched.model.units import format_duration

    def at(option: str, text: str) -> str:
        when = time.localtime(options.moment(option, text, time.time()))
        return time.strftime("%Y-%m-%dT%H:%M:%S", when)

    words = [f"StartTime={at('--from', begin)}"] if begin else []
    words += [f"EndTime={at('--to', until)}"] if until else []
    return words + ([f"Duration={format_duration(options.duration('--for', lasts))}"] if lasts else [])


def _reservations(given: Mapping[str, Any]) -> Said:
    name = f"ReservationName={_quoted(given['name'])}" if given["what"] else ""
    if given["what"] == "cancel":
        return ["scontrol", "delete", name], []
    if given["what"] == "change":
        times = _times(given["begin"], given["until"], given["lasts"])
        whose = [f"Users={_quoted(','.join(given['users']))}"] if given["users"] else []
        whose += [f"Accounts={_quoted(','.join(given['groups']))}"] if given["groups"] else []
        nodes = [f"Nodes={_quoted(','.join(given['nodes']))}"] if given["nodes"] else []
        return ["scontrol", "update", name, *times, *whose, *nodes], []
    return ["scontrol", "show", "reservation"], []


_INSTEAD: dict[str, Callable[[Mapping[str, Any]], Said]] = {
    "submit": _submit,
    "run": _run,
    "attach": lambda given: (["sattach", f"{_ids([given['job']])[0]}.0"], ["--forward"] * bool(given["forward"])),
    "cancel": _cancel,
    "hold": _on_jobs("hold"),
    "release": _on_jobs("release"),
    "requeue": _on_jobs("requeue"),
    "priority": _priority,
    "drain": _on_nodes("DRAIN"),
    "resume": _on_nodes("RESUME"),
    "reserve": _reserve(False),
    "maintenance": _reserve(True),
    "reservations": _reservations,
    "logs": _logs,
    "exec": _exec,
}
