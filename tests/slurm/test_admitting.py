"""Which waiting jobs can start in the lease: other reservations and components are looked up for each job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import ClassVar

from gpusched.controller.slurm.admitting import SlurmQueue, reservation_conflict
from gpusched.controller.slurm.reading import SlurmReading
from gpusched.model.slurm import SlurmPartition, SlurmReservation
from gpusched.queue.store import Store
from tests.slurm.waiting import T, job


class Names(tuple[str, ...]):
    """Names of nodes, and how often they were gone through."""

    reads: ClassVar[int] = 0

    def __iter__(self) -> Iterator[str]:
        Names.reads += 1
        return super().__iter__()


def reserved(name: str, *nodes: str, begin: float) -> SlurmReservation:
    return SlurmReservation(name=name, nodes=Names(nodes), start_time=T + begin, end_time=T + begin + 1000)


def test_reservations_and_components_are_looked_up_for_each_job(tmp_path: Path) -> None:
    """Each waiting job went through all reserved nodes, and each component through all waiting jobs."""
    wide = [job(id=str(n), nodes=3) for n in range(100, 200)]
    named, later, short, less = (
        job(id="1", req_nodes=("a2",)), job(id="2", req_nodes=("a3",)), job(id="3", nodes=3, time_limit_s=60),
        job(id="4", nodes=2, exc_nodes=("a0", "elsewhere")),
    )  # fmt: skip
    parts = [job(id=f"9+{n}") for n in range(3)]
    reading = SlurmReading(
        time=T,
        jobs=(*wide, named, later, short, less, *parts),
        nodes={},
        partitions={"a": SlurmPartition(name="a", nodes=Names(["a0", "a1", "a2"]))},
        reservations=(
            reserved("late", "a2", begin=300), reserved("maint", "a2", begin=100), reserved("gpusched", "a1", begin=0),
        ),
    )  # fmt: skip
    with closing(Store.create_or_open(tmp_path)) as store:
        queue = SlurmQueue(reading, None, store)
        said = {one.id: reservation_conflict(queue, one, T) for one in reading.jobs}
        assert Names.reads < 20
        assert {said[one.id] for one in wide} == {
            "2 of its partition's nodes are not reserved before its limit of 0:10:00 is over"
        }
        assert said["1"] == "a2, which it names, is reserved (maint) in 0:01:40, before its limit of 0:10:00"
        assert (said["2"], said["3"], said["9+1"]) == ("", "", "")
        assert said["4"].startswith("1 of its partition's nodes")
        assert reservation_conflict(queue, short, T, ["a0", "a1"]) == ""
        assert queue.components(parts[1]) == parts
        assert queue.components(named) == [named]
