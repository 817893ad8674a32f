"""Every figure of Section 6: agents trained and simulated, and compared with the exact values of the setting."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gpusched.agents.gist import dqn, expectimax, naive
from gpusched.agents.gist.section6 import Case, cases, replay_episodes
from gpusched.agents.gist.setting import Figure, gist, paper
from gpusched.agents.gist.train import first_fit
from gpusched.study.options import PaperOptions
from gpusched.study.paper import Advance

MARK = 0.99
"""Fraction of the optimum at which training counts as done."""


class Effort(NamedTuple):
    """The amount of work. wait_episodes: see `dqn.WAIT`. tests: of Fig. 6. workers: 0: one per core."""

    seeds: tuple[int, ...]
    workers: int
    episodes: int = dqn.DQNSettings().episodes
    wait_episodes: int = dqn.WAIT.episodes
    tests: int = 100
    speed_s: float = 2.0


QUICK: dict[str, Any] = {"workers": 1, "episodes": 120, "wait_episodes": 600, "tests": 20, "speed_s": 0.2}
"""A smoke test of seconds; the waiting agent is hardly trained by then."""


class ArrivalSetting(msgspec.Struct, frozen=True, kw_only=True):
    """The results for one gap between submissions. ``u_...``: mean U over all 81 sequences; lists: one per seed.

    Attributes:
        u_naive: The naive scheme (`gpusched.agents.gist.naive`). u_naive_one_pass: Its other reading.
        u_first_fit: First fit, largest first. u_first_fit_fifo: In order of submission.
        u_never_waits: Best online policy that starts every job that fits. u_best_online: One that may keep it waiting.
        u_never_waits_at_worst: Starting every job that fits, largest first, on the worst server each time.
        u_optimum: All jobs known in advance, time from the first start; u_optimum_since_submission: from the first
            submission, as in all other figures.
        u_agent: The trained agent: ``masked`` at once, else ``wait``. u_untrained: The same network before training.
        u_published: masked, the paper's reward.
        u_paper: Invalid actions are possible and penalized; the last weights, not the best.
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
    """All results.

    Attributes:
        sequences: Number of sequences of four jobs. mark: Fraction of the optimum at which training counts as done.
        inefficient_energy_mwh: Partition -> naive, agent: kW x the paper's hours x (1 - U), two servers, in MWh.
        train_seconds: Wall time to the mark (at once, masked), one per seed, without compilation.
        fig5: Partition -> U by training episode, trained and naive. fig6: Partition -> U of the test episodes.
        fig3: The schedules. figures: All compared with the paper's, for the table.
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
    """A training to run."""

    partition: str
    gap_h: float
    variant: str
    seed: int


def reproduce(asked: PaperOptions, advance: Advance) -> Reproduction:
    """Train every agent, run every test and collect the figures."""
    of = gist()
    options = Effort(of.drawn_with(asked), asked.jobs)._replace(**(QUICK if asked.quick else {}))
    first = {p: Task(p, 0.0, "masked", options.seeds[0] + i) for i, p in enumerate(of.partitions)}
    tasks = [first["V100"]]  # with another seed: its shares equal A100's, so the same seed would give the same agent
    for seed in options.seeds:
        tasks += [Task("A100", gap, "wait", seed) for gap in (24.0, 1.0)]
        tasks += [Task("A100", gap, variant, seed) for gap in of.gaps_h.values() for variant in ("masked", "paper")]
    tasks.sort(key=lambda task: task.variant != "wait")  # the long ones first
    speed, _ = dqn.decisions_per_s(
        paper("A100"), seconds=options.speed_s
    )  # first: this compiles and caches what the workers load
    learned: dict[Task, dqn.DQNResult] = {}
    advance(0, len(tasks))
    for task, result in _train_all(tasks, options):
        learned[task] = result
        advance(len(learned), len(tasks))
    settings = {name: _results(gap_h, learned, options) for name, gap_h in of.gaps_h.items()}
    optimum = settings["once"].u_optimum
    done = [_first_at_mark(learned[Task("A100", 0.0, "masked", seed)], optimum) for seed in options.seeds]
    fig6 = {p: _fig6(p, learned[first[p]], options.tests) for p in of.partitions}
    fig5 = {p: _fig5(p, learned[first[p]]) for p in of.partitions}
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


def _train_all(tasks: Sequence[Task], options: Effort) -> Iterator[tuple[Task, dqn.DQNResult]]:
    """Train every task; yield the results in order."""
    import joblib

    many = joblib.Parallel(n_jobs=options.workers or len(os.sched_getaffinity(0)), return_as="generator")
    yield from zip(tasks, many(joblib.delayed(_train)(task, options) for task in tasks), strict=True)


def _train(task: Task, options: Effort) -> dqn.DQNResult:
    base = dqn.WAIT if task.variant == "wait" else dqn.DQNSettings()
    episodes = options.wait_episodes if task.variant == "wait" else options.episodes
    hyper = replace(base, episodes=episodes, every=min(base.every, max(1, episodes // 4)))
    return dqn.train(paper(task.partition, task.gap_h), task.variant, hyper, task.seed)


def _results(gap_h: float, learned: dict[Task, dqn.DQNResult], options: Effort) -> ArrivalSetting:
    of = paper("A100", gap_h)

    def agents(variant: str) -> list[dqn.DQNResult]:
        return [learned[Task("A100", gap_h, variant, seed)] for seed in options.seeds]

    agent = agents("masked" if gap_h == 0 else "wait")
    fitted = replay_episodes("largest-skip", "first-fit", gap_h)
    return ArrivalSetting(
        gap_h=gap_h,
        u_naive=naive.exact(of).utilization,
        u_naive_one_pass=naive.exact(of, one_pass=True).utilization,
        u_first_fit=first_fit(of),
        u_first_fit_fifo=float(replay_episodes("fifo-skip", "first-fit", gap_h).utilization.mean()),
        u_never_waits=expectimax.never_waits(of),
        u_never_waits_at_worst=expectimax.never_waits_at_worst(of),
        u_best_online=expectimax.best_online(of),
        u_optimum=expectimax.clairvoyant(of),
        u_optimum_since_submission=expectimax.clairvoyant(of, "submission"),
        u_agent=[one.best.utilization for one in agent],
        u_untrained=[one.evaluations[0].utilization for one in agent],
        u_published=[one.best.utilization for one in agents("masked")],
        u_paper=[one.evaluations[-1].utilization for one in agents("paper")],
        makespan_naive_h=naive.exact(of).hours,
        makespan_agent_h=float(np.mean([one.best.hours for one in agent])),
        makespan_first_fit_h=float(fitted.hours.mean()),
    )


def _fig6(partition: str, learned: dqn.DQNResult, tests: int) -> dict[str, list[float]]:
    """Return Fig. 6: the same random episodes under the trained agent and the naive scheme."""
    of = paper(partition)
    rng = np.random.default_rng([list(gist().partitions).index(partition), 6])
    drawn = rng.integers(0, len(of.sequences()), tests)
    played = naive.simulate(of, of.sequences()[drawn], seed=6)
    return {"agent": learned.by_sequence[drawn].tolist(), "naive": played.utilization.tolist()}


def _fig5(partition: str, learned: dqn.DQNResult) -> dict[str, list[float]]:
    """Return Fig. 5: U by episode, in training (exploration included) and under the naive scheme."""
    of = paper(partition)
    rng = np.random.default_rng([list(gist().partitions).index(partition), 5])
    drawn = of.sequences()[rng.integers(0, len(of.sequences()), len(learned.episode_utilization))]
    return {
        "agent": learned.episode_utilization.tolist(),
        "naive": naive.simulate(of, drawn, seed=5).utilization.tolist(),
    }


def _energy(partition: str, once: ArrivalSetting) -> dict[str, float]:
    """Return the unused MWh of two servers in the paper's period."""
    kw = gist().servers * gist().partitions[partition].rated_kw
    means = {"naive": once.u_naive, "agent": float(np.mean(once.u_agent)), "optimum": once.u_optimum}
    return {name: kw * gist().published.energy_h * (1 - u) / 1000 for name, u in means.items()}


