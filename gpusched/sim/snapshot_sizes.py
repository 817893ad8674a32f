"""Jobs that change size in replays decided from snapshots (`sim.snapshots`): their views, and how they are resized.

As in other replays (`sim.sized`), from which requests, speeds and costs are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from gpusched.model.jobs import Allocation, JobSpec, JobState, Resizes
from gpusched.model.plan import Resize
from gpusched.model.snapshot import PendingView, RunningView
from gpusched.sched.slicenames import inner_name
from gpusched.sched.state import ints
from gpusched.sim.engine.build import SimWorld
from gpusched.sim.engine.hot import change_ranks
from gpusched.sim.engine.sized import Sizer, index_of_size, left_of_limit, note_limit, set_size
from gpusched.sim.engine.state import EventLog
from gpusched.sim.granting import Grants, elastic_request


class SnapshotSizes:
    """The sizes of a replay's jobs; ``troubles``: why an agent could not choose them, and how often."""

    def __init__(self, world: SimWorld, sizer: Sizer) -> None:
        self._world, self._sizer, self._grants = world, sizer, Grants(world, sizer)
        self._row = {name: row for row, name in enumerate(world.pool.names)}
        self._resizes = dict[int, Resizes]()
        self._speeds = dict[int, dict[int, float]]()
        self.troubles = Counter[str]()

    @property
    def _now(self) -> float:
        return float(self._world.sim.clock[0])

    def resizable(self, job: int, spec: JobSpec) -> JobSpec:
        """Return a job's request with the sizes that it may have."""
        own, menus = self._sizer.jobs[job], self._sizer.space.scene.menus
        if own["rigid"]:
            return spec
        usable = (menus.shape[own["menu"]] >= 0) & (self._sizer.between[own["menu"]] == 0)
        elastic = elastic_request(self._world, job, tuple(menus.sizes[own["menu"]][usable].tolist()))
        hot = {"cooldown_s": int(own["cooldown_s"]), "rank_gpus": int(own["rank_gpus"])}
        return replace(spec, elastic=replace(elastic, **hot), max_nodes=None)

    def note_speeds(self, held: Mapping[int, Allocation]) -> None:
        """Note the speeds that running jobs report at their sizes."""
        pace = self._world.sim.pace
        for job, allocation in held.items():
            if pace is not None and self._sizer.jobs[job]["reports"]:
                self._speeds.setdefault(job, {})[allocation.gpus] = float(pace.runs[job]["rate"])

    def pending(self, job: int, view: PendingView) -> PendingView:
        """Add what is known of a waiting job for its size."""
        resizes = self._resizes.get(job)
        return replace(
            view, resizes=resizes, resume_at=None if resizes is None else resizes.resume_at,
            speeds=self._speeds.get(job, {}), left=float(self._world.sim.state[job]["left"]),
        )  # fmt: skip

    def running(self, job: int, view: RunningView) -> RunningView:
        """Add the same of a running job; one that has just started, or was resized, is resized later."""
        own, state, resizes = self._sizer.jobs[job], self._world.sim.state[job], self._resizes.get(job)
        begun, formed = float(own["begun"]), None if resizes is None else resizes.formed_since
        if resizes is not None and formed is not None and formed < self._now >= formed + own["cost_s"]:
            resizes = replace(resizes, before=None)
        return replace(
            view, spec=None if view.spec is None else view.spec.with_present_size, start_time=begun,
            own_end=float(state["due"] if own["reports"] else begun + own["limit"]), resizes=resizes,
            state=JobState.RUNNING if state["start"] < self._now else JobState.STARTING,
            speeds=self._speeds.get(job, {}),
        )  # fmt: skip

    def start(self, job: int, spec: JobSpec, allocation: Allocation) -> JobSpec:
        """Prepare the start of a job at the size that it was given; return its request then."""
        sim, own, part = self._world.sim, self._sizer.jobs[job], allocation.parts[0]
        own["begun"] = self._now
        note_limit(sim.ranks, job, self._now + float(own["limit"]))
        if job in self._resizes:
            self._resizes[job] = replace(self._resizes[job], resume_at=None)
        if spec.elastic is None:
            return spec
        if self._sizer.request.size > 0:
            self._grants.grant(job, self.shape(job, allocation.gpus), part.cores, part.memory_mib)
        set_size(sim, self._world.passes, self._sizer, job, allocation.gpus)
        return spec.as_allocated(allocation)

    def stop(self, job: int, gpus: int) -> None:
        """Note that a job is stopped to restart with so many GPUs."""
        self._count(job, 1, resume_at=gpus)

    def change_ranks(self, log: EventLog, job: int, resize: Resize, held: Allocation) -> Allocation:
        """Let ranks of a running hot job join or leave; return what it has then."""
        sim, sizer, own = self._world.sim, self._sizer, self._sizer.jobs[job]
        self._count(job, 1, before=held.gpus, formed_since=self._now)
        joins = ints([self._row[inner_name(part.node, "")] for part in resize.joins])
        at = index_of_size(sizer, job, resize.gpus)
        change_ranks(
            sim, log, job, self.shape(job, resize.gpus), int(sizer.rows[own["kind"], at]),
            float(sizer.own[job, at]), joins, left_of_limit(sim, sizer, job), float(own["cost_s"]),
        )  # fmt: skip
        return Allocation(held.job_id, (*held.parts, *resize.joins)[: resize.gpus // int(own["rank_gpus"])])

    def lose_ranks(self, job: int, held: Allocation) -> Allocation:
        """Return what a hot job has left after nodes failed."""
        sim = self._world.sim
        offset, count = int(sim.jobs[job]["offset"]), int(sim.shapes[sim.jobs[job]["shape"]]["parts"])
        nodes = {self._world.pool.names[row] for row in sim.held[offset : offset + count].tolist()}
        parts = tuple(part for part in held.parts if part.node in nodes)
        self._count(job, len(held.parts) - len(parts), again=False, before=held.gpus, formed_since=self._now)
        return Allocation(held.job_id, parts)

    def shape(self, job: int, gpus: int) -> int:
        """Return the engine's request of a job at a size."""
        menu = self._sizer.jobs[job]["menu"]
        return int(self._sizer.space.scene.menus.shape[menu, index_of_size(self._sizer, job, gpus)])

    def _count(self, job: int, times: int, again: bool = True, **changes: float | None) -> None:
        """Count what resizes cost; ``again``: it was resized, and did not lose ranks."""
        resizes = self._resizes.get(job, Resizes())
        changes["costs_s"] = resizes.costs_s + times * float(self._sizer.jobs[job]["cost_s"])
        changes["measured"] = resizes.measured + times
        self._resizes[job] = resizes.again(self._now, **changes) if again else replace(resizes, **changes)
