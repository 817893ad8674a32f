"""Turn the options of ``submit``, parsed, into sizes, these into a checked spec, and that into one command file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from gpusched.client import options
from gpusched.client.context import Client
from gpusched.client.request import SubmitRequest
from gpusched.client.sizing import ResourceRequest, SizedRequest, partition_of, size, whole_nodes
from gpusched.client.tasks import size_by_tasks, task_options
from gpusched.config.accounts import max_time_limit, with_group_and_class
from gpusched.config.plugins import all_bare
from gpusched.config.users import user_name
from gpusched.config.validate import (
    MAX_NAME,
    MAX_SIZES,
    check_slices_exist,
    known_partition,
    max_time,
    node_kinds,
    nodes_that_hold,
    shape_on,
    usable_nodes,
    validate_spec,
)
from gpusched.errors import UsageError
from gpusched.model import ids
from gpusched.model.commands import Submit
from gpusched.model.jobs import Dependency, DependencyKind, Elastic, JobSpec, Mount
from gpusched.model.notices import kinds_of
from gpusched.model.resources import Inventory, Partition, ResizeRules
from gpusched.model.slicetables import whole_gpus
from gpusched.queue.inbox import MAX_COMMAND_BYTES, deliver_submit

_AS_REQUESTED = (  # fields that the request and the spec have alike
    "image", "command", "priority", "nice", "hold", "requeue", "nodelist", "exclude", "comment", "exclusive", "share",
    "group", "qos", "reservation", "mail", "script",
)  # fmt: skip


class FunctionProgram(NamedTuple):
    """A Python function in place of a command: its name, its text, and for an array one text per task."""

    function: str
    text: str
    of_tasks: tuple[str, ...] = ()


class Submitter(NamedTuple):
    """The submitting user.

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
    """Size and check everything; return the command to deliver, without its id.

    ``program``: placed in the job's folder for ``command`` to run. ``environ``: see `Submitter`.

    Raises:
        UsageError: The first error, in one line; nothing was queued.
    """
    submitter = Submitter(user_name(os.getuid()), current_folder, environ, lambda text: _whole_id(client, text))
    prepared = build_submission(client.inventory, request, submitter, program)
    if not os.getuid() and client.is_shared and not client.inventory.settings.root_jobs:
        raise UsageError("jobs of root need settings.root_jobs in inventory.yaml", "submit as another user")
    _check_queued(client, prepared.spec, submitter.user, len(prepared.array) if prepared.array else 1)
    if prepared.spec.reservation:
        _check_reservation(client, prepared.spec, prepared.time)
    if prepared.spec.profile and client.reader is not None:
        check_slices_exist(prepared.spec, client.inventory, client.reader.node_readings())
    return prepared


