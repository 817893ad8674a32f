"""Cache folders of compiled passes: a change reaches all that may hold old code, and nothing else."""

import gc
import os
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from numba.core.compiler import Flags
from numba.core.errors import NumbaError

from gpusched import compiled
from gpusched.compiled import KNOWN, compiled_if_long, folders, is_interpreted, jit
from gpusched.compiled.compiling import types_of
from gpusched.compiled.loading import SUFFIX, Foreign, kind_of, numba_version
from gpusched.errors import UsageError
from gpusched.sched.kernel.by_rule import pass_by_rule
from gpusched.sched.topology.queue import pass_by_cost

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
    monkeypatch.setattr(folders, "_source", lambda name: known.get(name, b""))
    monkeypatch.setattr(folders, "_imports", folders._imports.__wrapped__)  # kept for a process, in which none changes
    return known


@pytest.mark.parametrize(("changed", "stale"), [("a", "a"), ("b", "abd"), ("c.d", "abd"), ("e", "e"), ("f", "")])
def test_which_caches_a_change_makes_stale(sources: dict[str, bytes], changed: str, stale: str) -> None:
    modules = {"a": "a", "b": "b", "d": "c.d", "e": "e"}
    before = {letter: folders._digest(name) for letter, name in modules.items()}
    sources[changed] = sources.get(changed, b"") + b"# changed\n"
    assert "".join(n for n, module in modules.items() if folders._digest(module) != before[n]) == stale


def test_the_way_it_is_compiled_counts(sources: dict[str, bytes]) -> None:
    before = folders._digest("e")
    sources["compiled"] = b"fastmath = True\n"
    assert folders._digest("e") != before


def test_real_imports_are_found() -> None:
    """The pass of the controller and all below it, or a change there would run old code."""
    text = PACKAGE.joinpath("sched", "backfill.py").read_bytes()
    found = {name.decode() for name in folders._IMPORT.findall(text)}
    assert {".compiled", ".sched.place", ".sched.state", ".sched.releases", ".sched.fit"} <= found


def test_the_inner_pass_is_cached_by_the_module_that_completed_it() -> None:
    """Otherwise a change of its hooks would leave forecasts and replays with the old ones."""
    for filled in (pass_by_cost, pass_by_rule):
        kept = filled.inner._cache.cache_path  # type: ignore[attr-defined]
        assert Path(kept) == folders.cache_folder(filled.__module__)
        assert filled.__module__ != "gpusched.sched.kernel.queue_pass"


CLASS_OF = """
import sys
import gpusched
from gpusched.estimation.odds import class_of
values = {"float": [4.5], "both": [4.5, 4]}[sys.argv[1]]
print(gpusched.__file__, *map(class_of, values), "numba" in sys.modules)
"""


def python(tmp_path: Path, *words: str, package: Path = PACKAGE, full: bool = False) -> list[str]:
    """Return the output of a process of its own, with the cache in ``tmp_path``."""
    env = os.environ | {"PYTHONPATH": str(package.parent), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name in ("NUMBA_DISABLE_JIT", "NUMBA_CACHE_DIR"):
        env.pop(name, None)
    limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))) if full else None
    done = subprocess.run(
        [sys.executable, *words], env=env, cwd=tmp_path, capture_output=True, text=True, check=True, preexec_fn=limit
    )
    return done.stdout.split()


def class_of(tmp_path: Path, package: Path = PACKAGE, values: str = "float", full: bool = False) -> list[str]:
    """Return the report of a process that calls a compiled function: file, answers, and whether numba was imported."""
    return python(tmp_path, "-c", CLASS_OF, values, package=package, full=full)


def kept(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.rglob(f"odds.class_of-*{SUFFIX}"))


BY_NUMBA = """
import sys
import gpusched.compiled
gpusched.compiled.numba_version = lambda: "0.99.0"
from gpusched.estimation.odds import class_of
from gpusched.compiled import is_on_disk
print(is_on_disk(class_of), class_of(4.5), sum(getattr(class_of, "stats").cache_hits.values()))
"""


def test_with_an_unknown_numba_passes_are_compiled_and_kept_by_it(
    tmp_path: Path, compiled_once: tuple[Path, str, list[str]]
) -> None:
    assert python(tmp_path, "-W", "error", "-c", BY_NUMBA) == ["False", compiled_once[1], "0"]
    assert python(tmp_path, "-W", "error", "-c", BY_NUMBA) == ["True", compiled_once[1], "1"]