def _first_at_mark(learned: dqn.DQNResult, optimum: float) -> dqn.Evaluation | None:
    """Return the evaluation at which training counts as done, if any."""
    return next((point for point in learned.evaluations if point.utilization >= MARK * optimum), None)


# -- comparison with the paper's figures


class _FormattedValues(list[float]):
    """Values of all seeds, formatted one by one."""

    def __format__(self, spec: str) -> str:
        return ", ".join(format(value, spec) for value in self)


def _figures(made: Reproduction, done: Sequence[dqn.Evaluation | None]) -> Iterator[Figure]:
    """Yield the rows of the scenario, filled in."""
    of, once = gist(), made.once
    for case in made.fig3:
        claimed = "" if case.paper_end_d is None else f"{case.paper_end_d:g} d"
        what = f"{case.name}, f runs {case.f_run_d:g} d"
        yield Figure(of="Fig. 3", what=what, paper=claimed, measured=f"{case.end_d:g} d")
    at_once, *apart = map(_formatted, (once, made.hour_apart, made.day_apart))
    energy = made.inefficient_energy_mwh
    values = {
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
        yield row.filled(values)
    for at in apart:
        for row in of.apart:
            yield row.filled({"at": at})


def _formatted(of: ArrivalSetting) -> SimpleNamespace:
    values = msgspec.structs.asdict(of)
    return SimpleNamespace(
        **{k: _FormattedValues(value) if isinstance(value, list) else value for k, value in values.items()}
    )


def as_json(made: Reproduction) -> dict[str, Any]:
    """Convert to ``--json``; a mark never reached is null."""
    found: dict[str, Any] = msgspec.to_builtins(made)
    found["train_seconds"] = [s if np.isfinite(s) else None for s in made.train_seconds]
    return found
