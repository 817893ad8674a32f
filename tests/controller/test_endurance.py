"""A controller that goes on and on keeps nothing of the jobs that have ended (a day of it: benchmarks/endurance.py)."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from benchmarks.endurance import Day, figures


def test_nothing_is_left_of_ended_jobs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "gpusched")  # pytest keeps every line of the log
    day = Day(tmp_path, nodes=2, tick_s=60)
    for _ in day.turns(4000, 150):
        pass
    day.drain()
    warm = figures(day.state)
    for _ in day.turns(4000, 150):
        pass
    day.drain()
    end = figures(day.state)
    ended = day.service.store.counts()
    day.close()
    assert ended["COMPLETED"] > 200, ended
    assert end["descriptors"] <= warm["descriptors"]  # fewer: those of earlier tests in this process are closed
    assert end["threads"] <= warm["threads"]
    # Each ended job that is kept would be an object or more; what is first needed late is some.
    assert end["objects"] - warm["objects"] < 120, (warm, end)
