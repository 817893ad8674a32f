"""Commands beside an inventory.yaml that an edit has broken: they use the last good one, as the controller does."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from gpusched.client import slurm
from gpusched.config.inventory import load_inventory
from gpusched.errors import GpuschedError
from gpusched.promotion.live import live_policies
from gpusched.queue.lastgood import declared_or_kept, store_declared
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
    site.apply_inbox()
    store = Store.create_or_open(site.state)
    store_declared(store, declared_or_kept(site.inventory, site.state))
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


@pytest.fixture
def misspelt(site: Site) -> Site:
    """A site whose inventory.yaml is in order, and one of whose policies was edited since, wrongly."""
    site.inventory.write_text(INVENTORY.replace("    max_time: 2d\n", "    max_time: 2d\n    policy: mine\n"))
    policy = site.folder / "policies/mine.yaml"
    policy.parent.mkdir()
    policy.write_text("order: sjf\n")
    site.submit("-F", "one", "--", "true")
    site.apply_inbox()
    store = Store.create_or_open(site.state)
    store_declared(store, declared_or_kept(site.inventory, site.state))
    store.close()
    policy.write_text("order: sjff\n")
    return site


@pytest.mark.parametrize(
    "words",
    [
        ("why",),
        ("submit", "--dry-run", "-F", "one", "--", "true"),
        ("policy", "list"),
        ("policy", "show", "easy"),
        ("policy", "promote", "easy", "-p", "bare", "--force", "a test"),
    ],
    ids=" ".join,
)
def test_a_policy_whose_file_was_broken_is_the_last_good_one(misspelt: Site, words: tuple[str, ...]) -> None:
    if words == ("why",):
        (job,) = misspelt.call("status", "--json").json
        words = ("why", job["id"])
    done = misspelt.call(*words)
    assert done.code == 0, done.err
    assert done.err.count("policies/mine.yaml:1: order:") == 1
    assert "; using the last good copy, of 20" in done.err


def test_predictions_use_the_last_good_policy(misspelt: Site) -> None:
    with closing(Store.create_or_open(misspelt.state)) as store:
        live = live_policies(load_inventory(misspelt.inventory), store)
        assert live["bare"].order == "sjf"
        other = msgspec.structs.replace(load_inventory(misspelt.inventory), path="another.yaml")
        with pytest.raises(GpuschedError, match="mine"):
            live_policies(other, store)


def test_a_training_beside_a_broken_inventory(broken: Site) -> None:
    """Up to where it has no jobs to learn from."""
    done = broken.call("train", "gist", "-p", "bare", "--trace", "none.csv")
    warning, error = done.err.splitlines()
    assert "using the last good copy" in warning
    assert "none.csv" in error


def test_owners_of_jobs_are_known_without_the_inventory(broken: Site) -> None:
    waiting = len(broken.commands())
    assert not slurm.manages_jobs()
    kept = declared_or_kept(broken.inventory, broken.state)
    slurms = msgspec.structs.replace(kept.inventory, engine="slurm")
    with closing(Store.create_or_open(broken.state)) as store:
        store_declared(store, msgspec.structs.replace(kept, trouble="", inventory=slurms))
    broken.inventory.write_text("")
    assert slurm.manages_jobs()
    broken.inventory.unlink()
    assert slurm.manages_jobs()
    assert broken.call("submit", *JOB).code != 0
    assert len(broken.commands()) == waiting


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
