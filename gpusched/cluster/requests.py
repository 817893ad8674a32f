"""Builds each rank's launch request from an allocated job: environment, host file, output path. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from gpusched.errors import UsageError
from gpusched.model.images import image_error
from gpusched.model.jobs import JobRecord, NodeAllocation, container_name
from gpusched.model.outputs import expand_error, expand_output
from gpusched.model.resources import Inventory, Node, RuntimeName, SharingSettings
from gpusched.model.slices import MigSlice, gpu_label
from gpusched.nodes.batch.spool import StepNode, StepSettings, spool_files, step_ports
from gpusched.nodes.runtimes.base import LaunchRequest

MASTER_PORTS = range(20000, 30000)
_OWN_DEVICE_NUMBERS = frozenset[str]({RuntimeName.PODMAN, RuntimeName.DOCKER})


def launch_request(
    job: JobRecord,
    part: NodeAllocation,
    inventory: Inventory,
    cluster_id: str,
    *,
    secrets: Mapping[str, str],
    program: str = "",
    run_as: tuple[int, int] | None,
    allow_root: bool = True,
    mount_anything: bool,
    steps_key: str | None = None,
    joins: bool = False,
    slices: Sequence[MigSlice] = (),
    record: bytes = b"",
) -> LaunchRequest:
    """Return the launch request of one rank of an allocated job, with its attempt and master port.

    ``run_as`` is the submitter's uid and gid if not the controller's; ``mount_anything`` lifts ``allowed_mounts`` for
    him; ``allow_root``: see `LaunchRequest`. ``program``: of a Python function; ``steps_key``: see `spool_files`.
    ``joins``: it joins a running job, and so waits for no other rank. ``slices``: of the rank, as its node has them;
    none if it has whole GPUs. ``record``: see `LaunchRequest`.

    Raises:
        UsageError: The inventory does not allow the job's image on this node (any more).
    """
    assert job.allocation is not None
    node, spec, settings = _node(inventory, part.node), job.spec, inventory.settings
    if spec.image is not None and (error := image_error(spec.image, [node.runtime], settings.image_transports)):
        raise UsageError(error)
    partition = inventory.partition(spec.partition)
    gang = len(job.allocation.parts) > 1
    mps = _mps(job, node)
    session: Literal["", "terminal", "pipes"] = ""
    if spec.session is not None and part.rank == 0:
        session = "terminal" if spec.pty else "pipes"
    return LaunchRequest(
        name=container_name(job.id, job.attempt, part.rank),
        cluster_id=cluster_id,
        node=node.name,
        job_id=job.id,
        attempt=job.attempt,
        rank=part.rank,
        image=spec.image or (partition.default_image if partition else None),
        command=spec.command,
        workdir=spec.workdir,
        env=environment(job, part, inventory, slices),
        secrets=dict(secrets),
        program=program,
        mounts=spec.mounts,
        gpus=part.gpus,
        slices=tuple(slices),
        cores=part.cores,
        memory_mib=part.memory_mib,
        network="host" if gang or spec.is_hot else settings.network,
        hold=(gang and not joins) or session != "",
        output=expand_output(job, part.rank, part.node),
        error=expand_error(job, part.rank, part.node),
        append=job.spec.append,
        spool=_spool(job, part, inventory, steps_key),
        hostfile=hostfile(job, inventory) if gang else None,
        run_as=run_as,
        allow_root=allow_root,
        capabilities=settings.capabilities,
        mounts_beneath=None if mount_anything else settings.allowed_mounts,
        job_dirs=settings.job_dirs,
        mps_pipe=mps.pipe if mps is not None else None,
        session=session,
        record=record.decode(),
    )


def environment(
    job: JobRecord, part: NodeAllocation, inventory: Inventory, slices: Sequence[MigSlice] = ()
) -> dict[str, str]:
    """Return the rank's environment: the variables of torchrun and the like, gpusched's own, and Slurm's.

    One process is started per node, so WORLD_SIZE counts nodes and RANK equals NODE_RANK (as in Kubeflow's PyTorchJob);
    ``torchrun --nnodes=$WORLD_SIZE --node-rank=$RANK --nproc-per-node=gpu`` multiplies them. The job's own variables
    override MASTER_PORT and OMP_NUM_THREADS, but not what identifies the rank and its GPUs. In a batch script only the
    tasks of its steps are such processes: srun sets their ranks.
    """
    assert job.allocation is not None
    spec, node, parts = job.spec, _node(inventory, part.node), job.allocation.parts
    master = _node(inventory, parts[0].node)
    # A container sees only its own GPUs, numbered from 0; elsewhere the indices are NVML's, which is PCI bus order.
    numbers: Iterable[int] = range(len(part.gpus)) if node.runtime in _OWN_DEVICE_NUMBERS else part.gpus
    # CUDA takes slices by UUID, everywhere.
    visible = [one.uuid or "" for one in slices] or list(map(str, numbers))
    profiles = {one.number: one.profile for one in slices}
    defaults = {
        "OMP_NUM_THREADS": str(max(1, part.cores // max(1, len(part.gpus)))),
        "MASTER_PORT": str(job.master_port),
    }
    if spec.is_hot:
        defaults |= _rendezvous(job, part, fabric_address(master), fabric_address(node))
    several_names = (
        (str(len(parts)), "SLURM_JOB_NUM_NODES SLURM_NNODES"),
        (str(len(parts) * spec.tasks_per_node), "SLURM_NTASKS"),
        (str(part.rank), "SLURM_NODEID SLURM_PROCID"),
        ("0", "SLURM_LOCALID"),
        (job.id, "GPUSCHED_JOB_ID SLURM_JOB_ID"),
        (spec.name, "GPUSCHED_JOB_NAME SLURM_JOB_NAME"),
        (spec.partition, "GPUSCHED_PARTITION SLURM_JOB_PARTITION"),
        (part.node, "GPUSCHED_NODE SLURMD_NODENAME"),
        (",".join(p.node for p in parts), "GPUSCHED_NODELIST SLURM_JOB_NODELIST"),
        (str(len(part.gpus)), "GPUSCHED_GPUS_PER_NODE SLURM_GPUS_ON_NODE"),
    )
    fixed = {
        "CUDA_VISIBLE_DEVICES": ",".join(visible),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "MASTER_ADDR": fabric_address(master),
        "GPUSCHED_ATTEMPT": str(job.attempt),
        "GPUSCHED_GPUS": ",".join(gpu_label(number, profiles.get(number, "")) for number in part.gpus),
        "GPUSCHED_GPUS_TOTAL": str(spec.gpus),
        "GPUSCHED_USER": job.user,
        "SLURM_CPUS_ON_NODE": str(part.cores),
        "SLURM_RESTART_COUNT": str(job.attempt - 1),
        **{name: value for value, names in several_names for name in names.split()},
    }
    if spec.script is None:
        rank = str(part.rank)
        fixed |= {"WORLD_SIZE": str(len(parts)), "RANK": rank, "NODE_RANK": rank, "LOCAL_RANK": "0"}
    if spec.slurm_env or spec.script is not None:
        fixed |= slurm_variables(job, part)
    if spec.elastic is not None:
        fixed |= {
            "GPUSCHED_GPUS_MIN": str(spec.elastic.sizes[0]),
            "GPUSCHED_GPUS_MAX": str(spec.elastic.sizes[-1]),
            "GPUSCHED_GPUS_BASE": str(spec.elastic.base_gpus),
            "GPUSCHED_BATCH": spec.elastic.batch,
            "GPUSCHED_RESIZES": str(job.resizes.count if job.resizes is not None else 0),
        } | ({"GPUSCHED_RESIZE": "hot"} if spec.is_hot else {})
    if mps := _mps(job, node):
        # Device numbers as seen by the job: CUDA numbers its GPUs from 0.
        limits = (f"{device}={spec.gpu_memory_mib}M" for device in range(len(part.gpus)))
        fixed |= {"CUDA_MPS_PIPE_DIRECTORY": mps.pipe, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ",".join(limits)}
    if job.array_id is not None:
        index = str(job.array_index)
        fixed |= {"GPUSCHED_ARRAY_ID": job.array_id, "GPUSCHED_ARRAY_INDEX": index}
        fixed |= {"SLURM_ARRAY_JOB_ID": job.array_id, "SLURM_ARRAY_TASK_ID": index}
        shape = zip(("COUNT", "MIN", "MAX", "STEP"), spec.array_shape, strict=False)  # () of older jobs
        fixed |= {f"SLURM_ARRAY_TASK_{name}": str(number) for name, number in shape}
    return defaults | dict(spec.env) | fixed


def _rendezvous(job: JobRecord, part: NodeAllocation, address: str, own: str) -> dict[str, str]:
    """Return torchrun's defaults (PET_...) for ranks that join and leave; rank 0, which never leaves, is the host.

    ``address``: of rank 0's node, ``own``: of the rank's. A group that forms waits a few seconds for more ranks, and a
    rank that is gone is noticed after eight seconds.
    """
    elastic = job.spec.elastic
    assert elastic is not None
    least, most = (max(1, gpus // elastic.rank_gpus) for gpus in (elastic.sizes[0], elastic.sizes[-1]))
    settings = f"is_host={int(part.rank == 0)},last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=4"
    return {
        "PET_NNODES": f"{least}:{most}",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{address}:{job.master_port}",
        "PET_RDZV_ID": f"{job.id}-{job.attempt}",
        "PET_RDZV_CONF": settings,
        "PET_LOCAL_ADDR": own,
        # Each group has a store of its own. In the agents' shared one its workers find addresses of the group before,
        # or look into another agent's: they hang (seen with torch 2.13).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PET_MAX_RESTARTS": "50",  # each rank that leaves costs the others one
    }


def _mps(job: JobRecord, node: Node) -> SharingSettings | None:
    """Return the node's sharing settings if the job is an MPS client; a job that may share is one from its start."""
    sharing = node.sharing if job.spec.share else None
    return sharing if sharing is not None and sharing.mode == "mps" else None


def has_steps(job: JobRecord) -> bool:
    """Return whether the job's nodes start tasks on each other: it has a script and several nodes."""
    return job.spec.script is not None and job.allocation is not None and len(job.allocation.parts) > 1


def _spool(job: JobRecord, part: NodeAllocation, inventory: Inventory, key: str | None) -> dict[str, str]:
    spec = job.spec
    if spec.script is None:
        return {}
    assert job.allocation is not None
    assert job.master_port is not None
    nodes = tuple(StepNode(p.node, fabric_address(_node(inventory, p.node))) for p in job.allocation.parts)
    settings = StepSettings(
        attempt=container_name(job.id, job.attempt, 0),
        rank=part.rank,
        nodes=nodes,
        ports=step_ports(job.master_port),
        tasks_per_node=spec.tasks_per_node,
        gpus_per_task=spec.gpus_per_task,
        # TERM ends the job, so the script receives it as well.
        warning=spec.signal if spec.signal_before_s is not None and spec.signal != "TERM" else "",
        warned="script" if spec.signal_batch else "steps",
    )
    return spool_files(spec.script, settings, key)


def hostfile(job: JobRecord, inventory: Inventory) -> str:
    """Return one line per rank, ``address slots=GPUS`` (slots=1 without GPUs), as mpirun and DeepSpeed expect."""
    assert job.allocation is not None
    nodes = [(_node(inventory, p.node), max(1, len(p.gpus))) for p in job.allocation.parts]
    return "".join(f"{fabric_address(node)} slots={slots}\n" for node, slots in nodes)


def master_port(job_id: str, taken: Iterable[int | None]) -> int:
    """Return a job's MASTER_PORT: always the same one, unless another active job has taken it."""
    used = set(taken)
    start = int.from_bytes(job_id.encode(), "big") % len(MASTER_PORTS)
    ports: list[int] = [*MASTER_PORTS[start:], *MASTER_PORTS[:start]]
    return next((port for port in ports if port not in used), ports[0])


def _node(inventory: Inventory, name: str) -> Node:
    node = inventory.node(name)
    assert node is not None, name
    return node


def fabric_address(node: Node) -> str:
    """Return the address at which the job's other nodes reach this one."""
    return node.fabric_address or _host(node)


def _host(node: Node) -> str:
    return "127.0.0.1" if node.transport == "local" else node.address


# The variables that sbatch sets for its scripts, as far as gpusched has their values


def slurm_variables(job: JobRecord, part: NodeAllocation) -> dict[str, str]:
    """Return the variables of a job with ``slurm_env`` or a script, besides those that every job has."""
    assert job.allocation is not None
    spec, parts = job.spec, job.allocation.parts
    nodes, names, tasks = len(parts), ",".join(p.node for p in parts), spec.tasks_per_node
    gpus, per_node = len(part.gpus), _times(tasks, nodes)
    variables = {
        "SLURM_JOBID": job.id,
        "SLURM_JOB_USER": job.user,
        "SLURM_JOB_UID": str(job.uid),
        "SLURM_NODELIST": names,
        "SLURM_NPROCS": str(nodes * tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_JOB_CPUS_PER_NODE": _times(part.cores, nodes),
        "SLURM_CPUS_PER_TASK": str(max(1, part.cores // tasks)),
        # Only one of the two, as in Slurm: its srun rejects both together.
        "SLURM_MEM_PER_NODE": "" if spec.memory_mib_per_cpu else str(part.memory_mib),
        "SLURM_MEM_PER_CPU": str(spec.memory_mib_per_cpu or ""),
        "SLURM_GPUS": str(nodes * gpus),
        "SLURM_GPUS_PER_NODE": str(gpus),
        "SLURM_JOB_GPUS": ",".join(map(str, part.gpus)),
        "SLURM_GTIDS": "0",
        "SLURM_SUBMIT_DIR": spec.submit_dir,
        "SLURM_GPUS_PER_TASK": str(spec.gpus_per_task) if spec.gpus_per_task else "",
        "SLURM_JOB_QOS": spec.qos,
        "SLURM_JOB_ACCOUNT": spec.group,
        "SLURM_JOB_RESERVATION": spec.reservation,
    }
    if gpus == 0:
        variables |= {"SLURM_GPUS": "", "SLURM_GPUS_PER_NODE": "", "SLURM_JOB_GPUS": ""}
    return {name: value for name, value in variables.items() if value}


def _times(count: int, nodes: int) -> str:
    return str(count) if nodes == 1 else f"{count}(x{nodes})"
