"""An inventory with declared policies."""

from __future__ import annotations

DECLARED = """\
settings: {tick: 7s, logs: {max_total: 1M}}
partitions:
  p:
    defaults: {gpus: 4, cores: 16, memory: 64G, runtime: podman}
    nodes: [{name: n0}, {name: n1}]
"""
