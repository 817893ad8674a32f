"""RLTune's hyper-parameters: what the ``train`` section of its policy file may say."""

from __future__ import annotations

from dataclasses import dataclass

from gpusched.agents.common.request import settings_of
from gpusched.errors import UsageError

OBJECTIVES = ("slowdown", "wait", "jct", "utilization")
KNOWS = ("nothing", "limit", "estimate", "oracle")
BASES = ("fcfs", "fifo-skip", "smallest", "sjf")


@dataclass(frozen=True)
class RltuneSettings:
    """What may be set.

    Attributes:
        objective: What is improved: mean bounded slowdown (with mean JCT, half and half), wait, JCT, or utilization.
        base: The policy that rewards are measured against: fcfs (strict), fifo-skip, smallest (skipping), sjf (on the
            agent's own estimate).
        knows: What it may know of run times: nothing, the limit, an estimate from ended jobs, the truth (a yardstick).
        window: Jobs scored at a decision. backfill: Whether jobs go past one that does not fit.
        hidden: Width of the network's two hidden layers.
        attention: Whether it sees the window's jobs together, by one head of self-attention before its last layer.
        sequences: Sequences of ``sequence`` jobs cut from the training part; rollouts: plays of each per iteration.
        train_window: Jobs scored at a decision of a training sequence.
        iterations, passes, batch, learning_rate, clip, entropy: PPO's.
        temperature: Of the softmax that picks in training.
        imitation: Passes over the recorded decisions in which the network learns what the run times really were.
        replay_jobs: Most jobs of a replay that a choice is made by.
    """

    objective: str = "slowdown"
    base: str = "fcfs"
    knows: str = "estimate"
    window: int = 256
    backfill: bool = True
    hidden: int = 16
    attention: bool = False
    sequence: int = 256
    sequences: int = 24
    rollouts: int = 6
    train_window: int = 48
    iterations: int = 12
    passes: int = 2
    batch: int = 512
    learning_rate: float = 5e-4
    clip: float = 0.2
    entropy: float = 0.003
    temperature: float = 0.5
    imitation: int = 6
    replay_jobs: int = 4000


def read(given: dict[str, object]) -> RltuneSettings:
    """The settings of a policy file.

    Raises:
        UsageError: There is no such hyper-parameter, or its value cannot be.
    """
    settings = settings_of(RltuneSettings(), given, ignore=("preempt",))
    for name, known in (("objective", OBJECTIVES), ("knows", KNOWS), ("base", BASES)):
        if getattr(settings, name) not in known:
            raise UsageError(f"train: {name} is {getattr(settings, name)!r}, expected one of {', '.join(known)}")
    for name in ("window", "hidden", "sequence", "sequences", "rollouts", "train_window", "batch", "replay_jobs"):
        if getattr(settings, name) < 1:
            raise UsageError(f"train: {name} is {getattr(settings, name)}, expected at least 1")
    if not settings.temperature > 0:
        raise UsageError(f"train: temperature is {settings.temperature:g}, expected more than 0")
    return settings
