"""JSON by the interpreter's own C functions. Runs on the node: stdlib, Python 3.6+.

The module json is those and, for what they do not do, re: to import it takes longer than Python's own start.
"""

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from typing import Any


class _Lenient:
    """What json's own decoder has, under the names that `make_scanner` looks for; texts may have line breaks."""

    strict = False
    object_hook = object_pairs_hook = array_hook = None  # the last from Python 3.15 on
    parse_float, parse_int = float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}.__getitem__


class _Strict(_Lenient):
    strict = True


def _refuse(value: object) -> "Any":
    raise TypeError("a %s is no JSON" % type(value).__name__)  # noqa: UP031


try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    _scanners = {True: make_scanner(_Strict), False: make_scanner(_Lenient)}  # type: ignore[arg-type]
    _encode = make_encoder(None, _refuse, encode_basestring_ascii, None, ":", ",", False, False, True)
except (AttributeError, ImportError, TypeError):  # not CPython, or a later one with other parameters
    _scanners = {}


def loads(text: str, strict: bool = True) -> "Any":
    """Return the value; as `json.loads`.

    Raises:
        ValueError: It is no JSON.
    """
    if not _scanners:
        import json

        return json.loads(text, strict=strict)
    text = text.strip(" \t\n\r")
    try:
        value, end = _scanners[strict](text, 0)
    except (StopIteration, SystemError):  # the latter in 3.10 and 3.11, for an error that json, not imported, defines
        raise ValueError("it is not JSON") from None
    if end != len(text):
        raise ValueError("more than one value")
    return value


def dumps(value: "Any") -> str:
    """Return the value as text without spaces; as `json.dumps`."""
    if not _scanners:
        import json

        return json.dumps(value, separators=(",", ":"))
    return "".join(_encode(value, 0))
