"""The service behind `gpusched init`: ask hosts what they are, and write the inventory.yaml that says so.

In: hosts' names. Out: inventory.yaml; `demo` is ``make demo``, a cluster on this machine alone. May import: nodes,
config, model. Begin with `discover.discover`.
"""

from gpusched.bootstrap.discover import Discovered, NotDiscovered, discover, parse_hosts
from gpusched.bootstrap.write import inventory_text, refuse_existing, write_inventory

__all__ = [
    "Discovered",
    "NotDiscovered",
    "discover",
    "inventory_text",
    "parse_hosts",
    "refuse_existing",
    "write_inventory",
]
