"""What is odd or cannot be is refused in one line that says where, what, and what to do."""

from __future__ import annotations

import io
import pwd
import sys
from pathlib import Path

import pytest

from gpusched.cli import main, output
from gpusched.config import paths
from gpusched.errors import UsageError
from gpusched.nodes.ssh_config import SshHop
from gpusched.nodes.ssh_connect import _addresses
from gpusched.nodes.transport import TransportError
from tests.cli.conftest import Site
from tests.traces.samples import PHILLY_CSV


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("audit --until soon", "--until 'soon' is neither a time nor a span; for example 12h, 7d or 2026-11-20T18:00"),
        ("audit --since 1d --until 2d", "--until 2d is before --since 1d; choose a later one"),
        ("reserve dgx-1v-1 --name x --to now+2h --for 2h", "--to and --for cannot be combined; use one of them"),
        ("reserve dgx-1v-1 --name x", "no end given: use --to or --for; --to 2026-11-20T18:00, --for 4h"),
        ("reserve dgx-1v-1 --name x --from 2020-01-01 --for 1h --users root",
         "its end (2020-01-01 01:00:00) is in the past; see --from, --to and --for"),
        ("reserve --gpus 0 --name x --for 1h",
         "invalid value for '--gpus': 0 is less than 1; see 'gpusched reserve --help'"),
        ("trace slice t.csv --output=", ".: cannot be written: Device or resource busy"),
        ("metrics --textfile none/gpusched.prom", "none/gpusched.prom: No such file or directory"),
        ("status -u \udcff", "found '\\udcff', expected UTF-8"),
        ("cancel -y -u \udcff", "found '\\udcff', expected UTF-8"),
        ("replay t.csv -P fifo -N 99999999999", "--nodes and --gpus-per-node are at most 1000000"),
        ("replay t.csv -P fifo --gpus-per-node 99999999999", "--nodes and --gpus-per-node are at most 1000000"),
        ("replay t.csv -P fifo --load 0.0000000001", "a load of 1e-10 needs more than 1000000 nodes; for example 0.9"),
    ],
)  # fmt: skip
def test_it_is_said_in_one_line(site: Site, words: str, says: str) -> None:
    (site.folder / "t.csv").write_text(PHILLY_CSV)
    site.fold()
    done = site.call(*words.split())
    assert (done.out, done.err.splitlines()) == ("", [f"gpusched: error: {says}"])
    assert done.code in (1, 2)


def test_a_digit_of_another_script_is_no_number_of_a_signal(site: Site) -> None:
    done = site.call("submit", "-F", "s-V100", "--signal", "\u0663", "--", "true")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "expected such as TERM, USR1@60" in done.err


def test_a_check_that_finds_no_backups_fails(site: Site) -> None:
    assert (
        site.call("backup", "--check", "--to", "none").code,
        site.call("backup", "--list", "--to", "none").code,
    ) == (1, 0)


def test_the_audit_may_end_in_the_future(site: Site) -> None:
    site.submit()
    site.fold()
    assert "submit" in site.call("audit", "--until", "2999-01-01").ok().out


def test_in_a_folder_that_was_removed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = site.folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = site.call("backup", "--to", "backups")
    assert done.err == "gpusched: error: the current folder no longer exists; change to another\n"


def test_without_a_home_the_inventory_of_the_system_is_found(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "GPUSCHED_INVENTORY", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(paths, "SYSTEM_INVENTORY", site.inventory)
    monkeypatch.setattr(paths, "SHARED_STATE", Path("/nonexistent"))
    monkeypatch.chdir("/")
    assert "s-A100" in site.call("flavors").ok().out
    monkeypatch.delenv("GPUSCHED_STATE")
    assert site.call("flavors").err.endswith("HOME is not set, and this user has no home folder; set HOME\n")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "not enough memory"),
        (FileNotFoundError(2, "No such file or directory", ""), "'': No such file or directory"),
    ],
)
def test_what_the_system_refuses(site: Site, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    def fails(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(main, "_dispatch", fails)
    assert site.call("nodes").err == f"gpusched: error: {says}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("replay --nightly --html page.html", "--nightly and --html cannot be combined; use one of them"),
        ("replay --nightly -N 4", "--nightly and --nodes cannot be combined; use one of them"),
        ("replay --nightly --restart 5m", "--nightly and --restart cannot be combined; use one of them"),
        ("status JOB --since 2h", "JOB and --since cannot be combined; use one of them"),
        ("status JOB -n 3", "JOB and -n cannot be combined; use one of them"),
        ("predict JOB --waits", "JOB and --waits cannot be combined; use one of them"),
        ("predict train --gpus 2 --since 30d", "NAME and --since cannot be combined; use one of them"),
        ("nodes --failures --checks", "--failures and --checks cannot be combined; use one of them"),
        ("nodes --failures --topology", "--failures and --topology cannot be combined; use one of them"),
        ("nodes --checks --topology", "--checks and --topology cannot be combined; use one of them"),
        ("nodes --checks -g", "--checks and --gpus cannot be combined; use one of them"),
        ("metrics --dashboard --alerts", "--dashboard and --alerts cannot be combined; use one of them"),
        ("metrics --alerts --textfile -", "--alerts and --textfile cannot be combined; use one of them"),
        ("metrics --listen none --textfile -", "--listen and --textfile cannot be combined; use one of them"),
        ("metrics --log-format json", "--log-format needs --listen; add it"),
        ("web --export page --port 80", "--export and --port cannot be combined; use one of them"),
        ("quota --all -u ada", "--all and --user cannot be combined; use one of them"),
        ("recover --no-backup --from x --inventory none", "--no-backup and --from cannot be combined; use one of them"),
        ("controller --takeover-after 9 -v -q", "--takeover-after needs --standby; add it"),
        ("init dgx1 --no-ssh", "--no-ssh needs --slurm; without it the nodes are probed over SSH"),
        ("init --topology topology.conf -o new.yaml", "--topology and --output cannot be combined; use one of them"),
        ("submit --dry-run --wait -- true", "--dry-run and --wait cannot be combined; a dry run queues nothing"),
    ],
)
def test_an_option_without_effect_is_refused(site: Site, words: str, says: str) -> None:
    job = site.submit()
    site.fold()
    (site.folder / "topology.conf").write_text("SwitchName=s1 Nodes=dgx-1v-1\n")
    done = site.call(*words.replace("JOB", job).split())
    assert (done.code, done.out, done.err) == (2, "", f"gpusched: error: {says}\n")
    assert not (site.folder / "new.yaml").exists()


def test_a_terminal_that_cannot_move_its_cursor_shows_no_live_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def render() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(UsageError, match="--watch needs a terminal"):
        output.watch(render)


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_what_is_no_host_name_is_said_of_it(host: str) -> None:
    hop = SshHop(host=host, port=22, user="u", label=host, known_hosts=())
    with pytest.raises(TransportError, match="cannot be resolved: it is no host name"):
        _addresses(hop, "node", 600)
