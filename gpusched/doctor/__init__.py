"""The service behind `gpusched check`: everything from the file to the GPUs, each with what is wrong and what to do.

In: the inventory, the state folder, the nodes. Out: findings. May import: views, nodes, queue, config, model. Begin
with `examine.examine`.
"""

from gpusched.doctor.examine import examine
from gpusched.doctor.findings import Finding, Status, worst

__all__ = ["Finding", "Status", "examine", "worst"]
