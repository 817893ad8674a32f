"""gpusched's data types: frozen, typed values without I/O.

In: nothing. Out: types that all other folders share. May import: nothing of ours. Begin with `jobs`, `resources`,
`snapshot`, `plan`, `events`.
"""
