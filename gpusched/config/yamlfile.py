"""YAML files with the line of every key, so that errors name file:line, key, value found and expected.

Scalars stay text until a reader asks for a type: ``12:00:00`` is not a base-60 number here, nor is a node called ``no``
False. Anchors, aliases and ``<<`` merges work; tags, duplicate keys and second documents are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import yaml

from gpusched.config.openers import open_input
from gpusched.errors import FileError, UnreadableFile

T = TypeVar("T")
_Kind = Literal["scalar", "list", "mapping"]

_PARSER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # without libyaml: ten times slower, the same events
MAX_BYTES = 16 * 1024 * 1024
_MAX_DEPTH = 32
_MAX_NODES = 1_000_000  # once aliases are followed: a few lines of aliases of aliases stand for billions
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# A range of hosts between braces, as in {nodes: gpu-[01-04]}: YAML takes no bracket there, so it can mean nothing else.
# What is quoted, and comments, are matched first and stay as they are. An escaped quote opens nothing: many of them
# without an end would each be followed to the end of the file.
_RANGE = re.compile(
    r"""(?<!\w)'(?:[^']|'')*'|(?<!\\)"(?:[^"\\]|\\.)*"|(?:^|\s)\#[^\n]*"""
    r"|(?<=[:,\[{\s])(?P<range>[A-Za-z0-9][\w.-]*\[[0-9,-]+\](?:[\w.-]|\[[0-9,-]+\])*)(?=\s*[,}\]\n])"
)
_NUMBER = re.compile(r"[-+]?[0-9]{1,18}(?:\.[0-9]{1,18})?")


class _YamlNode:
    """One node of the file: ``content`` is text, a list of nodes, or key -> (line of the key, node)."""

    __slots__ = ("content", "kind", "line", "plain")

    def __init__(self, kind: _Kind, line: int, content: Any, plain: bool = False) -> None:
        self.kind, self.line, self.content, self.plain = kind, line, content, plain

    @property
    def is_null(self) -> bool:
        return self.plain and self.content in _NULLS


class Value:
    """A value in the file, to be read as one type or another.

    Attributes:
        file: The file's name, as errors show it.
        key: Dotted key, such as ``partitions.A100.nodes[0].address``.
        line: 1-based line of the key, or of the item in a list.
    """

    __slots__ = ("_node", "file", "key", "line")

    def __init__(self, file: str, key: str, line: int, node: _YamlNode) -> None:
        self.file, self.key, self.line, self._node = file, key, line, node

    # What stands there

    @property
    def is_text(self) -> bool:
        """Return whether this is a non-empty scalar."""
        return self._node.kind == "scalar" and not self._node.is_null

    @property
    def is_list(self) -> bool:
        """Return whether this is a list."""
        return self._node.kind == "list"

    def error(self, expected: str, found: str | None = None) -> FileError:
        """Return an error on this value; ``found`` defaults to a description of it."""
        return FileError(self.file, self.line, self.key, self.found() if found is None else found, expected)

    def missing(self, name: str, expected: str) -> FileError:
        """Return the error for a key that this mapping lacks."""
        return FileError(self.file, self.line, _join(self.key, name), "nothing", expected)

    def found(self) -> str:
        """Describe this value for an error message."""
        node = self._node
        if node.kind != "scalar":
            return f"a {node.kind}"
        if node.is_null:
            return "nothing"
        return str(node.content) if node.plain and _NUMBER.fullmatch(node.content) else f'"{node.content}"'

    # Reading it

    def text(self, expected: str, pattern: re.Pattern[str] | None = None) -> str:
        """Return a scalar as text that fully matches ``pattern``."""
        node = self._node
        if not self.is_text or not node.content or (pattern is not None and pattern.fullmatch(node.content) is None):
            raise self.error(expected)
        return str(node.content)

    def converted(self, convert: Callable[[str], T], expected: str) -> T:
        """Convert a scalar with ``convert``, which raises ValueError for invalid text."""
        try:
            return convert(self.text(expected))
        except (ValueError, OverflowError):
            raise self.error(expected) from None

    def whole(self, minimum: int, maximum: int, what: str = "a whole number") -> int:
        """Return a whole number within bounds, both included."""
        expected = f"{what} from {minimum} to {maximum}"
        number = self._number(expected, minimum, maximum)
        if number != int(number):
            raise self.error(expected)
        return int(number)

    def number(self, minimum: float, maximum: float, what: str = "a number") -> float:
        """Return a number within bounds, both included."""
        return self._number(f"{what} from {minimum:.10g} to {maximum:.10g}", minimum, maximum)

    def flag(self) -> bool:
        """Return true or false."""
        value = _FLAGS.get(str(self._node.content).lower()) if self._node.plain else None
        if value is None:
            raise self.error("true or false")
        return value

    def choice(self, options: Collection[str]) -> str:
        """Return one of the options."""
        text = self._node.content if self.is_text else ""
        if text not in options:
            raise self.error("one of " + ", ".join(options) + suggestion(str(text), options))
        return str(text)

    def component(self, group: str, ours: Collection[str]) -> str:
        """Return a component's name: one of ``ours``, or another package's; only then are those looked up."""
        if self.is_text and self._node.content in ours:
            return str(self._node.content)
        from gpusched.config.plugins import components

        return self.choice(dict.fromkeys((*ours, *components(group))))

    def items(self, expected: str) -> list[Value]:
        """Return the items of a list; empty for null."""
        if self._node.is_null:
            return []
        if self._node.kind != "list":
            raise self.error(expected)
        return [Value(self.file, f"{self.key}[{i}]", n.line, n) for i, n in enumerate(self._node.content)]

    def fields(
        self, expected: str, known: Collection[str] | None = None, renamed: Mapping[str, str] | None = None
    ) -> dict[str, Value]:
        """Return the values of a mapping by key, in the file's order, ``known`` keys only; empty for null.

        ``renamed``: the new names of keys as files of earlier versions have them.
        """
        if self._node.is_null:
            return {}
        if self._node.kind != "mapping":
            raise self.error(expected)
        fields = {k: Value(self.file, _join(self.key, k), line, n) for k, (line, n) in self._node.content.items()}
        if renamed:
            fields = {renamed.get(name, name): value for name, value in fields.items()}
        if known is not None:
            for name, value in fields.items():
                if name not in known:
                    options = "one of " + ", ".join(sorted(known)) + suggestion(name, known)
                    raise value.error(options, "an unknown key")
        return fields

    def _number(self, expected: str, minimum: float, maximum: float) -> float:
        text = self._node.content if self.is_text and self._node.plain else ""
        if _NUMBER.fullmatch(text) is None or not minimum <= float(text) <= maximum:
            raise self.error(expected)
        return float(text)


