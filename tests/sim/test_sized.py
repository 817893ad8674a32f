"""Replays of a policy that chooses sizes: the live decision at every step, work kept, nothing given twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpusched.model.plan import Plan, Resize, Start
from gpusched.model.snapshot import Snapshot
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sim import sized
from gpusched.sim.engine.build import Elastic
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from gpusched.sim.result import PREEMPTED
from gpusched.study.timeline import parts_of
from gpusched.traces.trace import Trace
from tests.sim.worlds import trace_of


def any_size(trace: Trace, most: int = 8) -> Elastic:
    return Elastic(least=np.ones(len(trace), np.int64), most=np.maximum(trace.gpus, most), linear=True)


def elastic(trace: Trace, pool: Pool, **options: Any) -> Any:
    return replay(trace, pool, "elastic", elastic=any_size(trace), **options)


def test_one_alone_has_all_it_may_have_from_the_beginning() -> None:
    result = elastic(trace_of([0], [80], [1], limit=[1000]), Pool.uniform(2, 8))
    assert result.end.tolist() == [10.0]


def test_it_grows_when_another_ends_and_pays_for_the_stop() -> None:
    trace = trace_of([0, 0], [4000, 800], [4, 4], limit=[9000, 9000])
    result = elastic(trace, Pool.uniform(1, 8), restart_s=30.0)
    assert result.end[1] == 800.0
    # The first one has made 800 of 4000 s on four GPUs; it goes on on eight, after the 30 s.
    assert result.end[0] == 800.0 + 30.0 + 3200 / 2
    assert result.restarts.tolist() == [1, 0]
    assert (result.events.kind == PREEMPTED).sum() == 1


def test_it_shrinks_for_one_that_cannot() -> None:
    trace = trace_of([0, 100], [8000, 500], [1, 4], limit=[9000, 900])
    sizes = Elastic(least=np.array([1, 4]), most=np.array([8, 4]), linear=True)
    result = replay(trace, Pool.uniform(1, 8), "elastic", elastic=sizes)
    assert (result.start[1], result.end[1]) == (100.0, 600.0)
    assert result.end[0] == 600.0 + (8000 - 8 * 100 - 4 * 500) / 8


def test_without_elastic_jobs_it_is_easy() -> None:
    rng = np.random.default_rng(3)
    sizes, lasts = rng.choice([1, 2, 4, 8], 200), rng.lognormal(5, 1, 200)
    trace = trace_of(np.sort(rng.uniform(0, 5000, 200)), lasts, sizes, limit=lasts * 2)
    plain, same = replay(trace, Pool.uniform(3, 8), "easy"), replay(trace, Pool.uniform(3, 8), "elastic")
    assert plain.start.tolist() == same.start.tolist()
    assert plain.end.tolist() == same.end.tolist()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_decision_passes_the_live_gate_and_no_work_is_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Snapshot, Plan]] = []

    def watched(snapshot: Snapshot) -> Plan:
        plan = decide(snapshot)
        seen.append((snapshot, plan))
        return plan

    monkeypatch.setattr(sized, "decide", watched)
    rng = np.random.default_rng(seed)
    sizes, lasts = rng.choice([1, 2, 4, 6, 16], 120), rng.lognormal(6, 1, 120)
    trace = trace_of(np.sort(rng.uniform(0, 9000, 120)), lasts, sizes, limit=lasts * 3)
    pool = Pool.of(
        [NodeSpec(8, 64, 1 << 20, "A", "p"), NodeSpec(8, 64, 1 << 20, "A", "p"), NodeSpec(4, 32, 1 << 19, "A", "p")]
    )
    result = elastic(trace, pool, restart_s=20.0)
    assert not np.isnan(result.end).any()
    assert sum(isinstance(a, Resize) for _, plan in seen for a in plan.actions) > 20
    for snapshot, plan in seen:
        assert check(plan, snapshot)[1] == ()
    # At the most speed that it may ever have, and without any wait, a job takes this long; nothing ends sooner.
    fastest = trace.duration * trace.gpus / np.maximum(trace.gpus, 8)
    assert (result.end - trace.submit >= fastest - 1e-6).all()
    parts = parts_of(result)
    held = float(((parts.end - parts.start) * parts.gpus).sum())
    assert held == pytest.approx((trace.duration * trace.gpus).sum() + 20.0 * _restarted_gpus(seen), rel=1e-9)


def _restarted_gpus(seen: list[tuple[Snapshot, Plan]]) -> int:
    """GPUs, summed over all starts but each job's first."""
    begun: set[str] = set()
    total = 0
    for start in (action for _, plan in seen for action in plan.actions if isinstance(action, Start)):
        total += sum(len(part.gpus) for part in start.allocation.parts) if start.job_id in begun else 0
        begun.add(start.job_id)
    return total
