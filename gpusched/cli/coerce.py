"""Plain conversion of option values.

New versions of typer build a pydantic adapter for every parameter when they parse, which costs more start-up time than
all of ``gpusched submit``. Strings, words of an enumeration, numbers and lists of them need none of that. Other types,
and older versions of typer, keep typer's own way.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, get_args, get_origin

import typer

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{0,18})?")
_INFO = ("parser", "click_type", "formats", "path_type")


class _Plain:
    """Stands in for typer's runtime parameter: ``coerce`` is all it is asked for."""

    def __init__(self, kind: Any, low: float | None, high: float | None) -> None:
        self._kind, self._low, self._high = kind, low, high

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        many = param.multiple or param.nargs == -1
        if value is None:
            return () if many else None
        if many:
            return [self._one(item, param, ctx) for item in value]
        return self._one(value, param, ctx)

    def _one(self, value: Any, param: Any, ctx: Any) -> Any:
        if self._kind in (str, bool) or not isinstance(value, str):
            return value
        if issubclass(self._kind, StrEnum):
            if value not in (words := [one.value for one in self._kind]):
                choices = ", ".join(map(repr, words))
                raise typer.BadParameter(f"{value[:80]!r} is not one of {choices}.", ctx=ctx, param=param)
            return self._kind(value)
        pattern, what = (_INTEGER, "a whole number") if self._kind is int else (_NUMBER, "a number")
        if not pattern.fullmatch(value):
            raise typer.BadParameter(f"{value[:80]!r} is not {what}", ctx=ctx, param=param)
        number = self._kind(value)
        if self._low is not None and number < self._low:
            raise typer.BadParameter(f"{number} is less than {self._low:g}", ctx=ctx, param=param)
        if self._high is not None and number > self._high:
            raise typer.BadParameter(f"{number} is more than {self._high:g}", ctx=ctx, param=param)
        return number


def make_plain(command: Any) -> None:
    """Give the command's plain parameters (its own --help, too) the plain conversion."""
    original = command.get_params

    def get_params(ctx: Any) -> list[Any]:
        params: list[Any] = original(ctx)
        for param in params:
            _replace(param)
        return params

    command.get_params = get_params


def _replace(param: Any) -> None:
    descriptor = getattr(param, "type_descriptor", None)
    if descriptor is None or not hasattr(param, "_runtime_param") or isinstance(param._runtime_param, _Plain):
        return
    kind = descriptor.annotation
    if get_origin(kind) is list:
        (kind,) = get_args(kind) or (str,)
    info = descriptor.parameter_info
    plain = kind in (str, int, float, bool) or (isinstance(kind, type) and issubclass(kind, StrEnum))
    if plain and not any(getattr(info, name, None) for name in _INFO):
        param._runtime_param = _Plain(kind, info.min, info.max)
