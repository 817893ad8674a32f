"""``gpusched train``: run the agent's trainer for every partition; write the final table, weights and card."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gpusched.agents.base import installed_parts
from gpusched.agents.common import torch_
from gpusched.agents.common.checkpoint import Checkpoint
from gpusched.agents.common.data import TrainingData, load_training_data
from gpusched.agents.common.evaluate import final_table, untrained_policy
from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob, TrainRequest
from gpusched.agents.describe import describe_weights
from gpusched.agents.training.card import Card, Data, code_version, shape_of, trace_sha256, write_card
from gpusched.config.paths import state_folder
from gpusched.config.policies import BUILT_IN, POLICY, WEIGHTS, load_policy, names_in, policy_file, policy_folders
from gpusched.config.weights import CARD, Arrays, digest_of, load_file, run_time_source, save_model
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.policy import AGENTS, PolicySpec
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import iso_utc
from gpusched.queue.lastgood import inventory_path
from gpusched.sched.agent import component_errors
from gpusched.sim.orders import folders_in_force
from gpusched.sim.policies import policy_of_spec


class TrainedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files trained for one partition, and their card."""

    partition: str
    weights: str
    card_file: str
    card: Card


def train(request: TrainRequest, report: TrainingReport) -> list[TrainedFiles]:
    """Train the requested policy, partition by partition.

    Raises:
        UsageError: An option names something that does not exist, or options contradict each other.
        GpuschedError: A file cannot be read or written, or torch is not installed.
    """
    spec, file = _load_policy(request)
    _check_device(request, spec)
    if spec.agent in AGENTS:
        torch_.require("torch")
    found = load_training_data(request)
    _check_enough(request, found, report)
    folder = _output_folder(request, spec)
    made = [(material, *_train_partition(request, spec, material, folder, report)) for material in found]
    if file.resolve() != (folder / POLICY).resolve():
        shutil.copyfile(file, folder / POLICY)
    return [_add_final_table(spec, folder, files, material, untrained, report) for material, files, untrained in made]


def _check_device(request: TrainRequest, spec: PolicySpec) -> None:
    """Refuse a GPU for an agent that would not use it."""
    on_gpu = spec.agent == "dl2" or (spec.agent == "gist" and spec.settings.get("variant", "scale") != "scale")
    if request.device == "cuda" and not on_gpu and spec.agent in AGENTS:
        raise UsageError(f"--device cuda: agent {spec.agent} of {spec.name} trains on the CPU only", "omit it")


MIN_JOBS = 100
"""Fewer recorded jobs are refused without ``--force``: the held-out fifth would have less than 20 jobs."""


def _load_policy(request: TrainRequest) -> tuple[PolicySpec, Path]:
    """Load the policy, given by a path or by its name in an inventory; return it and its file."""
    path, folders = Path(request.policy), folders_in_force(request.inventory)
    if not path.exists() and os.sep not in request.policy and not path.suffix:
        path = policy_file(request.policy, folders) or path
        if not path.exists():
            raise UsageError(f"no policy named {request.policy!r}{did_you_mean(request.policy, names_in(folders))}")
    spec = load_policy(path, folders)
    if spec.agent is None:
        raise UsageError(f"{path}: this policy has no agent to train", "name one with 'agent:', such as gist")
    return spec, path / POLICY if path.is_dir() else path


def _check_enough(request: TrainRequest, found: list[TrainingData], report: TrainingReport) -> None:
    """Refuse to train on too few recorded jobs; with ``--force``, report it only.

    Raises:
        UsageError: A partition has fewer than `MIN_JOBS`, without ``--force``.
    """
    recorded = {m.partition: len(m.scenario.trace) for m in found if m.workload is None}
    counts = ", ".join(f"{partition}: {jobs}" for partition, jobs in recorded.items() if jobs < MIN_JOBS)
    if not counts:
        return
    problem = f"too few jobs to train on ({counts}); at least {MIN_JOBS} are needed"
    if not request.force:
        hint = "wait for more, use a longer --since, --trace or --generate, or use --force"
        raise UsageError(problem, hint)
    report.note(f"{problem}; continuing because of --force")


def _output_folder(request: TrainRequest, spec: PolicySpec) -> Path:
    """Return the folder for weights, created if missing: ``--out``, else the folder of the policy's file.

    Weights of built-in policies go to the site's own policies, never into the installed package.

    Raises:
        UsageError: The folder is in the installed package.
        GpuschedError: The folder is not writable.
    """
    folder = Path(request.out) if request.out is not None else Path(spec.folder)
    if request.out is None and _is_installed(folder):
        folder = _site_folder(request) / spec.name
    hint = "use --out FOLDER, such as policies/NAME next to your inventory.yaml"
    if _is_installed(folder):
        raise UsageError(f"{folder} is part of gpusched itself: choose another folder for your weights", hint)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise GpuschedError(f"{folder}: weights cannot be written there: {error.strerror or error}", hint) from None
    return folder


