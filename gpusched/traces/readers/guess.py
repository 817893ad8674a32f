"""Detect the format of a file or folder from its content."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

from gpusched.errors import UsageError
from gpusched.traces.readers.columns import open_text

_HEADERS = (  # the first with all its columns
    ("acme", {"job_id", "gpu_num", "gpu_time", "submit_time", "start_time"}),
    ("helios", {"job_id", "gpu_num", "node_num", "submit_time", "start_time", "end_time"}),
    ("philly-csv", {"submit_time", "duration_s", "num_gpus"}),
    ("openb", {"cpu_milli", "num_gpu", "gpu_milli", "creation_time"}),
)
_PAI_TABLES = ("pai_job_table", "pai_task_table", "pai_instance_table")
_IN_FOLDERS = (
    ("history", "gpusched.db"), ("pai2020", "pai_job_table*"), ("philly", "cluster_job_log*"),
    ("helios", "cluster_log.csv*"), ("openb", "openb_pod_list*.csv*"), ("acme", "trace_seren.csv*"),
    ("acme", "trace_kalos.csv*"),
)  # fmt: skip
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]*)?")
_BYTES_READ = 1 << 16


def detect_format(path: Path) -> str | None:
    """Return the format's name, or None where none matches."""
    with open(path, "rb") as file:
        magic = file.read(16)
    if magic.startswith(b"PK\x03\x04"):
        return "gpusched"
    if magic == b"SQLite format 3\0":
        return "history"
    if path.name.startswith(_PAI_TABLES):
        return "pai2020"
    with open_text(path) as text:
        return _guess_text(text.read(_BYTES_READ))


def find_in_folder(folder: Path, wanted: str | None) -> tuple[str, Path]:
    """Return the format of a folder and the file (or, for a format of several tables, the folder) to read.

    Raises:
        UsageError: There is none, or more than one.
    """
    found = list(dict.fromkeys(_candidates(folder, wanted)))
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(path.name for _, path in found)[:5])
    what = f"{len(found)} traces ({names})" if found else "no file of a known trace"
    raise UsageError(f"{folder}: found {what} in this folder", "name the file")


def _candidates(folder: Path, wanted: str | None) -> Iterator[tuple[str, Path]]:
    for name, pattern in _IN_FOLDERS:
        if wanted in (None, name):
            for file in sorted(folder.glob(pattern)):
                yield name, folder if name in ("history", "pai2020") else file


def _guess_text(text: str) -> str | None:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    if lines[0].lstrip().startswith("["):
        return "philly"
    if {"JobID", "JobIDRaw"} & set(re.split(r"[|\x1f\t]", lines[0])):
        return "sacct"
    names = {name.strip() for name in next(csv.reader(io.StringIO(lines[0])), [])}
    if name := next((f for f, columns in _HEADERS if columns <= names), None):
        return name
    if len(lines[0].split("\t")) in (7, 10) and len(lines[0].split(",")) < 3:
        return "gavel"
    data = next((line for line in lines if not line.startswith(";")), "")
    fields = data.split()
    if len(fields) == 18 and all(_NUMBER.fullmatch(field) for field in fields):
        return "swf"
    return "swf" if not data and lines[0].startswith(";") else None
