"""MIG slices: the parts of a GPU that NVIDIA's drivers cut, and their numbers.

A GPU has up to 7 compute and 8 memory units (an A30: 4 and 4). A GPU instance holds some of each, next to each other,
and is named after them: ``3g.40gb`` has 3 compute units and 40 GB. gpusched allocates GPU instances, each with one
compute instance that spans it.

Slices have numbers beside the GPUs' own: ``1000 * (gpu + 1) + start``, where ``start`` is the instance's first memory
unit. Placements do not overlap, and a slice with a job is never destroyed, so a number means one slice at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

NUMBERS_PER_GPU = 1000
PROFILE = re.compile(r"(?P<compute>[1-9])g\.(?P<gb>[1-9][0-9]{0,3})gb(?P<attributes>(\+[a-z0-9.]+|-[a-z0-9.]+)*)")


class SliceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of slice that a GPU can be cut into, as NVML reports it.

    Attributes:
        name: NVIDIA's, without "MIG": ``1g.10gb``, ``1g.10gb+me``.
        compute: Compute units (``sliceCount``).
        memory_units: Memory units, the size of its placements.
        memory_mib: What a job in it sees (``memorySizeMB``).
        placements: (start, size) in memory units, of each place where it may lie on an empty GPU.
        profile_id: As ``nvidia-smi mig -lgip`` shows it.
        max_count: How many of them one GPU may hold; 0: as many as fit (``instanceCount``; one of a ``+me``).
        gpu_compute, gpu_memory_units: Units of the whole GPU.
    """

    name: str
    compute: int
    memory_units: int
    memory_mib: int | None = None
    placements: tuple[tuple[int, int], ...] = ()
    profile_id: int | None = None
    max_count: int = 0
    gpu_compute: int = 7
    gpu_memory_units: int = 8


class MigSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A slice as it exists on a GPU: a GPU instance and the compute instance that spans it.

    Attributes:
        gpu: Index of its GPU.
        start, size: Its memory units. ``size`` 0: not known.
        uuid: Of the MIG device (``MIG-...``); None where there is no compute instance that spans the GPU instance.
        gi, ci: Ids of the GPU instance and of the compute instance; ``ci`` None as above.
        device: The MIG device's index on its GPU, the second number of ``nvidia.com/gpu=0:2``; None as above.
        memory_used_mib: In use, as the GPU instance has it.
    """

    gpu: int
    start: int
    profile: str
    size: int = 0
    memory_mib: int | None = None
    uuid: str | None = None
    gi: int | None = None
    ci: int | None = None
    device: int | None = None
    memory_used_mib: int | None = None

    @property
    def number(self) -> int:
        """Return its number in allocations."""
        return slice_index(self.gpu, self.start)

    @property
    def usable(self) -> bool:
        """Return whether a job can be given it: one compute instance spans it."""
        return self.uuid is not None


class Cut(msgspec.Struct, frozen=True):
    """A change of one GPU on which nothing runs: all of its slices are destroyed, and these are created.

    Attributes:
        slices: (profile, start) each; none: the GPU is whole again, with MIG mode off.
    """

    node: str
    gpu: int
    slices: tuple[tuple[str, int], ...] = ()


def slice_index(gpu: int, start: int) -> int:
    """Return the number in allocations of the slice of this GPU that starts there."""
    return NUMBERS_PER_GPU * (gpu + 1) + start


def is_slice(number: int) -> bool:
    """Return whether a number in an allocation is a slice's, not a whole GPU's."""
    return number >= NUMBERS_PER_GPU


def gpu_of(number: int) -> int:
    """Return the index of the GPU that a number in an allocation lies on: itself, or the slice's GPU."""
    return number // NUMBERS_PER_GPU - 1 if is_slice(number) else number


def start_of(number: int) -> int:
    """Return the first memory unit of a slice; 0 for a whole GPU."""
    return number % NUMBERS_PER_GPU if is_slice(number) else 0


def gpu_label(number: int, profile: str = "") -> str:
    """Return a number in an allocation as screens and JSON show it: ``3``, or ``3:1g.10gb@4`` for a slice."""
    if not is_slice(number):
        return str(number)
    return f"{gpu_of(number)}:{profile or 'slice'}@{start_of(number)}"


def is_profile(name: str) -> bool:
    """Return whether a word has the form of a profile's name."""
    return PROFILE.fullmatch(name) is not None


def compute_units(name: str) -> int | None:
    """Return the compute units that a profile's name states; None: not a profile's name."""
    found = PROFILE.fullmatch(name)
    return int(found["compute"]) if found else None


def share(profile: SliceProfile) -> float:
    """Return which part of a GPU a slice is: the larger of its shares of compute and of memory units."""
    return min(1.0, max(profile.compute / profile.gpu_compute, profile.memory_units / profile.gpu_memory_units))


def most_slices(profile: SliceProfile) -> int:
    """Return how many slices of one profile an empty GPU can have."""
    end, count = 0, 0
    for start, size in sorted(profile.placements):
        if start >= end:
            end, count = start + size, count + 1
    return min(count, profile.max_count or count, profile.gpu_compute // profile.compute)


def with_gpu_units(profiles: Iterable[SliceProfile]) -> tuple[SliceProfile, ...]:
    """Return the profiles of one GPU model with the units of the whole GPU: those of the largest profile."""
    known = tuple(profiles)
    compute = max((profile.compute for profile in known), default=7)
    memory = max((profile.memory_units for profile in known), default=8)
    return tuple(msgspec.structs.replace(p, gpu_compute=compute, gpu_memory_units=memory) for p in known)
