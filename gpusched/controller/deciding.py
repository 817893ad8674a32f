"""Decisions of the live controller: agents with a time budget, their fallbacks, and their weights."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpusched.compiled import NotCached, nothing_compiled
from gpusched.config.weights import ModelError, TrainedModel, load_model, weights_file
from gpusched.controller.compiling import compiler_of, end
from gpusched.controller.metering import Timings
from gpusched.model.events import Event
from gpusched.model.plan import Plan
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.queue.promotions import Fallback
from gpusched.queue.store import Store
from gpusched.sched.agent import prepared_weights
from gpusched.sched.decide import decide
from gpusched.sched.slicenames import base_of
from gpusched.sched.slices.split import split
from gpusched.sched.turns import agents_to_ask, in_turn, partition_snapshot
from gpusched.sched.warming import trial_of, warm_up_agent

BACKOFF_S = 60.0  # pause of an agent that exceeded its budget, which it would otherwise exceed in every cycle
_FIFO = PolicySpec(name="fifo")
_log = logging.getLogger(__name__)


class Decision(NamedTuple):
    """A plan, and the policy that decided for each partition (an agent, or its fallback)."""

    plan: Plan
    deciders: dict[str, PolicySpec]


class Weights:
    """The weights of active agents, reloaded when their file changes. The arrays are not shared."""

    def __init__(self) -> None:
        self._cache: dict[str, tuple[object, TrainedModel | str]] = {}

    def get(self, partition: str, spec: PolicySpec, digest: str = "") -> TrainedModel | str:
        """Return a partition's weights, or why they cannot be used; ``digest``: the required one ("": any)."""
        partition = base_of(partition)
        stamp = (spec.folder, digest, _stamp(weights_file(Path(spec.folder), partition)))
        cached = self._cache.get(partition)
        if cached is None or cached[0] != stamp:
            cached = self._cache[partition] = (stamp, _load(partition, spec, digest))
        return cached[1]


def _load(partition: str, spec: PolicySpec, digest: str) -> TrainedModel | str:
    assert spec.agent is not None
    try:
        model = load_model(Path(spec.folder), partition, spec.agent)
        if digest and model.digest != digest:
            return f"{model.path}: these are not the weights that were promoted"
        prepared_weights(model)
    except (ModelError, OSError) as error:
        return error.message if isinstance(error, ModelError) else str(error)
    except ValueError as error:  # of another shape
        return f"{weights_file(Path(spec.folder), partition)}: {error}"
    return model


