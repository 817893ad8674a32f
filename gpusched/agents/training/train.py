"""``gpusched train``: train the agent of every partition, judge it by the final table, save weights and card.

Nothing usable is written before the verdict (`gate`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from gpusched.agents.base import installed_parts
from gpusched.agents.common import torch_
from gpusched.agents.common.checkpoint import Checkpoint, with_prefix
from gpusched.agents.common.data import TrainingData, load_training_data
from gpusched.agents.common.evaluate import final_table, untrained_policy
from gpusched.agents.common.request import ResultRow, TrainerResult, TrainingReport, TrainJob, TrainRequest
from gpusched.agents.describe import describe_weights
from gpusched.agents.training.card import Card, Data, code_version, new_card, shape_of, trace_sha256, write_card
from gpusched.agents.training.gate import GateVerdict, judge
from gpusched.config.paths import state_folder
from gpusched.config.policies import BUILT_IN, POLICY, WEIGHTS, load_policy, names_in, policy_file, policy_folders
from gpusched.config.weightfiles import CARD, KEPT_ANYWAY
from gpusched.config.weights import digest_of, load_file, make_writable, save_model
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.policy import AGENTS, PolicySpec
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import iso_utc
from gpusched.queue.lastgood import inventory_path
from gpusched.sched.agent import ComponentErrors
from gpusched.sim.orders import folders_in_force
from gpusched.sim.policies import policy_of_spec


class TrainedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files trained for one partition, and their card; None: not saved, and the old files are as before."""

    partition: str
    weights: str | None
    card_file: str | None
    card: Card


def train(request: TrainRequest, report: TrainingReport) -> list[TrainedFiles]:
    """Train the requested policy, partition by partition.

    Raises:
        UsageError: An option names something that does not exist, or options contradict each other.
        GpuschedError: A file cannot be read or written, or torch is not installed.
    """
    spec, file = _load_policy(request)
    check_options(request, spec)
    if spec.agent in AGENTS:
        torch_.check_installed("torch")
    check_device(request, spec)
    found = load_training_data(msgspec.structs.replace(request, slices=spec.traits.slices))
    _check_enough(request, found, report)
    check_held_out(request, spec, found)
    folder, made = _output_folder(request, spec), []
    for material in found:
        files = _PartitionTraining(request, spec, material, folder, report).run()
        if files.weights is not None and file.resolve() != (folder / POLICY).resolve():
            shutil.copyfile(file, folder / POLICY)
        made.append(files)
    return made


def not_saved(made: Sequence[TrainedFiles]) -> GpuschedError | None:
    """Return the error that names, with their figures, the partitions for which the gate was closed; None: none."""
    lines = [f"{of.partition}: not saved: {of.card.gate.line}" for of in made if of.weights is None]
    return GpuschedError("; ".join(lines), "--keep-anyway saves it all the same") if lines else None


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
    make_writable(folder, hint)
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


