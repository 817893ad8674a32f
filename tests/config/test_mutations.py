"""Whatever is in the file: an inventory, or one line that says what is wrong. Never a traceback."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusched.config.inventory import inventory_errors, load_inventory
from gpusched.config.policies import load_policy
from gpusched.config.yamlfile import parse_text
from gpusched.errors import FileError

EXAMPLE = (Path(__file__).parents[2] / "inventory.yaml").read_text()
SPICE = st.sampled_from(
    ["&a ", "*a", "<<: ", "!!int ", "? ", "- ", ": ", "{", "}", "[", "]", "'", '"', "|\n", "\t", "---\n", "\0", "é",
     "\u2028", "~", "null", "-1", "1e9", "0x10", "9" * 30, "dgx[1-99999]", "\n  ", "#", ","]
)  # fmt: skip
ANY = st.one_of(SPICE, st.text(max_size=8))
SETTINGS = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = EXAMPLE
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        text = text[:start] + draw(ANY) + text[start + draw(st.integers(0, 12)) :]
    return text


@st.composite
def reworded(draw: st.DrawFn) -> str:
    lines = EXAMPLE.splitlines(keepends=True)
    number = draw(
        st.sampled_from([i for i, line in enumerate(lines) if not line.lstrip().startswith("#") and ":" in line])
    )
    key, _, rest = lines[number].partition(":")
    value = draw(ANY)
    lines[number] = f"{key}: {value}\n" if draw(st.booleans()) else f"{key}{value}:{rest}"
    return "".join(lines)


def check(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    errors = inventory_errors(path)
    first = refusal(load_inventory, path)
    assert first == (errors[0].line() if errors else None)
    assert "\n" not in (first or "")


def refusal(load: Callable[[Path], object], path: Path) -> str | None:
    try:
        load(path)
    except FileError as error:
        return error.line()
    return None


@SETTINGS
@given(mutated())
def test_mutated_text(tmp_path: Path, text: str) -> None:
    check(tmp_path / "inventory.yaml", text)


@SETTINGS
@given(reworded())
def test_other_words(tmp_path: Path, text: str) -> None:
    check(tmp_path / "inventory.yaml", text)


@SETTINGS
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "any.yaml"
    path.write_bytes(data)
    for load in (load_inventory, load_policy):
        assert "\n" not in (refusal(load, path) or "")


def test_hostile_nesting_and_aliases() -> None:
    for text in ("[" * 300_000, "- " * 100_000, "? " * 100_000, "{a: " * 100_000):
        with pytest.raises(FileError):
            parse_text(text, "f")
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))
    with pytest.raises(FileError, match=r"f:7: a6\S*: found more than 1,000,000 values, aliases followed"):
        parse_text(bomb, "f")  # whatever walks through all of it would never end
    merged = (f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9))
    merges = "a0: &a0 {x: 1}\n" + "".join(merged)
    with pytest.raises(FileError, match="aliases followed"):
        parse_text(merges, "f")
    few = "".join(bomb.splitlines(keepends=True)[:5])
    assert len(parse_text(few, "f").fields("a mapping")["a4"].items("a list")) == 9
