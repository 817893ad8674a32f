"""Cache folders of compiled passes: a change reaches all that may hold old code, and nothing else."""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusched import compiled
from gpusched.compiled.loading import SUFFIX

PACKAGE = Path(compiled.__file__).parents[1]

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
    text = PACKAGE.joinpath("sched", "backfill.py").read_bytes()
    found = {name.decode() for name in compiled._IMPORT.findall(text)}
    assert {".compiled", ".sched.place", ".sched.state", ".sched.releases", ".sched.fit"} <= found


CLASS_OF = """
import sys
import gpusched
from gpusched.sched.agents.rltune_odds import class_of
values = {"float": [4.5], "both": [4.5, 4]}[sys.argv[1]]
print(gpusched.__file__, *map(class_of, values), "numba" in sys.modules)
"""


def python(tmp_path: Path, *words: str, package: Path = PACKAGE, full: bool = False) -> list[str]:
    """What a process of its own prints, with the cache in ``tmp_path``."""
    env = os.environ | {"PYTHONPATH": str(package.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name in ("NUMBA_DISABLE_JIT", "NUMBA_CACHE_DIR"):
        env.pop(name, None)
    limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))) if full else None
    done = subprocess.run(
        [sys.executable, *words], env=env, cwd=tmp_path, capture_output=True, text=True, check=True, preexec_fn=limit
    )
    return done.stdout.split()


def class_of(tmp_path: Path, package: Path = PACKAGE, values: str = "float", full: bool = False) -> list[str]:
    """What a process says that calls one compiled function: file, answers, and whether numba was imported."""
    return python(tmp_path, "-c", CLASS_OF, values, package=package, full=full)


def kept(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.rglob(f"rltune_odds.class_of-*{SUFFIX}"))


def test_what_is_compiled_once_is_loaded_wherever_the_same_code_lies(tmp_path: Path) -> None:
    """A copy of the package finds what another one compiled, and compiles nothing: most of a short command's time."""
    said = []
    for place in ("here", "there"):
        package = tmp_path / place / "gpusched"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*.pyc", "data"))
        file, answer, compiled_it = class_of(tmp_path, package)
        assert Path(file).parent == package
        said.append((answer, compiled_it))
    (answer, compiled_first), loaded = said
    assert (compiled_first, loaded) == ("True", (answer, "False"))


def cut(size: int) -> Callable[[Path], object]:
    return lambda file: os.truncate(file, size)


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("spoil", [cut(0), cut(20), cut(100), flipped], ids=["empty", "cut", "cut later", "flipped"])
def test_a_spoilt_file_is_compiled_anew(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    right = class_of(tmp_path)[1]
    (file,) = kept(tmp_path)
    assert class_of(tmp_path)[1:] == [right, "False"]
    spoil(file)
    assert class_of(tmp_path)[1:] == [right, "True"]
    assert class_of(tmp_path)[1:] == [right, "False"]


@pytest.mark.parametrize("size", [0, 100])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_spoilt_parts_of_others_are_compiled_anew(tmp_path: Path, kind: str, size: int) -> None:
    """Of functions that compiled ones call numba keeps what it compiles others with."""
    words = ("-c", "from gpusched.sched.agents.rltune_odds import next_level_s; print(next_level_s(40.0))")
    right = python(tmp_path, *words)
    spoilt = list(tmp_path.rglob(f"*.{kind}"))
    assert spoilt
    for file in [*spoilt, *tmp_path.rglob(f"*{SUFFIX}")]:
        os.truncate(file, size)
    assert python(tmp_path, *words) == right


def test_without_room_on_the_disk_it_is_compiled_every_time(tmp_path: Path) -> None:
    right = class_of(tmp_path)[1]
    for file in kept(tmp_path):
        os.truncate(file, 0)  # nor can that be put right
    for _ in range(2):
        assert class_of(tmp_path, full=True)[1:] == [right, "True"]


def test_a_version_for_other_types_is_compiled_anew(tmp_path: Path) -> None:
    """Whatever a file is called: in it stands what it is for."""
    right = class_of(tmp_path, values="both")[1:3]
    one, two = kept(tmp_path)
    shutil.copyfile(two, one)
    assert class_of(tmp_path, values="both")[1:3] == right
