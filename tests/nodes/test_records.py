"""Records of attempts on a node: written with a launch, kept at its removal, read again."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from gpusched.model.attemptrecords import AttemptRecord, attempt_record
from gpusched.model.jobs import JobRecord, JobState, container_name
from gpusched.model.readings import Gpu, NodeReading
from gpusched.nodes.fencing import FencedTransport
from gpusched.nodes.local import LocalTransport
from gpusched.nodes.records import KEEP_DAYS, find_clusters, keep_record, read_records
from gpusched.nodes.runtimes import runtime_for
from gpusched.nodes.runtimes.base import RECORD, AttemptRef, LaunchRequest
from gpusched.nodes.runtimes.shell import script
from gpusched.nodes.transport import TransportError
from tests.builders import ID, job, spec

HERE = LocalTransport("here")
READING = NodeReading(
    node="n", time=5.0, boot_id="b", gpus=tuple(Gpu(index=i, uuid=f"u{i}", energy_j=10.0 * i) for i in range(3))
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "gpusched-node" / "c" / "n"


def record(of: JobRecord, now: float = 7.0) -> str:
    return attempt_record(of, 0, "process", (1, 2), 6.0, READING, now).decode()


def keep(of: JobRecord) -> None:
    ref = AttemptRef("c", "n", container_name(of.id, of.attempt, 0))
    assert HERE.run(script(keep_record(ref, record(of))), 10).exit_code == 0


def test_from_the_launch_to_after_the_removal(root: Path) -> None:
    runtime = runtime_for("process")
    hostile = job(spec=spec(name="'\"$(touch /tmp/x)\n\\END"), nodes={"n": (1, 2)})
    request = LaunchRequest(
        name=container_name(ID, 1, 0), cluster_id="c", node="n", job_id=ID, attempt=1, rank=0, cores=1,
        memory_mib=64, command=("true",), record=record(hostile),
    )  # fmt: skip
    assert HERE.run(runtime.launch(request), 10).exit_code == 0
    found = read_records(HERE, "c", "n")
    assert [one.job for one in found.live] == [hostile]
    assert (found.ended, found.unknown) == ([], [])
    assert [(gpu.index, gpu.energy_j) for gpu in found.live[0].gpus] == [(1, 10.0), (2, 20.0)]
    ended = msgspec.structs.replace(hostile, state=JobState.COMPLETED, exit_code=0)
    removal = runtime.remove(request.ref)
    keep(ended)
    assert HERE.run(removal, 30).exit_code == 0
    assert read_records(HERE, "c", "n") == ([], [msgspec.json.decode(record(ended), type=AttemptRecord)], [], 0)
    assert (root / "ended").stat().st_mode & 0o077 == 0


def test_the_highest_term_that_a_node_has_seen(root: Path) -> None:
    for term in (1_900_000_000, 3):
        with suppress(TransportError):
            FencedTransport(HERE, "c", "n", term).claim(10.0)
    assert read_records(HERE, "c", "n").term == 1_900_000_000
    (root / "term").write_text("damaged\n")
    assert read_records(HERE, "c", "n").term == 0


def test_only_the_last_days_are_kept(root: Path) -> None:
    today = int(time.time() // 86400)
    for day in (today - KEEP_DAYS, today - KEEP_DAYS + 1):
        (root / "ended" / str(day)).mkdir(parents=True)
    keep(job())
    assert today - KEEP_DAYS not in {int(day.name) for day in (root / "ended").iterdir()}
    assert len(list((root / "ended").iterdir())) == 2


def test_records_of_before_the_backup_are_not_read(root: Path) -> None:
    keep(job())
    assert len(read_records(HERE, "c", "n", time.time()).ended) == 1
    assert read_records(HERE, "c", "n", time.time() + 3 * 86400).ended == []


def test_a_node_without_room_is_cleaned_up_all_the_same(root: Path) -> None:
    root.mkdir(parents=True)
    (root / "ended").write_text("in the way")
    keep(job())
    assert read_records(HERE, "c", "n").ended == []


def test_damage_and_attempts_of_earlier_versions_are_named(root: Path) -> None:
    (root / "gpusched-old-1-0").mkdir(parents=True)
    (root / "ended" / "20000").mkdir(parents=True)
    (root / "ended" / "20000" / "gpusched-bad-1-0").write_text("{}\n")
    unknown = read_records(HERE, "c", "n").unknown
    assert len(unknown) == 2
    assert "gpusched-old-1-0" in unknown


def test_a_record_that_was_cut_off_hides_nothing_else(root: Path) -> None:
    """Of a disk that was full, or broke."""
    today = root / "ended" / str(int(time.time() // 86400))
    for folder in (root / "gpusched-a-1-0", today):
        folder.mkdir(parents=True)
    (root / "gpusched-a-1-0" / RECORD).write_text(record(job())[:50])
    keep(job())
    (root / "gpusched-b-1-0").mkdir()
    (root / "gpusched-b-1-0" / RECORD).write_text(record(job()))  # whole, without an end of its line
    (today / "gpusched-z-1-0").write_text(record(job())[:50])
    found = read_records(HERE, "c", "n")
    assert ([one.job for one in found.live], [one.job for one in found.ended]) == ([job()], [job()])
    assert [name.partition(" (")[0] for name in found.unknown] == ["an unreadable record"] * 2


def test_installations_are_found_by_what_they_left(root: Path) -> None:
    assert find_clusters(HERE, "n") == []
    keep(job())
    (root.parents[1] / "empty" / "n").mkdir(parents=True)
    (root.parents[1] / "other" / "m" / "gpusched-a-1-0").mkdir(parents=True)
    assert find_clusters(HERE, "n") == ["c"]


def test_an_answer_that_breaks_off_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(job())
    whole = HERE.run
    cut = msgspec.structs.replace
    monkeypatch.setattr(HERE, "run", lambda s, t: cut(r := whole(s, t), stdout=r.stdout[:-4]))
    with pytest.raises(TransportError):
        read_records(HERE, "c", "n")
