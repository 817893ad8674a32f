"""Which notices are made of what has happened, who gets them, and what becomes of those that do not arrive."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import Envelope, Session

from gpusched.accounting.usage import BUCKET_S
from gpusched.controller.notices import delivery
from gpusched.controller.notices import service as notices
from gpusched.controller.notices.delivery import DeliveryFailed, OutgoingNotice, deliver, message_of
from gpusched.controller.notices.making import NoticeMaker, digest_of
from gpusched.controller.notices.service import NotificationService
from gpusched.controller.stepkey import new_key
from gpusched.model.arrays import restricted_row
from gpusched.model.events import Event
from gpusched.model.jobs import Allocation, JobRecord, JobState, NodeAllocation
from gpusched.model.notices import Notice, Notices, Receiver
from gpusched.model.resources import Inventory
from gpusched.queue.lease import Superseded
from gpusched.queue.store import Store, UsageRow
from tests import builders
from tests.builders import spec
from tests.controller.imagined import inventory
from tests.testbed import wait_until

T = 1_800_000_000.0
HOOK = Receiver(webhook="http://127.0.0.1:9/token")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create_or_open(tmp_path)


def job(name: str = "j", mail: str = "ada@example.org", notify: tuple[str, ...] = (), **fields: Any) -> JobRecord:
    wanted = spec(gpus_per_node=2, mail=mail, notify=notify, time_limit_s=3600)
    given = {"user": "ada", "submit_time": T, "start_time": T, "spec": wanted, "nodes": {"n0": (0, 1)}}
    return builders.job(name, **given | fields)


def made(store: Store, asked: Notices, event: Event | None = None, now: float = T) -> list[tuple[str, str]]:
    """Return (recipient, notice) of an event, else of the running jobs."""
    maker = NoticeMaker(store, asked, "c", now)
    notices = maker.of_event(event) if event is not None else maker.of_running(store.active())
    return [(n.to.removeprefix("mail ").split("@")[0], n.body["notice"]) for n in notices]


def test_that_another_controller_took_over_is_no_fault_of_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = Store.create_or_open(tmp_path, term=5)
    service = NotificationService(old)
    old.append([Event(time=T, kind="node_down", data={"node": "n0", "why": "x"})])
    with closing(Store.create_or_open(tmp_path, term=6)), closing(old):
        with pytest.raises(Superseded):
            service.step(msgspec.structs.replace(inventory(), notices=Notices(to=(HOOK,))), T)
    assert caplog.messages == []


def test_near_its_limit_and_not_before(store: Store) -> None:
    store.put_jobs([job()])
    assert made(store, Notices(), now=T + 3239) == []
    assert made(store, Notices(), now=T + 3241) == [("ada", "limit")]
    store.put_jobs([job(notify=("end",))])
    assert made(store, Notices(), now=T + 3241) == []


@pytest.mark.parametrize(("idle_part", "expected"), [(0.4, []), (0.5, [("ada", "idle")]), (1.0, [("ada", "idle")])])
def test_gpus_that_are_idle_for_half_an_hour(store: Store, idle_part: float, expected: list[tuple[str, str]]) -> None:
    store.put_jobs([job(notify=("idle",))])
    buckets = range(int(T), int(T) + 1830, BUCKET_S)
    some = {"node": "n0", "job_id": "j", "user": "ada", "partition": "P", "util_known_s": 2.0 * BUCKET_S}
    gpu_s = 2.0 * BUCKET_S
    store.add_usage(UsageRow(bucket=b, gpu_s=gpu_s, idle_s=gpu_s * idle_part, **some) for b in buckets)  # type: ignore[arg-type]
    assert made(store, Notices(), now=T + 1799) == []
    assert made(store, Notices(), now=T + 1830) == expected


def test_each_warning_and_each_action_of_an_idle_rule_is_a_notice_of_its_own(store: Store) -> None:
    store.put_jobs([job(notify=("idle",))])
    asked = Notices(to=(Receiver(command=("/x",)),))
    events = [
        Event(time=T + n, kind=kind, job_id="j", data={"attempt": 1, "then": "requeue", "message": "its GPU is idle"})
        for n, kind in enumerate(("idle_warned", "idle_acted", "idle_warned"))
    ]
    found = [notice for event in events for notice in NoticeMaker(store, asked, "c", T).of_event(event)]
    assert len({notice.key for notice in found}) == len(found) == 6
    assert [n.body["text"] for n in found[::2]] == [
        "job j (j) of ada: its GPU is idle", "job j (j) of ada is requeued: its GPU is idle",
        "job j (j) of ada: its GPU is idle",
    ]  # fmt: skip
    again = [notice.key for notice in NoticeMaker(store, asked, "c", T + 9).of_event(events[0])]
    assert again == [notice.key for notice in found[:2]], "a notice that is made again is the same"


def test_a_lost_node_notifies_the_operator_and_the_users_of_its_jobs(store: Store) -> None:
    elsewhere = NodeAllocation(rank=0, node="n1", gpus=(0,), cores=1, memory_mib=1)
    store.put_jobs([job(), job("k", mail="bob@example.org", allocation=Allocation("k", (elsewhere,)))])
    event = Event(time=T, kind="node_down", node="n0", data={"reason": "no answer"})
    whose = Notices(to=(Receiver(command=("/x",), users=("ada",)), Receiver(command=("/y",), users=("bob",))))
    assert made(store, Notices(), event) == [("ada", "node")]
    assert len(made(store, whose, event)) == 2, "mail, and the receiver of her jobs"
    (notice,) = NoticeMaker(store, Notices(to=(HOOK,)), "c", T).of_event(Event(time=T, kind="node_down", node="n9"))
    assert (notice.body["text"], notice.body["job"]) == ("node n9 is lost: it does not respond", None)


def condition(kind: str, **data: Any) -> Event:
    fields = {"condition": kind, "gpu": 1, "detail": "Xid 48 (x)", "action": "no-new-jobs"} | data
    return Event(time=T, kind="condition", node="n0", job_id=fields.pop("job", None), data=fields)


def test_a_gpu_s_condition_notifies_the_operator_and_the_user_of_its_job(store: Store) -> None:
    store.put_jobs([job(), job("k", mail="bob@example.org", nodes={"n0": (2, 3)})])
    notices = NoticeMaker(store, Notices(to=(HOOK,)), "c", T).of_event(condition("xid-gpu"))
    texts = [notice.body["text"] for notice in notices]
    assert len(texts) == 2
    assert texts[0].startswith("GPU 1 of node n0: Xid 48 (x) (no-new-jobs); drain the node, and reset the GPU")
    assert texts[1] == f"job j (j) of ada: {texts[0]}"
    assert made(store, Notices(to=(HOOK,)), condition("off-bus")) == []  # gpu_lost reports that
    machine = condition("xid-machine", gpu=None, action="warn")
    assert sorted(to for to, _ in made(store, Notices(), machine)) == ["ada", "bob"]


@pytest.mark.parametrize("kind", ["gpu_lost", "condition"])
def test_a_condition_notifies_jobs_on_the_gpu_and_on_its_slices(store: Store, kind: str) -> None:
    store.put_jobs([job(), job("k", mail="bob@x", nodes={"n0": (2,)}), job("l", mail="eve@x", nodes={"n0": (3004,)})])
    event = msgspec.structs.replace(condition("xid-gpu", gpu=2), kind=kind)
    assert sorted(to for to, _ in made(store, Notices(), event)) == ["bob", "eve"]


def test_a_program_s_error_notifies_its_user_only(store: Store) -> None:
    store.put_jobs([job(), job("k", mail="bob@example.org", nodes={"n0": (0, 1)})])
    error = condition("xid-program", job="j", detail="Xid 31 (memory page fault)", action="warn")
    (notice,) = NoticeMaker(store, Notices(to=(HOOK,)), "c", T).of_event(error)
    assert notice.to == "mail ada@example.org"
    assert notice.body["text"] == "job j (j) of ada: GPU 1 of node n0: Xid 31 (memory page fault)"
    assert made(store, Notices(to=(HOOK,)), condition("xid-program", action="warn")) == []


@pytest.mark.parametrize(
    ("state", "on", "kinds"),
    [
        ("COMPLETED", ("end", "fail"), ["end"]), ("FAILED", ("end", "fail"), ["end"]), ("TIMEOUT", ("fail",), ["fail"]),
        ("NODE_FAIL", ("fail",), ["fail"]), ("CANCELLED", ("fail",), []), ("COMPLETED", ("fail", "begin"), []),
    ],
)  # fmt: skip
def test_an_end_is_one_notice(store: Store, state: str, on: tuple[str, ...], kinds: list[str]) -> None:
    store.put_jobs([job(notify=on, state=JobState(state), end_time=T + 9)])
    event = Event(time=T + 9, kind="ended", job_id="j", data={"to": state, "attempt": 1})
    assert [kind for _, kind in made(store, Notices(), event)] == kinds


def test_of_an_array_the_begin_the_first_failure_and_the_end(store: Store, post: Post) -> None:
    step, on = start_service(store), ("begin", "end", "fail")
    states = [JobState.COMPLETED, JobState.FAILED, JobState.FAILED, JobState.RUNNING]
    tasks = [job(f"a_{i}", notify=on, array_id="a", array_index=i, state=state) for i, state in enumerate(states)]
    store.put_jobs(tasks)
    store.append(Event(time=T, kind="running", job_id=task.id, data={"attempt": 1}) for task in tasks)
    ends = [Event(time=T, kind="ended", job_id=t.id, data={"to": str(t.state), "attempt": 1}) for t in tasks]
    store.append(ends[:1])
    step(inventory(), T)
    assert post.sent == ["begin"]
    store.append(ends[1:3])
    step(inventory(), T)
    assert post.sent == ["begin", "fail"]
    store.put_jobs([msgspec.structs.replace(tasks[3], state=JobState.COMPLETED, end_time=T)])
    store.append(ends[3:])
    step(inventory(), T + 1)
    assert post.sent == ["begin", "fail", "end"]


def test_tasks_that_are_cancelled_together_are_one_notice(store: Store) -> None:
    waits = {"state": JobState.CANCELLED, "allocation": None, "start_time": None, "end_time": T, "attempt": 0}
    row = restricted_row(job("a", array_id="a", **waits), ((0, 4), (7, 99)))
    store.put_jobs([row, job("a_5", array_id="a", array_index=5, state=JobState.COMPLETED, end_time=T)])
    event = Event(time=T, kind="ended", job_id="a", data={"to": "CANCELLED", "attempt": 0, "tasks": "0-4,7-99"})
    (notice,) = NoticeMaker(store, Notices(), "c", T).of_event(event)
    assert notice.body["text"] == "array a (j) of ada has ended: 98 CANCELLED, 1 COMPLETED"


def test_jobs_are_read_once_for_all_that_happens_in_a_cycle(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cooling fails, a few hundred nodes have a condition on each GPU in one cycle, which took minutes."""
    tasks = [job(f"a_{i}", array_id="a", array_index=i, state=JobState.COMPLETED, end_time=T) for i in range(9)]
    store.put_jobs([job(), *tasks])
    events = [condition("xid-gpu", gpu=gpu % 2) for gpu in range(9)]
    events += [Event(time=T, kind="ended", job_id=t.id, data={"to": "COMPLETED", "attempt": 1}) for t in tasks]
    read: list[str] = []

    def noted(name: str) -> Callable[..., list[JobRecord]]:
        real: Callable[..., list[JobRecord]] = getattr(store, name)
        return lambda *given: read.append(f"{name} {' '.join(given)}".strip()) or real(*given)

    for name in ("active", "rows_of"):
        monkeypatch.setattr(store, name, noted(name))
    maker = NoticeMaker(store, Notices(), "c", T)
    kinds = [notice.body["notice"] for event in events for notice in maker.of_event(event)]
    assert kinds == ["node"] * 9 + ["end"]
    assert (read.count("active"), read.count("rows_of a")) == (1, 1)


