"""A batch of clusters in the paper's setting, built from one world of the replay engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gpusched.agents.common.batch import Batch, EpisodeRules, JobDistribution, begin, inputs_of, step
from gpusched.agents.gist.setting import EpisodeSetting
from gpusched.config.weights import Arrays
from gpusched.sched.heaps import Heap
from gpusched.sched.state import Ints, resources_of, seed_words
from gpusched.sim.engine.build import ReplayOptions, world_of
from gpusched.sim.engine.state import CUT, EVENT, EventLog, Sim
from gpusched.sim.policies import ReplayPolicy

VARIANTS = ("masked", "paper", "wait")


class Clusters:
    """Episodes of one setting in many clusters at once.

    Attributes:
        batch: Observations and results after `begin` and every `step`, written in place.
        actions: Number of actions: kinds x servers, and one queue per kind.
    """

    def __init__(
        self, setting: EpisodeSetting, variant: str, clusters: int, seed: int, sequences: Ints | None = None
    ) -> None:
        """Create the clusters. With ``sequences`` cluster i runs ``sequences[i]`` once; without, episodes are drawn."""
        assert variant in VARIANTS
        smallest = min(k.gpus for k in setting.kinds)
        slots = min(setting.jobs, max(s.gpus for s in setting.servers) // smallest)
        self.rules = EpisodeRules(
            waits=variant == "wait",
            masked=variant != "paper",
            repeat=sequences is None,
            gap_s=setting.gap_s,
            slots=slots,
        )
        self.actions = len(setting.kinds) * (len(setting.servers) + 1)
        self.batch = _batch(setting, self.rules, clusters, seed, self.actions, sequences)

    def begin(self) -> Batch:
        """Start an episode in every cluster."""
        begin(self.batch, self.rules)
        return self.batch

    def step(self, actions: Ints) -> Batch:
        """Apply ``actions: int64[clusters]`` and advance every cluster to its next decision."""
        step(self.batch, self.rules, actions)
        return self.batch


def _batch(
    setting: EpisodeSetting, rules: EpisodeRules, clusters: int, seed: int, actions: int, sequences: Ints | None
) -> Batch:
    kinds, jobs, servers = len(setting.kinds), setting.jobs, len(setting.servers)
    every = [i % kinds for i in range(max(kinds, jobs))]  # a trace with every kind, to get its request
    policy = ReplayPolicy(name="", order="fifo", knows="nothing", source="")
    world = world_of(setting.trace(every), setting.pool, policy, ReplayOptions(generic=True))
    if (world.demand.shape < 0).any() or (world.demand.parts != 1).any():
        raise ValueError("a flavor does not fit one server")
    sequences = np.zeros((0, jobs), np.int64) if sequences is None else sequences
    seeds = np.random.SeedSequence(seed).generate_state(clusters, np.uint64)
    inputs = inputs_of(servers, kinds, rules)
    return Batch(
        sim=_stacked(world.sim, clusters, jobs),
        # space for an episode's events, and for the cuts that `advance` checks for although no job is ever cut
        log=EventLog(np.zeros((clusters, 5 * jobs + 8), EVENT), np.zeros(jobs + 1, CUT), np.zeros(jobs + 1, np.int64)),
        masks=world.demand.masks,
        capacity=resources_of(column.copy() for column in world.demand.resources.columns),
        kinds=JobDistribution(
            world.demand.shape[:kinds].copy(), np.array([k.run_s for k in setting.kinds]), setting.shares
        ),
        kind=np.zeros((clusters, jobs), np.int64),
        prompted=np.zeros((clusters, jobs), np.int64),
        job=np.full(clusters, -1, np.int64),
        reprompts=np.zeros(clusters, np.int64),
        rng=np.concatenate([seed_words(int(s)) for s in seeds]).reshape(clusters, 1),
        sequences=sequences,
        observation=np.zeros((clusters, inputs), np.float32),
        mask=np.zeros((clusters, actions), np.uint8),
        reward=np.zeros(clusters, np.float32),
        done=np.zeros(clusters, np.uint8),
        utilization=np.zeros(clusters),
        hours=np.zeros(clusters),
    )


def _stacked(sim: Sim, clusters: int, jobs: int) -> Sim:
    """Return one cluster's state repeated, with a row per cluster for `batch.cluster_view`."""
    return sim._replace(
        jobs=_rows(sim.jobs[:jobs], clusters),
        state=_rows(sim.state[:jobs], clusters),
        node=_rows(sim.node, clusters),
        clock=_rows(sim.clock, clusters),
        counter=_rows(sim.counter, clusters),
        held=_rows(sim.held, clusters),
        resources=resources_of(_rows(column, clusters) for column in sim.resources.columns),
        ends=Heap(*(_rows(column, clusters) for column in sim.ends)),
    )


def _rows(array: npt.NDArray[Any], clusters: int) -> npt.NDArray[Any]:
    """Return the array repeated, ``[clusters, ...]``."""
    return np.repeat(array[np.newaxis], clusters, axis=0)


def save_clusters(batch: Batch) -> Arrays:
    """Return every array of the clusters as bytes, for a checkpoint."""
    return {f"clusters.{i}": array.reshape(-1).view(np.uint8).copy() for i, array in enumerate(_leaves(batch))}


def restore_clusters(batch: Batch, arrays: Arrays) -> None:
    """Restore the arrays in place."""
    for i, array in enumerate(_leaves(batch)):
        array.reshape(-1).view(np.uint8)[:] = arrays[f"clusters.{i}"]


def _leaves(value: Any) -> list[npt.NDArray[Any]]:
    """Return all arrays of nested named tuples, in order."""
    if isinstance(value, np.ndarray):
        return [value]
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, tuple) else []
