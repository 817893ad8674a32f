"""What replays said before passes were brought together they say still."""

from __future__ import annotations

import json
from pathlib import Path

from tests.sim import recorded


def test_every_policy_replays_as_it_was_recorded(tmp_path: Path) -> None:
    before, now = json.loads(recorded.FILE.read_text()), recorded.record(tmp_path)
    assert now.keys() == before.keys()
    assert {case for case in now if now[case] != before[case]} == set()
