"""Where `recover` takes its backup from, and what it refuses."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from gpusched.cluster.base import NodeObservation
from gpusched.controller import leadership as leadership_module
from gpusched.controller import rebuilding
from gpusched.controller.leadership import leadership
from gpusched.controller.rebuilding import ask_nodes, rebuild
from gpusched.controller.recovery.settling import NodeEvidence
from gpusched.errors import GpuschedError
from gpusched.model.audit import audit_entry
from gpusched.model.events import Event
from gpusched.model.readings import NodeReading, ProbeFailure
from gpusched.model.resources import BackupSettings, Inventory, Node
from gpusched.nodes.records import NodeRecords
from gpusched.nodes.transport import TransportError
from gpusched.queue.audit import entries, last_number
from gpusched.queue.backup import make_backup
from gpusched.queue.clock import ANCHOR, Clock
from gpusched.queue.lease import LEASE, Superseded, claim, read_lease
from gpusched.queue.store import Store
from tests.controller.imagined import Host, inventory, reading_of

NOW = 1_800_000_000.0
SSH = '#!/bin/sh\n[ "$1 $2 $3" = "-o BatchMode=yes safe" ] && exec sh -c "$4"\n'
SCP = '#!/bin/sh\n[ "$1 $2 $3" = "-o BatchMode=yes -rpq" ] && exec cp -rp "${4#safe:}" "$5"\n'


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """Two backups of a state folder that is gone; the newer one is damaged."""
    state = tmp_path / "state"
    Store.create_or_open(state).close()
    for name in ("secrets/j", "logs/j/1.0.log"):
        (state / name).parent.mkdir(parents=True)
        (state / name).write_text(name)
        (state / name).chmod(0o600)
    settings = BackupSettings(to=str(tmp_path / "backups"))
    make_backup(state, settings, NOW)
    os.truncate(make_backup(state, settings, NOW + 60).path / "gpusched.db", 5000)
    state.rename(tmp_path / "lost")
    return tmp_path


@pytest.fixture
def remote(lost: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine the host "safe"."""
    (lost / "bin").mkdir()
    for name, text in (("ssh", SSH), ("scp", SCP)):
        (lost / "bin" / name).write_text(text)
        (lost / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{lost / 'bin'}:{os.environ['PATH']}")


def no_nodes(to: str = "") -> Inventory:
    settings = msgspec.structs.replace(inventory().settings, backup=BackupSettings(to=to))
    return msgspec.structs.replace(inventory(), partitions=(), settings=settings)


@pytest.mark.parametrize("source", ["{0}/backups", "safe:{0}/backups", "safe:{0}/backups/20270115T080000Z/", ""])
def test_the_newest_sound_backup_is_restored(lost: Path, remote: None, source: str) -> None:
    state = lost / "state"
    with rebuild(state, no_nodes(str(lost / "backups")), source.format(lost)) as rebuilt:
        assert (rebuilt.report.made, (state / "gpusched.db").exists()) == (NOW, False)
        rebuilt.commit()
    for name in ("secrets/j", "logs/j/1.0.log"):
        assert (state / name).read_text() == name
        assert (state / name).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in state.iterdir()) == ["controller.lock", "gpusched.db", LEASE, "logs", "secrets"]
    before, after = (Store.create_or_open(folder) for folder in (lost / "lost", state))
    assert after.meta("cluster_id") == before.meta("cluster_id")
    assert after.latest_event() >= 1_000_000, "no number of an event is used again"
    before.close()
    after.close()
    with pytest.raises(GpuschedError, match="nothing to recover"), rebuild(state, no_nodes(), source.format(lost)):
        pass


@pytest.mark.parametrize("source", ["{0}/backups", "safe:{0}/backups"])
@pytest.mark.parametrize(("now", "since"), [(NOW + 3599, 0.0), (NOW + 3600, NOW + 3600), (NOW + 9999, NOW + 3600)])
def test_recovery_takes_the_backup_with_the_latest_events_whatever_the_clock_was(
    lost: Path, remote: None, monkeypatch: pytest.MonkeyPatch, source: str, now: float, since: float
) -> None:
    """And where it was made in the future, as the clock says now, the nodes are asked for all that they keep."""
    settings, asked = BackupSettings(to=str(lost / "backups")), list[float]()
    make_backup(lost / "lost", settings, NOW + 7200)
    with contextlib.closing(Store.create_or_open(lost / "lost")) as store:
        store.append([Event(time=NOW, kind="clock_stepped")])
    make_backup(lost / "lost", settings, NOW + 3600)
    monkeypatch.setattr(rebuilding, "time", SimpleNamespace(time=lambda: now))
    monkeypatch.setattr(rebuilding, "ask_nodes", lambda *given: asked.append(given[-1]) or ({}, {}))
    with rebuild(lost / "state", no_nodes(), source.format(lost)) as rebuilt:
        assert (rebuilt.report.made, asked) == (NOW + 3600, [since])


