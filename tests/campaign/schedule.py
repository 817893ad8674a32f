"""The schedule of a campaign: drawn from the seed before anything runs, so that a failure replays."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from tests.campaign.faults import KINDS, NODES

SHAPES = {
    "plain": 46, "gang": 8, "array": 8, "fails": 8, "cancelled": 8, "limit": 4, "held": 4, "once": 6, "cpu": 4,
    "oom": 2, "image": 2,
}  # fmt: skip
CONTAINERS = ("oom", "image")
"""Those that need a container engine."""


class Work(NamedTuple):
    """A submission.

    ``shape``: see `SHAPES`; ``once``: with --no-requeue; ``oom``: uses more memory than it asked for; ``image``: its
    image does not exist.
    """

    number: int
    partition: str
    gpus: int
    seconds: float
    code: int
    shape: str


def jobs_of(job: str, work: Work) -> list[str]:
    """Return the ids of the jobs that a submission makes."""
    return [job] if work.shape != "array" else [f"{job}_{task}" for task in range(3)]


class Act(NamedTuple):
    """A step: ``submit``, ``order`` (cancel, release) for work ``number``; ``inject`` or ``heal`` fault ``number``.

    Attributes:
        what: The step.
        number: Of the work or the fault.
        kind: Of the fault.
        node: That it hits, where it hits one.
        amount: 0 to 1, what else it needs.
        lines: Then so many lines in the jobs' ledger are waited for, or `run.PAUSE_S`.
    """

    what: str
    number: int
    kind: str = ""
    node: str = ""
    amount: float = 0.0
    lines: int = 0


class Schedule(NamedTuple):
    """Work by its number, and the steps."""

    work: list[Work]
    acts: list[Act]


def draw(seed: int, jobs: int, faults: int, kinds: Sequence[str], podman: float = 0.35) -> Schedule:
    """All choices of a run.

    Args:
        seed: The same schedule comes of the same arguments.
        jobs: Submissions; an array of three counts as one.
        faults: How many.
        kinds: Of `KINDS`.
        podman: Share of the work for the partition that runs containers; the other runs processes, which are cheaper.
    """
    rng = Random(seed)
    work = [_work(rng, number, podman) for number in range(jobs)]
    acts: list[Act] = []
    open_: dict[str, tuple[int, Act]] = {}  # what a fault holds -> when it is healed, it
    orders: list[tuple[int, Act]] = []
    submitted = injected = 0
    while submitted < jobs or injected < faults:
        at = len(acts)
        for holds, (due, act) in list(open_.items()):
            if due <= at:
                acts.append(act._replace(what="heal", lines=0))
                del open_[holds]
        for due, act in [order for order in orders if order[0] <= at]:
            acts.append(act)
            orders.remove((due, act))
        if rng.random() * (jobs - submitted + faults - injected) < jobs - submitted:
            one = work[submitted]
            acts.append(Act("submit", submitted, lines=rng.choice((0, 0, 0, 1))))
            if one.shape in ("cancelled", "held"):
                orders.append((at + rng.randint(2, 12), Act("order", submitted)))
            submitted += 1
            continue
        kind = rng.choice(kinds)
        fault = KINDS[kind]
        node = rng.choice(fault.nodes) if fault.nodes else ""
        act = Act("inject", injected, kind, node, round(rng.random(), 4), rng.choice((0, 0, 1, 2)))
        holds = node or kind.partition(".")[0]
        if holds in open_:
            acts.append(open_.pop(holds)[1]._replace(what="heal", lines=rng.choice((0, 1, 2))))
        acts.append(act)
        injected += 1
        if fault.lasts:
            open_[holds] = at + rng.randint(2, 10), act
    acts += [act._replace(what="heal", lines=0) for _, act in open_.values()]
    return Schedule(work, acts + [act for _, act in orders])


def _work(rng: Random, number: int, podman: float) -> Work:
    (shape,) = rng.choices(list(SHAPES), list(SHAPES.values()))
    gpus = 0 if shape == "cpu" else rng.choice((1, 1, 1, 2, 4))
    seconds = {"cancelled": 600.0, "limit": 600.0}.get(shape, round(rng.choice((0.2, 0.5, 1.0, 3.0, 8.0)), 2))
    partition = "A100" if rng.random() < podman or shape in CONTAINERS else "V100"
    return Work(number, partition, gpus, seconds, rng.choice((1, 3, 77)) if shape == "fails" else 0, shape)


__all__ = ["NODES", "Act", "Schedule", "Work", "draw"]