def _is_installed(folder: Path) -> bool:
    """Return whether the folder is in the installed package, with links resolved."""
    return folder.resolve().is_relative_to(BUILT_IN.parents[1].resolve())


def _site_folder(request: TrainRequest) -> Path:
    """Return the site's policies: ``$GPUSCHED_POLICIES``, else ``policies/`` beside the inventory, existing or not.

    Raises:
        UsageError: There is no inventory.
    """
    inventory = Path(request.inventory) if request.inventory is not None else inventory_path(state_folder())
    first = policy_folders(inventory)[0]
    return inventory.absolute().parent / "policies" if first == BUILT_IN else first


def _train_partition(
    request: TrainRequest, spec: PolicySpec, material: TrainingData, folder: Path, report: TrainingReport
) -> tuple[TrainedFiles, Arrays | None]:
    """Train every seed; write the best weights and a card without a table; return also the initial weights."""
    started, agent = time.monotonic(), spec.agent or ""
    trainer = installed_parts(agent).train
    if trainer is None:
        raise UsageError(f"agent {agent} of {spec.name} cannot be trained here", "its package says how it is")
    found: list[tuple[TrainerResult, TrainJob]] = []
    for seed in dict.fromkeys(request.seeds):
        key = _checkpoint_key(spec, material, seed, request.device)
        checkpoint = Checkpoint(folder / f".{material.partition}-seed{seed}.checkpoint", key)
        job = TrainJob(spec=spec, seed=seed, device=request.device, checkpoint=checkpoint, **material._asdict())
        with component_errors(agent):
            found.append((trainer().train_agent(job, report.of(f"{material.partition}, seed {seed}")), job))
    best, best_job = max(found, key=lambda pair: pair[0].score)
    weights, card_file = (folder / f"{material.partition}{kind}" for kind in (WEIGHTS, CARD))
    save_model(weights, agent, best.arrays, best.about)
    for _, job in found:
        job.checkpoint.remove()
    decides = describe_weights(load_file(weights, agent))
    card = _card(
        request, best_job, best, decides, digest_of(weights.read_bytes()), round(time.monotonic() - started, 1)
    )
    write_card(card_file, card)
    made = TrainedFiles(partition=material.partition, weights=str(weights), card_file=str(card_file), card=card)
    return made, best.untrained


def _checkpoint_key(spec: PolicySpec, material: TrainingData, seed: int, device: str) -> str:
    """Return a digest of everything that a training depends on; checkpoints with another digest are ignored."""
    workload = None if material.workload is None else asdict(material.workload)
    pool = material.scenario.pool
    depends = [
        spec.agent, spec.settings, spec.order, spec.place, spec.backfill, trace_sha256(material.scenario.trace),
        workload, [msgspec.to_builtins(n) for n in shape_of(pool)], seed, device, code_version(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()


def _card(
    request: TrainRequest, job: TrainJob, trained: TrainerResult, decides: str, weights: str, wall_time_s: float
) -> Card:  # fmt: skip
    trace = job.scenario.trace
    data = Data(
        name=trace.name, jobs=len(trace), sha256=trace_sha256(trace),
        held_out_jobs=sum(len(s.trace) for s in job.held_out),
        last=None if trace.epoch is None else iso_utc(trace.epoch + float(trace.submit[-1])),
    )  # fmt: skip
    return Card(
        policy=job.spec.name, agent=job.spec.agent or "", partition=job.partition,
        trained_at=datetime.now(UTC).isoformat(timespec="seconds"), code_version=code_version(), weights=weights,
        device=job.device, seed=job.seed, seeds=tuple(dict.fromkeys(request.seeds)), wall_time_s=wall_time_s,
        knows=run_time_source(trained.about), inventory=shape_of(job.scenario.pool), trace=data,
        hyper_parameters=dict(trained.hyper_parameters), metrics=trained.rows or (),
        notes=(*trained.notes, *job.scenario.notes), decides=decides,
    )  # fmt: skip


def _add_final_table(
    trained: PolicySpec,
    folder: Path,
    made: TrainedFiles,
    material: TrainingData,
    untrained: Arrays | None,
    report: TrainingReport,
) -> TrainedFiles:
    """Add the final table: a replay of the held-out part with the saved weights."""
    if made.card.metrics or not material.held_out:
        return made
    table_report = report.of(f"{material.partition}, table")
    spec = msgspec.structs.replace(trained, folder=str(folder))
    agent = policy_of_spec(spec, spec.name, material.partition)
    rows = final_table(agent, material.held_out, table_report.step, untrained_policy(agent, untrained))
    card = msgspec.structs.replace(made.card, metrics=rows)
    write_card(Path(made.card_file), card)
    return msgspec.structs.replace(made, card=card)
