"""Every figure of Section 6 again: trained, played, and beside the exact values of the paper's setting."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gpusched.agents.gist import dqn, expectimax, naive
from gpusched.agents.gist.section6 import Case, cases, replayed
from gpusched.agents.gist.setting import Figure, gist, paper
from gpusched.agents.gist.train import first_fit
from gpusched.study.paper import Advance, PaperOptions

MARK = 0.99
"""Of the optimum: where training counts as done."""


class Effort(NamedTuple):
    """How much to do. wait_episodes, tests: see `dqn.WAIT`, Fig. 6. seeds, workers: as asked for; 0: one per core."""

    seeds: tuple[int, ...]
    workers: int
    episodes: int = dqn.DQNSettings().episodes
    wait_episodes: int = dqn.WAIT.episodes
    tests: int = 100
    speed_s: float = 2.0


QUICK: dict[str, Any] = {"workers": 1, "episodes": 120, "wait_episodes": 600, "tests": 20, "speed_s": 0.2}
"""Shows that everything works, in seconds; the waiting agent has learned next to nothing by then."""


class ArrivalSetting(msgspec.Struct, frozen=True, kw_only=True):
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
    once: ArrivalSetting
    hour_apart: ArrivalSetting
    day_apart: ArrivalSetting
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


def reproduce(asked: PaperOptions, advance: Advance) -> Reproduction:
    """Trains every agent, plays every test and brings the figures together."""
    of = gist()
    options = Effort(of.drawn_with(asked), asked.jobs)._replace(**(QUICK if asked.quick else {}))
    first = {p: Task(p, 0.0, "masked", options.seeds[0] + i) for i, p in enumerate(of.partitions)}
    tasks = [first["V100"]]  # of another seed: its shares are those of A100, so the same one would learn the same
    for seed in options.seeds:
        tasks += [Task("A100", gap, "wait", seed) for gap in (24.0, 1.0)]
        tasks += [Task("A100", gap, variant, seed) for gap in of.gaps_h.values() for variant in ("masked", "paper")]
    tasks.sort(key=lambda task: task.variant != "wait")  # the long ones first
    speed, _ = dqn.decisions_per_s(paper("A100"), seconds=options.speed_s)  # first: it compiles what workers only load
    learned: dict[Task, dqn.DQNResult] = {}
    advance(0, len(tasks))
    for task, result in _trained(tasks, options):
        learned[task] = result
        advance(len(learned), len(tasks))
    settings = {name: _setting(gap_h, learned, options) for name, gap_h in of.gaps_h.items()}
    optimum = settings["once"].u_optimum
    done = [_at_mark(learned[Task("A100", 0.0, "masked", seed)], optimum) for seed in options.seeds]
    fig6 = {p: _tests(p, learned[first[p]], options.tests) for p in of.partitions}
    fig5 = {p: _course(p, learned[first[p]]) for p in of.partitions}
    energy = {p: _energy(p, settings["once"]) for p in of.partitions}
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


def _trained(tasks: Sequence[Task], options: Effort) -> Iterator[tuple[Task, dqn.DQNResult]]:
    """Every task, as they get done."""
    workers = options.workers or len(os.sched_getaffinity(0))
    if workers == 1:
        for task in tasks:
            yield task, _train(task, options)
        return
    import joblib

    many = joblib.Parallel(n_jobs=workers, return_as="generator")
    yield from zip(tasks, many(joblib.delayed(_train)(task, options) for task in tasks), strict=True)


def _train(task: Task, options: Effort) -> dqn.DQNResult:
    base = dqn.WAIT if task.variant == "wait" else dqn.DQNSettings()
    episodes = options.wait_episodes if task.variant == "wait" else options.episodes
    hyper = replace(base, episodes=episodes, every=min(base.every, max(1, episodes // 4)))
    return dqn.train(paper(task.partition, task.gap_h), task.variant, hyper, task.seed)


def _setting(gap_h: float, learned: dict[Task, dqn.DQNResult], options: Effort) -> ArrivalSetting:
    of = paper("A100", gap_h)

    def agents(variant: str) -> list[dqn.DQNResult]:
        return [learned[Task("A100", gap_h, variant, seed)] for seed in options.seeds]

    agent = agents("masked" if gap_h == 0 else "wait")
    fitted = replayed("largest-skip", "first-fit", gap_h)
    return ArrivalSetting(
        gap_h=gap_h,
        u_naive=naive.exact(of).utilization,
        u_naive_one_pass=naive.exact(of, one_pass=True).utilization,
        u_first_fit=first_fit(of),
        u_first_fit_fifo=float(replayed("fifo-skip", "first-fit", gap_h).utilization.mean()),
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


def _tests(partition: str, learned: dqn.DQNResult, tests: int) -> dict[str, list[float]]:
    """Fig. 6: random episodes under the trained agent and the naive scheme, the same ones."""
    of = paper(partition)
    rng = np.random.default_rng([list(gist().partitions).index(partition), 6])
    drawn = rng.integers(0, len(of.sequences()), tests)
    played = naive.play(of, of.sequences()[drawn], seed=6)
    return {"agent": learned.by_sequence[drawn].tolist(), "naive": played.utilization.tolist()}


def _course(partition: str, learned: dqn.DQNResult) -> dict[str, list[float]]:
    """Fig. 5: U by episode, in training (exploration included) and under the naive scheme."""
    of = paper(partition)
    rng = np.random.default_rng([list(gist().partitions).index(partition), 5])
    drawn = of.sequences()[rng.integers(0, len(of.sequences()), len(learned.played))]
    return {"agent": learned.played.tolist(), "naive": naive.play(of, drawn, seed=5).utilization.tolist()}


def _energy(partition: str, once: ArrivalSetting) -> dict[str, float]:
    """MWh of two servers in the paper's time that are not used."""
    kw = gist().servers * gist().partitions[partition].rated_kw
    means = {"naive": once.u_naive, "agent": float(np.mean(once.u_agent)), "optimum": once.u_optimum}
    return {name: kw * gist().published.energy_h * (1 - u) / 1000 for name, u in means.items()}


