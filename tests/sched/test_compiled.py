"""Cache folders of compiled passes: a change reaches all that may hold old code, and nothing else."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpusched import compiled

SOURCES = {
    "compiled": b"",
    "a": b"from gpusched.b import x\n",
    "b": b"import numpy\nfrom gpusched.c.d import y\n",
    "c.d": b"from gpusched.b import x\nfrom gpusched.compiled import jit\n",
    "e": b"from gpusched.compiled import jit\n",
}


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    known = dict(SOURCES)
    monkeypatch.setattr(compiled, "_source", lambda name: known.get(name, b""))
    monkeypatch.setattr(
        compiled, "_imports", compiled._imports.__wrapped__
    )  # kept for one process, in which none changes
    return known


@pytest.mark.parametrize(("changed", "stale"), [("a", "a"), ("b", "abd"), ("c.d", "abd"), ("e", "e"), ("f", "")])
def test_what_a_change_makes_stale(sources: dict[str, bytes], changed: str, stale: str) -> None:
    modules = {"a": "a", "b": "b", "d": "c.d", "e": "e"}
    before = {letter: compiled._digest(name) for letter, name in modules.items()}
    sources[changed] = sources.get(changed, b"") + b"# changed\n"
    assert "".join(n for n, module in modules.items() if compiled._digest(module) != before[n]) == stale


def test_the_way_it_is_compiled_counts(sources: dict[str, bytes]) -> None:
    before = compiled._digest("e")
    sources["compiled"] = b"fastmath = True\n"
    assert compiled._digest("e") != before


def test_real_imports_are_found() -> None:
    """The pass of the controller and all below it, or a change there would run old code."""
    text = Path(compiled.__file__).with_name("sched").joinpath("backfill.py").read_bytes()
    found = {name.decode() for name in compiled._IMPORT.findall(text)}
    assert {".compiled", ".sched.place", ".sched.state", ".sched.releases", ".sched.fit"} <= found


def test_what_is_compiled_once_is_loaded_wherever_the_same_code_lies(tmp_path: Path) -> None:
    """A copy of the package finds what another one compiled, and compiles nothing."""
    code = (
        "import gpusched\n"
        "from gpusched.sched.agents.rltune_odds import class_of\n"
        "print(gpusched.__file__, class_of(3.0), sum(class_of._outer.stats.cache_hits.values()))\n"
    )
    hits = []
    for place in ("here", "there"):
        package = tmp_path / place / "gpusched"
        shutil.copytree(Path(compiled.__file__).parent, package, ignore=shutil.ignore_patterns("*.pyc", "data"))
        env = os.environ | {"PYTHONPATH": str(tmp_path / place), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        env.pop("NUMBA_DISABLE_JIT", None)
        argv = [sys.executable, "-c", code]
        done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
        file, _, count = done.stdout.split()
        assert Path(file).parent == package
        hits.append(int(count))
    assert hits == [0, 1]
