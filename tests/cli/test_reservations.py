"""Reserving nodes by the command line: made, listed, changed, cancelled; refused; and what jobs say of it."""

from __future__ import annotations

import time

from gpusched.model.commands import Reserve
from gpusched.model.jobs import JobState
from gpusched.model.readings import Gpu, NodeReading, NodeState
from gpusched.queue.store import NodeRecord, Reader, Store
from tests.cli.conftest import Site

DAY = ("--from", "now+24h", "--for", "4h")


def test_a_maintenance_is_made_listed_changed_and_cancelled(site: Site) -> None:
    """Each takes effect once the controller has taken it up; the list shows it at once."""
    site.apply_inbox()
    made = site.call("maintenance", "dgx-1v-[1-2]", *DAY, "--name", "disks", "--reason", "new disks").ok()
    assert made.out.startswith("maintenance requested: disks, dgx-1v-[1-2], ")
    (command,) = site.commands()
    assert isinstance(command, Reserve)
    (row,) = site.call("reservations", "--json").ok().json
    site.apply_inbox()
    (applied,) = site.call("reservations", "--json").ok().json
    assert {k: v for k, v in applied.items() if k != "by"} == {k: v for k, v in row.items() if k != "by"}
    assert (row["name"], row["kind"], row["state"], row["gpus"]) == ("disks", "maintenance", "planned", 16)
    assert "new disks" in site.call("reservations").ok().out
    assert "reserved  maintenance disks in " in site.call("nodes", "dgx-1v-1").ok().out
    site.call("reservations", "change", "disks", "--for", "6h", "dgx-1v-1").ok()
    site.apply_inbox()
    (row,) = site.call("reservations", "--json").ok().json
    assert row["nodes"] == ["dgx-1v-1"]
    site.call("reservations", "cancel", "disks").ok()
    site.apply_inbox()
    assert site.call("reservations", "--json").ok().json == []
    assert site.call("reservations").ok().out == "no reservations\n"


def test_overlaps_are_refused_with_the_name(site: Site) -> None:
    """By the client, and by the controller where two came at once."""
    site.apply_inbox()
    site.call("reserve", "pc1", "--from", "now", "--for", "2h", "--users", "alice", "--name", "class").ok()
    refused = site.call("maintenance", "pc1", "pc2", "--from", "now+1h", "--for", "1h")
    assert refused.code == 2
    assert "node pc1 is already reserved (reservation class, " in refused.err
    assert "reservations change or cancel class" in refused.err
    site.call("maintenance", "pc1", "--from", "now+2h", "--for", "1h", "--name", "next").ok()
    site.apply_inbox()
    assert [row["name"] for row in site.call("reservations", "--json").json] == ["class", "next"]
    assert "already reserved" in site.call("reservations", "change", "class", "--for", "3h").err


def test_a_wrong_reservation_is_a_one_line_error(site: Site) -> None:
    """Each with what to do."""
    site.apply_inbox()
    for words, said in {
        ("maintenance", "pc1", "--from", "now"): "no end given",
        ("maintenance", "pc1", "--from", "soon", "--for", "1h"): "--from: found 'soon'",
        ("maintenance", "pc1", "--from", "now+2h", "--to", "now+1h"): "is not after --from",
        ("maintenance", "pc1", "--from", "2020-01-01", "--for", "1h"): "is in the past",
        ("maintenance", "pc9", "--for", "1h"): "there is no node 'pc9'",
        ("maintenance", "pc[", "--for", "1h"): "expected nodes such as",
        ("maintenance", "--for", "1h"): "no nodes given",
        ("maintenance", "pc1", "--for", "1h", "--name", "a b"): "one word",
        ("reserve", "pc1", "--for", "1h", "--users", "alice"): "needs a name",
        ("reserve", "pc1", "--for", "1h", "--name", "x"): "needs users or groups",
        ("reserve", "pc1", "--for", "1h", "--name", "x", "--groups", "lab"): "there is no group 'lab'",
        ("reserve", "--gpus", "99", "--for", "1h", "--name", "x", "--users", "a"): "--gpus 99",
        ("reserve", "pc1", "--gpus", "1", "--for", "1h", "--name", "x", "--users", "a"): "cannot be combined",
        ("reservations", "cancel", "nope"): "no current reservation 'nope'",
        ("reservations", "change", "nope", "--for", "1h"): "no current reservation 'nope'",
    }.items():
        refused = site.call(*words)
        assert (refused.code, refused.out) == (2, ""), words
        assert said in refused.err, refused.err
        assert refused.err.count("\n") == 1
    assert not site.commands()


