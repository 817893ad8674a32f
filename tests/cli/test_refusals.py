"""Wrong input is refused in one line that says where, what, and what to do."""

from __future__ import annotations

import io
import os
import pwd
import sys
import threading
from pathlib import Path

import pytest

from gpusched.api import Cluster
from gpusched.cli import main, output
from gpusched.config import openers, paths
from gpusched.errors import MAX_LINE, UsageError
from gpusched.nodes.ssh_config import SshHop
from gpusched.nodes.ssh_connect import _addresses
from gpusched.nodes.transport import TransportError
from tests.cli.conftest import Site
from tests.traces.samples import PHILLY_CSV

COMPILING = "gpusched: compiling the simulator (once after installation or upgrade) ...\n"


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
        ("trace slice t.csv --output=",
         "invalid value for '-o' / '--output': '' names no file; see 'gpusched trace slice --help'"),
        ("backup --to=", "invalid value for '--to': '' names no folder; see 'gpusched backup --help'"),
        ("recover --dry-run --from=", "invalid value for '--from': '' names no file; see 'gpusched recover --help'"),
        ("replay --scenario=", "invalid value for '--scenario': '' names no file; see 'gpusched replay --help'"),
        ("replay --power= t.csv", "invalid value for '--power': '' names no file; see 'gpusched replay --help'"),
        ("status --user=", "invalid value for '-u' / '--user': '' names no user; see 'gpusched status --help'"),
        ("replay --scenario phily", "no file, and no built-in scenario, named 'phily'; did you mean 'philly-like'?"),
        ("replay --scenario none.yaml", "none.yaml: no such file or directory; expected a scenario"),
        ("replay t.csv -P fifo -N 1 --placement=", "no placement named ''; one of first-fit, best-fit, consolidate, "
         "worst-fit, spread, naive, random, fastest, milp, rack, rack-wait, contention, load-balancing, tetris"),
        ("trace slice t.csv -o ./t.csv --jobs 1", "--output ./t.csv is the source; choose another name"),
        ("trace import t.csv -o t.csv", "--output t.csv is the source; choose another name"),
        ("trace fit t.csv -o t.csv", "--output t.csv is the source; choose another name"),
        ("trace scale t.csv -o t.csv --nodes 1 --load 1", "--output t.csv is the source; choose another name"),
        ("replay t.csv -P fifo -N 1 --schedule-out x --html x",
         "--schedule-out and --html name one file; choose two"),
        ("replay t.csv -P fifo -N 1 --schedule-out ./t.csv",
         "--schedule-out ./t.csv is the source; choose another name"),
        ("replay t.csv -P fifo -N 1 --html t.csv", "--html t.csv is the source; choose another name"),
        ("reproduce rltune --quick --trace t.csv --html t.csv", "--html t.csv is the source; choose another name"),
        ("replay t.csv -P fifo -N 1 --seed -1",
         "invalid value for '--seed': -1 is less than 0; see 'gpusched replay --help'"),
        ("reproduce dl2 --quick --restart=", "--restart '' is not a duration; for example 120s"),
        ("reproduce topology --quick --table .", ".: is a directory; expected a table of pairs"),
        ("policy promote fifo --force now --since 7d",
         "--since and --force cannot be combined; with --force nothing is proved"),
        ("policy compare fifo easy --partition=", "there is no partition '' (available: A100, V100, bare)"),
        ("train gist --trace t.csv -N 1 --out=",
         "invalid value for '--out': '' names no folder; see 'gpusched train --help'"),
        ("init dgx[1-", "found the host \"dgx[1-\", expected [user@]host[:port]"),
        ("replay -P fifo --format swf", "--format is for traces, and none is named; name one, or omit it"),
        ("replay -P fifo --strict", "--strict is for traces, and none is named; name one, or omit it"),
        ("replay -P fifo --since=",
         "--since '' is neither a time nor a span; for example 12h, 7d, all or 2026-11-20T18:00"),
        ("replay t.csv -P fifo -N 1 --html /dev/full", "/dev/full: No space left on device"),
        ("replay t.csv -P fifo -N 1 --schedule-out /dev/full", "/dev/full: No space left on device"),
        ("metrics --textfile /dev/full", "/dev/full: No space left on device"),
        ("metrics --listen x", "--listen x: not an address; such as 9836 or 0.0.0.0:9836"),
        ("status -s nan", "--state: there is no state 'nan' (available: PENDING, STARTING, RUNNING, COMPLETING, "
         "COMPLETED, FAILED, CANCELLED, TIMEOUT, OUT_OF_MEMORY, NODE_FAIL, PREEMPTED)"),
        ("backup --list --to nowhere", "--to nowhere: there is no such folder"),
        ("backup --to t.csv", "no backup in {folder}/t.csv: Not a directory; choose another folder: --to, or "
         "settings.backup.to"),
        ("replay t.csv -P fifo -N 1 --outages latin1.csv", 
         "latin1.csv:1: found node,d\ufffdbut, expected node,start,end,drain"),
        ("metrics --textfile none/gpusched.prom", "none/gpusched.prom: No such file or directory"),
        ("status -u \udcff", "found '\\udcff', expected UTF-8"),
        ("cancel -y -u \udcff", "found '\\udcff', expected UTF-8"),
        ("replay t.csv -P fifo -N 99999999999", "--nodes and --gpus-per-node are at most 1000000"),
        ("replay t.csv -P fifo --gpus-per-node 99999999999", "--nodes and --gpus-per-node are at most 1000000"),
        ("replay t.csv -P fifo --load 0.0000000001", "a load of 1e-10 needs more than 1000000 nodes; for example 0.9"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(site: Site, words: str, says: str) -> None:
    (site.folder / "t.csv").write_text(PHILLY_CSV)
    (site.folder / "latin1.csv").write_bytes("node,début\n".encode("latin-1"))
    site.apply_inbox()
    done = site.call(*words.split())
    done.err = done.err.replace(COMPILING, "")
    assert (done.out, done.err.splitlines()) == ("", [f"gpusched: error: {says.replace('{folder}', str(site.folder))}"])
    assert done.code in (1, 2)


def test_a_digit_of_another_script_is_no_number_of_a_signal(site: Site) -> None:
    done = site.call("submit", "-F", "s-V100", "--signal", "\u0663", "--", "true")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "expected such as TERM, USR1@60" in done.err


def test_a_check_that_finds_no_backups_fails(site: Site) -> None:
    (site.folder / "none").mkdir()
    assert (
        site.call("backup", "--check", "--to", "none").code,
        site.call("backup", "--list", "--to", "none").code,
    ) == (1, 0)


def test_the_audit_may_end_in_the_future(site: Site) -> None:
    site.submit()
    site.apply_inbox()
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
    for state in ("", "~nobody-of-that-name/state"):
        monkeypatch.setenv("GPUSCHED_STATE", state)
        said = "no such user, or HOME is not set and this user has no home folder\n"
        assert site.call("flavors").err == f"gpusched: error: {state or '~/.local/state'}: {said}"
    with pytest.raises(UsageError, match="no such user"):
        Cluster(state="~nobody-of-that-name")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "not enough memory"),
        (FileNotFoundError(2, "No such file or directory", ""), "'': No such file or directory"),
    ],
)
def test_system_errors_are_one_line(site: Site, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
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
    site.apply_inbox()
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
def test_an_invalid_host_name_is_reported(host: str) -> None:
    hop = SshHop(host=host, port=22, user="u", label=host, known_hosts=())
    with pytest.raises(TransportError, match="cannot be resolved: it is no host name"):
        _addresses(hop, "node", 600)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trace stats pipe", "pipe: a pipe or device, not a file; write it to a file first"),
        ("trace stats /dev/zero --format swf", "/dev/zero: a pipe or device, not a file; write it to a file first"),
        ("predict pipe", "pipe: a pipe or device, not a file; write it to a file first"),
        ("replay t.csv -P fifo -N 1 --node-list pipe", "pipe: a pipe or device, not a file; write it to a file first"),
        ("replay t.csv -P fifo -N 1 --outages /dev/zero",
         "/dev/zero: a pipe or device, not a file; write it to a file first"),
        ("replay --scenario ./pipe", "pipe: a pipe that nothing writes to; expected a scenario"),
        ("trace generate pipe -o out", "pipe: a pipe that nothing writes to; expected a workload description"),
        ("trace import t.csv -o pipe", "pipe: cannot be written: a pipe that nothing reads"),
        ("replay t.csv -P fifo -N 1 --html pipe", "pipe: a pipe that nothing reads"),
        ("metrics --textfile pipe", "pipe: a pipe that nothing reads"),
        ("submit -F s-A100 --secret TOKEN=@pipe x", "--secret TOKEN: pipe: a pipe that nothing writes to"),
    ],
)  # fmt: skip
def test_a_pipe_without_another_end_is_not_waited_for(
    site: Site, words: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openers, "PIPE_WAIT_S", 0.1)
    (site.folder / "t.csv").write_text(PHILLY_CSV)
    os.mkfifo(site.folder / "pipe")
    site.apply_inbox()
    done = site.call(*words.split())
    assert (done.out, done.err.replace(COMPILING, "")) == ("", f"gpusched: error: {says}\n")


