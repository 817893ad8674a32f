"""Under ``engine: slurm`` Slurm manages the jobs: translate commands of gpusched into Slurm's own."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from gpusched.config.paths import find_inventory
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.ids import slurm_id

if TYPE_CHECKING:
    from gpusched.client.context import Client

_ENGINE = rb"""["']?engine["']?[ \t]*:[ \t]*["']?slurm\b"""
_WITHOUT_EQUIVALENT = {  # options of `submit` that Slurm has nothing like, by parameter
    "image": "--image", "secret": "--secret", "mount": "--mount", "preemptible": "--preemptible",
    "resizable": "--resizable", "hot": "--hot", "sizes": "--sizes", "base_gpus": "--base-gpus",
    "batch": "--batch", "cooldown": "--cooldown", "share": "--share", "gpu_mem": "--gpu-mem", "chain": "--chain",
}  # fmt: skip

_LEASE_GIVES_WAY_S = 300.0
"""The lease is at an end on nodes that are reserved from then on."""

_RUN_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("array", "output", "error", "wrap", *_WITHOUT_EQUIVALENT)),
    "requeue": True, "hold": False, "wait": False, "dry_run": False,
}  # fmt: skip


def manages_jobs() -> bool:
    """Return whether the inventory says ``engine: slurm``, or did before its file was removed.

    Usually the file is searched, not parsed: that is fast and works for an invalid file.
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


def with_slurm_commands(text: str) -> str:
    """Replace our commands in a line by Slurm's."""
    return re.sub(r"gpusched (cancel|hold|release|requeue)\b", lambda m: _VERBS[m[1]], text)


_VERBS = {"cancel": "scancel", "hold": "scontrol hold", "release": "scontrol release", "requeue": "scontrol requeue"}


def modes_line(client: Client) -> str:
    """Return one line for people with gpusched's mode in each partition."""
    from gpusched.model.slurm import SlurmMode
    from gpusched.promotion.live import live_modes

    try:
        modes = live_modes(client.inventory, client.reader)
    except GpuschedError:
        return "jobs are managed by Slurm"
    words = {SlurmMode.DECIDE: "decides", SlurmMode.ADVISE: "advises", SlurmMode.OBSERVE: "observes"}
    found = ((word, [name for name, each in modes.items() if each is mode]) for mode, word in words.items())
    return "jobs are managed by Slurm; gpusched " + ", ".join(
        f"{word} in {', '.join(names)}" for word, names in found if names
    )


def refuse(name: str, given: Mapping[str, Any]) -> NoReturn:
    """Raise an error that names Slurm's command for our command ``name`` with these parameters.

    Raises:
        UsageError: Always.
    """
    argv, missing = _TRANSLATIONS[name](given)
    without = f", which has no equivalent of {', '.join(missing)}" if missing else ""
    raise UsageError(f"use Slurm's command{without}: {' '.join(argv)}")


_TASK_OPTIONS = (
    ("--ntasks", "ntasks"), ("--ntasks-per-node", "ntasks_per_node"), ("--cpus-per-task", "cpus_per_task"),
    ("--cpus-per-gpu", "cpus_per_gpu"), ("--gpus-per-task", "gpus_per_task"), ("--mem", "mem_per_node"),
    ("--mem-per-gpu", "mem_per_gpu"), ("--mem-per-cpu", "mem_per_cpu"),
)  # fmt: skip

Translated = tuple[list[str], list[str]]  # words for a shell; options of ours that these leave out


def _cancel(given: Mapping[str, Any]) -> Translated:
    words = ["scancel"]
    words += ["-s", "KILL"] if given["now"] else []
    words += ["-u", _quoted(given["user"])] if given["user"] else []
    words += ["-t", _quoted(",".join(given["state"]).upper())] if given["state"] else []
    return words + _ids(given["jobs"] or ()), ["--wait"] * bool(given["wait"])


def _on_jobs(verb: str) -> Callable[[Mapping[str, Any]], Translated]:
    return lambda given: (["scontrol", verb, ",".join(_ids(given["jobs"]))], [])


def _priority(given: Mapping[str, Any]) -> Translated:
    # Nice, not Priority: that would freeze the job's, and 0 there means held
    return ["scontrol", "update", f"JobId={_ids([given['job']])[0]}", f"Nice={-given['number']}"], []


