"""Our own file format and the cache: what is written is what is read; damage is an error, never executed."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gpusched.config.plugins import components
from gpusched.errors import FileError, GpuschedError
from gpusched.traces import file as tracefile
from gpusched.traces.load import load
from gpusched.traces.readers import cache
from gpusched.traces.readers import philly_csv as importer
from gpusched.traces.trace import Ints
from tests.traces import samples
from tests.traces.comparing import assert_same

Put = Callable[[str, str], Path]


@pytest.mark.parametrize("text", [samples.SWF, samples.OPENB, samples.PHILLY, samples.HELIOS.replace("uzqls", "Zoë")])
def test_round_trip(put: Put, tmp_path: Path, text: str) -> None:
    trace = load(put("cluster_log.csv", text))
    path = tmp_path / "t.gpusched.npz"
    tracefile.write(path, trace)
    assert_same(trace, load(path))
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []
    some = replace(trace, preemptible=np.arange(len(trace)) % 2 == 0)
    tracefile.write(path, some)
    assert_same(some, load(path))


def test_damage_is_one_error(put: Put, tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    tracefile.write(path, load(put("log.swf", samples.SWF)))
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    for _ in range(200):
        broken = bytearray(whole)
        for at in rng.integers(4, len(whole), 3):
            broken[at] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(broken[: int(rng.integers(len(whole) // 2, len(whole) + 1))]))
        with suppress(FileError):
            tracefile.check(tracefile.read(path))


def test_lies_in_the_file_are_refused(put: Put, tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    tracefile.write(path, load(put("log.swf", samples.SWF)))
    with np.load(path) as arrays:
        good = dict(arrays)
    lies = {
        "user": np.array([0, 99, 0]), "submit": np.array([5.0, 1.0, 2.0]), "duration": np.array([1.0, 0.0, 1.0]),
        "gpus": np.array([-1]), "depends_on": np.array([2, -1, -1]), "gpu_milli": np.array([2000]),
        "limit": np.array([1.0, 2.0]), "ids.ends": np.array([1, 2, 900]), "header": np.frombuffer(b"[1]", np.uint8),
        "nodes": np.array([object()]),
    }  # fmt: skip
    for name, lie in lies.items():
        np.savez(path, **{**good, name: lie})  # type: ignore[arg-type]
        with pytest.raises(FileError, match="a trace written by gpusched"):
            tracefile.read(path)
    header = np.frombuffer(bytes(good["header"]).replace(b'"version": 1', b'"version": 9'), np.uint8)
    np.savez(path, **{**good, "header": header})  # type: ignore[arg-type]
    with pytest.raises(FileError, match="version 9, this gpusched reads version 1"):
        tracefile.read(path)


@pytest.mark.parametrize("array", [None, np.array([-1, 0, 0])])
def test_a_limit_on_the_tasks_of_no_array_is_refused(put: Put, tmp_path: Path, array: Ints | None) -> None:
    trace, path = load(put("log.swf", samples.SWF)), tmp_path / "t.npz"
    tracefile.write(path, replace(trace, array=array, array_limit=np.full(len(trace), 1)))
    with pytest.raises(FileError, match="array_limit of jobs without an array"):
        tracefile.read(path)


def test_no_pickle_is_ever_loaded(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    path = tmp_path / "t.npz"
    content = io.BytesIO()
    np.save(content, np.array([Bomb()], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.npy", content.getvalue())
    with pytest.raises(FileError):
        load(path)
    assert not (tmp_path / "exploded").exists()


def test_write_failure_is_one_line(put: Put, tmp_path: Path) -> None:
    trace = load(put("p.csv", samples.PHILLY_CSV))
    with pytest.raises(GpuschedError, match="cannot be written: No such file"):
        tracefile.write(tmp_path / "absent" / "t.npz", trace)


def test_the_second_run_does_not_parse(put: Put, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put("p.csv", samples.PHILLY_CSV + "2017-09-08 02:16:41,-1,1,a\n")
    first = load(path)
    with monkeypatch.context() as patch:
        patch.setattr(importer, "read", None)
        assert_same(first, load(path))
        with pytest.raises(TypeError):  # strict reads the file itself
            load(path, strict=True)
    assert len(list(cache_folder.glob(f"*{tracefile.SUFFIX}"))) == 1
    path.write_text(samples.PHILLY_CSV)
    assert len(load(path).rejected) == 0  # another size, another entry
    for kept in cache_folder.iterdir():
        kept.write_bytes(b"rubbish")
    assert len(load(path)) == 3


def test_the_cache_stays_small_and_may_fail(put: Put, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_FILES", 3)
    for i in range(5):
        load(put(f"p{i}.csv", samples.PHILLY_CSV))
    assert len(list(cache_folder.iterdir())) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert len(load(put("q.csv", samples.PHILLY_CSV))) == 3


def test_every_format_has_its_module() -> None:
    formats = {"philly-csv", "philly", "helios", "pai2020", "openb", "swf", "gavel", "acme", "history"}
    assert formats < set(components("traces"))
    for component in components("traces").values():
        assert callable(component.load())
