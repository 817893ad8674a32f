"""The nodes, over SSH: probes and operations on one connection per node, in thread pools.

A slow node does not delay the others: it occupies its own thread until its timeout, while the cycle goes on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from gpusched.cluster.base import (
    REFUSED,
    NodeObservation,
    Operation,
    OperationOutcome,
    RankKey,
    forgetting_key,
)
from gpusched.cluster.collecting import collect_log
from gpusched.cluster.ends import EndWatch
from gpusched.config.plugins import OURS, components
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.jobs import container_name
from gpusched.model.readings import NodeReading, ProbeFailure
from gpusched.model.resources import Inventory, Node
from gpusched.nodes.cutting import SCRIPT_LIMIT_S, cut_script
from gpusched.nodes.fencing import FencedTransport, FencingUnavailable, TermRefused
from gpusched.nodes.healthcheck import run_check
from gpusched.nodes.opening import open_transport
from gpusched.nodes.probe import probe
from gpusched.nodes.records import keep_record
from gpusched.nodes.runtimes import runtime_for
from gpusched.nodes.runtimes.base import EXISTS_EXIT_CODE, AttemptRef, Runtime
from gpusched.nodes.runtimes.shell import forget_job, result, write_answer
from gpusched.nodes.transport import RemoteScript, SessionRefused, Transport, TransportError
from gpusched.queue.clock import Clock

OPERATION_TIMEOUT_S = 60.0
REMOVE_TIMEOUT_S = 300.0  # a container may have written many files
COLLECT_TIMEOUT_S = 600.0
CUT_TIMEOUT_S = SCRIPT_LIMIT_S + 10.0
PROBE_THREADS, SLOW_THREADS = 32, 64  # slow ones wait, most of them for a timeout
STALL_S, STRAGGLERS_S, STRAGGLERS_FACTOR = 0.25, 1.0, 1.3
_LINKS_VALID_S = 3600.0
_KERNEL_OVERLAP_US = 60_000_000
OPERATIONS_PER_NODE, COLLECTING_PER_NODE, CHECKS_PER_NODE = 5, 2, 1
"""In parallel. sshd allows 10 sessions per connection by default (MaxSessions); the probe and `_ends` use one each."""
_THREADS = {"collect": COLLECTING_PER_NODE, "check": CHECKS_PER_NODE}
SESSION_RETRIES_S = (0.2, 0.5, 1.0)  # sshd counts a session until its process has ended
T = TypeVar("T")


class SshCluster:
    """Nodes reached over SSH, or this machine for nodes with the local transport."""

    def __init__(
        self,
        inventory: Inventory,
        cluster_id: str,
        logs: Path,
        clock: Clock | None = None,
        term: int | None = None,
        on_refused: Callable[[TermRefused], None] = lambda _: None,
    ) -> None:
        """Connect to nothing yet. ``term``: with it nodes are fenced; ``on_refused``: called by any thread then."""
        self._inventory, self._cluster_id, self._logs = inventory, cluster_id, logs
        self._term, self._on_refused = term, on_refused
        self._claimed = set[str]()  # nodes that refuse lower terms
        # Internally times are of the boot clock, since the wall clock may be set meanwhile. They become wall times
        # when returned (`_dated`, `finished`).
        self._dates = clock or Clock()
        self._clock = self._dates.boot
        self._nodes = {node.name: node for node in inventory.nodes}
        self._lock = threading.Lock()  # of nodes and transports, which threads of probes and operations use
        self._transports: dict[str, tuple[Node, Transport]] = {}
        self._links_read: dict[
            str, tuple[str | None, float]
        ] = {}  # boot id at the last reading of GPU links, and its time
        self._kernel_read: dict[str, int | None] = {}  # microseconds since boot; None: not readable
        self._drained: Container[str] = frozenset()
        self._probes: dict[str, Future[NodeObservation]] = {}
        self._operations: dict[RankKey, Future[OperationOutcome]] = {}
        self._forgetting: dict[RankKey, str] = {}  # node on which a job's folder is being removed
        self._changed_at: dict[str, float] = {}  # node -> last operation not yet followed by a probe
        # Separate pools: neither nodes that do not answer nor operations that hang may keep healthy nodes' probes
        # waiting for a thread.
        self._slow: set[str] = set()
        self._slow_pool = ThreadPoolExecutor(SLOW_THREADS, thread_name_prefix="slow-probe")
        self._probe_pool = ThreadPoolExecutor(PROBE_THREADS, thread_name_prefix="probe")
        self._pools: dict[tuple[str, str], ThreadPoolExecutor] = {}
        self._ends = EndWatch(cluster_id)
        self._wake: Callable[[], None] = lambda: None

    def use_inventory(self, inventory: Inventory) -> None:
        """Apply the settings of a changed inventory."""
        self._inventory = inventory

    def _use_nodes(self, nodes: Iterable[Node]) -> None:
        """Replace the set of nodes, and drop the connections of nodes that changed or left."""
        with self._lock:
            self._nodes = {node.name: node for node in nodes}
            gone = [name for name, (node, _) in self._transports.items() if self._nodes.get(name) != node]
            left = [(name, self._transports.pop(name)[1]) for name in gone]
        for name, transport in left:
            self._ends.drop(name)
            transport.close()
            self._links_read.pop(name, None)
            self._kernel_read.pop(name, None)
            self._claimed.discard(name)
        for key in [key for key in self._pools if key[0] not in self._nodes]:
            self._pools.pop(key).shutdown(wait=False)  # its threads end with what they have begun
        self._ends.keep_only(self._nodes)

    def observe(
        self,
        nodes: Iterable[Node],
        patience_s: float,
        known: Container[str] = frozenset(),
        drained: Container[str] = frozenset(),
    ) -> dict[str, NodeObservation]:
        """See `ClusterBackend.observe`. A node is not probed again while its last probe is still running.

        Only nodes that answered in time at their last probe are waited for; the others report whenever they answer.
        """
        self._use_nodes(nodes)
        self._drained = drained
        for node in self._nodes.values():
            if node.name not in self._probes and node.name not in known:
                self._ends.probe_started(node.name)
                pool = self._slow_pool if node.name in self._slow else self._probe_pool
                self._probes[node.name] = pool.submit(self._probe, node)
        # A node that has left may still have a probe: it is not waited for, and is its last.
        self._wait_for([name for name in self._probes if name in self._nodes and name not in self._slow], patience_s)
        # From here on these are not waited for; they use the slow pool until they answer in time again.
        self._slow |= {name for name, future in self._probes.items() if future.running()}
        observations = {name: future.result() for name, future in self._probes.items() if future.done()}
        for name, observation in observations.items():
            del self._probes[name]
            # An older answer does not show the operation's effect yet; `has_news` keeps asking for a newer one.
            if observation.began >= self._changed_at.get(name, float("inf")):
                del self._changed_at[name]
            quick = observation.result.time - observation.began < patience_s
            if isinstance(observation.result, NodeReading) and quick:
                self._slow.discard(name)
            else:
                self._slow.add(name)
        return {name: self._dated(observation) for name, observation in observations.items()}

    def _wait_for(self, names: list[str], patience_s: float) -> None:
        """Wait for these nodes' probes; failing nodes cost the others little.

        Once half have answered, the rest is waited for not much longer than those took, unless the patience is the
        probes' own time limit or more. Where all threads are held up, new ones take their places.
        """
        begin, left, answered = time.monotonic(), len(names), threading.Semaphore(0)
        until = begin + patience_s

        def watch(name: str) -> None:
            self._probes[name].add_done_callback(lambda _: answered.release())

        for name in names:
            watch(name)
        while left and (wait_s := until - time.monotonic()) > 0:
            if answered.acquire(timeout=min(wait_s, STALL_S)):
                left -= 1
                if left == len(names) // 2 and patience_s < self._inventory.settings.probe_timeout_s:
                    now = time.monotonic()
                    until = min(until, now + max(STRAGGLERS_S, STRAGGLERS_FACTOR * (now - begin)))
            elif queued := [name for name in names if not self._probes[name].done() and self._probes[name].cancel()]:
                left += len(queued)  # those cancelled are counted as answered
                self._probe_pool.shutdown(wait=False)
                self._probe_pool = ThreadPoolExecutor(PROBE_THREADS, thread_name_prefix="probe")
                for name in queued:
                    self._probes[name] = self._probe_pool.submit(self._probe, self._nodes[name])
                    watch(name)

    def _dated(self, observation: NodeObservation) -> NodeObservation:
        offset, result = self._dates.offset, observation.result
        if isinstance(result, NodeReading) and result.clock_skew_s is not None:
            result = replace(result, clock_skew_s=result.clock_skew_s - offset)
        return NodeObservation(began=observation.began + offset, result=replace(result, time=result.time + offset))

    def _probe(self, node: Node) -> NodeObservation:
        began = self._clock()
        try:
            # First: what the probe shows must not change by an earlier controller's hand.
            if node.name not in self._claimed and isinstance(fenced := self._acting(node), FencedTransport):
                with contextlib.suppress(FencingUnavailable):  # operations there will say why
                    self._with_session(node.name, partial(fenced.claim, self._inventory.settings.probe_timeout_s))
                    self._claimed.add(node.name)
            # GPU links do not change while a machine is up, and cables rarely; reading them takes longest.
            boot, read = self._links_read.get(node.name, ("", float("-inf")))
            want_links = began - read >= _LINKS_VALID_S
            reading = self._read(node, want_links=want_links)
            if reading.boot_id != boot and not want_links:
                reading, want_links = self._read(node, want_links=True), True
            if want_links:
                self._links_read[node.name] = reading.boot_id, began
            if reading.kernel is not None:
                has_log = reading.kernel.source not in ("", "nvml")
                self._kernel_read[node.name] = reading.kernel.now_us if has_log else None
            with contextlib.suppress(Exception):  # the reading is valid; ends are seen at the next tick
                self._ends.update(node.name, self._transport(node), reading)
            return NodeObservation(began=began, result=reading)
        except TermRefused as error:
            self._on_refused(error)
            cause: TransportError = error
        except Exception as error:  # one node's probe must not fail the cycle
            cause = error if isinstance(error, TransportError) else TransportError("protocol", f"probe: {error!r}")
        self._ends.probe_failed(node.name)
        failure = ProbeFailure(
            node=node.name, time=self._clock(), kind=cause.kind, reason=cause.reason, hint=cause.hint
        )
        return NodeObservation(began=began, result=failure)

    def _read(self, node: Node, want_links: bool = False) -> NodeReading:
        transport, settings = self._transport(node), self._inventory.settings
        # A log that cannot be read is tried again with the links. Messages are sent again for a while: which of them
        # are known is in the store, and what could not be stored there must come again.
        at_us = 0 if want_links else self._kernel_read.get(node.name, 0)
        read = partial(
            probe, transport, node, self._cluster_id, settings, self._clock, want_links=want_links,
            want_kernel=at_us is not None, kernel_after_us=max(0, (at_us or 0) - _KERNEL_OVERLAP_US) or None,
            listen=node.name not in self._drained,
        )  # fmt: skip
        return self._with_session(node.name, read)

    def _with_session(self, node: str, call: Callable[[], T]) -> T:
        """Run ``call``; if the node's sshd has no session left, close our channel (`EndWatch`) and try again."""
        try:
            return call()
        except SessionRefused:
            if not self._ends.yield_session(node):
                raise
        for pause_s in SESSION_RETRIES_S:
            time.sleep(pause_s)
            with contextlib.suppress(SessionRefused):
                return call()
        return call()

    def _transport(self, node: Node) -> Transport:
        with self._lock:  # probe and operations of a node share its connection
            known = self._transports.get(node.name)
            if known is None or known[0] != node:
                if self._nodes.get(node.name) != node:
                    raise TransportError("unreachable", f"{node.name} has left the inventory, or changed there")
                known = self._transports[node.name] = (node, open_transport(node, self._inventory.settings))
            return known[1]

    def raise_term(self, term: int) -> None:
        """Continue with a higher term, which nodes receive with the next operations."""
        self._term = term

    def _acting(self, node: Node) -> Transport:
        """Return the transport for what changes something on the node."""
        transport = self._transport(node)
        return (
            transport if self._term is None else FencedTransport(transport, self._cluster_id, node.name, self._term)
        )

    def perform(self, operations: Iterable[Operation]) -> None:
        """See `ClusterBackend.perform`."""
        for operation in operations:
            # What removes the folder of an ended job must not find the files of its next attempt there. The launch
            # comes again, as its node knows nothing of it.
            forgotten_on = self._forgetting.get(forgetting_key(operation.rank.job_id))
            if operation.verb == "launch" and forgotten_on == operation.node:
                continue
            if operation.key not in self._operations:
                if operation.verb == "forget":
                    self._forgetting[operation.key] = operation.node
                future = self._operations[operation.key] = self._pool_of(operation).submit(self._perform, operation)
                future.add_done_callback(lambda _: self._wake())

    def _pool_of(self, operation: Operation) -> ThreadPoolExecutor:
        """Return the node's own thread pool, so that operations that hang on one node delay no other node.

        Collecting output has a pool of its own, and so have checks: however slow, they delay no start and no signal.
        """
        key = operation.node, operation.verb if operation.verb in _THREADS else ""
        if key not in self._pools:
            threads = _THREADS.get(operation.verb, OPERATIONS_PER_NODE)
            self._pools[key] = ThreadPoolExecutor(threads, thread_name_prefix=f"operation-{operation.node}")
        return self._pools[key]

    def _perform(self, operation: Operation) -> OperationOutcome:
        error, transient, result = "", False, None
        try:
            if (node := self._nodes.get(operation.node)) is None:
                error, transient = f"node {operation.node} is not in the inventory", True
            elif operation.check is not None:
                check = partial(run_check, self._acting(node), self._cluster_id, operation.check)
                result = self._with_session(node.name, check)
            else:
                error = self._with_session(node.name, partial(self._dispatch, operation, node))
        except TermRefused as problem:
            error, transient = problem.line(), True
            self._on_refused(problem)
        except FencingUnavailable as problem:  # the job may start on another node
            error, transient = problem.line(), operation.verb not in ("launch", "check")
        except TransportError as problem:
            error, transient = problem.line(), True
        except UsageError as problem:
            error = f"{REFUSED}: {problem.line()}"
        except GpuschedError as problem:
            error = problem.line()
        except OSError as problem:  # our own disk is full: the output stays on the node meanwhile
            path = f"{problem.filename}: " if problem.filename else ""
            error, transient = f"{path}{problem.strerror or problem}", True
        except Exception as problem:  # one rank's operation must not fail the cycle
            error = f"internal error: {problem!r}"
            if (runtime := components("runtimes").get(operation.rank.runtime)) and runtime.distribution != OURS:
                error += f" (runtime '{runtime.name}' of {runtime.origin})"
        return OperationOutcome(
            operation=operation, time=self._clock(), error=error, transient=transient, result=result
        )

    def _dispatch(self, operation: Operation, node: Node) -> str:
        """Perform the operation; return "" or the node's error."""
        if operation.verb == "cut":
            return self._cut(operation, node)
        runtime, transport = runtime_for(operation.rank.runtime), self._acting(node)
        ref = AttemptRef(self._cluster_id, node.name, container_name(*operation.key))
        match operation.verb:
            case "collect":
                return self._collect(operation, runtime, transport, ref)
            case "launch":
                assert operation.request is not None
                return _run(transport, runtime.launch(operation.request), OPERATION_TIMEOUT_S, also_ok=EXISTS_EXIT_CODE)
            case "start":
                return _run(transport, runtime.start(ref), OPERATION_TIMEOUT_S)
            case "signal":
                return _run(
                    transport, runtime.signal(ref, operation.signal or "TERM", operation.note), OPERATION_TIMEOUT_S
                )
            case "forget":
                return _run(transport, forget_job(ref, operation.rank.job_id), REMOVE_TIMEOUT_S)
            case "answer":
                return _run(transport, write_answer(ref, operation.note or ""), OPERATION_TIMEOUT_S)
            case "remove":
                return _run(transport, _keeping(operation.note, ref, runtime.remove(ref)), REMOVE_TIMEOUT_S)
            case "check":
                raise AssertionError("a check has no rank")  # `_perform` runs it

    def _cut(self, operation: Operation, node: Node) -> str:
        if operation.cut is None or node.mig is None:  # by an inventory that was changed meanwhile
            return f"the GPUs of {node.name} are not cut on demand"
        return _run(self._acting(node), cut_script(node.mig, node.runtime, operation.cut), CUT_TIMEOUT_S)

    def _collect(self, operation: Operation, runtime: Runtime, transport: Transport, ref: AttemptRef) -> str:
        caps, error = self._inventory.settings.logs, ""
        if operation.destination is not None:
            log = Path(operation.destination)
            error = collect_log(transport, runtime.log(ref), log, caps, operation.readers)
        if operation.finish and not error:
            error = _run(transport, runtime.finish_output(ref), COLLECT_TIMEOUT_S)
        if operation.result is not None and not error:
            left = result(ref, operation.rank.attempt, operation.rank.rank)
            error = collect_log(transport, left, Path(operation.result), caps, operation.readers)
        return error

    def finished(self) -> list[OperationOutcome]:
        """See `ClusterBackend.finished`."""
        done = [key for key, future in self._operations.items() if future.done()]
        outcomes = [self._operations.pop(key).result() for key in done]
        for key in done:
            self._forgetting.pop(key, None)
        for outcome in outcomes:
            if outcome.operation.verb in ("launch", "start", "signal", "cut"):
                self._changed_at[outcome.operation.node] = outcome.time
        return [replace(outcome, time=outcome.time + self._dates.offset) for outcome in outcomes]

    def busy(self) -> frozenset[RankKey]:
        """See `ClusterBackend.busy`."""
        return frozenset(self._operations)

    def watch_ends(self, wake: Callable[[], None]) -> None:
        """Have nodes report job ends at once from now on; ``wake`` is called when `has_news` may have changed."""
        self._wake = wake
        self._ends.begin(wake)

    def has_news(self) -> bool:
        """Return whether a cycle would learn something: an operation or a job has ended since the last one.

        Also when the node of an ended operation can be observed only now, as its probe was slow or is older than the
        operation.
        """
        if any(future.done() for future in self._operations.values()):
            return True
        probes = [self._probes.get(name) for name in self._changed_at if name in self._nodes]
        if any(probe is None or probe.done() for probe in probes):
            return True
        return self._ends.is_due({name for name, future in self._probes.items() if not future.done()})

    def wait_for_operations(self, timeout_s: float) -> None:
        """Wait until all operations have ended, at most ``timeout_s``; for ``tick``, which exits afterwards."""
        wait(self._operations.values(), timeout=timeout_s)

    def close(self) -> None:
        """Close the connections. Operations that hang end by their own timeouts."""
        self._ends.close()
        for pool in (self._probe_pool, self._slow_pool, *self._pools.values()):
            pool.shutdown(wait=False, cancel_futures=True)
        for _, transport in self._transports.values():
            transport.close()


def _run(transport: Transport, script: RemoteScript, timeout_s: float, also_ok: int = 0) -> str:
    result = transport.run(script, timeout_s)
    return "" if result.exit_code in (0, also_ok) else result.complaint


def _keeping(record: str | None, ref: AttemptRef, removal: RemoteScript) -> RemoteScript:
    """Return a removal that keeps the attempt's record first; without one, if a runtime's script is no plain sh."""
    if record is None or removal.argv != ("sh", "-s"):
        return removal
    return RemoteScript(removal.argv, keep_record(ref, record).encode() + removal.stdin)
