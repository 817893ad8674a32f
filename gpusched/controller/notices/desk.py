"""The notices of one controller: made of what is new, sent beside the cycle, tried again, given up in the end."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gpusched.controller.notices.delivery import Delivery, Sending
from gpusched.controller.notices.making import EVENTS, MAIL, Maker, digest_of
from gpusched.model.notices import Notice
from gpusched.model.resources import Inventory
from gpusched.queue.damage import STORE_FAULTS
from gpusched.queue.store import Store

SEEN = "notices_seen"
"""meta: number of the last event of which notices have been made."""
RETRIES_S = (5.0, 30.0, 300.0, 1800.0, 7200.0, 6 * 3600.0, 24 * 3600.0)
"""Pauses after tries in vain; after the last one it is given up."""
KEEP_S = 30 * 86400.0
LOOK_S = 30.0  # how often running jobs are looked at
AT_ONCE = 2000


class NotificationService:
    """What the controller calls after each cycle. A crash loses no notice: at the worst one is sent twice."""

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        self._delivery = Delivery()
        self._sent: dict[str, Notice] = {}
        self._over: dict[str, Notice] = {}  # not written down yet: on a full disk nobody gets the same mail every cycle
        self._looked = float("-inf")
        self._tidied = float("-inf")
        if store.meta(SEEN) is None:
            store.set_meta(SEEN, str(store.last_event()))

    def step(self, inventory: Inventory, now: float, wait_s: float = 0.0) -> None:
        """Make what is due, send it, note what became of what was sent; waits so long for that.

        Raises:
            OSError, sqlite3.Error, DatabaseDamaged: The store cannot be written, or read.
        """
        try:
            self._settle(now)
            self._make(inventory, now)
            self._send(inventory, now)
            if wait_s:
                self._settle(now, wait_s)
        except STORE_FAULTS:
            raise
        except Exception as error:  # nobody's notice may stop the cluster
            self._say(f"notices: {type(error).__name__}: {error}")
            self._store.set_meta(SEEN, str(self._store.last_event()))

    def _make(self, inventory: Inventory, now: float) -> None:
        seen, last = int(self._store.number(SEEN, 0)), self._store.last_event()
        news = self._store.events_after(seen, EVENTS, AT_ONCE) if last > seen else []
        if len(news) == AT_ONCE:
            last = news[-1][0]
        look = not 0 <= now - self._looked < LOOK_S
        many = last - seen > AT_ONCE  # of no interest, but looked through again as long as they are not seen
        if not (news or look or many):
            return
        maker = Maker(self._store, inventory.notices, self._store.meta("cluster_id") or "", now)
        made = [notice for _, event in news for notice in maker.of_event(event)]
        if look:
            made += maker.of_running(self._store.active())
            self._looked = now
        with self._store.transaction():
            self._store.add_notices(made)
            if news or many:
                self._store.set_meta(SEEN, str(last))
            if not 0 <= now - self._tidied < 3600:
                self._store.forget_notices(now - KEEP_S)
                self._tidied = now

    def _send(self, inventory: Inventory, now: float) -> None:
        receivers = {digest_of(receiver): receiver for receiver in inventory.notices.to}
        gone = []
        for notice in self._store.due_notices(now, AT_ONCE):
            if notice.key in self._delivery.under_way:
                continue
            mail = notice.to.removeprefix(MAIL) if notice.to.startswith(MAIL) else ""
            if not mail and notice.to not in receivers:
                gone.append(msgspec.structs.replace(notice, due=None, error=""))
                continue
            self._sent[notice.key] = notice
            receiver = receivers.get(notice.to)
            self._delivery.send(
                Sending(key=notice.key, body=notice.body, mail=mail, receiver=receiver, asked=inventory.notices)
            )
        if gone:  # the operator wants it told there no more
            with self._store.transaction():
                self._store.put_notices(gone)

    def _settle(self, now: float, wait_s: float = 0.0) -> None:
        for key, why in self._delivery.finished(wait_s):
            notice = self._over[key] = _settled(self._sent.pop(key), why, now)
            if notice.error and notice.tries == 1:
                self._say(f"a notice could not be sent and will be retried: {notice.error}")
        if self._over:
            with self._store.transaction():
                self._store.put_notices(self._over.values())
            self._over.clear()


def _settled(notice: Notice, why: str, now: float) -> Notice:
    if not why:
        return msgspec.structs.replace(notice, due=None, error="")
    pause = RETRIES_S[notice.tries] if notice.tries < len(RETRIES_S) else None
    due = None if pause is None else now + pause
    return msgspec.structs.replace(notice, tries=notice.tries + 1, due=due, error=why)
