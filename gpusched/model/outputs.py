"""Paths of ``--output`` and ``--error`` with Slurm's patterns filled in. Pure."""

from __future__ import annotations

import re

from gpusched.model.jobs import JobRecord

_PATTERN = re.compile("%([jAaxunNt%])")


def expand_output(job: JobRecord, rank: int, node: str) -> str | None:
    """Expand Slurm's patterns in the ``-o`` path; several ranks without %n or %N get ``.RANK`` appended.

    A script runs on the first node only, so its output is one file.
    """
    return _expand(job.spec.output, job, rank, node)


def expand_error(job: JobRecord, rank: int, node: str) -> str | None:
    """Expand ``--error``; None: stderr goes where stdout does."""
    path = _expand(job.spec.error, job, rank, node)
    return path if path != expand_output(job, rank, node) else None


def _expand(path: str | None, job: JobRecord, rank: int, node: str) -> str | None:
    if path is None or (job.spec.script is not None and rank > 0):
        return None
    patterns = _patterns(job, rank, node)
    used = re.findall(_PATTERN, path)
    expanded = re.sub(_PATTERN, lambda match: patterns[match[1]], path)
    return (
        expanded
        if job.spec.nodes == 1 or job.spec.script is not None or {"n", "N", "t"} & set(used)
        else f"{expanded}.{rank}"
    )


def _patterns(job: JobRecord, rank: int, node: str) -> dict[str, str]:
    return {
        "j": job.id,
        "A": job.array_id or job.id,
        "a": str(job.array_index) if job.array_index is not None else "0",
        "x": job.spec.name.replace("/", "_"),
        "u": job.user,
        "n": str(rank),
        "N": node,
        "t": str(rank),
        "%": "%",
    }


def shown_path(path: str | None, job: JobRecord) -> str | None:
    """Return the path as far as known; parts that differ between ranks or tasks stay patterns."""
    if path is None:
        return None
    parts = job.allocation.parts if job.allocation is not None else ()
    open_yet = "" if parts else "N"
    open_yet += "nNt" if job.spec.nodes > 1 and job.spec.script is None else ""
    open_yet += "ja" if job.tasks else ""
    known = _patterns(job, 0, parts[0].node if parts else "") | {letter: f"%{letter}" for letter in open_yet}
    return re.sub(_PATTERN, lambda match: known[match[1]], path)
