"""Names in split snapshots: of nodes and partitions that stand for slices of one profile."""

from __future__ import annotations

from gpusched.model.jobs import JobSpec

SEPARATOR = "/"


def queue_of(spec: JobSpec) -> str:
    """Return the partition whose queue the job is in once the snapshot is split."""
    return inner_name(spec.partition, spec.profile)


def base_of(name: str) -> str:
    """Return the node or partition that a name in a split snapshot stands for."""
    return name.partition(SEPARATOR)[0]


def profile_of(name: str) -> str:
    """Return the profile of a node or partition in a split snapshot; "": whole GPUs."""
    return name.partition(SEPARATOR)[2]


def inner_name(name: str, profile: str) -> str:
    """Return the name of a node or partition for slices of a profile; of "", or where it is one already, itself."""
    return f"{name}{SEPARATOR}{profile}" if profile and SEPARATOR not in name else name
