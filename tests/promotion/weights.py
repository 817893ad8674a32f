"""Weights of small networks of the GIST agent, and the ways in which their files go wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpusched.agents.gist.networks import heuristic
from gpusched.config.policies import load_policy
from gpusched.config.weights import Arrays, load_model, save_model
from gpusched.sched.warming import warm_up, warm_up_agent

YAML = "agent: gist\nfallback: easy\nbudget: 60s\n"
QUICK = """\
train: {generations: 2, population: 4, jobs: 40, validation: 1, validate_every: 1, validation_jobs: 40, width: 2}
"""
WAYS = ("missing", "truncated", "garbage", "of another shape", "NaN", "answers NaN", "of another agent")


def write(file: Path, seed: int = 0, width: int = 8, **job: float) -> Path:
    """A file of well formed weights: a heuristic, and beside it a network with small random numbers."""
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = heuristic(width, seed, **job)
    rng = np.random.default_rng(seed)
    for name in ("job.1.weight", "server.1.weight"):
        arrays[name] = rng.normal(0.0, 1e-3, arrays[name].shape).astype(np.float32)
    save_model(file, "gist", arrays, {"knows": "limit", "backfill": "easy"})
    return file


def paper_network(servers: list[tuple[int, int, int]], flavors: list[tuple[int, int, int]]) -> Arrays:
    """The paper's own network (GPUs, cores and MiB by row), which always prefers the last server."""
    bias = np.arange(len(flavors) * (len(servers) + 1), dtype=np.float32)
    bias[len(flavors) * len(servers) :] = -1.0  # the queues
    return {
        "q.0.weight": np.zeros((bias.size, 3 * len(servers)), np.float32), "q.0.bias": bias,
        "servers": np.array(servers, np.int64), "flavors": np.array(flavors, np.int64),
    }  # fmt: skip


def compile_passes(folder: Path) -> None:
    """The agent's passes, so that no controller spends its first decision, and its budget, on compiling them."""
    (folder / "gist.yaml").write_text(YAML)
    write(folder / "gist/default.safetensors")
    warm_up()
    warm_up_agent(load_policy(folder / "gist.yaml"), load_model(folder / "gist", "default", "gist"))


def put(file: Path, content: bytes) -> None:
    """The file with this content, at once: nobody sees half of it."""
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(content)
    part.replace(file)


def break_file(file: Path, how: str) -> None:
    """Make a good file a bad one."""
    content = file.read_bytes()
    arrays = heuristic()
    agent = "gist"
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        put(file, content[: len(content) // 2])
    elif how == "garbage":
        put(file, b"\0" * 100)
    else:
        if how == "of another shape":
            arrays["job.0.weight"] = np.zeros((8, 17), np.float32)
        elif how == "NaN":
            arrays["job.0.bias"] = np.full_like(arrays["job.0.bias"], np.nan)
        elif how == "answers NaN":
            arrays["job.base"] = np.full_like(arrays["job.base"], 3e38)
        else:
            assert how == "of another agent"
            agent = "rltune"
        save_model(file, agent, arrays, {"knows": "limit"})
