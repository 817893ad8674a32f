"""The options of a job in Python, and their conversion into the request that the command line makes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from gpusched.client.submit import SubmitRequest
from gpusched.errors import UsageError
from gpusched.model.suggest import did_you_mean

if TYPE_CHECKING:
    from gpusched.api.jobs import Job

Names = str | Sequence[str]


class Options(TypedDict, total=False):
    """Keyword arguments of everything that queues a job: the options of ``gpusched submit`` under the same names.

    None means not given. Numbers may be given as numbers and lists as lists; strings mean the same as on the command
    line.

    Attributes:
        name: Job name; default: the function's or the program's name.
        partition: Partition to run in.
        flavor: A declared bundle of GPUs, cores, memory and time.
        gpus: GPUs in total; for a resizable job ``"1-8"``.
        gpus_per_node: GPUs per node.
        nodes: Nodes; default: the fewest. A function runs once on each, or ``ntasks_per_node`` times.
        cpus: CPU cores in total.
        mem: Memory in total: ``"64G"``; a number is MiB.
        time: Time limit: ``"2h"``, minutes, or a timedelta.
        image: Container image.
        array: Commands only: one task per index, ``"0-9%2"``; or a range.
        max_running: The maximum number of tasks that run at once.
        chain: Commands only: the number of jobs, each of which starts after the previous one.
        dependency: As ``--dependency``; or jobs, all of which must have succeeded.
        begin: Earliest start: ``"now+2h"`` or a datetime.
        requeue: Restart after a node failure; default: yes.
        preemptible: It saves its work when signalled, and may be preempted.
        resizable: It saves its work when signalled, and can resume on other GPU counts.
        sizes: GPU counts that it may run with.
        base_gpus: GPU count that its batch was tuned for.
        batch: ``"fixed"`` or ``"scale"``.
        cooldown: Minimum run time before a resize.
        signal: ``"USR1@60"``: the warning signal, and how long before the limit.
        priority: Higher starts first; above 0 for admins only.
        nice: Lowers the priority.
        env: Variables of the job, or names of your own variables to copy.
        secret: The same for values that nobody else may see.
        mount: ``"SRC:DST[:ro]"``, or sources and their mount points.
        workdir: Working directory.
        output: File that the nodes can write, in place of the collected log.
        nodelist: Only on these nodes.
        exclude: Not on these nodes.
        gpu_type: Only on GPUs of these types.
        max_spread: ``"server"``, ``"rack"`` or ``"any"``.
        placement_wait: How long to wait for one rack.
        exclusive: Whole nodes, shared with no other job.
        share: ``"pairs"``: share its GPUs with one other job.
        gpu_mem: With share: its maximum use of each GPU's memory.
        mail: Address for notices about the job.
        notify: Events to notify: ``"begin"``, ``"end"``...
        hold: Queue it on hold.
        comment: A comment, shown to others.
        ntasks: Tasks in total, which ``srun`` starts in a job script.
        ntasks_per_node: Tasks per node; a function is called this many times there, each in a process with its rank.
        cpus_per_task: Instead of ``cpus``: cores per task.
        cpus_per_gpu: Instead of ``cpus``: cores per GPU.
        gpus_per_task: Instead of ``gpus``: GPUs per task.
        mem_per_node: Instead of ``mem``: memory per node.
        mem_per_gpu: Instead of ``mem``: memory per GPU.
        mem_per_cpu: Instead of ``mem``: memory per core.
        error: Like ``output``, for stderr.
        open_mode: ``append`` or ``truncate``: what a restarted job does with its output files.
        slurm_env: Set Slurm's variables, too.
        reservation: Run only in this reservation.
        group: The group of yours that is charged.
        qos: Its class of service.
        script: Commands only: text of a job script; the command is its arguments.
        python: Functions only: the interpreter in the image; default: ``python3``.
        modules: Functions only: modules that are sent with their code, since the image does not have them; default:
            your own modules beside the function's, or below.
        result_dir: Functions only: a folder that the job and this machine see under the same path, for results too
            large to collect, and for what a checkpoint returns; default: the job's folder, if it is shared.
    """

    name: str | None
    partition: str | None
    flavor: str | None
    gpus: int | str | None
    gpus_per_node: int | None
    nodes: int | None
    cpus: int | str | None
    mem: int | str | None
    time: str | int | float | timedelta | None
    image: str | None
    array: str | range | None
    max_running: int | None
    chain: int | None
    dependency: str | Job[Any] | Iterable[Job[Any]] | None
    begin: str | datetime | None
    requeue: bool | None
    preemptible: bool | None
    resizable: bool | None
    sizes: str | Sequence[int] | None
    base_gpus: int | None
    batch: str | None
    cooldown: str | int | float | timedelta | None
    signal: str | None
    priority: int | None
    nice: int | None
    env: Mapping[str, str] | Sequence[str] | None
    secret: Mapping[str, str] | Sequence[str] | None
    mount: Names | Mapping[str, str] | None
    workdir: str | None
    output: str | os.PathLike[str] | None
    nodelist: Names | None
    exclude: Names | None
    gpu_type: Names | None
    max_spread: str | None
    placement_wait: str | int | float | timedelta | None
    exclusive: bool | None
    share: str | None
    gpu_mem: int | str | None
    mail: str | None
    notify: Names | None
    hold: bool | None
    comment: str | None
    ntasks: int | None
    ntasks_per_node: int | None
    cpus_per_task: int | None
    cpus_per_gpu: int | None
    gpus_per_task: int | None
    mem_per_node: int | str | None
    mem_per_gpu: int | str | None
    mem_per_cpu: int | str | None
    error: str | os.PathLike[str] | None
    open_mode: Literal["append", "truncate"] | None
    slurm_env: bool | None
    reservation: str | None
    group: str | None
    qos: str | None
    script: str | None
    python: str | None
    modules: Iterable[ModuleType | str] | None
    result_dir: str | os.PathLike[str] | None


FUNCTION_ONLY = ("python", "modules", "result_dir")
COMMAND_ONLY = {
    "array": "map_array calls it in several tasks",
    "chain": "a function that runs for so long submits itself again",
    "script": "a script is run with a command, its arguments",
    "ntasks": "say how many times it is called on each node: ntasks_per_node",
}
"""And what to use for functions instead."""
_MINUTES = ("time",)
_SECONDS = ("cooldown", "placement_wait")
_TEXTS = ("gpus", "cpus", "mem", "gpu_mem", "mem_per_node", "mem_per_gpu", "mem_per_cpu")
_NAMES = ("nodelist", "exclude", "gpu_type", "notify")
_OPTION_LINE = re.compile(r"#(SBATCH|GPUSCHED)\s")


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None.

    Raises:
        TypeError: There is no such option.
    """
    for name in options:
        if name not in Options.__annotations__:
            raise TypeError(f"no option {name!r}{did_you_mean(name, list(Options.__annotations__))}")
    return {name: value for name, value in options.items() if value is not None}


