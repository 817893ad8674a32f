"""Shanghai AI Lab's Acme: ``trace_seren.csv`` and ``trace_kalos.csv`` (Hu et al., NSDI 2024): InternLM/AcmeTrace."""

from __future__ import annotations

from pathlib import Path

from gpusched.traces.readers import slurm_like
from gpusched.traces.readers.columns import read_csv
from gpusched.traces.trace import Trace


def read(path: Path, *, strict: bool) -> Trace:
    """The trace; the workload ``type`` (Pretrain, Evaluation...) is the group. Kalos gives memory per pod (node).

    Raises:
        FileError: Not such a file; or strict, and a row is bad.
    """
    optional = (*slurm_like.OPTIONAL, "type", "mem_per_pod_GB")
    table = read_csv(path, "an Acme job trace", slurm_like.REQUIRED, optional)
    return slurm_like.read_jobs(path, table, "type", strict=strict)
