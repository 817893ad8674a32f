"""Output of all commands: JSON, tables, warnings, errors, live screens. Rich is imported only if needed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gpusched.cli import activity
from gpusched.errors import UsageError, bounded
from gpusched.errors import printable as printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    from gpusched.client.context import Client

T = TypeVar("T")
_json_mode = False
_log_error: Callable[[str], None] | None = None
PIPE_WIDTH = 4000


def _set_json(is_given: bool) -> bool:
    global _json_mode
    _json_mode = is_given  # `prepare` may have seen the option of a job's command
    return is_given


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON value.", callback=_set_json, is_eager=True)]
WatchOption = Annotated[bool, typer.Option("-w", "--watch", help="Live screen; q or Ctrl-C quits.")]


def group(name: str, help: str) -> typer.Typer:
    """Return a command with subcommands; called alone it prints its help."""
    app = typer.Typer(name=name, rich_markup_mode=None, invoke_without_command=True, add_completion=False, help=help)

    @app.callback()
    def alone(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print_line(context.get_help())

    return app


def prepare(argv: Sequence[str]) -> None:
    """Decide how errors of this command line are shown (JSON if it says ``--json`` before any ``--``)."""
    global _json_mode, _log_error
    _log_error = None
    options = argv[: argv.index("--")] if "--" in argv else argv
    _json_mode = "--json" in options
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def json_mode() -> bool:
    """Return whether this command prints JSON."""
    return _json_mode


def emit_json(value: Any) -> None:
    """Print exactly one JSON value (structs, dicts, lists...), indented on a terminal."""
    import msgspec

    activity.erase()
    encoded = msgspec.json.encode(value)
    if sys.stdout.isatty():
        encoded = msgspec.json.format(encoded, indent=2)
    text = encoded.decode()
    if not text.isascii():  # JSON does not escape C1 and bidirectional controls, which terminals obey
        import json

        text = "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    _write(text + "\n")


def show(data: Callable[[], Any], screen: Callable[[], RenderableType], live: bool = False) -> None:
    """Print one JSON value with ``--json``, else a screen, repeatedly if ``live``; only the one printed is computed.

    Raises:
        UsageError: See `watch`.
    """
    if live:
        watch(screen)
    elif _json_mode:
        emit_json(data())
    else:
        print_rich(screen())


def show_store(
    client: Client,
    read: Callable[[], T],
    screen: Callable[[T], RenderableType],
    data: Callable[[T], Any] = lambda found: found,
    live: bool = False,
) -> None:
    """Call `show` with what ``read`` returns; each screen reads the store anew."""

    def drawn() -> RenderableType:
        client.reopen()
        return screen(read())

    show(lambda: data(read()), drawn, live)


def print_line(text: str) -> None:
    """Print plain text on stdout, usually one line; no markup, no wrapping, control characters are escaped."""
    activity.erase()
    _write(_printable_lines(text) + "\n")


def print_text(text: str) -> None:
    """Print a user's text exactly; on a terminal control characters other than tabs are escaped."""
    if sys.stdout.isatty():
        text = "\t".join(map(_printable_lines, text.split("\t")))
    _write(text)


def _write(text: str) -> None:
    with _named_stdout():
        sys.stdout.write(text)


@contextmanager
def _named_stdout() -> Iterator[None]:
    """Name stdout in errors of writing it, as files are named."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or "stdout"
        raise


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))


def note(text: str) -> None:
    """Print one line on stderr for people; silent in JSON mode."""
    if not _json_mode:
        activity.erase()
        sys.stderr.write(f"gpusched: {printable(text)}\n")


def warn(text: str) -> None:
    """Print one line on stderr, also in JSON mode."""
    activity.erase()
    sys.stderr.write(f"gpusched: {printable(text)}\n")


def write_page(path: str, page: str) -> None:
    """Write an HTML page and print its path."""
    from gpusched.config.openers import open_output

    with open_output(path) as file:
        file.write(page)
    note(f"page written to {path}")


def print_error(line: str) -> None:
    """Print an error: one line on stderr (in the log of a command that logs), or in JSON mode on stdout."""
    line = bounded(line)
    if _json_mode:
        emit_json({"error": line})
    elif _log_error is not None:
        activity.stop()
        _log_error(line)
    else:
        activity.stop()
        sys.stderr.write(f"gpusched: error: {line}\n")


def log_errors(log: Callable[[str], None]) -> None:
    """Give the error of this command to its log."""
    global _log_error
    _log_error = log


def screen_width() -> int:
    """Return the columns of the terminal; a large number without one."""
    if not sys.stdout.isatty():
        return PIPE_WIDTH
    import shutil

    return shutil.get_terminal_size().columns


def console() -> Console:
    """Return a Rich console on stdout. Without a terminal it is wide, so that nothing is cut or wrapped in a pipe."""
    from rich.console import Console as RichConsole

    class Console(RichConsole):
        def on_broken_pipe(self) -> None:  # Rich's own exits with 1
            raise BrokenPipeError

    if sys.stdout.isatty():  # COLUMNS=0 means unknown, but Rich would print nothing
        width = screen_width() if os.environ.get("COLUMNS") == "0" else None
        return Console(highlight=False, soft_wrap=False, width=width)
    return Console(highlight=False, width=PIPE_WIDTH)


def print_rich(renderable: RenderableType) -> None:
    """Print a table, a text or another Rich renderable."""
    screen = console()
    with _named_stdout(), screen.capture() as captured:  # the progress line may return meanwhile
        screen.print(_SafeRenderable(renderable))
    activity.erase()
    _write(captured.get())


class _SafeRenderable:
    """A renderable with texts (users wrote some) that cannot control the terminal; Rich's own colors are kept."""

    def __init__(self, renderable: RenderableType) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._renderable, options):
            is_safe = segment.control or segment.text == "\n" or segment.text.isprintable()
            yield segment if is_safe else segment._replace(text=_printable_lines(segment.text))


@contextmanager
def progress(what: str) -> Iterator[Callable[[float, int], None] | None]:
    """Show a progress bar on stderr; yield its callback (done, total); None without a terminal or with ``--json``."""
    if _json_mode or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    activity.stop()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def watch(render: Callable[[], RenderableType], interval_s: float = 2.0) -> None:
    """Show the result of ``render`` repeatedly, until q or Ctrl-C.

    Raises:
        UsageError: Together with ``--json``, or without a terminal.
    """
    if _json_mode:
        raise UsageError("--watch and --json cannot be combined", "use one of them")
    if not sys.stdout.isatty() or (screen := console()).is_dumb_terminal:  # Rich would show nothing on a dumb one
        raise UsageError("--watch needs a terminal", "omit it, or run 'watch gpusched ...'")
    from rich.live import Live

    activity.stop()
    from gpusched.cli.keys import quit_pressed, single_keys

    try:
        with single_keys(), Live(_SafeRenderable(render()), screen=True, auto_refresh=False, console=screen) as live:
            while not quit_pressed(interval_s):
                live.update(_SafeRenderable(render()), refresh=True)
    except KeyboardInterrupt:
        pass


def confirm(action: str, yes: bool) -> bool:
    """Ask for confirmation unless ``yes``.

    Raises:
        UsageError: There is no prompt (no terminal, or JSON mode).
    """
    if yes:
        return True
    if _json_mode or not sys.stdin.isatty():
        raise UsageError("cannot prompt without a terminal", f"use -y to {action}")
    activity.stop()
    sys.stderr.write(f"{printable(action)}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
