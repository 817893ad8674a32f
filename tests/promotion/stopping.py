"""Weights of an agent that stops running jobs: least attained service, with a threshold that tests reach soon."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpusched.agents.rltune.preempting import RankingRule, model_of
from gpusched.config.policies import load_policy
from gpusched.config.weights import load_model, save_model
from gpusched.estimation.odds import CLASSES, LEVELS
from gpusched.sched.warming import warm_up, warm_up_agent

YAML = "agent: rltune\nfallback: easy\nbudget: 10m\npreempt: {min_run: 3s, per_hour: 2, restart: 1s}\n"


def write(file: Path, threshold_gpu_s: float = 24.0) -> Path:
    """Write weights that order jobs with so many GPU seconds behind all others."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rule = RankingRule("las", {"served": 1.0}, (threshold_gpu_s,))
    model = model_of(rule, np.full((CLASSES, LEVELS), 0.3), "nothing")
    save_model(file, "rltune", model.arrays, model.about)
    return file


def compile_passes(folder: Path) -> None:
    """The agent's passes, so that no controller spends its first decision, and its budget, on compiling them."""
    (folder / "stopper.yaml").write_text(YAML)
    write(folder / "stopper/default.safetensors")
    warm_up()
    warm_up_agent(load_policy(folder / "stopper.yaml"), load_model(folder / "stopper", "default", "rltune"))
