"""Replays give the recorded results, and none writes to its input."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpusched import compiled
from tests.sim import readonly, recorded


@pytest.mark.compiled
def test_every_policy_replays_as_it_was_recorded_and_writes_to_none_of_its_inputs(tmp_path: Path) -> None:
    before = json.loads(recorded.FILE.read_text())
    words = [sys.executable, "-X", "faulthandler", "-m", "tests.sim.readonly", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # -11: it wrote to an input
    now = json.loads(done.stdout)
    assert now.keys() == before.keys()
    assert {case for case in now if now[case] != before[case]} == set()


def test_as_python_they_give_the_same(tmp_path: Path) -> None:
    """What is short runs so where it is not compiled yet: every fifth, all that need no numpy function of an agent."""
    before = json.loads(recorded.FILE.read_text())
    recorded.agent_files(tmp_path)
    cases = [case for case in recorded.cases() if case[0] not in recorded.WITH_WEIGHTS][::5]
    with compiled.interpreted(math.inf):
        now = {" ".join(case): recorded.digest_of(case, tmp_path) for case in cases}
    assert {case for case in now if now[case] != before[case]} == set()


def test_a_write_to_a_protected_input_ends_the_process() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
    code += "from tests.sim import readonly, recorded; readonly.protected(recorded.network()).tree.rack[0] = 0"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -11
    assert np.array_equal(readonly.protected(recorded.network()).tree.rack, recorded.network().tree.rack)
