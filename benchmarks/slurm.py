"""Measure the cost of gpusched beside Slurm with a long queue, and how soon a decided job runs.

    python -m benchmarks.slurm [--pending 10000] [--rounds 9] [--seconds 60]

Real slurmctld, slurmdbd, MariaDB, and four nodes of 8 GPUs in namespaces of this machine, under tuned
SchedulerParameters. All GPUs are taken; half of the queue waits for each partition, in five shapes of 1 to 16 GPUs,
every job with a record of its own. The time of slurmctld is its CPU time by /proc.

- reads: each question that a cycle asks, alone.
- cycle: one whole cycle in mode observe: all jobs new, nothing changed, 200 jobs changed. Observing is all of it but
  the decision, which is made for the record.
- share: the controller's own loop in mode observe, for so many seconds; then as long without us.
- start: in mode decide the running jobs are cancelled; from the plan to the first line of each job's script.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpusched.controller.service import Service
from gpusched.controller.slurm.cycle import SlurmCycle
from gpusched.slurm.commands import Slurm
from tests.testbed import Testbed
from tests.testbed.slurm import USERS, SlurmSite
from tests.testbed.slurm_files import CPUS, MEMORY_MIB
from tests.testbed.waiting import wait_until

SHAPES = ((1, 1, 2), (2, 1, 4), (4, 1, 8), (8, 1, 12), (8, 2, 24))  # GPUs a node, nodes, hours
SCRIPT = "date +%s.%N > started-$SLURM_JOB_ID; exec sleep 100000"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pending", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--part", choices=("reads", "cycle", "share", "start"), action="append")
    options = parser.parse_args()
    parts = options.part or ["reads", "cycle", "share", "start"]
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory())
        site = SlurmSite(stack.enter_context(Testbed(Path(name) / "bed")))
        stack.callback(site.down)
        site.up()
        os.environ["SLURM_CONF"] = site.env["SLURM_CONF"]
        os.environ["GPUSCHED_STATE"] = str(Path(name) / "state")
        os.environ["GPUSCHED_INVENTORY"] = str(Path(name) / "inventory.yaml")
        fill(site, options.pending)
        if "reads" in parts:
            show("reads", reads(site, options.rounds))
        with contextlib.closing(installed(site, Path(name))) as service:
            if "cycle" in parts:
                show("cycle", cycles(service, options.rounds))
            if "share" in parts:
                show("share", share(site, service, options.seconds))
            if "start" in parts:
                show("start", starts(site, service, options.rounds))


def show(part: str, found: dict[str, object]) -> None:
    print(json.dumps({part: found}, indent=1), flush=True)


def fill(site: SlurmSite, pending: int) -> None:
    """Jobs on all GPUs, and so many that wait."""
    for node in site.testbed.nodes:
        for gpus in (4, 2, 2):
            site.sbatch("exec sleep 100000", f"--gpus-per-node={gpus}", "-w", node.name, "-p", node.model.key.upper())
    for partition in ("A100", "V100"):
        for gpus, nodes, hours in SHAPES:
            many = pending // 2 // len(SHAPES)
            array = site.sbatch(
                SCRIPT, f"--array=1-{many}", f"--gpus-per-node={gpus}", f"-N{nodes}", f"-p{partition}",
                f"-t{hours}:00:00", f"-Jtrain-{gpus}x{nodes}", user=USERS[0],
            )  # fmt: skip
            # the first update makes a task a job of its own
            site.run(
                ["scontrol"], input="".join(f"update JobId={array}_{n} SiteFactor=0\n" for n in range(1, many + 1))
            )


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reads(site: SlurmSite, rounds: int) -> dict[str, object]:
    """Each question: median seconds, and slurmctld's CPU seconds."""
    slurm = Slurm()
    asks: dict[str, Callable[[], object]] = {
        "jobs": slurm.jobs, "jobs, with their SiteFactors": lambda: slurm.jobs(site_factors=True),
        "nodes": slurm.nodes, "partitions": slurm.partitions, "reservations": slurm.reservations,
        "GPUs of 12 jobs": lambda: slurm.gpu_positions(running), "200 updates": lambda: slurm.update(updates),
    }  # fmt: skip
    jobs = slurm.jobs()
    running = [job for job in jobs if job.state == "RUNNING"]
    updates = [f"update JobId={job.id} SiteFactor=0" for job in jobs if job.state == "PENDING"][:200]
    found: dict[str, object] = {}
    for name, ask in asks.items():
        took, before = [], cpu_s(site.slurmctld)
        for _ in range(rounds):
            took.append(seconds(ask))
        found[name] = {
            "median_s": round(statistics.median(took), 4),
            "slurmctld_cpu_s": round((cpu_s(site.slurmctld) - before) / rounds, 4),
        }
    return found


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def installed(site: SlurmSite, folder: Path) -> Service:
    """Return a controller in this process, on an inventory of the site's nodes."""
    partitions = {}
    for model in ("a100", "v100"):
        members = [node for node in site.testbed.nodes if node.model.key == model]
        partitions[model.upper()] = {
            "policy": "easy",
            "defaults": {
                "user": "root", "key": str(site.testbed.identity), "gpus": 8, "cores": CPUS[model],
                "memory_mib": MEMORY_MIB[model], "gpu_type": model,
            },
            "nodes": [{"name": node.name, "address": node.address} for node in members],
        }  # fmt: skip
    settings = {"tick": "1s", "known_hosts": str(site.testbed.known_hosts), "ssh_config": "/dev/null"}
    path = folder / "inventory.yaml"
    path.write_text(json.dumps({"engine": "slurm", "settings": settings, "partitions": partitions}))
    return Service(path, folder / "state")


