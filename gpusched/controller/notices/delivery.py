"""Sends notices in threads of its own, so that no mail server or webhook delays the cycle."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gpusched.config.plugins import installed
from gpusched.errors import GpuschedError, printable
from gpusched.model.notices import Notices, Receiver

if TYPE_CHECKING:
    from email.message import EmailMessage

THREADS = 4
COMMAND_S, NETWORK_S = 30.0, 15.0
_SENDMAIL = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/lib"))


class DeliveryFailed(Exception):
    """A failed delivery; the text gives the reason in one line."""


class OutgoingNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A notice being sent, to a mail address or to a receiver of the inventory."""

    key: str
    body: dict[str, Any]
    mail: str = ""
    receiver: Receiver | None = None
    asked: Notices = Notices()


def receiver_of(key: str) -> str:
    """Return the receiver of a notice by its key (`Notice.key`); all mail is one: the mail server's."""
    return key.partition(" ")[0]


class Delivery:
    """Sends up to `THREADS` notices at a time to each receiver; `finished` returns the results.

    No receiver waits for another one, which may hang.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, queue.SimpleQueue[OutgoingNotice]] = {}
        self._done: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._threads: Counter[str] = Counter()
        self.in_progress: set[str] = set()

    def send(self, sending: OutgoingNotice) -> None:
        """Queue a notice."""
        self.in_progress.add(sending.key)
        receiver = receiver_of(sending.key)
        waiting = self._waiting.setdefault(receiver, queue.SimpleQueue())
        waiting.put(sending)
        if self._threads[receiver] < THREADS:
            self._threads[receiver] += 1
            threading.Thread(target=self._work, args=(waiting,), name="notices", daemon=True).start()

    def finished(self, wait_s: float = 0.0) -> list[tuple[str, str]]:
        """Return key and error ("": delivered) of notices sent since the last call; wait up to ``wait_s`` for all."""
        found: list[tuple[str, str]] = []
        until = time.monotonic() + wait_s
        while self.in_progress:
            left = until - time.monotonic()
            try:
                found.append(self._done.get(block=left > 0, timeout=max(0.0, left)))
            except queue.Empty:
                break
            self.in_progress.discard(found[-1][0])
        return found

    def _work(self, waiting: queue.SimpleQueue[OutgoingNotice]) -> None:
        while True:
            sending = waiting.get()
            try:
                deliver(sending)
                why = ""
            except (DeliveryFailed, GpuschedError) as error:
                why = str(error)
            except Exception as error:  # another package's notifier may raise anything; this thread goes on
                way = f"notifier '{sending.receiver.way[0]}': " if sending.receiver else ""
                why = f"{way}{type(error).__name__}: {error}"
            self._done.put((sending.key, printable(why)[:500]))


def deliver(sending: OutgoingNotice) -> None:
    """Send a notice and wait for the result.

    Raises:
        DeliveryFailed: It was not delivered, as far as known.
    """
    if sending.mail:
        _mail(sending)
        return
    assert sending.receiver is not None
    name, options = sending.receiver.way
    installed("notifiers", name).load()(sending.body, options)


def post(body: Mapping[str, Any], options: Mapping[str, str]) -> None:
    """Send a notice as JSON by POST to ``options["url"]``; the notifier ``webhook``.

    Raises:
        DeliveryFailed: The answer was no success, or there was none.
    """
    post_json(options["url"], msgspec.json.encode(body))


def run(body: Mapping[str, Any], options: Sequence[str]) -> None:
    """Run a command that gets the notice as JSON on stdin; the notifier ``command``.

    Raises:
        DeliveryFailed: It could not be started, did not end in time, or exited with another code than 0.
    """
    _run(options, msgspec.json.encode(body))


def post_json(url: str, content: bytes) -> None:
    """Send JSON by POST.

    Raises:
        DeliveryFailed: The answer was no success, or there was none.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirects(HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            """Follow none: urllib would ask for the new address by GET, and leave out what is posted."""

    headers = {"Content-Type": "application/json", "User-Agent": "gpusched"}
    try:
        with build_opener(NoRedirects).open(Request(url, content, headers), timeout=NETWORK_S) as answer:
            answer.read(1 << 16)
    except HTTPError as error:
        with error:
            raise DeliveryFailed(f"HTTP {error.code} {error.reason}") from None
    except (OSError, HTTPException) as error:
        raise DeliveryFailed(f"unreachable: {getattr(error, 'reason', None) or error}") from None


def _run(argv: Sequence[str], content: bytes) -> None:
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TZ") if name in os.environ}
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/", env=environment,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise DeliveryFailed(f"{argv[0]} cannot be started: {error.strerror}") from None
    try:
        _, errors = process.communicate(content, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        raise DeliveryFailed(f"{argv[0]} did not end within {COMMAND_S:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise DeliveryFailed(f"{argv[0]} exited with {process.returncode}" + (f": {lines[-1]}" if lines else ""))


def message_of(sending: OutgoingNotice) -> EmailMessage:
    """Return the mail: the text as the subject, the job's facts in the body."""
    from email.message import EmailMessage

    message = EmailMessage()
    text = printable(str(sending.body["text"]))
    message["Subject"] = f"gpusched: {text}"[:200]
    message["To"] = sending.mail
    if sending.asked.sender:
        message["From"] = sending.asked.sender
    message["Message-ID"] = f"<{sending.body['id']}@gpusched.invalid>"  # lets mail programs drop duplicates
    job = sending.body.get("job") or {}
    facts = [f"{name}: {_plain(value)}" for name, value in job.items() if value not in (None, "", [])]
    message.set_content("\n".join([text, "", *facts]) + "\n")
    return message


def _plain(value: object) -> str:
    return printable(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _mail(sending: OutgoingNotice) -> None:
    message = message_of(sending)
    if not sending.asked.smtp:
        program = shutil.which("sendmail", path=_SENDMAIL)
        if program is None:
            raise DeliveryFailed("cannot send mail: no sendmail on the controller's machine, and no notices.smtp")
        _run((program, "-oi", "--", sending.mail), message.as_bytes())
        return
    import smtplib

    host, _, port = sending.asked.smtp.partition(":")
    if "From" not in message:
        message["From"] = f"gpusched@{host}"
    try:
        with smtplib.SMTP(host, int(port or 25), timeout=NETWORK_S) as server:
            server.ehlo_or_helo_if_needed()  # before it, no extension is known
            if server.has_extn("starttls"):
                server.starttls()
            server.send_message(message)
    except (OSError, smtplib.SMTPException) as error:
        raise DeliveryFailed(f"{host} rejected it: {error}") from None
