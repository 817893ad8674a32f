"""Faults of the declaration: inventory.yaml becomes garbage, loses a node, and is put right."""

from __future__ import annotations

from tests.campaign.faults.base import NODES, Fault

BROKEN = ("{", "", "partitions: 7\n", "\0\1\2", "settings: {tick: never}\n")


class Garbage(Fault):
    """It cannot be read."""

    def inject(self) -> None:
        self.site.inventory.write_text(BROKEN[self.pick(len(BROKEN))])

    def heal(self) -> None:
        self.site.write_inventory()


class Removed(Garbage):
    """It is not there."""

    def inject(self) -> None:
        self.site.inventory.unlink(missing_ok=True)


class Limits(Garbage):
    """Every flavor's time limit, the default of jobs, becomes 45 minutes."""

    def inject(self) -> None:
        self.site.write_inventory(flavors={"time": "45m"})


class WithoutNode(Garbage):
    """A node is left out, under its jobs."""

    def inject(self) -> None:
        self.site.write_inventory(leave_out=[NODES[self.pick(len(NODES))]])
