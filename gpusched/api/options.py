"""The options of a job in Python, and their conversion into the request that the command line makes."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import msgspec

from gpusched.client.request import OPTIONS, SubmitRequest, type_of, values_of
from gpusched.errors import UsageError
from gpusched.model.suggest import did_you_mean

if TYPE_CHECKING:
    from gpusched.api.jobs import Job

Names = str | Sequence[str]


class Options(TypedDict, total=False):
    """Keyword arguments of everything that queues a job: the options of ``gpusched submit`` under the same names.

    None means not given. Numbers may be given as numbers and lists as lists; strings mean the same as on the command
    line.

    What each means is in the table of options, `gpusched.client.request.SubmitRequest`.
    """

    name: str | None
    partition: str | None
    flavor: str | None
    gpus: int | str | None
    gpus_per_node: int | str | None
    mig: str | None
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
    hot: bool | None
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


FUNCTION_ONLY = {
    "python": "the interpreter in the image; default: ``python3``",
    "modules": "modules that are sent with their code, since the image does not have them; default: your own modules "
    "beside the function's, or below",
    "result_dir": "a folder that the job and this machine see under the same path, for results too large to collect, "
    "and for what a checkpoint returns; default: the job's folder, if it is shared",
}
COMMAND_ONLY = {
    "array": "map_array calls it in several tasks",
    "chain": "a function that runs for so long submits itself again",
    "script": "a script is run with a command, its arguments",
    "ntasks": "say how many times it is called on each node: ntasks_per_node",
}
"""And what to use for functions instead."""
_SECONDS = {"time": 60, "cooldown": 1, "placement_wait": 1}  # of a plain number
_JOINED = {"env": "=", "mount": ":", "secret": ""}
_OPTION_LINE = re.compile(r"#(SBATCH|GPUSCHED)\s")


def _documentation() -> Iterator[str]:
    """Yield the documentation of each option; what the table says of the command line, in Python's names."""
    own = {name: f"Functions only: {text}." for name, text in FUNCTION_ONLY.items()} | {
        "max_running": "The maximum number of tasks that run at once.",
        "script": "Commands only: text of a job script; the command is its arguments.",
    }
    for name in Options.__annotations__:
        text = own[name] if name in own else OPTIONS[name].python or OPTIONS[name].help
        yield f"    {name}: " + re.sub("(?<!`)--([a-z-]+)", lambda m: f"``{m[1].replace('-', '_')}``", text)


Options.__doc__ = "\n".join([inspect.cleandoc(Options.__doc__ or ""), "", "Attributes:", *_documentation()])


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
    environ = dict(os.environ)
    if isinstance(secrets := options.get("secret"), Mapping):
        environ.update(secrets)
    given = {name: _as_typed(name, value) for name, value in options.items() if name in OPTIONS}
    if "max_running" in options:
        if "array" not in given or "%" in given["array"]:
            raise UsageError("max_running is for arrays that do not say it themselves")
        given["array"] += f"%{options['max_running']}"
    script = options.get("script")
    if not isinstance(script, str | None):
        raise TypeError(f"script: expected its text, found {script!r}"[:200])
    if script is not None and any(map(_OPTION_LINE.match, script.splitlines())):
        raise UsageError("script: option lines work only with gpusched submit", "pass options as arguments")
    return SubmitRequest(command=tuple(command), script=script, **values_of(given)), environ


def _as_typed(name: str, value: Any) -> Any:
    """Return the value as typed on the command line; without a parser there, as its type."""
    if OPTIONS[name].many:
        return _strings(name, value)
    value = value.item() if getattr(value, "shape", None) == () else value  # a scalar of numpy or torch
    match value:
        case timedelta():
            return _duration(name, value, value.total_seconds())
        case datetime():
            return (value.astimezone() if value.fold else value).isoformat()  # text knows no fold, but an offset
        case os.PathLike():
            return os.fspath(value)
        case bool() if OPTIONS[name].parse is not None:
            raise TypeError(f"{name}: expected a value, found {value}")
        case int() | float() if name in _SECONDS:
            return _duration(name, value, value * _SECONDS[name])
        case _ if OPTIONS[name].parse is None:
            kind = next(kind for kind in get_args(type_of(name)) or [type_of(name)] if kind is not type(None))
            try:
                return msgspec.convert(value, kind, strict=False)  # "1" and 1.0 are 1, 0 is False
            except msgspec.ValidationError:
                raise TypeError(f"{name}: expected {kind.__name__}, found {value!r}"[:200]) from None
        case str():
            return value
        case _ if name == "dependency":
            return _depend_on(value)
        case Iterable():
            return ",".join(map(str, value))
    return str(value)


def _duration(name: str, value: object, seconds: float) -> str:
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{name}: found {value}, expected a time that is not negative")
    return f"{max(1, round(seconds))}s" if seconds else "0s"


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping) and name in _JOINED:  # the values of secrets are passed as variables
        return tuple(f"{k}{_JOINED[name]}{v}" if _JOINED[name] else k for k, v in value.items())
    found = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not all(isinstance(text, str) for text in found):
        raise TypeError(f"{name}: expected texts, found {found!r}"[:200])
    return found


def _depend_on(value: Any) -> str:
    from gpusched.api.jobs import Job

    jobs = list(value) if isinstance(value, Iterable) else [value]
    if not jobs or not all(isinstance(job, Job) for job in jobs):
        raise TypeError(f"dependency: expected a string or jobs, found {value!r}"[:200])
    return "afterok:" + ":".join(job.id for job in jobs)
