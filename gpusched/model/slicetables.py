"""The slices that NVIDIA publishes for its GPUs: profiles and placements, and their share of a GPU by name.

Source: NVIDIA Multi-Instance GPU User Guide, "Supported MIG Profiles", and what ``nvidia-smi mig -lgip`` and ``-lgipp``
print on these GPUs (https://docs.nvidia.com/datacenter/tesla/mig-user-guide/). What a node's driver reports
(`gpusched.model.readings.Gpu.mig_profiles`) goes before these tables; they name shares where no reading is at hand, and
are what replays cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from gpusched.model.slices import SliceProfile, compute_units

GPU_PARTS = 56
"""Parts of a GPU that limits count: every published slice is a whole number of them (sevenths, and eighths)."""

_ONES, _TWOS, _WIDE = tuple(range(7)), (0, 2, 4), (0, 2, 4, 6)


_Row = tuple[str, int, int, tuple[int, ...], int, int]
"""Name, compute and memory units, starts, how many at most, and number of a profile."""


def _sevenths(small: int, double: int, half: int, whole: int) -> tuple[SliceProfile, ...]:
    """Return the profiles of a GPU with 7 compute and 8 memory units, by the GB in their names."""
    rows: tuple[_Row, ...] = (
        (f"1g.{small}gb", 1, 1, _ONES, 7, 19), (f"1g.{small}gb+me", 1, 1, _ONES, 1, 20),
        (f"1g.{double}gb", 1, 2, _WIDE, 4, 15), (f"2g.{double}gb", 2, 2, _TWOS, 3, 14),
        (f"3g.{half}gb", 3, 4, (0, 4), 2, 9), (f"4g.{half}gb", 4, 4, (0,), 1, 5),
        (f"7g.{whole}gb", 7, 8, (0,), 1, 0),
    )  # fmt: skip
    return tuple(_profile(row, 7, 8) for row in rows)


def _profile(row: _Row, of: int, memory: int) -> SliceProfile:
    name, compute, size, starts, count, number = row
    gb = int(name.partition(".")[2].partition("gb")[0])
    return SliceProfile(
        name=name, compute=compute, memory_units=size, memory_mib=gb * 1024, profile_id=number, max_count=count,
        placements=tuple((start, size) for start in starts), gpu_compute=of, gpu_memory_units=memory,
    )  # fmt: skip


PUBLISHED: Mapping[str, tuple[SliceProfile, ...]] = {
    "A100-40GB": _sevenths(5, 10, 20, 40),
    "A100-80GB": _sevenths(10, 20, 40, 80),
    "H100-80GB": _sevenths(10, 20, 40, 80),
    "H100-94GB": _sevenths(12, 24, 47, 94),
    "H100-96GB": _sevenths(12, 24, 48, 96),
    "H200-141GB": _sevenths(18, 35, 71, 141),
    "A30-24GB": tuple(
        _profile(row, 4, 4)
        for row in (
            ("1g.6gb", 1, 1, (0, 1, 2, 3), 4, 14), ("1g.6gb+me", 1, 1, (0, 1, 2, 3), 1, 21),
            ("2g.12gb", 2, 2, (0, 2), 2, 5), ("2g.12gb+me", 2, 2, (0, 2), 1, 6), ("4g.24gb", 4, 4, (0,), 1, 0),
        )
    ),
}  # fmt: skip
"""GPU model -> its profiles."""


def published(gpu_type: str, asked: Iterable[str] = ()) -> tuple[SliceProfile, ...]:
    """Return what NVIDIA publishes for GPUs of a type ("": any); (): they cannot be cut, or are not known.

    Of models that differ in memory it is the one in the type's name, else the one with the most of the profiles
    ``asked`` for, and the smallest share of a GPU in each, as `parts_of`.
    """
    name, wanted = gpu_type.upper(), set(asked)

    def fits(model: str) -> tuple[bool, int, int]:
        known = [profile.memory_units for profile in PUBLISHED[model] if profile.name in wanted]
        return bool(name) and model.partition("-")[2] in name, len(known), -sum(known)

    models = [model for model in PUBLISHED if not name or model.partition("-")[0] in name]
    return PUBLISHED[max(models, key=fits)] if models else ()


def parts_of(profile: str) -> int:
    """Return how many `GPU_PARTS` a slice of this profile counts as; of "", a whole GPU, all of them.

    A name that two models have with different shares (1g.10gb: a seventh of an A100-80GB, a quarter of an A100-40GB)
    counts as the smaller one. One that is not published counts by the compute units in its name.
    """
    if not profile:
        return GPU_PARTS
    found = _published_parts().get(profile.partition("+")[0].partition("-")[0])
    return found if found is not None else min(GPU_PARTS, (compute_units(profile) or 7) * GPU_PARTS // 7)


def gpus_counted(count: int, profile: str) -> float:
    """Return how many GPUs so many slices of a profile count as; of "", these are GPUs."""
    return count * parts_of(profile) / GPU_PARTS if profile else count


def whole_gpus(count: int, profile: str) -> int:
    """Return how many GPUs so many slices of a profile need at least; of "", these are GPUs."""
    return -(-count * parts_of(profile) // GPU_PARTS)


@cache
def _published_parts() -> Mapping[str, int]:
    found: dict[str, int] = {}
    for profiles in PUBLISHED.values():
        for one in profiles:
            compute, memory = one.compute * GPU_PARTS, one.memory_units * GPU_PARTS
            name, parts = one.name.partition("+")[0], max(compute // one.gpu_compute, memory // one.gpu_memory_units)
            found[name] = min(parts, found.get(name, GPU_PARTS))
    return found
