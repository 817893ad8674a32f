"""The environment against the replay engine: the same choices make the same schedule."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from gpusched.agents.gist.clusters import VARIANTS, Clusters
from gpusched.agents.gist.env import ClusterEnv
from gpusched.agents.gist.section6 import replay_episodes
from gpusched.agents.gist.setting import paper
from gpusched.sim.stepper import Stepper

GAPS = [0, 1, 24]


def by_stepper(setting, sequence, actions):
    """Starts and servers by the engine that stops at decisions, the waiting jobs asked for in the paper's order."""
    stepper = Stepper(setting.trace(sequence), setting.pool)
    servers, kinds = len(setting.servers), len(setting.kinds)
    actions = iter(actions)
    while stepper.advance():
        for job in sorted(stepper.waiting(), key=lambda j: (-stepper.trace.gpus[j], j)):
            if stepper.fits(job, "first-fit") is not None:
                action = next(actions)
                if action < kinds * servers:
                    stepper.start(job, (action % servers,))
    return stepper.result("test")


@pytest.mark.parametrize("gap_h", GAPS)
def test_the_schedule_is_the_replays_for_the_same_actions(gap_h):
    setting = paper("A100", gap_h)
    env, rng = ClusterEnv(setting, "wait"), np.random.default_rng(gap_h)
    for sequence in setting.sequences()[rng.permutation(81)[:25]]:
        _, info = env.reset(options={"sequence": sequence})
        actions, over = [], False
        while not over:
            actions.append(int(rng.choice(np.flatnonzero(info["mask"]))))
            _, _, over, _, info = env.step(np.int64(actions[-1]))
        result = by_stepper(setting, sequence, actions)
        servers, starts = env.starts
        np.testing.assert_array_equal(starts, result.start)
        np.testing.assert_array_equal(servers, result.part_nodes)
        length = float(result.end.max())
        work = setting.shares[sequence] @ (result.end - result.start)
        assert info["utilization"] == pytest.approx(work / length)
        assert info["hours"] == pytest.approx(length / 3600)


@pytest.mark.parametrize("gap_h", GAPS)
def test_first_fit_in_all_clusters_at_once_is_that_of_the_replay(gap_h):
    setting = paper("V100", gap_h)
    clusters = Clusters(setting, "masked", 81, 0, setting.sequences())
    batch = clusters.begin()
    while (batch.job >= 0).any():
        clusters.step(batch.mask.argmax(axis=1))
    found = replay_episodes("largest-skip", "first-fit", gap_h)
    np.testing.assert_allclose(batch.utilization, found.utilization, rtol=1e-12)
    np.testing.assert_allclose(batch.hours, found.hours, rtol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gymnasiums_checker_passes(variant):
    with warnings.catch_warnings():
        # the observation is not bounded, which the checker remarks upon, and it wants a spec that only a registry gives
        warnings.filterwarnings("ignore", message=".*(WARN|we recommend|spec)")
        check_env(ClusterEnv(paper("A100", 24), variant), skip_render_check=True)


def test_impossible_actions_are_masked_or_penalized():
    setting = paper("A100")
    masked, free = ClusterEnv(setting, "masked"), ClusterEnv(setting, "paper")
    for env in (masked, free):
        env.reset(options={"sequence": [2, 2, 2, 0]})  # l, l, l, s
        env.step(np.int64(4))
    # the first l runs on server 0: the second cannot be chosen to go there, but to the other server or the queue
    _, info = masked.reset(options={"sequence": [2, 2, 2, 0]})
    _, reward, _, _, info = masked.step(np.int64(4))
    assert reward == pytest.approx(0.5)  # Eq. 4 at the first instant: the share in use
    assert np.flatnonzero(info["mask"]).tolist() == [5, 8]
    _, reward, _, _, _ = masked.step(np.int64(8))
    assert reward == -1  # queued though it fits
    free.reset(options={"sequence": [2, 2, 2, 0]})
    free.step(np.int64(4))
    _, reward, _, _, info = free.step(np.int64(4))
    assert reward == -1  # started where it does not fit: it waits
    free.step(np.int64(5))
    _, reward, _, _, info = free.step(np.int64(6))
    assert np.flatnonzero(info["mask"]).size == 3


def test_an_agent_that_never_starts_anything_is_overruled():
    """Otherwise an episode of the paper's variant might never end."""
    env = ClusterEnv(paper("A100"), "paper")
    _, info = env.reset(options={"sequence": [0, 1, 2, 0]})
    for _ in range(400):
        _, _, over, _, info = env.step(np.int64(np.flatnonzero(info["mask"])[-1]))
        if over:
            break
    assert over
    assert 0 < info["utilization"] < 0.5


def test_every_cluster_has_its_own_generator():
    drawn = []
    for clusters in (3, 8):
        many = Clusters(paper("A100"), "masked", clusters, seed=5)
        many.begin()
        drawn.append(many.batch.kind[:3].copy())
    np.testing.assert_array_equal(*drawn)
    assert len({tuple(row) for row in many.batch.kind.tolist()}) > 1
