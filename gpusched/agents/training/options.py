"""Options of ``gpusched train`` that do not apply: refused before any data is read, or before any training."""

from __future__ import annotations

from collections.abc import Sequence

from gpusched.agents.base import installed_parts
from gpusched.agents.common import torch_
from gpusched.agents.common.data import TrainingData
from gpusched.agents.common.request import TrainRequest
from gpusched.errors import UsageError
from gpusched.model.policy import PolicySpec


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
