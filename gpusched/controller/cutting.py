"""Carries out cuts of GPUs: the intent goes into the store, the node works beside the cycle, the next reading decides.

What is cut is decided anew in each cycle from what the nodes show (`gpusched.sched.slices`), so nothing is lost by a
controller that dies at any moment: its successor waits until the node can no longer be at work, and looks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping

from msgspec.structs import replace

from gpusched.cluster.base import NodeObservation, Operation, OperationOutcome, RankKey
from gpusched.model.events import Event
from gpusched.model.readings import Gpu, NodeReading, NodeState
from gpusched.model.resources import Inventory, Node, RuntimeName
from gpusched.model.slices import Cut
from gpusched.model.snapshot import Snapshot
from gpusched.nodes.cutting import SCRIPT_LIMIT_S
from gpusched.queue.snapshots import used_gpus
from gpusched.queue.store import CutState, NodeRecord, RankRecord, Store

ORPHAN_S = SCRIPT_LIMIT_S + 30.0
"""Time after which a cut without an answer is over: its script has a limit, and a connection is made quickly."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
_log = logging.getLogger(__name__)
_IN_SERVICE = frozenset({NodeState.IDLE, NodeState.MIXED, NodeState.ALLOCATED})


class CutPlanner:
    """Says what to cut. An error of the search costs its cuts, and no cycle: jobs start without it."""

    def __init__(self, arrange: Callable[[Snapshot], Iterable[Cut]]) -> None:
        self._arrange, self._reported = arrange, ""

    def cuts(self, snapshot: Snapshot, observed: Container[str]) -> list[Cut]:
        """Return what to cut on the nodes just observed; the error is logged once."""
        try:
            found = [cut for cut in self._arrange(snapshot) if cut.node in observed]
        except Exception as error:
            description = f"{type(error).__name__}: {error}"[:500]
            if description != self._reported:
                _log.error("no GPU is cut on demand: %s", description, exc_info=error)
            self._reported = description
            return []
        self._reported = ""
        return found


def cut_key(node: str, gpu: int) -> RankKey:
    """Return the key of operations that cut a GPU; no job has such an id."""
    return f"cut of {node}", 0, gpu


def cut_operation(node: Node, cut: Cut) -> Operation:
    """Return the operation that carries out a cut."""
    job_id, attempt, rank = cut_key(node.name, cut.gpu)
    return Operation(
        verb="cut", node=node.name, cut=cut,
        rank=RankRecord(job_id=job_id, attempt=attempt, rank=rank, node=node.name, runtime=node.runtime),
    )  # fmt: skip


def begin_cuts(store: Store, inventory: Inventory, cuts: Iterable[Cut], now: float) -> list[Operation]:
    """Record the intent of those cuts that may begin now, in one transaction; return their operations.

    What the store says counts, the starts of this cycle included: a GPU that a job or a process uses is left alone.
    """
    wanted = {(cut.node, cut.gpu): cut for cut in cuts}
    if not wanted:
        return []
    used, operations = used_gpus(store.active(), store.ranks()), list[Operation]()
    with store.transaction():
        for name in sorted({cut.node for cut in wanted.values()}):
            node, record = inventory.node(name), store.node_record(name)
            if node is None or record is None:
                continue
            states, events = dict(record.cuts), list[Event]()
            for cut in (cut for cut in wanted.values() if cut.node == name):
                if (name, cut.gpu) in used or not may_begin(node, record, cut, now):
                    continue
                before = states.get(cut.gpu)
                states[cut.gpu] = CutState(cut=cut, began=now, failures=before.failures if before is not None else 0)
                events.append(_event("gpu_cutting", cut, now))
                operations.append(cut_operation(node, cut))
            if events:
                store.put_nodes([replace(record, cuts=states)])
                store.append(events)
    return operations


