"""Groups: who is in which, which one a job counts for, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched.config.inventory import inventory_errors, load_inventory
from gpusched.model.limits import Groups

HEAD = """\
partitions:
  p: {nodes: n1, defaults: {gpus: 8, cores: 4, memory: 8G, runtime: process, transport: local}}
"""
TREE = """\
groups:
  science: {shares: 3}
  physics: {parent: science, members: [alice, bob]}
  chem: {parent: science, members: {alice: 1, carol: 4}}
"""


def groups_of(tmp_path: Path, text: str) -> Groups:
    path = tmp_path / "inventory.yaml"
    path.write_text(HEAD + text)
    return load_inventory(path).groups


def test_a_job_counts_for_the_group_it_names_else_for_the_first_of_its_user(tmp_path: Path) -> None:
    groups = groups_of(tmp_path, TREE)
    assert groups.of("alice") == ("physics", "chem")
    assert [groups.for_job("alice", asked) for asked in ("", "chem", "gone")] == ["physics", "chem", "physics"]
    assert groups.for_job("zoe", "") == ""
    assert groups.above("chem") == ("chem", "science")
    assert groups.within("carol", ["science"])
    assert not groups.within("carol", ["physics"])
    chem = groups.get("chem")
    assert chem is not None
    assert (chem.members, chem.shares) == ({"alice": 1, "carol": 4}, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("  a: {parent: b}\n  b: {parent: c}\n  c: {parent: a}", 'groups.a.parent: found a circle (a -> b -> c -> a)'),
        ("  a: {parent: a}", "groups.a.parent: found a circle (a -> a)"),
        ("  physics: {}\n  a: {parent: phisics}", "did you mean physics?"),
        ("  a: {members: [bob, bob]}", "bob again"),
        ("  a: {members: {bob: 0}}", "groups.a.members.bob"),
        ("  a: {members: {'b ob': 1}}", 'found the name "b ob"'),
        ("  a: {member: [bob]}", "did you mean members?"),
    ],
)  # fmt: skip
def test_errors_of_groups_name_their_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(f"{HEAD}groups:\n{text}\n")
    assert any(says in str(error) for error in inventory_errors(path)), [str(e) for e in inventory_errors(path)]
