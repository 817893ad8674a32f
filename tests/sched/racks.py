"""Clusters of racks."""

from __future__ import annotations

from msgspec.structs import replace

from gpusched.model.snapshot import Snapshot
from tests.sched.worlds import NOW, node, running, topology


def with_place(snap: Snapshot, place: str, **more: object) -> Snapshot:
    policies = {name: replace(policy, place=place, **more) for name, policy in snap.policies.items()}
    return replace(snap, policies=policies)


FOUR = [node(f"n{i}") for i in range(4)]


TWO_RACKS = topology("r1", "r1", "r2", "r2")


HALF = [running("a", {"n0": tuple(range(8))}, NOW + 600), running("b", {"n2": tuple(range(8))}, NOW + 900)]
