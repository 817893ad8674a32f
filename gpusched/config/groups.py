"""``groups:`` of inventory.yaml -> Groups, checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from gpusched.config import fields
from gpusched.config.yamlfile import Value, suggestion
from gpusched.model.limits import Group, Groups

_EXPECTED = "a mapping: name of group -> members, parent, shares"


def read_groups(value: Value | None, noting: Callable[[], AbstractContextManager[None]] = nullcontext) -> Groups:
    """The groups of a mapping; none where there is no mapping.

    Args:
        value: The mapping.
        noting: Around what may be wrong; errors that it swallows leave their group out.

    Raises:
        FileError: The first thing wrong with it.
    """
    entries = {} if value is None else value.fields(_EXPECTED)
    groups: dict[str, Group] = {}
    for name, entry in entries.items():
        with noting():
            values = fields.read(entry, fields.GROUP, "a mapping with members, parent, shares")
            groups[name] = Group(name=fields.check_name(name, entry), **values)
    found = Groups(groups=tuple(groups.values()))
    for group in groups.values():
        with noting():
            _check_parent(entries[group.name], group, found, list(entries))
    return found


def _check_parent(entry: Value, group: Group, groups: Groups, names: list[str]) -> None:
    if not group.parent:
        return
    at = entry.fields("a mapping")["parent"]
    if group.parent not in names:
        raise at.error(f"the name of a group of this inventory{suggestion(group.parent, names)}")
    path = groups.above(group.name)
    top = groups.get(path[-1])
    if top is not None and top.parent in path:
        raise at.error("parents that lead to the top", f"a circle ({' -> '.join((*path, top.parent))})")
