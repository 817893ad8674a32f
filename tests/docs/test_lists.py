"""Every list of values in the reference of policies, and in the guide to trained ones, is the code's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from gpusched.config import policies
from gpusched.model.policy import AGENTS, ORDERS, Backfill, Place, PolicySpec, Sizing

DOCS = Path(__file__).parents[2] / "docs"
_LITERALS = {"place": Place, "backfill": Backfill, "sizes": Sizing}
VALUES = {"order": ORDERS, "agent": tuple(AGENTS)} | {key: get_args(values) for key, values in _LITERALS.items()}


def rows(path: str) -> dict[str, tuple[str, str]]:
    """Return key -> values, default, of the lists before anything that is generated: "- `order: fifo`: `fifo`, ..."."""
    text = (DOCS / path).read_text().partition("<!--")[0]
    found = re.findall(r"^- `(\w+)(?:: ([^`]+))?`: (.*(?:\n  .*)*)", text, re.MULTILINE)
    return {key: (values, default) for key, default, values in found}


@pytest.mark.parametrize("key", VALUES)
def test_the_reference_has_the_values_of_each_key(key: str) -> None:
    words = re.split(r"[;:]", rows("reference/policies.md")[key][0])[0]
    assert re.findall(r"`([^`]+)`", words) == list(VALUES[key])


def test_the_reference_has_every_key_of_a_policys_file() -> None:
    known = {*VALUES, *policies._AGENT_KEYS, "description", "mapping", "placement_wait", "resize", "ties"}
    assert rows("reference/policies.md").keys() == known


def test_the_reference_has_the_defaults() -> None:
    usual, table = PolicySpec(name="p"), rows("reference/policies.md")
    for key in ("order", "place", "backfill", "sizes"):
        assert table[key][1] == getattr(usual, key)


def test_the_guide_has_every_agent() -> None:
    """Their keys stand in the reference alone."""
    text = (DOCS / "guides" / "trained-policies.md").read_text()
    assert [name for name in AGENTS if f"\n- `{name}`" not in text] == []