def _on_nodes(state: str) -> Callable[[Mapping[str, Any]], Translated]:
    def words(given: Mapping[str, Any]) -> Translated:
        names = _quoted(",".join(given["nodes"]))
        reason = [f"Reason={_quoted(given['reason'])}"] if "reason" in given else []
        return ["scontrol", "update", f"NodeName={names}", f"State={state}", *reason], []

    return words


def _logs(given: Mapping[str, Any]) -> Translated:
    missing = [f"--{name}" for name in ("rank", "attempt") if given[name] is not None]
    (job,) = _ids([given["job"]])
    path = _stdout_of(job)
    if not path:  # Slurm has forgotten it; its database knows where it was submitted, and how
        return ["sacct", "-X", "-P", "-j", job, "--format=WorkDir,SubmitLine"], missing
    lines = ["-n", str(given["tail"])] if given["tail"] is not None else []
    program = ["tail", *lines, *["-f"] * given["follow"]] if lines or given["follow"] else ["cat"]
    return [*program, _quoted(path)], missing


def _stdout_of(job: str) -> str:
    """Return the file of the job's output; "" if Slurm does not know the job or its file."""
    from gpusched.slurm.commands import Slurm

    try:
        description = Slurm().run_command("scontrol", "--details", "show", "job", job)
    except GpuschedError:
        return ""
    found = re.findall(r"^   StdOut=(.*)$", description, re.MULTILINE)
    return found[-1] if found else ""  # the last: a job name with line breaks may contain one, too


def _exec(given: Mapping[str, Any]) -> Translated:
    rank = ["-r", str(given["rank"])] if given["rank"] else []
    words = ["srun", f"--jobid={_ids([given['job']])[0]}", "--overlap", "-N", "1", "-n", "1", *rank]
    return [*words, *["--pty"] * given["tty"], *map(_quoted, given["command"])], []


def _without_equivalent(given: Mapping[str, Any]) -> list[str]:
    of = {option: given[name] for name, option in _WITHOUT_EQUIVALENT.items()}
    return [option for option, value in of.items() if value is not False and value not in (None, [], ())]


def _submit(given: Mapping[str, Any]) -> Translated:
    missing = _without_equivalent(given)
    return [*_environment(given["env"] or ()), "sbatch", *_sbatch(given)], missing


def _run(given: Mapping[str, Any]) -> Translated:
    given = {**_RUN_DEFAULTS, **given}
    missing = _without_equivalent(given)
    missing += ["--forward"] * bool(given["forward"])
    words = [*_environment(given["env"] or ()), "srun", *_options(given, sbatch=False)]
    return [*words, *["--pty"] * given["pty"], *map(_quoted, given["command"] or ())], missing


def _sbatch(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options, then the command."""
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
    """Yield the options in sbatch's order of importance, for it or for srun; return the number of nodes."""
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
        ("-o", "output"),
        ("-e", "error"),
    ):
        if given[name]:
            yield f"{option}{'=' * option.startswith('--')}{' ' * (len(option) == 2)}{_quoted(given[name])}"
    if given["mail"]:
        notices = options.notify("--notify", given["notify"] or ()) or DEFAULT_NOTICE_KINDS
        types = [next((name for name, words in MAIL.items() if words == (kind,)), "") for kind in notices]
        yield f"--mail-type={','.join(filter(None, types)) or 'NONE'}"
    if given["begin"]:
        yield f"--begin={_begin(given['begin'])}"
    nice = given["nice"] - given["priority"]  # Slurm's one adjustment; a higher value means a lower priority
    yield from [f"--nice={nice}"] * bool(nice)
    yield from ["--no-requeue"] * (not given["requeue"])
    if given["signal"]:
        signal, before_s, batch = options.signal("--signal", given["signal"])
        direct = batch if _has_script(given) else nodes == 1
        yield f"--signal={'B:' * (sbatch and direct)}{signal}{'' if before_s is None else f'@{before_s}'}"
    if given["workdir"]:
        yield f"-D {_quoted(given['workdir'])}"
    for option, name in (("--exclusive", "exclusive"), ("-H", "hold"), ("-W", "wait"), ("--test-only", "dry_run")):
        yield from [option] * given[name]
    return nodes


