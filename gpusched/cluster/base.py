"""The interface between the controller and the nodes: observe, perform, finished."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Literal, Protocol

import msgspec

from gpusched.model.readings import NodeReading, ProbeFailure
from gpusched.model.resources import Node
from gpusched.nodes.runtimes.base import LaunchRequest
from gpusched.queue.store import RankRecord

RankKey = tuple[str, int, int]  # job id, attempt, rank
REFUSED = "refused"  # prefix of the error of an operation that every node would reject: the job's fault


class NodeObservation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a node. ``began``: when the probe started (Unix seconds); the answer is no older than that."""

    began: float
    result: NodeReading | ProbeFailure

    @property
    def complete_reading(self) -> NodeReading | None:
        """The reading, if the container engine answered too; only then is a container missing from it gone."""
        return self.result if isinstance(self.result, NodeReading) and self.result.containers is not None else None


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An action on one node for one rank.

    Attributes:
        verb: ``launch`` (needs ``request``), ``start`` a gang's rank, ``signal`` (needs ``signal``), ``collect`` the
            output into ``destination`` (or finish ``rank.output``) and a function's result into ``result``, ``remove``
            the container and its folder, ``forget`` the job's own folder, ``answer`` the job's request (with ``note``).
        note: With a signal, the text to write into resize.json first.
        readers: User ids that may read the collected output, the job's first.
    """

    verb: Literal["launch", "start", "signal", "collect", "remove", "forget", "answer"]
    node: str
    rank: RankRecord
    request: LaunchRequest | None = None
    signal: str | None = None
    note: str | None = None
    destination: str | None = None
    result: str | None = None
    readers: tuple[int, ...] = ()

    @property
    def key(self) -> RankKey:
        """The rank that the operation is for; at most one operation per rank is in progress."""
        return self.rank.job_id, self.rank.attempt, self.rank.rank


class OperationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an operation. ``error``: "" on success; ``transient``: whether a retry may succeed."""

    operation: Operation
    time: float
    error: str = ""
    transient: bool = False


class ClusterBackend(Protocol):
    """The interface to the nodes. `SshCluster` is its only implementation; the simulator has none."""

    def observe(
        self, nodes: Iterable[Node], patience_s: float, known: Container[str] = frozenset()
    ) -> dict[str, NodeObservation]:
        """Return each node's observation since the last call, waiting at most ``patience_s`` for slow nodes.

        Nodes in ``known`` need not be probed again.
        """

    def perform(self, operations: Iterable[Operation]) -> None:
        """Start operations; returns at once."""

    def finished(self) -> list[OperationOutcome]:
        """Return the outcomes of operations that ended since the last call."""

    def busy(self) -> frozenset[RankKey]:
        """Return the ranks with an operation in progress."""

    def close(self) -> None:
        """Close the connections; what was started on the nodes keeps running."""
