"""The requirements of `make` are locked: every version pinned, with hashes, within the package's own ranges."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
LOCKS = ("base", "test", "torch")
PIN = re.compile(r"^([a-z0-9.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M)


def pins(name: str) -> dict[str, str]:
    return {package: version for package, version, _ in PIN.findall((FOLDER / f"{name}.txt").read_text())}


@pytest.mark.parametrize("name", [*LOCKS, "workflows"])
def test_each_line_is_a_pin_with_hashes_and_names_no_place(name: str) -> None:
    text = (FOLDER / f"{name}.txt").read_text()
    rest = PIN.sub("", text)
    assert [line for line in rest.splitlines() if line.strip() and not line.lstrip().startswith("#")] == []
    assert not re.search(r"file:/|https?:|--index|--find|--trusted", text)


@pytest.mark.parametrize(
    ("name", "extras"), [("base", ()), ("test", ("test", "milp")), ("workflows", ("snakemake", "torchx"))]
)
def test_locked_requirements_are_within_the_declared_ranges(name: str, extras: tuple[str, ...]) -> None:
    requirements = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = project["dependencies"] if name != "workflows" else []  # which are in the environment that it lies beside
    asked = [*own, *(line for extra in extras for line in project["optional-dependencies"][extra])]
    locked = pins(name)
    for line in asked:
        one = requirements.Requirement(line)
        assert one.specifier.contains(locked[one.name.lower()]), line


def test_locks_agree_and_the_demo_has_nothing_of_tests_or_torch() -> None:
    base, test, torch = map(pins, LOCKS)
    assert base.items() <= test.items()
    assert {name: version for name, version in torch.items() if name in test}.items() <= test.items()
    assert not {"pytest", "torch", "highspy"} & base.keys()
    assert "torch" not in test
    assert torch["torch"].endswith("+cpu")
    assert not [name for name in base | test | torch if name.startswith(("nvidia-cu", "nvidia-nccl", "triton", "cuda"))]
    held = (FOLDER / "held-back.txt").read_text()
    assert not [n for n, v in re.findall(r"^([a-z0-9.-]+)!=(\S+)", held, re.M) if (base | test).get(n) == v]