@pytest.mark.parametrize(("version", "left"), [("0.99.0", True), ("0.6.8", True), ("", True), (KNOWN + "1", False)])
def test_which_numba_is_unknown(version: str, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUSCHED_COMPILED", raising=False)
    monkeypatch.setattr(compiled, "numba_version", lambda: version)
    assert compiled.left_to_numba.__wrapped__() is left
    monkeypatch.setenv("GPUSCHED_COMPILED", "numba")
    assert compiled.left_to_numba.__wrapped__()


def test_numbas_settings_are_read_at_once_as_one_by_one() -> None:
    flags = Flags()
    flags.nrt, flags.error_model = True, "numpy"
    assert list(flags.values().items()) == [(name, getattr(flags, name)) for name in flags.options]
    assert flags == flags.copy() != Flags()


def test_the_version_of_numba_is_read_without_importing_it() -> None:
    import numba

    assert numba_version() == numba.__version__


def test_compiled_code_is_loaded_wherever_the_same_code_lies(tmp_path: Path) -> None:
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


NEXT_LEVEL = ("-c", "from gpusched.estimation.odds import next_level_s; print(next_level_s(40.0))")


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[str]]:
    """A folder with a cache that has both functions, and what each answers."""
    folder = tmp_path_factory.mktemp("compiled")
    return folder, class_of(folder)[1], python(folder, *NEXT_LEVEL)


def copied(folder: Path, to: Path) -> None:
    shutil.copytree(folder / "cache", to / "cache")


SPOILT = """
import sys
from pathlib import Path
from gpusched.compiled import is_cached, jit
from gpusched.estimation.odds import class_of

file = Path(sys.argv[1])
def flipped(data):
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]

for spoil in (lambda data: b"", lambda data: data[:20], lambda data: data[:100], flipped):
    file.write_bytes(spoilt := spoil(file.read_bytes()))  # what the one before put right
    anew = jit(class_of.__wrapped__)
    print(is_cached(anew, 4.5), anew(4.5), file.read_bytes() != spoilt, is_cached(jit(class_of.__wrapped__), 4.5))
"""


def test_a_spoilt_file_is_compiled_anew(tmp_path: Path, compiled_once: tuple[Path, str, list[str]]) -> None:
    folder, right, _ = compiled_once
    copied(folder, tmp_path)
    (file,) = kept(tmp_path)
    assert python(tmp_path, "-c", SPOILT, str(file)) == ["False", right, "True", "True"] * 4
    assert class_of(tmp_path)[1:] == [right, "False"]


@pytest.mark.parametrize("size", [0, 100])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_spoilt_parts_of_others_are_compiled_anew(
    tmp_path: Path, compiled_once: tuple[Path, str, list[str]], kind: str, size: int
) -> None:
    """Of functions that compiled ones call numba keeps what it compiles others with."""
    folder, _, right = compiled_once
    copied(folder, tmp_path)
    spoilt = list(tmp_path.rglob(f"*.{kind}"))
    assert spoilt
    for file in [*spoilt, *tmp_path.rglob(f"*{SUFFIX}")]:
        os.truncate(file, size)
    assert python(tmp_path, *NEXT_LEVEL) == right


def test_without_room_on_the_disk_it_is_compiled_every_time(
    tmp_path: Path, compiled_once: tuple[Path, str, list[str]]
) -> None:
    folder, right, _ = compiled_once
    copied(folder, tmp_path)
    for file in kept(tmp_path):
        os.truncate(file, 0)  # nor can that be put right
    assert class_of(tmp_path, full=True)[1:] == [right, "True"]
    assert [file.stat().st_size for file in kept(tmp_path)] == [0]