def may_begin(node: Node, record: NodeRecord, cut: Cut, now: float) -> bool:
    """Return whether a GPU that no job uses may be cut now, by its node's last reading."""
    if cut.gpu not in node.cut_on_demand() or record.state not in _IN_SERVICE:
        return False
    state = record.cuts.get(cut.gpu)
    if state is not None and (state.retry_at is None or now < state.retry_at):
        return False
    gpu = _gpu(record.reading, cut.gpu)
    if gpu is None or gpu.error or gpu.mig_mode is None or gpu.processes:
        return False
    return not shows(gpu, cut)


def shows(gpu: Gpu, cut: Cut) -> bool:
    """Return whether a GPU is as a cut wants it."""
    if not cut.slices:
        return gpu.mig_mode is False
    there = sorted((one.profile, one.start) for one in gpu.slices if one.usable)
    return gpu.mig_mode is True and len(there) == len(gpu.slices) and there == sorted(cut.slices)


def with_outcome(record: NodeRecord, outcome: OperationOutcome) -> NodeRecord:
    """Return the record of a node after its answer to a cut. After a lost connection it may still be at work."""
    cut = outcome.operation.cut
    state = record.cuts.get(cut.gpu) if cut is not None else None
    if cut is None or state is None or state.cut != cut or outcome.transient or not state.under_way:
        return record
    return replace(record, cuts={**record.cuts, cut.gpu: replace(state, ended=outcome.time, error=outcome.error)})


def settle_cuts(
    record: NodeRecord, observation: NodeObservation | None, busy: Container[RankKey], now: float
) -> tuple[NodeRecord, list[Event]]:
    """Return the record without the cuts that a reading shows to be done, and with those marked that failed; events.

    A cut without an answer, for which nothing waits any more, is judged once its node's time limit has passed.
    """
    reading = observation.result if observation is not None else None
    if observation is None or not isinstance(reading, NodeReading) or not record.cuts:
        return record, []
    states, events = dict(record.cuts), list[Event]()
    for index, state in record.cuts.items():
        gpu = _gpu(reading, index)
        if gpu is None or gpu.error or not state.under_way:
            continue
        ended = state.ended
        if ended is None and cut_key(record.name, index) not in busy:
            # A script outlives its connection. It is done where the GPU is as it should be, but for podman's devices.
            done = (
                shows(gpu, state.cut) and record.declared is not None and record.declared.runtime != RuntimeName.PODMAN
            )
            ended = state.began if done else state.began + ORPHAN_S
        if ended is None or observation.began < ended:
            continue
        if shows(gpu, state.cut):
            del states[index]
            events.append(_event("gpu_cut", state.cut, now))
        else:
            states[index] = failed = _failed(state, gpu, now)
            events.append(_event("gpu_cut_failed", state.cut, now, error=failed.error))
    return replace(record, cuts=states), events


def has_cuts(record: NodeRecord) -> bool:
    """Return whether any GPU of a node is cut, is being cut, or was to be."""
    return bool(record.cuts) or any(gpu.mig_mode for gpu in (record.reading.gpus if record.reading else ()))


def nodes_being_cut(records: Mapping[str, NodeRecord]) -> frozenset[str]:
    """Return the nodes of which a reading is awaited that shows how a cut ended."""
    return frozenset(n for n, record in records.items() if any(state.under_way for state in record.cuts.values()))


def _failed(state: CutState, gpu: Gpu, now: float) -> CutState:
    pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**state.failures)
    error = state.error or f"it was interrupted: the GPU has {_geometry(gpu)}"
    return replace(state, error=error, failures=state.failures + 1, retry_at=now + pause_s)


def _geometry(gpu: Gpu) -> str:
    if not gpu.mig_mode:
        return "MIG mode off"
    return ", ".join(f"{one.profile}@{one.start}" for one in gpu.slices) or "no slices"


def _gpu(reading: NodeReading | None, index: int) -> Gpu | None:
    return next((gpu for gpu in reading.gpus if gpu.index == index), None) if reading is not None else None


def _event(kind: str, cut: Cut, now: float, **more: str) -> Event:
    data = {"gpu": cut.gpu, "slices": [f"{profile}@{start}" for profile, start in cut.slices], **more}
    return Event(time=now, kind=kind, node=cut.node, data=data)
