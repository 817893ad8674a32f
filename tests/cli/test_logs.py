"""``logs`` of a job whose output is brought home at that moment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.client import logs
from gpusched.config.paths import log_path
from gpusched.errors import GpuschedError
from tests.cli.conftest import Site


@pytest.mark.parametrize("answer", ["nothing", "an error"])
def test_output_that_is_collected_while_the_node_is_asked_is_shown(
    site: Site, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    job_id = site.submit()
    site.apply_inbox()
    site.start(job_id)
    site.end(job_id)
    path = log_path(site.state, job_id, 1, 0)

    def asked(*_: object) -> Iterator[bytes]:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"said\n")
        if answer == "an error":
            raise GpuschedError("there is no such container")
        yield from ()

    monkeypatch.setattr(logs._Output, "_from_node", asked)
    assert site.call("logs", job_id).ok().out == "said\n"
    path.unlink()
    path.parent.rmdir()
    monkeypatch.setattr(logs._Output, "_from_node", lambda *_: iter([b"still ", b"there\n"]))
    assert site.call("logs", job_id).ok().out == "still there\n"


def test_a_log_that_is_rotated_away_while_it_is_opened_is_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # it was there
    assert logs.open_log(site.state / "logs/j/1.0.log") is None


def test_an_error_for_lack_of_temporary_space_names_the_folder(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = site.submit()
    site.apply_inbox()
    site.start(job_id)
    site.end(job_id)
    path = log_path(site.state, job_id, 1, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"said\n")
    real = os.access
    monkeypatch.setattr(logs.os, "access", lambda file, *how, **more: file != path and real(file, *how, **more))
    monkeypatch.setattr(logs.relay, "is_needed", lambda _: True)
    monkeypatch.setattr(logs.relay, "stream", lambda *_: iter([b"said\n"]))
    assert site.call("logs", job_id).ok().out == "said\n"
    monkeypatch.setattr(logs.tempfile, "TemporaryFile", lambda: Path("/dev/full").open("r+b", buffering=0))
    failed = site.call("logs", job_id)
    assert (failed.code, failed.out) == (1, "")
    assert "temporary file: No space left on device; set TMPDIR" in failed.err
    assert failed.err.count("\n") == 1


def test_a_progress_bar_of_many_megabytes_is_one_line() -> None:
    """Each part was joined with all before it: 100 MB took minutes."""
    chunks = [b"x" * 99 + b"\r"] * 200_000
    written: list[bytes] = []
    prefixed = logs.PrefixedLines(written.append)
    began = time.process_time()
    for chunk in (*chunks, b"end\nafter"):
        prefixed(0, chunk)
    prefixed.finish()
    assert [len(line) for line in written] == [20_000_008, 10]
    assert [len(line) for line in logs._last_lines(iter((b"first\n", *chunks, b"end\n", b"after")), 2)] == [
        20_000_004,
        5,
    ]
    assert time.process_time() - began < 10.0
