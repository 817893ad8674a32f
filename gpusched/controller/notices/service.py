"""The controller's notices: created from new events, sent beside the cycle, retried, and finally given up."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import msgspec

from gpusched.controller.notices.delivery import Delivery, OutgoingNotice, receiver_of
from gpusched.controller.notices.making import EVENTS, MAIL, NoticeMaker, digest_of
from gpusched.model.notices import Notice
from gpusched.model.resources import Inventory
from gpusched.queue.damage import STORE_FAULTS
from gpusched.queue.store import Store

SEEN = "notices_seen"
"""Meta: number of the last event that was turned into notices."""
RETRIES_S = (5.0, 30.0, 300.0, 1800.0, 7200.0, 6 * 3600.0, 24 * 3600.0)
"""Delays after failed deliveries; after the last one a notice is given up."""
KEEP_S = 30 * 86400.0
CHECK_S = 30.0  # interval of checks of running jobs
MAX_PER_CYCLE = 2000
MAX_IN_PROGRESS = 500  # per receiver; the rest of what is due to it stays in the store, and keeps no other waiting
MAX_TO_ADDRESS = 100  # of mail to one address: a user's thousands do not keep others' waiting
_log = logging.getLogger(__name__)


class NotificationService:
    """Creates and sends notices after each cycle. A crash loses none; at worst one is sent twice."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._delivery = Delivery()
        self._sent: dict[str, Notice] = {}
        self._unrecorded: dict[str, Notice] = {}  # not recorded yet, as on a full disk: do not send them again
        self._checked_at = float("-inf")
        self._cleaned_at = float("-inf")
        if store.meta(SEEN) is None:
            store.set_meta(SEEN, str(store.latest_event()))

    def step(self, inventory: Inventory, now: float, wait_s: float = 0.0) -> None:
        """Create due notices, send them, and record results, waiting up to ``wait_s`` for these.

        Raises:
            OSError, sqlite3.Error, Damaged: The store cannot be written or read.
        """
        try:
            self._record_results(now)
            self._create(inventory, now)
            self._send(inventory, now)
            if wait_s:
                self._record_results(now, wait_s)
        except STORE_FAULTS:
            raise
        except Exception as error:  # notices must not stop the controller
            _log.error("notices: %s: %s", type(error).__name__, error)
            self._store.set_meta(SEEN, str(self._store.latest_event()))

    def _create(self, inventory: Inventory, now: float) -> None:
        seen, last = int(self._store.number(SEEN, 0)), self._store.latest_event()
        news = self._store.events_after(seen, EVENTS, MAX_PER_CYCLE) if last > seen else []
        if len(news) == MAX_PER_CYCLE:
            last = news[-1][0]
        check_running = not 0 <= now - self._checked_at < CHECK_S
        backlog = last - seen > MAX_PER_CYCLE  # mark irrelevant events as seen, so that they are not scanned again
        if not (news or check_running or backlog):
            return
        maker = NoticeMaker(self._store, inventory.notices, self._store.meta("cluster_id") or "", now)
        made = [notice for _, event in news for notice in maker.of_event(event)]
        if check_running:
            made += maker.of_running(self._store.active())
            self._checked_at = now
        with self._store.transaction():
            self._store.add_notices(made)
            if news or backlog:
                self._store.set_meta(SEEN, str(last))
            if not 0 <= now - self._cleaned_at < 3600:
                self._store.forget_notices(now - KEEP_S)
                self._cleaned_at = now

    def _send(self, inventory: Inventory, now: float) -> None:
        receivers = {digest_of(receiver): receiver for receiver in inventory.notices.to}
        obsolete = []
        for notice in self._due(now):
            mail = notice.to.removeprefix(MAIL) if notice.to.startswith(MAIL) else ""
            if not mail and notice.to not in receivers:
                obsolete.append(msgspec.structs.replace(notice, due=None, error=""))
                continue
            self._sent[notice.key] = notice
            receiver = receivers.get(notice.to)
            self._delivery.send(
                OutgoingNotice(key=notice.key, body=notice.body, mail=mail, receiver=receiver, asked=inventory.notices)
            )
        if obsolete:  # their receivers left the inventory
            with self._store.transaction():
                self._store.put_notices(obsolete)

    def _due(self, now: float) -> Iterator[Notice]:
        """Yield the notices to send now, the longest due first, within the bounds of receivers and addresses."""
        sending = Counter(name for key in self._delivery.in_progress for name in _bounded(key))
        full = _full(sending)
        while True:
            limit = MAX_PER_CYCLE + sending.total()
            due = self._store.due_notices(now, limit, full)
            for notice in due:
                names = _bounded(notice.key)
                if notice.key not in self._delivery.in_progress and all(sending[n] < _most(n) for n in names):
                    sending.update(names)
                    yield notice
            before, full = full, _full(sending)
            if len(due) < limit or full == before:  # else what is due to others may come after these
                return

    def _record_results(self, now: float, wait_s: float = 0.0) -> None:
        for key, why in self._delivery.finished(wait_s):
            notice = self._unrecorded[key] = _with_result(self._sent.pop(key), why, now)
            if notice.error and notice.tries == 1:
                _log.warning("a notice could not be sent and will be retried: %s", notice.error)
        if self._unrecorded:
            with self._store.transaction():
                self._store.put_notices(self._unrecorded.values())
            self._unrecorded.clear()


def _bounded(key: str) -> set[str]:
    """Return what a notice counts for, by its key: its receiver and, if it is mail, its address."""
    return {receiver_of(key), key.rsplit(" ", 2)[0]}


def _most(name: str) -> int:
    return MAX_TO_ADDRESS if name.startswith(MAIL) else MAX_IN_PROGRESS


def _full(sending: Counter[str]) -> list[str]:
    return sorted(name for name, count in sending.items() if count >= _most(name))


def _with_result(notice: Notice, why: str, now: float) -> Notice:
    if not why:
        return msgspec.structs.replace(notice, due=None, error="")
    pause = RETRIES_S[notice.tries] if notice.tries < len(RETRIES_S) else None
    due = None if pause is None else now + pause
    return msgspec.structs.replace(notice, tries=notice.tries + 1, due=due, error=why)
