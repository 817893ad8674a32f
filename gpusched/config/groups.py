"""``groups:``, ``limits:`` and ``qos:`` of inventory.yaml -> Groups and Quotas, validated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from gpusched.config import fields
from gpusched.config.yamlfile import Value, suggestion
from gpusched.model.limits import Group, Groups, Limits, Qos, Quotas

_EXPECTED = "a mapping: name of group -> members, parent, shares, limits"


def read_groups(value: Value | None, noting: Callable[[], AbstractContextManager[None]] = nullcontext) -> Groups:
    """Read groups from a mapping; empty where there is no mapping.

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
            values = fields.read(entry, fields.GROUP, "a mapping with members, parent, shares, limits")
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


def read_quotas(
    limits: Value | None,
    qos: Value | None,
    groups: Groups,
    noting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Quotas:
    """Read all limits: users' from ``limits``, classes' from ``qos``, groups' from ``groups``.

    Raises:
        FileError: The first thing wrong with them.
    """
    each, users, classes = Limits(), dict[str, Limits](), list[Qos]()
    known = {} if limits is None else limits.fields("a mapping with each_user, users", ("each_user", "users"))
    if "each_user" in known:
        with noting():
            each = fields.limits(known["each_user"])
    for name, entry in known["users"].fields("a mapping: user -> limits").items() if "users" in known else ():
        with noting():
            users[fields.user_name(name, entry)] = fields.limits(entry, each)
    for name, entry in {}.items() if qos is None else qos.fields("a mapping: name of class -> its keys").items():
        with noting():
            classes.append(_class(name, entry, groups))
    return Quotas(each=each, users=users, groups=groups, qos=tuple(classes))


def _class(name: str, entry: Value, groups: Groups) -> Qos:
    expected = "a mapping with priority, users, groups, limits, per_user, preemptible, exempt"
    found = Qos(name=fields.check_name(name, entry), **fields.read(entry, fields.QOS, expected))
    names = [group.name for group in groups.groups]
    for group in found.groups:
        if group not in names:
            at = entry.fields(expected)["groups"]
            raise at.error(f"names of groups of this inventory{suggestion(group, names)}", f'the group "{group}"')
    return found
