"""The same workload on real nodes and in the simulator: same nodes, same order, same start times.

Both decide with the same passes; this is the test that the world around them is the same, too: queues, dependencies,
gangs, what a limit is taken for, what is free when. The simulator is given what the controller was given, as it saw it:
when each job came into its queue and how long it held its nodes (a start and the noticing of its end
included, which no simulator can know). Every start and every node has to come out of that.

A job that is taken up in a cycle is decided on at that cycle's end, some hundred milliseconds later (seconds on a busy
machine), so arrivals count from that decision; the controller of this test writes down when it decides. Apart from that
the clocks are the same, so decisions agree to a microsecond on any machine, however slow. Nodes get a minute to answer:
one that is taken to be down is no part of the claim. Time limits are minutes apart, so that seconds of starting up
change no comparison of limits.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from gpusched.config.inventory import load_inventory
from gpusched.model.jobs import ENDED, JobRecord
from gpusched.sim.policies import policy_by_name
from gpusched.sim.pool import Pool
from gpusched.sim.replay import replay
from gpusched.sim.result import START, ReplayResult
from gpusched.traces.readers.history import trace_of
from gpusched.traces.slicing import select
from gpusched.traces.trace import Trace
from tests.e2e.conftest import Cluster
from tests.e2e.decisions import TIMER
from tests.testbed import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.processes]

POLICIES = {"A100": "sjf", "V100": "easy"}
FILES = Path(__file__).parents[2] / "gpusched" / "data" / "policies"
CLOSE_S = 1e-5

# GPUs, seconds, time limit, and what it waits for: a dependency's kind and the number of the job in this list.
# 12 and 16 GPUs are gangs over both nodes. A limit in seconds ends the job; "!" fails it.
EASY_WORK = """
 4 4.1 60m | 6 2.3 50m | 2 3.2 90m | 16 1.7 30m | 2 1.2 5m | 4 2.6 2h | 8 1.8 22m | 1 1.5 10m | 12 2.9 45m
 4 1.9 3h | 0 3.7 25m | 2 2.2 15m | 6 90 3s | 3 1.4 20m afterok:0 | 16 1.1 30m | 1 1.3! 35m | 5 2.4 40m
 2 1.3 5m | 8 2.7 70m | 1 1.6 15m afternotok:15 | 7 2.1 55m | 12 1.8 10m afterany:12 | 4 3.4 80m
 2 1.2 12m afterok:8 | 1 2.5 4h | 16 1.4 18m
""".replace("\n", "|")
SJF_WORK = """
 4 2.2 95m | 8 1.9 40m | 2 3.9 60m | 16 1.3 20m | 7 1.1 5m | 6 2.7 2h | 2 90 2s | 8 3.1 25m | 12 1.5 3h
 1 2.4 15m | 6 1.8 50m | 1 3.3 110m | 4 1.6 10m afterok:4 | 16 1.2 4h | 2 2.9 30m | 0 1.4 35m | 7 2.1 45m
 1 1.6! 12m | 8 90 4s | 2 1.7 55m afternotok:17 | 6 2.3 70m | 12 2.6 18m afterany:6 | 3 1.5 80m | 1 2.8 65m
""".replace("\n", "|")
EARLY = 14  # of each partition are queued before the controller begins: a deep queue in one cycle


class Submission(NamedTuple):
    """One line of the workload."""

    partition: str
    gpus: int
    script: str
    limit: str
    dependency: str = ""


def workload() -> list[Submission]:
    """The two partitions' jobs by turns; dependencies name places in this list."""
    lists = []
    for partition, text in (("A100", SJF_WORK), ("V100", EASY_WORK)):
        lists.append([(partition, *words) for item in text.split("|") if (words := item.split())])
    jobs = []
    for number in range(max(map(len, lists))):
        for words in (w[number] for w in lists if number < len(w)):
            partition, gpus, seconds, limit, *dependency = words
            script = f"sleep {seconds[:-1]}; exit 1" if seconds.endswith("!") else f"exec sleep {seconds}"
            jobs.append(Submission(partition, int(gpus), script, limit, *dependency))
    return jobs