def parse_file(path: Path | str, what: str = "a YAML file") -> Value:
    """Parse a YAML file and return its root.

    Raises:
        FileError: It cannot be read, is too large, or is not YAML.
    """
    try:
        with open_input(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadableFile(str(path), error.strerror or str(error), what) from None
    except ValueError:  # a NUL in the name
        raise FileError(str(path), None, "", "a name no file can have", what) from None
    if len(data) > MAX_BYTES:
        raise FileError(str(path), None, "", f"more than {MAX_BYTES >> 20} MiB", what)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FileError(str(path), line, "", f"the byte 0x{data[error.start]:02x}", "UTF-8 text") from None
    return parse_text(text, str(path))


def parse_text(text: str, file: str) -> Value:
    """Parse YAML text and return its root; errors call it ``file``.

    Raises:
        FileError: It is not YAML, or more than plain mappings, lists and scalars.
    """
    try:
        root = _root(text, file)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else None
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise FileError(file, line, "", f"a YAML error ({problem})", "valid YAML") from None
    except yaml.reader.ReaderError as error:
        line, found = text[: error.position].count("\n") + 1, error.character
        code = found if isinstance(found, int) else ord(str(found)[:1] or "\0")
        raise FileError(file, line, "", f"the character U+{code:04X}", "text") from None
    except yaml.YAMLError as error:
        raise FileError(file, None, "", f"a YAML error ({error})", "valid YAML") from None
    return Value(file, "", root.line, root)


def _root(text: str, file: str) -> _YamlNode:
    try:
        return _Composer(text, file).document()
    except yaml.MarkedYAMLError:
        quoted = _RANGE.sub(lambda found: f'"{found["range"]}"' if found["range"] else found[0], text)
        if quoted == text:
            raise
        try:
            return _Composer(quoted, file).document()
        except (yaml.YAMLError, FileError):
            pass
        raise


def parse_plain(path: Path) -> Any:
    """Parse a YAML file that a program wrote into plain Python values with YAML's own types.

    Raises:
        FileError: It cannot be read, is too large or too deep, has aliases or tags, or is not YAML.
    """
    parse_file(path)  # within bounds, and nothing but mappings, lists and scalars
    try:
        text = path.read_text("utf-8-sig")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=_PARSER)):
            raise FileError(str(path), None, "", "an alias", "no aliases")
        return yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:  # also dates that are none, numbers of thousands of digits
        raise FileError(str(path), None, "", str(error).replace("\n", " "), "plain YAML") from None