def build_submission(
    inventory: Inventory, request: SubmitRequest, submitter: Submitter, program: FunctionProgram | None = None
) -> Submit:
    """Size and check everything that needs only the inventory; see `prepare`."""
    now = time.time()
    parts = _parts(request, inventory)
    resize, sized = parts.resize, parts.sized
    array = options.chain(request.chain, request.array)
    signal = request.signal or options.WarningSignal()
    if signal.batch and request.script is None:
        raise UsageError("--signal B: needs a job script", "omit B:")
    if request.notify and not request.mail:
        raise UsageError("--notify: no mail address", "add --mail ADDRESS")
    secrets = options.secrets(request.secret, submitter.environ)
    cwd = submitter.folder() if request.mount or request.output or request.error or request.script is not None else "/"
    mounts = options.mounts(request.mount, cwd)
    partition = known_partition(inventory, sized.partition)
    spec = JobSpec(
        **{name: getattr(request, name) for name in _AS_REQUESTED},
        **msgspec.structs.asdict(sized),
        **_placement(request, parts, partition),
        name=request.name if request.name is not None else _default_name(request),
        workdir=request.workdir if request.workdir is not None else _workdir(request, mounts, cwd, parts, partition),
        env=options.environment(request.env, submitter.environ),
        secret_names=tuple(secrets),
        mounts=mounts,
        output=options.output_path("--output", request.output, cwd),
        error=options.output_path("--error", request.error, cwd),
        append=request.open_mode == "append",
        dependencies=_dependencies(request, submitter),
        begin_time=request.begin,
        preemptible=request.preemptible if request.preemptible is not None else partition.preemptible,
        signal=signal.name,
        signal_before_s=signal.before_s,
        signal_batch=signal.batch,
        gpu_types=request.gpu_type,
        elastic=_elastic(request, parts) if resize.resizable else None,
        gpu_memory_mib=request.gpu_mem,
        notify=kinds_of(request.notify),
        array_shape=_array_shape(array),
        submit_dir=cwd if request.script is not None else "",
        tasks_per_node=parts.tasks_per_node,
        gpus_per_task=request.gpus_per_task or 0,
        memory_mib_per_cpu=request.mem_per_cpu or 0,
        slurm_env=request.slurm_env if request.slurm_env is not None else partition.slurm_env,
        function=program.function if program is not None else "",
    )
    if spec.elastic is None:
        _check_not_resizable(request)
    elif request.hot:
        spec = _with_hot_ranks(request, spec, partition)
    if resize.filled_in:
        spec = _drop_impossible_sizes(spec, partition)
    max_time_s = max_time_limit(submitter.user, spec.group, spec.qos, inventory)
    # Only a default limit is shortened to what the quotas allow; a requested one that exceeds them is refused.
    if request.time is None and max_time_s is not None and max_time_s < spec.time_limit_s:
        spec = msgspec.structs.replace(spec, time_limit_s=max_time_s)
    validate_spec(spec, inventory)
    spec = with_group_and_class(spec, submitter.user, inventory)
    prepared = Submit(
        time=now, id="0" * ids.ID_LENGTH, spec=spec, secrets=secrets,
        array=array.indices if array else None, max_running=array.max_running if array else None,
        program=program.text if program is not None else "",
        task_programs=program.of_tasks if program is not None else (),
    )  # fmt: skip
    length = len(msgspec.json.encode(prepared))
    if length > MAX_COMMAND_BYTES:
        hint = "use a file" if program is None else "pass file paths that the job can read, not file contents"
        raise UsageError(f"the request has {length} bytes; the maximum is {MAX_COMMAND_BYTES}", hint)
    return prepared


def submit(client: Client, prepared: Submit, note: Callable[[str], object] = str) -> str:
    """Queue the job durably (it is on disk on return); return its id (the array's, for an array).

    ``note``: called with the id before the job is queued: with it, the job can be found after a crash.
    """
    now = time.time()

    def mint() -> str:
        note(job_id := ids.mint(time.time()))
        return job_id

    return deliver_submit(
        client.deliverable_inbox(),
        lambda job_id: msgspec.structs.replace(prepared, id=job_id, time=now),
        mint,
    )


def _check_queued(client: Client, spec: JobSpec, user: str, count: int) -> None:
    """Check that this many more jobs may be queued; the store is opened only if there are such limits."""
    quotas = client.inventory.quotas
    if any(rule.unit == "queued" for rule in quotas.rules(user, spec.group, spec.qos)) and client.reader is not None:
        from gpusched.queue.quotas import PendingJobLimits

        PendingJobLimits(client.reader, quotas).check(user, spec, count)


class _Parts(NamedTuple):
    """What a request comes to in one partition: equal parts."""

    resize: _ResizeRequest
    resources: ResourceRequest
    sized: SizedRequest
    tasks_per_node: int

    @property
    def needs(self) -> tuple[int, int, int]:
        """Return the GPUs, or slices, cores and MiB of a part."""
        return self.sized.gpus_per_node, self.sized.cores_per_node, self.sized.memory_mib_per_node


def _parts(request: SubmitRequest, inventory: Inventory) -> _Parts:
    """Return the parts in the first of the requested partitions that can hold the job when its nodes are free.

    Raises:
        UsageError: There is no such partition, or none can hold the job; the error is that of the first.
    """
    names = [name.strip() for name in (request.partition or "").split(",")]
    if len(names) < 2:
        return _parts_in(request.partition, request, inventory)
    first_error = None
    for partition in [known_partition(inventory, name) for name in names]:
        try:
            parts = _parts_in(partition.name, request, inventory)
            count, max_time_s = parts.sized.nodes, max_time(partition)
            gpus = whole_gpus(parts.sized.gpus_per_node, parts.sized.profile)
            if nodes_that_hold(usable_nodes(partition, parts.resources), gpus, *parts.needs[1:]) < count:
                raise UsageError(f"partition {partition.name} has no {count} nodes that can hold the job")
            if max_time_s is not None and parts.sized.time_limit_s > max_time_s:
                raise UsageError(f"partition {partition.name} allows no job to run so long")
            return parts
        except UsageError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def _parts_in(partition: str | None, request: SubmitRequest, inventory: Inventory) -> _Parts:
    resize = _resize_request(partition, request, inventory)
    resources = _resources(partition, request, resize)
    if not task_options(request):
        sized, tasks_per_node = size(resources, inventory), 1
    elif resize.resizable:
        raise UsageError("a resizable job has one task per node", "omit --resizable, or the task options")
    else:
        sized, tasks_per_node = size_by_tasks(resources, request, inventory)
    if request.exclusive and not resize.resizable:
        sized = whole_nodes(sized, resources, inventory)
    return _Parts(resize, resources, sized, tasks_per_node)


