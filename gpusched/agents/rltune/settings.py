"""RLTune's hyper-parameters: the ``train`` section of its policy file."""

from __future__ import annotations

from dataclasses import dataclass

from gpusched.agents.common.request import settings_of
from gpusched.errors import UsageError

OBJECTIVES = ("slowdown", "wait", "jct", "utilization")
KNOWS = ("nothing", "limit", "estimate", "oracle")
BASES = ("fcfs", "fifo-skip", "smallest", "sjf")


@dataclass(frozen=True)
class RltuneSettings:
    """The hyper-parameters.

    Attributes:
        objective: Mean bounded slowdown (half, with mean JCT), wait, JCT, or utilization.
        base: The reference of rewards: fcfs (strict), fifo-skip, smallest (skipping), sjf (skipping, by estimates).
        knows: Information on run times: nothing, the limit, an estimate from ended jobs, the truth (for comparison).
        window: Jobs that a network scores at a decision. backfill: Whether jobs may pass one that does not fit.
        hidden: Width of the network's two hidden layers.
        attention: Whether one head of self-attention relates the window's jobs before the last layer.
        sequences: Sequences of ``sequence`` jobs from the training data; rollouts: simulations of each per iteration.
        train_window: Jobs scored at a decision of a training sequence.
        iterations, passes, batch, learning_rate, clip, entropy: PPO's.
        temperature: Of the softmax of picks in training.
        imitation: Passes over the recorded decisions in which the network learns the true run times.
        replay_jobs: Maximum of jobs in a replay used for a choice.
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
    """Return the settings of a policy file.

    Raises:
        UsageError: There is no such hyper-parameter, or its value is invalid.
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
