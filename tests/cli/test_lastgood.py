"""Commands beside an inventory.yaml that an edit has broken: they use the last good one, as the controller does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gpusched.queue.lastgood import declared_or_kept, keep
from gpusched.queue.store import Store
from tests.cli.conftest import GPUSCHED, INVENTORY, Site
from tests.testbed import wait_until

JOB = ("-F", "s-A100", "--image", "i", "--", "true")
COMMANDS = {
    "submit": ("submit", *JOB),
    "submit --dry-run": ("submit", "--dry-run", *JOB),
    "submit of a flavor": ("submit", "-F", "one", "--", "true"),
    "nodes": ("nodes",),
    "nodes --topology": ("nodes", "--topology"),
    "flavors": ("flavors",),
    "quota": ("quota",),
    "power": ("power",),
    "reservations": ("reservations",),
    "policy list": ("policy", "list"),
    "policy show": ("policy", "show", "easy"),
    "why": ("why",),
    "reserve": ("reserve", "pc1", "--from", "now+1h", "--for", "1h", "--users", "root", "--name", "class"),
}


@pytest.fixture
def broken(site: Site) -> Site:
    """A site whose controller has taken up a good inventory.yaml, which is now broken in line 2."""
    site.submit()
    site.fold()
    store = Store.create_or_open(site.state)
    keep(store, declared_or_kept(site.inventory, site.state))
    store.close()
    site.inventory.write_text("defaults: {runtime: podman}\npartitions: [\n")
    return site


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_uses_the_last_good_copy(broken: Site, name: str, as_json: bool) -> None:
    words = list(COMMANDS[name])
    if name == "why":
        (job,) = broken.call("status", "--json").json
        words.append(job["id"])
    if as_json:
        words.insert(2 if words[0] == "policy" else 1, "--json")
    done = broken.call(*words)
    assert done.code == 0, done.err
    (line,) = (line for line in done.err.splitlines() if "inventory.yaml" in line)
    assert line.startswith(f"gpusched: {broken.inventory}:")
    assert "expected" in line
    assert "; using the last good copy, of 20" in line
    if as_json:
        json.loads(done.out)
        assert done.err.count("\n") == 1


def test_the_page_is_exported(broken: Site, tmp_path: Path) -> None:
    done = broken.call("web", "--export", str(tmp_path / "page"))
    assert (done.code, done.err.count("using the last good copy")) == (0, 1), done.err
    assert (tmp_path / "page/index.html").exists()


def test_a_job_is_run(broken: Site, tmp_path: Path) -> None:
    """Up to where it waits for the controller, of which there is none."""
    waiting = len(broken.commands())
    with (tmp_path / "err").open("w") as err:
        run = subprocess.Popen([GPUSCHED, "run", *JOB], env=broken.env, stderr=err, stdin=subprocess.DEVNULL)
        try:
            wait_until(lambda: len(broken.commands()) > waiting, 60, "its command")
        finally:
            run.kill()
            run.wait()
    assert (tmp_path / "err").read_text().count("using the last good copy") == 1


def test_check_fails(broken: Site) -> None:
    done = broken.call("check")
    assert done.code != 0
    assert f"{broken.inventory}:" in done.out


def test_without_a_last_good_copy_it_is_an_error(site: Site, tmp_path: Path) -> None:
    site.inventory.write_text("partitions: [\n")
    done = site.call("nodes")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"gpusched: error: {site.inventory}:")
    assert done.err.count("\n") == 1


def test_a_file_that_is_gone_is_like_a_broken_one(broken: Site) -> None:
    broken.inventory.unlink()
    done = broken.call("nodes", "--json")
    assert (done.code, len(done.json)) == (0, 7)
    assert "which is not there" in done.err
    broken.inventory.write_text(INVENTORY)
    broken.call("nodes").ok()


def test_completion_is_silent(broken: Site) -> None:
    done = broken.run(env={"_GPUSCHED_COMPLETE": "complete_bash", "COMP_WORDS": "gpusched nodes p", "COMP_CWORD": "2"})
    assert (done.err, "pc1" in done.out) == ("", True)
