"""Gavel's traces (Narayanan et al., OSDI 2020): stanford-futuredata/gavel, MIT. Tab-separated, without a header.

They say how many steps a job has, not how long it runs. Its duration here is those steps at the model's measured speed,
alone on that many V100s: `V100_STEPS_PER_S`, from gavel's simulation_throughputs.json to four digits (MIT).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpusched.errors import FileError
from gpusched.traces.readers.columns import Table, read_fields, stem
from gpusched.traces.readers.draft import Draft
from gpusched.traces.trace import Trace

FIELDS_7 = ("job_type", "command", "steps_option", "needs_data", "steps", "arrival", "scale_factor")
FIELDS_10 = (
    "job_type", "command", "folder", "steps_option", "needs_data", "steps", "scale_factor", "priority", "slo",
    "arrival",
)  # fmt: skip

_SCALES = (1, 2, 4, 8)
V100_STEPS_PER_S: dict[str, tuple[float, ...]] = {  # on 1, 2, 4, 8 GPUs
    "ResNet-18 (batch size 16)": (32.35, 100.1, 123.9, 382.6),
    "ResNet-18 (batch size 32)": (29.95, 94.25, 114.7, 340.0),
    "ResNet-18 (batch size 64)": (24.09, 74.14, 95.59, 255.8),
    "ResNet-18 (batch size 128)": (17.99, 23.99, 69.95, 162.1),
    "ResNet-18 (batch size 256)": (10.3, 15.88, 27.78, 81.51),
    "ResNet-50 (batch size 16)": (11.4, 13.86, 23.2, 27.8),
    "ResNet-50 (batch size 32)": (7.787, 10.83, 13.76, 24.07),
    "ResNet-50 (batch size 64)": (4.395, 7.922, 9.452, 17.3),
    "ResNet-50 (batch size 128)": (2.497, 4.223, 7.029, 10.29),
    "Transformer (batch size 16)": (11.06, 14.15, 20.08, 71.65),
    "Transformer (batch size 32)": (10.62, 13.33, 22.82, 63.98),
    "Transformer (batch size 64)": (8.618, 15.88, 19.66, 49.65),
    "Transformer (batch size 128)": (5.446, 10.07, 14.17, 30.88),
    "Transformer (batch size 256)": (1.595, 2.885, 4.763, 9.717),
    "LM (batch size 5)": (109.2, 185.7, 126.7, 698.8),
    "LM (batch size 10)": (81.65, 163.1, 121.5, 615.1),
    "LM (batch size 20)": (64.74, 132.2, 111.0, 497.3),
    "LM (batch size 40)": (45.24, 91.59, 96.03, 359.3),
    "LM (batch size 80)": (28.24, 58.09, 74.81, 231.2),
    "A3C": (7.176,),
    "Recommendation (batch size 512)": (23.32,),
    "Recommendation (batch size 1024)": (13.28,),
    "Recommendation (batch size 2048)": (7.47,),
    "Recommendation (batch size 4096)": (3.906,),
    "Recommendation (batch size 8192)": (2.842,),
    "CycleGAN": (4.426,),
}


def read(path: Path, *, strict: bool) -> Trace:
    """Read the trace; jobs are numbered by row from 0, as in Gavel. Those without a measured speed are excluded.

    Raises:
        FileError: Not such a file; or strict, and a row is bad.
    """
    draft = Draft(_table(path), strict=strict)
    steps = draft.numbers("steps", "more than 0 steps", above=0)
    gpus = draft.whole("scale_factor", "a whole number of GPUs, at least 1", minimum=1)
    submit = draft.numbers("arrival", "seconds since the start", minimum=0)
    model, models = draft.names("job_type")
    types = draft.text("job_type")
    speed = np.fromiter(
        (steps_per_s(name, count) for name, count in zip(types, gpus.tolist(), strict=True)), np.float64, len(draft)
    )
    draft.leave_out(
        np.isnan(speed), "job_type", "a model measured on that many GPUs", lambda r: f"{types[r]} on {gpus[r]} GPUs"
    )
    draft.notes.append("durations are the jobs' steps at their measured speed on V100s (Gavel gives steps, not times)")
    return draft.trace(
        stem(path), epoch=None, ids=tuple(map(str, range(len(draft)))), submit=submit, duration=steps / speed,
        gpus=gpus, names={"model": (model, models)},
    )  # fmt: skip


def steps_per_s(model: str, gpus: int) -> float:
    """Return measured steps per second on that many V100s; NaN if unmeasured."""
    speeds = dict(zip(_SCALES, V100_STEPS_PER_S.get(model, ()), strict=False))
    return speeds.get(gpus, np.nan)


def _table(path: Path) -> Table:
    for fields in (FIELDS_7, FIELDS_10):
        table = read_fields(path, fields, "\t")
        if len(table):
            return table
    raise FileError(str(path), 1, "", "other lines", f"{len(FIELDS_7)} or {len(FIELDS_10)} tab-separated fields")