def _stamp(file: Path) -> tuple[str, int, int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return str(file), status.st_mtime_ns, status.st_size, status.st_ino


class AgentDecision:
    """One decision of one agent, on its own thread and arrays.

    A thread cannot be killed. The answer of a late one is discarded, and its agent is not called again before it has
    ended.
    """

    def __init__(self, partition: str, spec: PolicySpec, model: TrainedModel | None, snapshot: Snapshot) -> None:
        self.model = model
        self._partition, self._budget_s = partition, spec.budget_s
        self._snapshot = partition_snapshot(snapshot, partition, spec)
        self._result: tuple[Plan | None, str] = (None, "")
        self._took_s = 0.0
        self._began = time.monotonic()
        self._done = threading.Event()
        threading.Thread(target=self._run, name=f"agent of {partition}", daemon=True).start()

    def _run(self) -> None:
        try:
            models = {base_of(self._partition): self.model} if self.model is not None else {}
            plan = decide(self._snapshot, models)
            self._result = plan, plan.troubles.get(self._partition, "")
        except Exception as error:  # an agent's error must not fail the cycle
            self._result = None, f"internal error: {error!r}"
        self._took_s = time.monotonic() - self._began
        self._done.set()

    @property
    def is_running(self) -> bool:
        """Whether the agent has not answered yet."""
        return not self._done.is_set()

    @property
    def is_late(self) -> bool:
        """Whether the agent has exceeded its budget."""
        return self.is_running or self._took_s > self._budget_s

    @property
    def took_s(self) -> float:
        """Seconds from its start to its answer, or until now if there is none yet."""
        return time.monotonic() - self._began if self.is_running else self._took_s

    def answer(self) -> tuple[Plan | None, str]:
        """Wait for the answer until the budget is used up.

        Returns:
            The plan, or None; and why it cannot be used, or "".
        """
        self._done.wait(max(0.0, self._began + self._budget_s - time.monotonic()))
        return (None, timeout_message(self._budget_s)) if self.is_late else self._result


def timeout_message(budget_s: float) -> str:
    """Return the message for an agent that exceeded its budget; constant, so that it is logged once."""
    budget = f"{budget_s * 1000:g} ms" if budget_s < 1 else f"{budget_s:g} s"
    return f"no answer within its time budget of {budget}"


class Decider:
    """Runs each partition's policy: staged ones directly, agents on threads, and fallbacks for agents that fail.

    Agents that are out of service are recorded in the store, for ``status`` and ``why``. While another process compiles
    the passes of new policies, the previous ones stay active.
    """

    def __init__(self, store: Store, timings: Timings | None = None) -> None:
        self._store = store
        self._timings = timings or Timings()
        self._weights = Weights()
        self._decisions: dict[str, AgentDecision] = {}
        self._warmed_up: set[str] = set()
        self._backoffs: dict[str, tuple[TrainedModel, float]] = {}
        self._fallbacks: dict[str, Fallback] = dict(store.fallbacks())
        self._remarks: dict[str, str] = {}
        self._failed_weights: dict[str, TrainedModel | str] = {}  # the weights with which an agent failed
        # Policies and digests by which the last decision was made, and the process that compiles for the next ones.
        self._active: tuple[Mapping[str, PolicySpec], Mapping[str, str]] | None = None
        self._compiler: tuple[Mapping[str, PolicySpec], subprocess.Popen[bytes] | None] | None = None

    def warm_up(self, policies: Mapping[str, PolicySpec], digests: Mapping[str, str]) -> None:
        """Compile or load the active agents' passes, so that their first decision is in time."""
        for _, spec, weights in self._agents(policies, digests):
            if not isinstance(weights, str):
                warm_up_agent(spec, weights)

    def refresh(self, policies: Mapping[str, PolicySpec], digests: Mapping[str, str], now: float) -> None:
        """Reload changed weights, and record which agents are out of service, even if no job is pending."""
        found = {n: fallback for n, fallback in self._fallbacks.items() if self._stays_on_fallback(n, policies)}
        for name, spec, weights in self._agents(policies, digests):
            if isinstance(weights, str):
                found[name] = self._fallback(name, spec, weights, now)
                self._failed_weights[name] = weights
            elif name in found and self._failed_weights.get(name) is not weights:
                del found[name]  # new weights: give them a chance
        self._record_changes(found, policies, now)

    def _agents(
        self, policies: Mapping[str, PolicySpec], digests: Mapping[str, str]
    ) -> Iterator[tuple[str, PolicySpec, TrainedModel | str]]:
        for name, spec in policies.items():
            if spec.agent is not None:
                yield name, spec, self._weights.get(name, spec, digests.get(name, ""))

    def decide(self, snapshot: Snapshot, digests: Mapping[str, str]) -> Decision:
        """Return a plan for the snapshot, within the agents' time budgets.

        Agents decide side by side. One whose jobs share limits or links with what partitions before it start is asked
        again, with what these leave (`in_turn`).
        """
        snapshot, digests = self._compiled_only(snapshot, digests)
        snapshot = split(snapshot)  # first: it adds partitions for slices
        policies, agents = snapshot.policies, agents_to_ask(snapshot)
        if not agents:
            return self._log_remarks(Decision(decide(snapshot), policies))
        started = {name: self._run(name, spec, digests, snapshot) for name, spec in agents.items()}
        # A partition's queues of MIG slices have its agent, too: it is in service if it can decide about each.
        bases, deciders = set(map(base_of, agents)), dict(policies)
        found = {name: one for name, one in self._fallbacks.items() if name not in bases}

        def decided(name: str, left: Snapshot) -> Plan:
            spec, run = agents[name], started[name]
            if left is not snapshot and isinstance(run, AgentDecision):
                run.answer()
                run = self._run(name, spec, digests, left)
            answer, reason = self._result(name, spec, run, snapshot.now)
            if reason:
                deciders[name] = spec.effective_fallback
                found[base_of(name)] = self._fallback(base_of(name), spec, reason, snapshot.now)
            return answer if answer is not None else decide(partition_snapshot(left, name, deciders[name]))

        plan = in_turn(snapshot, agents, decide, decided)
        self._record_changes(found, policies, snapshot.now)
        return self._log_remarks(Decision(plan, deciders))

    def _compiled_only(self, snapshot: Snapshot, digests: Mapping[str, str]) -> tuple[Snapshot, Mapping[str, str]]:
        """Return the snapshot and digests to decide by: the previous policies' while new ones are being compiled."""
        new = snapshot.policies
        if self._active is None or self._active[0] == new or self._is_compiled(snapshot):
            self._active = new, digests
            return snapshot, digests
        policies, digests = self._active
        kept = {name: policies[name] for name in new if name in policies}
        waiting = [job for job in snapshot.pending if job.spec.partition not in new.keys() - kept.keys()]
        return msgspec.structs.replace(snapshot, policies=kept, pending=tuple(waiting)), digests

    def _is_compiled(self, snapshot: Snapshot) -> bool:
        """Return whether the policies' passes are compiled; if not, start a process that compiles them, once."""
        if self._compiler is not None and self._compiler[0] == snapshot.policies:
            compiler = self._compiler[1]
            return compiler is None or compiler.poll() is not None
        trial = trial_of(snapshot)
        try:
            with nothing_compiled():
                decide(trial)
        except NotCached:
            self.close()
            self._compiler = snapshot.policies, compiler_of(decide, trial)
            _log.info("compiling the passes of the new policies; the previous ones stay active until then")
            return False
        return True

    def close(self) -> None:
        """Stop the compiling process."""
        end(self._compiler[1] if self._compiler is not None else None)

    def _log_remarks(self, decision: Decision) -> Decision:
        """Log a plan's remarks on its mappings that differ from the last ones."""
        for name, line in decision.plan.remarks.items():
            if self._remarks.get(name) != line:
                _log.info("%s: %s", name, line)
        self._remarks |= decision.plan.remarks
        return decision

    def _run(self, name: str, spec: PolicySpec, digests: Mapping[str, str], snapshot: Snapshot) -> AgentDecision | str:
        """Start an agent's decision, or return why there is no point in it now."""
        weights = self._weights.get(name, spec, digests.get(base_of(name), ""))
        self._failed_weights[base_of(name)] = weights
        if isinstance(weights, str):
            return weights
        previous, (late_model, until) = self._decisions.get(name), self._backoffs.get(name, (None, 0.0))
        still_running = previous is not None and previous.model is weights and previous.is_running
        if still_running or (late_model is weights and snapshot.now < until):
            return timeout_message(spec.budget_s)
        self._decisions[name] = AgentDecision(name, spec, weights, snapshot)
        return self._decisions[name]

    def _result(self, name: str, spec: PolicySpec, run: AgentDecision | str, now: float) -> tuple[Plan | None, str]:
        """Return the agent's plan, if any, and why it cannot be used, or ""."""
        if isinstance(run, str):
            return None, run
        plan, why = run.answer()
        self._timings.decided(base_of(name), run.took_s, run.is_late)
        if not run.is_late:
            self._warmed_up.add(spec.agent or "")
        elif spec.agent in self._warmed_up and run.model is not None:  # its first call may compile
            self._backoffs[name] = run.model, now + BACKOFF_S
        return plan, why

    def _stays_on_fallback(self, name: str, policies: Mapping[str, PolicySpec]) -> bool:
        spec = policies.get(name)
        return spec is not None and spec.agent is not None and spec.name == self._fallbacks[name].policy

    def _fallback(self, name: str, spec: PolicySpec, why: str, now: float) -> Fallback:
        known = self._fallbacks.get(name)
        since = known.since if known is not None and known.policy == spec.name else now
        return Fallback(
            partition=name, policy=spec.name, version=spec.version, fallback=spec.effective_fallback.name, why=why,
            since=since,
        )  # fmt: skip

    def _record_changes(self, found: dict[str, Fallback], policies: Mapping[str, PolicySpec], now: float) -> None:
        """Record changes of agents in and out of service."""
        if found == self._fallbacks:
            return
        events = []
        for name in sorted(found.keys() | self._fallbacks.keys()):
            before, after = self._fallbacks.get(name), found.get(name)
            if after is not None and (before is None or (after.policy, after.why) != (before.policy, before.why)):
                events.append(Event(time=now, kind="agent_disabled", data=msgspec.to_builtins(after)))
                _log.warning("%s", after.line)
            elif after is None and before is not None and policies.get(name, _FIFO).agent is not None:
                data = {"partition": name, "policy": policies[name].name, "version": policies[name].version}
                events.append(Event(time=now, kind="agent_enabled", data=data))
                _log.info("%s: %s decides again", name, policies[name].name)
        with self._store.transaction():
            self._store.put_fallbacks(found.values())
            self._store.append(events)
        self._fallbacks = found
