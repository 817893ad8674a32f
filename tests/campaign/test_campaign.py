"""A short campaign: what `make campaign` does for minutes."""

from __future__ import annotations

from contextlib import closing, nullcontext
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpusched.accounting.usage import GpuHolding, usage_between
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.resources import Node
from gpusched.queue.store import Store
from tests.campaign.faults import KINDS, matching
from tests.campaign.invariants import _energy, broken
from tests.campaign.ledger import Line
from tests.campaign.report import table
from tests.campaign.run import Campaign
from tests.campaign.schedule import draw
from tests.campaign.shim import preload
from tests.campaign.site import POWER_W, Site
from tests.testbed import Testbed


def test_a_seed_is_a_schedule() -> None:
    first, again, other = (draw(seed, 50, 80, list(KINDS)) for seed in (7, 7, 8))
    assert first == again != other
    healed = {act.number for act in first.acts if act.what == "heal"}
    lasting = {act.number for act in first.acts if act.what == "inject" and KINDS[act.kind].lasts}
    assert healed == lasting
    assert sorted(act.number for act in first.acts if act.what == "submit") == list(range(50))


def test_faults_of_fuse_are_drawn_only_where_they_are_named() -> None:
    assert not any(kind.startswith("fuse.") for kind in matching("*", "native"))
    assert matching("fuse.*,controller.kill", "native") == ["controller.kill", *matching("fuse.*", "native")]
    with pytest.raises(ValueError, match="none of"):
        matching("fuse.*", "slurm")


@pytest.mark.parametrize("late_s", [*product((0.0, 4.9), repeat=5)])
def test_energy_of_a_machine_that_answers_late_is_right_and_thrice_it_is_wrong(
    tmp_path: Path, late_s: tuple[float, ...]
) -> None:
    taken = [
        NodeReading(node="n", time=6.0 * i + late, gpus=(Gpu(index=0, uuid="u", energy_j=POWER_W * 6.0 * i),))
        for i, late in enumerate(late_s)
    ]
    node = Node(name="n", address="n", partition="p", gpus=1, cores=1, memory_mib=1, runtime="podman")
    held = {0: [GpuHolding("before", "u", 4.0), GpuHolding("j", "u", 20.0)]}
    lines = [Line("start", "j", 1, 0, "n", 5.0, "0"), Line("end", "j", 1, 0, "n", 19.0, "0")]
    with closing(Store.create_or_open(tmp_path)) as store:
        site = SimpleNamespace(reader=lambda: nullcontext(store))
        campaign: Any = SimpleNamespace(troubles=[], stalled_s=0.0, site=site)
        rows = [row for before, after in pairwise(taken) for row in usage_between(node, before, after, held)]
        store.add_usage(rows)
        assert list(_energy(campaign, {"j": lines})) == []
        store.add_usage(2 * [msgspec.structs.replace(row, gpu_s=0.0) for row in rows])
        assert len(list(_energy(campaign, {"j": lines}))) == 1


STALL_S = 2.0
ALWAYS = ("lost: ", "doubled: ", "GPU shared: ", "left: ", "a traceback", "a file ")
"""What must not be on any machine; the rest hangs on how soon things happen, and so says nothing of one that stalls."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3])
def test_nothing_is_lost_doubled_or_left(testbed: Testbed, tmp_path: Path, seed: int) -> None:
    preload()
    waiting = ("node.freeze", "node.cut")  # for time-outs; see tests/e2e/test_failures_nodes.py
    kinds = [kind for kind in matching("*", "native") if kind not in waiting]
    site = Site(testbed, tmp_path)
    try:
        campaign = Campaign(site, draw(seed, 14, 16, kinds))
        campaign.run()
        violations = broken(campaign)
        if campaign.stalled_s > STALL_S:
            violations = [line for line in violations if line.startswith(ALWAYS)]
        assert violations == [], table(campaign, violations, seed, 0.0)
    finally:
        site.kill()
        site.close()
        for node in testbed.nodes:
            node.reboot()
