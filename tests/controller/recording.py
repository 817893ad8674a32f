"""The record of a controller over some hours full of faults; `python -m tests.controller.recording` rewrites it.

It says nothing about what is right; other tests do. It notices what changes without being meant to, and what is meant
to change shows as a diff that can be read.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from gpusched.controller.cycle import Cycle
from gpusched.model import ids
from gpusched.model.commands import AnyCommand, Cancel, Drain, Hold, Release, Requeue, Resume, SetPriority, Submit
from gpusched.model.jobs import JobRecord
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from tests.builders import spec
from tests.controller.applying import NOW
from tests.controller.crash_orders import POLICIES
from tests.controller.imagined import Host, ImaginedCluster, World, inventory

FOLDER = Path(__file__).parent / "recorded"
SEEDS = range(5)
TURNS = 100


class Story:
    """A controller, its imagined nodes, and what happens to them."""

    def __init__(self, seed: int, state: Path) -> None:
        self.rng, self.state = random.Random(seed), state
        self.world = World(now=NOW, hosts={n.name: Host(n.name) for n in inventory().nodes})
        self.inbox = Inbox(state)
        self.inbox.create()
        self.jobs: list[str] = []
        self._start_controller()

    def _start_controller(self) -> None:
        self.store, self.cluster = Store.create_or_open(self.state), ImaginedCluster(self.world)
        self.cycle = Cycle(
            self.store, self.state, inventory(), POLICIES, self.cluster, clock=lambda: self.world.now
        )  # fmt: skip

    def run(self) -> list[str]:
        acts: list[Callable[[], None]] = [
            *[self.submit] * 5, *[self.command] * 3, *[self.exits] * 3, self.host_changes, self.restart,
        ]  # fmt: skip
        for turn in range(TURNS):
            if turn < TURNS * 2 // 3 and self.rng.random() < 0.9:
                self.rng.choice(acts)()
            if turn == TURNS * 2 // 3:
                for host in self.world.hosts.values():
                    host.up = True
            self.turn(self.rng.choice([1, 1, 5, 20]), "ok" if turn > TURNS * 2 // 3 else "")
        return self.record()

    def turn(self, seconds: float, fate: str) -> None:
        self.world.now += seconds
        self.world.progress()
        self.cycle.run(0)
        self.cluster.deliver(lambda _: fate or self.rng.choice(["ok"] * 5 + ["lost", "unheard", "wait"]))

    def lay(self, command: AnyCommand) -> None:
        self.world.now += 0.002
        self.inbox.deliver(command)

    def submit(self) -> None:
        rng = self.rng
        begins = self.jobs[0] if self.jobs else ids.mint(NOW)  # a later one may be of the next millisecond
        job_id = begins[:8] + f"{len(self.jobs):03d}"
        self.jobs.append(job_id)
        wanted = spec(
            gpus_per_node=rng.randint(0, 4), nodes=rng.choice([1, 1, 1, 2]), time_limit_s=rng.choice([20, 60, 3600]),
            requeue=rng.random() < 0.3, signal_before_s=rng.choice([None, None, 10]),
            begin_time=rng.choice([None, None, self.world.now + 30]),
        )  # fmt: skip
        array = (0, 2, 3) if rng.random() < 0.15 else None
        bound = rng.choice([None, 1]) if array else None
        self.lay(Submit(time=self.world.now, id=job_id, spec=wanted, array=array, max_running=bound))

    def command(self) -> None:
        rng, now = self.rng, self.world.now
        whom = (rng.choice(self.jobs),) if self.jobs else ("nobody",)
        node = (rng.choice(sorted(self.world.hosts)),)
        self.lay(
            rng.choice([
                Cancel(time=now, job_ids=whom, now=rng.random() < 0.3), Hold(time=now, job_ids=whom),
                Release(time=now, job_ids=whom), Requeue(time=now, job_ids=whom), Resume(time=now, nodes=node),
                SetPriority(time=now, job_ids=whom, priority=rng.randint(-2, 5)),
                Drain(time=now, nodes=node, reason="fan"), Resume(time=now, nodes=("n0", "n1", "n2")),
            ])
        )  # fmt: skip

    def exits(self) -> None:
        if running := self.world.running():
            _, box = self.rng.choice(running)
            self.world.end(box, self.rng.choice([0, 0, 0, 1, 137, 143]))

    def host_changes(self) -> None:
        host = self.world.hosts[self.rng.choice(sorted(self.world.hosts))]
        change = self.rng.choice(["cut", "cut", "reboot", "clock", "stuck"])
        if change == "cut":
            host.up = not host.up
        elif change == "reboot":
            host.reboot()
        elif change == "clock":
            host.ahead = self.rng.choice([0.0, 900.0, -900.0])
        else:
            for box in host.boxes.values():
                box.stuck = not box.stuck

    def restart(self) -> None:
        self.cluster.crash(late=self.rng.random() < 0.5)
        self.store.close()
        self._start_controller()

    def record(self) -> list[str]:
        """Return a line for each event, then one for each job as it is in the end, then what each used."""
        with closing(self.store) as store:
            lines = [
                " ".join(filter(None, [f"{e.time - NOW:.3f}", e.kind, e.job_id, e.node, self._plain(e.data)]))
                for e in store.events(limit=100_000)
            ]
            known = sorted(store.jobs(), key=lambda job: job.id)
            lines += [f"{job.id} {self._plain(self._facts(job))}" for job in known]
            sums: dict[tuple[str, str], list[float]] = {}
            for row in store.usage(0):
                of = sums.setdefault((row.job_id, row.node), [0.0] * 3)
                of[:] = [of[0] + row.gpu_s, of[1] + row.energy_j, of[2] + row.energy_unknown_s]
            lines += [f"usage of {job} on {node}: {_rounded(of)}" for (job, node), of in sorted(sums.items())]
        prefix = self.jobs[0][:8]  # of a file of another command the name is random
        return [re.sub(r'"file": "\w+\.', '"file": "', line).replace(prefix, "j") for line in lines]

    def _facts(self, job: JobRecord) -> dict[str, Any]:
        facts = {"start": job.start_time, "end": job.end_time, "eligible": job.eligible_time}
        more = {"attempt": job.attempt, "retries": job.retries, "priority": job.priority, "held": job.held_by}
        more |= {"exit": job.exit_code, "reason": job.reason, "message": job.message, "energy": job.energy_j}
        more |= {"excluded": job.excluded_nodes, "unlaunched": job.unlaunched_on}
        return {"state": str(job.state)} | {k: v for k, v in (facts | more).items() if v not in (None, "", 0, ())}

    def _plain(self, data: dict[str, Any]) -> str:
        return json.dumps(_rounded(data), sort_keys=True, default=str) if data else ""


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value - NOW if value > NOW / 2 else value, 3)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value


def recorded(seed: int) -> str:
    with tempfile.TemporaryDirectory(prefix="gpusched-story-") as folder:
        return "\n".join(Story(seed, Path(folder)).run()) + "\n"


if __name__ == "__main__":
    for one in SEEDS:
        (FOLDER / f"{one}.txt").write_text(recorded(one))
