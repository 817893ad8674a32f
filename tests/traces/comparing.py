"""Comparisons of traces."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from gpusched.traces.trace import Trace


def assert_same(one: Trace, two: Trace) -> None:
    for field in fields(Trace):
        a, b = getattr(one, field.name), getattr(two, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            assert a == b
