"""Take-overs by a standby controller under load: lost jobs, jobs that ran twice, and seconds until it works.

    python -m benchmarks.takeover [--times 100] [--seed 1] [--takeover-after 15]

Needs what the testbed needs. Two nodes of eight GPUs, plain processes; a job every second, of which each writes a line
when it begins. At a drawn moment the active controller is killed (kill -9) or frozen (SIGSTOP), in turn; a frozen one
is continued after the take-over, or while the standby starts, and must end by itself. Then a new standby is started.
The time is from the signal to the end of the standby's first cycle.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from gpusched.errors import GpuschedError
from gpusched.model import ids
from gpusched.model.commands import Submit
from gpusched.model.jobs import ENDED, JobSpec
from gpusched.queue.inbox import Inbox
from gpusched.queue.lease import STANDBYS, TERM
from tests import commands
from tests.e2e.conftest import SETTINGS, Cluster
from tests.testbed import Testbed, wait_until

WAIT_S = 300.0


class Load(threading.Thread):
    """Submits a short job every ``every_s`` until `finish`."""

    def __init__(self, cluster: Cluster, every_s: float) -> None:
        super().__init__(daemon=True)
        self._inbox, self._every_s, self._stop_it = Inbox(cluster.state), every_s, threading.Event()
        self.ledger = cluster.folder / "ledger"
        self.ledger.touch()
        self.submitted: list[str] = []

    def run(self) -> None:
        """Submit."""
        while not self._stop_it.wait(self._every_s):
            now = time.time()
            job = ids.mint(now)
            seconds = 0.5 + 3 * (len(self.submitted) % 4)  # some outlast a take-over
            spec = JobSpec(
                name="load", partition="A100", nodes=1, gpus_per_node=1, cores_per_node=1, memory_mib_per_node=64,
                time_limit_s=3600, command=("sh", "-c", f"echo {job} >>{self.ledger}; sleep {seconds}"),
            )  # fmt: skip
            self._inbox.deliver(Submit(time=now, id=job, spec=spec))
            self.submitted.append(job)

    def finish(self) -> None:
        """End it."""
        self._stop_it.set()
        self.join()


def start(cluster: Cluster, after_s: int) -> commands.Process:
    """Start a standby; its log is the cluster's."""
    with (cluster.folder / "controller.log").open("ab") as log, open(os.devnull) as nothing:
        words = ["controller", "--standby", "--takeover-after", str(after_s)]
        files = (nothing.fileno(), log.fileno(), log.fileno())
        return commands.start(words, cluster.env(), "/", files, session=True)


def term_and_beat(cluster: Cluster) -> tuple[int, float]:
    """Return the store's term, and the time of the last cycle."""
    with contextlib.suppress(GpuschedError), cluster.reader() as reader:  # a frozen controller may have it locked
        if reader is not None:
            return int(reader.number(TERM, 0)), reader.number("heartbeat", 0.0)
    return 0, 0.0


def take_over(
    cluster: Cluster, active: commands.Process, standby: commands.Process, kind: str, rng: random.Random
) -> float:
    """Return the seconds from the signal to the end of the standby's first cycle."""
    time.sleep(rng.uniform(1.0, 4.0))
    before, _ = term_and_beat(cluster)
    began, wall = time.monotonic(), time.time()
    active.send_signal(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)

    def works() -> bool:
        term, beat = term_and_beat(cluster)
        if kind == "continued early" and term > before:
            active.send_signal(signal.SIGCONT)
        return term > before and beat > wall

    wait_until(works, WAIT_S, "the standby's first cycle")
    found = time.monotonic() - began
    active.send_signal(signal.SIGCONT)
    code = active.wait(WAIT_S)  # -9: it hung within a transaction, and was killed by the standby
    assert code in ((1, -signal.SIGKILL) if kind != "killed" else (-signal.SIGKILL,)), code
    assert standby.poll() is None
    return found


def main() -> None:
    """See the module."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--times", type=int, default=100)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--takeover-after", type=int, default=15)
    options.add_argument("--every", type=float, default=1.0, help="seconds between two jobs")
    args = options.parse_args()
    rng, times = random.Random(args.seed), dict[str, list[float]]()
    with tempfile.TemporaryDirectory(dir="/tmp") as where, Testbed(Path(where) / "testbed") as testbed:
        cluster = Cluster(testbed, Path(where) / "site", ("A100",))
        cluster.folder.mkdir()
        cluster.runtime, cluster.settings = "process", {**SETTINGS, "tick": "1s"}
        cluster.write_inventory()
        active = start(cluster, args.takeover_after)
        wait_until(lambda: term_and_beat(cluster)[1], 60, "a cycle")
        load = Load(cluster, args.every)
        load.start()
        try:
            for number in range(args.times):
                standby = start(cluster, args.takeover_after)
                announced = cluster.state / STANDBYS / f"{os.uname().nodename}.{standby.pid}"
                wait_until(announced.exists, 60, "the standby")
                kind = ("killed", "frozen", "continued early")[number % 3]
                took = take_over(cluster, active, standby, kind, rng)
                times.setdefault(kind, []).append(took)
                print(f"{number + 1:3} {kind}: {took:.1f} s, {len(load.submitted)} jobs so far", flush=True)
                active = standby
            load.finish()
            _wait_for_all(cluster, load.submitted)
        finally:
            load.finish()
            active.send_signal(signal.SIGTERM)
            active.wait(120)
        _report(cluster, load, times)


def _wait_for_all(cluster: Cluster, jobs: list[str]) -> None:
    for job in jobs:
        wait_until(lambda job=job: cluster.state_of(job) in ENDED, WAIT_S, job)  # type: ignore[misc]


def _report(cluster: Cluster, load: Load, times: dict[str, list[float]]) -> None:
    began = Counter(load.ledger.read_text().split())
    found = {job: cluster.job(job) for job in load.submitted}
    lost = [job for job, record in found.items() if record is None or record.state != "COMPLETED" or not began[job]]
    print(f"{len(found)} jobs: {len(lost)} lost, {sum(count > 1 for count in began.values())} doubled", *lost)
    everything = [seconds for own in times.values() for seconds in own]
    for kind, some in [*times.items(), ("all", everything)]:
        if len(some) > 1:
            quantiles = statistics.quantiles(some, n=100, method="inclusive")
            shown = ", ".join(f"{q} % {quantiles[q - 1]:.1f}" for q in (50, 90, 99))
            within = sum(seconds <= 30 for seconds in some)
            print(f"{kind} ({len(some)}): {shown}, longest {max(some):.1f} s; {within} within 30 s")
    if "Traceback" in cluster.controller_log:
        print(cluster.controller_log)


if __name__ == "__main__":
    main()
