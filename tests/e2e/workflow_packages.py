"""Where Snakemake and TorchX are installed, apart from the other packages (`make`: requirements/workflows.txt)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import functions

ROOT = Path(__file__).parents[2]
PACKAGES = Path(sys.prefix) / "workflows"
MARKS = [
    pytest.mark.one_partition,
    pytest.mark.processes,
    functions,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="Snakemake and TorchX are not installed: see `make`"),
]
