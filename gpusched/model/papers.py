"""What the papers printed. None of it was computed here, and no figure of a paper stands anywhere else in the code."""

from __future__ import annotations

from typing import NamedTuple


class Gist(NamedTuple):
    """Narantuya et al. (CMC 2022), Section 6.

    Attributes:
        trained: What U of the trained agent is above, by the paper; naive: U of the naive scheme; lowest: what its dips
            are below.
        episodes: Until training converges.
        energy_mwh: Partition -> inefficient energy in ``energy_h`` hours, naive and trained; energy_change: of it.
        run_time_change: Of the time until f starts.
        ends_d: Fig. 3: days until all is done, case 1 and case 2.
    """

    trained: float = 0.75
    naive: float = 0.62
    lowest: float = 0.3
    episodes: int = 300
    energy_mwh: dict[str, tuple[float, float]] = {"A100": (3.55, 2.15), "V100": (1.91, 1.15)}  # noqa: RUF012
    energy_h: int = 720
    energy_change: float = -0.40
    run_time_change: float = -0.20
    ends_d: tuple[float, float] = (31.0, 27.0)


class Rltune(NamedTuple):
    """Dongare et al. (SoCC 2025): the best figures of the abstract, changes against some base policy on some trace.

    Its tables by trace were not at hand.
    """

    utilization: float = 0.20
    wait: float = -0.81
    jct: float = -0.70


class Dl2(NamedTuple):
    """Peng et al. (TPDS 2021): mean JCT against DRF, and against Optimus."""

    drf: float = -0.441
    optimus: float = -0.175


class Maifs(NamedTuple):
    """Li et al. (TPDS 2025), its abstract: the most it gains against others."""

    makespan: float = -0.44
    jct: float = -0.46


GIST, RLTUNE, DL2, MAIFS = Gist(), Rltune(), Dl2(), Maifs()