def test_a_description_may_come_from_a_pipe(site: Site) -> None:
    os.mkfifo(site.folder / "pipe")
    writer = threading.Thread(target=lambda: (site.folder / "pipe").write_text("polices: [fifo]\n"))
    writer.start()
    assert "pipe:1: polices: found an unknown key" in site.call("replay", "--scenario", "./pipe").err
    writer.join()


def test_a_file_that_is_missing_is_an_invalid_request(site: Site) -> None:
    for words in ("trace stats none.csv", "replay none.csv -P fifo -N 1", "replay --scenario none.yaml"):
        done = site.call(*words.split())
        assert (done.code, done.err.count("none.")) == (2, 1)


def test_an_unknown_command_of_the_audit_log_differs_from_one_without_entries(site: Site) -> None:
    site.submit()
    site.apply_inbox()
    done = site.call("audit", "--command", "submti")
    assert (done.code, done.out) == (0, "no entries\n")
    assert done.err == "gpusched: no entry of this time has the command 'submti'; did you mean 'submit'?\n"
    assert site.call("audit", "--command", "submit", "--refused").ok().out == "no entries\n"


def test_an_option_overrides_a_scenario_though_it_is_the_default(site: Site) -> None:
    (site.folder / "t.csv").write_text(PHILLY_CSV)
    (site.folder / "s.yaml").write_text("traces: t.csv\nnodes: 1\npolicies: [fifo]\nshare: fractions\nrestart: 5m\n")
    done = site.call("replay", "--scenario", "s.yaml", "--share", "auto", "--restart", "0s", "--json").ok()
    assert any("not as the scenario says: share, restart_s" in note for note in done.json[0]["notes"])
    assert done.json[0]["share"] == "no"


def test_a_path_too_long_for_a_folder_of_backups(site: Site) -> None:
    done = site.call("backup", "--to", "a/" * 1990)
    assert len(done.err) < MAX_LINE + 20
    assert done.code == 1
    assert "internal error" not in done.err
    assert "File name too long" in done.err


def test_two_traces_of_one_name_have_two_schedules(site: Site) -> None:
    for folder in ("a", "b"):
        (site.folder / folder).mkdir()
        (site.folder / folder / "t.csv").write_text(PHILLY_CSV)
    site.call("replay", "a/t.csv", "b/t.csv", "-P", "fifo", "-N", "1", "--schedule-out", "s.csv")
    assert {path.name for path in site.folder.glob("s.*")} == {"s.fifo.csv", "s.fifo-2.csv"}


def test_init_names_a_host_once(site: Site) -> None:
    done = site.call("init", "127.0.0.1:1", "-o", "new.yaml")
    first = done.err.splitlines()[0]
    assert first.startswith("gpusched: 127.0.0.1:1: nothing is listening on 127.0.0.1 port 1")
    assert not (site.folder / "new.yaml").exists()
