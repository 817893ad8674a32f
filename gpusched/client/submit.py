"""Turn the options of ``submit`` into a checked spec and one command file in the inbox."""

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
    """The options of ``submit`` as typed; ``script``: the text of a job script, with ``command`` as its arguments."""

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
    base_gpus: int | None = None
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
    placement_wait: str | None = None
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
    """A Python function in place of a command: its name, its text, and for an array one text per task."""

    function: str
    text: str
    of_tasks: tuple[str, ...] = ()


class Submitter(NamedTuple):
    """Who submits.

    ``folder``: returns the submission folder, or raises; ``environ``: values of variables and secrets given by name;
    ``whole_id``: expands ids of jobs as typed.
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
    """Parse and check everything; return the command to deliver, without its id.

    ``program``: placed in the job's folder for ``command`` to run. ``environ``: see `Submitter`.

    Raises:
        UsageError: The first error, in one line; nothing was queued.
    """
    submitter = Submitter(user_name(os.getuid()), current_folder, environ, lambda text: _whole_id(client, text))
    prepared = build_submission(client.inventory, request, submitter, program)
    _check_queued(client, prepared.spec, submitter.user, len(prepared.array) if prepared.array else 1)
    if prepared.spec.reservation:
        _check_reservation(client, prepared.spec, prepared.time)
    return prepared


def build_submission(
    inventory: Inventory, request: SubmitRequest, submitter: Submitter, program: FunctionProgram | None = None
) -> Submit:
    """Parse and check everything that needs only the inventory; see `prepare`."""
    now = time.time()
    request = _in_one_partition(request, inventory)
    shape = _request_parts(request, inventory)
    tasks, resize, resources, sized, tasks_per_node = shape
    array, max_running = options.array(request.array)
    if links := options.chain(request.chain, request.array):  # an array that runs one task at a time
        array, max_running = tuple(range(1, links + 1)), 1
    signal, signal_before_s, signal_batch = options.signal(request.signal)
    if signal_batch and request.script is None:
        raise UsageError("--signal B: needs a job script", "omit B:")
    secrets = options.secrets(request.secret, submitter.environ)
    cwd = submitter.folder() if request.mount or request.output or request.error or request.script is not None else "/"
    mounts = options.mounts(request.mount, cwd)
    partition = inventory.partition(sized.partition)
    spec = JobSpec(
        name=request.name if request.name is not None else _default_name(request),
        **msgspec.structs.asdict(sized),
        image=request.image,
        command=request.command,
        workdir=(
            _workdir(request.script, mounts, cwd, partition, resources) if request.workdir is None else request.workdir
        ),
        env=options.environment(request.env, submitter.environ),
        secret_names=tuple(secrets),
        mounts=mounts,
        output=options.output_path("--output", request.output, cwd),
        error=options.output_path("--error", request.error, cwd),
        append=options.appends(request.open_mode),
        dependencies=(
            *options.dependencies(request.dependency, submitter.whole_id),
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
        nodelist=resources.nodelist,
        exclude=resources.exclude,
        gpu_types=resources.gpu_types,
        comment=request.comment,
        elastic=_elastic(request, resize, resources, sized) if resize.resizable else None,
        **_placement(request, tasks, sized, resize.resizable, inventory),
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
    if resize.filled_in:
        spec = _drop_impossible_sizes(spec, known_partition(inventory, spec.partition))
    max_time_s = max_time_limit(submitter.user, spec.group, spec.qos, inventory)
    # Only a default limit is shortened to what the quotas allow; a requested one that exceeds them is refused.
    if request.time is None and max_time_s is not None and max_time_s < spec.time_limit_s:
        spec = msgspec.structs.replace(spec, time_limit_s=max_time_s)
    validate_spec(spec, inventory)
    spec = with_group_and_class(spec, submitter.user, inventory)
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
    """Queue the job durably (it is on disk on return); return its id (the array's, for an array)."""
    now = time.time()
    return deliver_submit(
        client.deliverable_inbox(),
        lambda job_id: msgspec.structs.replace(prepared, id=job_id, time=now),
        lambda: ids.mint(time.time()),
    )


def _check_queued(client: Client, spec: JobSpec, user: str, count: int) -> None:
    """Check that this many more jobs may be queued; the store is opened only if there are such limits."""
    quotas = client.inventory.quotas
    if any(rule.unit == "queued" for rule in quotas.rules(user, spec.group, spec.qos)) and client.reader is not None:
        from gpusched.queue.quotas import PendingJobLimits

        PendingJobLimits(client.reader, quotas).check(user, spec, count)


class _RequestParts(NamedTuple):
    """The request, and the equal parts that it makes in one partition."""

    tasks: TaskRequest
    resize: _ResizeRequest
    resources: ResourceRequest
    sized: SizedRequest
    tasks_per_node: int


def _request_parts(request: SubmitRequest, inventory: Inventory) -> _RequestParts:
    tasks = _tasks(request)
    resize = _resize_request(request, tasks, inventory)
    resources = _resources(request, tasks, resize)
    if tasks == TaskRequest():
        sized, tasks_per_node = size(resources, inventory), 1
    elif resize.resizable:
        raise UsageError("a resizable job has one task per node", "omit --resizable, or the task options")
    else:
        sized, tasks_per_node = size_by_tasks(resources, tasks, inventory)
    if request.exclusive and not resize.resizable:
        sized = whole_nodes(sized, resources, inventory)
    return _RequestParts(tasks, resize, resources, sized, tasks_per_node)


def _in_one_partition(request: SubmitRequest, inventory: Inventory) -> SubmitRequest:
    """Return the request in the first of its partitions whose nodes, when free, can hold the job.

    Raises:
        UsageError: There is no such partition, or none can hold the job; the error is that of the first.
    """
    names = [name.strip() for name in (request.partition or "").split(",")]
    if len(names) < 2:
        return request
    first_error = None
    for partition in [known_partition(inventory, name) for name in names]:
        candidate = msgspec.structs.replace(request, partition=partition.name)
        try:
            parts = _request_parts(candidate, inventory)
            sized = parts.sized
            needs = (sized.gpus_per_node, sized.cores_per_node, sized.memory_mib_per_node)
            held = nodes_that_hold(usable_nodes(partition, parts.resources), *needs)
            if held < sized.nodes:
                raise UsageError(f"partition {partition.name} has no {sized.nodes} nodes that can hold the job")
            max_time_s = max_time(partition)
            if max_time_s is not None and sized.time_limit_s > max_time_s:
                raise UsageError(f"partition {partition.name} allows no job to run so long")
            return candidate
        except UsageError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


class _ResizeRequest(NamedTuple):
    """The sizes of a job and the one it was tuned for; ``filled_in``: they come from the partition's rules."""

    resizable: bool
    sizes: tuple[int, ...]
    base: int | None
    rules: ResizeRules
    filled_in: bool = False


def _resize_request(request: SubmitRequest, tasks: TaskRequest, inventory: Inventory) -> _ResizeRequest:
    """Return the sizes as requested; the partition's rules fill in what was left out."""
    try:
        location = ResourceRequest(
            partition=request.partition, flavor=request.flavor, nodelist=options.names(request.nodelist)
        )
        partition = partition_of(location, inventory)
    except UsageError:  # `size` raises it later, after more basic errors
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
        return _ResizeRequest(False, sizes, options.base_size(sizes, request.base_gpus), rules)
    if len(sizes) > 1 or (sizes and request.resizable):
        return _ResizeRequest(True, sizes, options.base_size(sizes, request.base_gpus), rules)
    if partition is None or (rules.most is None and not rules.default):
        raise UsageError("--resizable: no sizes given", "--gpus 1-8, or --sizes 1,2,4,8")
    largest = partition.largest_flavor
    available = largest.gpus if largest is not None else sum(node.gpus for node in partition.nodes)
    largest_size = min(available, available if rules.most is None else rules.most, rules.least + MAX_SIZES - 1)
    base = request.base_gpus if request.base_gpus is not None or not sizes else sizes[0]
    sizes_filled_in = tuple(sorted({*range(rules.least, largest_size + 1), *sizes}))
    return _ResizeRequest(True, sizes_filled_in, options.base_size(sizes_filled_in, base), rules, filled_in=True)


def _elastic(request: SubmitRequest, resize: _ResizeRequest, resources: ResourceRequest, base: SizedRequest) -> Elastic:
    cooldown_s = options.duration("--cooldown", request.cooldown)
    cooldown_s = resize.rules.cooldown_s if cooldown_s is None else cooldown_s
    return elastic_of(base, resources, resize.sizes, options.batch(request.batch) or resize.rules.batch, cooldown_s)


def _drop_impossible_sizes(spec: JobSpec, partition: Partition) -> JobSpec:
    """Drop filled-in sizes that the partition's nodes cannot provide."""
    assert spec.elastic is not None
    nodes = usable_nodes(partition, spec)
    sizes = tuple(g for g in spec.elastic.sizes if g == spec.elastic.base_gpus or shape_on(nodes, spec, g) is not None)
    return msgspec.structs.replace(spec, elastic=msgspec.structs.replace(spec.elastic, sizes=sizes))


def _placement(
    request: SubmitRequest, tasks: TaskRequest, sized: SizedRequest, resizable: bool, inventory: Inventory
) -> dict[str, Any]:
    """Return the spread and the time to wait for a close placement: as requested, else the partition's.

    With a requested spread and no number of nodes, the job may use more than the fewest nodes.
    """
    partition = known_partition(inventory, sized.partition)
    spread, wait = options.max_spread(request.max_spread), options.placement_wait(request.placement_wait)
    gpus, max_nodes = sized.nodes * sized.gpus_per_node, None
    shaped = request.nodes or request.gpus_per_node or request.exclusive or tasks != TaskRequest()
    if spread in ("rack", "any") and not (shaped or resizable):
        max_nodes = min(gpus, len(partition.nodes), MAX_SIZES)
    return {
        "max_spread": spread or ("" if resizable else partition.placement.max_spread),
        "max_nodes": max_nodes if max_nodes is not None and max_nodes > 1 else None,
        "placement_wait_s": partition.placement.placement_wait_s if wait is None else wait,
        "exclusive": request.exclusive,
    }


def _resources(request: SubmitRequest, tasks: TaskRequest, resize: _ResizeRequest) -> ResourceRequest:
    if request.exclusive and request.flavor is not None:
        raise UsageError(f"--flavor {request.flavor} and --exclusive cannot be combined", "use one of the two")
    cores = options.cores(request.cpus, resize.resizable)
    memory = options.memory(request.mem, resize.resizable)
    is_sized = cores is not None or memory is not None or resize.base is not None or request.gpus_per_node is not None
    if request.exclusive and not is_sized and tasks == TaskRequest():
        cores = memory = request.nodes or 1
    return ResourceRequest(
        partition=request.partition,
        flavor=request.flavor,
        nodes=request.nodes,
        gpus=resize.base,
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


def _workdir(
    script: str | None, mounts: tuple[Mount, ...], cwd: str, partition: Partition | None, resources: ResourceRequest
) -> str | None:
    """Return the submission folder for scripts, as in Slurm, if the job can see it."""
    if script is None or partition is None:
        return None
    nodes = usable_nodes(partition, resources)
    mounted = any(cwd == m.target or cwd.startswith(m.target.rstrip("/") + "/") for m in mounts)
    return cwd if mounted or all_bare({node.runtime for node in nodes}) else None


def _array_shape(indices: tuple[int, ...] | None) -> tuple[int, ...]:
    if not indices:
        return ()
    steps = {later - index for index, later in pairwise(indices)}
    return len(indices), indices[0], indices[-1], steps.pop() if len(steps) == 1 else 1


def _default_name(request: SubmitRequest) -> str:
    """Return the program's name, else the image's."""
    source = request.command[0] if request.command else (request.image or "").partition(":")[0]
    name = source.rstrip("/").rpartition("/")[2][:MAX_NAME]
    return name if name and name.isprintable() else "job"


def _preemptible(requested: bool | None, partition: Partition | None) -> bool:
    """Return the requested value, else the partition's default."""
    return requested if requested is not None else partition is not None and partition.preemptible


def current_folder() -> str:
    """Return the current folder.

    Raises:
        UsageError: It no longer exists.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError(f"cannot determine the current directory: {error.strerror}", "use absolute paths") from None


def _whole_id(client: Client, text: str) -> str:
    from gpusched.client.resolve import Resolver

    return Resolver(client).target(text).id
