"""Fifty scripts: each runs with the shape that Slurm would give it, or is refused with its line."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.cli.conftest import Site, site
from tests.client.script.scripts import CASES, INVENTORY, TORCHRUN, Case, Shape

__all__ = ["site"]


def test_there_are_fifty_and_a_dozen_run_torchrun_on_several_nodes() -> None:
    assert len(CASES) >= 50
    several = [c for c in CASES if c.body == TORCHRUN and isinstance(c.result, Shape) and c.result.nodes > 1]
    assert len(several) >= 10
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_has_its_shape_or_is_refused_with_its_line(case: Case, site: Site, tmp_path: Path) -> None:
    site.inventory.write_text(INVENTORY)
    script = "#!/bin/bash\n" + textwrap.dedent(case.lines) + f"\n{case.body}\n"
    (tmp_path / "train.sh").write_text(script)
    done = site.call("submit", *(["-p", case.partition] if case.partition else []), "train.sh", "--lr", "3")
    if not isinstance(case.result, Shape):
        assert done.code == 2
        assert f"train.sh:{case.result.line}: {case.result.says}" in done.err
        assert done.err.count("\n") <= 2
        assert not site.commands()
        return
    assert done.code == 0, done.err
    command = site.only_submit()
    spec, shape = command.spec, case.result
    assert (spec.nodes, spec.gpus_per_node, spec.tasks_per_node) == (shape.nodes, shape.gpus, shape.tasks)
    assert shape.cores in (None, spec.cores_per_node)
    assert shape.gib in (None, spec.memory_mib_per_node / 1024)
    assert spec.time_limit_s == (shape.minutes or 7 * 1440) * 60
    assert (spec.script, spec.command, spec.slurm_env) == (script, ("--lr", "3"), True)
    assert spec.submit_dir == str(tmp_path)
