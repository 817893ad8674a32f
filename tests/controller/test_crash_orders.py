"""Nothing is lost and nothing runs twice, in whatever order things break (searched by hypothesis)."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.controller.crash_orders import CrashOrders

TestCrashOrders = CrashOrders.TestCase
TestCrashOrders.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
