"""An agent: jobs with the least GPU time go first; how much limits count is learned from past jobs."""

from __future__ import annotations

import numpy as np

from gpusched.agents.base import AgentParts
from gpusched.agents.common.ordering import OrderingAgent
from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob
from gpusched.config.weights import Arrays
from gpusched.sched.order import Columns, Keys


class Trusting(OrderingAgent):
    """Orders queues: one function of the weights and the jobs, which decides live and in replays."""

    def columns(self, prepared: Arrays, keys: Keys) -> Columns:
        """Return what to order by, as an order does."""
        return (keys.limit ** prepared["trust"][0] * keys.gpus,)

    def train_agent(self, job: TrainJob, report: TrainingReport) -> TrainerResult:
        """Return the weights that were learned from one partition's jobs (``gpusched train``)."""
        trace = job.scenario.trace
        known = np.isfinite(trace.limit) & (trace.duration > 0)
        limit, lasted = np.log(trace.limit[known]), np.log(trace.duration[known])
        varies = len(limit) > 1 and limit.std() > 0 and lasted.std() > 0
        trust = max(0.0, float(np.corrcoef(limit, lasted)[0, 1])) if varies else 0.0
        report.note(f"limits are trusted to {trust:.2f}")
        weights: Arrays = {"trust": np.array([trust])}
        return TrainerResult(arrays=weights, about={"knows": "limit"}, score=trust, hyper_parameters={})


class Failing(Trusting):
    """Fails, as code can: its policy's fallback decides, and a line says so."""

    def columns(self, prepared: Arrays, keys: Keys) -> Columns:
        """Fail."""
        raise KeyError("no such weight")


_TRUSTING, _FAILING = Trusting(), Failing()
trusting = AgentParts(live=lambda: _TRUSTING, replay=lambda: _TRUSTING, train=lambda: _TRUSTING)
failing = AgentParts(live=lambda: _FAILING, replay=lambda: _FAILING, train=lambda: _FAILING)
halved = AgentParts(live=lambda: _TRUSTING)
