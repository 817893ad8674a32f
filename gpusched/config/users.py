"""User names by id."""

from __future__ import annotations

from functools import lru_cache


@lru_cache
def user_name(uid: int) -> str:
    """Return the login name of a user id on this machine, or the number."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError, ValueError):
        return str(uid)