class _PartitionTraining:
    """The training of one partition's agent; ``folder``: of its weights, card and checkpoints."""

    def __init__(
        self, request: TrainRequest, spec: PolicySpec, material: TrainingData, folder: Path, report: TrainingReport
    ) -> None:
        self._request, self._spec, self._agent = request, spec, spec.agent or ""
        self._material, self._folder, self._report = material, folder, report

    def run(self) -> TrainedFiles:
        """Train, make the final table, save weights and card if the gate opens; the old ones stay if it does not."""
        request, partition = self._request, self._material.partition
        store = self._checkpoint("trained", request.seeds)
        finished = load_finished(store)
        if finished is None:
            finished = self._train_seeds()
            save_finished(store, finished)
            for seed in request.seeds:
                self._checkpoint(f"seed{seed}", (seed,)).remove()
        else:
            self._report.note(f"{partition}: already trained on these jobs by an earlier run")
        decides, rows = self._evaluate(finished.result)
        finished = finished._replace(result=replace(finished.result, rows=rows))
        verdict = judge(rows, _is_start(finished.result))
        judged_later = request.judged_later and verdict.outcome == "not judged"
        if verdict.closed and not (request.keep_anyway or judged_later):
            save_finished(store, finished)
            card = self._card(finished, verdict, decides, "")
            return TrainedFiles(partition=partition, weights=None, card_file=None, card=card)
        made = self._save(finished, verdict, decides)
        store.remove()
        return made

    def _train_seeds(self) -> FinishedTraining:
        """Train every seed; return the best in the trainer's own validation."""
        started, spec, material = time.monotonic(), self._spec, self._material
        trainer = installed_parts(self._agent).train
        if trainer is None:
            raise UsageError(f"agent {self._agent} of {spec.name} cannot be trained here", "its package says how it is")
        found: list[tuple[TrainerResult, int]] = []
        for seed in dict.fromkeys(self._request.seeds):
            checkpoint = self._checkpoint(f"seed{seed}", (seed,))
            job = TrainJob(
                spec=spec, seed=seed, device=self._request.device, checkpoint=checkpoint, **material._asdict()
            )
            report = self._report.of(f"{material.partition}, seed {seed}")
            with ComponentErrors(self._agent):
                found.append((trainer().train_agent(job, report), seed))
        best, seed = max(found, key=lambda pair: pair[0].score)
        return FinishedTraining(best, seed, round(time.monotonic() - started, 1))

    def _evaluate(self, result: TrainerResult) -> tuple[str, tuple[ResultRow, ...]]:
        """Return the description of the weights, and the final table: the trainer's own, or replays of held-out jobs.

        Replays load weights from a folder: here one of drafts, so that they are not used before the verdict.
        """
        material = self._material
        with tempfile.TemporaryDirectory(prefix="gpusched-train-") as drafts:
            file = Path(drafts) / f"{material.partition}{WEIGHTS}"
            save_model(file, self._agent, result.arrays, result.about)
            decides = describe_weights(load_file(file, self._agent))
            if result.rows or not material.held_out:
                return decides, result.rows or ()
            spec = msgspec.structs.replace(self._spec, folder=drafts)
            policy = policy_of_spec(spec, spec.name, material.partition)
            step = self._report.of(f"{material.partition}, table").step
            return decides, final_table(policy, material.held_out, step, untrained_policy(policy, result.untrained))

    def _save(self, finished: FinishedTraining, verdict: GateVerdict, decides: str) -> TrainedFiles:
        """Write weights and card; both are marked if the gate was closed."""
        about, partition = dict(finished.result.about), self._material.partition
        if verdict.closed and self._request.keep_anyway:
            verdict = msgspec.structs.replace(verdict, kept_anyway=True)
            about[KEPT_ANYWAY] = f"{verdict.outcome}: {verdict.line}"
        weights, card_file = (self._folder / f"{partition}{kind}" for kind in (WEIGHTS, CARD))
        save_model(weights, self._agent, finished.result.arrays, about)
        card = self._card(finished, verdict, decides, digest_of(weights.read_bytes()))
        write_card(card_file, card)
        return TrainedFiles(partition=partition, weights=str(weights), card_file=str(card_file), card=card)

    def _card(self, finished: FinishedTraining, verdict: GateVerdict, decides: str, weights: str) -> Card:
        request, material, trace = self._request, self._material, self._material.scenario.trace
        data = Data(
            name=trace.name, jobs=len(trace), sha256=trace_sha256(trace),
            held_out_jobs=sum(len(s.trace) for s in material.held_out),
            last=None if trace.epoch is None else iso_utc(trace.epoch + float(trace.submit[-1])),
        )  # fmt: skip
        return new_card(
            self._spec, material.partition, finished.result, data, verdict, weights=weights, decides=decides,
            wall_time_s=finished.wall_time_s, notes=material.scenario.notes, pool=material.scenario.pool,
            device=request.device, seed=finished.seed, seeds=request.seeds,
        )  # fmt: skip

    def _checkpoint(self, name: str, seeds: Sequence[int]) -> Checkpoint:
        """Return a checkpoint with a digest of everything that a training depends on; others are ignored."""
        material = self._material
        policy = msgspec.structs.replace(self._spec, name="", description="", version="", folder="")
        workload = None if material.workload is None else asdict(material.workload)
        traces = [trace_sha256(scenario.trace) for scenario in (material.scenario, *material.held_out)]
        ended = None if material.ended is None else hashlib.sha256(material.ended.tobytes()).hexdigest()
        depends = [
            msgspec.to_builtins(policy), traces, ended, workload, msgspec.to_builtins(shape_of(material.scenario.pool)),
            list(dict.fromkeys(seeds)), self._request.device, code_version(),
        ]  # fmt: skip
        key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
        return Checkpoint(self._folder / f".{material.partition}-{name}.checkpoint", key)


def _is_start(result: TrainerResult) -> bool:
    """Return whether the search found nothing better than its start."""
    start = result.untrained
    return start is not None and start.keys() == result.arrays.keys() and all(
        np.array_equal(start[name], array) for name, array in result.arrays.items()
    )  # fmt: skip


# Finished trainings, kept on disk until the gate has decided: a kill, or a closed gate, does not cost the training

_TRAINED, _START = "trained.", "start."


class FinishedTraining(NamedTuple):
    """The best result of all seeds, its seed, and the seconds that training all of them took."""

    result: TrainerResult
    seed: int
    wall_time_s: float


