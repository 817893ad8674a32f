"""Cache folders of compiled passes: a change reaches all that may hold old code, and nothing else."""

import os
import resource
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


CLASS_OF = """
import sys
import gpusched
from gpusched.agents.rltune.odds import class_of
values = {"float": [4.5], "both": [4.5, 4]}[sys.argv[1]]
print(gpusched.__file__, *map(class_of, values), sum(class_of._outer.stats.cache_hits.values()))
print("scipy" in sys.modules, "numba.np.npyimpl" in sys.modules)
"""


def class_of(
    tmp_path: Path, package: Path = Path(compiled.__file__).parent, values: str = "float", full: bool = False
) -> list[str]:
    """What a process of its own says that calls one compiled function, with the cache in ``tmp_path``."""
    env = os.environ | {"PYTHONPATH": str(package.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name in ("NUMBA_DISABLE_JIT", "NUMBA_CACHE_DIR"):
        env.pop(name, None)
    argv = [sys.executable, "-c", CLASS_OF, values]
    limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))) if full else None
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=True, preexec_fn=limit)
    return done.stdout.split()


def test_what_is_compiled_once_is_loaded_wherever_the_same_code_lies(tmp_path: Path) -> None:
    """A copy of the package finds what another one compiled, and compiles nothing.

    Nor does loading import scipy, or have numba register all that it can compile: most of a short command's time.
    """
    said = []
    for place in ("here", "there"):
        package = tmp_path / place / "gpusched"
        shutil.copytree(Path(compiled.__file__).parent, package, ignore=shutil.ignore_patterns("*.pyc", "data"))
        file, _, *rest = class_of(tmp_path, package)
        assert Path(file).parent == package
        said.append(rest)
    (compiled_first, _, _), loaded = said
    assert (compiled_first, loaded) == ("0", ["1", "False", "False"])


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("size", [0, 100], ids=["empty", "cut"])
def test_a_spoilt_cache_is_compiled_anew(tmp_path: Path, kind: str, size: int) -> None:
    right = class_of(tmp_path)[1]
    spoilt = [file for file in tmp_path.rglob(f"*.{kind}") if file.name.startswith("odds.class_of-")]
    assert spoilt
    for file in spoilt:
        os.truncate(file, size)
    assert class_of(tmp_path)[1:3] == [right, "0"]
    assert class_of(tmp_path)[1:3] == [right, "1"]


def test_without_room_on_the_disk_it_is_compiled_every_time(tmp_path: Path) -> None:
    right = class_of(tmp_path)[1]
    for file in tmp_path.rglob("*.nbi"):
        os.truncate(file, 0)  # nor can that be put right
    for _ in range(2):
        assert class_of(tmp_path, full=True)[1:3] == [right, "0"]


def test_a_version_for_other_types_is_compiled_anew(tmp_path: Path) -> None:
    """As two processes leave it that each took the first file's name at once."""
    right = class_of(tmp_path, values="both")[1:3]
    one, two = sorted(file for file in tmp_path.rglob("odds.class_of-*.nbc"))
    shutil.copyfile(two, one)
    assert class_of(tmp_path, values="both")[1:3] == right
