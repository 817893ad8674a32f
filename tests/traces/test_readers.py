"""Readers of other packages: detected, refused where they do not work, and cached like any other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpusched.errors import GpuschedError, UsageError, Warnings
from gpusched.traces import file as tracefile
from gpusched.traces.load import _sources, load, resolve
from gpusched.traces.readers import cache
from gpusched.traces.readers.draft import assemble
from gpusched.traces.trace import Trace
from tests.plugin.building import registered
from tests.traces import samples
from tests.traces.comparing import assert_same

Put = Callable[[str, str], Path]


READ: list[bool] = []  # whether strictly


def read(path: Path, *, strict: bool) -> Trace:
    READ.append(strict)
    text = path.read_text()
    if "full" in text:
        raise MemoryError
    if "gone" in text:
        (path.parent / "absent").read_text()
    if "unreadable" in text:
        raise OSError("not now")
    if "flawed" in text:
        raise GpuschedError("a flaw of the file")
    if "number" in text:
        return 7  # type: ignore[return-value]
    count = int(text.split()[1])
    if count == 0:
        raise ZeroDivisionError("none")
    none, nan = np.full(count, -1), np.full(count, np.nan)
    return Trace(
        name="acme", epoch=None, ids=tuple(map(str, range(count))), submit=np.arange(count, dtype=float),
        duration=np.ones(count), gpus=np.ones(count, np.int64), limit=nan, wait=nan, gpu_milli=np.full(count, 1000),
        nodes=np.zeros(count, np.int64), cores=none, memory_mib=none, user=none, group=none, model=none,
        gpu_type=none, depends_on=none, status=none,
    )  # fmt: skip


def matches(path: Path) -> bool:
    return path.read_text().startswith("acme")


def fails(path: Path) -> bool:
    raise GpuschedError("a folder is closed") if "closed" in path.read_text() else ValueError("cannot tell")


read.matches = matches  # type: ignore[attr-defined]


def broken(path: Path, *, strict: bool) -> Trace:
    raise AssertionError("not asked")


broken.matches = fails  # type: ignore[attr-defined]


def silent(path: Path, *, strict: bool) -> Trace:
    raise AssertionError("not asked")


@pytest.fixture(autouse=True, scope="module")
def _acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    points = {name: f"{__name__}:{name}" for name in ("broken", "silent", "absent")} | {"ours": f"{__name__}:read"}
    with registered(tmp_path_factory.mktemp("acme"), {"traces": points}):
        yield


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(Warnings, "show", lines.append)
    monkeypatch.setattr(Warnings, "given", set())
    return lines


def test_a_file_is_read_by_the_package_that_accepts_it_though_others_are_broken(put: Put, given: list[str]) -> None:
    path = put("f", "acme 3")
    assert resolve(path) == ("ours", path)
    assert sorted("cannot tell" in line for line in given) == [False, True]
    assert any("absent" in line for line in given)
    assert len(load(path)) == 3
    given.clear()
    resolve(put("f", "acme closed"))
    assert "a folder is closed" in given, "as the reader says it"
    with pytest.raises(UsageError, match=r"f: its format cannot be detected\nuse --format \(.*ours"):
        resolve(put("f", "other 3"))
    assert resolve(put("f", "other 3"), "silent") == ("silent", path), "as told"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acme 0", "trace format 'ours' of acme 1 does not work: ZeroDivisionError: none"),
        ("acme number", "trace format 'ours' of acme 1 does not work: it returned int, not a Trace"),
        ("acme flawed", "a flaw of the file"),
        ("acme full", "{}: too large for this machine's memory; cut it into smaller files"),
        ("acme unreadable", "{}: not now"),
        ("acme gone", "{}/absent: No such file or directory"),
    ],
)
def test_what_a_reader_raises_is_one_line(put: Put, text: str, said: str) -> None:
    path = put("f", text)
    with pytest.raises(GpuschedError) as error:
        load(path)
    where = path.parent if "absent" in said else path
    assert error.value.line().startswith(said.format(where))


def test_a_file_that_cannot_be_looked_at_is_one_line(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    path, errors = put("f", "acme 3"), [OSError(13, "Permission denied"), OSError("no code"), ValueError("null byte")]

    def look(path: Path) -> None:
        raise errors[0]

    monkeypatch.setattr("gpusched.traces.readers.guess.detect_format", look)
    for said in ("Permission denied", "no code", "null byte"):
        with pytest.raises(GpuschedError) as error:
            resolve(path)
        assert error.value.line() == f"{path}: {said}"
        del errors[0]


def test_a_trace_is_kept_until_the_file_the_format_or_the_zone_changes(
    put: Put, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = put("f", "acme 3"), put("g", "acme 3")
    places = {cache.place([file], name) for file in (path, other) for name in ("ours", "sacct UTC", "sacct CET")}
    assert len(places) == 6
    READ.clear()
    first = load(path)
    (kept,) = cache_folder.iterdir()
    assert_same(first, load(path))
    assert READ == [False], "once"
    load(path, strict=True)
    load(path, strict=True)
    assert READ == [False, True, True], "strictly each time"
    path.write_text("acme 4")
    assert len(load(path)) == 4
    assert len(list(cache_folder.iterdir())) == 2
    assert cache.place([path.parent / "absent"], "ours") is None
    assert cache.get(None) is None
    cache.put(None, first)
    assert cache.get(kept) is not None


def test_the_least_recently_used_are_dropped_first(
    put: Put, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MAX_FILES", 2)
    trace = load(put("f", "acme 3"))
    for file in cache_folder.iterdir():
        file.unlink()
    files = [cache_folder / f"{name}{tracefile.SUFFIX}" for name in "abc"]
    for age, file in zip((300, 200), files, strict=False):
        cache.put(file, trace)
        os.utime(file, (1e9 - age, 1e9 - age))
    assert cache.get(files[0]) is not None, "the older one was used now"
    cache.put(files[2], trace)
    assert [file.exists() for file in files] == [True, False, True]


def test_all_tables_of_a_format_count(put: Put, cache_folder: Path) -> None:
    """Of a trace in several files the one that is named is not the only one that is looked at."""
    files = [put(name, "x") for name in ("pai_job_table.csv", "pai_task_table.csv", "pai_note.csv")]
    assert _sources(files[0]) == _sources(files[0].parent) == files[:2]
    assert _sources(put("one.csv", "x")) == [files[0].parent / "one.csv"]


@pytest.mark.parametrize("window", [{"since": 1.0}, {"until": 1.0}, {"vc": "none"}])
def test_a_part_of_a_trace_is_taken_by_any_of_its_bounds(put: Put, window: dict[str, object]) -> None:
    path = put("f", "acme 3")
    if "vc" in window:
        with pytest.raises(GpuschedError):
            load(path, **window)  # type: ignore[arg-type]
    else:
        assert len(load(path, **window)) == (2 if "since" in window else 1)  # type: ignore[arg-type]
    assert len(load(put("p.csv", samples.PHILLY_CSV))) == 3


def test_names_of_no_job_are_dropped() -> None:
    user = np.array([2, -1]), ("ann", "bob", "cat")
    trace = assemble(
        name="t", epoch=None, ids=("a", "b"), submit=np.zeros(2), duration=np.ones(2), gpus=np.ones(2, np.int64),
        names={"user": user}, columns={},
    )  # fmt: skip
    assert (trace.user.tolist(), trace.users) == ([0, -1], ("cat",))
