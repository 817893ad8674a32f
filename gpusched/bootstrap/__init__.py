"""The service behind `gpusched init`: ask hosts what they are, and write the inventory.yaml that says so.

In: hosts' names. Out: inventory.yaml; `demo` is ``make demo``, a cluster on this machine alone; `shared` sets up a
login node for all its users. May import: views, nodes, queue, config, model. Begin with `discover.discover`.
"""

from gpusched.bootstrap.discover import Discovered, NotDiscovered, discover, parse_hosts
from gpusched.bootstrap.write import inventory_text, known_names, refuse_existing, topology_text, write_inventory

__all__ = [
    "Discovered",
    "NotDiscovered",
    "discover",
    "inventory_text",
    "known_names",
    "parse_hosts",
    "refuse_existing",
    "topology_text",
    "write_inventory",
]
