"""The training card: data, code, settings and results of a set of weights. YAML beside the weights."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gpusched import __version__
from gpusched.agents.common.request import ResultRow, TrainerResult
from gpusched.agents.training.gate import GateVerdict
from gpusched.config.paths import write_atomic
from gpusched.config.weights import run_time_source
from gpusched.model.policy import PolicySpec
from gpusched.sim.pool import Pool
from gpusched.traces.file import FLOATS, INTS
from gpusched.traces.trace import Trace

_CODE = ("agents", "forecast", "sched", "sim", "study", "traces")


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """A count of identical nodes; -1 cores or MiB: not modelled."""

    count: int
    gpus: int
    cores: int
    memory_mib: int
    gpu_type: str


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """The workload trained on: its name, jobs, digest; jobs held out.

    ``last``: when the last job learned from was submitted (UTC), so that a promotion can be judged on days after it;
    None where the trace has no calendar. ``public``: jobs of other clusters, from public traces.
    """

    name: str
    jobs: int
    sha256: str
    held_out_jobs: int
    last: str | None = None
    public: bool = False


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on the card.

    Attributes:
        seed: Of these weights. seeds: All trained; the best in the trainer's own validation was kept.
        weights: Digest of the weights file, as in the versions of policies; "": not saved.
        device: Used for training.
        decides: A description of the weights (`gpusched.agents.describe.describe_weights`).
        metrics: The final table. gate: The verdict on it.
        wall_time_s: Of training all seeds, without the final table.
    """

    policy: str
    agent: str
    partition: str
    trained_at: str
    code_version: str
    weights: str
    device: str
    seed: int
    seeds: tuple[int, ...]
    wall_time_s: float
    knows: str
    inventory: tuple[Nodes, ...]
    trace: Data
    hyper_parameters: dict[str, Any]
    metrics: tuple[ResultRow, ...]
    notes: tuple[str, ...]
    gate: GateVerdict
    decides: str = ""


def new_card(
    spec: PolicySpec, partition: str, trained: TrainerResult, data: Data, verdict: GateVerdict, *, weights: str,
    decides: str, wall_time_s: float, notes: Sequence[str], pool: Pool | None = None, device: str = "cpu",
    seed: int = 0, seeds: Sequence[int] = (0,),
) -> Card:  # fmt: skip
    """Return the card of weights that were trained just now; see `Card`.

    Args:
        spec: The policy that they are for.
        partition: The partition that they are for.
        trained: What the trainer returned.
        data: What they were trained on.
        verdict: Of the gate.
        weights: Digest of their file; "": not saved.
        decides: `describe_weights` of them.
        wall_time_s: Of the training.
        notes: Beside the trainer's.
        pool: The nodes; None: of several clusters.
        device: Used for training.
        seed: Of these weights.
        seeds: All that were trained.
    """
    return Card(
        policy=spec.name, agent=spec.agent or "", partition=partition,
        trained_at=datetime.now(UTC).isoformat(timespec="seconds"), code_version=code_version(), weights=weights,
        device=device, seed=seed, seeds=tuple(dict.fromkeys(seeds)), wall_time_s=wall_time_s,
        knows=run_time_source(trained.about), inventory=() if pool is None else shape_of(pool), trace=data,
        hyper_parameters=dict(trained.hyper_parameters), metrics=trained.rows or (),
        notes=(*trained.notes, *notes), decides=decides, gate=verdict,
    )  # fmt: skip


def write_card(path: Path, card: Card) -> None:
    """Write the card atomically."""
    content = msgspec.to_builtins(card)
    content["metrics"] = [
        {k: v for k, v in row.items() if v not in (None, "") and v is not False} for row in content["metrics"]
    ]
    write_atomic(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120).encode())


def code_version() -> str:
    """Return the package's version, with a digest of the sources that weights depend on."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for source in sorted(f for folder in _CODE for f in (package / folder).rglob("*.py")):
        digest.update(f"{source.relative_to(package)}\0".encode() + source.read_bytes())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def trace_sha256(trace: Trace) -> str:
    """Return a digest of the jobs' submissions and runs; names of jobs and users are not part of it."""
    digest = hashlib.sha256()
    for column in (*FLOATS, *INTS):
        digest.update(f"{column}\0".encode() + getattr(trace, column).tobytes())
    return digest.hexdigest()


def shape_of(pool: Pool) -> tuple[Nodes, ...]:
    """Return the pool as counts of identical nodes, in its order."""
    columns = (pool.gpus.tolist(), pool.cores.tolist(), pool.memory_mib.tolist(), pool.gpu_type.tolist())
    kinds = Counter(zip(*columns, strict=True))
    return tuple(
        Nodes(count=count, gpus=gpus, cores=cores, memory_mib=memory, gpu_type=pool.gpu_types[kind])
        for (gpus, cores, memory, kind), count in kinds.items()
    )
