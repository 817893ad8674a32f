"""A site without nodes: an inventory, a state folder, and the command line as a user runs it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.cli import main as cli
from gpusched.config.inventory import load_inventory
from gpusched.controller.commandfiles import CommandApplier
from gpusched.controller.secretfiles import SecretFiles
from gpusched.model.commands import AnyCommand, Submit
from gpusched.model.events import Event
from gpusched.model.jobs import Allocation, JobRecord, JobState, NodeAllocation
from gpusched.queue.inbox import Inbox, ReceivedCommand
from gpusched.queue.store import Store
from tests import commands

GPUSCHED = str(Path(sys.executable).parent / "gpusched")
INVENTORY = """\
defaults: {runtime: podman}
partitions:
  A100:
    defaults: {gpus: 8, cores: 256, memory: 1024G, rated_power: 6.5kW}
    nodes: [dgx-a100-1, dgx-a100-2]
    flavors:
      s-A100: {gpus: 2, cores: 64, memory: 256G, time: 72h}
      f-A100: {gpus: 16, cores: 512, memory: 2048G, time: 504h}
  V100:
    image: docker.io/library/busybox
    defaults: {gpus: 8, cores: 80, memory: 512G, rated_power: 3.5kW}
    nodes: [dgx-1v-1, dgx-1v-2]
    flavors:
      s-V100: {gpus: 2, cores: 20, memory: 128G, time: 72h}
      shared: {gpus: 1, cores: 10, memory: 64G, time: 1h}
  bare:
    max_time: 2d
    defaults: {runtime: process, gpus: 4, cores: 16, memory: 64G}
    nodes: [pc1, pc2, pc3]
    flavors:
      one: {gpus: 1, cores: 4, memory: 16G, time: 1h}
      all: {gpus: 12, cores: 48, memory: 192G, time: 1d}
      shared: {gpus: 1, cores: 4, memory: 16G, time: 1h}
"""


class Result:
    """The output of a command and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        """Stdout, which must be exactly one JSON value in one line."""
        assert self.out.endswith("\n")
        assert self.out.count("\n") == 1
        return json.loads(self.out)

    def ok(self) -> Result:
        assert (self.code, self.err) == (0, ""), self.err or self.out
        return self


class Site:
    """A state folder and an inventory; ``run`` is a process of its own, ``call`` the same in this process."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self.state, self.inventory = folder, folder / "state", folder / "inventory.yaml"
        self.inventory.write_text(INVENTORY)
        self._capfd = capfd
        Inbox(self.state).create()

    @property
    def env(self) -> dict[str, str]:
        return os.environ | {"GPUSCHED_STATE": str(self.state), "GPUSCHED_INVENTORY": str(self.inventory)}

    def run(self, *words: str, stdin: str = "", env: dict[str, str] | None = None, cwd: Path | None = None) -> Result:
        done = commands.run(*words, env=self.env | (env or {}), cwd=cwd or self.folder, input=stdin)
        return Result(done.returncode, done.stdout, done.stderr)

    def call(self, *words: str) -> Result:
        self._capfd.readouterr()
        code = cli.run(words)
        out, err = self._capfd.readouterr()
        return Result(code, out, err)

    def submit(self, *words: str) -> str:
        """Submit a small job; returns its id."""
        options = words or ("-F", "s-V100", "--", "true")
        return str(self.call("submit", "--json", *options).ok().json["id"])

    def commands(self) -> list[AnyCommand]:
        """Return the commands in the inbox."""
        found = list(Inbox(self.state).waiting())
        assert all(isinstance(f, ReceivedCommand) for f in found), found
        return [f.command for f in found if isinstance(f, ReceivedCommand)]

    def only_submit(self) -> Submit:
        (command,) = self.commands()
        assert isinstance(command, Submit)
        return command

    def apply_inbox(self, *, alive: bool = True) -> None:
        """Apply the inbox as the controller does, with its heartbeat."""
        store = Store.create_or_open(self.state)
        CommandApplier(store, Inbox(self.state), load_inventory(self.inventory), SecretFiles(self.state)).apply_inbox(
            time.time()
        )
        store.set_meta("tick_s", "5.0")
        store.set_meta("heartbeat", str(time.time() if alive else time.time() - 3600))
        store.close()
        if not alive:
            self.age_files()

    def age_files(self) -> None:
        for name in ("gpusched.db", "gpusched.db-wal"):
            if (self.state / name).exists():
                os.utime(self.state / name, (1, 1))

    def change(self, job_id: str, event: str = "changed", **fields: Any) -> JobRecord:
        """Put a job into another state, as the controller would have."""
        store = Store.create_or_open(self.state)
        job = store.job(job_id)
        assert job is not None
        job = msgspec.structs.replace(job, **fields)
        with store.transaction():
            store.put_jobs([job])
            store.append([Event(time=time.time(), kind=event, job_id=job_id, data={"to": job.state})])
        store.close()
        return job

    def start(self, job_id: str, node: str = "dgx-1v-1") -> JobRecord:
        part = NodeAllocation(rank=0, node=node, gpus=(0, 1), cores=20, memory_mib=131072)
        return self.change(
            job_id, state=JobState.RUNNING, start_time=time.time() - 60, allocation=Allocation(job_id, (part,)),
            attempt=1, policy="fifo", policy_version="abc",
        )  # fmt: skip

    def end(
        self, job_id: str, state: JobState = JobState.COMPLETED, code: int | None = 0, reason: str = ""
    ) -> JobRecord:
        ended = {"state": state, "exit_code": code, "reason": reason, "end_time": time.time(), "energy_j": 7200.0}
        return self.change(job_id, event="ended", **ended)


@pytest.fixture
def site(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path, capfd)
    monkeypatch.setenv("GPUSCHED_STATE", str(made.state))
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(made.inventory))
    monkeypatch.delenv("GPUSCHED_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    return made
