"""Submitting: options -> a checked spec -> one command file in the inbox."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from gpusched.client import options
from gpusched.client.context import Client
from gpusched.client.sizing import ResourceRequest, SizedRequest, elastic_of, partition_of, size, whole_nodes
from gpusched.client.tasks import TaskRequest, size_by_tasks
from gpusched.config.accounts import max_time_limit, with_group_and_class
from gpusched.config.plugins import all_bare
from gpusched.config.users import user_name
from gpusched.config.validate import (
    MAX_NAME,
    MAX_SIZES,
    known_partition,
    max_time,
    nodes_that_hold,
    shape_on,
    usable_nodes,
    validate_spec,
)
from gpusched.errors import UsageError
from gpusched.model import ids
from gpusched.model.commands import Submit
from gpusched.model.jobs import Dependency, DependencyKind, Elastic, JobSpec, Mount
from gpusched.model.resources import Inventory, Partition, ResizeRules
from gpusched.queue.inbox import MAX_COMMAND_BYTES, deliver_submit


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``submit`` as typed; ``script``: text of a job script, whose arguments ``command`` are then."""

    command: tuple[str, ...] = ()
    name: str | None = None
    partition: str | None = None
    flavor: str | None = None
    nodes: int | None = None
    gpus: str | None = None
    gpus_per_node: int | None = None
    cpus: str | None = None
    mem: str | None = None
    time: str | None = None
    image: str | None = None
    array: str | None = None
    chain: int | None = None
    dependency: str | None = None
    begin: str | None = None
    requeue: bool = True
    preemptible: bool | None = None
    resizable: bool | None = None
    sizes: str | None = None
    base: int | None = None
    batch: str | None = None
    cooldown: str | None = None
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
    max_spread: str | None = None
    wait_for_placement: str | None = None
    exclusive: bool = False
    share: str | None = None
    gpu_mem: str | None = None
    reservation: str | None = None
    mail: str | None = None
    notify: tuple[str, ...] = ()
    hold: bool = False
    comment: str = ""
    group: str | None = None
    qos: str | None = None
    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    gpus_per_task: int | None = None
    mem_per_node: str | None = None
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    error: str | None = None
    slurm_env: bool | None = None
    open_mode: str | None = None
    script: str | None = None


class FunctionProgram(NamedTuple):
    """A Python function in place of a command: its name, its text, of an array what follows for each task."""

    function: str
    text: str
    of_tasks: tuple[str, ...] = ()


class Submitter(NamedTuple):
    """Who submits.

    ``folder``: the one of submission, or an error; ``environ``: where variables and secrets that are named only have
    their values; ``whole_id``: makes whole ids of jobs of what was typed.
    """

    user: str
    folder: Callable[[], str]
    environ: Mapping[str, str]
    whole_id: Callable[[str], str]


