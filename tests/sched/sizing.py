"""Claims of resizable jobs, and speeds for them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from gpusched.sched.sizing.question import CAPACITY, COUNT, FREE, OTHERS, TOTAL, Claims, new_claims
from tests.strategies import among


class One(NamedTuple):
    """A claim: its sizes with their paces, which of them the brakes allow (None: all), and what it has."""

    paces: dict[int, float]
    held: int = 0
    allowed: tuple[int, ...] | None = None
    base: int = 1
    share: float = 1.0
    left_s: float = 100.0
    age_s: float = 1000.0
    cost_s: float = 0.0
    restarts: int = 0

    @property
    def may(self) -> list[int]:
        return [g for g in self.paces if self.allowed is None or g in self.allowed or g == self.held]


def claims_of(ones: list[One], capacity: int) -> Claims:
    claims = new_claims(len(ones), max(len(one.paces) for one in ones))
    for j, one in enumerate(ones):
        job = claims.jobs[j]
        for name in ("held", "base", "share", "left_s", "age_s", "cost_s", "restarts"):
            job[name] = getattr(one, name)
        job["count"] = len(one.paces)
        for k, (gpus, pace) in enumerate(one.paces.items()):
            claims.sizes[j, k], claims.pace[j, k], claims.allowed[j, k] = gpus, pace, gpus in one.may
    held = sum(one.held for one in ones)
    number = claims.number
    number[[COUNT, CAPACITY, FREE, TOTAL, OTHERS]] = len(ones), capacity, capacity - held, max(capacity, 1), 0
    return claims


def power(*sizes: int, by: float = 1.0) -> dict[int, float]:
    return {g: g**by for g in sizes}


@cache
def _some(*sizes: int) -> st.SearchStrategy[tuple[int, ...] | None]:
    return st.none() | st.sets(among(*sizes)).map(tuple)


@st.composite
def cases(draw: st.DrawFn, most: int = 4) -> tuple[list[One], int]:
    """Claims, and a capacity that is enough for everybody's least size."""
    menus = st.sampled_from([(1, 2, 4, 8), (2, 4), (1, 3, 5), (4,), (1, 2, 3, 4)])
    ones = []
    for _ in range(draw(st.integers(1, most))):
        sizes = draw(menus)
        paces = np.cumsum([draw(st.floats(0.1, 5.0)) for _ in sizes]).tolist()
        held = draw(among(0, *sizes))
        allowed = draw(_some(*sizes)) if held else None
        ones.append(
            One(
                dict(zip(sizes, paces, strict=True)), held, allowed, draw(st.integers(1, 4)),
                draw(among(0.5, 1.0, 2.0)), draw(st.floats(1.0, 1e4)), draw(st.floats(0.0, 1e4)),
                draw(st.floats(0.0, 500.0)), draw(st.integers(0, 5)),
            )
        )  # fmt: skip
    return ones, sum(one.may[0] for one in ones) + draw(st.integers(0, 12))