def load_finished(store: Checkpoint) -> FinishedTraining | None:
    """Return the training of the same inputs that an earlier run finished and did not save as weights."""
    saved = store.load()
    if saved is None:
        return None
    arrays, state = saved
    rows = state["rows"]
    result = TrainerResult(
        arrays=with_prefix(_TRAINED, arrays), untrained=with_prefix(_START, arrays) or None, about=state["about"],
        score=state["score"], hyper_parameters=state["hyper_parameters"], notes=tuple(state["notes"]),
        rows=None if rows is None else msgspec.convert(rows, tuple[ResultRow, ...]),
    )  # fmt: skip
    return FinishedTraining(result, state["seed"], state["wall_time_s"])


def save_finished(store: Checkpoint, finished: FinishedTraining) -> None:
    """Keep a finished training; its ``rows``, once known, are kept with it."""
    result = finished.result
    arrays = {_TRAINED + name: array for name, array in result.arrays.items()}
    arrays |= {_START + name: array for name, array in (result.untrained or {}).items()}
    state = {
        "about": result.about, "score": result.score, "hyper_parameters": dict(result.hyper_parameters),
        "notes": result.notes, "rows": msgspec.to_builtins(result.rows), "seed": finished.seed,
        "wall_time_s": finished.wall_time_s,
    }  # fmt: skip
    store.save(arrays, state)


# Options that do not apply are refused before any data is read, or before any training


def check_options(request: TrainRequest, spec: PolicySpec) -> None:
    """Refuse options that the source of the jobs, or the agent's setting, does not use.

    Raises:
        UsageError: One was given.
    """
    if request.trace is not None and request.generate is not None:
        raise UsageError("--trace and --generate cannot be combined", "use one of them")
    given = _given(request)
    if in_papers_setting(spec):
        if wrong := [name for name in given if name not in _OF_NODES]:
            raise UsageError(
                f"{wrong[0]} does not apply to {spec.name}",
                f"its variant {spec.settings['variant']} trains on episodes of the partition's flavors; omit it",
            )
        return
    for names, source in _SOURCES.items():
        of_them = any(getattr(request, one) is not None for one in source)
        if not of_them and (wrong := [name for name in names if name in given]):
            needed = " or ".join(f"--{one}" for one in source)
            raise UsageError(f"{wrong[0]} needs a workload", f"name one with {needed}, or omit it")
    if request.generate is not None and (wrong := [name for name in ("--since", "--until") if name in given]):
        raise UsageError(f"{wrong[0]} selects recorded jobs; --generate draws them", "omit one of them")


_SOURCES = {
    ("--format", "--vc"): ("trace",),
    ("--load", "--nodes", "--gpus-per-node"): ("trace", "generate"),
}
_OF_NODES = ("--inventory",)


def _given(request: TrainRequest) -> tuple[str, ...]:
    """Return the options on jobs and nodes that were given."""
    options = {
        "--trace": request.trace, "--generate": request.generate, "--format": request.format, "--vc": request.vc,
        "--since": request.since, "--until": request.until, "--load": request.load, "--nodes": request.nodes,
        "--gpus-per-node": request.gpus_per_node, "--inventory": request.inventory,
    }  # fmt: skip
    return tuple(name for name, value in options.items() if value is not None)


def in_papers_setting(spec: PolicySpec) -> bool:
    """Return whether the agent trains on episodes of its paper, and makes its own final table."""
    return spec.agent == "gist" and spec.settings.get("variant", "scale") != "scale"


def check_device(request: TrainRequest, spec: PolicySpec) -> None:
    """Refuse a device that the agent would not use, or that is not there.

    Raises:
        UsageError: The agent trains on the CPU only, or there is no such device.
        GpuschedError: Torch finds no GPU.
    """
    agent = spec.agent or ""
    papers_only = agent == "gist" and not in_papers_setting(spec)
    if request.device == "cuda" and (papers_only or "cuda" not in installed_parts(agent).devices):
        raise UsageError(f"--device cuda: agent {agent} of {spec.name} trains on the CPU only", "omit it")
    torch_.check_device(request.device)


def check_held_out(request: TrainRequest, spec: PolicySpec, found: Sequence[TrainingData]) -> None:
    """Refuse to train weights that could not be saved, because no held-out part would judge them.

    Raises:
        UsageError: A partition has no held-out part.
    """
    if request.keep_anyway or request.judged_later or in_papers_setting(spec):
        return
    if unjudged := [of.partition for of in found if not of.held_out]:
        why = "--hold-out 0" if request.hold_out == 0 else f"{', '.join(unjudged)}: no job was submitted late enough"
        raise UsageError(
            f"{why}: no held-out jobs would judge the weights, so they would not be saved",
            "hold some out, or use --keep-anyway",
        )
