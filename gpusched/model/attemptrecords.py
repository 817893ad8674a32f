"""What a node keeps of an attempt, so that a lost store can be rebuilt from its nodes."""

from __future__ import annotations

from typing import Any

import msgspec

from gpusched.model.jobs import JobRecord
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.slices import gpu_of


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of an attempt: as it was launched, or, of one that was removed from its node, as it had ended.

    Attributes:
        job: As stored at that time; of a removed rank, its final record in most cases. It holds no secrets.
        rank: The rank's number.
        runtime: What runs it.
        time: When this was written (Unix seconds, the controller's clock).
        intended_at: When the rank got its GPUs; None: not known.
        boot_id, gpus: The node's boot, and the energy counters of the rank's GPUs, as last read before that.
        read: When that was (Unix seconds); None: never.
        held, runs: Of an attempt after which its job waits again, and so says nothing of it: the rank's GPUs, and the
            attempt's `gpusched.queue.store.RunRecord`s.
    """

    job: JobRecord
    rank: int
    runtime: str
    time: float
    intended_at: float | None = None
    boot_id: str | None = None
    gpus: tuple[Gpu, ...] = ()
    read: float | None = None
    held: tuple[int, ...] = ()
    runs: tuple[dict[str, Any], ...] = ()


def attempt_record(
    job: JobRecord,
    rank: int,
    runtime: str,
    gpus: tuple[int, ...],
    intended_at: float | None,
    reading: NodeReading | None,
    now: float,
    runs: tuple[dict[str, Any], ...] = (),
) -> bytes:
    """Return the record as JSON; ``gpus``: the rank's, as in its allocation, ``reading``: the node's last one."""
    whole = {gpu_of(number) for number in gpus}
    counters = [
        Gpu(index=gpu.index, uuid=gpu.uuid, energy_j=gpu.energy_j)
        for gpu in (reading.gpus if reading is not None else ())
        if gpu.index in whole
    ]
    return msgspec.json.encode(
        AttemptRecord(
            job=job, rank=rank, runtime=runtime, time=now, intended_at=intended_at, gpus=tuple(counters),
            boot_id=reading.boot_id if reading else None, read=reading.time if reading else None,
            held=gpus if runs else (), runs=runs,
        )
    )  # fmt: skip
