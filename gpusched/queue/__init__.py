"""The queue: an inbox of command files, one writer, SQLite."""
