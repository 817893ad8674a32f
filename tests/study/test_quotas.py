"""A record that the controller made under limits, replayed by ``gpusched replay``: it waits as it waited."""

from __future__ import annotations

import csv
import json
import os
import pwd
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpusched.config.inventory import load_inventory
from gpusched.model.commands import Submit
from gpusched.model.jobs import ENDED
from tests import commands
from tests.builders import spec
from tests.controller.site import Site

USER = pwd.getpwuid(os.getuid()).pw_name
INVENTORY = f"""\
defaults: {{runtime: podman}}
partitions:
  p:
    policy: easy
    defaults: {{gpus: 4, cores: 16, memory: 64G}}
    nodes: [n0, n1]
    flavors: {{}}
groups:
  physics: {{members: {{{USER}: 1}}, limits: {{gpus: 4, jobs: 3}}}}
  lasers: {{parent: physics, members: {{{USER}: 1}}, limits: {{gpus: 2}}}}
  chemistry: {{members: {{{USER}: 1}}, limits: {{gpu_hours: 20}}}}
qos:
  short: {{limits: {{jobs: 1}}, exempt: true}}
"""
HOUR = 3600.0
SETTLE_S = 60.0  # starts are decided and ends are seen some seconds late, one after the other
COUNT = 100


class Work(NamedTuple):
    """Hours after the beginning, GPUs, hours it runs, its limit, and the user it counts for."""

    at: float
    gpus: int
    runs: float
    limit: float
    group: str
    qos: str = ""
    nice: int = 0
    tasks: int = 0
    at_once: int | None = None


WORK = [
    Work(0.0, 2, 2.1, 3, "physics"), Work(0.02, 2, 1.3, 2, "lasers"), Work(0.05, 4, 2, 2.5, "physics"),
    Work(0.1, 2, 0.6, 1, "lasers"), Work(0.2, 4, 1.9, 2, "chemistry"), Work(0.3, 2, 0.3, 0.5, "physics"),
    Work(0.4, 1, 0.9, 1, "lasers", "short"), Work(0.5, 1, 0.7, 1, "physics", "short"),
    Work(0.6, 4, 2.2, 3, "chemistry"), Work(0.7, 4, 1.7, 2.1, "chemistry"), Work(0.9, 1, 4.3, 5, "physics"),
    Work(1.1, 1, 2.6, 3, "physics"),
    Work(1.2, 1, 1.8, 2, "lasers"), Work(1.4, 8, 1.1, 1.5, "chemistry"), Work(1.5, 1, 0.4, 1, "physics"),
    Work(9.0, 2, 6.0, 7, "chemistry"),
]  # fmt: skip


# Without limits: one that is nice comes after one submitted later, and an array of a class with less priority last.
FREE = f"{INVENTORY.partition('groups:')[0]}qos: {{spare: {{priority: -20}}}}\n"
IN_TURN = [
    Work(0.0, 8, 1, 2, ""), Work(0.1, 8, 1, 2, "", nice=5), Work(0.2, 8, 1, 2, ""),
    Work(0.3, 1, 1, 2, "", "spare", tasks=5, at_once=2), Work(0.4, 8, 1, 1, "", nice=10),
]  # fmt: skip


