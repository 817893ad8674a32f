"""Figures that the page computes itself: sums of usage, and the plan of the next hours."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from benchmarks import web as made
from gpusched.client.context import Client
from gpusched.config.inventory import load_inventory
from gpusched.errors import GpuschedError
from gpusched.model.idle import IdleState
from gpusched.model.jobs import ENDED
from gpusched.queue.store import Reader, Store, UsageRow
from gpusched.web import details
from gpusched.web.background import is_due
from gpusched.web.details import plain_text
from gpusched.web.forecast import forecast
from gpusched.web.usage import DAY_S, HOUR_S, UsageStats
from tests.builders import job

NOW = 1_795_000_000.0


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("site")
    made.site(folder, 6, 60, seed=1, now=NOW)
    found = Reader.open(folder / "state")
    assert found is not None
    return found


def test_the_plan_gives_no_gpu_twice(reader: Reader) -> None:
    """At every moment no node has more GPUs promised than it has, what runs counted until its expected end."""
    folder = Path(reader._db.execute("PRAGMA database_list").fetchone()[2]).parent.parent
    found = forecast(reader, load_inventory(folder / "inventory.yaml"), NOW)
    active, pending = {j.id: j for j in reader.active()}, {j.id: j for j in reader.pending()}
    held: dict[str, list[tuple[float, float, int]]] = {}
    for job_id, end in found["ends"].items():
        assert end >= NOW - 1
        for part in active[job_id].allocation.parts:  # type: ignore[union-attr]
            held.setdefault(part.node, []).append((NOW, end, len(part.gpus)))
    planned = {job_id: row for job_id, row in found["jobs"].items() if len(row) == 6}
    assert len(planned) > 20
    for job_id, (_, low, high, start, end, nodes) in planned.items():
        spec = pending[job_id].spec
        assert len(nodes) == spec.nodes
        assert start >= NOW - 1
        assert high is None or low <= high
        assert 0 < end - start <= spec.time_limit_s + 1
        for node in nodes:
            held.setdefault(node, []).append((start, end, spec.gpus_per_node))
    for node, spans in held.items():
        for at in {s for s, _, _ in spans}:
            assert sum(gpus for s, e, gpus in spans if s <= at < e - 1) <= 8, node
    assert any(row[3] > NOW + 60 for row in planned.values())


def test_usage_adds_up(tmp_path: Path) -> None:
    """Against sums in Python; asked again later, with rows that have grown meanwhile."""
    rng, store, rows = random.Random(2), Store.create_or_open(tmp_path), []
    used, reader = UsageStats(), Reader.open(tmp_path)
    assert reader is not None
    for step in range(4):
        now = NOW + step * 1500
        for bucket in range(int(NOW) // 300 * 300 - 3 * DAY_S, int(now), 300):
            if bucket > now - 1800 or (step == 0 and rng.random() < 0.3):
                job, user = rng.choice((("a", "ann"), ("b", "bob"), ("", "")))
                rows.append(UsageRow(
                    bucket=bucket, node=f"n{rng.randrange(3)}", job_id=job, user=user, partition="p",
                    gpu_s=rng.random() * 300, energy_j=rng.random() * 9e4, util_s=5.0, util_known_s=10.0,
                ))  # fmt: skip
                with store.transaction():
                    store.add_usage([rows[-1]])
        found = used.figures(reader, now)
        hours = {int(p[0]): p for p in found["hours"]}
        for at, point in hours.items():
            own = [r for r in rows if at <= r.bucket < at + HOUR_S]
            assert point[1] == pytest.approx(sum(r.gpu_s for r in own if r.user) / 3600, abs=0.006)
            assert point[2] == pytest.approx(sum(r.gpu_s for r in own) / 3600, abs=0.006)
            elapsed_s = min(HOUR_S, now - at)  # the hour that is not over has the power of its time so far
            kw = sum(r.energy_j for r in own) / elapsed_s / 1000
            assert point[4] == (None if elapsed_s < 300 else pytest.approx(kw, abs=0.001))
        assert sum(p[2] for p in hours.values()) == pytest.approx(sum(r.gpu_s for r in rows) / 3600, abs=0.5)
        of = {u["user"]: u["gpu_hours"] for u in found["users"]["14"]}
        assert of["ann"] == pytest.approx(sum(r.gpu_s for r in rows if r.user == "ann") / 3600, abs=0.01)
        assert set(of) == {"ann", "bob"}
    store.close()


def test_usage_of_hours_in_which_nothing_could_be_read_comes_later(tmp_path: Path) -> None:
    store, used, begin = Store.create_or_open(tmp_path), UsageStats(), int(NOW) // DAY_S * DAY_S
    now = begin + 9 * HOUR_S + 600
    for until in (now, now + 5 * HOUR_S):  # in between the disk was gone, say
        store.add_usage(
            UsageRow(bucket=bucket, node="n", job_id="a", user="ann", partition="p", gpu_s=2400.0)
            for bucket in range(until - 5 * HOUR_S, until, 300)
        )
        found = used.figures(store, until)
    assert [hours for _, hours, *_ in found["hours"]] == pytest.approx([6.67, *[8.0] * 9, 1.33], abs=0.01)
    assert {round(hours, 2) for _, hours, *_ in found["fine"]} == {0.67}
    assert len(found["fine"]) == 120
    store.close()


def test_a_users_last_day_is_no_longer_than_a_day(tmp_path: Path) -> None:
    store, now = Store.create_or_open(tmp_path), int(NOW) // HOUR_S * HOUR_S + 3000
    store.add_usage(
        UsageRow(bucket=bucket, node="n", job_id="a", user="ann", partition="p", gpu_s=2400.0)
        for bucket in range(now - 9 * DAY_S, now, 300)
    )
    found = UsageStats().figures(store, now)
    assert found["users"]["1"][0]["gpu_hours"] == 8 * 24
    assert found["users"]["7"][0]["gpu_hours"] <= 8 * 24 * 7
    store.close()


def test_nothing_measured_is_not_zero(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path)
    bucket = int(NOW) // 3600 * 3600 - 3600
    with store.transaction():
        store.add_usage([UsageRow(
            bucket=bucket, node="n", job_id="a", user="ann", partition="p", gpu_s=300.0, energy_unknown_s=300.0
        )])  # fmt: skip
    store.close()
    reader = Reader.open(tmp_path)
    assert reader is not None
    (point,) = UsageStats().figures(reader, NOW)["hours"]
    assert point == [bucket, 0.08, 0.08, None, None]


def test_idle_gpus_held_now_and_the_action_on_them(tmp_path: Path) -> None:
    store = Store.create_or_open(tmp_path)
    rule = IdleState(since=NOW - 1800, below=0.05, then="cancel", at=NOW + 600, warned_at=NOW - 60)
    held = {"start_time": NOW - 3600, "nodes": {"n": (0,)}}
    store.put_jobs([job("busy", **held), job("idle", idle=rule, user="ann", **held)])
    now = int(NOW) // 300 * 300
    store.add_usage(
        UsageRow(
            bucket=now - 300 * n, node="n", job_id=name, user="ann", partition="p", gpu_s=300.0, util_known_s=300.0,
            idle_s=300.0 if name == "idle" else 0.0,
        )
        for n in range(1, 7) for name in ("busy", "idle")
    )  # fmt: skip
    (row,) = UsageStats().figures(store, float(now))["idle"]
    assert (row["job"], row["user"], row["gpus"], row["idle_gpus"], row["since"]) == ("idle", "ann", 1, 1, now - 1800)
    assert "to be cancelled at" in row["rule"]
    store.close()


def test_one_viewers_reading_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a node does not answer, and one viewer has many pages of jobs there open."""
    ended, reading = threading.Event(), threading.Semaphore(0)

    def hang(*_: object) -> None:
        reading.release()
        ended.wait()

    def read(viewer: str) -> str:
        return details.log_tail(Client(), job(), 0, None, viewer)

    monkeypatch.setattr(details, "show_log", hang)
    monkeypatch.setattr(details, "_SLOT_TIMEOUT_S", 0.1)
    hung = [threading.Thread(target=read, args=("ann",)) for _ in range(2)]
    for thread in hung:
        thread.start()
        reading.acquire()
    with pytest.raises(GpuschedError, match="too many logs are being read"):
        read("ann")
    monkeypatch.setattr(details, "show_log", lambda *_: None)
    assert read("bob") == ""
    ended.set()
    for thread in hung:
        thread.join()
    assert read("ann") == ""


