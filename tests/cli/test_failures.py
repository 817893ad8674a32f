"""``gpusched nodes --failures``: which GPU fails more often than others."""

from __future__ import annotations

import random
import time

from gpusched.model.events import Event
from gpusched.model.healthchecks import CheckRecord
from gpusched.model.jobs import Allocation, JobState, NodeAllocation
from gpusched.queue.store import RunRecord, Store
from tests.builders import spec
from tests.cli.conftest import Site
from tests.queue.records import job as job_record

JOBS = 1500


def fill(store: Store, now: float) -> None:
    """Add ended jobs of 29 days; GPU 2 of pc1 fails three times as often, and one user's script nearly always."""
    rng = random.Random(1)
    jobs, events = [], []
    for number in range(JOBS):
        node, gpu, broken = f"pc{rng.randrange(3) + 1}", rng.randrange(4), rng.random() < 0.2
        fails = rng.random() < (0.9 if broken else 0.3 if (node, gpu) == ("pc1", 2) else 0.1)
        start, outcome = now - 29 * 86400 + number * 1600, JobState.FAILED if fails else JobState.COMPLETED
        part = NodeAllocation(rank=0, node=node, gpus=(gpu,), cores=1, memory_mib=1)
        one = job_record(
            f"{number:011d}", outcome, user="zoe" if broken else "ann", spec=spec(name="train"), submit_time=start,
            start_time=start, end_time=start + 900, ending=None, allocation=Allocation(f"{number:011d}", (part,)),
        )  # fmt: skip
        jobs.append(one)
        data = {"attempt": 1, "nodes": {node: [gpu]}}
        events.append(Event(time=start - 1, kind="starting", job_id=one.id, data=data))
        store.open_run(RunRecord(
            job_id=one.id, attempt=1, user=one.user, partition="bare", flavor=None, share=1, gpus=1, start_time=start,
            end_time=None, outcome=None, nodes={node: 1},
        ))  # fmt: skip
        store.close_run(one.id, 1, start + 900, outcome)
    store.put_jobs(jobs)
    store.append(events)


def test_a_flaky_gpu_is_named_with_its_confidence(site: Site) -> None:
    assert site.call("nodes", "--failures").ok().out.strip() == "no attempt has ended in the last 30 days"
    now = time.time()
    store = Store.create_or_open(site.state)
    with store.transaction():
        fill(store, now)
    store.set_meta("heartbeat", str(now))
    store.close()
    rows = site.call("nodes", "--failures", "--json").json
    assert len(rows) == 15
    assert [(row["node"], row["gpu"]) for row in rows if row["named"]] == [("pc1", 2)]
    first = rows[0]
    assert first["failed"] > 1.5 * first["expected"]
    assert first["p_value"] < first["corrected"] < 0.05
    assert sum(row["attempts"] for row in rows if row["gpu"] is None) == sum(
        row["attempts"] for row in rows if row["gpu"] is not None
    )
    out = " ".join(site.call("nodes", "--failures").out.split())
    assert "GPU 2 of pc1" in out
    assert "%" in out
    only = site.call("nodes", "--failures", "pc2", "--json").json
    assert {row["node"] for row in only} == {"pc2"}
    same = {(row["node"], row["gpu"]): row for row in rows}
    assert all(row == same[row["node"], row["gpu"]] for row in only), "compared with all nodes"


def test_checks_that_never_ran_are_listed_too(site: Site) -> None:
    assert site.call("nodes", "--checks").ok().out == "no node has health_checks in inventory.yaml\n"
    text = site.inventory.read_text()
    checks = "health_checks: [{name: disk, command: x, every: 1h}]"
    site.inventory.write_text(text.replace("{runtime: podman}", "{runtime: podman, " + checks + "}"))
    store = Store.create_or_open(site.state)
    bad = CheckRecord(
        node="pc2", check="disk", state="failed", exit_code=4, line="no \x1b[31mroom", since=1.0, ended=1.0
    )
    store.put_check_records([bad])
    store.close()
    rows = site.call("nodes", "--checks", "-p", "bare", "--json").json
    assert [(row["node"], row["state"], row["exit_code"]) for row in rows] == [
        ("pc1", None, None), ("pc2", "failed", 4), ("pc3", None, None)
    ]  # fmt: skip
    lines = site.call("nodes", "--checks", "-p", "bare").out.splitlines()
    assert "never ran" in lines[1]
    assert "\x1b" not in lines[2]
    assert lines[2].endswith("room (exit code 4)")
