"""Online learning of a shadow's agent: a new version of its weights, by what the live policy decided meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from gpusched.agents.base import installed_parts
from gpusched.agents.common.checkpoint import Checkpoint
from gpusched.agents.common.data import TrainingData, load_training_data
from gpusched.agents.common.request import TrainerResult, TrainJob, TrainRequest
from gpusched.agents.describe import describe_weights
from gpusched.agents.training.card import Card, Data, new_card, trace_sha256, write_card
from gpusched.agents.training.gate import GateVerdict
from gpusched.config.paths import sync_folder
from gpusched.config.policies import WEIGHTS, load_policy
from gpusched.config.weights import CARD, digest_of, load_file, load_model, save_model
from gpusched.errors import GpuschedError
from gpusched.model.policy import PolicySpec
from gpusched.model.units import iso_utc
from gpusched.sched.agent import ComponentErrors

ONLINE_OF, ONLINE_UNTIL = "online_of", "online_until"
"""In weights learned online: the version of the shadow that they began with, and until when decisions are known."""


def update_online(request: TrainRequest, shadow: PolicySpec, start: Path, since: float, until: float) -> Card:
    """Update the weights of one partition, and write them as a new policy folder, ``request.out``, all or nothing.

    Args:
        request: The partition, and which jobs to read.
        shadow: The policy, as frozen.
        start: The folder of the weights to go on from.
        since: Decisions until then are known to them (Unix seconds; -inf: none are).
        until: Decisions until then are learned from.

    Raises:
        GpuschedError: There is too little to learn from, nothing better was found, or a file cannot be read or written.
    """
    began, agent = time.monotonic(), shadow.agent or ""
    (material,) = load_training_data(msgspec.structs.replace(request, slices=shadow.traits.slices))
    online = installed_parts(agent).online
    if online is None:
        raise GpuschedError(f"agent {agent} has no part 'online'")
    epoch, target = material.scenario.trace.epoch or 0.0, Path(request.out or "")
    model = load_model(start, material.partition, agent)
    with tempfile.TemporaryDirectory() as nothing:
        job = TrainJob(
            spec=shadow, seed=0, device="cpu", checkpoint=Checkpoint(Path(nothing) / "none", ""), **material._asdict()
        )  # fmt: skip
        with ComponentErrors(agent):
            learned = online().update_agent(job, model, since - epoch)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Policies are not searched for below a folder with a dot name: a crash leaves nothing half done.
    draft = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent.parent))
    try:
        folder = draft / target.name
        folder.mkdir()
        for file in Path(shadow.folder).glob("*.yaml"):  # also its fallback
            if not file.name.endswith(CARD):
                shutil.copyfile(file, folder / file.name)
        weights = folder / f"{material.partition}{WEIGHTS}"
        about = {**learned.about, ONLINE_OF: shadow.version, ONLINE_UNTIL: f"{until:.0f}"}
        save_model(weights, agent, learned.arrays, about)
        card = _card(shadow, material, learned, weights, until, round(time.monotonic() - began, 1))
        write_card(folder / f"{material.partition}{CARD}", card)
        load_policy(folder)  # fails here rather than at the next reader
        if target.exists():
            os.replace(target, draft / "old")
        os.replace(folder, target)
        sync_folder(target.parent)
    except OSError as error:
        raise GpuschedError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return card


def _card(
    shadow: PolicySpec, material: TrainingData, learned: TrainerResult, weights: Path, until: float, wall_time_s: float
) -> Card:  # fmt: skip
    trace = material.scenario.trace
    # Not the last submission: later decisions on jobs submitted before were learned from, too.
    data = Data(
        name=trace.name, jobs=len(trace), sha256=trace_sha256(trace), held_out_jobs=0, last=iso_utc(until - 1.0)
    )
    return new_card(
        shadow, material.partition, learned, data,
        GateVerdict(outcome="not judged", line="later days judge it, before a promotion"),
        weights=digest_of(weights.read_bytes()), decides=describe_weights(load_file(weights, shadow.agent or "")),
        wall_time_s=wall_time_s, pool=material.scenario.pool,
        notes=(f"goes on from {shadow.name} {shadow.version}", *material.scenario.notes),
    )  # fmt: skip
