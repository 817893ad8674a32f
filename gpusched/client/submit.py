"""Submitting: options -> a checked spec -> one command file in the inbox."""

from __future__ import annotations

import os
import time

import msgspec

from gpusched.client import options
from gpusched.client.context import Client
from gpusched.client.sizing import ResourceRequest, elastic_of, size
from gpusched.config.validate import MAX_NAME, validate_spec
from gpusched.errors import UsageError
from gpusched.model import ids
from gpusched.model.commands import Submit
from gpusched.model.jobs import JobSpec
from gpusched.model.resources import Partition
from gpusched.queue.inbox import MAX_COMMAND_BYTES, deliver_submit


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``submit`` as typed."""

    command: tuple[str, ...] = ()
    name: str | None = None
    partition: str | None = None
    flavor: str | None = None
    nodes: int | None = None
    gpus: str | None = None
    gpus_per_node: int | None = None
    cpus: int | None = None
    mem: str | None = None
    time: str | None = None
    image: str | None = None
    array: str | None = None
    dependency: str | None = None
    begin: str | None = None
    requeue: bool = True
    preemptible: bool | None = None
    resizable: bool = False
    sizes: str | None = None
    base: int | None = None
    batch: str = "fixed"
    cooldown: str = "10m"
    signal: str | None = None
    priority: int = 0
    nice: int = 0
    env: tuple[str, ...] = ()
    secret: tuple[str, ...] = ()
    mount: tuple[str, ...] = ()
    workdir: str | None = None
    output: str | None = None
    nodelist: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    gpu_type: tuple[str, ...] = ()
    hold: bool = False
    comment: str = ""


def prepare(client: Client, request: Request) -> Submit:
    """Parse and check everything: the command to deliver, but for its id.

    Raises:
        UsageError: The first thing wrong, in one line; nothing was queued.
    """
    now = time.time()
    inventory = client.inventory
    sizes = options.sizes(request.gpus, request.sizes, request.resizable)
    gpus = options.base_size(sizes, request.base)
    sized = size(_resources(request, gpus), inventory)
    array, max_running = options.array(request.array)
    signal, signal_before_s = options.signal(request.signal)
    secrets = options.secrets(request.secret, os.environ)
    cwd = _folder() if request.mount or request.output else "/"
    spec = JobSpec(
        name=request.name if request.name is not None else _default_name(request),
        **msgspec.structs.asdict(sized),
        image=request.image,
        command=request.command,
        workdir=request.workdir,
        env=options.environment(request.env, os.environ),
        secret_names=tuple(secrets),
        mounts=options.mounts(request.mount, cwd),
        output=options.output_path(request.output, cwd),
        dependencies=options.dependencies(request.dependency, lambda text: _whole_id(client, text)),
        begin_time=options.begin(request.begin, now),
        priority=request.priority,
        nice=request.nice,
        hold=request.hold,
        requeue=request.requeue,
        preemptible=_preemptible(request.preemptible, inventory.partition(sized.partition)),
        signal=signal,
        signal_before_s=signal_before_s,
        nodelist=options.names(request.nodelist),
        exclude=options.names(request.exclude),
        gpu_types=options.names(request.gpu_type),
        comment=request.comment,
        elastic=elastic_of(sized, sizes, options.batch(request.batch), options.duration("--cooldown", request.cooldown))
        if request.resizable
        else None,
    )
    validate_spec(spec, inventory)
    prepared = Submit(
        time=now, id="0" * ids.ID_LENGTH, spec=spec, array=array, max_running=max_running, secrets=secrets
    )
    length = len(msgspec.json.encode(prepared))
    if length > MAX_COMMAND_BYTES:
        raise UsageError(f"the whole request is {length} bytes, at most {MAX_COMMAND_BYTES} are possible", "use a file")
    return prepared


def submit(client: Client, prepared: Submit) -> str:
    """Queue it; when this returns it is on disk. Returns the job's id (the array's, for an array)."""
    now = time.time()
    return deliver_submit(
        client.deliverable_inbox(),
        lambda job_id: msgspec.structs.replace(prepared, id=job_id, time=now),
        lambda: ids.mint(time.time()),
    )


def _resources(request: Request, gpus: int | None) -> ResourceRequest:
    return ResourceRequest(
        partition=request.partition,
        flavor=request.flavor,
        nodes=request.nodes,
        gpus=gpus,
        gpus_per_node=request.gpus_per_node,
        cores=request.cpus,
        memory_mib=options.memory_mib("--mem", request.mem),
        time_limit_s=options.duration("--time", request.time),
        nodelist=options.names(request.nodelist),
        exclude=options.names(request.exclude),
        gpu_types=options.names(request.gpu_type),
    )


def _default_name(request: Request) -> str:
    """The program's name, else the image's."""
    source = request.command[0] if request.command else (request.image or "").partition(":")[0]
    name = source.rstrip("/").rpartition("/")[2][:MAX_NAME]
    return name if name and name.isprintable() else "job"


def _preemptible(asked: bool | None, partition: Partition | None) -> bool:
    """What was given, else the partition's default."""
    return asked if asked is not None else partition is not None and partition.preemptible


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(f"the current folder cannot be told: {error.strerror}", "use absolute paths") from None


def _whole_id(client: Client, text: str) -> str:
    from gpusched.client.resolve import Resolver

    return Resolver(client).target(text).id