def request(options: Mapping[str, Any], command: Sequence[str]) -> tuple[SubmitRequest, dict[str, str]]:
    """Return the request, and the variables (with values of secrets) that it is read with.

    Raises:
        TypeError: An option has a value of the wrong type.
        UsageError: An option has an invalid value.
    """
    given = {name: value for name, value in options.items() if name not in (*FUNCTION_ONLY, "max_running")}
    environ = dict(os.environ)
    fields: dict[str, Any] = {}
    for name, value in given.items():
        fields[name] = _converted(name, value, environ)
    if "max_running" in options:
        if "array" not in fields or "%" in fields["array"]:
            raise UsageError("max_running is for arrays that do not say it themselves")
        fields["array"] += f"%{int(options['max_running'])}"
    return SubmitRequest(command=tuple(command), **fields), environ


def _converted(name: str, value: Any, environ: dict[str, str]) -> Any:
    if name in _MINUTES or name in _SECONDS:
        return _duration(value, 60 if name in _MINUTES else 1)
    if name in _TEXTS:
        return str(value)
    if name in _NAMES:
        return _strings(name, value)
    match name:
        case "array":
            return value if isinstance(value, str) else ",".join(map(str, value))
        case "sizes":
            return value if isinstance(value, str) else ",".join(map(str, value))
        case "dependency":
            return value if isinstance(value, str) else _depend_on(value)
        case "begin":
            return value.isoformat() if isinstance(value, datetime) else value
        case "env":
            return tuple(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else _strings(name, value)
        case "secret":
            if isinstance(value, Mapping):
                environ.update(value)
            return tuple(value) if isinstance(value, Mapping) else _strings(name, value)
        case "mount":
            return tuple(f"{k}:{v}" for k, v in value.items()) if isinstance(value, Mapping) else _strings(name, value)
        case "output" | "error":
            return os.fspath(value)
        case "script":
            if any(map(_OPTION_LINE.match, value.splitlines())):
                raise UsageError("script: option lines work only with gpusched submit", "pass options as arguments")
    return value


def _duration(value: str | float | timedelta, unit_s: int) -> str:
    """Return the duration as on the command line; a number is minutes for a time limit, else seconds."""
    if isinstance(value, str):
        return value
    seconds = value.total_seconds() if isinstance(value, timedelta) else value * unit_s
    return f"{max(1, round(seconds))}s" if seconds else "0s"


def _strings(name: str, value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) for text in found):
        raise TypeError(f"{name}: expected texts, found {found!r}"[:200])
    return found


def _depend_on(value: Any) -> str:
    from gpusched.api.jobs import Job

    jobs = [value] if isinstance(value, Job) else list(value)
    if not jobs or not all(isinstance(job, Job) for job in jobs):
        raise TypeError(f"dependency: expected a string or jobs, found {value!r}"[:200])
    return "afterok:" + ":".join(job.id for job in jobs)
