"""A folder in which replays run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests import commands

SWF = """; UnixStartTime: 1500000000
1 0 -1 100 2 -1 -1 2 200 -1 1 1 1 -1 1 -1 -1 -1
2 10 -1 50 4 -1 -1 4 60 -1 1 2 1 -1 1 -1 -1 -1
3 20 -1 500 8 -1 -1 8 600 -1 1 1 1 -1 1 -1 -1 -1
4 30 -1 20 2 -1 -1 2 30 -1 1 3 1 -1 1 -1 -1 -1
"""


INVENTORY = """\
defaults: {runtime: process}
partitions:
  A:
    policy: fifo
    defaults: {gpus: 8, cores: 8, memory: 8G, gpu_type: A100, rated_power: 6.5kW}
    nodes: [n1]
    flavors: {}
  B:
    policy: easy
    defaults: {gpus: 4, cores: 4, memory: 4G}
    nodes: [m1, m2]
    flavors: {}
"""


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trace = folder / "log.swf"
        self.trace.write_text(SWF)
        (folder / "inventory.yaml").write_text(INVENTORY)

        self.env = {
            "NUMBA_DISABLE_JIT": "1", "GPUSCHED_STATE": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "c"),
            "GPUSCHED_INVENTORY": str(folder / "inventory.yaml"),
        }  # fmt: skip

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        done = commands.run("replay", *words, env=os.environ | self.env, cwd=self.folder)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    def rows(self, *words: str) -> list[dict[str, Any]]:
        out, err = self.run(*words, "--json")
        assert err == ""
        found: list[dict[str, Any]] = json.loads(out)
        return found


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


ONE = ("log.swf", "--nodes", "1", "--gpus-per-node", "8")
