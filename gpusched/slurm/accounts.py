"""Who may do what in Slurm, by its accounting database."""

from __future__ import annotations

from gpusched.slurm.commands import Slurm


def admin_levels(slurm: Slurm) -> dict[str, str]:
    """Users that Slurm's database knows -> ``None``, ``Operator`` or ``Administrator``.

    Raises:
        NoAnswer: slurmdbd does not answer, or there is none.
    """
    rows = slurm.ask("sacctmgr", "--noheader", "--parsable2", "show", "user", "format=User,AdminLevel").splitlines()
    return {user: level for user, bar, level in (row.partition("|") for row in rows) if bar}


def admins(slurm: Slurm) -> tuple[str, ...]:
    """Its operators and administrators, besides root.

    Raises:
        NoAnswer: As above.
    """
    return tuple(u for u, level in sorted(admin_levels(slurm).items()) if level in _MAY_ACT and u != "root")


def may_act(slurm: Slurm, user: str) -> bool:
    """Whether this user may change jobs and reservations of others.

    Raises:
        NoAnswer: As above.
    """
    return admin_levels(slurm).get(user) in _MAY_ACT


def has_account(slurm: Slurm, account: str) -> bool:
    """Whether the database has the account.

    Raises:
        NoAnswer: As above.
    """
    return account in slurm.ask("sacctmgr", "--noheader", "--parsable2", "show", "account", "format=Account").split()


_MAY_ACT = ("Operator", "Administrator")
