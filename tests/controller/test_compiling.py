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
from gpusched.controller import compiling
from gpusched.controller.compiling import compiler_of, end
from gpusched.errors import printable
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
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
