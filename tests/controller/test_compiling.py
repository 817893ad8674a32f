"""New policies are compiled by another process; the cycles before that are decided by the old ones."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from gpusched import compiled
from gpusched.controller import compiling, deciding
from gpusched.controller.compiling import compiler_of, end
from gpusched.controller.deciding import Decider
from gpusched.errors import printable
from gpusched.model.plan import Plan
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.queue.store import Store
from gpusched.sched.decide import decide
from gpusched.sched.kernel.by_rule import pass_by_plan
from gpusched.sched.warming import small_snapshot, trial_of, warm_up
from tests.builders import spec
from tests.controller.crash_orders import POLICIES
from tests.controller.site import Site
from tests.logged import messages

PLANS = {name: PolicySpec(name="plans", backfill="conservative") for name in POLICIES}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.cycle.close()
    site.store.close()


def test_nothing_is_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another user's."""
    (tmp_path / "pickle.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    compiler = compiler_of(printable, "x")  # type: ignore[arg-type]
    assert compiler is not None
    assert compiler.wait(600) == 0
    assert not (tmp_path / "ran").exists()


def test_a_cycle_never_compiles_for_new_policies(
    site: Site, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs start meanwhile, by the old ones; one process is started, and one line is logged."""
    warm_up(PLANS.values())
    begun: list[tuple[subprocess.Popen[bytes], Snapshot]] = []

    def start(command: list[str], stdin: Any, **_: object) -> subprocess.Popen[bytes]:
        begun.append((subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]), pickle.load(stdin)))
        return begun[-1][0]

    def starts_by() -> str | None:
        job = site.submit(spec=spec(gpus_per_node=0, time_limit_s=60))
        site.turn()
        found = site.store.job(job)
        assert found is not None
        return found.policy

    assert starts_by() == POLICIES["p"].name
    site.cycle.policies = PLANS
    with monkeypatch.context() as cold:
        cold.setattr(compiling, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))
        cold.setattr(compiled, "cache_folder", lambda module: tmp_path)
        cold.setattr(pass_by_plan, "_ready", {})
        cold.setattr(compiled._Pass, "_compiled", lambda *_: pytest.fail("compiled in the cycle"))
        assert [starts_by() for _ in range(3)] == [POLICIES["p"].name] * 3
        assert len(begun) == len(messages(caplog)) == 1
        assert begun[0][1].policies == PLANS
    end(begun[0][0])
    assert starts_by() == "plans"
    site.cycle.policies = POLICIES
    assert starts_by() == POLICIES["p"].name, "what is there takes no cycle more"
    assert len(begun) == len(messages(caplog)) == 1


class Compiler:
    """Another process that compiles until a test says that it has ended."""

    def __init__(self) -> None:
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status

    def kill(self) -> None:
        self.status = -9

    def wait(self) -> None:
        assert self.status is not None


def test_the_previous_policies_stay_active_until_the_others_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The jobs of a new partition wait; of policies that are replaced meanwhile nothing is compiled any more."""
    compilers, trials = list[Compiler](), list[Snapshot]()

    def start(*_: object) -> Compiler:
        compilers.append(Compiler())
        return compilers[-1]

    def decided(snapshot: Snapshot) -> Plan:
        trials.append(snapshot)
        if not snapshot.policies.keys() <= known:
            raise compiled.NotCached("a pass")
        return decide(snapshot)

    monkeypatch.setattr(deciding, "compiler_of", start)
    monkeypatch.setattr(deciding, "decide", decided)
    small, known = small_snapshot(PolicySpec(name="first")), {"p"}
    first, second, third = (PolicySpec(name=name) for name in ("first", "second", "third"))
    decider = Decider(Store.create_or_open(tmp_path))

    def deciders(**policies: PolicySpec) -> tuple[dict[str, str], set[str]]:
        """The policies by which is decided, by partition, and the partitions whose jobs are decided about."""
        job = small.pending[1]
        pending = tuple(
            replace(job, id=partition, spec=replace(job.spec, partition=partition)) for partition in ("p", "q", "r")
        )
        found = decider.decide(replace(small, pending=pending, policies=policies), {})
        about = {*found.plan.reasons, *(action.job_id for action in found.plan.actions)}
        return {name: policy.name for name, policy in found.deciders.items()}, about

    assert deciders(p=first) == ({"p": "first"}, {"p", "q", "r"})
    for _ in range(3):
        assert deciders(p=second, q=second) == ({"p": "first"}, {"p", "r"})
    assert (len(compilers), len(messages(caplog))) == (1, 1)
    for _ in range(2):
        assert deciders(q=third) == ({}, {"p", "r"}), "what is not declared any more decides about nothing"
    assert [compiler.status for compiler in compilers] == [-9, None]
    compilers[-1].status = 0
    known.add("q")
    assert deciders(q=third) == ({"q": "third"}, {"p", "q", "r"})
    assert deciders(p=first) == ({"p": "first"}, {"p", "q", "r"}), "what is compiled takes no cycle more"
    trials.clear()
    deciders(p=first)
    assert len(trials) == 1, "policies that are active already are not tried first"
    decider.close()


def test_new_policies_are_tried_without_pending_jobs(
    site: Site, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first job would find them uncompiled."""
    site.submit(spec=spec(gpus_per_node=0))
    site.turn()
    site.submit(spec=spec(hold=True))
    site.cycle.policies = PLANS
    with monkeypatch.context() as cold:
        cold.setattr(compiling, "compiler_of", lambda *_: None)
        cold.setattr("gpusched.controller.deciding.compiler_of", lambda *_: None)
        cold.setattr(compiled, "cache_folder", lambda module: tmp_path)
        cold.setattr(pass_by_plan, "_ready", {})
        site.turn()
    assert len(messages(caplog)) == 1


def write_policies(snapshot: Snapshot) -> None:
    """Write the names of the snapshot's policies to a file."""
    Path(snapshot.pending[0].id).write_text(",".join(snapshot.policies))


def test_the_other_process_has_the_snapshot(tmp_path: Path) -> None:
    snapshot = small_snapshot(PolicySpec(name="x"))
    (job, *_) = trial_of(snapshot).pending
    written = tmp_path / "written"
    process = compiler_of(write_policies, replace(snapshot, pending=(replace(job, id=str(written)),)))
    assert process is not None
    assert process.wait(timeout=300) == 0
    assert written.read_text() == "p"
