"""User privileges and accounts, from Slurm's accounting database."""

from __future__ import annotations

from gpusched.slurm.commands import Slurm


def admin_levels(slurm: Slurm) -> dict[str, str]:
    """Return each user in the database with its admin level: ``None``, ``Operator`` or ``Administrator``.

    Raises:
        NoAnswer: slurmdbd does not respond, or none is configured.
    """
    return dict(line.split("|")[:2] for line in _show(slurm, "user", "format=User,AdminLevel") if "|" in line)


def may_manage(level: str) -> bool:
    """Return whether this admin level may change other users' jobs, and reservations."""
    return level in ("Operator", "Administrator")


def has_account(slurm: Slurm, account: str) -> bool:
    """Return whether the account exists.

    Raises:
        NoAnswer: As above.
    """
    return account in _show(slurm, "account", "format=Account")


def _show(slurm: Slurm, *words: str) -> list[str]:
    return slurm.run_command("sacctmgr", "--noheader", "--parsable2", "show", *words).splitlines()
