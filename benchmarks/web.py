"""The page with many nodes and jobs, in a real Chromium: when the first view stands, what an update costs, who waits.

    .venv/bin/python -m benchmarks.web [--nodes 1000] [--jobs 10000] [--rounds 5]

A store is made up (`site`), ``gpusched web`` is started on it, and a headless Chromium looks. First view: from the
navigation to the frame that has the map, the queue and the timeline. An update: every GPU has new figures, as after
each tick, and a hundred jobs have started or ended. Scripting: from the answer's text to the last thing drawn, by the
page's own clock; all work: what Chromium did beside it, layout, painting and garbage collection (TaskDuration).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from gpusched.config.inventory import load_inventory
from gpusched.model import ids
from gpusched.model.events import Event
from gpusched.model.jobs import Allocation, JobRecord, JobSpec, JobState, NodeAllocation
from gpusched.model.progress import JobProgress
from gpusched.model.readings import Gpu, NodeReading, NodeState
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import NodeRecord, RunRecord, Store, UsageRow

GPUS = 8
USERS = ("amira", "bjoern", "chen", "daria", "emeka", "fatima", "giulia", "hiro", "ines", "jonas", "kavya", "lukas",
         "mei", "nadia", "oskar", "priya", "quentin", "rosa", "sven", "tomasz")  # fmt: skip
NAMES = ("llama-sft", "vit-b16", "diffusion-xl", "eval-mmlu", "whisper-ft", "protein-fold", "rl-atari", "bert-base",
         "clip-pretrain", "segment-anything", "tokenizer", "preprocess", "ablation", "sweep-lr", "distill")  # fmt: skip
HOUR = 3600.0


def site(folder: Path, nodes: int, jobs: int, *, seed: int = 0, now: float | None = None, history: bool = True) -> None:
    """Create an inventory and a state folder: two partitions, most GPUs in use, a queue, ended jobs, days of usage."""
    now, rng = time.time() if now is None else now, random.Random(seed)
    half = max(1, nodes * 3 // 4)
    text = ["settings: {tick: 5s}", "defaults: {runtime: process, gpus: 8, cores: 128, memory: 1024G, port: 1}",
            "partitions:"]  # fmt: skip
    for name, begin, end, kind in (("H100", 0, half, "H100"), ("A100", half, nodes, "A100")):
        if begin < end:
            text += [f"  {name}:", "    policy: easy", f"    defaults: {{gpu_type: {kind}, rated_power: 10kW}}"]
            text += [
                "    nodes:",
                *(f"      - {{name: gpu{n + 1:04d}, address: 127.77.{n >> 8}.{n & 255}}}" for n in range(begin, end)),
            ]
            text += ["    flavors: {one: {gpus: 1, cores: 16, memory: 128G, time: 24h}}"]
    (folder / "inventory.yaml").write_text("\n".join(text) + "\n")
    inventory = load_inventory(folder / "inventory.yaml")
    Inbox(folder / "state").create()
    store = Store.create_or_open(folder / "state")
    made = _Made(rng, now, [(n.name, n.partition) for n in inventory.nodes])
    with store.transaction():
        running = made.running()
        ended = [made.ended() for _ in range(min(600, jobs // 5))]
        waiting = [made.waiting(i) for i in range(max(0, jobs - len(running) - len(ended)))]
        store.put_jobs([*ended, *running, *waiting])
        store.append(e for job in (*ended, *running) for e in made.story(job))
        for job in (*ended, *running):
            store.open_run(_run(job))
            if job.end_time is not None:
                store.close_run(job.id, 1, job.end_time, job.state)
        store.put_progress(made.progress(job) for job in running if rng.random() < 0.4)
        store.put_nodes(made.records())
        store.add_usage(made.usage(history))
        store.set_meta("tick_s", "5.0")
        store.set_meta("heartbeat", str(now + 86400))
    store.close()


def tick(folder: Path, seed: int) -> None:
    """Apply the changes of a cycle: new figures of every GPU; of a hundred jobs some start and some end."""
    rng = random.Random(seed)
    store = Store.create_or_open(folder / "state")
    now = time.time()
    with store.transaction():
        store.put_nodes(
            msgspec.structs.replace(r, last_seen=now, reading=_jittered(r.reading, rng, now))
            for r in store.node_records().values()
            if r.reading is not None
        )
        found = store.active()
        active = rng.sample(found, min(50, len(found)))
        store.put_jobs(
            msgspec.structs.replace(job, state=JobState.COMPLETED, end_time=now, exit_code=0) for job in active
        )
        freed = [job.allocation for job in active if job.allocation]
        waiting = [j for j in store.pending() if j.spec.nodes == 1][:50]
        store.put_jobs(
            msgspec.structs.replace(job, state=JobState.RUNNING, start_time=now, reason="", message="", attempt=1,
                                    allocation=Allocation(job.id, had.parts))
            for job, had in zip(waiting, freed, strict=False)
        )  # fmt: skip
    store.close()


def _jittered(reading: NodeReading, rng: random.Random, now: float) -> NodeReading:
    gpus = (
        msgspec.structs.replace(
            g, utilization_pct=float(rng.randint(70, 100)) if (g.utilization_pct or 0) > 20 else g.utilization_pct,
            power_w=(g.power_w or 60) + rng.uniform(-9, 9),
        )
        for g in reading.gpus
    )  # fmt: skip
    return msgspec.structs.replace(reading, time=now, gpus=tuple(gpus))


class _Made:
    """A made-up cluster."""

    def __init__(self, rng: random.Random, now: float, nodes: list[tuple[str, str]]) -> None:
        self.rng, self.now, self.nodes = rng, now, nodes
        self.held: dict[tuple[str, int], JobRecord] = {}
        self.idle: set[str] = set()
        self._count = 0
        self._down = {name for name, _ in nodes if rng.random() < 0.012} - {nodes[0][0]}

    def _id(self, at: float) -> str:
        self._count += 1
        return ids.mint(at + self._count * 0.001)

    def _spec(self, partition: str, nodes: int, gpus: int, **more: Any) -> JobSpec:
        rng = self.rng
        return JobSpec(
            name=rng.choice(NAMES), partition=partition, nodes=nodes, gpus_per_node=gpus, cores_per_node=8 * gpus,
            memory_mib_per_node=65536 * gpus, time_limit_s=rng.choice((2, 4, 8, 12, 24, 48)) * 3600,
            command=("python", "train.py"), group=rng.choice(("vision", "language", "biology")), **more,
        )  # fmt: skip

    def running(self) -> list[JobRecord]:
        found, rng = [], self.rng
        whole = [n for n in self.nodes if n[0] not in self._down]
        rng.shuffle(whole)
        while len(whole) > len(self.nodes) * 0.02 and len(whole) >= 2:
            kind = rng.random()
            size = rng.choice((2, 4, 8, 16)) if kind < 0.10 else 1
            if size > 1:
                same = [n for n in whole if n[1] == whole[-1][1]][-size:]
                for n in same:
                    whole.remove(n)
                found.append(self._on(same[0][1], [(n, tuple(range(GPUS))) for n, _ in same]))
                continue
            name, partition = whole.pop()
            at = 0
            while at < GPUS:
                gpus = min(rng.choice((1, 1, 2, 4, 4, 8)), GPUS - at)
                if rng.random() < 0.96:
                    found.append(self._on(partition, [(name, tuple(range(at, at + gpus)))]))
                at += gpus
        return found

    def _on(self, partition: str, parts: list[tuple[str, tuple[int, ...]]]) -> JobRecord:
        rng = self.rng
        spec = self._spec(partition, len(parts), len(parts[0][1]))
        start = self.now - rng.random() ** 2 * min(spec.time_limit_s * 0.9, 30 * HOUR)
        job_id = self._id(start - HOUR)
        allocation = Allocation(job_id, tuple(
            NodeAllocation(rank=i, node=n, gpus=g, cores=8 * len(g), memory_mib=65536 * len(g))
            for i, (n, g) in enumerate(parts)
        ))  # fmt: skip
        job = JobRecord(
            id=job_id, user=self._user(), uid=1000, spec=spec, state=JobState.RUNNING, attempt=1,
            submit_time=start - rng.uniform(20, 4 * HOUR), start_time=start, allocation=allocation, policy="easy",
        )  # fmt: skip
        for node, gpus in parts:
            self.held.update({(node, g): job for g in gpus})
        if rng.random() < 0.06:
            self.idle.add(job_id)
        return job

    def _user(self) -> str:
        return USERS[min(len(USERS) - 1, int(self.rng.expovariate(0.22)))]

    def ended(self) -> JobRecord:
        rng = self.rng
        name, partition = rng.choice(self.nodes)
        gpus = rng.choice((1, 1, 2, 4, 8))
        spec, first = self._spec(partition, 1, gpus), rng.randrange(GPUS - gpus + 1)
        end = self.now - rng.random() * 20 * HOUR
        start = end - rng.uniform(120, 5 * HOUR)
        state = rng.choices(
            (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT, JobState.OUT_OF_MEMORY),
            (80, 10, 6, 3, 1),
        )[0]
        code, job_id = (0 if state is JobState.COMPLETED else 1 if state is JobState.FAILED else None), self._id(start)
        part = NodeAllocation(rank=0, node=name, gpus=tuple(range(first, first + gpus)), cores=8, memory_mib=65536)
        return JobRecord(
            id=job_id, user=self._user(), uid=1000, spec=spec, state=state, attempt=1, exit_code=code,
            submit_time=start - 600, start_time=start, end_time=end, allocation=Allocation(job_id, (part,)),
            reason={JobState.FAILED: "NonZeroExitCode", JobState.TIMEOUT: "TimeLimit"}.get(state, ""),
            energy_j=gpus * 380.0 * (end - start), policy="easy",
        )  # fmt: skip

    def waiting(self, place: int) -> JobRecord:
        rng = self.rng
        nodes = rng.choice((1, 1, 1, 1, 1, 2, 4)) if len(self.nodes) >= 16 else 1
        partition = rng.choice(self.nodes)[1]
        spec = self._spec(partition, nodes, 8 if nodes > 1 else rng.choice((2, 4, 4, 8, 8)))
        submit = self.now - rng.random() * 9 * HOUR
        reason, message = "Priority", f"{place} jobs are ahead of it in {partition}"
        if place < 3:
            reason, message = "Resources", f"needs {spec.gpus_per_node} GPUs on {nodes} nodes; the next end at 14:20"
        elif rng.random() < 0.03:
            reason, message = "Dependency", "waits for afterok:k3f9"
        return JobRecord(
            id=self._id(submit), user=self._user(), uid=1000, spec=spec, state=JobState.PENDING, reason=reason,
            message=message, submit_time=submit,
        )  # fmt: skip

    def story(self, job: JobRecord) -> list[Event]:
        nodes = {p.node: list(p.gpus) for p in job.allocation.parts} if job.allocation else {}
        start = job.start_time or 0.0
        facts = [
            (job.submit_time, "submitted", {}),
            (start - 2, "starting", {"from": "PENDING", "to": "STARTING", "attempt": 1, "nodes": nodes}),
            (start, "running", {"from": "STARTING", "to": "RUNNING", "attempt": 1}),
        ]
        if job.end_time is not None:
            facts.append((job.end_time, "ended", {"from": "RUNNING", "to": str(job.state), "exit_code": job.exit_code}))
        return [Event(time=t, kind=k, job_id=job.id, user=job.user, data=d) for t, k, d in facts]  # type: ignore[arg-type]

    def progress(self, job: JobRecord) -> JobProgress:
        start, of = job.start_time or 0.0, self.rng.choice((1000.0, 20_000.0, 100_000.0))
        share = min(0.97, (self.now - start) / (job.spec.time_limit_s * 0.9))
        step = round(of * share)
        return JobProgress(
            job_id=job.id, attempt=1, gpus=job.spec.gpus, step=step, of=of, at=self.now, first_step=0.0, first_at=start,
            since_step=0.0, since=start, mid_step=step, mid_at=self.now,
        )  # fmt: skip

    def records(self) -> list[NodeRecord]:
        found, rng = [], self.rng
        for name, partition in self.nodes:
            if name in self._down:
                found.append(NodeRecord(name=name, state=NodeState.DOWN, reason="does not answer: timed out",
                                        last_seen=self.now - 900))  # fmt: skip
                continue
            gpus, jobs = [], [self.held.get((name, g)) for g in range(GPUS)]
            for g, job in enumerate(jobs):
                busy = job is not None and job.id not in self.idle
                least = 72 if job is None or job.spec.name not in ("preprocess", "eval-mmlu") else 15
                use = float(rng.randint(least, least + 28)) if busy else 0.0
                gpus.append(Gpu(
                    index=g, uuid=f"{name}-{g}", name=f"NVIDIA {partition}", utilization_pct=use,
                    memory_total_mib=81920, memory_used_mib=rng.randint(20_000, 79_000) if job else 600,
                    power_w=90 + 6 * use + rng.uniform(-9, 9) if busy else rng.uniform(55, 90), power_limit_w=700.0,
                    temperature_c=rng.randint(52, 71) if busy else rng.randint(29, 36),
                    error="fell off the bus" if rng.random() < 0.0008 else None,
                ))  # fmt: skip
            drained = rng.random() < 0.008
            held = sum(job is not None for job in jobs)
            state = NodeState.MIXED if 0 < held < GPUS else NodeState.ALLOCATED if held else NodeState.IDLE
            reading = NodeReading(node=name, time=self.now, source="nvml", gpus=tuple(gpus), containers=(), load1=4.0)
            found.append(NodeRecord(
                name=name, state=NodeState.DRAINING if drained else state, last_seen=self.now + 86400, reading=reading,
                reason="fan replacement, ticket 4711" if drained else "",
                drain_reason="fan replacement" if drained else None, drained_by="root" if drained else None,
            ))  # fmt: skip
        return found

    def usage(self, history: bool) -> list[UsageRow]:
        """Hours of days gone by, then five minutes of the last one; a few nodes stand for many."""
        rows, rng = [], self.rng
        nodes = self.nodes if len(self.nodes) <= 64 else self.nodes[:: len(self.nodes) // 64]
        scale = len(self.nodes) / len(nodes)
        spans = [
            (round(self.now - 13 * 86400), round(self.now - 86400), 3600),
            (round(self.now - 86400), round(self.now), 300),
        ]
        for begin, end, width in spans if history else ():
            for bucket in range(begin // width * width, end // width * width, width):
                hour, day = bucket % 86400 / 3600, bucket // 86400 % 7
                level = 0.66 + 0.2 * (8 < hour < 21) - 0.14 * (day in (2, 3)) + rng.uniform(-0.03, 0.03)
                for name, partition in nodes:
                    for user in (self._user(), ""):
                        share = level if user else 1 - level
                        seconds = GPUS * width * share * scale
                        use = rng.uniform(0.6, 0.95) if user else 0.0
                        rows.append(UsageRow(
                            bucket=bucket, node=name, job_id=user and f"old-{user}", user=user, partition=partition,
                            gpu_s=seconds, energy_j=seconds * (480 * use + 70), util_s=seconds * use,
                            util_known_s=seconds, idle_s=0.0 if user else seconds,
                        ))  # fmt: skip
        for job in {job.id: job for job in self.held.values()}.values():
            start = max(job.start_time or 0.0, self.now - 6 * HOUR)
            idle = job.id in self.idle
            for part in (job.allocation.parts if job.allocation else ()) if len(self.held) < 4000 else ():
                for bucket in range(int(start) // 300 * 300 + 300, int(self.now) // 300 * 300, 300):
                    seconds = 300.0 * len(part.gpus)
                    use = 0.0 if idle else 0.82 + 0.12 * ((bucket // 1500) % 3 - 1) + rng.uniform(-0.04, 0.04)
                    rows.append(UsageRow(
                        bucket=bucket, node=part.node, job_id=job.id, user=job.user, partition=job.spec.partition,
                        gpu_s=seconds, energy_j=seconds * (560 * use + 70), util_s=seconds * use, util_known_s=seconds,
                        idle_s=seconds if idle else 0.0,
                    ))  # fmt: skip
        return rows


def _run(job: JobRecord) -> RunRecord:
    nodes = {p.node: len(p.gpus) for p in job.allocation.parts} if job.allocation else {}
    return RunRecord(
        job_id=job.id, attempt=1, user=job.user, partition=job.spec.partition, flavor=None, share=0.01,
        gpus=job.spec.gpus, start_time=job.start_time or 0.0, end_time=None, outcome=None, nodes=nodes,
    )  # fmt: skip


def serving(folder: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """``gpusched web`` on the site, and where its page is."""
    env = os.environ | {"GPUSCHED_STATE": str(folder / "state"), "GPUSCHED_INVENTORY": str(folder / "inventory.yaml")}
    argv = [sys.executable, "-m", "gpusched", "web", "--port", "0", *options]
    server = subprocess.Popen(argv, env=env, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    line = server.stderr.readline()
    assert "http://" in line, line + server.stderr.read()
    return server, "http://" + line.split("http://")[1].split()[0]


# -- the measuring

READY = "performance.getEntriesByName('first-view').length"
UPDATES = "performance.getEntriesByName('update').length"


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only-site", type=Path, help="make the site there, and end")
    asked = parser.parse_args()
    if asked.only_site:
        asked.only_site.mkdir(parents=True, exist_ok=True)
        site(asked.only_site, asked.nodes, asked.jobs)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        site(folder, asked.nodes, asked.jobs)
        figures = measured(folder, asked.rounds)
    print(f"{asked.nodes} nodes, {asked.jobs} jobs; medians (worst) of {asked.rounds}")
    for what, values in figures.items():
        print(f"  {what}: {statistics.median(values):.0f} ms ({max(values):.0f})")
    return 0


def measured(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of first views, and of updates with the overview, the list of jobs and the timeline open."""
    from tests.web.browser import Browser

    server, url = serving(folder)
    (folder / "home").mkdir()
    browser = Browser(folder / "home")
    found: dict[str, list[float]] = {}
    try:
        browser.size(1440, 900)
        browser.load(url, READY)  # the server's own first look is over
        for _ in range(rounds):
            browser.call("Network.clearBrowserCache")
            browser.load(url, READY)
            found.setdefault("first view, nothing cached", []).append(
                browser.run("performance.getEntriesByName('first-view')[0].startTime")
            )
        browser.until("performance.getEntriesByType('resource').some(r => r.name.endsWith('/api/forecast'))")
        for page in ("", "jobs", "timeline"):
            browser.go(f"{url}#/{page}")
            for round_ in range(rounds):
                before, count = browser.metrics(), browser.run(UPDATES)
                tick(folder, round_)
                browser.until(f"{UPDATES} > {count}")
                browser.run("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
                after = browser.metrics()
                spent = {
                    "scripting": browser.run("performance.getEntriesByName('update').at(-1).duration"),
                    "all work": (after["TaskDuration"] - before["TaskDuration"]) * 1000,
                }
                for what, ms in spent.items():
                    found.setdefault(f"update of {page or 'the overview'}, {what}", []).append(ms)
        assert not browser.troubles, browser.troubles
    finally:
        browser.close()
        server.terminate()
        server.communicate()
    return found


if __name__ == "__main__":
    sys.exit(main())
