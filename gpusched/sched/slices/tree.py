"""Which slices fit on a GPU together, and where: exact searches over a model's placement table.

A table has at most a few dozen placements of at most 8 memory units, so all arrangements can be tried; not every set
with enough units fits (a 2g.20gb begins at 0, 2 or 4 of 8 units only).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from gpusched.model.slices import SliceProfile

Table = tuple[SliceProfile, ...]
Geometry = tuple[tuple[str, int], ...]
"""(Profile, start) of each slice of a GPU, by start."""


def is_valid(table: Table, geometry: Iterable[tuple[str, int]]) -> bool:
    """Return whether an empty GPU of this model can be cut so."""
    known = {profile.name: profile for profile in table}
    used, compute, counts = 0, 0, dict[str, int]()
    for name, start in geometry:
        profile = known.get(name)
        size = next((size for at, size in profile.placements if at == start), 0) if profile is not None else 0
        if profile is None or not size or used & _units(start, size):
            return False
        used |= _units(start, size)
        compute += profile.compute
        group = _limited_with(profile)
        counts[group] = counts.get(group, 0) + 1
        if profile.max_count and counts[group] > profile.max_count:
            return False
    return compute <= max((profile.gpu_compute for profile in table), default=0)


@lru_cache(maxsize=4096)
def arranged(table: Table, wanted: tuple[str, ...]) -> Geometry | None:
    """Return an arrangement of slices of these profiles on an empty GPU; None: they do not fit together.

    Of all arrangements, the one after which the largest further slice fits, then the most of the smallest.
    """
    every = _arrangements(table, tuple(sorted(wanted)))
    found = max(every, key=lambda one: (_rest(table, one), _low(one)), default=None)
    return None if found is None else tuple(sorted(found, key=lambda pair: pair[1]))


@lru_cache(maxsize=4096)
def filled(table: Table, wanted: tuple[str, ...]) -> Geometry | None:
    """Return the same, with the rest of the GPU cut into more of the profiles wanted, in turn; None as above.

    A GPU is cut anew only when nothing runs on it, so what is left uncut would be lost until then.
    """
    if arranged(table, wanted) is None:
        return None
    kinds = list(dict.fromkeys(wanted))
    while kinds:
        for kind in tuple(kinds):
            if arranged(table, (*wanted, kind)) is None:
                kinds.remove(kind)
            else:
                wanted = (*wanted, kind)
    return arranged(table, wanted)


@lru_cache(maxsize=1024)
def most_of(table: Table, profile: str) -> Geometry:
    """Return as many slices of one profile as a GPU of this model can have; () if it has no such profile."""
    count = 0
    while arranged(table, (profile,) * (count + 1)) is not None:
        count += 1
    return (arranged(table, (profile,) * count) or ()) if count else ()


def _units(start: int, size: int) -> int:
    """Return the memory units as bits."""
    return ((1 << size) - 1) << start


def _limited_with(profile: SliceProfile) -> str:
    """Return the name under which a profile's number is limited: a GPU has its media engines once."""
    return "+me" if profile.name.endswith("+me") else profile.name


def _arrangements(table: Table, wanted: Sequence[str]) -> Iterator[Geometry]:
    """Yield all arrangements of these profiles; like ones only in ascending order."""
    if not wanted:
        yield ()
        return
    known = {profile.name: profile for profile in table}
    last = wanted[-1]
    for rest in _arrangements(table, wanted[:-1]):
        for start, _ in known[last].placements if last in known else ():
            later = all(name != last or at < start for name, at in rest)
            if later and is_valid(table, (*rest, (last, start))):
                yield (*rest, (last, start))


def _rest(table: Table, geometry: Geometry) -> tuple[int, int]:
    """Return the memory units of the largest slice that could be added, and how many of the smallest could be."""
    sizes = [
        profile.memory_units
        for profile in table
        for start, _ in profile.placements
        if is_valid(table, (*geometry, (profile.name, start)))
    ]
    return max(sizes, default=0), sum(size == 1 for size in sizes)


def _low(geometry: Geometry) -> tuple[int, ...]:
    return tuple(-start for _, start in geometry)