def of(service: Service) -> SlurmCycle:
    assert isinstance(service.cycle, SlurmCycle)
    return service.cycle


class Watch:
    """Seconds that a method took, of them on the CPU (in this process), and when it returned last (Unix seconds)."""

    def __init__(self, owner: Any, name: str) -> None:
        self.took, self.cpu, self.ended = 0.0, 0.0, 0.0
        self._work = getattr(owner, name)
        setattr(owner, name, self._watched)

    def _watched(self, *given: Any, **named: Any) -> Any:
        begin, cpu = time.perf_counter(), time.process_time()
        try:
            return self._work(*given, **named)
        finally:
            self.cpu += time.process_time() - cpu
            self.took += time.perf_counter() - begin
            self.ended = time.time()


def cycles(service: Service, rounds: int) -> dict[str, object]:
    """Whole cycles: seconds of each part."""
    cycle = of(service)
    parts = {name: Watch(cycle, method) for name, method in
             {"asking Slurm": "_read_slurm", "mirror and store": "_record", "deciding": "_decide"}.items()}  # fmt: skip

    def one() -> dict[str, float]:
        for part in parts.values():
            part.took = 0.0
        wait_until(lambda: cycle._reader.is_due(service.clock()), what="the next look")
        whole = seconds(lambda: service.run(5.0))
        found = {"whole": whole, "observing": whole - parts["deciding"].took}
        return found | {name: part.took for name, part in parts.items()}

    def median(found: Sequence[dict[str, float]]) -> dict[str, float]:
        return {name: round(statistics.median(one[name] for one in found), 3) for name in found[0]}

    waiting = [job.id for job in Slurm().jobs() if job.state == "PENDING"]
    first, same, changed = one(), [one() for _ in range(rounds)], []
    for number in range(1, rounds + 1):
        Slurm().update([f"update JobId={job} TimeLimit={600 + number}" for job in waiting[:200]])
        changed.append(one())
    return {"all jobs new": median([first]), "nothing changed": median(same), "200 jobs changed": median(changed)}


def share(site: SlurmSite, service: Service, lasts_s: float) -> dict[str, object]:
    """CPU time of slurmctld a second, with our loop and without it."""

    def measured(work: Callable[[], object]) -> float:
        begin, before = time.monotonic(), cpu_s(site.slurmctld)
        while time.monotonic() < begin + lasts_s:
            work()
        return (cpu_s(site.slurmctld) - before) / (time.monotonic() - begin)

    def loop() -> None:
        service.run(5.0)
        time.sleep(service.cycle.inventory.settings.tick_s)

    ours, alone = measured(loop), measured(lambda: time.sleep(1))
    return {
        "with us": round(ours, 4), "without us": round(alone, 4), "ours": round(ours - alone, 4),
        "seconds between two looks": round(of(service)._reader._rest_s, 2), "tick_s": 1.0,
    }  # fmt: skip


def starts(site: SlurmSite, service: Service, rounds: int, patience_s: float = 20.0) -> dict[str, Any]:
    """From the plan to the first line of a job's script, in mode decide; those of a round that come in time."""
    cycle = of(service)
    for partition in ("A100", "V100"):
        words = ["policy", "promote", "easy", "-p", partition, "--mode", "decide", "--force", "benchmark"]
        subprocess.run([sys.executable, "-m", "gpusched", *words], check=True, stdout=subprocess.DEVNULL)
    service.run(5.0)  # takes the lease: else Slurm starts what waits
    decided = Watch(cycle, "_decide")
    asked: dict[str, float] = {}
    update = cycle._slurm.update

    def noted(lines: Sequence[str]) -> dict[int, str]:
        for line in lines:
            if "ReqNodeList=dgx" in line:
                asked.setdefault(line.split()[1].partition("=")[2], decided.ended)
        return update(lines)

    cycle._slurm.update = noted  # type: ignore[method-assign]
    took: list[float] = []
    for _ in range(rounds):
        asked.clear()
        site.run(["scancel", "--state=RUNNING", f"--user={USERS[0]}"])
        site.run(["scancel", "--state=RUNNING", "--user=root"])
        until = time.monotonic() + patience_s
        while time.monotonic() < until and len(times := begun(site, asked)) < max(1, len(asked)):
            service.run(5.0)
            time.sleep(service.cycle.inventory.settings.tick_s)
        took += times
    took.sort()
    return {
        "jobs": len(took), "median_s": round(statistics.median(took), 2), "most_s": round(took[-1], 2),
        "90 %": round(took[len(took) * 9 // 10], 2),
    }  # fmt: skip


def begun(site: SlurmSite, asked: dict[str, float]) -> list[float]:
    """Seconds from decision to start of those that have started; each wrote down when."""
    raw = {job.id: job.raw_id for job in Slurm().jobs()}
    files = {job: site.shared / f"started-{raw[job]}" for job in asked if job in raw}
    texts = {job: file.read_text().strip() for job, file in files.items() if file.exists()}
    return [float(text) - asked[job] for job, text in texts.items() if text]


if __name__ == "__main__":
    main()
