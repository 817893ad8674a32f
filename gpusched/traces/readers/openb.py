"""Alibaba cluster-trace-gpu-v2023, ``openb_pod_list_*.csv`` (Weng et al., ATC 2023): alibaba/clusterdata, CC-BY-4.0.

Pods of up to 8 GPUs; a pod of one GPU may ask for a part of it (``gpu_milli``); ``gpu_spec`` names the types it takes.
"""

from __future__ import annotations

import operator
from pathlib import Path

import numpy as np

from gpusched.traces.readers.columns import read_csv, stem
from gpusched.traces.readers.draft import Draft
from gpusched.traces.trace import Floats, Ints, Trace

COLUMNS = (
    "name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "creation_time", "deletion_time", "scheduled_time",
)  # fmt: skip


def read(path: Path, *, strict: bool) -> Trace:
    """Read the trace; QoS classes are the groups. Pods never scheduled are excluded. Times have no calendar.

    Raises:
        FileError: Not such a file; or strict, and a row is bad.
    """
    draft = Draft(read_csv(path, "an openb pod list", COLUMNS, ("gpu_spec", "qos", "pod_phase")), strict=strict)
    draft.leave_out(draft.where("scheduled_time", operator.not_), "scheduled_time", "a pod that was scheduled")
    ids = draft.ids("name")
    submit, started, duration = _times(draft)
    gpus, milli = _gpus(draft)
    cpu_milli = draft.whole("cpu_milli", "thousandths of a CPU core")
    return draft.trace(
        stem(path),
        epoch=None,
        ids=ids,
        submit=submit,
        duration=duration,
        gpus=gpus,
        columns={
            "gpu_milli": milli,
            "cores": -(-cpu_milli // 1000),
            "memory_mib": draft.whole("memory_mib", "MiB of memory"),
            "nodes": np.ones(len(draft), np.int64),
            "wait": started - submit,
        },
        names={
            "group": draft.names("qos", optional=True),
            "gpu_type": draft.names("gpu_spec", optional=True),
            "status": draft.names("pod_phase", optional=True),
        },
    )


def _times(draft: Draft) -> tuple[Floats, Floats, Floats]:
    submit = draft.numbers("creation_time", "a time in seconds", minimum=0)
    started = draft.numbers("scheduled_time", "a time in seconds", minimum=0)
    ended = draft.numbers("deletion_time", "a time in seconds", minimum=0)
    draft.reject(started < submit, "scheduled_time", "a time not before creation_time")
    draft.reject(ended <= started, "deletion_time", "a time after scheduled_time")
    return submit, started, ended - started


def _gpus(draft: Draft) -> tuple[Ints, Ints]:
    gpus = draft.whole("num_gpu", "a whole number of GPUs (0 for a CPU pod)")
    milli = draft.whole("gpu_milli", "thousandths of a GPU")
    draft.reject((gpus > 0) & ((milli < 1) | (milli > 1000)), "gpu_milli", "1 to 1000 thousandths of each GPU")
    draft.reject((gpus > 1) & (milli != 1000), "gpu_milli", "1000 for a pod of several GPUs")
    return gpus, np.where(gpus > 0, milli, 1000).astype(np.int64)
