"""The controller dies, stops, or is there twice."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

from tests.campaign.faults.base import Fault
from tests.campaign.shim import CREATE, DIE, NAME, SYNC, TEAR, WRITE
from tests.testbed import wait_until

STANDBY_S = 40.0
"""How long a standby may take to take over at most, before it is taken for dead."""


class Kill(Fault):
    """``kill -9``; it is started again when the fault is healed."""

    def inject(self) -> None:
        self.site.kill()

    def heal(self) -> None:
        self.site.begin()


class Term(Fault):
    """SIGTERM, and it is started again."""

    lasts = False

    def inject(self) -> None:
        if self.site.is_up():
            code = self.site.stop_controller()
            # Before it runs its cycles it dies of it as any program does; or it was about to crash.
            self.site.expect(code in (0, -signal.SIGTERM, -signal.SIGKILL), f"SIGTERM ended the controller with {code}")
        self.site.begin()


class Pause(Fault):
    """SIGSTOP for a while."""

    def inject(self) -> None:
        self.site.signal(signal.SIGSTOP)

    def heal(self) -> None:
        self.site.signal(signal.SIGCONT)


class _Crash(Fault):
    """It dies by SIGKILL right before its nth disk operation in the state folder."""

    lasts = False
    mask = WRITE | SYNC | NAME | CREATE
    error = DIE
    most = 120

    def inject(self) -> None:
        with suppress(TimeoutError):  # the one before should have had its chance
            wait_until(lambda: not self.site.shim.is_armed or not self.site.is_up(), 1.0, "a crash", 0.1, 0.0)
        self.site.begin()
        self.site.shim.fail(self.mask, self.site.next_crash_point(type(self).__name__, self.most), self.error)
        self._process = self.site.controller

    @property
    def had_effect(self) -> bool:  # type: ignore[override]
        """Whether that controller died by SIGKILL."""
        return self._process is not None and self._process.poll() == -signal.SIGKILL


class CrashAny(_Crash):
    """Before any operation."""


class CrashSync(_Crash):
    """Before an fsync."""

    mask, most = SYNC, 24


class CrashName(_Crash):
    """Before a link, rename or removal."""

    mask, most = NAME, 16


class Tear(_Crash):
    """It writes half of a block and dies."""

    mask, error, most = WRITE, TEAR, 80


class Second(Fault):
    """Another controller, or a tick, beside it: refused, with one line."""

    lasts = False

    def inject(self) -> None:
        if not self.site.is_up():
            self.had_effect = False
            return
        try:
            done = self.site.cli(("controller", "tick")[self.pick(2)], check=False, timeout=300)
        except subprocess.TimeoutExpired:  # the other one had just died: this one ran, and was killed
            self.had_effect = False
            return
        up = self.site.is_up()
        self.site.expect(not up or (done.returncode == 1 and done.stderr.count("\n") == 1), f"beside another: {done}")


class Standby(Fault):
    """A standby waits while the controller dies, or stands still and finds on return that it was superseded."""

    def inject(self) -> None:
        self.site.begin()
        with suppress(TimeoutError):
            wait_until(self.site.leads, 10, "a controller to take over from", 0.1, 0.0)
        self.had_effect, self._frozen = self.site.leads(), self.amount < 0.5
        self._former = self.site.controller
        if self.had_effect and self._former is not None:
            self.site.begin_standby()
            self._former.send_signal(signal.SIGSTOP if self._frozen else signal.SIGKILL)

    def may_heal(self, after_s: float) -> bool:
        """Once it took over; it may have died before."""
        return not self.had_effect or after_s > STANDBY_S or self.site.leads()

    def heal(self) -> None:
        former, leads = self._former, self.site.leads()
        if not self.had_effect or former is None:
            return
        former.send_signal(signal.SIGCONT)
        if leads and self._frozen:
            with suppress(subprocess.TimeoutExpired):
                former.wait(300)
            # Or it was to crash, or could not write why it ends.
            self.site.expect(former.poll() in (1, 2, -signal.SIGKILL), f"superseded, it ended with {former.poll()}")
        former.kill()
        former.wait()
        self.site.begin()


class Relaying(Fault):
    """``kill -9`` of all the controller's children: its relay and what else it may have."""

    lasts = False

    def inject(self) -> None:
        children = self.site.children()
        self.had_effect = bool(children)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
