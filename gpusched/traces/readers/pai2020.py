"""Alibaba PAI, cluster-trace-gpu-v2020 (Weng et al., NSDI 2022): alibaba/clusterdata. Three tables without headers.

``pai_job_table`` has users and submit times, ``pai_task_table`` what each role asks for, ``pai_instance_table`` when
each of its containers really ran (2 GB, read as a stream; without it the tasks' own times are used).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpusched.errors import FileError
from gpusched.model.units import count_of
from gpusched.traces.readers.columns import open_text, read_csv
from gpusched.traces.readers.draft import Draft
from gpusched.traces.trace import Floats, Ints, Trace

JOB = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
TASK = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu",
    "gpu_type",
)  # fmt: skip
INSTANCE = (
    "job_name", "task_name", "inst_name", "worker_name", "inst_id", "status", "start_time", "end_time", "machine",
)  # fmt: skip
SHANGHAI_S = 8 * 3600.0
_ENDED = frozenset({"Terminated", "Failed"})
_MOST, _MOST_INSTANCES = 1e9, 1_000_000  # that a task may ask for; their products fit into whole numbers


def read(path: Path, *, strict: bool) -> Trace:
    """Read the trace of a folder with the tables (or of one table beside the others).

    A job's GPUs are the sum over its instances; where they ask for parts of GPUs, ``gpu_milli`` is their mean. It runs
    from its first instance's start to its last one's end. ``gpu_type`` in the source is what it was given, not what it
    asked for, and is not kept. Dates are made up (time of day and weekday, in Shanghai, are true).

    Raises:
        FileError: A table is missing or is not one; or strict, and a row is bad.
    """
    folder = path if path.is_dir() else path.parent
    jobs = Draft(read_csv(_table(folder, "pai_job_table"), "pai_job_table", JOB, header=JOB), strict=strict)
    task_file = _table(folder, "pai_task_table")
    wanted = [name for name in TASK if name not in ("task_name", "gpu_type")]
    tasks = Draft(read_csv(task_file, "pai_task_table", wanted, header=TASK), strict=strict)
    ids, submit = jobs.ids("job_name"), jobs.numbers("start_time", "a time in seconds")
    jobs.leave_out(~jobs.where("status", _ENDED.__contains__), "status", "a job that has ended (Terminated or Failed)")
    rows = {name: row for row, name in enumerate(ids)}
    owner = np.fromiter((rows.get(name, -1) for name in tasks.text("job_name")), np.int64, len(tasks))
    gpus, columns = _resources(jobs, tasks, owner)
    start, end = _spans(jobs, tasks, owner, rows, folder)
    jobs.leave_out(~np.isfinite(start), "instances", "one with a start_time and an end_time", lambda row: "none")
    jobs.reject(end <= start, "instances", "an end after the start", lambda row: "none")
    jobs.reject(start < submit, "instances", "a start not before the job's", lambda row: "an earlier one")
    tasks.stop_if_strict()
    also = tuple((line, f"{task_file.name}: {why}") for line, why in tasks.rejected())
    jobs.notes.append("dates are made up by the source; times of day and weekdays are true (Shanghai)")
    return jobs.trace(
        "pai2020", epoch=SHANGHAI_S, ids=ids, submit=submit, duration=end - start, gpus=gpus,
        columns=columns | {"wait": start - submit}, also_rejected=also,
        names={"user": jobs.names("user", optional=True), "status": jobs.names("status")},
    )  # fmt: skip


def _table(folder: Path, name: str) -> Path:
    for suffix in (".csv", ".csv.gz", ".csv.xz", ""):
        if (file := folder / (name + suffix)).is_file():
            return file
    raise FileError(str(folder), None, "", f"no {name}.csv", "the tables of Alibaba's cluster-trace-gpu-v2020")


def _resources(jobs: Draft, tasks: Draft, owner: Ints) -> tuple[Ints, dict[str, Floats | Ints]]:
    """Return GPUs, thousandths, cores and memory of the jobs, summed over their tasks' instances."""
    tasks.reject(owner < 0, "job_name", "a job of pai_job_table")
    instances = tasks.whole("inst_num", "a whole number of instances, at least 1", minimum=1)
    tasks.reject(instances > _MOST_INSTANCES, "inst_num", f"at most {_MOST_INSTANCES} instances")
    percent = _planned(tasks, "plan_gpu")
    cpu, memory_gib = _planned(tasks, "plan_cpu"), _planned(tasks, "plan_mem")
    broken = np.unique(owner[(~tasks.kept) & (owner >= 0)])
    bad = np.isin(np.arange(len(jobs)), broken)
    jobs.reject(bad, "tasks", "tasks that say what they ask for", lambda row: "a bad one")
    kept = tasks.kept
    owner, instances = owner[kept], instances[kept]

    def total(values: Floats) -> Floats:
        return np.bincount(owner, instances * values[kept], minlength=len(jobs)).astype(np.float64)

    gpus, milli = total(np.ceil(percent / 100)), total(percent * 10)
    share = np.ceil(np.divide(milli, gpus, out=np.full(len(jobs), 1000.0), where=gpus > 0) - 1e-9)
    return gpus.astype(np.int64), {
        "gpu_milli": np.clip(share, 1, 1000).astype(np.int64),
        "cores": np.ceil(total(cpu) / 100).astype(np.int64),
        "memory_mib": np.ceil(total(memory_gib) * 1024).astype(np.int64),
    }


