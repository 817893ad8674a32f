"""Deciding in the live controller: agents with a deadline, their fallbacks, and the weights they need."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpusched.compiled import NotCached, nothing_compiled
from gpusched.config.weights import ModelError, TrainedModel, load_model, weights_file
from gpusched.controller.compiling import compiler_of, end
from gpusched.model.events import Event
from gpusched.model.plan import Plan
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.queue.promotions import Fallback
from gpusched.queue.store import Store
from gpusched.sched.agent import prepared
from gpusched.sched.decide import decide
from gpusched.sched.warming import trial_of, warm_up_agent

REST_S = 60.0  # how long an agent that was late is not asked: else it would be late again, every cycle
_FIFO = PolicySpec(name="fifo")


class Decision(NamedTuple):
    """A plan, and which policy made each partition's part of it (an agent, or its fallback)."""

    plan: Plan
    deciders: dict[str, PolicySpec]


class Weights:
    """The weights of agents in use, read again when their file changes. Nobody else holds these arrays."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[object, TrainedModel | str]] = {}

    def of(self, partition: str, spec: PolicySpec, digest: str = "") -> TrainedModel | str:
        """A partition's weights, or in one line why they cannot be used; ``digest``: what they must have ("": any)."""
        stamp = (spec.folder, digest, _stamp(weights_file(Path(spec.folder), partition)))
        kept = self._kept.get(partition)
        if kept is None or kept[0] != stamp:
            kept = self._kept[partition] = (stamp, _load(partition, spec, digest))
        return kept[1]


def _load(partition: str, spec: PolicySpec, digest: str) -> TrainedModel | str:
    assert spec.agent is not None
    try:
        model = load_model(Path(spec.folder), partition, spec.agent)
        if digest and model.digest != digest:
            return f"{model.path}: these are not the weights that were promoted"
        prepared(model)
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
    """One decision of one agent, on a thread of its own and on arrays of its own.

    A thread cannot be ended from outside. So the answer of one that is late is thrown away, and its agent is not asked
    again before it has come.
    """

    def __init__(self, partition: str, spec: PolicySpec, model: TrainedModel | None, snapshot: Snapshot) -> None:
        self.model = model
        self._partition, self._budget_s = partition, spec.budget_s
        self._snapshot = only(snapshot, partition, spec)
        self._answer: tuple[Plan | None, str] = (None, "")
        self._took_s = 0.0
        self._began = time.monotonic()
        self._done = threading.Event()
        threading.Thread(target=self._think, name=f"agent of {partition}", daemon=True).start()

    def _think(self) -> None:
        try:
            plan = decide(self._snapshot, {self._partition: self.model} if self.model is not None else {})
            self._answer = plan, plan.troubles.get(self._partition, "")
        except Exception as error:  # whatever an agent does, the cycle goes on
            self._answer = None, f"internal error: {error!r}"
        self._took_s = time.monotonic() - self._began
        self._done.set()

    @property
    def thinking(self) -> bool:
        """Whether it has not answered yet."""
        return not self._done.is_set()

    @property
    def late(self) -> bool:
        """Whether its time is over, or was when it answered."""
        return self.thinking or self._took_s > self._budget_s

    def answer(self) -> tuple[Plan | None, str]:
        """Waits until it has answered or its time is over.

        Returns:
            The plan, or None where there is none; and why it is not the agent's, or "".
        """
        self._done.wait(max(0.0, self._began + self._budget_s - time.monotonic()))
        return (None, late_line(self._budget_s)) if self.late else self._answer


def late_line(budget_s: float) -> str:
    """Why the answer of a late agent does not count; the same every time, so that it is told once."""
    budget = f"{budget_s * 1000:g} ms" if budget_s < 1 else f"{budget_s:g} s"
    return f"no answer within its time budget of {budget}"


