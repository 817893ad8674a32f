"""The paper's setting in the replay engine: Section 6 (four jobs of s, m or l, then one of f), and Fig. 3."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from gpusched.agents.gist.setting import HOUR_S, Episodes, ServerFlavor, gist, paper
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import Pool
from gpusched.sim.replay import replay
from gpusched.sim.stepper import Stepper
from gpusched.traces.readers.draft import assemble

_DAY_S = 24 * HOUR_S
_JOBS = "smmlf"


def replay_episodes(policy: ReplayPolicy | str, placement: str, gap_h: float, *, replicas: int = 1) -> Episodes:
    """Return one cell of the table, jobs ``gap_h`` hours apart; random placements need replicas of every sequence.

    Each of the 81 sequences runs in its own partition (two servers of 8 GPUs) of one pool, so that one replay covers
    all. Run times are the flavors' limits (Table 2). U is Eq. 4 at the start of the f job: it needs both servers whole,
    so it starts when the last of the four ends. It is not in the trace, since an order by size would put it first.
    """
    setting = paper("A100", gap_h)
    sequences = np.tile(setting.sequences(), (replicas, 1))
    count, jobs = sequences.shape
    kinds, episode = sequences.T.ravel(), np.tile(np.arange(count), jobs)
    _, gpus, cores, memory, run_s = (np.array(column)[kinds] for column in zip(*setting.kinds, strict=True))
    partitions = tuple(f"e{i}" for i in range(count))
    trace = assemble(
        name=f"GIST, jobs {gap_h:g} h apart", epoch=None,
        ids=tuple(f"e{e}j{i // count}" for i, e in enumerate(episode.tolist())),
        submit=np.repeat(np.arange(jobs) * setting.gap_s, count), duration=run_s, gpus=gpus,
        names={"group": (episode, partitions)}, columns={"limit": run_s, "cores": cores, "memory_mib": memory},
    )  # fmt: skip
    pool = Pool.of([server._replace(partition=name, name="") for name in partitions for server in setting.servers])
    result = replay(trace, pool, policy, placement=placement)
    work = np.bincount(episode, gpus / 16.0 * (result.end - result.start), count)
    first, last = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(first, episode, result.start)
    np.maximum.at(last, episode, result.end)
    return Episodes(work / (last - first), (last - first) / HOUR_S)


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A job on a server; times in days."""

    job: str
    server: int
    gpus: int
    start_d: float
    end_d: float


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule. end_d: days until all five jobs have ended. paper_end_d: The paper's value, if any."""

    name: str
    f_run_d: float
    end_d: float
    paper_end_d: float | None
    bars: tuple[Bar, ...]


def cases() -> list[Case]:
    """Return cases 1 and 2 with an f job of 10 days and of Table 2's 21, and the paper's order, largest first."""
    schedules, scenario = [], gist()
    for f_run_d, ends_d in (
        (scenario.f_printed_days, scenario.published.ends_d),
        (scenario.f_hours / 24, (None, None)),
    ):
        schedules.append(_case("case 1: first server with room", (0, 0, 1), False, f_run_d, ends_d[0]))
        schedules.append(_case("case 2: job 2 beside job 3", (0, 1, 1), False, f_run_d, ends_d[1]))
        schedules.append(_case("largest first, first fit", (), True, f_run_d, None))
    return schedules


def _case(name: str, servers: tuple[int, ...], largest_first: bool, f_run_d: float, paper_end_d: float | None) -> Case:
    """Simulate five jobs submitted at once; the first go to ``servers``, the others to the first server that fits."""
    setting = paper("A100")
    pool = setting.pool
    full_partition = ServerFlavor(
        "f-A100", pool.total_gpus, int(pool.cores.sum()), int(pool.memory_mib.sum()), f_run_d * _DAY_S
    )
    kinds = (*setting.kinds, full_partition)
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