def _resources(given: Mapping[str, Any]) -> Generator[str, None, int]:
    """Yield the requested size in Slurm's options, as equal parts on nodes; return the number of nodes."""
    from gpusched.client import options
    from gpusched.client.context import Client
    from gpusched.client.request import SubmitRequest, values_of
    from gpusched.client.sizing import ResourceRequest, partition_of, size
    from gpusched.config.validate import usable_nodes
    from gpusched.views.common import compress_names

    by_task = [f"{option}={_quoted(str(given[name]))}" for option, name in _TASK_OPTIONS if given[name] is not None]
    inventory = Client().inventory
    shape = ("gpus", "gpus_per_node", "mig", "sizes", "cpus", "mem", "time", "nodelist", "exclude", "gpu_type")
    typed = SubmitRequest(**values_of({name: given[name] for name in shape if given[name]}))
    sizes = options.either_sizes(typed.gpus, typed.sizes, bool(given["resizable"] or typed.sizes))
    limit_s = typed.time
    request = ResourceRequest(
        partition=given["partition"], flavor=given["flavor"], nodes=given["nodes"],
        gpus=options.base_size(sizes, given["base_gpus"]), gpus_per_node=typed.gpus_per_node,
        cores=options.split_amount("--cpus", typed.cpus, False)[0],
        memory_mib=options.split_amount("--mem", typed.mem, False)[0],
        time_limit_s=limit_s or 60,  # not used: without -t Slurm applies its own default
        nodelist=typed.nodelist, exclude=typed.exclude, gpu_types=typed.gpu_type, profile=typed.mig,
    )  # fmt: skip
    try:
        partition = partition_of(request, inventory)
    except UsageError:
        if given["command"] and _is_script(given["command"][0]) and not given["partition"]:  # its lines say
            yield from [f"-N {given['nodes']}"] * bool(given["nodes"]) + by_task
            return given["nodes"] or 1
        raise
    yield f"-p {partition.name}"
    flavor = partition.flavor(given["flavor"]) if given["flavor"] else None
    sizes_given = (flavor, request.gpus, request.gpus_per_node, request.cores, request.memory_mib)
    parts = size(request, inventory) if any(value is not None for value in sizes_given) else None
    nodes = parts.nodes if parts else given["nodes"] or 1
    if given["nodes"] or nodes > 1:
        yield f"-N {nodes}"
    yield from by_task
    if nodes > 1 and not (given["ntasks"] or given["ntasks_per_node"]):
        yield "--ntasks-per-node=1"
    if parts is not None and parts.gpus_per_node:
        gpu_type = typed.mig or (request.gpu_types[0] if len(request.gpu_types) == 1 else "")
        yield f"--gpus-per-node={_quoted(f'{gpu_type}:{parts.gpus_per_node}'.lstrip(':'))}"
    if parts is not None and (flavor or request.cores):
        yield f"-c {parts.cores_per_node}"
    if parts is not None and (flavor or request.memory_mib):
        memory_mib = parts.memory_mib_per_node
        yield f"--mem={memory_mib}M" if memory_mib % 1024 else f"--mem={memory_mib >> 10}G"
    if limit_s or flavor:
        yield f"-t {_time(limit_s or (flavor.time_limit_s if flavor else 0))}"
    # Slurm's -w requires all nodes listed: a longer list, of which ours takes any, becomes an exclusion of the others.
    lists_all = 0 < len(request.nodelist) <= nodes
    if lists_all:
        yield f"-w {_quoted(compress_names(request.nodelist))}"
    usable = usable_nodes(partition, msgspec.structs.replace(request, nodelist=()) if lists_all else request)
    excluded = [node.name for node in partition.nodes if node not in usable]
    if excluded and (request.exclude or len(request.gpu_types) > 1 or (request.nodelist and not lists_all)):
        yield f"-x {_quoted(compress_names(excluded))}"
    yield from _spread(given, nodes)
    return nodes


def _is_script(word: str) -> bool:
    from gpusched.client.script import source

    return source.from_word(word) is not None


def _spread(given: Mapping[str, Any], nodes: int) -> Iterator[str]:
    from gpusched.client.request import values_of

    placement = values_of({name: given[name] for name in ("max_spread", "placement_wait") if given[name]})
    spread, wait_s = placement.get("max_spread"), placement.get("placement_wait")
    if spread == "server" and nodes == 1 and not given["nodes"]:
        yield "-N 1"
    if spread == "rack":
        yield "--switches=1" + (f"@{_time(wait_s)}" if wait_s else "")