class Post:
    """Stands for the network, to decide what becomes of each try: the test is about what the service makes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[str] = []
        self.answer, self.hangs = "", False
        post = self

        class Delivery:
            def __init__(self) -> None:
                self.in_progress: set[str] = set()
                self.held: list[str] = []

            def send(self, sending: OutgoingNotice) -> None:
                self.in_progress.add(sending.key)
                post.sent.append(sending.body["notice"])

            def finished(self, wait_s: float = 0.0) -> list[tuple[str, str]]:
                if post.hangs:
                    return []
                over, self.in_progress = sorted(self.in_progress), set()
                return [(key, post.answer) for key in over]

        monkeypatch.setattr(notices, "Delivery", Delivery)


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> Post:
    return Post(monkeypatch)


def start_service(of: Store) -> Callable[[Inventory, float], None]:
    service = NotificationService(of)
    return lambda inventory, now: service.step(inventory, now)


def test_tried_again_ever_more_slowly_and_given_up_in_the_end(store: Store, post: Post) -> None:
    step, post.answer = start_service(store), "it answered 503"
    store.put_jobs([job(state=JobState.FAILED, end_time=T)])
    store.append([Event(time=T, kind="ended", job_id="j", data={"to": "FAILED", "attempt": 1})])
    times = [T]
    step(inventory(), T)
    for pause in notices.RETRIES_S:
        step(inventory(), times[-1] + 0.5)
        (failed,) = store.failed_notices()
        assert failed.due == pytest.approx(times[-1] + 0.5 + pause)
        step(inventory(), failed.due - 0.1)
        assert len(post.sent) == len(times), "not before it is due"
        times.append(failed.due)
        step(inventory(), failed.due)
        assert len(post.sent) == len(times)
    step(inventory(), times[-1] + 1)
    (failed,) = store.failed_notices()
    assert (failed.due, failed.error) == (None, "it answered 503")
    store.add_notices([msgspec.structs.replace(failed, due=T)])
    assert store.failed_notices() == [failed], "of one that was given up nobody hears again"


def test_a_controller_that_dies_loses_no_notice_and_repeats_none_that_arrived(store: Store, post: Post) -> None:
    start_service(store)  # earlier events give no notices
    store.put_jobs([job(), job("k")])
    store.append([Event(time=T, kind="ended", job_id="j", data={"to": "FAILED", "attempt": 1})])
    start_service(store)(inventory(), T)
    assert post.sent == ["end"]
    again = start_service(store)  # it died before it knew what became of it
    again(inventory(), T + 1)
    again(inventory(), T + 2)
    assert post.sent == ["end", "end"]
    store.append([Event(time=T, kind="ended", job_id="k", data={"to": "FAILED", "attempt": 1})])
    third = start_service(store)
    third(inventory(), T + 3)
    third(inventory(), T + 4)
    assert post.sent == ["end", "end", "end"]


def test_a_notice_being_sent_is_not_sent_again(store: Store, post: Post) -> None:
    step, post.hangs = start_service(store), True
    store.put_jobs([job(state=JobState.FAILED, end_time=T)])
    store.append([Event(time=T, kind="ended", job_id="j", data={"to": "FAILED", "attempt": 1})])
    for later in range(3):
        step(inventory(), T + later)
    assert post.sent == ["end"]


def test_events_of_no_interest_are_looked_through_once(store: Store, post: Post) -> None:
    step, seen = start_service(store), []
    look = store.events_after
    store.events_after = lambda seq, *more: seen.append(seq) or look(seq, *more)  # type: ignore[func-returns-value,method-assign,misc]
    store.append(Event(time=T, kind="submitted", job_id=f"j{n}") for n in range(2 * notices.MAX_PER_CYCLE))
    for later in range(3):
        step(inventory(), T + later)
    assert len(seen) == 1
    store.put_jobs([job(state=JobState.FAILED, end_time=T)])
    store.append([Event(time=T, kind="ended", job_id="j", data={"to": "FAILED", "attempt": 1})])
    step(inventory(), T + 4)
    assert (len(seen), post.sent) == (2, ["end"])


def test_a_receiver_that_left_the_inventory_gets_nothing(store: Store, post: Post) -> None:
    step = start_service(store)
    store.put_jobs([job(mail="")])
    store.append([Event(time=T, kind="ended", job_id="j", data={"to": "FAILED", "attempt": 1})])
    post.answer = "no"
    step(msgspec.structs.replace(inventory(), notices=Notices(to=(HOOK,))), T)
    step(inventory(), T + 10)
    step(inventory(), T + 20)
    assert post.sent == ["end"]
    assert store.failed_notices() == []
    assert b"token" not in Path(store._db.execute("PRAGMA database_list").fetchone()[2]).read_bytes()


def test_a_receiver_that_hangs_keeps_no_other_waiting(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A webhook that took connections and said nothing had all threads, and all places among those that are sent."""
    came, ends = queue.SimpleQueue[str](), threading.Event()

    def deliver(sending: OutgoingNotice) -> None:
        if sending.receiver == HOOK:
            ends.wait(300)
        came.put(sending.key)

    monkeypatch.setattr(delivery, "deliver", deliver)
    monkeypatch.setattr(notices, "MAX_PER_CYCLE", 20)
    monkeypatch.setattr(notices, "MAX_IN_PROGRESS", 10)
    site, service = msgspec.structs.replace(inventory(), notices=Notices(to=(HOOK,))), NotificationService(store)
    hook, mail = digest_of(HOOK), "mail ada@example.org"
    own = [Notice(key=f"{hook} end {n}", to=hook, body={}, made=T, due=T) for n in range(50)]
    try:
        store.add_notices([*own, Notice(key=f"{mail} end j", to=mail, body={}, made=T, due=T + 1)])
        for later in range(3):
            service.step(site, T + 2 + later)
        assert came.get(timeout=60) == f"{mail} end j"
        assert len(service._delivery.in_progress) <= 11
        ends.set()
        wait_until(lambda: service.step(site, T + 9) or not store.due_notices(T + 9, 100), what="the rest")
    finally:
        ends.set()
    assert sorted(came.get(timeout=60) for _ in own) == sorted(notice.key for notice in own)


