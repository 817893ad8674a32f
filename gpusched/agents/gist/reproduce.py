"""Every figure of Section 6 again: trained, played, and beside the exact values of the paper's setting."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gpusched.agents.gist import dqn, expectimax, naive
from gpusched.agents.gist.section6 import gist
from gpusched.agents.gist.setting import RATED_KW, paper
from gpusched.agents.gist.speed import decisions_per_s
from gpusched.agents.gist.train import first_fit
from gpusched.agents.gist.worked_example import Case, cases
from gpusched.model.papers import GIST

MARK = 0.99
"""Of the optimum: where training counts as done."""
PARTITIONS = ("A100", "V100")
GAPS = {"once": 0.0, "hour_apart": 1.0, "day_apart": 24.0}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How much to do. wait_episodes, tests: see `dqn.WAIT`, Fig. 6. workers: Processes; 0: one per core."""

    seeds: tuple[int, ...] = (0, 1, 2)
    episodes: int = dqn.Hyper().episodes
    wait_episodes: int = dqn.WAIT.episodes
    tests: int = 100
    speed_s: float = 2.0
    workers: int = 0


QUICK = Options(seeds=(0,), episodes=120, wait_episodes=600, tests=20, speed_s=0.2, workers=1)
"""Shows that everything works, in seconds; the waiting agent has learned next to nothing by then."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One way of arriving. ``u_...``: mean U over all 81 sequences; lists: one per seed.

    Attributes:
        u_naive: The naive scheme (`gpusched.agents.gist.naive`). u_naive_one_pass: Its other reading.
        u_first_fit: First fit, largest first. u_first_fit_fifo: In order of submission.
        u_never_waits: Best online policy that starts whatever fits. u_best_online: That may keep it waiting.
        u_never_waits_at_worst: Starting whatever fits, largest first, on the worst server each time.
        u_optimum: All jobs known beforehand, time from the first start; u_optimum_since_submission: from the first
            submission, as all others here.
        u_agent: The trained agent: ``masked`` at once, ``wait`` else. u_untrained: The same network before training.
        u_published: masked, the paper's reward.
        u_paper: What is impossible can be chosen and is punished; at the end of training, the best not chosen.
        makespan_...: Hours until the last of the four has ended.
    """

    gap_h: float
    u_naive: float
    u_naive_one_pass: float
    u_first_fit: float
    u_first_fit_fifo: float
    u_never_waits: float
    u_never_waits_at_worst: float
    u_best_online: float
    u_optimum: float
    u_optimum_since_submission: float
    u_agent: list[float]
    u_untrained: list[float]
    u_published: list[float]
    u_paper: list[float]
    makespan_naive_h: float
    makespan_agent_h: float
    makespan_first_fit_h: float


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure beside the paper's. paper, exact, measured: as text; "" where there is none."""

    of: str
    what: str
    paper: str
    exact: str
    measured: str


class Reproduction(msgspec.Struct, frozen=True, kw_only=True):
    """Everything.

    Attributes:
        sequences: How many there are of four jobs. mark: Part of the optimum at which training counts as done.
        inefficient_energy_mwh: Partition -> naive, agent: kW x the paper's hours x (1 - U), two servers, in MWh.
        train_seconds: Wall time to the mark (at once, masked), one per seed, compiling left out.
        fig5: Partition -> U by training episode, trained and naive. fig6: Partition -> U of the test episodes.
        fig3: The schedules. figures: All of it beside the paper's figures, for the table.
    """

    sequences: int
    mark: float
    once: Setting
    hour_apart: Setting
    day_apart: Setting
    inefficient_energy_mwh: dict[str, dict[str, float]]
    train_seconds: list[float]
    decisions_per_s: float
    fig3: list[Case]
    fig5: dict[str, dict[str, list[float]]]
    fig6: dict[str, dict[str, list[float]]]
    figures: list[Figure]


class Task(NamedTuple):
    """One training."""

    partition: str
    gap_h: float
    variant: str
    seed: int


