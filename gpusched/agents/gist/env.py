"""One cluster of `agents.common.batch` as a Gymnasium environment: for agents written elsewhere, and to look inside.

    env = ClusterEnv(paper("A100", gap_h=24), "wait")
    observation, info = env.reset(seed=1)
    while True:
        action = choose(observation, info["mask"])
        observation, reward, terminated, truncated, info = env.step(action)

Training uses the batched form, which is the same code for thousands of clusters.
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

Seen = npt.NDArray[np.float32]


class ClusterEnv(gymnasium.Env[Seen, np.int64]):
    """Episodes of one setting; what is seen, done and rewarded is that of `gpusched.agents.common.batch`.

    ``info`` holds ``mask: int8[actions]``, what may be chosen, and at an episode's end ``utilization`` and ``hours``.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium's own form)

    def __init__(self, setting: EpisodeSetting, variant: str = "masked") -> None:
        """See `Clusters`: what is impossible cannot be chosen (masked, wait) or is punished (paper)."""
        self.setting = setting
        self._clusters = Clusters(setting, variant, 1, 0, setting.sequences()[:1])
        shape = self._clusters.batch.observation.shape[1:]
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
        self.action_space = gymnasium.spaces.Discrete(self._clusters.actions)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Seen, dict[str, Any]]:
        """A new episode.

        Args:
            seed: Of the draws from here on.
            options: ``{"sequence": [...]}``: the kinds of its jobs; else they are drawn.
        """
        super().reset(seed=seed)
        drawn = self.np_random.integers(0, len(self.setting.kinds), self.setting.jobs)
        self._clusters.batch.sequences[0] = (options or {}).get("sequence", drawn)
        self._clusters.begin()
        return self._seen, self._info

    def step(self, action: np.int64) -> tuple[Seen, float, bool, bool, dict[str, Any]]:
        """Does ``action``; an episode always ends by itself, so it is never truncated.

        A job that is asked for starts or waits; an action of another kind of job counts as this one's.
        """
        batch = self._clusters.step(np.array([action], np.int64))
        over = bool(batch.done[0])
        info = self._info
        if over:
            info |= {"utilization": float(batch.utilization[0]), "hours": float(batch.hours[0])}
        return self._seen, float(batch.reward[0]), over, False, info

    @property
    def starts(self) -> tuple[Ints, Floats]:
        """``int64[jobs]``, ``float64[jobs]``: each job's server and when it started, seconds; NaN: not yet."""
        sim = self._clusters.batch.sim
        return sim.held[0, : self.setting.jobs].copy(), sim.state["start"][0].copy()

    @property
    def _seen(self) -> Seen:
        seen: Seen = self._clusters.batch.observation[0].copy()
        return seen

    @property
    def _info(self) -> dict[str, Any]:
        return {"mask": self._clusters.batch.mask[0].astype(np.int8)}
