"""User names by id."""

from __future__ import annotations

import time
from functools import lru_cache

REFRESH_S = 60.0


def user_name(uid: int) -> str:
    """Return the login name of a user id on this machine, or the number."""
    # Not for ever: a directory that was not there for a moment knew no names.
    return _looked_up(uid, time.monotonic() // REFRESH_S)


@lru_cache(1024)
def _looked_up(uid: int, _minute: float) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError, ValueError):
        return str(uid)
