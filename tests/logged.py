"""The log of gpusched in this process (see `conftest.py` for the level)."""

from __future__ import annotations

import pytest

from gpusched.controller import eventlog
from gpusched.controller.logsetup import JOBS


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages of this test, in order; without the events, which are in the store."""
    return [record.getMessage() for record in caplog.records if record.name not in (JOBS, eventlog.__name__)]
