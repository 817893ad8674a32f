"""JSON by the interpreter's own C functions. Runs on the node: stdlib, Python 3.6+.

The module json is those and, for what they do not do, re: to import it takes longer than Python's own start.
"""

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from typing import Any

try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner
except ImportError:  # not CPython
    make_scanner = None  # type: ignore[assignment, misc]


class _Lenient:
    """What json's own decoder has, under the names that `make_scanner` looks for; texts may have line breaks."""

    strict = False
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}.__getitem__


class _Strict(_Lenient):
    strict = True


def loads(text: str, strict: bool = True) -> "Any":
    """Return the value; as `json.loads`.

    Raises:
        ValueError: It is no JSON.
    """
    if make_scanner is None:
        import json

        return json.loads(text, strict=strict)
    text = text.strip(" \t\n\r")
    try:
        value, end = make_scanner(_Strict if strict else _Lenient)(text, 0)  # type: ignore[arg-type]
    except StopIteration:
        raise ValueError("it is not JSON") from None
    if end != len(text):
        raise ValueError("more than one value")
    return value


def dumps(value: "Any") -> str:
    """Return the value as text without spaces; as `json.dumps`."""
    if make_scanner is None:
        import json

        return json.dumps(value, separators=(",", ":"))
    encode = make_encoder({}, _refuse, encode_basestring_ascii, None, ":", ",", False, False, True)
    return "".join(encode(value, 0))


def _refuse(value: object) -> "Any":
    raise TypeError("a %s is no JSON" % type(value).__name__)  # noqa: UP031
