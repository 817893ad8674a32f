"""Bringing output home: whole, cut in the middle, or not at all, but never half of it as if it were whole."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.cluster.collecting import collect_log, rotate
from gpusched.model.resources import LogSettings
from gpusched.nodes.local import LocalTransport
from gpusched.nodes.transport import Result, Script, TransportError

MIB = 1024 * 1024
CAPS = LogSettings(max_mib_per_job=1, max_total_mib=1)


def collect(tmp_path: Path, shell: str) -> tuple[str, bytes | None]:
    target = tmp_path / "logs" / "1.0.log"
    error = collect_log(LocalTransport("here"), Script(("sh", "-c", shell)), target, CAPS)
    assert [p.name for p in target.parent.iterdir()] == [target.name] * target.exists()
    return error, target.read_bytes() if target.exists() else None


@pytest.mark.parametrize("text", ["", "x", "no end of line", "two\nlines\n", "\\0gpusched-output-ended 0\\n", "é" * 99])
def test_small_outputs_come_as_they_are(tmp_path: Path, text: str) -> None:
    error, content = collect(tmp_path, f"printf '{text}'")
    assert error == ""
    assert content == text.encode().replace(b"\\0", b"\0").replace(b"\\n", b"\n")


def test_both_streams_count(tmp_path: Path) -> None:
    assert collect(tmp_path, "echo out; echo err >&2")[1] == b"out\nerr\n"


def numbers(count: int) -> str:
    return f"{sys.executable} -c 'for i in range({count}): print(\"%09d\" % i)'"


@pytest.mark.parametrize("extra", [0, 1, 3 * MIB])
def test_of_a_large_output_the_beginning_and_the_end_are_kept(tmp_path: Path, extra: int) -> None:
    error, content = collect(tmp_path, f"head -c {MIB + extra} /dev/zero | tr '\\0' x")
    assert (error, content is not None) == ("", True)
    assert content is not None
    if extra == 0:
        assert content == b"x" * MIB
    else:
        assert f"[gpusched: {extra} bytes left out here".encode() in content
        assert MIB <= len(content) < MIB + 200


def test_head_and_tail_are_the_right_ones(tmp_path: Path) -> None:
    _, content = collect(tmp_path, numbers(500_000))
    assert content is not None
    head, _, rest = content.partition(b"\n[gpusched: ")
    middle, _, tail = rest.partition(b"]\n")
    assert head == b"".join(b"%09d\n" % i for i in range(500_000))[: MIB // 4]
    assert tail == b"".join(b"%09d\n" % i for i in range(400_000, 500_000))[-(MIB - MIB // 4) :]
    assert int(middle.split()[0]) + len(head) + len(tail) == 5_000_000


def test_an_engine_that_fails_does_not_pass_for_an_empty_output(tmp_path: Path) -> None:
    error, content = collect(tmp_path, "echo half; echo 'database is locked' >&2; exit 125")
    assert error == "the output cannot be read (exit code 125): database is locked"
    assert content is None


class Broken:
    """A connection that goes away in the middle, without an exception."""

    def run(self, script: Script, timeout_s: float) -> Result:
        raise NotImplementedError

    def stream(self, script: Script) -> Iterator[bytes]:
        yield b"half of"

    def close(self) -> None: ...


def test_what_broke_off_is_not_taken_for_the_whole_and_the_old_file_stays(tmp_path: Path) -> None:
    target = tmp_path / "1.0.log"
    target.write_text("before")
    with pytest.raises(TransportError, match="broke off"):
        collect_log(Broken(), Script(("true",)), target, CAPS)
    assert target.read_text() == "before"
    assert not target.with_suffix(".part").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs a file system that is full: /dev/full behind a link")
def test_a_full_disk_here_is_our_own_trouble(tmp_path: Path) -> None:
    (tmp_path / "1.0.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        collect_log(LocalTransport("here"), Script(("echo", "x")), tmp_path / "1.0.log", CAPS)
    assert not (tmp_path / "1.0.log").exists()


def test_rotation_removes_the_oldest_until_the_rest_fits(tmp_path: Path) -> None:
    for age, (job, size) in enumerate([("a", 0.4), ("b", 0.4), ("c", 0.4), ("c", 0.3)]):
        path = tmp_path / job / f"{age}.0.log"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * int(size * MIB))
        os.utime(path, (1000 + age, 1000 + age))
    assert [p.name for p in rotate(tmp_path, CAPS)] == ["0.0.log", "1.0.log"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]
    assert rotate(tmp_path, CAPS) == []
    assert rotate(tmp_path / "nowhere", CAPS) == []
