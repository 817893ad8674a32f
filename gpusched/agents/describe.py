"""Descriptions of trained weights, read from the arrays: a linear rule, or also a neural network."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpusched.config.weights import Arrays, TrainedModel
from gpusched.model.units import count_of
from gpusched.sched.agent import ComponentErrors, agent_parts

_NO_NETWORK = "no neural network"
_CONTENTION = "the rule of contention: what a place costs against how long the job has waited"
Layer = tuple[npt.NDArray[np.generic], npt.NDArray[np.generic] | None]


def describe_weights(model: TrainedModel) -> str:
    """Return a phrase, such as ``a linear rule of 21 weights (job 6, server 8, hold 7), no neural network``."""
    ours = {"gist": _gist, "rltune": _rltune, "dl2": _dl2, "maifs": _maifs, "topology": _topology}
    if model.agent in ours:
        return ours[model.agent](model)
    sizes = ", ".join(f"{name} {array.size}" for name, array in sorted(model.arrays.items()))
    with ComponentErrors(model.agent):
        describe = agent_parts(model.agent).describe
        return describe(model) if describe is not None else f"weights of another package's agent ({sizes})"


def _gist(model: TrainedModel) -> str:
    from gpusched.agents.gist.networks import QUESTIONS, STARTS, start
    from gpusched.agents.gist.paper_pass import DECIDES

    arrays = model.arrays
    if (variant := model.about.get("variant", "scale")) != "scale":
        network = f"a {_network_text(_layers_of(arrays, 'q'))} in the paper's own setting"
        if variant not in DECIDES or "servers" not in arrays:
            return f"{network}; it decides nothing live"
        return f"{network}; it decides on the {len(arrays['servers'])} servers that it was trained for"
    used = {name: _count_used(arrays.get(f"{name}.base")) for name in QUESTIONS}
    rule = f"a linear rule of {sum(used.values())} weights ({', '.join(f'{of} {count}' for of, count in used.items())})"
    for layers in (_layers_of(arrays, name) for name in QUESTIONS):
        if _has_nonzero_output(layers):
            return f"{rule}, and a {_network_text(layers)}"
    for name in STARTS:
        initial = start(name, width=0)
        if all(np.array_equal(initial[f"{q}.base"], arrays.get(f"{q}.base", np.empty(0))) for q in QUESTIONS):
            return f"untrained, its start '{name}': {rule}, {_NO_NETWORK}"
    return f"{rule}, {_NO_NETWORK}"


def _rltune(model: TrainedModel) -> str:
    arrays = model.arrays
    if model.preempts:
        odds = ", by odds of run times" if _count_used(arrays.get("prior")) else ""
        return f"a rank of {_count_used(arrays.get('weights'))} weights chosen by replays{odds}, {_NO_NETWORK}"
    name = f" '{model.about['base']}'" if model.about.get("base") else ""
    estimates = ", by estimated run times" if model.knows == "estimate" else ""
    weights = count_of(_count_used(arrays.get("linear")), "weight")
    rule = f"a linear rule{name} of {weights} chosen by replays{estimates}"
    layers = _layers_of(arrays, "net")
    strength = float(np.abs(np.asarray(arrays.get("strength", np.zeros(1)), np.float64)).max())
    if strength == 0.0 or not _has_nonzero_output(layers):
        return f"{rule}, {_NO_NETWORK}"
    attention = " with attention" if any(key.startswith("attention.") for key in arrays) else ""
    return f"{rule}, and a {_network_text(layers)}{attention} at strength {strength:g}"


def _dl2(model: TrainedModel) -> str:
    from gpusched.agents.dl2.decide import INPUTS, SHARED

    out, score = model.arrays.get("trained.out"), f"a linear score of {INPUTS} inputs"
    if out is None or not out.any():
        return f"{score}, {_NO_NETWORK}"
    return f"{score}, and a network of {INPUTS + SHARED}-{len(out)}-1 beside it"


def _maifs(model: TrainedModel) -> str:
    from gpusched.agents.maifs.network import GROUP, HIDDEN, JOB

    used = {name for name in ("job.out", "group.skip", "group.out") if _count_used(model.arrays.get(name))}
    rule = f"groups of nodes that bid by a linear rule of {JOB} inputs of a job"
    if "group.skip" in used:
        rule += f", with prices by {GROUP} inputs of a group"
    if "group.out" in used and model.about.get("attends", "yes") == "yes":
        rule += " and attention between groups"
    if "job.out" not in used:
        return f"{rule}, {_NO_NETWORK}" if "group.out" not in used else rule
    return f"{rule}, and a network of {JOB}-{HIDDEN}-2 beside it"


def _topology(model: TrainedModel) -> str:
    from gpusched.agents.topology.network import HIDDEN, WIDTH

    linear, hidden = (
        any(array.any() for name, array in model.arrays.items() if name.endswith(f".{part}"))
        for part in ("skip", "out")
    )
    if not linear and not hidden:
        return f"untrained: {_CONTENTION}, {_NO_NETWORK}"
    network = f"a graph network (4 layers of {WIDTH}, {HIDDEN} hidden)" if hidden else ""
    return f"{_CONTENTION}, and {' and '.join(filter(None, ('a linear rule' * linear, network)))} beside it"


def _count_used(array: npt.NDArray[np.generic] | None) -> int:
    """Return the number of nonzero elements."""
    return 0 if array is None else int(np.count_nonzero(array))


def _layers_of(arrays: Arrays, name: str) -> list[Layer]:
    """Return matrix and bias of each layer, in order."""
    found: list[Layer] = []
    while (weight := arrays.get(f"{name}.{len(found)}.weight")) is not None:
        found.append((weight, arrays.get(f"{name}.{len(found)}.bias")))
    return found


def _has_nonzero_output(layers: list[Layer]) -> bool:
    """Return whether the network can output anything but 0: its last layer is not all zeros."""
    return bool(layers) and any(_count_used(array) for array in layers[-1])


def _network_text(layers: list[Layer]) -> str:
    """Return a phrase, such as ``neural network of width 16 and 16``."""
    widths = [str(weight.shape[0]) for weight, _ in layers[:-1]]
    return f"neural network of width {' and '.join(widths)}" if widths else "further linear layer"
