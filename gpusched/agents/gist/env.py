"""One cluster of `agents.common.batch` as a Gymnasium environment, for external agents and for inspection.

    env = ClusterEnv(paper("A100", gap_h=24), "wait")
    observation, info = env.reset(seed=1)
    while True:
        action = choose(observation, info["mask"])
        observation, reward, terminated, truncated, info = env.step(action)

Training uses the same code for thousands of clusters at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpusched.agents.common import torch_
from gpusched.agents.gist.clusters import Clusters
from gpusched.agents.gist.setting import EpisodeSetting
from gpusched.sched.state import Floats, Ints

if TYPE_CHECKING:
    import gymnasium
else:
    gymnasium = torch_.require("gymnasium")

Observation = npt.NDArray[np.float32]


class ClusterEnv(gymnasium.Env[Observation, np.int64]):
    """Episodes of one setting, with the observations, actions and rewards of `gpusched.agents.common.batch`.

    ``info`` holds ``mask: int8[actions]``, the valid actions, and at an episode's end ``utilization`` and ``hours``.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own form)

    def __init__(self, setting: EpisodeSetting, variant: str = "masked") -> None:
        """Create the environment; invalid actions are masked (masked, wait) or penalized (paper)."""
        self.setting = setting
        self._clusters = Clusters(setting, variant, 1, 0, setting.sequences()[:1])
        shape = self._clusters.batch.observation.shape[1:]
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
        self.action_space = gymnasium.spaces.Discrete(self._clusters.actions)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: Of the following random draws.
            options: ``{"sequence": [...]}``: the kinds of its jobs; without it they are drawn.
        """
        super().reset(seed=seed)
        drawn = self.np_random.integers(0, len(self.setting.kinds), self.setting.jobs)
        self._clusters.batch.sequences[0] = (options or {}).get("sequence", drawn)
        self._clusters.begin()
        return self._observation, self._info

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Apply ``action``; an episode always terminates by itself and is never truncated.

        The prompted job starts or waits; an action for another kind of job is applied to this one.
        """
        batch = self._clusters.step(np.array([action], np.int64))
        terminated = bool(batch.done[0])
        info = self._info
        if terminated:
            info |= {"utilization": float(batch.utilization[0]), "hours": float(batch.hours[0])}
        return self._observation, float(batch.reward[0]), terminated, False, info

    @property
    def starts(self) -> tuple[Ints, Floats]:
        """Each job's server, ``int64[jobs]``, and start time in seconds, ``float64[jobs]``; NaN: not started."""
        sim = self._clusters.batch.sim
        return sim.held[0, : self.setting.jobs].copy(), sim.state["start"][0].copy()

    @property
    def _observation(self) -> Observation:
        observation: Observation = self._clusters.batch.observation[0].copy()
        return observation

    @property
    def _info(self) -> dict[str, Any]:
        return {"mask": self._clusters.batch.mask[0].astype(np.int8)}
