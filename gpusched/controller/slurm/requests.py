"""Translates a Slurm job's request into ours. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from gpusched.config.validate import MAX_NAME, nodes_that_hold
from gpusched.model.jobs import JobSpec
from gpusched.model.resources import Inventory, Node, Partition
from gpusched.model.slurm import LEASE, SlurmJob, SlurmPartition

NO_LIMIT_S = 365 * 86400
"""Time limit of a job without one in a partition without one: policies need a number."""

_FEATURES = re.compile(r"[^&|,()\[\]*!:]+(?:[&|,][^&|,()\[\]*!:]+)*")  # the part of --constraint understood here


class SlurmContext(msgspec.Struct, frozen=True, kw_only=True):
    """The data by which requests are read: the inventory, Slurm's partitions by name, and its nodes' features."""

    inventory: Inventory
    partitions: Mapping[str, SlurmPartition] = {}
    features: Mapping[str, tuple[str, ...]] = {}

    def partition_of(self, job: SlurmJob) -> Partition | None:
        """Return the first of a job's partitions that is in the inventory, or None."""
        found = (self.inventory.partition(name) for name in job.partitions)
        return next((partition for partition in found if partition is not None), None)


def user_nodelist(job: SlurmJob, earlier: tuple[str, ...]) -> tuple[str, ...]:
    """Return the nodes that the job's user requested; for a job that we pinned, those from before (``earlier``)."""
    return earlier if job.reservation == LEASE else job.req_nodes


def request_of(job: SlurmJob, site: SlurmContext, nodelist: tuple[str, ...]) -> JobSpec:
    """Return the request of a Slurm job; each of its nodes provides an equal part, rounded up.

    Dependencies are omitted: Slurm handles them (`gpusched.model.slurm.blocking_reason`).

    Args:
        job: As Slurm has it.
        site: See `SlurmContext`.
        nodelist: The nodes that its user requested. If fewer than the job needs, they are ignored: our nodelist holds
            all nodes that a job may use.
    """
    partition = site.partition_of(job)
    name = partition.name if partition is not None else next(iter(job.partitions), "")
    nodes = max(1, job.nodes)
    gpus, cores = -(-sum(job.gpus.values()) // nodes), max(1, -(-job.cpus // nodes))
    memory_mib = max(1, -(-(job.memory_mib or 0) // nodes))
    types = _gpu_types(job.gpus, partition.nodes if partition is not None else ())
    exclude = tuple(dict.fromkeys((*job.exc_nodes, *_without_features(job.features, partition, site.features))))
    if job.exclusive and partition is not None and job.state == "PENDING":
        allowed = [n for n in partition.nodes if n.name not in exclude and (not nodelist or n.name in nodelist)]
        gpus, cores, memory_mib = _whole_nodes(allowed, gpus, cores, memory_mib)
    return JobSpec(
        name=_name(job.name),
        partition=name,
        nodes=nodes,
        gpus_per_node=gpus,
        cores_per_node=cores,
        memory_mib_per_node=memory_mib,
        time_limit_s=time_limit_s(job, name, site),
        begin_time=job.eligible_time if job.reason == "BeginTime" else None,
        requeue=job.requeue,
        preemptible=job.requeue and partition is not None and partition.preemptible,
        nodelist=nodelist if len(nodelist) >= nodes else (),
        exclude=exclude,
        gpu_types=types,
        exclusive=job.exclusive,
    )


def time_limit_s(job: SlurmJob, partition: str, site: SlurmContext) -> int:
    """Return the job's time limit in seconds, else its partition's maximum, else a year."""
    known, declared = site.partitions.get(partition), site.inventory.partition(partition)
    limit = (known.max_time_s if known is not None else None) or (declared.max_time_s if declared is not None else None)
    return max(1, job.time_limit_s if job.time_limit_s is not None else limit or NO_LIMIT_S)


def _name(text: str) -> str:
    """Return a valid job name: printable, not too long."""
    return "".join(c if c.isprintable() else "?" for c in text)[:MAX_NAME] or "-"


def _gpu_types(gpus: Mapping[str, int], nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the requested GPU types as spelled in the inventory; none if the job accepts any, or for unknown ones."""
    asked = {name.casefold() for name in gpus if name}
    return tuple(dict.fromkeys(node.gpu_type for node in nodes if node.gpu_type.casefold() in asked))


def _without_features(features: str, partition: Partition | None, of_nodes: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the partition's nodes without the features that a job requires by ``a&b`` or ``a|b``.

    Other syntax (counts, brackets) is not evaluated; Slurm alone handles it.
    """
    if not features or partition is None or not _FEATURES.fullmatch(features):
        return []
    ways = [set(re.split("[&,]", way)) for way in features.split("|")]
    known = [(node.name, set(of_nodes[node.name])) for node in partition.nodes if node.name in of_nodes]
    return [name for name, has in known if not any(way <= has for way in ways)]


def _whole_nodes(nodes: list[Node], gpus: int, cores: int, memory_mib: int) -> tuple[int, int, int]:
    """Return what an exclusive job takes of each node: all of the smallest node that is large enough."""
    sizes = sorted({(n.gpus, n.cores, n.memory_mib) for n in nodes if nodes_that_hold([n], gpus, cores, memory_mib)})
    return sizes[0] if sizes else (gpus, cores, memory_mib)
