"""The controller's record of hours full of faults is unchanged; `recording` says how to rewrite it."""

import pytest

from tests.controller.recording import FOLDER, SEEDS, recorded


@pytest.mark.parametrize("seed", SEEDS)
def test_the_story_is_as_recorded(seed: int) -> None:
    assert recorded(seed).splitlines() == (FOLDER / f"{seed}.txt").read_text().splitlines()