class _ResizeRequest(NamedTuple):
    """The sizes of a job and the one it was tuned for; ``filled_in``: they come from the partition's rules."""

    resizable: bool
    sizes: tuple[int, ...]
    base: int | None
    rules: ResizeRules
    filled_in: bool = False


def _resize_request(named: str | None, request: SubmitRequest, inventory: Inventory) -> _ResizeRequest:
    """Return the sizes as requested; the partition's rules fill in what was left out."""
    try:
        location = ResourceRequest(partition=named, flavor=request.flavor, nodelist=request.nodelist)
        partition = partition_of(location, inventory)
    except UsageError:  # `size` raises it later, after more basic errors
        partition = None
    rules = partition.resizable if partition is not None else ResizeRules()
    shaped = request.flavor is not None or request.nodes is not None or request.gpus_per_node is not None
    shaped |= request.exclusive or request.max_spread != "" or request.share != "" or request.mig != ""
    shaped |= bool(task_options(request))
    by_default = request.resizable is None and rules.default and not shaped
    sizes = options.either_sizes(request.gpus, request.sizes, bool(request.resizable) or by_default)
    if by_default and len(sizes) < 2 and not (sizes and sizes[0] > 0 and rules.allow(sizes[0])):
        by_default = False
    if not request.resizable and not by_default:
        return _ResizeRequest(False, sizes, options.base_size(sizes, request.base_gpus), rules)
    if len(sizes) > 1 or (sizes and request.resizable):
        return _ResizeRequest(True, sizes, options.base_size(sizes, request.base_gpus), rules)
    if partition is None or (rules.most is None and not rules.default):
        raise UsageError("--resizable: no sizes given", "--gpus 1-8, or --sizes 1,2,4,8")
    largest = partition.largest_flavor
    available = int(largest.gpus_counted) if largest is not None else sum(node.gpus for node in partition.nodes)
    largest_size = min(available, available if rules.most is None else rules.most, rules.least + MAX_SIZES - 1)
    base = request.base_gpus if request.base_gpus is not None or not sizes else sizes[0]
    sizes_filled_in = tuple(sorted({*range(rules.least, largest_size + 1), *sizes}))
    return _ResizeRequest(True, sizes_filled_in, options.base_size(sizes_filled_in, base), rules, filled_in=True)


def _elastic(request: SubmitRequest, parts: _Parts) -> Elastic:
    rules, (gpus, cores, memory_mib) = parts.resize.rules, (parts.sized.nodes * amount for amount in parts.needs)
    return Elastic(
        sizes=parts.resize.sizes,
        base_gpus=gpus,
        base_cores=cores,
        base_memory_mib=memory_mib,
        cores=parts.resources.core_range,
        memory_mib=parts.resources.memory_range,
        batch=request.batch or rules.batch,
        cooldown_s=rules.cooldown_s if request.cooldown is None else request.cooldown,
    )


def _check_not_resizable(request: SubmitRequest) -> None:
    for option, given in (("--hot", request.hot), ("--batch", request.batch), ("--cooldown", request.cooldown)):
        if given:
            raise UsageError(f"{option}: the job is not resizable", "add --resizable")


