"""Options of the commands that log, and the start of their log."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from gpusched.cli import activity, output
from gpusched.controller import logsetup
from gpusched.errors import UsageError, Warnings

VerboseOption = Annotated[
    int,
    typer.Option(
        "-v", "--verbose", count=True, help="Also log starts and ends of jobs; twice: also debug messages.",
        show_default=False,
    ),
]  # fmt: skip
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Log only warnings and errors.")]
LogFormatOption = Annotated[
    logsetup.LogFormat | None,
    typer.Option(
        "--log-format",
        help="Form of the log. Default: journal (with systemd's priorities) if stderr is the journal, else text.",
        show_default=False,
    ),
]


def start_log(name: str, log_format: logsetup.LogFormat | None, verbose: int = 0, quiet: bool = False) -> None:
    """Log on stderr from now on, the command's warnings and its final error too, these under ``name``.

    Raises:
        UsageError: Both ``verbose`` and ``quiet``.
    """
    if verbose and quiet:
        raise UsageError("--verbose and --quiet cannot be combined", "use one of them")
    logsetup.start(-1 if quiet else verbose, log_format, activity.erase)
    log = logging.getLogger(name)
    Warnings.show = lambda line: log.warning("%s", line)
    output.log_errors(lambda line: log.error("%s", line))
