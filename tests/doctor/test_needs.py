"""Missing packages of policies: one finding that says what happens without them."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from gpusched.config.inventory import load_inventory
from gpusched.config.weights import ModelError, load_file
from gpusched.doctor import files
from gpusched.doctor.files import examine_policies
from gpusched.doctor.findings import Finding
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory
from gpusched.queue.store import DATABASE, Store
from tests.controller.imagined import inventory

EASY = PolicySpec(name="easy")
MILP = PolicySpec(name="mixed", place="milp")
AGENT = PolicySpec(name="ours", agent="rltune", fallback=EASY)


def found(policy: PolicySpec, of: Inventory | None = None) -> list[tuple[str, str]]:
    return [(f.check, f.status) for f in files.examine_needs(of or inventory(), {"p": policy})]


def test_nothing_is_missing() -> None:
    for policy in (EASY, MILP, AGENT):
        assert found(policy) == []


def test_an_optimiser_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    (finding,) = files.examine_needs(inventory(), {"p": MILP})
    assert finding == Finding(
        "policies", "optimiser", "warn", "p: place: milp needs HiGHS, which is not installed: jobs are placed greedily",
        "pip install 'gpusched-cluster[milp]'",
    )  # fmt: skip
    behind = msgspec.structs.replace(AGENT, fallback=MILP)
    assert found(behind) == [("optimiser", "warn")]
    assert found(EASY) == []


def test_weights_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (finding,) = files.examine_needs(inventory(), {"p": AGENT})
    assert (finding.check, finding.status) == ("weights", "fail")
    assert "easy decides" in finding.message
    with pytest.raises(ModelError, match="safetensors, which is not installed"):
        load_file(tmp_path / "default.safetensors", "rltune")
    assert found(EASY) == []


def test_promotion_without_a_trainer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    assert found(AGENT) == []  # deciding needs no torch
    eager = inventory()
    eager = msgspec.structs.replace(eager, settings=msgspec.structs.replace(eager.settings, auto_promote=True))
    assert found(AGENT, eager) == [("training", "warn")]
    assert found(EASY, eager) == []


def test_check_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "mixed.yaml").write_text("order: fifo\nplace: milp\nbackfill: skip\n")
    file = tmp_path / "inventory.yaml"
    file.write_text(
        "partitions:\n  p:\n    policy: mixed\n    nodes: [{name: n, gpus: 2, cores: 4, memory: 8G, runtime: podman}]\n"
    )
    findings = examine_policies(load_inventory(file), tmp_path / "state")
    assert [(f.check, f.status) for f in findings] == [("policy", "ok"), ("optimiser", "warn")]


def test_a_damaged_store_hides_no_other_finding(tmp_path: Path) -> None:
    """Check said no more than that the store is damaged, and to see check."""
    path = tmp_path / "inventory.yaml"
    path.write_text("partitions: {p: {defaults: {gpus: 0, cores: 1, memory: 1G, runtime: process}, nodes: [n]}}")
    Store.create_or_open(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'policy_changes_partition'").fetchone()
        (size,) = db.execute("PRAGMA page_size").fetchone()
    with (tmp_path / DATABASE).open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    assert [(f.check, f.status) for f in examine_policies(load_inventory(path), tmp_path)] == [("policy", "ok")]


def test_files_that_are_saved_while_it_looks_give_no_false_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, draft = tmp_path / "inventory.yaml", tmp_path / "policies" / "draft.yaml"
    path.write_text("partitions: {p: {defaults: {gpus: 0, cores: 1, memory: 1G, runtime: process}, nodes: [n]}}")
    draft.parent.mkdir()
    draft.write_text("order: fifo")
    load_policy, inventory_errors = files.load_policy, files.inventory_errors

    def renamed(file: Path) -> PolicySpec:
        file.unlink()
        return load_policy(file)

    def truncated(file: Path) -> object:
        errors = inventory_errors(file)
        path.write_text("")
        return errors

    monkeypatch.setattr(files, "load_policy", renamed)
    monkeypatch.setattr(files, "inventory_errors", truncated)
    declared = files.examine_inventory(path)[1]
    assert declared is not None
    assert [(f.check, f.status) for f in examine_policies(declared, tmp_path)] == [("policy", "ok")]
    assert not draft.exists()
    path.write_text("partitions: 7")
    assert [f.status for f in files.examine_inventory(path)[0]] == ["fail"]