class Decider:
    """Asks each partition's policy: staged ones at once, agents on threads, fallbacks where an agent is out.

    The agents that are out are noted in the store, for ``status`` and ``why``. Where the passes of new policies are yet
    to be compiled another process does that, and those before them stay in charge until it has.
    """

    def __init__(self, store: Store, say: Callable[[str], None] = lambda text: None) -> None:
        self._store, self._say = store, say
        self._weights = Weights()
        self._asked: dict[str, AgentDecision] = {}
        self._warm: set[str] = set()
        self._resting: dict[str, tuple[TrainedModel, float]] = {}
        self._out: dict[str, Fallback] = dict(store.fallbacks())
        self._remarks: dict[str, str] = {}
        self._blamed: dict[str, TrainedModel | str] = {}  # the weights with which an agent was found to be out
        self._charge: tuple[Mapping[str, PolicySpec], Mapping[str, str]] | None = None  # who decided last
        self._compiler: tuple[Mapping[str, PolicySpec], subprocess.Popen[bytes] | None] | None = None

    def warm_up(self, policies: Mapping[str, PolicySpec], digests: Mapping[str, str]) -> None:
        """Compile, or load, the passes of the agents in charge, so that their first decision is not late."""
        for _, spec, weights in self._agents(policies, digests):
            if not isinstance(weights, str):
                warm_up_agent(spec, weights)

    def look(self, policies: Mapping[str, PolicySpec], digests: Mapping[str, str], now: float) -> None:
        """Read weights that changed, and note which agents are out, also while nobody waits."""
        found = {name: fallback for name, fallback in self._out.items() if self._still_out(name, policies)}
        for name, spec, weights in self._agents(policies, digests):
            if isinstance(weights, str):
                found[name] = self._fallback(name, spec, weights, now)
                self._blamed[name] = weights
            elif name in found and self._blamed.get(name) is not weights:
                del found[name]  # other weights: nothing is known against them
        self._note(found, policies, now)

    def _agents(
        self, policies: Mapping[str, PolicySpec], digests: Mapping[str, str]
    ) -> Iterator[tuple[str, PolicySpec, TrainedModel | str]]:
        for name, spec in policies.items():
            if spec.agent is not None:
                yield name, spec, self._weights.of(name, spec, digests.get(name, ""))

    def decide(self, snapshot: Snapshot, digests: Mapping[str, str]) -> Decision:
        """The plan for a snapshot, within the agents' budgets."""
        snapshot, digests = self._in_charge(snapshot, digests)
        policies = snapshot.policies
        waiting = {job.spec.partition for job in snapshot.pending}
        running = {job.spec.partition for job in snapshot.running if job.spec is not None}
        asked_by = {n: waiting | running if s.traits.sizes else waiting for n, s in policies.items()}
        agents = {n: s for n, s in policies.items() if s.agent is not None and n in asked_by[n]}
        if not agents:
            return self._told(Decision(decide(snapshot), policies))
        asked = {name: self._ask(name, spec, digests, snapshot) for name, spec in agents.items()}
        plan = decide(_without(snapshot, agents))
        found, deciders = dict(self._out), dict(policies)
        for name, spec in agents.items():
            answer, why = self._answer(name, spec, asked[name], snapshot.now)
            if why:
                deciders[name] = spec.stand_in
                found[name] = self._fallback(name, spec, why, snapshot.now)
            else:
                found.pop(name, None)
            part = answer if answer is not None else decide(only(snapshot, name, deciders[name]))
            plan = _joined(plan, part)
        self._note(found, policies, snapshot.now)
        return self._told(Decision(plan, deciders))

    def _in_charge(self, snapshot: Snapshot, digests: Mapping[str, str]) -> tuple[Snapshot, Mapping[str, str]]:
        """Return what is decided now, and by whose weights: all of it, unless new policies are still being compiled."""
        new = snapshot.policies
        if self._charge is None or self._charge[0] == new or self._is_compiled(snapshot):
            self._charge = new, digests
            return snapshot, digests
        policies, digests = self._charge
        kept = {name: policies[name] for name in new if name in policies}
        waiting = [job for job in snapshot.pending if job.spec.partition not in new.keys() - kept.keys()]
        return msgspec.structs.replace(snapshot, policies=kept, pending=tuple(waiting)), digests

    def _is_compiled(self, snapshot: Snapshot) -> bool:
        """Whether these policies decide at once; else another process is asked to compile for them, and only once."""
        trial = trial_of(snapshot)
        if self._compiler is not None and self._compiler[0] == snapshot.policies:
            compiler = self._compiler[1]
            return compiler is None or compiler.poll() is not None
        try:
            with nothing_compiled():
                decide(trial)
        except NotCached:
            self.close()
            self._compiler = snapshot.policies, compiler_of(decide, trial)
            self._say("compiling the passes of the new policies; until that is done the old ones stay in charge")
            return False
        return True

    def close(self) -> None:
        """Leave no process behind."""
        end(self._compiler[1] if self._compiler is not None else None)

    def _told(self, decision: Decision) -> Decision:
        """A plan's remarks on its mappings go to the log, where they differ from the last ones."""
        for name, line in decision.plan.remarks.items():
            if self._remarks.get(name) != line:
                self._say(f"{name}: {line}")
        self._remarks |= decision.plan.remarks
        return decision

    def _ask(self, name: str, spec: PolicySpec, digests: Mapping[str, str], snapshot: Snapshot) -> AgentDecision | str:
        """Begin to ask an agent, or why that is of no use now."""
        weights = self._weights.of(name, spec, digests.get(name, ""))
        self._blamed[name] = weights
        if isinstance(weights, str):
            return weights
        before, (late, until) = self._asked.get(name), self._resting.get(name, (None, 0.0))
        thinking = before is not None and before.model is weights and before.thinking
        if thinking or (late is weights and snapshot.now < until):
            return late_line(spec.budget_s)
        self._asked[name] = AgentDecision(name, spec, weights, snapshot)
        return self._asked[name]

    def _answer(self, name: str, spec: PolicySpec, asked: AgentDecision | str, now: float) -> tuple[Plan | None, str]:
        """The plan, if there is one, and why it is not the agent's, or ""."""
        if isinstance(asked, str):
            return None, asked
        plan, why = asked.answer()
        if not asked.late:
            self._warm.add(spec.agent or "")
        elif spec.agent in self._warm and asked.model is not None:  # the first time its passes may be compiled
            self._resting[name] = asked.model, now + REST_S
        return plan, why

    def _still_out(self, name: str, policies: Mapping[str, PolicySpec]) -> bool:
        spec = policies.get(name)
        return spec is not None and spec.agent is not None and spec.name == self._out[name].policy

    def _fallback(self, name: str, spec: PolicySpec, why: str, now: float) -> Fallback:
        known = self._out.get(name)
        since = known.since if known is not None and known.policy == spec.name else now
        return Fallback(
            partition=name, policy=spec.name, version=spec.version, fallback=spec.stand_in.name, why=why,
            since=since,
        )  # fmt: skip

    def _note(self, found: dict[str, Fallback], policies: Mapping[str, PolicySpec], now: float) -> None:
        """Write down what has changed, once."""
        if found == self._out:
            return
        events = []
        for name in sorted(found.keys() | self._out.keys()):
            before, after = self._out.get(name), found.get(name)
            if after is not None and (before is None or (after.policy, after.why) != (before.policy, before.why)):
                events.append(Event(time=now, kind="agent_out", data=msgspec.to_builtins(after)))
                self._say(after.line)
            elif after is None and before is not None and policies.get(name, _FIFO).agent is not None:
                data = {"partition": name, "policy": policies[name].name, "version": policies[name].version}
                events.append(Event(time=now, kind="agent_back", data=data))
                self._say(f"{name}: {policies[name].name} decides again")
        with self._store.transaction():
            self._store.put_fallbacks(found.values())
            self._store.append(events)
        self._out = found


def _joined(plan: Plan, part: Plan) -> Plan:
    """Two partitions' plans as one; what the parts say of their troubles is noted elsewhere."""
    return msgspec.structs.replace(
        plan,
        actions=plan.actions + part.actions,
        reasons=plan.reasons | part.reasons,
        remarks=plan.remarks | part.remarks,
    )


def only(snapshot: Snapshot, partition: str, spec: PolicySpec) -> Snapshot:
    """One partition's part of a snapshot, decided by ``spec``. Partitions share no node: each can be decided alone."""
    return msgspec.structs.replace(
        snapshot,
        nodes=tuple(n for n in snapshot.nodes if n.partition == partition),
        pending=tuple(j for j in snapshot.pending if j.spec.partition == partition),
        policies={partition: spec},
    )


def _without(snapshot: Snapshot, partitions: Mapping[str, PolicySpec]) -> Snapshot:
    """The other partitions' part, with the jobs of partitions that do not exist."""
    return msgspec.structs.replace(
        snapshot,
        pending=tuple(j for j in snapshot.pending if j.spec.partition not in partitions),
        policies={name: spec for name, spec in snapshot.policies.items() if name not in partitions},
    )