def reproduce(options: Options, advance: Callable[[int, int], None] = lambda done, total: None) -> Reproduction:
    """Trains every agent, plays every test and brings the figures together.

    ``advance`` is called with (trainings done, trainings in all).
    """
    first = {p: Task(p, 0.0, "masked", options.seeds[0] + i) for i, p in enumerate(PARTITIONS)}
    tasks = [first["V100"]]  # of another seed: its shares are those of A100, so the same one would learn the same
    for seed in options.seeds:
        tasks += [Task("A100", gap, "wait", seed) for gap in (24.0, 1.0)]
        tasks += [Task("A100", gap, variant, seed) for gap in GAPS.values() for variant in ("masked", "paper")]
    tasks.sort(key=lambda task: task.variant != "wait")  # the long ones first
    speed, _ = decisions_per_s(paper("A100"), seconds=options.speed_s)  # first: it compiles what workers only load
    learned: dict[Task, dqn.Learned] = {}
    advance(0, len(tasks))
    for task, result in _trained(tasks, options):
        learned[task] = result
        advance(len(learned), len(tasks))
    settings = {name: _setting(gap_h, learned, options) for name, gap_h in GAPS.items()}
    optimum = settings["once"].u_optimum
    done = [_at_mark(learned[Task("A100", 0.0, "masked", seed)], optimum) for seed in options.seeds]
    fig6 = {p: _tests(p, learned[first[p]], options.tests) for p in PARTITIONS}
    fig5 = {p: _course(p, learned[first[p]]) for p in PARTITIONS}
    energy = {p: _energy(p, settings["once"]) for p in PARTITIONS}
    made = Reproduction(
        **settings,
        sequences=len(paper("A100").sequences()),
        mark=MARK,
        inefficient_energy_mwh=energy,
        train_seconds=[float("inf") if point is None else point.seconds for point in done],
        decisions_per_s=speed,
        fig3=cases(),
        fig5=fig5,
        fig6=fig6,
        figures=[],
    )
    return msgspec.structs.replace(made, figures=list(_figures(made, done)))


def _trained(tasks: Sequence[Task], options: Options) -> Iterator[tuple[Task, dqn.Learned]]:
    """Every task, as they get done."""
    workers = options.workers or len(os.sched_getaffinity(0))
    if workers == 1:
        for task in tasks:
            yield task, _train(task, options)
        return
    import joblib

    many = joblib.Parallel(n_jobs=workers, return_as="generator")
    yield from zip(tasks, many(joblib.delayed(_train)(task, options) for task in tasks), strict=True)