def test_output_without_what_steers_terminals() -> None:
    said = b"\x1b]0;title\x07a\x1b[1;31mred\x1b[0m\x08\x00\n10%\r50%\r100%\nbad \xff\n\x1b(B\x1bM"
    assert plain_text(said) == "ared\n100%\nbad �\n"
    assert plain_text(b"10%\r50%\r\n") == "50%\n"


def test_slow_figures_do_not_stand_still_while_nothing_changes() -> None:
    late = [(-1.0, 3, 2), (0.0, 3, 2), (0.0, 3, 3), (299.0, 3, 3), (300.0, 3, 3), (1e9, 0, 0)]
    assert [is_due(*one) for one in late] == [False, True, False, False, True, False]


def test_ended_jobs_of_a_day_are_shown(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpusched.web.feed import shown_jobs

    state = Path(reader._db.execute("PRAGMA database_list").fetchone()[2]).parent
    monkeypatch.setenv("GPUSCHED_STATE", str(state))
    client = Client()
    found = {job.id for job in shown_jobs(client, NOW) if job.state in ENDED}
    wanted = {j.id for j in reader.jobs(states=ENDED) if (j.end_time or 0) > NOW - DAY_S}
    assert found == wanted
    assert wanted
    later = {job.id for job in shown_jobs(client, NOW + DAY_S / 2) if job.state in ENDED}
    assert later < found
