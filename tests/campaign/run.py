"""Runs a schedule on a site, and lets it come to rest."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from tests.campaign.faults import KINDS, Fault
from tests.campaign.ledger import now
from tests.campaign.schedule import Act, Schedule
from tests.campaign.site import Site
from tests.campaign.slurmsite import BesideSlurm
from tests.testbed import wait_until

PAUSE_S = 2.0
"""How long a step waits at most for jobs to begin or end."""
HEALED_BY_START = ("controller.kill", "controller.standby")
MOST_UNFINISHED = 24
BACKLOG_S = 8.0
REST_S = 60.0
"""Seconds, times `tests.testbed.waiting.PATIENCE`, in which everything must have ended once all faults are healed."""


class Trouble(NamedTuple):
    """A fault that was injected: what it was, and from when to when, in seconds since the machine's start."""

    act: Act
    fault: Fault
    begin: float
    end: float


class Campaign:
    """One run.

    Attributes:
        troubles: The faults, once they are healed.
        stalled_s: The longest that this process, and so perhaps all others, stood still unasked.
    """

    stalled_s = 0.0

    def __init__(
        self, site: Site | BesideSlurm, schedule: Schedule, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.site, self.schedule, self._say = site, schedule, say
        self.troubles: list[Trouble] = []
        self._open: dict[int, Trouble] = {}
        self._due: set[int] = set()  # those to be healed as soon as they have lasted long enough

    def run(self) -> None:
        """All steps, then peace.

        Raises:
            TimeoutError: It did not come to rest.
        """
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over,), daemon=True).start()
        try:
            self._run()
        finally:
            over.set()

    def _watch(self, over: threading.Event) -> None:
        last = time.monotonic()
        while not over.wait(0.2):
            last, before = time.monotonic(), last
            self.stalled_s = max(self.stalled_s, last - before - 0.2)

    def _run(self) -> None:
        self.site.start()
        for place, act in enumerate(self.schedule.acts):
            self._say(f"{place} {act.what} {act.number} {act.kind} {act.node} {act.amount}")
            self._step(act)
            if not self.site.is_up() and not any(t.act.kind in HEALED_BY_START for t in self._open.values()):
                self.site.begin()
            self._heal_due()
            self._pause(act.lines)
        self._due.update(self._open)
        while self._open:
            self._heal_due()
            self._pause(0)
        self._rest()

    def _step(self, act: Act) -> None:
        if act.what == "submit":
            end = time.monotonic() + BACKLOG_S
            while self.site.unfinished() > MOST_UNFINISHED and time.monotonic() < end:
                time.sleep(0.1)
            self.site.submit_work(self.schedule.work[act.number])
        elif act.what == "order":
            self.site.order(self.schedule.work[act.number])
        elif act.what == "heal":
            self._due.add(act.number)
        else:
            while any(trouble.act.node == act.node != "" for trouble in self._open.values()):
                self._heal_due()  # a node has one fault at a time
                self._pause(1)
            fault = KINDS[act.kind](self.site,  # type: ignore[arg-type]
                act.node, act.amount)
            trouble = Trouble(act, fault, now(), now())
            fault.inject()
            if fault.lasts:
                self._open[act.number] = trouble
            else:
                self.troubles.append(trouble._replace(end=now()))

    def _heal_due(self) -> None:
        for number in sorted(self._due):
            trouble = self._open[number]
            if trouble.fault.may_heal(now() - trouble.begin):
                self._due.remove(number)
                del self._open[number]
                trouble.fault.heal()
                self.troubles.append(trouble._replace(end=now()))

    def _pause(self, lines: int) -> None:
        enough, end = self.site.ledger.read() + lines, time.monotonic() + PAUSE_S
        while self.site.ledger.read() < enough and time.monotonic() < end:
            time.sleep(0.05)

    def _rest(self) -> None:
        """Everything works again: all jobs end, and nothing is left."""
        site = self.site
        site.shim.clear()
        site.begin()
        wait_until(site.database.exists, REST_S, "the store")
        site.people()
        try:
            wait_until(self._has_ended, REST_S, "the end of all jobs", 0.2)
            site.wait_clean(REST_S)
        except (TimeoutError, AssertionError) as error:
            states = Counter(str(job.state) for job in site.records())
            error.add_note(f"{states}; nodes {[(n, r['state'], r['reason']) for n, r in site.nodes().items()]}")
            raise

    def _has_ended(self) -> bool:
        self.site.begin()  # a crash that was ordered may only come now
        with suppress(OSError):
            return not os.listdir(self.site.state / "inbox" / "new") and self.site.has_ended()
        return False
