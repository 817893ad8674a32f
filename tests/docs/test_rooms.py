"""The rooms of the package: their first lines, the walks of the architecture page, and what an agent offers."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest

from gpusched.agents import base
from gpusched.agents.base import REGISTRY, AgentParts
from gpusched.model.policy import AGENTS
from tests.docs import generate

PACKAGE = generate.DOCS.parent / "gpusched"
PAGE = (generate.DOCS / "concepts" / "architecture.md").read_text("utf-8")
ROOMS = sorted(folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file())
WALKS = re.findall(r"^### (.+?)\n\n(.+?)(?=\n\n)", PAGE[PAGE.index("## Three walks") :], re.MULTILINE | re.DOTALL)
TESTS = generate.DOCS.parent / "tests"
NOT_ROOMS = {"campaign", "docs", "e2e", "fuzz", "plugin", "testbed_selftest"}
INSIDE = {Path("cli/nodes")}  # commands that read nodes, on a cluster of their own
TOP = {"__init__.py", "__main__.py", "errors.py", "py.typed"}


def names_in(file: Path) -> set[str]:
    """Functions and classes that a module defines, methods included."""
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }


def test_nothing_new_stands_at_the_top_without_a_room() -> None:
    found = {path.name for path in PACKAGE.iterdir() if path.is_file() or any(path.rglob("*.py"))}
    assert found <= TOP | {room.name for room in ROOMS}


def test_no_two_classes_have_one_name() -> None:
    classes = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall(r"^class (\w+)", file.read_text("utf-8"), re.MULTILINE):
            classes[name].append(file.relative_to(PACKAGE).as_posix())
    assert {name: files for name, files in classes.items() if len(files) > 1} == {}


def test_tests_of_a_room_are_in_a_folder_of_its_name() -> None:
    for tests in TESTS.rglob("test_*.py"):
        folder = tests.parent.relative_to(TESTS)
        assert folder.parts[0] in NOT_ROOMS or (PACKAGE / folder).is_dir() or folder in INSIDE, tests


def test_no_test_module_imports_another() -> None:
    for file in TESTS.rglob("*.py"):
        for names in re.findall(r"^ *from (tests\b.+? import (?:\([^)]+|.+))", file.read_text("utf-8"), re.MULTILINE):
            assert not re.search(r"\btest_", names), (file, names)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_says_what_it_is_for_and_where_to_begin(room: Path) -> None:
    said = " ".join((ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or "").split())
    for part in ("In: ", "Out: ", "May import: ", "Begin with "):
        assert part in said, (room.name, part)
    begin = said[said.index("Begin with ") :]
    named = re.findall(r"(?<!`)`(\w+)(?:\.(\w+))?`(?!`)", begin)
    assert named
    for module, name in named:
        path = room / f"{module}.py" if (room / f"{module}.py").is_file() else room / module / "__init__.py"
        assert path.is_file(), (room.name, module)
        assert not name or name in names_in(path), (room.name, module, name)
    assert re.search(rf"\s{room.name}\s", PAGE[PAGE.index("## Rooms") : PAGE.index("## Three walks")]), room.name


@pytest.mark.parametrize(("title", "steps"), WALKS, ids=[title for title, _ in WALKS])
def test_a_walk_names_at_most_twelve_files_and_what_is_in_them(title: str, steps: str) -> None:
    lines = steps.splitlines()
    assert [line.split(".")[0] for line in lines] == [str(n) for n in range(1, len(lines) + 1)], title
    assert len(lines) <= 12
    for line in lines:
        file, *names = re.findall(r"`([^`\s]+)`", line)
        assert names, line
        assert set(names) <= names_in(PACKAGE / file), line


def test_there_are_three_walks() -> None:
    assert len(WALKS) == 3


@pytest.mark.parametrize("agent", AGENTS)
def test_every_agent_is_registered_and_offers_what_its_traits_say(agent: str) -> None:
    traits = AGENTS[agent]
    known = [part.name for part in fields(AgentParts) if hasattr(base, part.name.capitalize())]
    parts = {name: made for name in known if (made := getattr(REGISTRY[agent], name))}
    assert REGISTRY[agent].traits == traits
    decides = ["sizes"] if traits.sizes else ["live", "replay"]
    assert parts.keys() == {*decides, "train", *(["online"] if traits.online else [])}
    for name, made in parts.items():
        module, protocol = made(), getattr(base, name.capitalize())
        for offered in (member for member in vars(protocol) if not member.startswith("_")):
            assert callable(getattr(module, offered)), (agent, name, offered)


def test_paths_of_the_mutation_config_exist() -> None:
    known = tomllib.loads((generate.DOCS.parent / "tests" / "mutate" / "config.toml").read_text("utf-8"))
    assert all(list(PACKAGE.parent.glob(path)) for path in [*known["paths"], *known["only"]])
    for one in known["harmless"]:
        files = [file for file in PACKAGE.rglob("*.py") if file.as_posix().endswith(f"/{one['path']}")]
        assert any(one["from"] == line.strip() for file in files for line in file.read_text("utf-8").splitlines()), one