def test_gpus_take_the_fewest_whole_nodes(site: Site) -> None:
    """Of these such as give least more, and rather some on which nothing runs past the begin."""
    site.apply_inbox()
    job = site.submit()
    site.apply_inbox()
    site.start(job, "dgx-1v-1")
    site.call("reserve", "--gpus", "8", "-p", "V100", *DAY, "--users", "a", "--name", "one").ok()
    site.call("reserve", "--gpus", "5", *DAY, "--users", "a", "--name", "two").ok()
    site.call("reserve", "--gpus", "3", "-p", "bare", *DAY, "--users", "a", "--name", "three").ok()
    found = {row["name"]: row["nodes"] for row in site.call("reservations", "--json").ok().json}
    assert found == {"one": ["dgx-1v-2"], "two": ["dgx-a100-1"], "three": ["pc1"]}


def test_running_jobs_that_last_into_it_are_named(site: Site) -> None:
    """By their limits; with who they are of, and until when."""
    site.apply_inbox()
    job = site.submit()
    site.apply_inbox()
    site.start(job)
    made = site.call("maintenance", "dgx-1v-1", "--from", "now+1h", "--for", "1h")
    assert f"job {job} of " in made.err
    assert "its time limit ends at" in made.err
    assert [row["late"] for row in site.call("reservations", "--json").json] == [[job]]
    later = site.call("maintenance", "dgx-1v-1", "--from", "now+73h", "--for", "1h", "--json").ok()
    assert later.json["late"] == []


def test_a_job_asks_for_a_reservation_and_is_refused_where_it_could_never_run(site: Site) -> None:
    """Not there, not for its user, too short; else it waits for it, and says so."""
    import getpass

    site.apply_inbox()
    me = getpass.getuser()
    site.call("reserve", "pc1", *DAY, "--users", me, "--name", "mine").ok()
    site.call("reserve", "pc2", *DAY, "--users", "alice", "--name", "hers").ok()
    store = Store.create_or_open(site.state)
    with store.transaction():
        for name in ("pc1", "pc2", "pc3"):
            gpus = tuple(Gpu(index=i, uuid=f"{name}-{i}") for i in range(4))
            reading = NodeReading(node=name, time=time.time(), source="nvml", gpus=gpus, containers=())
            store.put_nodes([NodeRecord(name=name, state=NodeState.IDLE, reading=reading)])
    store.close()
    submit = ("submit", "-p", "bare", "--gpus", "1")
    assert "no current reservation min" in site.call(*submit, "--reservation", "min", "--", "true").err
    assert "is for alice, not for" in site.call(*submit, "--reservation", "hers", "--", "true").err
    assert "lasts 4 h" in site.call(*submit, "-t", "5h", "--reservation", "mine", "--", "true").err
    job = site.call(*submit, "-t", "2h", "--reservation", "mine", "--json", "--", "true").ok().json["id"]
    other = site.call(*submit, "-t", "30h", "--nodelist", "pc1", "--json", "--", "true").ok().json["id"]
    site.apply_inbox()
    why = site.call("why", job, "--json").ok().json
    assert why["reason"] == "Reservation"
    assert why["message"].startswith("waits for reservation mine, which begins in ")
    why = site.call("why", other, "--json").ok().json
    assert why["reason"] == "ReqNodeNotAvail"
    assert why["message"].startswith("May be reserved for other job: mine in ")
    assert any("-t 23:" in step or "-t 1-00" in step for step in why["next_steps"])
    site.call("reservations", "cancel", "mine").ok()
    site.apply_inbox()
    why = site.call("why", job, "--json").ok().json
    assert (why["reason"], "no current reservation mine" in why["message"]) == ("Reservation", True)
    assert site.call("show", job, "--json").ok().json["state"] == JobState.PENDING


def test_a_begun_reservation_ends_when_cancelled_and_keeps_its_begin(site: Site) -> None:
    """What was stays on record, for replays."""
    site.apply_inbox()
    site.call("reserve", "pc1", "--for", "2h", "--users", "alice", "--name", "now").ok()
    site.apply_inbox()
    time.sleep(0.01)
    assert "has begun" in site.call("reservations", "change", "now", "--from", "now+1h").err
    site.call("reservations", "cancel", "now").ok()
    site.apply_inbox()
    reader = Reader.open(site.state)
    assert reader is not None
    assert reader.reservations(time.time()) == ()
    (one,) = reader.reservations(0.0)
    assert one.end - one.begin < 7200, "it was to last two hours"
    reader.close()