def test_many_mails_to_one_address_keep_no_other_waiting(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mails of 100,000 jobs delayed all later notices to others."""
    sent: list[str] = []
    monkeypatch.setattr(delivery.Delivery, "send", lambda self, one: sent.append(one.mail))
    for name, most in (("MAX_PER_CYCLE", 20), ("MAX_IN_PROGRESS", 10), ("MAX_TO_ADDRESS", 5)):
        monkeypatch.setattr(notices, name, most)
    some = [("ada", n) for n in range(50)] + [("bob", 60), ("eve", 70)]
    store.add_notices(
        Notice(key=f"mail {to} end j{n}", to=f"mail {to}", body={}, made=T, due=T + n) for to, n in some
    )  # fmt: skip
    NotificationService(store).step(inventory(), T + 99)
    assert sent == ["ada"] * 5 + ["bob", "eve"]


def test_sendmail_gets_the_mail_and_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sendmail"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/argv; cat > {tmp_path}/mail\n')
    program.chmod(0o755)
    monkeypatch.setattr("gpusched.controller.notices.delivery._SENDMAIL", str(tmp_path))
    body = {"id": "1", "notice": "end", "text": "job j (a\nBcc: all@example.org) has ended", "job": {"name": "x\r\ny"}}
    deliver(OutgoingNotice(key="k", body=body, mail="ada"))
    assert (tmp_path / "argv").read_text() == "-oi -- ada\n"
    head, _, rest = (tmp_path / "mail").read_text().partition("\n\n")
    assert "\nBcc" not in head
    assert "name: x\\r\\ny" in rest
    assert message_of(OutgoingNotice(key="k", body=body, mail="ada"))["To"] == "ada"


def test_mail_is_encrypted_where_the_server_can(tmp_path: Path) -> None:
    """Many servers take none otherwise: 530 Must issue a STARTTLS command first."""
    came: list[tuple[list[str], bool]] = []

    class Mailbox:
        async def handle_DATA(self, server: object, session: Session, envelope: Envelope) -> str:
            came.append((envelope.rcpt_tos, session.ssl is not None))
            return "250 OK"

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    (tmp_path / "key.pem").write_bytes(new_key())
    context.load_cert_chain(tmp_path / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Controller(Mailbox(), "127.0.0.1", port, tls_context=context, require_starttls=True)
    server.start()
    try:
        body = {"id": "1", "notice": "end", "text": "job j has ended"}
        deliver(OutgoingNotice(key="k", body=body, mail="ada", asked=Notices(smtp=f"127.0.0.1:{port}")))
    finally:
        server.stop()
    assert came == [(["ada"], True)]


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_webhook_that_leads_elsewhere_has_not_got_the_notice(code: int) -> None:
    """A GET without the notice, to which urllib turns a POST, was answered 200 there: it counted as delivered."""
    got: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.command)
            self.send_response(code)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            got.append(self.command)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        receiver = Receiver(webhook=f"http://127.0.0.1:{server.server_port}/token")
        try:
            with pytest.raises(DeliveryFailed, match=f"HTTP {code} "):
                deliver(OutgoingNotice(key="k", body={}, receiver=receiver))
        finally:
            server.shutdown()
    assert got == ["POST"]