def suggestion(word: str, options: Collection[str]) -> str:
    """Return ``: did you mean x?`` where an option is close, else ""."""
    import difflib  # only on the way to an error

    close = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return f": did you mean {close[0]}?" if close else ""


class _Composer:
    """A composer of libyaml's events. libyaml's own recurses in C without a limit, and resolves types."""

    def __init__(self, text: str, file: str) -> None:
        self._events: Iterator[Any] = _events(text)
        self._file = file
        self._anchors: dict[str, tuple[_YamlNode, int]] = {}  # with how many nodes each stands for
        self._count = 0

    def document(self) -> _YamlNode:
        next(self._events)  # the stream's start
        event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            return _YamlNode("scalar", 1, "", plain=True)
        root = self._node(next(self._events), 0, "")
        next(self._events)  # the document's end
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            self._refuse(event, "", "a second document (---)", "one")
        return root

    def _node(self, event: Any, depth: int, key: str) -> _YamlNode:
        kind = type(event)
        if kind is yaml.AliasEvent:
            if event.anchor not in self._anchors:
                self._refuse(event, key, f"the alias *{event.anchor}", "one whose anchor ends before it")
            node, size = self._anchors[event.anchor]
            self._add(size, event, key)
            return node
        if event.tag is not None:
            self._refuse(event, key, f"the tag {event.tag}", "no YAML tags")
        if depth > _MAX_DEPTH:
            self._refuse(event, "", f"more than {_MAX_DEPTH} levels", "fewer")
        before = self._count
        self._add(1, event, key)
        line = _line(event)
        if kind is yaml.ScalarEvent:
            node = _YamlNode("scalar", line, event.value, plain=event.implicit[0])
        elif kind is yaml.SequenceStartEvent:
            node = _YamlNode("list", line, self._list(depth, key))
        else:
            node = _YamlNode("mapping", line, self._mapping(depth, key))
        if event.anchor is not None:
            self._anchors[event.anchor] = node, self._count - before
        return node

    def _add(self, size: int, event: Any, key: str) -> None:
        self._count += size
        if self._count > _MAX_NODES:
            self._refuse(event, key, f"more than {_MAX_NODES:,} values, aliases followed", "fewer")

    def _list(self, depth: int, key: str) -> list[_YamlNode]:
        nodes: list[_YamlNode] = []
        while type(event := next(self._events)) is not yaml.SequenceEndEvent:
            nodes.append(self._node(event, depth + 1, f"{key}[{len(nodes)}]"))
        return nodes

    def _mapping(self, depth: int, key: str) -> dict[str, tuple[int, _YamlNode]]:
        pairs: dict[str, tuple[int, _YamlNode]] = {}
        merged: dict[str, tuple[int, _YamlNode]] = {}
        while type(event := next(self._events)) is not yaml.MappingEndEvent:
            if type(event) is not yaml.ScalarEvent or event.tag is not None:
                self._refuse(event, key, "a key that is not a word", "plain text as the key")
            name, line = event.value, _line(event)
            if name in pairs:
                first = pairs[name][0]
                self._refuse(event, _join(key, name), f"the key again (first in line {first})", "each key once")
            node = self._node(next(self._events), depth + 1, _join(key, name))
            if name == "<<" and event.implicit[0]:
                self._merge(event, merged, node, key)
            else:
                pairs[name] = (line, node)
        return {**merged, **pairs} if merged else pairs

    def _merge(self, event: Any, merged: dict[str, tuple[int, _YamlNode]], node: _YamlNode, key: str) -> None:
        for source in node.content if node.kind == "list" else [node]:
            if source.kind != "mapping":
                self._refuse(event, _join(key, "<<"), f"a {source.kind}", "a mapping, or a list of them")
            for name, pair in source.content.items():
                merged.setdefault(name, pair)

    def _refuse(self, event: Any, key: str, found: str, expected: str) -> NoReturn:
        raise FileError(self._file, _line(event), key, found, expected)


def _events(text: str) -> Iterator[Any]:
    parser = _PARSER(text)
    while True:
        yield parser.get_event()


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1
