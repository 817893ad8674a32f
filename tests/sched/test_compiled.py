"""Cache folders of compiled passes: a change reaches all that may hold old code, and nothing else."""

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
