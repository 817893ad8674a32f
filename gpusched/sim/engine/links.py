"""Which running jobs share network links; nothing where `Pace.links` is None."""

from __future__ import annotations

from gpusched.compiled import jit
from gpusched.sched.topology.load import enter_links, leave, neighbours, speed_of
from gpusched.sim.engine.state import Links, Sim


@jit
def join_links(links: Links | None, sim: Sim, job: int) -> int:
    """Enter a job that starts on ``sim.held``; return how many others, in ``links.found``, may change speed.

    A pass by cost has entered its links already.
    """
    if links is None:
        return 0
    load, shape, offset = links.load, sim.shapes[sim.jobs[job]["shape"]], sim.jobs[job]["offset"]
    nodes = sim.held[offset : offset + shape["parts"]]
    if load.jobs[job]["alone"] == 0.0:
        enter_links(links.tree, links.model, load, job, nodes, shape["parts"], shape["gpus"], links.use, links.needs)
    load.jobs[job]["speed"] = speed_of(links.model, load, job)
    return neighbours(load, job, links.found)


@jit
def leave_links(links: Links | None, job: int) -> int:
    """Remove a job that stops; return how many others, in ``links.found``, may change speed."""
    if links is None:
        return 0
    count = neighbours(links.load, job, links.found)
    leave(links.load, job)
    return count


@jit
def speed_on_links(links: Links | None, job: int) -> float:
    """Return a running job's speed on its nodes and links; 1: alone on its fastest layout."""
    if links is None:
        return 1.0
    return float(links.load.jobs[job]["speed"])
