"""Agents that leave MIG slices to their fallback: which, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched.model.jobs import JobRecord, JobSpec, JobState
from gpusched.model.resources import Inventory, Partition
from gpusched.promotion.live import slice_fallbacks


@pytest.mark.parametrize(
    ("agent", "line"), [("gist", "p: mine decides about whole GPUs only; easy about MIG slices"), ("rltune", None)]
)
def test_whose_fallback_decides_about_slices_says_so(tmp_path: Path, agent: str, line: str | None) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/mine.yaml").write_text(f"agent: {agent}\nfallback: easy\n")
    (tmp_path / "inventory.yaml").write_text("")
    inventory = Inventory(
        path=str(tmp_path / "inventory.yaml"), partitions=(Partition(name="p", nodes=(), flavors=(), policy="mine"),)
    )
    spec = JobSpec(
        name="j", partition="p", gpus_per_node=1, cores_per_node=1, memory_mib_per_node=1, time_limit_s=60,
        profile="1g.10gb",
    )  # fmt: skip
    job = JobRecord(id="j", user="ann", uid=0, spec=spec, state=JobState.PENDING, submit_time=0.0)
    assert slice_fallbacks(inventory, None, [job]).get("p") == line
    assert slice_fallbacks(inventory, None, []) == {}
