"""Speeds by GPU type that jobs have reported: used in place of those in the policy's file, where they say anything."""

from __future__ import annotations

import math

import msgspec
import pytest

from gpusched.model.interference import JobClassEstimate, JobShape, SpeedSamples
from gpusched.model.policy import Mapping, PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.sched.decide import decide
from gpusched.sched.mapping.learned import speeds_by_type
from tests.sched.worlds import node, pending, snapshot, started

KINDS = ("V100", "P100", "K80")


def samples(gpu_type: str, pace: float, gpus: int = 1, unit: str = "steps", weights: tuple[float, ...] = (1.0,)):
    shape = JobShape(gpu_type=gpu_type, unit=unit, gpus=gpus, max_gpus_per_node=gpus, nodes=1, racks=1)
    logs = tuple((math.log(pace), weight) for weight in weights)
    return SpeedSamples(shape=shape, logs=logs, count=len(weights), best=math.log(pace))


def estimate(*shapes: SpeedSamples) -> JobClassEstimate:
    return JobClassEstimate(kind="u/j", shapes=shapes)


@pytest.mark.parametrize(
    ("shapes", "gpus", "typed", "expected"),
    [
        ((), 1, [1.0, 0.5, 0.1], [1.0, 0.5, 0.1]),
        ((samples("V100", 80.0),), 1, [1.0, 0.5, 0.1], [1.0, 0.5, 0.1]),  # one type says nothing
        ((samples("V100", 80.0), samples("K80", 40.0)), 1, [1.0, 0.5, 0.5], [1.0, 0.5, 0.5]),
        ((samples("V100", 10.0), samples("K80", 40.0)), 1, [1.0, 1.0, 1.0], [0.25, 0.5, 1.0]),  # the other: between
        ((samples("V100", 10.0), samples("K80", 40.0)), 1, [1.0, 0.0, 1.0], [0.25, 0.0, 1.0]),  # 0: not at all
        # in another unit, on another number of GPUs: not comparable with each other
        ((samples("V100", 80.0), samples("K80", 40.0, unit="samples")), 1, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        ((samples("V100", 80.0), samples("K80", 40.0, gpus=2)), 1, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
        # of two comparable groups that of as many GPUs, or nearly
        (
            (samples("V100", 80.0), samples("K80", 40.0), samples("V100", 80.0, 8), samples("K80", 10.0, 8)),
            6, [1.0, 0.5, 1.0], [1.0, math.sqrt(0.125) * math.sqrt(0.5) * math.sqrt(0.5), 0.125],
        ),
        ((samples("V100", 80.0, weights=()), samples("K80", 40.0)), 1, [1.0, 1.0, 0.2], [1.0, 1.0, 0.2]),
    ],
)  # fmt: skip
def test_reports_count_where_they_compare(
    shapes: tuple[SpeedSamples, ...], gpus: int, typed: list[float], expected: list[float]
) -> None:
    found = speeds_by_type(estimate(*shapes), gpus, typed, KINDS)
    assert [speed / max(found) for speed in found] == pytest.approx([speed / max(expected) for speed in expected])
    assert speeds_by_type(None, gpus, typed, KINDS) == typed


def placed(snap: Snapshot) -> dict[str, str]:
    return {job: where[0][0] for job, where in started(decide(snap)).items()}


@pytest.mark.parametrize("place", ["fastest", "milp"])
def test_a_job_gets_the_type_on_which_its_class_was_reported_to_be_faster(place: str) -> None:
    """The file says the opposite; of another user's class nothing is known, and the file counts."""
    mapping = Mapping(speeds={"*": {"V100": 1.0, "K80": 0.1}}, budget_s=10.0, floor=0.3)
    spec = PolicySpec(name="m", place=place, backfill="skip", mapping=mapping)  # type: ignore[arg-type]
    nodes = [node("v", gpus=8, gpu_type="V100"), node("k", gpus=8, gpu_type="K80")]
    snap = snapshot(nodes, [pending("one", 8, name="train-7", submit=1.0)])
    snap = msgspec.structs.replace(snap, policies=dict.fromkeys(snap.policies, spec))
    assert placed(snap) == {"one": "v"}
    reported = JobClassEstimate(kind="x", shapes=(samples("V100", 10.0, 8), samples("K80", 50.0, 8)))
    user = snap.pending[0].user
    for kind, where in ((f"{user}/train-#", "k"), ("other/train-#", "v")):
        assert placed(msgspec.structs.replace(snap, beliefs={kind: reported})) == {"one": where}
