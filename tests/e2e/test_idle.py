"""Jobs that hold idle GPUs, by the command line: warned, signalled, requeued, cancelled; never for missing figures."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusched.model.events import Event
from tests.e2e.conftest import GPUSCHED, Cluster
from tests.e2e.people import Screen
from tests.testbed import Testbed, wait_until

pytestmark = pytest.mark.slow

SETTINGS: dict[str, object] = {"tick": "500ms", "grace": "2s"}
AFTER_S = 5
RULE: dict[str, object] = {"after": f"{AFTER_S}s", "warn_before": "2s"}
KINDS = ("idle_warned", "idle_acted", "idle_ended", "preempted")


@pytest.fixture(scope="module")
def idle_cluster(testbed_session: Testbed) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="gpusched-e2e-", dir="/tmp"))
    cluster = Cluster(testbed_session, folder, ("A100",))
    cluster.runtime = "process"
    write(cluster, None)
    cluster.start_controller()
    yield cluster
    cluster.close()
    shutil.rmtree(folder)
    testbed_session.reset()


@pytest.fixture
def site(idle_cluster: Cluster) -> Iterator[Cluster]:
    yield idle_cluster
    idle_cluster.clear()
    use(idle_cluster, 0)
    declare(idle_cluster, None)


def write(cluster: Cluster, rule: dict[str, Any] | None, **settings: object) -> None:
    declared = SETTINGS | settings | ({} if rule is None else {"idle": RULE | rule})
    cluster.write_inventory(declared, leave_out=["dgx003"])  # to read a node twice a second is what these tests cost


def declare(cluster: Cluster, rule: dict[str, Any] | None) -> None:
    """Put a rule into force."""
    with cluster.reader() as reader:
        seen = reader.latest_event() if reader is not None else 0
    write(cluster, rule)

    def reloaded() -> bool:
        with cluster.reader() as reader:
            return reader is not None and bool(reader.events_after(seen, ["inventory_reloaded"], 1))

    wait_until(reloaded, 30, "the inventory to be in force")


def use(cluster: Cluster, percent: int | None, node: str = "dgx001") -> None:
    """Set what NVML reports of all GPUs of a node; None: nothing."""
    cluster.node(node).nvml_set({f"gpu{g}.util_gpu": "" if percent is None else percent for g in range(8)})


def start(cluster: Cluster, *options: str, script: str = "sleep 600") -> str:
    job = cluster.sh(script, "--gpus", "2", "--nodelist", "dgx001", *options)
    cluster.wait_state(job, "RUNNING")
    return job


def events(cluster: Cluster, job: str) -> list[Event]:
    with cluster.reader() as reader:
        assert reader is not None
        return [event for event in reader.events(job_id=job) if event.kind in KINDS]


def warned_and_acted_on(cluster: Cluster, job: str) -> tuple[Event, Event]:
    """The last two of all; where it is not read for long, as on a machine that stands still, its idle time ends."""
    *_, warned, acted = found = events(cluster, job)
    assert (warned.kind, acted.kind) == ("idle_warned", "idle_acted")
    assert [event.kind for event in found].count("idle_acted") == 1
    return warned, acted


def wait_event(cluster: Cluster, job: str, kind: str) -> Event:
    found = wait_until(lambda: next((e for e in events(cluster, job) if e.kind == kind), None), 60, f"{kind} of {job}")
    assert found is not None
    return found


def test_a_job_is_warned_in_every_place_and_cancelled_once(site: Cluster) -> None:
    declare(site, {"then": "cancel", "after": "601s", "warn_before": "10m"})
    job = start(site)
    wait_event(site, job, "idle_warned")
    (row,) = site.json("status", job)
    assert row["idle"]["then"] == "cancel"
    assert row["idle"]["below"] == 0.05
    assert "to be cancelled at" in re.sub(r"\s+", " ", site.cli("status", job, env={"COLUMNS": "200"}).stdout)
    assert "GPUs below 5% for" in site.cli("why", job).stdout
    shown = site.cli("show", job).stdout
    line = r"^idle: +GPUs below 5% for 0:\d\d:\d\d; to be cancelled at (\S+ )?\d\d:\d\d unless used$"
    assert re.search(line, shown, re.MULTILINE)
    declare(site, {"then": "cancel", "warn_before": "4s"})
    ended = site.wait_state(job, "CANCELLED")
    assert (ended.reason, ended.idle is not None) == ("IdleLimit", True)
    assert "its 2 GPUs have been below 5% utilization for" in site.cli("show", job).stdout
    assert site.json("show", job)["idle"] is None, "it is over"
    warned, acted = warned_and_acted_on(site, job)
    assert acted.time - warned.time >= 3.9


def test_busy_gpus_and_unknown_utilization_are_left_alone(site: Cluster) -> None:
    use(site, None)
    declare(site, {"then": "cancel", "after": "10m", "warn_before": "595s"})
    job = start(site)
    with site.reader() as reader:
        assert reader is not None
        read = reader.node_records()["dgx001"].last_seen
    assert read is not None

    def later(seconds: float) -> bool:
        with site.reader() as reader:
            assert reader is not None
            return (reader.node_records()["dgx001"].last_seen or 0.0) > read + seconds

    wait_until(lambda: later(1.5 * AFTER_S), 60, "readings without a figure")
    assert site.json("status", job)[0]["idle"] is None
    use(site, 90)
    wait_until(lambda: later(3 * AFTER_S), 60, "readings of a busy GPU")
    assert (site.json("status", job)[0]["state"], events(site, job)) == ("RUNNING", [])
    use(site, 0)
    wait_event(site, job, "idle_warned")
    use(site, 50)
    wait_event(site, job, "idle_ended")
    assert site.json("status", job)[0]["state"] == "RUNNING"


def test_a_signal_is_heard_once_and_a_requeue_is_a_preemption(site: Cluster) -> None:
    declare(site, {"then": "signal"})
    job = start(site, script="trap 'echo heard USR1' USR1; while :; do sleep 0.2; done")
    wait_event(site, job, "idle_acted")
    wait_until(lambda: "heard USR1" in site.cli("logs", job).stdout, 30, "the signal")
    declare(site, {"then": "requeue"})
    other = start(site, "--preemptible", script="trap 'exit 0' TERM; while :; do sleep 0.2; done")
    wait_event(site, other, "preempted")
    again = wait_until(lambda: (j := site.job(other)) and j.attempt >= 2 and j, 60, "its second attempt")
    assert again is not None
    assert site.json("status", other)[0]["preemptions"] >= 1
    assert again.retries == 0
    assert "by idle" in site.cli("show", other).stdout
    assert site.cli("logs", job).stdout.count("heard USR1") == 1


def test_sessions_and_exempt_jobs(site: Cluster) -> None:
    rule = {"then": "cancel", "warn_before": "4s", "exempt": {"names": ["serve-*"]}, "sessions": {"after": "6s"}}
    declare(site, rule)
    served = start(site, "-J", "serve-1")
    words = ["run", "--gpus", "1", "--nodelist", "dgx001", "--pty", "sh"]
    person = Screen(site, [*GPUSCHED, *words], rows=31, columns=140)
    try:
        person.wait_for("cancelled at")  # "to be", unless that is now
        person.wait_for("IdleLimit")
    finally:
        person.close()
    assert (site.json("status", served)[0]["state"], events(site, served)) == ("RUNNING", [])


def test_a_killed_controller_goes_on_where_it_was(site: Cluster) -> None:
    declare(site, {"then": "cancel", "after": "12s"})
    job = start(site)

    def since() -> float | None:
        found = site.job(job)
        return found.idle.since if found is not None and found.idle is not None else None

    began = wait_until(since, 30, "the begin of the idle time")
    site.kill_controller()
    write(site, {"then": "cancel", "after": "12s"}, tick="10s")  # three of them may pass without a reading
    site.start_controller()
    assert since() == began
    declare(site, {"then": "cancel", "after": "12s"})
    site.wait_state(job, "CANCELLED")
    _, acted = warned_and_acted_on(site, job)
    found = site.job(job)
    assert found is not None
    assert found.idle is not None
    assert acted.time - found.idle.since >= 12
    assert acted.data["idle_s"] == pytest.approx(acted.time - found.idle.since, abs=1)