@pytest.mark.parametrize(
    ("script", "said", "hint"),
    [
        ("echo no; echo Warning: x >&2; echo 'ssh: no route' >&2; echo >&2; exit 255", "ssh: ssh: no route", "--from"),
        ("exit 1", "ssh: it failed", "--from"), (None, "ssh is not installed here", "OpenSSH"),
    ],
)  # fmt: skip
def test_another_machine_that_cannot_be_asked(
    lost: Path, remote: None, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str, hint: str
) -> None:
    if script is None:
        monkeypatch.setenv("PATH", str(lost / "none"))
    else:
        (lost / "bin/ssh").write_text(f"#!/bin/sh\n{script}\n")
    with pytest.raises(GpuschedError) as raised, rebuild(lost / "state", no_nodes(), "safe:/backups"):
        pass
    assert raised.value.message == said
    assert hint in (raised.value.hint or "")


def test_the_next_controller_has_a_higher_term_than_any_node_has_seen(
    lost: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost machine's clock was ahead."""
    ahead = int(time.time()) + 3600
    evidence = NodeEvidence(reading_of(Host("n0"), NOW), NodeRecords([], [], [], ahead))
    monkeypatch.setattr(rebuilding, "ask_nodes", lambda *_: ({"n0": evidence}, {}))
    with rebuild(lost / "state", inventory(), str(lost / "backups")) as rebuilt:
        rebuilt.commit()
    with leadership(lost / "state") as leads:
        assert leads.term == ahead + 1


def test_the_next_controller_moves_no_time_that_was_added(tmp_path: Path) -> None:
    """The backup was made while the clock was an hour behind."""
    with contextlib.closing(Store.create_or_open(tmp_path / "state")) as store:
        store.set_meta(ANCHOR, Clock(lambda: time.time() - 3600).anchor())
    make_backup(tmp_path / "state", BackupSettings(to=str(tmp_path / "backups")), NOW)
    with rebuild(tmp_path / "new", no_nodes(), str(tmp_path / "backups")) as rebuilt:
        rebuilt.commit()
    with contextlib.closing(Store.create_or_open(tmp_path / "new")) as store:
        clock = Clock()
        clock.resume(store.meta(ANCHOR), 0.0)
        assert clock.stepped() == 0.0


def test_without_a_usable_backup_nothing_is_done(lost: Path) -> None:
    for source, said in (("", "names no folder"), (str(lost / "none"), "no usable"), (None, "no node that answers")):
        with pytest.raises(GpuschedError, match=said), rebuild(lost / "state", no_nodes(), source):
            pass
    assert sorted(path.name for path in (lost / "state").iterdir()) == ["controller.lock", LEASE]


def test_the_next_term_is_higher_than_any_a_node_has_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backup and lease are of one old term, as in a copy of the whole folder; later ones were given since."""
    state, settings = tmp_path / "state", BackupSettings(to=str(tmp_path / "backups"))
    with leadership(state) as old:
        Store.create_or_open(state, term=old.term).close()
        make_backup(state, settings, NOW)
    seen_by_nodes = old.term + 3600
    with (state / "gpusched.db").open("r+b") as file:
        file.seek(-4096, os.SEEK_END)  # its last page: the term can still be read
        file.write(bytes(4096))
    with rebuild(state, no_nodes(), settings.to) as rebuilt:
        rebuilt.commit()
    monkeypatch.setattr(leadership_module.time, "time", lambda: NOW)
    with leadership(state) as new:
        assert new.term == NOW > seen_by_nodes


@pytest.mark.parametrize("is_left", [False, True])
def test_the_audit_log_comes_back_and_has_each_entry_once(tmp_path: Path, is_left: bool) -> None:
    """Two entries are in the log, one of them in the store, too; a third is in the store only."""
    state, backups = tmp_path / "state", str(tmp_path / "backups")
    log = state / "audit" / "audit.jsonl"
    with contextlib.closing(Store.create_or_open(state)) as store:
        for name in ("first", "second", "third"):
            store.add_audit(audit_entry(NOW, "h", (0, "root"), "drain", (name,)))
        log.parent.mkdir()
        log.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in store.audit_entries(0, 2)))
        store.forget_audit(1)
    make_backup(state, BackupSettings(to=backups), NOW)
    if is_left:  # it is full since, and has another name
        log.rename(log.with_name(f"audit-{2:015d}.jsonl"))
        (state / "gpusched.db").unlink()
    else:
        shutil.rmtree(state)
    with rebuild(state, no_nodes(), backups) as rebuilt:
        rebuilt.commit()
    with contextlib.closing(Store.create_or_open(state)) as store:
        assert [entry.subject for entry in entries(state, store)] == [("first",), ("second",), ("third",)]
        store.number_audit_from(last_number(state))
        store.add_audit(audit_entry(NOW, "h", (0, "root"), "drain", ("later",)))
        assert [entry.subject[0] for entry in entries(state, store)] == ["first", "second", "third", "later"]


def test_no_standby_takes_over_meanwhile_and_nothing_is_put_in_place_if_one_did(lost: Path) -> None:
    state = lost / "state"
    with rebuild(state, no_nodes(), str(lost / "backups")) as rebuilt:
        lease = read_lease(state)
        assert lease is not None
        assert (lease.released, lease.is_alive_here()) == (False, True), "renewed, so that standbys wait"
        claim(state, lease.term + 1)
        with pytest.raises(Superseded):
            rebuilt.commit()
    assert not (state / "gpusched.db").exists()


def test_an_emptied_database_is_no_sound_one(lost: Path) -> None:
    state = lost / "state"
    state.mkdir()
    (state / "gpusched.db").touch()
    with rebuild(state, no_nodes(), str(lost / "backups")) as rebuilt:
        rebuilt.commit()
    with pytest.raises(GpuschedError, match="is in order"), rebuild(state, no_nodes(), str(lost / "backups")):
        pass


def test_commands_that_wait_are_counted_once_whether_in_the_backup_or_here(lost: Path) -> None:
    (kept,) = (lost / "backups").glob("20270115T080000Z")
    for folder, names in ((kept / "inbox/new", ("a", "b")), (lost / "state/inbox/new", ("b", "c"))):
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            (folder / name).touch()
    with rebuild(lost / "state", no_nodes(), str(lost / "backups")) as rebuilt:
        assert (rebuilt.report.backup, rebuilt.report.commands) == (str(kept), 3)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes to which there are connections now."""
    opened: list[str] = []

    def connect(node: Node, _: object) -> SimpleNamespace:
        if node.name == "n1":
            raise TransportError("timeout", "n1: no answer")
        opened.append(node.name)
        return SimpleNamespace(close=lambda: opened.remove(node.name))

    monkeypatch.setattr(rebuilding, "open_transport", connect)
    return opened


@pytest.mark.parametrize(
    ("has", "named", "found"),
    [
        ({"n0": ["c"]}, "", "c"), ({"n0": ["c"], "n2": ["c"]}, "", "c"), ({"n0": ["c"], "n1": ["d"]}, "", "c"),
        ({"n0": ["c"]}, "e", "e"),
        ({}, "", "no node that answers has jobs of an installation"), ({"n1": ["c"]}, "", "no node that answers"),
        ({"n2": ["c", "d"], "n0": ["d"]}, "", "nodes have jobs of several installations (c: n2; d: n0, n2)"),
    ],
)  # fmt: skip
def test_without_a_backup_the_installation_is_the_only_one_that_nodes_have_jobs_of(
    tmp_path: Path, reached: list[str], monkeypatch: pytest.MonkeyPatch, has: dict[str, list[str]], named: str,
    found: str,
) -> None:  # fmt: skip
    def clusters(_: object, node: str) -> list[str]:
        assert node in reached
        return has.get(node, [])

    monkeypatch.setattr(rebuilding, "find_clusters", clusters)
    monkeypatch.setattr(rebuilding, "ask_nodes", lambda *_: ({}, {}))
    ends = pytest.raises(GpuschedError, match=re.escape(found)) if " " in found else contextlib.nullcontext()
    with ends, rebuild(tmp_path / "state", inventory(), None, named) as rebuilt:
        rebuilt.commit()
        with contextlib.closing(Store.create_or_open(tmp_path / "state")) as store:
            assert store.meta("cluster_id") == found
        assert (rebuilt.report.backup, rebuilt.report.made, rebuilt.report.commands) == ("", None, 0)
    assert reached == []


def test_what_is_asked_of_nodes_and_why_others_are_silent(
    tmp_path: Path, reached: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = inventory(nodes=6)
    kept = NodeRecords([], [], [], 7)
    readings = {
        "n0": reading_of(Host("n0"), NOW),
        "n1": reading_of(Host("n1"), NOW),  # and then it does not answer
        "n3": ProbeFailure(node="n3", time=NOW, kind="timeout", reason="n3: asleep"),
        "n4": NodeReading(node="n4", time=NOW, containers=None, runtime_error="podman hangs"),
        "n5": NodeReading(node="n5", time=NOW, containers=None),
    }
    closed, patience = [], []

    class Observer:
        def __init__(self, *given: object) -> None:
            assert given == (declared, "c", tmp_path)

        def observe(self, nodes: object, patience_s: float) -> dict[str, NodeObservation]:
            assert nodes == declared.nodes
            patience.append(patience_s)
            return {name: NodeObservation(began=NOW, result=result) for name, result in readings.items()}

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(rebuilding, "SshCluster", Observer)
    monkeypatch.setattr(rebuilding, "read_records", lambda _, *asked: kept if asked == ("c", "n0", 5.0) else None)
    found, silent = ask_nodes(declared, "c", tmp_path, 5.0)
    assert found == {"n0": NodeEvidence(readings["n0"], kept)}
    assert silent == {
        "n1": "n1: no answer", "n2": "no answer", "n3": "n3: asleep", "n4": "podman hangs",
        "n5": "its containers cannot be listed",
    }  # fmt: skip
    assert (closed, reached) == ([True], [])
    assert patience == [declared.settings.probe_timeout_s + declared.settings.connect_timeout_s]
