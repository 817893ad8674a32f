"""What Slurm says in one cycle, with no more questions than the cycle needs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping

import msgspec

from gpusched.controller.slurm.devices import read_gres_conf
from gpusched.controller.slurm.mirror import state_of
from gpusched.model.jobs import ACTIVE, JobState
from gpusched.model.slurm import SlurmJob, SlurmNode, SlurmPartition, SlurmReservation
from gpusched.slurm.commands import NoAnswer, Slurm
from gpusched.slurm.records import when

PARTITIONS_S = 60.0  # partitions and configuration hardly change
SHARE = 0.015  # of slurmctld's time that reading may take by its own figures, which lack sending: in all below 2 %
MAX_REST_S = 15.0  # a lease must be renewed however long the queue is
MAX_ASKED = 5  # a job whose GPUs Slurm has not named by then has none that it could name


class SlurmReading(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm said.

    Attributes:
        positions: Of running jobs, as in `gpusched.controller.slurm.mirror.World`.
        gres_conf: The text of this file; None: it is not on this machine.
    """

    time: float
    jobs: tuple[SlurmJob, ...]
    nodes: dict[str, SlurmNode]
    partitions: dict[str, SlurmPartition]
    reservations: tuple[SlurmReservation, ...]
    positions: dict[str, Mapping[str, tuple[int, ...]]] = {}
    gres_conf: str | None = None


class SlurmReader:
    """Asks Slurm once a cycle, and of each running job once where its GPUs are."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._partitions: dict[str, SlurmPartition] = {}
        self._partitions_at = float("-inf")
        self._gres_conf: str | None = None
        self._costs: dict[str, tuple[int, float]] = {}
        self._cost_s = 0.0
        self._was_silent = False
        self._read_at, self._rest_s = float("-inf"), 0.0
        self._positions: dict[tuple[str, float, int], tuple[Mapping[str, tuple[int, ...]], int]] = {}

    def is_due(self, now: float) -> bool:
        """Whether enough time has gone by since the last look, for slurmctld must not be kept busy by ours."""
        return not self._read_at <= now < self._read_at + self._rest_s

    def read(self, now: float, site_factors: bool) -> SlurmReading:
        """What Slurm says now.

        Args:
            now: Unix seconds.
            site_factors: Whether somebody wants to know these, too.

        Raises:
            NoAnswer: It says nothing.
        """
        try:
            return self._read(now, site_factors)
        except NoAnswer:
            self._was_silent = True
            raise

    def _read(self, now: float, site_factors: bool) -> SlurmReading:
        nodes = {node.name: node for node in self._slurm.nodes()}
        if not self._partitions_at <= now < self._partitions_at + PARTITIONS_S:
            self._partitions = {partition.name: partition for partition in self._slurm.partitions()}
            named = (os.environ.get("SLURM_CONF", ""), self._slurm.config().get("SLURM_CONF", ""))
            self._gres_conf = read_gres_conf(named)
            self._partitions_at = now
        reservations = tuple(self._slurm.reservations())
        jobs = tuple(self._slurm.jobs(site_factors))
        if self._partitions_at == now:
            cost_s = self._cost_of_a_look(site_factors)
            if not self._was_silent:  # else what it did not do meanwhile counts as its work on our questions
                self._cost_s = cost_s
            self._was_silent = False
        self._read_at, self._rest_s = now, min(MAX_REST_S, self._cost_s / SHARE)
        return SlurmReading(
            time=now, jobs=jobs, nodes=nodes, partitions=self._partitions, reservations=reservations,
            positions=self._positions_of(jobs), gres_conf=self._gres_conf,
        )  # fmt: skip

    def _cost_of_a_look(self, site_factors: bool) -> float:
        """Seconds of slurmctld's time, by its own figures since we last asked for them."""
        before = self._costs
        with contextlib.suppress(NoAnswer):  # some sites let nobody see them
            self._costs = self._slurm.costs()

        def mean_s(message: str) -> float:
            (count, total_s), (known, known_s) = (costs.get(message, (0, 0.0)) for costs in (self._costs, before))
            if count <= known:  # it began to count anew
                known, known_s = 0, 0.0
            return (total_s - known_s) / max(1, count - known)

        return 2 * mean_s("REQUEST_JOB_INFO") + site_factors * mean_s("REQUEST_PRIORITY_FACTORS")

    def _positions_of(self, jobs: Iterable[SlurmJob]) -> dict[str, Mapping[str, tuple[int, ...]]]:
        running = [j for j in jobs if j.gpus and j.node_names and state_of(j) in ACTIVE - {JobState.STARTING}]
        kept = {key: self._positions[key] for key in map(_key, running) if key in self._positions}
        new = [job for job in running if not (known := kept.get(_key(job), ({}, 0)))[0] and known[1] < MAX_ASKED]
        found = self._slurm.gpu_positions(new)
        for job in new:
            kept[_key(job)] = found.get(job.id, {}), kept.get(_key(job), ({}, 0))[1] + 1
        self._positions = kept
        return {job.id: kept[_key(job)][0] for job in running if kept[_key(job)][0]}


def _key(job: SlurmJob) -> tuple[str, float, int]:
    return job.id, job.submit_time, job.restarts


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended, by Slurm's accounting. Times in Unix seconds; None: it never started."""

    state: str
    start_time: float | None
    end_time: float


def ended_jobs(text: str) -> dict[str, list[tuple[float, Ended]]]:
    """Slurm's job id -> when it was submitted (or requeued) and how that ended, in order; of `Slurm.ended`'s text."""
    lines = text.splitlines()
    columns = lines[0].split("|") if lines else []
    found: dict[str, list[tuple[float, Ended]]] = {}
    for line in lines[1:]:
        row = dict(zip(columns, line.split("|"), strict=False))
        submit, end, start = (when(row.get(name, "")) for name in ("Submit", "End", "Start"))
        if submit is not None and end is not None:
            state = row.get("State", "").partition(" ")[0]
            started = start if row.get("NodeList", "") not in ("", "None assigned") else None
            found.setdefault(row["JobID"], []).append((submit, Ended(state=state, start_time=started, end_time=end)))
    return {name: sorted(rows, key=lambda row: row[0]) for name, rows in found.items()}
