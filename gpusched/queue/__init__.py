"""The queue: an inbox of command files, one writer, SQLite.

In: commands, events. Out: jobs, records, usage, snapshots. May import: config, model. Begin with `inbox`, then
`store`, then `lifecycle` (the transition table).
"""
