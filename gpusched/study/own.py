"""This cluster's own jobs, and the conditions they ran under: inventory, limits, reservations."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from gpusched.config.paths import state_folder
from gpusched.errors import GpuschedError, NoHistory, UsageError
from gpusched.model.resources import Inventory
from gpusched.model.units import parse_time
from gpusched.queue.lastgood import inventory_or_kept
from gpusched.queue.store import Reader
from gpusched.sim.engine.quotas import QuotaSet, QuotaSpan
from gpusched.sim.reserving import bookings_of
from gpusched.sim.sharing import SharingBeliefs, sharing_beliefs
from gpusched.study.study import FROM_EMPTY, Scenario
from gpusched.traces.slicing import slice_trace
from gpusched.traces.trace import Trace

if TYPE_CHECKING:
    from gpusched.model.interference import JobClassEstimate
    from gpusched.model.snapshot import NodeView

APPLIED = "the replay applies the inventory's limits of users, groups and classes"
WITHOUT = (
    "the record was made under limits of users, groups or classes; this replay applies none, so recorded and replayed "
    "waits are not comparable"
)
RESERVED = "the replay includes {} reservations of nodes"


def history(
    since: str | None, until: str | None = None, *, vc: str | None = None, own: Inventory | None = None
) -> Trace:
    """Return this cluster's jobs submitted in [since, until); ``since``: as `parse_since`; ``own`` None: in force.

    Raises:
        NoHistory: There is no store yet, or no such job in it.
        GpuschedError: The store cannot be read.
        UsageError: A time cannot be read.
    """
    reader = Reader.open(state_folder())
    with nullcontext() if reader is None else closing(reader):
        return own_history(own or own_inventory(), reader, since, until, vc)


def own_history(
    own: Inventory | None, reader: Reader | None, since: str | None, until: str | None, vc: str | None
) -> Trace:
    """Return the same from an open inventory and store."""
    from gpusched.accounting.report import parse_since  # replays of traces start faster without these
    from gpusched.traces.own import own_jobs

    now, folder = time.time(), state_folder()
    if reader is None and (own is None or own.engine != "slurm"):
        raise NoHistory(f"{folder}: no history yet", "name a trace, or start the controller")
    try:
        end = None if until is None else parse_time(until, now)
    except ValueError:
        raise UsageError(f"--until {until!r} is not a time", "for example 2026-11-20T18:00") from None
    trace = own_jobs(own, reader, name=f"history of {folder}", since=parse_since(since, now), until=end)
    trace = replace(trace, notes=(*trace.notes, FROM_EMPTY))
    return trace if vc is None else slice_trace(trace, vc=vc)


def own_inventory() -> Inventory | None:
    """Return the inventory in force, which names the engine; None if none can be read: the controller runs jobs."""
    try:
        return inventory_or_kept(None, state_folder())
    except GpuschedError:
        return None


def limited(inventory: Inventory | None) -> bool:
    """Return whether these jobs run under the inventory's limits; with Slurm as engine, Slurm's limits apply."""
    return inventory is not None and bool(inventory.quotas) and inventory.engine != "slurm"


def with_run_conditions(
    scenario: Scenario, inventory: Inventory | None, reader: Reader | None, *, reserved: bool = True,
    shares: bool = True, quotas: bool | None = None,
) -> Scenario:  # fmt: skip
    """Return the scenario with the conditions under which its jobs ran.

    ``reader``: of the store of these jobs, on their own nodes: adds the reservations of that time, GPU sharing of jobs
    that agreed to it, and usage in the week before, which counts for GPU hours. None: jobs of another cluster.
    ``quotas``: whether the inventory's limits apply; None: to jobs that ran under them.
    """
    trace, epoch, notes = scenario.trace, scenario.trace.epoch, list(scenario.notes)
    if inventory is not None:
        scenario = with_site_data(scenario, inventory, reader)
    if reader is not None and reserved and epoch is not None and (there := reader.reservations(epoch)):
        found = bookings_of(there, reader.jobs_of_reservations(), trace, scenario.pool)
        scenario = scenario._replace(reserved=found or scenario.reserved)
        notes += [RESERVED.format(len(found))] if found else []
    if reader is not None and shares and inventory is not None and trace.share_mib is not None:
        scenario = scenario._replace(believed=_believed(scenario, inventory, reader))
    if inventory is not None and (quotas or (reader is not None and limited(inventory))):
        notes.append(WITHOUT if quotas is False else APPLIED)
        if quotas is not False:
            used = _used_before(epoch, reader) if inventory.quotas.by_hours else ()
            scenario = scenario._replace(quotas=QuotaSet(inventory.quotas, used))
    return scenario._replace(notes=tuple(notes))


def seen_slices(reader: Reader | None, inventory: Inventory | None) -> dict[str, NodeView]:
    """Return the inventory's nodes as the store's last readings show them; none, where no node has MIG slices."""
    if reader is None or inventory is None:
        return {}
    from gpusched.queue.snapshots import snapshot_of_store

    snapshot = snapshot_of_store(reader, inventory, {}, time.time(), active=[], pending=[])
    sliced = any(node.slices or node.cuttable for node in snapshot.nodes)
    return {node.name: node for node in snapshot.nodes} if sliced else {}


def with_site_data(scenario: Scenario, inventory: Inventory, reader: Reader | None) -> Scenario:
    """Return the scenario with the switches of the inventory's nodes, and what this store knows of its jobs and users.

    That is what was learned of its jobs, and users' usage before the first of the trace's, as live.
    """
    if reader is None:
        return scenario._replace(topology=inventory.topology)
    from gpusched.queue.snapshots import topology_of, usage_by_leaf

    racks, trace = inventory.topology or topology_of(inventory, reader.node_records()), scenario.trace
    begin = None if trace.epoch is None else trace.epoch + float(trace.arrivals[0])
    usage = {} if begin is None else usage_by_leaf(reader, inventory, begin)
    return scenario._replace(topology=racks, learned=reader.beliefs(), usage=usage)


def _used_before(epoch: float | None, reader: Reader | None) -> tuple[QuotaSpan, ...]:
    """Return the usage in the week before a trace of this store begins."""
    if reader is None or epoch is None:
        return ()
    return tuple(
        QuotaSpan(user, group, qos, gpus, start - epoch, min(end - epoch, 0.0))
        for user, group, qos, gpus, start, end in reader.runs_of_week(epoch)
    )


def _believed(scenario: Scenario, inventory: Inventory, reader: Reader) -> SharingBeliefs | None:
    """Return which jobs may share GPUs of the inventory's nodes; None: none, or the replay uses other nodes."""
    if not any(node.sharing for node in inventory.nodes):
        return None
    from gpusched.queue.snapshots import snapshot_of_store

    snapshot = snapshot_of_store(reader, inventory, {}, time.time(), active=[], pending=[])
    known = {node.name: node for node in snapshot.nodes}
    nodes = [known[name] for name in scenario.pool.names if name in known]
    return beliefs_for(scenario.trace, nodes, reader.beliefs()) if len(nodes) == len(scenario.pool) else None


def beliefs_for(trace: Trace, nodes: Sequence[NodeView], beliefs: Mapping[str, JobClassEstimate]) -> SharingBeliefs:
    """Return which jobs may share GPUs on these nodes, and their speeds by current estimates."""
    from gpusched.sched.sharing.pairs import party

    assert trace.share_mib is not None
    jobs = zip(trace.user.tolist(), trace.model.tolist(), trace.share_mib.tolist(), strict=True)
    parties = [
        None if mib < 0 else party(trace.user_name(user), trace.model_name(model), mib) for user, model, mib in jobs
    ]
    return sharing_beliefs(parties, nodes, beliefs)
