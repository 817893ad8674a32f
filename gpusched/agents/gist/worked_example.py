"""Fig. 3 of the paper by the replay engine: s, m, m, l and f on two servers, placed in two ways."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from gpusched.agents.gist.setting import HOUR_S, Kind, gist, paper
from gpusched.sim.replay import replay
from gpusched.sim.stepper import Stepper

_DAY_S = 24 * HOUR_S
_JOBS = "smmlf"


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A job on a server, in days."""

    job: str
    server: int
    gpus: int
    start_d: float
    end_d: float


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule. end_d: days until all five jobs are done. paper_end_d: What the paper says, if it does."""

    name: str
    f_run_d: float
    end_d: float
    paper_end_d: float | None
    bars: tuple[Bar, ...]


def cases() -> list[Case]:
    """Case 1 and 2 with an f job of 10 days and of Table 2's 21; beside them, the paper's own order, largest first."""
    found, of = [], gist()
    for f_run_d, ends_d in ((of.f_printed_days, of.published.ends_d), (of.f_hours / 24, (None, None))):
        found.append(_case("case 1: first server with room", (0, 0, 1), False, f_run_d, ends_d[0]))
        found.append(_case("case 2: job 2 beside job 3", (0, 1, 1), False, f_run_d, ends_d[1]))
        found.append(_case("largest first, first fit", (), True, f_run_d, None))
    return found


def _case(name: str, servers: tuple[int, ...], largest_first: bool, f_run_d: float, paper_end_d: float | None) -> Case:
    """All five there at once; the first jobs go where ``servers`` says, others to the first server with room."""
    setting = paper("A100")
    pool = setting.pool
    whole = Kind("f-A100", pool.total_gpus, int(pool.cores.sum()), int(pool.memory_mib.sum()), f_run_d * _DAY_S)
    kinds = (*setting.kinds, whole)
    trace = replace(setting, kinds=kinds).trace(["smlf".index(x) for x in _JOBS])

    def place(stepper: Stepper) -> None:
        waiting = stepper.waiting()
        before_f = [job for job in waiting if job < len(_JOBS) - 1]
        if largest_first:
            before_f.sort(key=lambda j: -trace.gpus[j])
        for job in before_f or waiting:  # f comes last in any order: it ends the episode
            nodes = (servers[job],) if job < len(servers) else stepper.fits(job, "first-fit")
            if (nodes is None or not stepper.start(job, nodes)) and not largest_first:
                return

    result = replay(trace, setting.pool, place)
    bars = tuple(
        Bar(
            job=f"{j + 1} ({_JOBS[j]})",
            server=int(node) + 1,
            gpus=int(result.part_gpus[j]),
            start_d=float(result.start[j] / _DAY_S),
            end_d=float(result.end[j] / _DAY_S),
        )
        for j in range(len(_JOBS))
        for node in result.nodes_of(j)
    )
    return Case(
        name=name, f_run_d=f_run_d, end_d=float(np.max(result.end) / _DAY_S), paper_end_d=paper_end_d, bars=bars
    )
