"""How gpusched reaches its nodes and reads them.

In: a node of the inventory, argv lists. Out: readings, scripts for runtimes, bytes of logs. May import: config,
model. Begin with `transport`, then `probe`, then `runtimes`; ``payload`` is the probe that runs on nodes,
by their own python3; what launches a job there is a shell script of `runtimes`.
"""
