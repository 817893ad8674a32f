"""A hundred fuzzed inputs at each door; a million: ``make fuzz``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.running import TooSlow, run
from tests.fuzz.targets import TARGETS, opened
from tests.strategies import examples


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_is_answered(name: str, tmp_path: Path) -> None:
    with opened(name, tmp_path) as target:
        report = run(name, target.make, target.ask, [], examples(150), seed=2026)
    assert not report.defects, report.defects
    assert len(report.outcomes) > 1, "as many kinds of answers as kinds of inputs"


@pytest.mark.parametrize("raised", [ValueError, MemoryError, TooSlow, RecursionError])
def test_whatever_escapes_is_a_defect_with_its_shortest_input(raised: type[BaseException]) -> None:
    def ask(data: bytes) -> str:
        if b"!" in data:
            raise raised
        return "value"

    report = run("x", lambda rng: rng.choice((b"a", b"b!c")), ask, [lambda: b"a!"], 20, seed=1)
    assert report.defects[0].number == -1
    assert {found.data for found in report.defects} == {b"!"}
    assert report.outcomes["DEFECT"] > len(report.defects), "each is reported once"