def _environment(values: Iterable[str]) -> Iterator[str]:
    """Yield assignments for sbatch, which exports its own environment, so ``NAME`` alone needs none."""
    for name, equals, value in (text.partition("=") for text in values):
        if equals:
            yield f"{name}={_quoted(value)}"


def _ids(jobs: Iterable[str]) -> list[str]:
    return [_quoted(slurm_id(job.strip())) for job in jobs]


def _time(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    return (f"{days}-" if days else "") + f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"


def _begin(text: str) -> str:
    """Return the time in Slurm's form, which has neither our units nor time zones."""
    from gpusched.client import options

    begin = options.unix_time("--begin", text.strip(), 0.0)
    if text.strip().startswith("now"):
        return f"now+{begin:.0f}"
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(begin))


def _quoted(text: str) -> str:
    """Return one shell word on one line."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = (f"\\{c}" if c in "\\'" else c if c.isprintable() else _escaped(c) for c in text)
    return f"$'{''.join(escaped)}'"


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode(errors="surrogateescape"))


def _reserve(maintenance: bool) -> Callable[[Mapping[str, Any]], Translated]:
    def words(given: Mapping[str, Any]) -> Translated:
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
        owners = [f"Users={_quoted(','.join(given['users']))}"] if given["users"] else []
        owners += [f"Accounts={_quoted(','.join(given['groups']))}"] if given["groups"] else []
        owners = owners or ["Users=root"]
        what = f"Nodes={_quoted(nodes)}"
        return ["scontrol", "create", "reservation", *name, *times, *owners, what, *flags], []

    return words


def _begins_in_lease(given: Mapping[str, Any]) -> bool:
    """Return whether it begins before the lease of mode decide gives way: Slurm would then refuse it."""
    from gpusched.client import options
    from gpusched.client.context import Client
    from gpusched.model.slurm import SlurmMode
    from gpusched.promotion.live import live_modes

    now = time.time()
    if given["begin"] and options.unix_time("--from", given["begin"], now) > now + _LEASE_GIVES_WAY_S:
        return False
    client = Client()
    return SlurmMode.DECIDE in live_modes(client.inventory, client.reader).values()


def _nodes_of(given: Mapping[str, Any]) -> str:
    """Return the fewest nodes with enough GPUs that are not reserved at that time."""
    from gpusched.client import options
    from gpusched.client.context import Client
    from gpusched.config.reservations import fewest_nodes

    client, now = Client(), time.time()
    begin = options.unix_time("--from", given["begin"], now) if given["begin"] else now
    lasts_s = options.duration("--for", given["lasts"])
    end = options.unix_time("--to", given["until"], now) if given["until"] else begin + (lasts_s or 0)
    taken = client.reader.reservations(now) if client.reader is not None else ()
    return ",".join(fewest_nodes(client.inventory, given["partition"], given["gpus"], taken, (), (), begin, end))


def _times(begin: str | None, until: str | None, lasts: str | None) -> list[str]:
    """Return the times in Slurm's form: local time."""
    from gpusched.client import options
    from gpusched.model.units import format_duration

    def at(option: str, text: str) -> str:
        local = time.localtime(options.unix_time(option, text, time.time()))
        return time.strftime("%Y-%m-%dT%H:%M:%S", local)

    words = [f"StartTime={at('--from', begin)}"] if begin else []
    words += [f"EndTime={at('--to', until)}"] if until else []
    return words + ([f"Duration={format_duration(options.duration('--for', lasts))}"] if lasts else [])


def _reservations(given: Mapping[str, Any]) -> Translated:
    name = f"ReservationName={_quoted(given['name'])}" if given["what"] else ""
    if given["what"] == "cancel":
        return ["scontrol", "delete", name], []
    if given["what"] == "change":
        times = _times(given["begin"], given["until"], given["lasts"])
        owners = [f"Users={_quoted(','.join(given['users']))}"] if given["users"] else []
        owners += [f"Accounts={_quoted(','.join(given['groups']))}"] if given["groups"] else []
        nodes = [f"Nodes={_quoted(','.join(given['nodes']))}"] if given["nodes"] else []
        return ["scontrol", "update", name, *times, *owners, *nodes], []
    return ["scontrol", "show", "reservation"], []


_TRANSLATIONS: dict[str, Callable[[Mapping[str, Any]], Translated]] = {
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
