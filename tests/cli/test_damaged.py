"""Commands on a database with garbage somewhere: one clear line, whatever it is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gpusched.cli.main import run
from gpusched.model.jobs import JobState
from tests.controller.applying import InboxWorld

INVENTORY = """\
partitions:
  p:
    defaults: {gpus: 4, cores: 16, memory: 64G, runtime: podman, transport: local}
    nodes: [{name: n0}]
"""


def test_garbage_anywhere_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = InboxWorld(tmp_path / "state")
    for state in ("RUNNING", "PENDING", "COMPLETED"):
        job = world.submit(name=state)
        world.put(job, JobState(state))
    world.store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    world.store.close()
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    monkeypatch.setenv("GPUSCHED_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(tmp_path / "inventory.yaml"))
    path = tmp_path / "state" / "gpusched.db"
    good, generator, refused = path.read_bytes(), random.Random(5), 0
    used = [at for at in range(100, len(good)) if good[at]]
    kinds = [good.replace(b"CREATE TABLE jobs", b"CREATE TABLE j\xa2bs"), good[: len(good) // 2]]
    for _ in range(6):
        content = bytearray(good)
        for at in generator.sample(used, 3):
            content[at] = generator.randrange(256)
        kinds.append(bytes(content))
    for content in kinds:
        path.write_bytes(content)
        for words in (["status"], ["show", job]):
            code = run(words)
            out, err = capsys.readouterr()
            assert "internal error" not in out + err
            if code:
                refused += 1
                assert (code in (1, 2), err.count("\n")) == (True, 1), err
    assert refused >= 4, "a schema that is no text, and half a file"
