"""The files that a job may write into its folder, and how the probe reads them: by python3, else by sh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusched.nodes.payload import attempts, jobfiles
from gpusched.nodes.runtimes.listing import parse_listing
from gpusched.nodes.runtimes.shell import BOUNDED

LISTER = BOUNDED + Path(attempts.__file__).with_name("attempts.sh").read_text()
NOTHING = {"progress": None, "saved": None, "ask": None, "job_file_error": None}


def all_by_python(root: Path) -> list[dict[str, Any]]:
    assert str(root) == attempts.default_root("c", "n")
    return attempts.list_attempts("c", "n", "process")[0]


def all_by_sh(root: Path) -> list[dict[str, Any]]:
    head = f"CLUSTER_ID=c NODE=n RUNTIME=process ROOT={root}\n"
    text = subprocess.run(["sh", "-s"], input=head + LISTER, text=True, capture_output=True, check=True, timeout=600)
    found, error = parse_listing(text.stdout, "c", "process")
    assert error is None
    return found


def by_python(root: Path) -> dict[str, Any]:
    (attempt,) = all_by_python(root)
    return attempt


def by_sh(root: Path) -> dict[str, Any]:
    (attempt,) = all_by_sh(root)
    return attempt


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job's folder, with an attempt of it beside."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    root = tmp_path / "gpusched-node/c/n"
    own, attempt = root / "jobs/j", root / "gpusched-j-1-0"
    own.mkdir(parents=True)
    attempt.mkdir()
    (attempt / "meta").write_text(f"runtime=process\nrank=0\njob_dir={own}\n")
    (attempt / "exit").write_text("0 1\n")
    return own


@pytest.mark.parametrize("read", [by_python, by_sh])
def test_progress_and_saved_files_are_read(folder: Path, read: Callable[[Path], dict[str, Any]]) -> None:
    (folder / "progress.json").write_text('{"step": 7,\n "of": 10, "samples_per_s": 2.5, "nodes": 2, "more": [1]}\n')
    (folder / "saved.json").write_text('{"step": 5, "gpus": 8, "time": 1}')
    os.utime(folder / "saved.json", (1, 1))
    found = read(folder.parents[1])
    assert 0 <= found["progress"].pop("age_s") < 60
    not_said = {"ran_s": None, "paused_s": None}
    assert found["progress"] == {"step": 7.0, "of": 10.0, "samples_per_s": 2.5, "nodes": 2.0} | not_said
    assert found["saved"].pop("age_s") > 1e9
    assert found["saved"] == {"step": 5.0, "gpus": 8.0}
    assert found["job_file_error"] is None


def _link(path: Path) -> None:
    (path.parent / "secret").write_text('{"step": 1}')
    path.symlink_to("secret")


def _gigabyte(path: Path) -> None:
    path.write_text('{"step": 1}')
    os.truncate(path, 1 << 30)


@pytest.mark.parametrize("read", [by_python, by_sh])
@pytest.mark.parametrize(
    ("write", "error"),
    [
        (lambda p: p.write_text('{"step": 1'), "it is not JSON"),
        (lambda p: p.write_text("[" * 4000), "it is not JSON"),
        (lambda p: p.write_bytes(b"\xff\xfe\n\x0cattempt gpusched-k-1-0\x85"), "it is not JSON"),
        (lambda p: p.write_text(""), "it is not JSON"),
        (lambda p: p.write_text("[1]"), "it is not a JSON object"),
        (lambda p: p.write_text("{}"), "step is not a number from 0 to 2^53"),
        (lambda p: p.write_text('{"step": true}'), "step is not a number from 0 to 2^53"),
        (lambda p: p.write_text('{"step": -1}'), "step is not a number from 0 to 2^53"),
        (lambda p: p.write_text('{"step": NaN}'), "step is not a number from 0 to 2^53"),
        (lambda p: p.write_text('{"step": 1e999}'), "step is not a number from 0 to 2^53"),
        (lambda p: p.write_text('{"step": 9007199254740992}'), "step is not a number from 0 to 2^53"),
        (lambda p: p.write_text('{"step": 1, "of": "many"}'), "of is not a number from 0 to 2^53"),
        (_gigabyte, "it is larger than 4096 bytes"),
        (_link, "it is not a regular file"),
        (os.mkfifo, "it is not a regular file"),
        (lambda p: p.mkdir(), "it is not a regular file"),
    ],
)
def test_anything_else_is_reported_and_ignored(
    folder: Path, write: Callable[[Path], object], error: str, read: Callable[[Path], dict[str, Any]]
) -> None:
    (folder / "saved.json").write_text('{"step": 5}')
    write(folder / "progress.json")
    found = read(folder.parents[1])
    assert found["progress"] is None
    assert found["job_file_error"] == f"progress.json: {error}"
    assert found["saved"]["step"] == 5.0


@pytest.mark.parametrize("read", [by_python, by_sh])
def test_a_job_that_says_nothing(folder: Path, read: Callable[[Path], dict[str, Any]]) -> None:
    assert {key: read(folder.parents[1])[key] for key in NOTHING} == NOTHING


@pytest.mark.parametrize("when", ["stat", "head"])
def test_a_request_that_is_taken_back_while_it_is_read_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    (folder / "ask.json").write_text('{"id":"1-2","attempt":1,"words":["squeue"]}')
    (folder / "bin").mkdir()
    taken = f'#!/bin/sh\ncase "$*" in *ask.json) rm -f "{folder}/ask.json" ;; esac\nexec {shutil.which(when)} "$@"\n'
    for name, text in ((when, taken), ("timeout", '#!/bin/sh\nshift 3 && exec "$@"\n')):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    found = by_sh(folder.parents[1])
    assert {key: found[key] for key in NOTHING} == NOTHING
    assert not (folder / "ask.json").exists()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_shared_disk_that_hangs_costs_the_jobs_files_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hangs: bool
) -> None:
    (shared := tmp_path / "shared").mkdir()
    (shared / "progress.json").write_text('{"step": 7}')
    meta = folder.parents[1] / "gpusched-j-1-0/meta"
    meta.write_text(meta.read_text().replace(str(folder), str(shared)))
    real = jobfiles.read
    monkeypatch.setattr(jobfiles, "read", lambda folder: time.sleep(3600) if hangs else real(folder))
    monkeypatch.setattr(jobfiles, "LIMIT_S", 0.1 if hangs else 600.0)
    found = by_python(folder.parents[1])
    assert found["exit_code"] == 0
    assert (found["progress"] or {}).get("step") == (None if hangs else 7.0)
    assert found["job_file_error"] == ("progress.json: its disk does not answer" if hangs else None)


def test_a_shared_disk_that_hangs_is_waited_for_once_on_a_node_without_python(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root, shared, programs = folder.parents[1], tmp_path / "shared", tmp_path / "bin"
    (folder / "progress.json").write_text('{"step": 7}')
    for number in range(3):
        (attempt := root / f"gpusched-k{number}-1-0").mkdir()
        (attempt / "meta").write_text(f"runtime=process\nrank=0\njob_dir={shared}\n")
        (attempt / "exit").write_text("0 1\n")
    programs.mkdir()
    real, calls = shutil.which("stat"), tmp_path / "calls"
    (programs / "stat").write_text(
        f'#!/bin/sh\n[ "$1" != {shared} ] || {{ echo >>{calls}; exec sleep 3600; }}\nexec {real} "$@"\n'
    )
    (programs / "stat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    found = {one["name"]: one for one in all_by_sh(root)}
    assert found.pop("gpusched-j-1-0")["progress"]["step"] == 7.0
    assert [one["job_file_error"] for one in found.values()] == 3 * ["progress.json: its disk does not answer"]
    assert calls.read_text() == "\n"


def test_only_rank_0_is_listened_to(folder: Path) -> None:
    (folder / "progress.json").write_text('{"step": 7}')
    meta = folder.parents[1] / "gpusched-j-1-0/meta"
    meta.write_text(meta.read_text().replace("rank=0", "rank=1"))
    assert by_python(folder.parents[1])["progress"] is by_sh(folder.parents[1])["progress"] is None


def test_folders_of_jobs_without_attempts(folder: Path) -> None:
    root = folder.parents[1]
    for name in ("a", "b"):
        (root / "jobs" / name).mkdir()
    assert jobfiles.orphaned_folders(str(root), "no-such", "n") == ["a", "b"]
    head = f"CLUSTER_ID=no-such NODE=n RUNTIME=process ROOT={root}\n"
    out = subprocess.run(["sh", "-s"], input=head + LISTER, text=True, capture_output=True, check=True).stdout
    assert [line for line in out.splitlines() if line.startswith("job_folder")] == ["job_folder a", "job_folder b"]
    assert json.dumps(jobfiles.orphaned_folders(str(root / "nowhere"), "no-such", "n")) == "[]"
    for number in range(60):
        (root / "jobs" / f"c{number}").mkdir()
    found = [jobfiles.orphaned_folders(str(root), "no-such", "n") for _ in range(100)]
    assert {len(jobs) for jobs in found} == {20}
    assert len({job for jobs in found for job in jobs}) == 62, "the first of them may stay for long"


@pytest.mark.parametrize("read", [by_python, by_sh])
def test_a_launcher_that_has_no_group_of_its_own_yet_has_not_died(
    folder: Path, read: Callable[[Path], dict[str, Any]]
) -> None:
    attempt = folder.parents[1] / "gpusched-j-1-0"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    (attempt / "meta").write_text(f"runtime=process\nrank=0\nboot={boot}")
    (attempt / "exit").unlink()
    with subprocess.Popen(["sleep", "100"]) as child:  # in the group of this test
        try:
            start = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
            (attempt / "launcher.pid").write_text(f"{child.pid} {start}\n")
            assert read(folder.parents[1])["phase"] == "preparing"
            (attempt / "launcher.pid").write_text(f"{child.pid} {int(start) + 1}\n")
            assert read(folder.parents[1])["phase"] == "lost", "a number that was used again"
        finally:
            child.kill()


@pytest.mark.parametrize("read", [by_python, by_sh])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"id":"1-2","attempt":1,"words":["squeue","-o %i \\\\ \\""]}', ["squeue", '-o %i \\ "']),
        ('{"id":"1-2","attempt":true,"words":["squeue"]}', "ask.json: it has no id, or no attempt"),
        ('{"id":"1-2","attempt":1,"words":[]}', "ask.json: words is no list of texts"),
        ('{"id":"1-2","attempt":1,"words":["squeue",1]}', "ask.json: words is no list of texts"),
        ('{"id":"1-2","attempt":1e999,"words":["squeue"]}', "ask.json: it has no id, or no attempt"),
        ('{"id":"1-2","attempt":99999999999999999999,"words":["squeue"]}', "ask.json: it has no id, or no attempt"),
        ('{"id":"1-2","attempt":1,"words":["\\ud800"]}', "ask.json: it is not valid UTF-8"),
        ('{"id":"1-2","attempt":1,"words":["sbatch"],"script":1}', "ask.json: its script, or its folder, is no text"),
        ('{"id":"1-2","attempt":1,"words":["%s"]}' % (60000 * "\1"), "ask.json: it is too large"),
        (150001 * " ", "ask.json: it is larger than 150000 bytes"),
        ("[]", "ask.json: it is not a JSON object"),
    ],
)
def test_requests_of_a_job_are_read(
    folder: Path, read: Callable[[Path], dict[str, Any]], text: str, expected: list[str] | str
) -> None:
    (folder / "ask.json").write_text(text)
    found = read(folder.parents[1])
    assert (found["ask"]["words"] if isinstance(expected, list) else found["job_file_error"]) == expected


@pytest.mark.parametrize("read", [by_python, by_sh])
def test_a_script_arrives_as_it_is(folder: Path, read: Callable[[Path], dict[str, Any]]) -> None:
    script = '#!/bin/sh\n# ü\techo "a\\\\b"\n\x1b\r\n' + 60000 * "x" + "\n"
    asked = {"id": "1-2", "attempt": 1, "words": ["sbatch", "a\nb"], "script": script, "script_word": 1, "cwd": "/ä"}
    (folder / "ask.json").write_text(
        json.dumps(asked, ensure_ascii=False).replace("\\n", "\n").replace("\\t", "\t").replace("\\u001b", "\x1b")
    )
    found = read(folder.parents[1])
    assert found["job_file_error"] is None
    assert 0 <= found["ask"].pop("age_s") < 60
    assert found["ask"] == asked


@pytest.mark.parametrize("listed", [all_by_python, all_by_sh])
def test_of_many_scripts_a_reading_brings_some_each_time(
    folder: Path, listed: Callable[[Path], list[dict[str, Any]]]
) -> None:
    root = folder.parents[1]
    for number in range(8):
        own, attempt = root / f"jobs/j{number}", root / f"gpusched-j{number}-1-0"
        own.mkdir()
        attempt.mkdir()
        (attempt / "meta").write_text(f"runtime=process\nrank=0\njob_dir={own}\n")
        (attempt / "exit").write_text("0 1\n")
        script = "" if number == 7 else 5000 * "x"  # a small one is always there
        (own / "ask.json").write_text(json.dumps({"id": "1-1", "attempt": 1, "words": ["sbatch"], "script": script}))
    seen = set[str]()
    for _ in range(100):
        found = [one["name"] for one in listed(root) if one["ask"] is not None]
        assert len(found) == 4
        assert "gpusched-j7-1-0" in found
        seen.update(found)
        if len(seen) == 8:
            return
    raise AssertionError(f"only {seen} are ever read")
