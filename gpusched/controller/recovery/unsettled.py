"""Nodes that did not answer when the store was recovered: they are settled when they do, and kept out until then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from gpusched.cluster.base import NodeObservation
from gpusched.controller.recovery.settling import NodeEvidence, settle
from gpusched.model.jobs import JobRecord
from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.readings import ProbeFailure
from gpusched.model.recovery import UNSETTLED, Unsettled
from gpusched.model.resources import Inventory, Node
from gpusched.nodes.opening import open_transport
from gpusched.nodes.records import NodeRecords, read_records
from gpusched.queue.store import Store


def leave_unsettled(store: Store, nodes: Iterable[str], now: float, made: float) -> None:
    """Record which nodes did not answer at a recovery; ``made``: when its backup was made."""
    store.set_meta(UNSETTLED, msgspec.json.encode(Unsettled(frozenset(nodes), now, made)).decode())


class UnsettledNodes:
    """Settles such nodes; ``inventory`` below is always the present one, and a node that left it is given up."""

    def __init__(self, store: Store, cluster_id: str) -> None:
        self._store, self._cluster_id = store, cluster_id
        kept = store.meta(UNSETTLED)
        self._left = msgspec.json.decode(kept, type=Unsettled) if kept else Unsettled(frozenset(), 0.0, 0.0)
        self._asked: dict[str, Future[NodeRecords]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def __contains__(self, node: str) -> bool:
        """Return whether this node is not settled yet; safe in any thread."""
        return node in self._left.nodes

    def withhold(
        self, inventory: Inventory, observations: dict[str, NodeObservation], now: float
    ) -> dict[str, NodeObservation]:
        """Return the observations, where an unsettled node has not answered; settle those whose records are read.

        Raises:
            sqlite3.Error, DatabaseDamaged: As the store.
        """
        if not self._left.nodes:
            return observations
        if gone := {name for name in self._left.nodes if inventory.node(name) is None}:
            self._forget(gone)
        changed = dict(observations)
        for name in self._left.nodes & observations.keys():
            reading, node = observations[name].complete_reading, inventory.node(name)
            if reading is None or node is None:
                continue
            why = self._ask(node, inventory)
            if (found := self._asked.get(name)) is not None and found.done():
                del self._asked[name]
                try:
                    records = found.result()
                except Exception as error:  # it is asked again
                    why = str(error)
                else:
                    found_there = {name: NodeEvidence(reading, records)}
                    with self._store.transaction():
                        settle(self._store, inventory, found_there, self._left.nodes - {name}, now)
                        self._forget({name})
            failure = ProbeFailure(node=name, time=reading.time, kind="protocol", reason=why)
            changed[name] = msgspec.structs.replace(observations[name], result=failure)
        return changed

    def _ask(self, node: Node, inventory: Inventory) -> str:
        """Read the node's records beside the cycle; return why it is kept out."""
        if node.name not in self._asked:
            self._pool = self._pool or ThreadPoolExecutor(8, thread_name_prefix="records")
            self._asked[node.name] = self._pool.submit(self._read, node, inventory)
        return "what runs there is being compared with the recovered store"

    def _read(self, node: Node, inventory: Inventory) -> NodeRecords:
        with contextlib.closing(open_transport(node, inventory.settings)) as transport:
            return read_records(transport, self._cluster_id, node.name, self._left.made)

    def _forget(self, names: set[str]) -> None:
        left = msgspec.structs.replace(self._left, nodes=self._left.nodes - names)
        self._store.set_meta(UNSETTLED, msgspec.json.encode(left).decode() if left.nodes else "")
        self._left = left

    def reasons(self, inventory: Inventory, pending: Iterable[JobRecord]) -> Mapping[str, Reason]:
        """Return why pending jobs must not start: an unsettled node may run them, since after the last backup."""
        nodes = [node for name in sorted(self._left.nodes) if (node := inventory.node(name)) is not None]
        found = {}
        for job in pending if nodes else ():
            there = [node.name for node in nodes if node.partition == job.spec.partition]
            if there and job.submit_time <= self._left.since:
                message = f"{', '.join(there)} may run it since before the store was recovered, and does not answer yet"
                found[job.id] = Reason(code=ReasonCode.REQ_NODE_NOT_AVAIL, message=message)
        return found

    def close(self) -> None:
        """Wait for no node."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
