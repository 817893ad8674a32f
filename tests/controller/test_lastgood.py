"""The last good files that a controller uses beside invalid ones, and what it keeps of secrets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from gpusched.config.inventory import load_inventory
from gpusched.controller.secretfiles import SecretFiles
from gpusched.errors import GpuschedError, UsageError, Warnings
from gpusched.queue.lastgood import (
    declared_or_kept,
    inventory_or_kept,
    inventory_path,
    policies_or_kept,
    store_declared,
)
from gpusched.queue.store import DATABASE, INVENTORY_TROUBLE, Store
from tests.controller.declared import DECLARED


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "inventory.yaml"
    path.write_text(DECLARED)
    return path


def kept(path: Path, state: Path) -> None:
    store = Store.create_or_open(state)
    store_declared(store, declared_or_kept(path, state))
    assert store.meta(INVENTORY_TROUBLE) == ""
    store.close()


def test_the_last_good_inventory_is_in_force(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    monkeypatch.chdir(tmp_path)
    kept(Path("inventory.yaml"), state)
    path.write_text("partitions: [")
    found = declared_or_kept(path, state)
    assert [node.name for node in found.inventory.nodes] == ["n0", "n1"]
    assert found.trouble.startswith(f"{path}:2: ")
    path.unlink()
    assert "inventory.yaml" in declared_or_kept(path, state).trouble
    with pytest.raises(GpuschedError):
        declared_or_kept(tmp_path / "another.yaml", state)


def test_a_last_good_inventory_of_another_version_is_ignored(path: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    kept(path, state)
    path.write_text("partitions: [")
    store = Store.create_or_open(state)
    for text in ("{}", "[", ""):
        store.set_meta("last_good", text)
        with pytest.raises(GpuschedError, match=r"inventory\.yaml:2: "):
            declared_or_kept(path, state)
    store.close()
    for content in (b"not a database, but long enough to be looked at" * 99, None):
        (state / DATABASE).unlink()
        if content:
            (state / DATABASE).write_bytes(content)
        with pytest.raises(GpuschedError, match=r"inventory\.yaml:2: "):
            declared_or_kept(path, state)


def test_a_file_that_is_gone_is_known_by_what_it_said(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(path))
    assert inventory_path(tmp_path / "state") == path
    path.unlink()
    with pytest.raises(UsageError, match="which is not there"):
        inventory_path(tmp_path / "state")
    path.write_text(DECLARED)
    kept(path, tmp_path / "state")
    path.unlink()
    assert inventory_path(tmp_path / "state") == path


@pytest.fixture
def misspelt(path: Path, tmp_path: Path) -> Iterator[Store]:
    """A store that keeps what was declared before a policy's file was edited, wrongly."""
    path.write_text(DECLARED.replace("  p:\n", "  p:\n    policy: mine\n"))
    policy = tmp_path / "policies" / "mine.yaml"
    policy.parent.mkdir()
    policy.write_text("order: sjf\n")
    kept(path, tmp_path / "state")
    policy.write_text("order: sjff\n")
    store = Store.create_or_open(tmp_path / "state")
    yield store
    store.close()


def test_predictions_use_the_last_good_policy_and_say_so_unless_the_partition_has_another_now(
    misspelt: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(Warnings, "give", said.append)
    inventory = load_inventory(path)
    assert policies_or_kept(inventory, misspelt)["p"].order == "sjf"
    (line,) = said
    assert "mine.yaml:1: order:" in line
    assert "; using the last good copy, of 20" in line
    (p,) = inventory.partitions
    for other in (
        msgspec.structs.replace(inventory, partitions=(msgspec.structs.replace(p, policy="another"),)),
        msgspec.structs.replace(inventory, partitions=(p, msgspec.structs.replace(p, name="new"))),
        msgspec.structs.replace(inventory, path="another.yaml"),
    ):
        with pytest.raises(GpuschedError, match=r"mine|another"):
            policies_or_kept(other, misspelt)
    with pytest.raises(GpuschedError, match="mine"):
        policies_or_kept(inventory, None)
    misspelt.set_meta("last_good", "")
    with pytest.raises(GpuschedError, match="mine"):
        policies_or_kept(inventory, misspelt)
    assert len(said) == 1


def test_commands_use_the_last_good_inventory_and_say_so(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(Warnings, "give", said.append)
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(path))
    state = tmp_path / "state"
    kept(path, state)
    assert inventory_or_kept(None, state) == load_inventory(path)
    assert said == []
    path.write_text("partitions: [")
    for asked in (None, path):
        assert [node.name for node in inventory_or_kept(asked, state).nodes] == ["n0", "n1"]
        assert said.pop().startswith(f"{path}:2: ")
    with pytest.raises(GpuschedError):
        inventory_or_kept(path, tmp_path / "without")
    with closing(Store.create_or_open(state)) as store:
        earlier = json.loads(store.meta("last_good") or "")
        del earlier["read_at"]
        store.set_meta("last_good", json.dumps(earlier))
    inventory_or_kept(path, state)
    assert said.pop().endswith("using the last good copy, of an earlier time")


def test_secrets_that_cannot_be_read_are_gone(tmp_path: Path) -> None:
    files = SecretFiles(tmp_path)
    assert (files.read("a"), files.has("a"), files.job_ids()) == (None, False, [])
    files.write("a", {"KEY": "x"})
    assert (files.read("a_7"), files.has("a_7"), files.job_ids()) == ({"KEY": "x"}, True, ["a"])
    (file,) = (tmp_path / "secrets").iterdir()
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    file.with_suffix(".tmp").write_text("{")
    files.write("a", {"KEY": "y"})
    assert files.read("a") == {"KEY": "y"}
    file.write_text("{")
    assert (files.read("a"), files.has("a")) == (None, True)
    file.with_suffix(".tmp").touch()
    files.delete("a")
    files.delete("a")
    assert list(file.parent.iterdir()) == []
