"""A made-up cluster, its page as a process of its own, and one browser for all tests."""

from __future__ import annotations

import http.client
import json
import os
import pwd
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import pytest

from benchmarks import web as made
from gpusched.model import ids
from gpusched.model.health import Condition, NodeHealth
from gpusched.model.jobs import Allocation, JobRecord, JobSpec, JobState, Mount, NodeAllocation
from gpusched.queue.store import Store
from tests.web.browser import Browser

NASTY = '</script><img src=x onerror="window.hacked=1">{{x}}\'"&amp;'
SECRET = "s3cr3t"  # stands in everything that a job's user alone may see
OUTPUT = b"epoch 1\r\nstep 1\rstep 2\rstep 3\n\x1b[31mloss\x1b[0m 0.25 <b>&\n"


class Answer(NamedTuple):
    """An answer of the server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body's value."""
        return json.loads(self.body)


class Served(NamedTuple):
    """A site and the page of it."""

    folder: Path
    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        """Of its socket."""
        return urlsplit(self.url).port or 0

    def get(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """One question on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
            got = connection.getresponse()
            return Answer(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
        finally:
            connection.close()

    def stop(self) -> None:
        """End the server."""
        if self.process.returncode is None:
            self.process.terminate()
            self.process.communicate()


def account() -> str:
    """Whose connections are the proxy's in these tests: our own."""
    return pwd.getpwuid(os.getuid()).pw_name


def build(folder: Path, nodes: int = 6, jobs: int = 60) -> dict[str, str]:
    """The site, and jobs with output, a name that is markup, tasks, an ``-o`` that is not theirs; ids by name."""
    made.site(folder, nodes, jobs, seed=3)
    now, store = time.time(), Store.create_or_open(folder / "state")
    secret = JobSpec(
        name="own", partition="H100", gpus_per_node=1, cores_per_node=1, memory_mib_per_node=1, time_limit_s=3600,
        command=("python", SECRET), env={f"TOKEN_{SECRET}": SECRET}, workdir=f"/home/{SECRET}", comment=SECRET,
        output=f"/home/{SECRET}/out", mounts=(Mount(f"/data/{SECRET}", "/data"),), script=f"#!/bin/sh\n{SECRET}\n",
        mail=f"ALL:{SECRET}@example.org",
    )  # fmt: skip
    named = {name: ids.mint(now + i) for i, name in enumerate(("own", "nasty", "array", "reaching"))}
    parts = (NodeAllocation(rank=0, node="gpu0001", gpus=(0,), cores=1, memory_mib=1),)
    common: dict[str, Any] = {"uid": 1000, "submit_time": now - 900}
    plain = JobSpec(
        name="sweep", partition="H100", gpus_per_node=1, cores_per_node=1, memory_mib_per_node=1, time_limit_s=60
    )
    with store.transaction():
        store.put_jobs([
            JobRecord(id=named["own"], user="amira", spec=secret, state=JobState.COMPLETED, attempt=1, exit_code=0,
                start_time=now - 800, end_time=now - 700, allocation=Allocation(named["own"], parts), **common),
            JobRecord(id=named["nasty"], user=NASTY, state=JobState.PENDING, reason=NASTY, message=NASTY,
                spec=JobSpec(name=NASTY, partition="H100", gpus_per_node=8, cores_per_node=1, memory_mib_per_node=1,
                             time_limit_s=60), **common),
            JobRecord(id=named["reaching"], user="amira", state=JobState.COMPLETED, attempt=1, exit_code=0,
                spec=msgspec.structs.replace(plain, output=str(folder / "inventory.yaml")), start_time=now - 800,
                end_time=now - 700, allocation=Allocation(named["reaching"], parts),
                **common | {"uid": os.getuid() + 1}),
            JobRecord(id=f"{named['array']}_[10-39]", array_id=named["array"], tasks=((10, 39),), user="chen",
            spec=plain,
                state=JobState.PENDING, reason="Priority", **common),
            *(JobRecord(id=f"{named['array']}_{i}", array_id=named["array"], array_index=i, user="chen", spec=plain,
                  state=JobState.PENDING, reason="Priority", **common) for i in range(10)),
        ])  # fmt: skip
        record = store.node_records()["gpu0005"]
        worn = Condition(kind="pcie-width", gpu="u", index=2, since=now - 60, last_seen=now, detail=f"8 lanes {NASTY}")
        store.put_nodes([msgspec.structs.replace(record, health=NodeHealth(conditions=(worn,)))])
    store.close()
    log = folder / "state" / "logs" / named["own"] / "1.0.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(OUTPUT)
    return named


def move(folder: Path, seed: int) -> None:
    """A tick, and another reason for some tasks of an array: rows change, come and go."""
    made.tick(folder, seed)
    store = Store.create_or_open(folder / "state")
    with store.transaction():
        tasks = [job for job in store.pending() if job.array_id is not None]
        store.put_jobs(msgspec.structs.replace(job, reason=f"Reason{seed}") for job in tasks[seed:])
    store.close()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A site that no test changes."""
    folder = tmp_path_factory.mktemp("web")
    return folder, build(folder)


@pytest.fixture(scope="session")
def served(built: tuple[Path, dict[str, str]]) -> Iterator[Served]:
    """Its page, as it is without options."""
    folder, _ = built
    found = Served(folder, *made.serving(folder))
    yield found
    found.stop()


@pytest.fixture(scope="session")
def behind(built: tuple[Path, dict[str, str]]) -> Iterator[Served]:
    """Its page behind a login proxy, which our own account stands for."""
    folder, _ = built
    found = Served(folder, *made.serving(folder, "--user-header", "X-Remote-User", "--proxy", account()))
    yield found
    found.stop()


@pytest.fixture
def named(built: tuple[Path, dict[str, str]]) -> dict[str, str]:
    """Ids of the jobs that `build` added."""
    return built[1]


@pytest.fixture(scope="session")
def one_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The browser."""
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture
def browser(one_browser: Browser) -> Iterator[Browser]:
    """The same with an empty page and nothing kept of earlier ones; whatever its console says is an error."""
    one_browser.call("Network.setExtraHTTPHeaders", headers={})
    one_browser.go("about:blank")
    one_browser.troubles.clear()
    one_browser.expected = ()
    one_browser.size(1440, 900)
    yield one_browser
    one_browser.run("location.protocol === 'http:' && localStorage.clear()")  # what was chosen
    troubles = [line for line in one_browser.troubles if not any(known in line for known in one_browser.expected)]
    assert troubles == []
