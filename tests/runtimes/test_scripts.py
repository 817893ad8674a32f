"""Job scripts on one node, in every runtime: what runs, with what, what signals reach, and srun without Python."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched.nodes.batch.spool import StepNode, StepSettings, spool_files
from tests.runtimes.world import World
from tests.testbed import wait_until


def spool(script: str, **settings: Any) -> dict[str, str]:
    made = StepSettings(attempt="a", rank=0, nodes=(StepNode("here", "127.0.0.1"),), **settings)
    return spool_files(script, made, None)


def test_the_script_runs_with_its_arguments(world: World) -> None:
    script = '#!/bin/sh -e\necho "$# $1 $2 $-"; echo to-stderr >&2; scontrol show hostnames; exit 7\n'
    files = spool(script)
    attempt, output = world.finish("x y", "$(z)'", spool=files, env={"SLURM_JOB_NODELIST": "a[08-10],b"})
    assert sorted(output.splitlines()) == sorted(["2 x y $(z)' e", "to-stderr", "a08", "a09", "a10", "b"])
    assert attempt["exit_code"] == 7
    commands = world.sh("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
    assert "to-stderr" not in commands