def _with_hot_ranks(request: SubmitRequest, spec: JobSpec, partition: Partition) -> JobSpec:
    """Return a resizable job's request in equal ranks: of ``--gpus-per-node``, else of the least size's parts.

    Of a range of GPUs it has the sizes that are whole ranks; a list of sizes is left to the validation.
    """
    assert spec.elastic is not None
    if spec.elastic.sizes[0] < 1:
        return spec  # the validation refuses it
    least = shape_on(node_kinds(usable_nodes(partition, spec)), spec, spec.elastic.sizes[0])
    rank_gpus = request.gpus_per_node or (least.gpus_per_node if least is not None else spec.elastic.sizes[0])
    sizes = tuple(gpus for gpus in spec.elastic.sizes if request.sizes is not None or gpus % rank_gpus == 0)
    spec = msgspec.structs.replace(
        spec, elastic=msgspec.structs.replace(spec.elastic, sizes=sizes, rank_gpus=rank_gpus)
    )
    return spec if spec.gpus % rank_gpus else spec.at_size(spec.gpus, spec.gpus // rank_gpus)


def _drop_impossible_sizes(spec: JobSpec, partition: Partition) -> JobSpec:
    """Drop filled-in sizes that the partition's nodes cannot provide."""
    assert spec.elastic is not None
    kinds = node_kinds(usable_nodes(partition, spec))
    sizes = tuple(g for g in spec.elastic.sizes if g == spec.elastic.base_gpus or shape_on(kinds, spec, g) is not None)
    return msgspec.structs.replace(spec, elastic=msgspec.structs.replace(spec.elastic, sizes=sizes))


def _placement(request: SubmitRequest, parts: _Parts, partition: Partition) -> dict[str, Any]:
    """Return the spread and the time to wait for a close placement: as requested, else the partition's.

    With a requested spread and no number of nodes, the job may use more than the fewest nodes.
    """
    spread, wait_s, resizable = request.max_spread, request.placement_wait, parts.resize.resizable
    gpus, max_nodes = parts.sized.nodes * parts.sized.gpus_per_node, None
    shaped = request.nodes or request.gpus_per_node or request.exclusive or task_options(request)
    if spread in ("rack", "any") and not (shaped or resizable):
        max_nodes = min(gpus, len(partition.nodes), MAX_SIZES)
    return {
        "max_spread": spread or ("" if resizable else partition.placement.max_spread),
        "max_nodes": max_nodes if max_nodes is not None and max_nodes > 1 else None,
        "placement_wait_s": partition.placement.placement_wait_s if wait_s is None else wait_s,
    }


def _resources(partition: str | None, request: SubmitRequest, resize: _ResizeRequest) -> ResourceRequest:
    if request.exclusive and request.flavor is not None:
        raise UsageError(f"--flavor {request.flavor} and --exclusive cannot be combined", "use one of the two")
    cores, core_range = options.split_amount("--cpus", request.cpus, resize.resizable)
    memory_mib, memory_range = options.split_amount("--mem", request.mem, resize.resizable)
    amounts = (request.cpus, request.mem, resize.base, request.gpus_per_node)
    if request.exclusive and all(amount is None for amount in amounts) and not task_options(request):
        cores = memory_mib = request.nodes or 1
    return ResourceRequest(
        partition=partition,
        flavor=request.flavor,
        nodes=request.nodes,
        gpus=resize.base,
        gpus_per_node=request.gpus_per_node,
        cores=cores,
        core_range=core_range,
        memory_mib=memory_mib,
        memory_range=memory_range,
        time_limit_s=request.time,
        nodelist=request.nodelist,
        exclude=request.exclude,
        gpu_types=request.gpu_type,
        profile=request.mig,
    )


def _dependencies(request: SubmitRequest, submitter: Submitter) -> tuple[Dependency, ...]:
    """Return the dependencies with whole ids, and that of a chain's tasks on each other."""
    found = [d if not d.job_id else Dependency(d.kind, submitter.whole_id(d.job_id)) for d in request.dependency]
    return (*found, *([Dependency(DependencyKind.CHAIN)] if request.chain is not None else []))


def _check_reservation(client: Client, spec: JobSpec, now: float) -> None:
    from gpusched.client.reservations import known_reservations
    from gpusched.config.reservations import check_use

    check_use(spec, user_name(os.getuid()), known_reservations(client, now), client.inventory)


def _workdir(
    request: SubmitRequest, mounts: tuple[Mount, ...], cwd: str, parts: _Parts, partition: Partition
) -> str | None:
    """Return the submission folder for scripts, as in Slurm, if the job can see it."""
    if request.script is None:
        return None
    nodes = usable_nodes(partition, parts.resources)
    mounted = any(cwd == m.target or cwd.startswith(m.target.rstrip("/") + "/") for m in mounts)
    return cwd if mounted or all_bare({node.runtime for node in nodes}) else None


def _array_shape(array: options.ArrayTasks | None) -> tuple[int, ...]:
    if array is None:
        return ()
    indices = array.indices
    steps = {later - index for index, later in pairwise(indices)}
    return len(indices), indices[0], indices[-1], steps.pop() if len(steps) == 1 else 1


def _default_name(request: SubmitRequest) -> str:
    """Return the program's name, else the image's."""
    source = request.command[0] if request.command else (request.image or "").partition(":")[0]
    name = source.rstrip("/").rpartition("/")[2][:MAX_NAME]
    return name if name and name.isprintable() else "job"


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
