"""The port between the controller and a world: observe, perform, finished."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Literal, Protocol

import msgspec

from gpusched.model.readings import NodeReading, ProbeFailure
from gpusched.model.resources import Node
from gpusched.nodes.runtimes.base import LaunchRequest
from gpusched.queue.store import RankRecord

RankKey = tuple[str, int, int]  # job id, attempt, rank
REFUSED = "refused"  # begins the error of an operation that no node would take: the job's fault, not the node's


class NodeObservation(msgspec.Struct, frozen=True, kw_only=True):
    """What a node answered. ``began``: when it was asked (Unix seconds); the answer is no older than that."""

    began: float
    result: NodeReading | ProbeFailure

    @property
    def whole(self) -> NodeReading | None:
        """The reading, where its container engine answered too: only then is what it does not name not there."""
        return self.result if isinstance(self.result, NodeReading) and self.result.containers is not None else None


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do on one node for one rank.

    Attributes:
        verb: ``launch`` (needs ``request``), ``start`` a gang's rank, ``signal`` (needs ``signal``), ``collect`` the
            output into ``destination`` (or finish ``rank.output``) and what a function left into ``result``,
            ``remove`` container and folder, ``forget`` the job's own folder, ``answer`` what it asked (with ``note``).
        note: With a signal: what is first written into resize.json.
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
        """Which rank it is for; at most one operation per rank is under way."""
        return self.rank.job_id, self.rank.attempt, self.rank.rank


class OperationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How an operation ended. ``error`` is "" when it was done; ``transient`` when asking again makes sense."""

    operation: Operation
    time: float
    error: str = ""
    transient: bool = False


class ClusterBackend(Protocol):
    """The port to the nodes: `SshCluster` is the one there is; the simulator has none."""

    def observe(
        self, nodes: Iterable[Node], patience_s: float, known: Container[str] = frozenset()
    ) -> dict[str, NodeObservation]:
        """The news of each node since the last call, waiting at most ``patience_s`` for the slow ones.

        Nodes whose names are ``known`` need not be asked again.
        """

    def perform(self, operations: Iterable[Operation]) -> None:
        """Take operations on; returns at once."""

    def finished(self) -> list[OperationOutcome]:
        """Works that ended since the last call."""

    def busy(self) -> frozenset[RankKey]:
        """Ranks with an operation under way."""

    def close(self) -> None:
        """Let go of connections; what was begun on the nodes goes on there."""
