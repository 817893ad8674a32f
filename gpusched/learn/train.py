"""``gpusched train``: for every partition the agent's trainer, the final table, weights and card."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import msgspec

from gpusched.errors import GpuschedError, UsageError
from gpusched.inventory import find_inventory
from gpusched.learn import torch_
from gpusched.learn.card import Card, Data, code_version, now_utc, shape_of, trace_sha256, write_card
from gpusched.learn.checkpoint import Checkpoint
from gpusched.learn.data import Material, materials
from gpusched.learn.described import what_decides
from gpusched.learn.evaluate import before, table
from gpusched.learn.request import Arrays, Report, Trained, TrainJob, TrainRequest
from gpusched.model.policy import PolicySpec
from gpusched.model.units import iso_utc
from gpusched.models import CARD, digest_of, load_file, save_model
from gpusched.policies import POLICY, WEIGHTS, load_policy, policy_folders
from gpusched.sim.policies import of_spec


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """What came out for one partition: files, and their card."""

    partition: str
    weights: str
    card_file: str
    card: Card


def train(request: TrainRequest, report: Report) -> list[Made]:
    """Trains what is asked for, partition by partition.

    Raises:
        UsageError: Something asked for does not exist or contradicts something else.
        GpuschedError: It cannot be read or written, or torch is not installed.
    """
    spec, file = _policy(request.policy)
    torch_.need("torch")
    folder = _folder(spec, request.out)
    made = [(material, *_made(request, spec, material, folder, report)) for material in materials(request)]
    if file.resolve() != (folder / POLICY).resolve():
        shutil.copyfile(file, folder / POLICY)
    return [_judged(spec.name, folder, one, material, untrained, report) for material, one, untrained in made]


def _policy(text: str) -> tuple[PolicySpec, Path]:
    """The policy, and its file: a path, or a name as an inventory has it."""
    path = Path(text)
    if not path.exists() and os.sep not in text and not path.suffix:
        try:
            folders = policy_folders(find_inventory())
        except GpuschedError:
            folders = policy_folders(Path.cwd() / "inventory.yaml")
        path = next((f / f"{text}.yaml" for f in folders if (f / f"{text}.yaml").is_file()), path)
    spec = load_policy(path)
    if spec.agent is None:
        raise UsageError(f"{path}: this policy has no agent to train", "name one with 'agent:', such as gist")
    return spec, path / POLICY if path.is_dir() else path


def _folder(spec: PolicySpec, out: str | None) -> Path:
    """Where weights go: ``out``, else the folder beside the policy's file, made if need be.

    Raises:
        GpuschedError: It cannot be written.
    """
    folder = Path(out) if out is not None else Path(spec.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        hint = "say --out FOLDER, such as policies/NAME beside your inventory.yaml"
        raise GpuschedError(f"{folder}: weights cannot be written there: {error.strerror or error}", hint) from None
    return folder


def _made(
    request: TrainRequest, spec: PolicySpec, material: Material, folder: Path, report: Report
) -> tuple[Made, Arrays | None]:
    """Trains every seed, keeps the best, writes its weights; the card has no table yet. And its beginning."""
    begin = time.monotonic()
    found: list[tuple[Trained, int]] = []
    checkpoints = []
    for seed in dict.fromkeys(request.seeds):
        key = _key(spec, material, seed, request.device)
        checkpoint = Checkpoint(folder / f".{material.partition}-seed{seed}.checkpoint", key)
        checkpoints.append(checkpoint)
        job = TrainJob(
            spec=spec, partition=material.partition, stage=material.stage, held_out=material.held_out,
            workload=material.workload, declared=material.declared, seed=seed, device=request.device,
            checkpoint=checkpoint, ended=material.ended,
        )  # fmt: skip
        trainer = importlib.import_module(f"gpusched.learn.{spec.agent}")
        found.append((trainer.train_agent(job, report.of(f"{material.partition}, seed {seed}")), seed))
    best, seed = max(found, key=lambda pair: pair[0].score)
    weights = folder / f"{material.partition}{WEIGHTS}"
    save_model(weights, spec.agent or "", best.arrays, best.about)
    for checkpoint in checkpoints:
        checkpoint.remove()
    card = _card(request, spec, material, best, seed)
    card = msgspec.structs.replace(
        card, decides=what_decides(load_file(weights, spec.agent or "")),
        wall_time_s=round(time.monotonic() - begin, 1), weights=digest_of(weights.read_bytes()),
    )  # fmt: skip
    card_file = folder / f"{material.partition}{CARD}"
    write_card(card_file, card)
    made = Made(partition=material.partition, weights=str(weights), card_file=str(card_file), card=card)
    return made, best.untrained


def _key(spec: PolicySpec, material: Material, seed: int, device: str) -> str:
    """Digest of all that a training depends on; another one's checkpoint is of no use to it."""
    workload = None if material.workload is None else asdict(material.workload)
    pool = material.stage.pool
    depends = [
        spec.agent, spec.settings, spec.order, spec.place, spec.backfill, trace_sha256(material.stage.trace), workload,
        [msgspec.to_builtins(n) for n in shape_of(pool)], seed, device, code_version(),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()


def _card(request: TrainRequest, spec: PolicySpec, material: Material, trained: Trained, seed: int) -> Card:
    trace = material.stage.trace
    data = Data(
        name=trace.name,
        jobs=len(trace),
        sha256=trace_sha256(trace),
        held_out_jobs=sum(len(s.trace) for s in material.held_out),
        last=None if trace.epoch is None else iso_utc(trace.epoch + float(trace.submit[-1])),
    )
    return Card(
        policy=spec.name, agent=spec.agent or "", partition=material.partition, trained_at=now_utc(),
        code_version=code_version(), weights="", device=request.device, seed=seed,
        seeds=tuple(dict.fromkeys(request.seeds)), wall_time_s=0.0,
        knows=trained.about.get("knows", "limit"), inventory=shape_of(material.stage.pool), trace=data,
        hyper_parameters=dict(trained.hyper_parameters), metrics=trained.rows or (),
        notes=(*trained.notes, *material.stage.notes),
    )  # fmt: skip


def _judged(
    name: str, folder: Path, made: Made, material: Material, untrained: Arrays | None, report: Report
) -> Made:
    """With the final table, made on the held-out part by the weights as they lie there."""
    if made.card.metrics or not material.held_out:
        return made
    told = report.of(f"{material.partition}, table")
    spec = msgspec.structs.replace(load_policy(folder), name=name)
    agent = of_spec(spec, name, material.partition)
    rows = table(agent, material.held_out, told.step, before(agent, untrained))
    card = msgspec.structs.replace(made.card, metrics=rows)
    write_card(Path(made.card_file), card)
    return msgspec.structs.replace(made, card=card)
