"""Variables that sbatch gives to its scripts, where gpusched has what they say. Pure."""

from __future__ import annotations

from gpusched.model.jobs import JobRecord, NodeAllocation


def slurm_variables(job: JobRecord, part: NodeAllocation) -> dict[str, str]:
    """Those that a job has with ``slurm_env`` or a script, besides what every job has of them."""
    assert job.allocation is not None
    spec, parts = job.spec, job.allocation.parts
    nodes, names, tasks = len(parts), ",".join(p.node for p in parts), spec.tasks_per_node
    gpus, per_node = len(part.gpus), _times(tasks, nodes)
    found = {
        "SLURM_JOBID": job.id,
        "SLURM_JOB_USER": job.user,
        "SLURM_JOB_UID": str(job.uid),
        "SLURM_NODELIST": names,
        "SLURM_NPROCS": str(nodes * tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_JOB_CPUS_PER_NODE": _times(part.cores, nodes),
        "SLURM_CPUS_PER_TASK": str(max(1, part.cores // tasks)),
        # As in Slurm one of the two: srun of Slurm's takes both for a contradiction.
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
        found |= {"SLURM_GPUS": "", "SLURM_GPUS_PER_NODE": "", "SLURM_JOB_GPUS": ""}
    return {name: value for name, value in found.items() if value}


def _times(count: int, nodes: int) -> str:
    return str(count) if nodes == 1 else f"{count}(x{nodes})"