def _at_mark(learned: dqn.DQNResult, optimum: float) -> dqn.Point | None:
    """The evaluation at which training counts as done, if it ever did."""
    return next((point for point in learned.course if point.utilization >= MARK * optimum), None)


# -- beside the paper's figures


class _Each(list[float]):
    """Figures of all seeds, formatted one by one."""

    def __format__(self, spec: str) -> str:
        return ", ".join(format(value, spec) for value in self)


def _figures(made: Reproduction, done: Sequence[dqn.Point | None]) -> Iterator[Figure]:
    """The rows of the scenario, filled in."""
    of, once = gist(), made.once
    for case in made.fig3:
        claimed = "" if case.paper_end_d is None else f"{case.paper_end_d:g} d"
        what = f"{case.name}, f runs {case.f_run_d:g} d"
        yield Figure(of="Fig. 3", what=what, paper=claimed, measured=f"{case.end_d:g} d")
    at_once, *apart = map(_formatted, (once, made.hour_apart, made.day_apart))
    energy = made.inefficient_energy_mwh
    told = {
        "printed": of.published, "once": at_once, "mark": MARK, "energy": energy,
        "episodes": ", ".join("never" if point is None else str(point.episodes) for point in done),
        "least": naive.lowest(paper("A100")), "lowest": min(min(course["naive"]) for course in made.fig5.values()),
        "tests": len(made.fig6["A100"]["agent"]),
        "fig6": {p: {name: float(np.mean(u)) for name, u in found.items()} for p, found in made.fig6.items()},
        "energy_change": {name: mwh / energy["A100"]["naive"] - 1 for name, mwh in energy["A100"].items()},
        "run_time_change": {
            name: hours / once.makespan_naive_h - 1
            for name, hours in (("first_fit", once.makespan_first_fit_h), ("agent", once.makespan_agent_h))
        },
    }  # fmt: skip
    for row in of.figures:
        yield row.filled(told)
    for at in apart:
        for row in of.apart:
            yield row.filled({"at": at})


def _formatted(of: ArrivalSetting) -> SimpleNamespace:
    values = msgspec.structs.asdict(of)
    return SimpleNamespace(**{k: _Each(value) if isinstance(value, list) else value for k, value in values.items()})


def as_json(made: Reproduction) -> dict[str, Any]:
    """For ``--json``; what was never reached is null."""
    found: dict[str, Any] = msgspec.to_builtins(made)
    found["train_seconds"] = [s if np.isfinite(s) else None for s in made.train_seconds]
    return found