def record(state: Path, inventory: Path, work: Sequence[Work]) -> Site:
    """The controller's own record of this work on imagined nodes, from event to event."""
    site, number = Site(state), count(COUNT)
    site.world.now += 1000.0  # not at a full hour, where a second decides when GPU hours come back
    begin = site.world.now
    site.begin(load_inventory(inventory))
    ids: dict[str, Work] = {}
    todo = list(work)
    while todo or any(job.state not in ENDED for job in site.store.jobs()):
        runs = {box.name: ids[box.name.split("-")[1][:11]].runs * HOUR for _, box in site.world.running()}
        ends = [box.began + runs[box.name] for _, box in site.world.running()]
        later = [*ends, *(begin + one.at * HOUR for one in todo[:1])]
        hour = (site.world.now // HOUR + 1) * HOUR
        site.world.now = max(min([*later, hour]), site.world.now)
        for _, box in site.world.running():
            if box.began + runs[box.name] <= site.world.now:
                site.world.end(box, 0)
        while todo and begin + todo[0].at * HOUR <= site.world.now:
            one, job = todo.pop(0), f"{next(number):011d}"
            ids[job] = one
            asked = spec(
                gpus_per_node=one.gpus if one.gpus <= 4 else one.gpus // 2, nodes=1 if one.gpus <= 4 else 2,
                time_limit_s=int(one.limit * HOUR), group=one.group, qos=one.qos, nice=one.nice,
            )  # fmt: skip
            array = tuple(range(one.tasks)) or None
            site.inbox.deliver(
                Submit(time=site.world.now, id=job, spec=asked, array=array, max_running=one.at_once)
            )  # fmt: skip
        site.turn(4)
    return site


class Replays:
    def __init__(self, folder: Path, text: str = INVENTORY, work: Sequence[Work] = WORK) -> None:
        self.folder, self.inventory = folder, folder / "inventory.yaml"
        self.inventory.write_text(text)
        site = record(folder / "state", self.inventory, work)
        self.first = min(job.submit_time for job in site.store.jobs())
        self.start = {job.id: job.start_time for job in site.store.jobs()}
        site.store.close()

    def run(self, *words: str, code: int = 0) -> tuple[dict[str, Any], dict[str, float]]:
        """The row, and when each job started (Unix seconds)."""
        out = self.folder / "schedule.csv"
        env = os.environ | {
            "GPUSCHED_STATE": str(self.folder / "state"), "GPUSCHED_INVENTORY": str(self.inventory),
            "NUMBA_DISABLE_JIT": "1",
        }  # fmt: skip
        done = commands.run(
            "replay", "--since", "all", "-P", "easy", "--schedule-out", str(out), "--json", *words, env=env,
            cwd=self.folder,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        if code:
            return json.loads(done.stdout), {}
        (row,) = json.loads(done.stdout)
        with out.open(newline="") as file:
            return row, {line["job"]: float(line["start"]) + self.first for line in csv.DictReader(file)}


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Replays:
    return Replays(tmp_path_factory.mktemp("record"))


def test_a_record_made_under_limits_is_replayed_as_it_was(replays: Replays) -> None:
    row, start = replays.run()
    late = {job: round(start[job] - at) for job, at in replays.start.items() if at is not None}
    assert len(late) == len(WORK)
    assert {job: off for job, off in late.items() if abs(off) > SETTLE_S} == {}
    assert any("applies the inventory's limits of users, groups and classes" in note for note in row["notes"])
    assert abs(row["wait_error"]) < 0.01
    # some waited for a limit of each kind: GPU hours a week, others hours
    waits = [at - self_at.at * HOUR - replays.first for at, self_at in zip(sorted(start.values()), WORK, strict=True)]
    assert max(waits) > 6 * 24 * HOUR


def test_without_them_it_is_not(replays: Replays) -> None:
    row, start = replays.run("--no-quotas")
    late = [job for job, at in replays.start.items() if at is not None and start[job] - at < -SETTLE_S]
    assert len(late) >= 5  # the others waited for nodes
    assert any("this replay applies none" in note for note in row["notes"])


def test_priorities_and_arrays_of_so_many_tasks_at_once_are_replayed_as_they_were(tmp_path: Path) -> None:
    replays = Replays(tmp_path, FREE, IN_TURN)
    for words in ((), ("--no-quotas",)):
        _, start = replays.run(*words)
        late = {job: round(start[job] - at) for job, at in replays.start.items() if at is not None}
        assert len(late) == 9
        assert {job: off for job, off in late.items() if abs(off) > SETTLE_S} == {}
    hours = [round((at - replays.first) / HOUR, 1) for _, at in sorted(replays.start.items()) if at is not None]
    assert hours[:3] == [0.0, 2.0, 1.0]