def submit(cluster: Cluster, jobs: list[Submission], ids: dict[str, list[str]]) -> None:
    """Queue them in order; ``ids``: partition -> ids so far."""
    for job in jobs:
        own = ids.setdefault(job.partition, [])
        more = []
        if job.dependency:
            kind, _, number = job.dependency.partition(":")
            more = ["--dependency", f"{kind}:{own[int(number)]}"]
        cpus = str(max(1, job.gpus // (2 if job.gpus > 8 else 1)))
        size = ["--gpus", str(job.gpus), "--mem", "64M", *(["--cpus", cpus] if job.gpus <= 8 else [])]
        own.append(cluster.sh(job.script, "-p", job.partition, *size, "-t", job.limit, *more))


class Lived(NamedTuple):
    """The outcome of the workload, by the controller's clock (Unix seconds).

    Attributes:
        jobs: By id. queued, started, ended: When a cycle took it up, decided to start it, found it ended.
        nodes: Where, in order of rank. order: Ids in the order of their starts.
    """

    jobs: dict[str, JobRecord]
    queued: dict[str, float]
    started: dict[str, float]
    ended: dict[str, float]
    nodes: dict[str, list[str]]
    order: list[str]
    trace: Trace


def lived(cluster: Cluster) -> Lived:
    """Read from the store."""
    with cluster.reader() as reader:
        assert reader is not None
        events = [event for event in reader.events() if event.job_id]
        found = Lived({j.id: j for j in reader.jobs()}, {}, {}, {}, {}, [], trace_of(reader, name="the house"))
    for event in events:
        if event.kind == "starting":
            found.order.append(event.job_id)
            found.nodes[event.job_id] = list(event.data["nodes"])
        times = {"submitted": found.queued, "starting": found.started, "ended": found.ended}.get(event.kind)
        if times is not None:
            times[event.job_id] = event.time
    return found


def as_seen(live: Lived, partition: str, decisions: np.ndarray) -> Trace:
    """The partition's jobs as the controller saw them come and go; ``decisions``: when it decided (Unix seconds)."""
    rows = [row for row, job in enumerate(live.trace.ids) if live.jobs[job].spec.partition == partition]
    trace = select(live.trace, np.array(rows, np.int64))
    epoch = float(trace.epoch or 0)
    queued, ended = (
        [exact(decisions[np.searchsorted(decisions, times[job])], epoch) for job in trace.ids]
        for times in (live.queued, live.ended)
    )
    started = [exact(live.started[job], epoch) for job in trace.ids]
    return replace(trace, submit=np.array(queued), duration=np.array(ended) - started)


def exact(time: float, epoch: float) -> float:
    """Seconds since the epoch as a multiple of 2**-20, so that what ended in one cycle does so in the simulator."""
    return round((time - epoch) * 2**20) / 2**20


def simulated_order(result: ReplayResult) -> list[str]:
    """Ids in the order of their starts."""
    return [result.trace.ids[job] for job in result.events.subject[result.events.kind == START].tolist()]


def placed(result: ReplayResult, job: int) -> list[str]:
    """The names of a job's nodes in order of rank."""
    return [result.pool.names[node] for node in result.nodes_of(job).tolist()]


def jct_error(cluster: Cluster, live: Lived, folder: Path) -> float:
    """Mean relative error of the JCTs that ``gpusched replay`` finds from the store alone."""
    errors = []
    for partition, policy in POLICIES.items():
        out = folder / f"{partition}.csv"
        words = ["replay", "--vc", partition, "--policy", str(FILES / f"{policy}.yaml"), "--schedule-out", str(out)]
        (row,) = json.loads(cluster.cli(*words, "--since", "1h", "--json", timeout=300).stdout)
        first = min(j.submit_time for j in live.jobs.values() if j.spec.partition == partition)
        with out.open(newline="") as file:
            ends = {line["job"]: float(line["end"]) + first for line in csv.DictReader(file)}
        assert row["jobs"] == len(ends)
        for job, end in ends.items():
            measured = live.jobs[job]
            assert measured.end_time is not None
            errors.append(abs(end - measured.end_time) / (measured.end_time - measured.submit_time))
    assert len(errors) == len(live.jobs)
    return sum(errors) / len(errors)


def in_words(live: Lived, moved: dict[str, float], error: float) -> str:
    """The figures, for the log.

    The relative JCT error of the simulator that gets how long jobs hold their nodes; and that of a replay of the
    store, which knows how long they ran: of jobs this short, starting and noticing their ends is a large part.
    """
    jct = {job: live.ended[job] - live.jobs[job].submit_time for job in live.order}
    known = float(np.mean([late / jct[job] for job, late in moved.items()]))
    ran = dict(zip(live.trace.ids, live.trace.duration.tolist(), strict=True))
    beside = float(np.mean([live.ended[job] - live.started[job] - ran[job] for job in live.order]))
    return (
        f"{len(jct)} jobs, same nodes and order, starts at most {1000 * max(moved.values()):.2g} ms apart; "
        f"mean relative JCT error {known:.1e}; {100 * error:.0f} % in a replay of the store's run times, "
        f"to which starting and noticing the end add {beside:.1f} s on average"
    )


def test_the_simulator_decides_as_the_controller_did(
    stopped: Cluster, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    stopped.write_inventory(policies=POLICIES)
    jobs = workload()
    assert len(jobs) >= 40
    ids: dict[str, list[str]] = {}
    submit(stopped, jobs[: 2 * EARLY], ids)
    noted = tmp_path / "decisions"
    stopped.start_controller(program=("-c", TIMER), DECISIONS=str(noted))
    submit(stopped, jobs[2 * EARLY :], ids)

    def over() -> bool:
        return all((job := stopped.job(i)) is not None and job.state in ENDED for own in ids.values() for i in own)

    wait_until(over, 600, "the workload to be over")
    live = lived(stopped)
    states = [str(live.jobs[i].state) for own in ids.values() for i in own]
    assert {state: states.count(state) for state in set(states)} == {
        "COMPLETED": len(jobs) - 5, "TIMEOUT": 3, "FAILED": 2
    }  # fmt: skip
    assert len(live.order) == len(live.trace) == len(jobs)  # nothing was tried twice, nothing is left out
    assert sum(len(nodes) == 2 for nodes in live.nodes.values()) == sum(w.gpus > 8 for w in jobs)

    decisions = np.array([float(line) for line in noted.read_text().splitlines()])
    assert (np.diff(decisions) > 0).all()
    pool = Pool.of_inventory(load_inventory(stopped.inventory))
    moved: dict[str, float] = {}
    for partition, policy in POLICIES.items():
        trace, own = as_seen(live, partition, decisions), policy_by_name(str(FILES / f"{policy}.yaml"))
        result = replay(trace, pool, own)
        assert simulated_order(result) == [job for job in live.order if job in trace.ids]
        for row, job in enumerate(trace.ids):
            assert (job, placed(result, row)) == (job, live.nodes[job])
            moved[job] = abs(float(result.start[row]) + float(trace.epoch or 0) - live.started[job])
            assert moved[job] <= CLOSE_S, job
        # The workload distinguishes policies and placements.
        assert simulated_order(replay(trace, pool, "fifo")) != simulated_order(result)
        for place in ("first-fit", "spread"):
            assert replay(trace, pool, own, placement=place).part_nodes.tolist() != result.part_nodes.tolist()

    record_property("figure", "live against simulated: " + in_words(live, moved, jct_error(stopped, live, tmp_path)))
