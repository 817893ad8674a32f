"""The interface between the controller and the nodes: observations of nodes, operations on them, their outcomes.

Operations run in the background: the controller starts some in one cycle and reads their outcomes in a later one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Literal, Protocol

import msgspec

from gpusched.model.healthchecks import CheckResult, CheckRun
from gpusched.model.readings import NodeReading, ProbeFailure
from gpusched.model.resources import Node
from gpusched.model.slices import Cut
from gpusched.nodes.runtimes.base import LaunchRequest
from gpusched.queue.store import RankRecord

RankKey = tuple[str, int, int]
"""Job id, attempt, rank."""

REFUSED = "refused"
"""Prefix of the error of an operation that every node would reject: the job is at fault, not the node."""


def forgetting_key(job_id: str) -> RankKey:
    """Return the key of the operation that removes a job's own folder, on one node at a time."""
    return job_id, 0, 0


class NodeObservation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one probe of a node.

    Attributes:
        began: When the probe began (Unix seconds, the controller's clock); what it shows is no older than that.
        result: What it read, or why it failed.
    """

    began: float
    result: NodeReading | ProbeFailure

    @property
    def complete_reading(self) -> NodeReading | None:
        """The reading, if the container engine answered too; only then is a container missing from it gone."""
        return self.result if isinstance(self.result, NodeReading) and self.result.containers is not None else None


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An action on one node for one rank.

    ==========  ====================================================================================================
    verb        what is done
    ==========  ====================================================================================================
    launch      create the rank's container by ``request``, and start it unless ``request.hold``
    start       start a rank that was launched with ``hold``: of a gang, when all its ranks are there
    signal      send ``signal``; before, write ``note``, if any, into its resize.json
    collect     copy its output to ``destination``, ``finish`` its own files, and copy a function's result to ``result``
    remove      remove the container and the rank's folder, and keep ``note``, if any, as the record of the attempt
    forget      remove the job's own folder
    answer      answer the request that the job made from inside, with ``note``
    check       run ``check``, one of the site's own, and wait for its end; ``rank`` stands for the node
    cut         cut a GPU, or make it whole, by ``cut``; no rank's: the record is made up
    ==========  ====================================================================================================

    Attributes:
        node: Name of the node.
        rank: The rank's record; of a stray or a job's folder it is made up.
        destination, result: Paths on the controller's machine.
        finish: The files that the job names for its output are made whole (`Runtime.finish_output`).
        readers: User ids that may read the collected output, the job's user first.
        check: The run of a check.
        for_idle: The signal is sent because the job's GPUs are idle; it is not one that asks the job to end.
        for_warning: It warns of the limit; it does not ask the job to end, either.
    """

    verb: Literal["launch", "start", "signal", "collect", "remove", "forget", "answer", "check", "cut"]
    node: str
    rank: RankRecord
    request: LaunchRequest | None = None
    signal: str | None = None
    note: str | None = None
    destination: str | None = None
    result: str | None = None
    finish: bool = False
    readers: tuple[int, ...] = ()
    check: CheckRun | None = None
    for_idle: bool = False
    for_warning: bool = False
    cut: Cut | None = None

    @property
    def key(self) -> RankKey:
        """The rank that the operation is for; at most one operation per rank is in progress."""
        return self.rank.job_id, self.rank.attempt, self.rank.rank


class OperationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an operation.

    Attributes:
        time: When it ended (Unix seconds, the controller's clock).
        error: One line; "" on success.
        transient: Whether the error is not the operation's own (a lost connection, a full disk): a retry may succeed.
        result: Of a check.
    """

    operation: Operation
    time: float
    error: str = ""
    transient: bool = False
    result: CheckResult | None = None


class ClusterBackend(Protocol):
    """The interface to the nodes. `SshCluster` implements it; the simulator has an engine of its own."""

    def observe(
        self,
        nodes: Iterable[Node],
        patience_s: float,
        known: Container[str] = frozenset(),
        drained: Container[str] = frozenset(),
    ) -> dict[str, NodeObservation]:
        """Probe the nodes, except those in ``known``; return the new observations, by node.

        Waits at most ``patience_s``. A node that has not answered by then is missing; its answer is returned by the
        call after it came. On nodes in ``drained`` nothing stays open between two probes.
        """

    def perform(self, operations: Iterable[Operation]) -> None:
        """Start operations in the background, at most one per rank at a time (`busy`)."""

    def finished(self) -> list[OperationOutcome]:
        """Return the outcomes of operations that ended since the last call; each is returned once."""

    def busy(self) -> frozenset[RankKey]:
        """Return the ranks with an operation in progress."""

    def close(self) -> None:
        """Close the connections; what was started on the nodes keeps running."""