def _planned(tasks: Draft, column: str) -> Floats:
    values = tasks.numbers(column, "a number of at least 0", minimum=0, optional=True)
    tasks.reject(values > _MOST, column, "an amount that machines can have")
    return np.where(values <= _MOST, values, 0.0)


def _spans(jobs: Draft, tasks: Draft, owner: Ints, rows: dict[str, int], folder: Path) -> tuple[Floats, Floats]:
    """Return first start and last end of every job's instances, or of its tasks without that table; NaN for none."""
    first, last = np.full(len(jobs), np.inf), np.full(len(jobs), -np.inf)
    try:
        file = _table(folder, "pai_instance_table")
    except FileError:
        jobs.notes.append("there is no pai_instance_table: run times are those of the tasks")
        start = tasks.numbers("start_time", optional=True)
        end = tasks.numbers("end_time", optional=True)
        known = np.isfinite(start) & np.isfinite(end) & tasks.kept
        np.minimum.at(first, owner[known], start[known])
        np.maximum.at(last, owner[known], end[known])
    else:
        skipped = _stream(file, rows, first, last)
        if skipped:
            jobs.notes.append(f"{count_of(skipped, 'row')} of {file.name} without a start, end or job ignored")
    return np.where(np.isfinite(first), first, np.nan), np.where(np.isfinite(last), last, np.nan)


def _stream(file: Path, rows: dict[str, int], first: Floats, last: Floats) -> int:
    """Extend the jobs' spans by every instance; return the number of instances without times."""
    starts, ends = first.tolist(), last.tolist()  # lists: single elements are much quicker
    skipped = 0
    for fields in _instances(file):
        row = rows.get(fields[0])
        try:
            start, end = float(fields[6]), float(fields[7])
        except (ValueError, IndexError):
            skipped += 1
            continue
        if row is None or not (start == start and end == end):
            skipped += 1
            continue
        if start < starts[row]:
            starts[row] = start
        if end > ends[row]:
            ends[row] = end
    first[:], last[:] = starts, ends
    return skipped


def _instances(file: Path) -> Iterator[list[str]]:
    with open_text(file) as text:
        reader = csv.reader(text)
        try:
            for fields in reader:
                if fields and fields[0] != INSTANCE[0]:
                    yield fields
        except csv.Error as error:
            raise FileError(str(file), reader.line_num, "", f"a CSV error ({error})", "valid CSV") from None