def test_nor_does_numba_need_room_on_the_disk(
    tmp_path: Path, compiled_once: tuple[Path, str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSCHED_COMPILED", "numba")
    assert python(tmp_path, *NEXT_LEVEL, full=True) == compiled_once[2]


def test_a_version_for_other_types_is_compiled_anew(tmp_path: Path) -> None:
    """Whatever a file is called: in it stands what it is for."""
    right = class_of(tmp_path, values="both")[1:3]
    one, two = kept(tmp_path)
    shutil.copyfile(two, one)
    assert class_of(tmp_path, values="both")[1:3] == right


@jit
def first_of(values: npt.NDArray[Any], at: int) -> float:
    return values[at] * 1.0  # type: ignore[no-any-return]


@jit
def whole(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Allocates, and hands arrays out, of its own and of its argument."""
    ordered = np.sort(values)
    ordered[1:] = ordered[:-1]  # numba makes a copy of what overlaps
    return ordered


class Two(NamedTuple):
    left: npt.NDArray[np.float64]
    right: npt.NDArray[np.float64]


@jit
def swapped(two: Two) -> Two:
    return Two(two.right, two.left)


@jit
def through(two: Two) -> float:
    """Holds what another function handed out."""
    turned = swapped(two)
    return float(turned.left[0] + whole(turned.right)[0])


@jit
def shifted(values: npt.NDArray[np.float64]) -> None:
    """Nothing here shows that what it does allocates."""
    values[1:] = values[:-1]


@jit
def refuse(value: float) -> float:
    if value < 0:
        raise ValueError("less than nothing", 7)
    return value**0.5


@jit
def assigned(target: npt.NDArray[np.float64], source: npt.NDArray[np.float64]) -> None:
    target[1:] = source


RECORDS = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i8"), ("b", "f8")])
ALIGNED = np.array([(1, 2.5)], dtype=np.dtype([("a", "u1"), ("b", "f8")], align=True))


def test_arrays_of_every_kind_are_read_for_what_they_are() -> None:
    """One function, called with all of them in turn: types, strides, orders of bytes, read-only, and none at all."""
    base = np.arange(24.0)
    readonly = base.copy()
    readonly.flags.writeable = False
    cases = [
        base, base.astype(np.float32), base.astype(np.int64), base.astype(np.int32), base.astype(np.uint8),
        base[::2], base[::-1], readonly, base.reshape(2, 12)[:, 3], base.astype(np.int16)[1::3], base[5:],
        RECORDS["b"], RECORDS["a"], ALIGNED["b"], np.frombuffer(b"x" + base.tobytes(), np.float64, 24, 1),
    ]  # fmt: skip
    for _ in range(2):
        for case in cases:
            for at in (0, len(case) - 1):
                assert first_of(case, at) == float(case[at])
    assert first_of(base, np.int32(3)) == first_of(base, np.uint8(3)) == 3.0  # type: ignore[arg-type]
    assert np.array_equal(first_of(base.reshape(4, 6), 1), base[6:12])
    with pytest.raises(NumbaError):
        first_of(base.astype(">f8"), 1)
    assert first_of(base.view(np.recarray), 1) == 1.0  # of a class that only numba knows


def test_kinds_differ_exactly_where_numba_compiles_differently() -> None:
    base = np.zeros((4, 4))
    readonly = base.copy()
    readonly.flags.writeable = False
    values = [
        base, base.T, base[:2, :2], base[0], base[:1], base[:, :1], base[:0], base[:1, :1], base.astype(np.float32),
        np.zeros((1, 2, 3)), RECORDS, RECORDS[:1], RECORDS[["b"]], readonly, readonly[:1],
        ALIGNED, ALIGNED.astype([("a", "u1"), ("b", "f8")]), 1, 1.0, True, None, np.int32(1), np.float64(1),
        np.float32(1), np.int64(1), np.uint64(1), np.bool_(True), (1, 1.0), (np.int64(1), 1.0), (1.0, 1),
        Two(base, base), Two(base[:1], base), (base, base), ((1,),), (1,),
    ]  # fmt: skip
    for one, other in combinations(values, 2):
        alike = types_of((one,)) == types_of((other,))
        assert (kind_of(one) == kind_of(other)) is alike
        assert (str(kind_of(one)) == str(kind_of(other))) is alike  # as names of files
    for foreign in ("text", [1], {1: 1}, 2**63, 1j, object, np.void(b"1"), base.view(np.matrix), np.str_("x")):
        with pytest.raises(Foreign):
            kind_of(foreign)


def test_allocating_functions_count_references() -> None:
    values = np.array([3.0, 1.0, 2.0])
    expected = whole.__wrapped__(values)  # type: ignore[attr-defined]
    two = Two(values, values * 2)
    for _ in range(100):
        assert whole(values).tolist() == expected.tolist()
        assert swapped(two).left is not None
        assert through(two) == 6.0 + 1.0
        shifted(line := np.arange(4.0))
        assert line.tolist() == [0.0, 0.0, 1.0, 2.0]
    assert sys.getrefcount(values) <= 4
    made = swapped(two)
    del two
    gc.collect()
    assert (made.right.tolist(), made.left.tolist()) == ([3.0, 1.0, 2.0], [6.0, 2.0, 4.0])


class Deep(NamedTuple):
    two: Two
    scale: float
    more: tuple[Two, Two]


@jit
def turned(deep: Deep, times: int) -> Deep:
    """Gives variables now what it was handed, now what was made of it."""
    two = deep.two
    for i in range(times):
        if i % 3 == 0:
            two = swapped(two)
        elif i % 3 == 1:
            two = deep.more[0]
        else:
            two = Two(two.right, deep.two.left)
    return Deep(two, deep.scale * 2, (deep.more[1], two))


@jit
def either(deep: Deep, which: int) -> Two:
    """Hands on what it was handed, or a part, or what another made of it."""
    if which == 0:
        return deep.two
    if which == 1:
        return deep.more[1]
    left, right, own = deep.two.left, deep.two.right, np.zeros(3)
    for one, other in zip(right, deep.more[0].left):  # noqa: B905  numba knows no strict
        own[0] += one - other
    for i, value in enumerate(left):
        own[i] += value
    if which == 2:
        return Two(left, own)
    return turned(deep, which).two if which < 5 else Two(own, right)


@jit
def summed(deep: Deep) -> float:
    """Looks at parts of one tuple in a loop that changes an array of it."""
    total, last = 0.0, deep.more[0]
    for i in range(len(last.left)):
        last.left[i] += i
        pair = deep.more[i % 2] if i < 2 else last
        total += either(deep, i).left[0] + pair.left[i] * deep.scale
        last = deep.two
    return total


def _deep() -> tuple[list[npt.NDArray[np.float64]], Deep]:
    arrays = [np.arange(3.0) + 10 * i for i in range(6)]
    a, b, c, d, e, f = arrays
    return arrays, Deep(Two(a, b), 0.5, (Two(c, d), Two(e, f)))


def test_tuples_by_address_mean_what_they_do_in_python_and_no_reference_is_lost() -> None:
    (_, expected), (arrays, deep) = _deep(), _deep()
    before = [sys.getrefcount(array) for array in arrays]
    for _ in range(50):
        assert summed(deep) == summed.__wrapped__(expected)  # type: ignore[attr-defined]
        for times in range(5):
            made, own = turned(deep, times), turned.__wrapped__(deep, times)  # type: ignore[attr-defined]
            pairs = zip((*made.two, *made.more[0], *made.more[1]), (*own.two, *own.more[0], *own.more[1]), strict=True)
            assert all(np.shares_memory(one, other) for one, other in pairs)
            assert made.scale == own.scale == 1.0
            chosen = either(deep, times), either.__wrapped__(deep, times)  # type: ignore[attr-defined]
            assert [x.tolist() for x in chosen[0]] == [x.tolist() for x in chosen[1]]
    del made, own, chosen, pairs
    gc.collect()
    assert [sys.getrefcount(array) for array in arrays] == before
    assert [x.tolist() for x in (*deep.two, *deep.more[0])] == [x.tolist() for x in (*expected.two, *expected.more[0])]


def test_exceptions_come_through_with_what_they_say() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="less than nothing") as raised:
            refuse(-1.0)
        assert raised.value.args == ("less than nothing", 7)
    assert refuse(4.0) == 2.0


def test_values_that_do_not_fit_a_slice_are_refused() -> None:
    target = np.zeros(3)
    assigned(target, np.ones(2))
    assert target.tolist() == [0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="different size"):
        assigned(target, np.ones(3))


def test_threads_that_call_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda n: first_of(np.full(9, n, np.uint16), 3), range(64)))
    assert found == list(range(64))


def test_of_processes_that_need_the_same_at_once_one_compiles_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        (_, first, one), (_, second, other) = threads.map(lambda _: class_of(tmp_path), range(2))
    assert {one, other} == {"True", "False"}  # who compiled it
    assert class_of(tmp_path)[1:] == [first, "False"] == [second, "False"]
    assert [file.suffix for file in kept(tmp_path)[0].parent.iterdir() if file.name.startswith("tmp")] == []


def test_after_waiting_too_long_a_process_compiles_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_PATIENCE_S", 0.0)
    with compiled._one_at_a_time(tmp_path), compiled._one_at_a_time(tmp_path):
        pass


def test_no_other_user_holds_up_compiling(tmp_path: Path) -> None:
    with compiled._one_at_a_time(tmp_path):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("whose", ["ours", "group", "other user's folder", "other user's base", "open base"])
def test_code_that_another_user_could_have_put_there_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "base"))
    find = folders.cache_folder.__wrapped__
    folder = find("gpusched.estimation.odds")
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    if whose == "group":
        folder.chmod(0o770)
    elif whose == "open base":
        folder.parent.chmod(0o777)
    elif whose != "ours":
        monkeypatch.setattr(os, "geteuid", lambda: 54321 if whose == "other user's folder" else folder.stat().st_uid)
        if whose == "other user's base":
            os.chown(folder.parent, 54321, -1)
    assert find("gpusched.estimation.odds") == (folder if whose == "ours" else None)


def test_an_account_without_a_home_compiles_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert folders.cache_folder.__wrapped__("gpusched.estimation.odds") is None


@jit
def halved_until(value: float, least: float) -> float:
    while value > least:
        value = smaller(value)
    return value


@jit
def smaller(value: float) -> float:
    return 0.5 * value


@jit
def inverse(value: float) -> float:
    return 1.0 / value


def one_call(function: Any, *args: object) -> tuple[object, list[str], list[object]]:
    """Return the result of a new pass by `compiled_if_long`, what happened, and the versions that it has then."""
    anew, said = jit(function.__wrapped__), []

    def do() -> object:
        said.append("as Python" if is_interpreted() else "compiling" if compiled.may_compile() else "cached")
        return anew(*args)

    return compiled_if_long(do, lambda: said.append("announced")), said, list(anew.signatures)


@pytest.fixture
def nothing_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file has what is compiled, and nothing has run as Python before."""
    monkeypatch.setattr(compiled, "cache_folder", lambda _module: None)
    monkeypatch.setattr(compiled, "_used_s", {})
    monkeypatch.setattr(compiled, "BRIEFLY_S", 60.0)
    monkeypatch.delenv("GPUSCHED_COMPILED", raising=False)


@pytest.mark.usefixtures("nothing_cached")
def test_what_is_short_runs_as_python_and_is_not_compiled() -> None:
    assert one_call(halved_until, 8.0, 1.0) == (1.0, ["cached", "as Python"], [])
    assert not is_interpreted()
    assert compiled.may_compile()


@pytest.mark.usefixtures("nothing_cached")
def test_what_takes_longer_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BRIEFLY_S", 0.0)
    found, said, versions = one_call(halved_until, 8.0, 1.0)
    assert (found, said, len(versions)) == (1.0, ["cached", "as Python", "announced", "compiling"], 1)
    monkeypatch.setattr(compiled, "BRIEFLY_S", 60.0)
    # and the next time at once, whatever it may take: so it was that long before
    assert one_call(halved_until, 8.0, 1.0)[1] == ["cached", "announced", "compiling"]


@pytest.mark.usefixtures("nothing_cached")
def test_what_was_often_short_is_compiled_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ENOUGH_S", 1e-9)
    assert one_call(halved_until, 8.0, 1.0)[1] == ["cached", "as Python"]
    assert one_call(halved_until, 8.0, 1.0)[1] == ["cached", "announced", "compiling"]
    assert one_call(halved_until, 8, 1.0)[1] == ["cached", "as Python"]  # another version, another account


@pytest.mark.usefixtures("nothing_cached")
def test_where_python_raises_compiled_code_says_what_it_is() -> None:
    found, said, versions = one_call(inverse, 0.0)
    assert (found, said, len(versions)) == (np.inf, ["cached", "as Python", "announced", "compiling"], 1)


@pytest.mark.usefixtures("nothing_cached")
def test_what_the_user_did_wrong_is_said_at_once() -> None:
    tries = []

    def refused() -> None:
        tries.append(is_interpreted())
        raise UsageError("no such job")

    with pytest.raises(UsageError):
        compiled_if_long(refused)
    assert tries == [False]


@pytest.mark.usefixtures("nothing_cached")
def test_one_variable_has_all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSCHED_COMPILED", "always")
    assert one_call(halved_until, 8.0, 1.0)[1] == ["announced", "compiling"]


def test_what_is_compiled_already_runs_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUSCHED_COMPILED", raising=False)
    assert halved_until(8.0, 1.0) == 1.0
    used = jit(halved_until.__wrapped__)  # type: ignore[attr-defined]
    assert compiled_if_long(lambda: (used(8.0, 1.0), is_interpreted())) == (1.0, False)


def test_a_trial_within_a_trial_ends_as_it_began() -> None:
    with compiled.nothing_compiled():
        with compiled.nothing_compiled(), compiled.interpreted(60.0):
            assert is_interpreted()
        assert not compiled.may_compile()
        assert not is_interpreted()
    assert compiled.may_compile()
