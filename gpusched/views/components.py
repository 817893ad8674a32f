"""The installed components, as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gpusched.views import common

if TYPE_CHECKING:
    from rich.table import Table

    from gpusched.config.plugins import Component


def table(components: Iterable[Component]) -> Table:
    """Return the components by name, with the package that each comes from."""
    found = common.plain_table("NAME", "FROM", "OBJECT", drop=("OBJECT",))
    for component in components:
        found.add_row(*map(common.clean, (component.name, component.origin, component.value)))
    return found
