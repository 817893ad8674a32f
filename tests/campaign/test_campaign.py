"""A short campaign: what `make campaign` does for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign.faults import KINDS, matching
from tests.campaign.invariants import broken
from tests.campaign.report import table
from tests.campaign.run import Campaign
from tests.campaign.schedule import draw
from tests.campaign.shim import preload
from tests.campaign.site import Site
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
