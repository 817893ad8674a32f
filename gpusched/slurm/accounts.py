"""Who may do what in Slurm, by its accounting database."""

from __future__ import annotations

from gpusched.slurm.commands import Slurm


def admin_levels(slurm: Slurm) -> dict[str, str]:
    """Users that the database knows -> ``None``, ``Operator`` or ``Administrator``.

    Raises:
        NoAnswer: slurmdbd does not answer, or there is none.
    """
    return dict(line.split("|")[:2] for line in _show(slurm, "user", "format=User,AdminLevel") if "|" in line)


def may_act(level: str) -> bool:
    """Whether with this level one may change the jobs of others, and reservations."""
    return level in ("Operator", "Administrator")


def has_account(slurm: Slurm, account: str) -> bool:
    """Whether there is such an account.

    Raises:
        NoAnswer: As above.
    """
    return account in _show(slurm, "account", "format=Account")


def _show(slurm: Slurm, *words: str) -> list[str]:
    return slurm.ask("sacctmgr", "--noheader", "--parsable2", "show", *words).splitlines()