def prepare(
    client: Client,
    request: SubmitRequest,
    program: FunctionProgram | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Submit:
    """Parse and check everything: the command to deliver, but for its id.

    ``program``: what the job is to find in its folder, and its ``command`` runs. ``environ``: see `Submitter`.

    Raises:
        UsageError: The first thing wrong, in one line; nothing was queued.
    """
    me = Submitter(user_name(os.getuid()), folder, environ, lambda text: _whole_id(client, text))
    prepared = assembled(client.inventory, request, me, program)
    _check_queued(client, prepared.spec, me.user, len(prepared.array) if prepared.array else 1)
    if prepared.spec.reservation:
        _check_reservation(client, prepared.spec, prepared.time)
    return prepared


def assembled(
    inventory: Inventory, request: SubmitRequest, who: Submitter, program: FunctionProgram | None = None
) -> Submit:
    """Parse and check what needs no more than the inventory; see `prepare`."""
    now = time.time()
    request = _in_one_partition(request, inventory)
    shape = _shape(request, inventory)
    tasks, may, asked, sized, tasks_per_node = shape
    array, max_running = options.array(request.array)
    if links := options.chain(request.chain, request.array):
        array, max_running = tuple(range(1, links + 1)), 1
    signal, signal_before_s, signal_batch = options.signal(request.signal)
    if signal_batch and request.script is None:
        raise UsageError("--signal B: needs a job script", "omit B:")
    secrets = options.secrets(request.secret, who.environ)
    cwd = who.folder() if request.mount or request.output or request.error or request.script is not None else "/"
    mounts = options.mounts(request.mount, cwd)
    partition = inventory.partition(sized.partition)
    spec = JobSpec(
        name=request.name if request.name is not None else _default_name(request),
        **msgspec.structs.asdict(sized),
        image=request.image,
        command=request.command,
        workdir=request.workdir if request.workdir is not None else _workdir(request, mounts, cwd, partition),
        env=options.environment(request.env, who.environ),
        secret_names=tuple(secrets),
        mounts=mounts,
        output=options.output_path("--output", request.output, cwd),
        error=options.output_path("--error", request.error, cwd),
        append=options.appends(request.open_mode),
        dependencies=(
            *options.dependencies(request.dependency, who.whole_id),
            *([Dependency(DependencyKind.CHAIN)] if links else []),
        ),
        begin_time=options.begin(request.begin, now),
        priority=request.priority,
        nice=request.nice,
        hold=request.hold,
        requeue=request.requeue,
        preemptible=_preemptible(request.preemptible, partition),
        signal=signal,
        signal_before_s=signal_before_s,
        nodelist=options.names(request.nodelist),
        exclude=options.names(request.exclude),
        gpu_types=options.names(request.gpu_type),
        comment=request.comment,
        elastic=_elastic(request, may, asked, sized) if may.resizable else None,
        **_placement(request, tasks, sized, may.resizable, inventory),
        share=options.share(request.share),
        gpu_memory_mib=options.memory_of("--gpu-mem", request.gpu_mem),
        group=request.group or "",
        qos=request.qos or "",
        reservation=request.reservation or "",
        mail=options.mail(request.mail, request.notify),
        notify=options.notify(request.notify),
        script=request.script,
        signal_batch=signal_batch,
        array_shape=_array_shape(array),
        submit_dir=cwd if request.script is not None else "",
        tasks_per_node=tasks_per_node,
        gpus_per_task=request.gpus_per_task or 0,
        memory_mib_per_cpu=tasks.mem_per_cpu_mib or 0,
        slurm_env=request.slurm_env if request.slurm_env is not None else partition is not None and partition.slurm_env,
        function=program.function if program is not None else "",
    )
    if may.filled_in:
        spec = _without_impossible(spec, known_partition(inventory, spec.partition))
    most = max_time_limit(who.user, spec.group, spec.qos, inventory)
    if request.time is None and most is not None and most < spec.time_limit_s:
        spec = msgspec.structs.replace(spec, time_limit_s=most)
    validate_spec(spec, inventory)
    spec = with_group_and_class(spec, who.user, inventory)
    prepared = Submit(
        time=now, id="0" * ids.ID_LENGTH, spec=spec, array=array, max_running=max_running, secrets=secrets,
        program=program.text if program is not None else "",
        task_programs=program.of_tasks if program is not None else (),
    )  # fmt: skip
    length = len(msgspec.json.encode(prepared))
    if length > MAX_COMMAND_BYTES:
        hint = "use a file" if program is None else "pass file paths that the job can read, not file contents"
        raise UsageError(f"the request has {length} bytes; the maximum is {MAX_COMMAND_BYTES}", hint)
    return prepared


def submit(client: Client, prepared: Submit) -> str:
    """Queue it; when this returns it is on disk. Returns the job's id (the array's, for an array)."""
    now = time.time()
    return deliver_submit(
        client.deliverable_inbox(),
        lambda job_id: msgspec.structs.replace(prepared, id=job_id, time=now),
        lambda: ids.mint(time.time()),
    )


def _check_queued(client: Client, spec: JobSpec, user: str, count: int) -> None:
    """That so many more jobs may wait, by what the store knows; without such limits it is not opened."""
    quotas = client.inventory.quotas
    if any(rule.unit == "queued" for rule in quotas.rules(user, spec.group, spec.qos)) and client.reader is not None:
        from gpusched.queue.quotas import PendingJobLimits

        PendingJobLimits(client.reader, quotas).check(user, spec, count)


class _RequestParts(NamedTuple):
    """What was asked for, and the equal parts that it makes in one partition."""

    tasks: TaskRequest
    may: _Resizing
    asked: ResourceRequest
    sized: SizedRequest
    tasks_per_node: int


def _shape(request: SubmitRequest, inventory: Inventory) -> _RequestParts:
    tasks = _tasks(request)
    may = _resizing(request, tasks, inventory)
    asked = _resources(request, tasks, may)
    if tasks == TaskRequest():
        sized, tasks_per_node = size(asked, inventory), 1
    elif may.resizable:
        raise UsageError("a resizable job has one task per node", "omit --resizable, or the task options")
    else:
        sized, tasks_per_node = size_by_tasks(asked, tasks, inventory)
    if request.exclusive and not may.resizable:
        sized = whole_nodes(sized, asked, inventory)
    return _RequestParts(tasks, may, asked, sized, tasks_per_node)


def _in_one_partition(request: SubmitRequest, inventory: Inventory) -> SubmitRequest:
    """Return the request in the first of the partitions that it names whose nodes, when free, can hold the job.

    Raises:
        UsageError: There is no such partition, or none of them can; it says what is wrong in the first.
    """
    names = [name.strip() for name in (request.partition or "").split(",")]
    if len(names) < 2:
        return request
    wrong = None
    for partition in [known_partition(inventory, name) for name in names]:
        here = msgspec.structs.replace(request, partition=partition.name)
        try:
            sized = _shape(here, inventory).sized
            held = nodes_that_hold(
                usable_nodes(partition, options.names(request.nodelist), options.names(request.exclude),
                             options.names(request.gpu_type)),
                sized.gpus_per_node, sized.cores_per_node, sized.memory_mib_per_node,
            )  # fmt: skip
            if held < sized.nodes:
                raise UsageError(f"partition {partition.name} has no {sized.nodes} nodes that can hold the job")
            most = max_time(partition)
            if most is not None and sized.time_limit_s > most:
                raise UsageError(f"partition {partition.name} allows no job to run so long")
            return here
        except UsageError as error:
            wrong = wrong or error
    assert wrong is not None
    raise wrong


class _Resizing(NamedTuple):
    """GPUs that a job may have, and what it was tuned for; ``filled_in``: its partition says so, not the job."""

    resizable: bool
    sizes: tuple[int, ...]
    base: int | None
    rules: ResizeRules
    filled_in: bool = False


def _resizing(request: SubmitRequest, tasks: TaskRequest, inventory: Inventory) -> _Resizing:
    """As asked; what was left out as the partition says."""
    try:
        place = ResourceRequest(
            partition=request.partition, flavor=request.flavor, nodelist=options.names(request.nodelist)
        )
        partition = partition_of(place, inventory)
    except UsageError:  # `size` says so, after what is more basic
        partition = None
    rules = partition.resizable if partition is not None else ResizeRules()
    shaped = request.flavor is not None or request.nodes is not None or request.gpus_per_node is not None
    shaped |= request.exclusive or request.max_spread is not None or request.share is not None
    shaped |= tasks != TaskRequest()
    by_default = request.resizable is None and rules.default and not shaped
    sizes = options.sizes(request.gpus, request.sizes, bool(request.resizable) or by_default)
    if by_default and len(sizes) < 2 and not (sizes and sizes[0] > 0 and rules.allow(sizes[0])):
        by_default = False
    if not request.resizable and not by_default:
        return _Resizing(False, sizes, options.base_size(sizes, request.base), rules)
    if len(sizes) > 1 or (sizes and request.resizable):
        return _Resizing(True, sizes, options.base_size(sizes, request.base), rules)
    if partition is None or (rules.most is None and not rules.default):
        raise UsageError("--resizable: no sizes given", "--gpus 1-8, or --sizes 1,2,4,8")
    largest = partition.largest_flavor
    has = largest.gpus if largest is not None else sum(node.gpus for node in partition.nodes)
    most = min(has, has if rules.most is None else rules.most, rules.least + MAX_SIZES - 1)
    base = request.base if request.base is not None or not sizes else sizes[0]
    filled = tuple(sorted({*range(rules.least, most + 1), *sizes}))
    return _Resizing(True, filled, options.base_size(filled, base), rules, filled_in=True)


def _elastic(request: SubmitRequest, may: _Resizing, asked: ResourceRequest, base: SizedRequest) -> Elastic:
    cooldown_s = options.duration("--cooldown", request.cooldown)
    batch = options.batch(request.batch) or may.rules.batch
    return elastic_of(base, asked, may.sizes, batch, may.rules.cooldown_s if cooldown_s is None else cooldown_s)


def _without_impossible(spec: JobSpec, partition: Partition) -> JobSpec:
    """Of sizes that nobody named, those that its nodes can give."""
    assert spec.elastic is not None
    nodes = usable_nodes(partition, spec.nodelist, spec.exclude, spec.gpu_types)
    sizes = tuple(g for g in spec.elastic.sizes if g == spec.elastic.base_gpus or shape_on(nodes, spec, g) is not None)
    return msgspec.structs.replace(spec, elastic=msgspec.structs.replace(spec.elastic, sizes=sizes))


def _placement(
    request: SubmitRequest, tasks: TaskRequest, sized: SizedRequest, resizable: bool, inventory: Inventory
) -> dict[str, Any]:
    """How far apart its nodes may be, and how long it waits for near ones: as asked, else as the partition says.

    Where the job says how far, and not on how many nodes, it may be spread over more than the fewest.
    """
    partition = known_partition(inventory, sized.partition)
    spread, wait = options.max_spread(request.max_spread), options.wait_for_placement(request.wait_for_placement)
    gpus, most = sized.nodes * sized.gpus_per_node, None
    shaped = request.nodes or request.gpus_per_node or request.exclusive or tasks != TaskRequest()
    if spread in ("rack", "any") and not (shaped or resizable):
        most = min(gpus, len(partition.nodes), MAX_SIZES)
    return {
        "max_spread": spread or ("" if resizable else partition.placement.max_spread),
        "max_nodes": most if most is not None and most > 1 else None,
        "placement_wait_s": partition.placement.wait_s if wait is None else wait,
        "exclusive": request.exclusive,
    }


def _resources(request: SubmitRequest, tasks: TaskRequest, may: _Resizing) -> ResourceRequest:
    if request.exclusive and request.flavor is not None:
        raise UsageError(f"--flavor {request.flavor} and --exclusive cannot be combined", "use one of the two")
    cores = options.cores(request.cpus, may.resizable)
    memory = options.memory(request.mem, may.resizable)
    said = cores is not None or memory is not None or may.base is not None or request.gpus_per_node is not None
    if request.exclusive and not said and tasks == TaskRequest():
        cores = memory = request.nodes or 1
    return ResourceRequest(
        partition=request.partition,
        flavor=request.flavor,
        nodes=request.nodes,
        gpus=may.base,
        gpus_per_node=request.gpus_per_node,
        cores=cores if isinstance(cores, int) else None,
        core_range=cores if isinstance(cores, tuple) else None,
        memory_mib=memory if isinstance(memory, int) else None,
        memory_range=memory if isinstance(memory, tuple) else None,
        time_limit_s=options.duration("--time", request.time),
        nodelist=options.names(request.nodelist),
        exclude=options.names(request.exclude),
        gpu_types=options.names(request.gpu_type),
    )


def _check_reservation(client: Client, spec: JobSpec, now: float) -> None:
    from gpusched.client.reservations import known_reservations
    from gpusched.config.reservations import check_use

    check_use(spec, user_name(os.getuid()), known_reservations(client, now), client.inventory)


def _tasks(request: SubmitRequest) -> TaskRequest:
    node = request.mem_per_node
    return TaskRequest(
        ntasks=request.ntasks,
        ntasks_per_node=request.ntasks_per_node,
        cpus_per_task=request.cpus_per_task,
        cpus_per_gpu=request.cpus_per_gpu,
        gpus_per_task=request.gpus_per_task,
        mem_per_node_mib=0 if node == "0" else options.memory_of("--mem-per-node", node),
        mem_per_gpu_mib=options.memory_of("--mem-per-gpu", request.mem_per_gpu),
        mem_per_cpu_mib=options.memory_of("--mem-per-cpu", request.mem_per_cpu),
    )


def _workdir(request: SubmitRequest, mounts: tuple[Mount, ...], cwd: str, partition: Partition | None) -> str | None:
    """Scripts start in the folder they are submitted from, as in Slurm, wherever the job has it."""
    if request.script is None or partition is None:
        return None
    nodes = usable_nodes(
        partition, options.names(request.nodelist), options.names(request.exclude), options.names(request.gpu_type)
    )
    mounted = any(cwd == m.target or cwd.startswith(m.target.rstrip("/") + "/") for m in mounts)
    return cwd if mounted or all_bare({node.runtime for node in nodes}) else None


def _array_shape(indices: tuple[int, ...] | None) -> tuple[int, ...]:
    if not indices:
        return ()
    steps = {later - index for index, later in pairwise(indices)}
    return len(indices), indices[0], indices[-1], steps.pop() if len(steps) == 1 else 1


def _default_name(request: SubmitRequest) -> str:
    """The program's name, else the image's."""
    source = request.command[0] if request.command else (request.image or "").partition(":")[0]
    name = source.rstrip("/").rpartition("/")[2][:MAX_NAME]
    return name if name and name.isprintable() else "job"


def _preemptible(asked: bool | None, partition: Partition | None) -> bool:
    """What was given, else the partition's default."""
    return asked if asked is not None else partition is not None and partition.preemptible


def folder() -> str:
    """The folder that this is called in.

    Raises:
        UsageError: It is there no more.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(f"cannot determine the current directory: {error.strerror}", "use absolute paths") from None


def _whole_id(client: Client, text: str) -> str:
    from gpusched.client.resolve import Resolver

    return Resolver(client).target(text).id
