"""Decisions, reasons and advice are what they were; `tests.sched.recording` says how to write them anew."""

import pytest

from tests.sched.recording import FOLDER, ORDERS, recorded


@pytest.mark.parametrize("order", ORDERS)
def test_decisions_are_as_recorded(order: str) -> None:
    assert recorded(order).splitlines() == (FOLDER / f"{order}.txt").read_text().splitlines()
