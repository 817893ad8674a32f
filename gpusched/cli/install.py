"""``gpusched install`` and ``gpusched uninstall``: a login node's shared installation."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpusched.cli import output
from gpusched.config.paths import SHARED_STATE
from gpusched.errors import GpuschedError, UsageError

if TYPE_CHECKING:
    from gpusched.bootstrap.shared import Installation, Step

app = typer.Typer()

SharedOption = Annotated[bool, typer.Option("--shared", help="For all users of this machine (as root).")]
PrefixOption = Annotated[
    Path | None,
    typer.Option("--prefix", metavar="DIR", show_default=False, help="Into a system image: DIR stands for /."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the steps only.")]


@app.command("install")
def install(
    shared: SharedOption = False,
    user: Annotated[str, typer.Option("--user", help="System user of the controller.")] = "gpusched",
    state: Annotated[Path, typer.Option("--state", metavar="DIR", help="State folder.")] = SHARED_STATE,
    prefix: PrefixOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Set up the system user, state folder, inbox and systemd unit. A second run changes nothing."""
    from gpusched.bootstrap.shared import Installation

    _require_shared(shared)
    installation = Installation(user, state, prefix)
    _carry_out("install", installation, installation.install_steps(), dry_run)


@app.command("uninstall")
def uninstall(
    shared: SharedOption = False,
    prefix: PrefixOption = None,
    purge: Annotated[bool, typer.Option("--purge", help="Also remove all data, settings and the user.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Even while jobs run.")] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Remove what install --shared made; the data is kept. Refused while jobs run."""
    from gpusched.bootstrap.shared import Installation

    _require_shared(shared)
    installation = Installation.find(prefix)
    _carry_out("uninstall", installation, _uninstall_steps(installation, purge, force), dry_run)


def _uninstall_steps(installation: Installation, purge: bool, force: bool) -> Iterator[Step]:
    if not force:
        installation.require_idle(purge)
    yield from installation.uninstall_steps(purge)


def _require_shared(shared: bool) -> None:
    if not shared:
        raise UsageError(
            "only the shared installation has these steps", "add --shared; for yourself nothing needs to be installed"
        )


def _carry_out(command: str, installation: Installation, steps: Iterable[Step], dry_run: bool) -> None:
    """Print each step and do it, and record in the installation's audit log what changed it, or failed to.

    Raises:
        GpuschedError: A step failed, or needs root.
    """
    from gpusched.client.audit import record_command, recorded_failure

    state, changed = installation.state_here, False
    with recorded_failure(state, command) if not dry_run else contextlib.nullcontext():
        for step in steps:
            verb = "      " if step.act is None else "would " if dry_run else "done  "
            if step.act is not None and not dry_run:
                if os.geteuid():
                    raise GpuschedError(f"{step.what}: only root can do this", "use sudo, or --dry-run")
                try:
                    step.act()
                except OSError as error:
                    raise GpuschedError(f"{step.what}: {error.strerror or error}") from None
                changed = True
            output.print_line(f"{verb}{step.what}" + (f": {step.note}" if step.note else ""))
    if changed:
        record_command(state, command)
