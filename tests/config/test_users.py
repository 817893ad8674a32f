"""Names of users, from a directory that is away at times."""

from __future__ import annotations

import pwd
import time

import pytest

from gpusched.config.users import user_name


def test_a_name_that_was_not_found_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    root = pwd.getpwuid(0)

    def away(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", away)
    assert user_name(987654) == "987654"
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: root)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert user_name(987654) == root.pw_name
