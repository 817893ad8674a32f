"""SQLite connections that close with their last reference."""

from __future__ import annotations

import sqlite3
from contextlib import suppress


class ClosingConnection(sqlite3.Connection):
    """A connection that closes with its last reference, as all did before Python 3.13 began to warn about it.

    A command reads with one until it ends, and so does each thread of `gpusched.Cluster`.
    """

    def __del__(self) -> None:
        with suppress(sqlite3.ProgrammingError):  # of another thread: then SQLite closes it with the object
            self.close()
