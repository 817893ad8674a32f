"""SenseTime's Helios, ``cluster_log.csv`` of one of its clusters (Hu et al., SC 2021).

Source: https://github.com/S-Lab-System-Group/HeliosData
"""

from __future__ import annotations

from pathlib import Path

from gpusched.traces.readers import slurm_like
from gpusched.traces.readers.columns import read_csv
from gpusched.traces.trace import Trace


def read(path: Path, *, strict: bool) -> Trace:
    """The trace; ``vc`` is the group. Times are the cluster's own clock (no zone is given).

    Raises:
        FileError: Not such a file; or strict, and a row is bad.
    """
    table = read_csv(path, "a Helios cluster_log.csv", slurm_like.REQUIRED, (*slurm_like.OPTIONAL, "vc"))
    return slurm_like.read_jobs(path, table, "vc", strict=strict)
