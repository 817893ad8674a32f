"""Long commands show their progress, on a terminal only."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.cli import activity, output
from gpusched.cli.activity import _cut
from tests.cli.conftest import GPUSCHED, Site

SLOW = """
import sys, time
from gpusched.cli import activity, main
import gpusched.client.overview as overview
was = overview.cluster_rows
def slow(*given, **named):
    activity.update("reading the nodes", 1, 4)
    time.sleep(float(sys.argv[1]))
    return was(*given, **named)
overview.cluster_rows = slow
sys.exit(main.run(sys.argv[2:]))
"""


def on_terminal(site: Site, program: list[str], stdout: int | None = None) -> tuple[str, str]:
    """Return the output to the terminal (stderr, and stdout unless it is a pipe) and to the pipe."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        program, env=site.env | {"TERM": "xterm"}, stdin=theirs, stderr=theirs, stdout=stdout or theirs
    )
    os.close(theirs)
    piped = process.stdout.read().decode() if process.stdout else ""
    shown = b""
    while True:
        try:
            if not (chunk := os.read(ours, 65536)):
                break
        except OSError:  # how Linux says that the other end is closed
            break
        shown += chunk
    os.close(ours)
    assert process.wait(300) == 0
    if process.stdout:
        process.stdout.close()
    return shown.decode(), piped


def test_a_slow_command_says_what_it_is_at_and_takes_that_away(site: Site) -> None:
    shown, _ = on_terminal(site, [sys.executable, "-c", SLOW, "1.6", "flavors"])
    line = re.search(r"\r\x1b\[2Kgpusched: reading the nodes 25 %, [0-9] s \.\.\.", shown)
    assert line is not None, shown
    last = shown.rindex("gpusched: reading the nodes")
    assert "\r\x1b[2K" in shown[last:], "it is gone before the table comes"
    assert shown[last:].index("\r\x1b[2K") < shown[last:].lower().index("flavor")


def test_piped_data_is_unchanged_and_a_quick_one_shows_nothing(site: Site) -> None:
    quick, _ = on_terminal(site, [sys.executable, "-c", SLOW, "0", "flavors"])
    assert "reading the nodes" not in quick
    shown, piped = on_terminal(site, [sys.executable, "-c", SLOW, "1.6", "flavors"], subprocess.PIPE)
    assert "reading the nodes" in shown
    whole = subprocess.run([GPUSCHED, "flavors"], env=site.env, capture_output=True, text=True, check=True)
    assert piped == whole.stdout
    silent = subprocess.run(
        [sys.executable, "-c", SLOW, "1.6", "flavors"], env=site.env, capture_output=True, text=True, check=True
    )
    assert (silent.stdout, silent.stderr) == (piped, "")
    shown, piped = on_terminal(site, [sys.executable, "-c", SLOW, "1.6", "flavors", "--json"], subprocess.PIPE)
    assert shown == ""


def test_reading_a_file_shows_how_much_was_read(tmp_path: Path) -> None:
    from gpusched.traces.readers.columns import CountedFile, open_text

    path = tmp_path / "jobs.csv"
    path.write_text("a\n" * 200_000)
    with open_text(path) as text:
        text.read(1000)
        assert CountedFile.latest is not None
        assert (CountedFile.latest.path, CountedFile.latest.size) == (path, 400_000)
        assert 1000 <= CountedFile.latest.done < 400_000
        assert re.fullmatch(r"reading jobs.csv \d+ %, 0 s", _line())
        text.read()
        assert CountedFile.latest.done == 400_000


def test_a_line_is_no_wider_than_the_terminal() -> None:
    line = "gpusched: job 1 PENDING (Resources: needs 8 GPUs, 3 are free), 12 s ..."
    assert _cut(line, len(line)) == line
    assert _cut(line, 40) == "gpusched: job 1 PENDING (Re..., 12 s ..."


def test_a_module_that_is_being_imported_has_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that draws the line would end with a traceback on the user's terminal."""
    monkeypatch.setitem(sys.modules, "gpusched.traces.readers.columns", types.ModuleType("columns"))
    assert _line() == "reading jobs, 0 s"


def test_the_line_is_erased_once_the_screen_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendering thousands of rows takes a second, in which it returns: the screen would begin on it."""
    order: list[str] = []

    class Screen:
        def __rich_console__(self, console: object, options: object) -> Iterator[str]:
            order.append("rendered")
            yield "screen"

    monkeypatch.setattr(activity, "erase", lambda: order.append("erased"))
    output.print_rich(Screen())
    assert order == ["rendered", "erased"]


def _line() -> str:
    shown = activity.Activity("reading jobs")
    shown.stop()
    return shown.line()