def _train(task: Task, options: Options) -> dqn.Learned:
    base = dqn.WAIT if task.variant == "wait" else dqn.Hyper()
    episodes = options.wait_episodes if task.variant == "wait" else options.episodes
    hyper = replace(base, episodes=episodes, every=min(base.every, max(1, episodes // 4)))
    return dqn.train(paper(task.partition, task.gap_h), task.variant, hyper, task.seed)


def _setting(gap_h: float, learned: dict[Task, dqn.Learned], options: Options) -> Setting:
    of = paper("A100", gap_h)

    def agents(variant: str) -> list[dqn.Learned]:
        return [learned[Task("A100", gap_h, variant, seed)] for seed in options.seeds]

    agent = agents("masked" if gap_h == 0 else "wait")
    fitted = gist("largest-skip", "first-fit", gap_h)
    return Setting(
        gap_h=gap_h,
        u_naive=naive.exact(of).utilization,
        u_naive_one_pass=naive.exact(of, one_pass=True).utilization,
        u_first_fit=first_fit(of),
        u_first_fit_fifo=float(gist("fifo-skip", "first-fit", gap_h).utilization.mean()),
        u_never_waits=expectimax.never_waits(of),
        u_never_waits_at_worst=expectimax.never_waits_at_worst(of),
        u_best_online=expectimax.best_online(of),
        u_optimum=expectimax.clairvoyant(of),
        u_optimum_since_submission=expectimax.clairvoyant(of, "submission"),
        u_agent=[one.best.utilization for one in agent],
        u_untrained=[one.course[0].utilization for one in agent],
        u_published=[one.best.utilization for one in agents("masked")],
        u_paper=[one.course[-1].utilization for one in agents("paper")],
        makespan_naive_h=naive.exact(of).hours,
        makespan_agent_h=float(np.mean([one.best.hours for one in agent])),
        makespan_first_fit_h=float(fitted.hours.mean()),
    )


def _tests(partition: str, learned: dqn.Learned, tests: int) -> dict[str, list[float]]:
    """Fig. 6: random episodes under the trained agent and the naive scheme, the same ones."""
    of = paper(partition)
    rng = np.random.default_rng([PARTITIONS.index(partition), 6])
    drawn = rng.integers(0, len(of.sequences()), tests)
    played = naive.play(of, of.sequences()[drawn], seed=6)
    return {"agent": learned.by_sequence[drawn].tolist(), "naive": played.utilization.tolist()}


def _course(partition: str, learned: dqn.Learned) -> dict[str, list[float]]:
    """Fig. 5: U by episode, in training (exploration included) and under the naive scheme."""
    of = paper(partition)
    rng = np.random.default_rng([PARTITIONS.index(partition), 5])
    drawn = of.sequences()[rng.integers(0, len(of.sequences()), len(learned.played))]
    return {"agent": learned.played.tolist(), "naive": naive.play(of, drawn, seed=5).utilization.tolist()}


def _energy(partition: str, once: Setting) -> dict[str, float]:
    """MWh of two servers in the paper's time that are not used."""
    kw = 2 * RATED_KW[partition]
    means = {"naive": once.u_naive, "agent": float(np.mean(once.u_agent)), "optimum": once.u_optimum}
    return {name: kw * GIST.energy_h * (1 - u) / 1000 for name, u in means.items()}


def _at_mark(learned: dqn.Learned, optimum: float) -> dqn.Point | None:
    """The evaluation at which training counts as done, if it ever did."""
    return next((point for point in learned.course if point.utilization >= MARK * optimum), None)


# -- beside the paper's figures


def _figures(made: Reproduction, done: Sequence[dqn.Point | None]) -> Iterator[Figure]:
    once, above = made.once, f"> {GIST.trained:g}"
    for case in made.fig3:
        claimed = "" if case.paper_end_d is None else f"{case.paper_end_d:g} d"
        what = f"{case.name}, f runs {case.f_run_d:g} d"
        yield Figure(of="Fig. 3", what=what, paper=claimed, exact="", measured=f"{case.end_d:g} d")
    yield _line("Fig. 5a, 6", "mean U, trained", above, f"at most {once.u_optimum:.4f}", once.u_agent)
    yield _line("", "the same network before training", "", "", once.u_untrained)
    yield from _without_learning(once)
    yield _line("", "what is impossible punished, not masked: trained", above, "", once.u_paper)
    episodes = ", ".join("never" if point is None else str(point.episodes) for point in done)
    what = f"episodes to {MARK:.0%} of the optimum"
    yield Figure(of="", what=what, paper=f"{GIST.episodes}", exact="", measured=episodes)
    yield Figure(of="Fig. 5b", what="mean U, naive", paper=f"{GIST.naive:g}", exact=f"{once.u_naive:.4f}", measured="")
    least, lowest = naive.lowest(paper("A100")), min(min(course["naive"]) for course in made.fig5.values())
    claimed = f"< {GIST.lowest:g}"
    yield Figure(of="", what="lowest U, naive", paper=claimed, exact=f"{least:.4f}", measured=f"{lowest:.4f}")
    for partition, played in made.fig6.items():
        agent, other = (float(np.mean(played[name])) for name in ("agent", "naive"))
        what = f"{len(played['agent'])} test episodes on {partition}: trained, naive"
        found = f"{agent:.3f}, {other:.3f}"
        yield Figure(of="Fig. 6", what=what, paper=f"{above}, {GIST.naive:g}", exact="", measured=found)
    for partition, printed in GIST.energy_mwh.items():
        e = made.inefficient_energy_mwh[partition]
        of_naive = [(e["naive"], e[name]) for name in ("optimum", "agent")]
        claimed, exact, found = (f"{before:.2f} to {after:.2f} MWh" for before, after in (printed, *of_naive))
        yield Figure(of="Fig. 7", what=f"inefficient energy of {partition}", paper=claimed, exact=exact, measured=found)
    e = made.inefficient_energy_mwh["A100"]
    exact, found = (f"{e[name] / e['naive'] - 1:+.0%}" for name in ("optimum", "agent"))
    yield Figure(of="", what="change", paper=f"{GIST.energy_change:+.0%}", exact=exact, measured=found)
    best, reached = (h / once.makespan_naive_h - 1 for h in (once.makespan_first_fit_h, once.makespan_agent_h))
    claimed = f"{GIST.run_time_change:+.0%}"
    yield Figure(of="Text", what="run time until f", paper=claimed, exact=f"{best:+.1%}", measured=f"{reached:+.1%}")
    for name in ("hour_apart", "day_apart"):
        yield from _apart(getattr(made, name))


def _without_learning(at: Setting) -> Iterator[Figure]:
    """What needs no agent: starting whatever fits, on whatever server."""
    found = f"{at.u_never_waits_at_worst:.4f} to {at.u_never_waits:.4f}"
    yield Figure(of="", what="no agent: never queue what fits, any server", paper="", exact=found, measured="")
    yield Figure(of="", what="no agent: first fit, largest first", paper="", exact=f"{at.u_first_fit:.4f}", measured="")


def _apart(at: Setting) -> Iterator[Figure]:
    """Jobs one after another: what the paper's reward can reach, and what waiting adds."""
    yield _line(
        f"{at.gap_h:g} h apart", "mean U, the paper's reward", "", f"at most {at.u_never_waits:.4f}", at.u_published
    )
    yield _line("", "rewarded with U itself, may wait", "", f"at most {at.u_best_online:.4f}", at.u_agent)
    yield _line("", "the same network before training", "", "", at.u_untrained)
    yield from _without_learning(at)
    exact = f"{at.u_naive:.4f}, {at.u_optimum:.4f}"
    yield Figure(of="", what="naive, all jobs known beforehand", paper="", exact=exact, measured="")


def _line(of: str, what: str, paper: str, exact: str, values: Sequence[float]) -> Figure:
    return Figure(of=of, what=what, paper=paper, exact=exact, measured=", ".join(f"{v:.4f}" for v in values))


def as_json(made: Reproduction) -> dict[str, Any]:
    """For ``--json``; what was never reached is null."""
    found: dict[str, Any] = msgspec.to_builtins(made)
    found["train_seconds"] = [s if np.isfinite(s) else None for s in made.train_seconds]
    return found
