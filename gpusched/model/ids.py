"""Job ids: minted by the client, sortable by time, short enough to type a prefix of.

Eleven characters of Crockford's base 32 (no i, l, o, u): eight of milliseconds since 2025-01-01 (good until 2059),
three random; those of one process increase. Two clients that mint the same id in the same millisecond are distinguished
by the inbox: the second cannot create its file, and mints again.
"""

from __future__ import annotations

import os
import re

from gpusched.model.units import whole_number

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
EPOCH_S = 1735689600.0  # 2025-01-01T00:00:00Z
_MAX_DIGITS = 4300  # int() reads no more
_TIME_CHARS, _RANDOM_CHARS = 8, 3
ID_LENGTH = _TIME_CHARS + _RANDOM_CHARS
_INDEX = "[0-9]{1,7}"
_INDICES = rf"\[{_INDEX}(-{_INDEX})?(,{_INDEX}(-{_INDEX})?)*\]"
_TASK_ID = re.compile(rf"[{ALPHABET}]{{1,{ID_LENGTH}}}(_({_INDEX}|{_INDICES}))?")
_SLURMS = re.compile(r"[0-9]{1,10}([+_][0-9]{1,10})?(~[0-9]{1,4})?")


_RANDOM_BITS = 5 * _RANDOM_CHARS
_STEP_BACK = 1000 << _RANDOM_BITS  # a clock that is set back by up to a second
_last = -1, -1  # the process, and what it minted


def mint(now: float) -> str:
    """Return a new job id for a submission at ``now`` (Unix seconds), above the one that this process minted before.

    The inbox is applied by name: what was sent later must not come first, though it is the same millisecond. A process
    that was forked begins anew: it would mint what its siblings do.
    """
    global _last
    made = _ticks(now) << _RANDOM_BITS | int.from_bytes(os.urandom(4), "big") % (1 << _RANDOM_BITS)
    minter, last = _last
    if minter == os.getpid() and made <= last < made + _STEP_BACK:
        made = last + 1
    _last = os.getpid(), made
    return _base32(made, ID_LENGTH)


def of_request(name: str, second: int) -> str:
    """Return the id of the job that a request of this name made in this second queues: always the same."""
    from hashlib import sha256  # commands start faster without it

    rest, ticks = divmod(int.from_bytes(sha256(name.encode()).digest(), "big"), 1000)
    return _base32(_ticks(second) + ticks, _TIME_CHARS) + _base32(rest, _RANDOM_CHARS)


def minted_at(job_id: str) -> float:
    """Return when a complete job id was minted (Unix seconds)."""
    ticks = 0
    for char in job_id[:_TIME_CHARS]:
        ticks = ticks << 5 | ALPHABET.index(char)
    return EPOCH_S + ticks / 1000


def is_job_id(text: str) -> bool:
    """Return whether ``text`` is a complete job id without an array index."""
    return re.fullmatch(rf"[{ALPHABET}]{{{ID_LENGTH}}}", text) is not None


def is_prefix(text: str) -> bool:
    """Return whether ``text`` can name a job: an id, a prefix of one, or either with ``_7`` or ``_[3-9,12]``."""
    return _TASK_ID.fullmatch(text) is not None


def is_slurms(text: str) -> bool:
    """Return whether ``text`` is a Slurm id: ``1234``, ``1234_5``, ``1234+1``; ``1234~2``: the second job of its id."""
    return _SLURMS.fullmatch(text) is not None


def slurm_id(name: str) -> str:
    """Return Slurm's own id of a stored job, without the suffix that distinguishes reused ids."""
    return name.partition("~")[0]


def split_task(job_id: str) -> tuple[str, int]:
    """Split ``1234_5`` into array id and task index; the index is -1 for jobs that are not tasks."""
    base, _, index = job_id.partition("_")
    number = whole_number(index)
    return base, -1 if number is None else number


def id_key(job_id: str) -> tuple[int, str, int, int]:
    """Return a sort key by age: Slurm's ids and array indices compare as numbers (36 before 100).

    A row of several tasks, ``1234_[10-39]``, is where its first one is.
    """
    own, _, again = job_id.partition("~")
    if own.endswith("]"):
        first = own.replace("_[", "_", 1)
        own = first[: min((at for at in map(first.find, "-,%:]") if at > 0), default=0)]
    base, index = split_task(own)
    base, _, part = base.partition("+")
    number = int(base) if base.isdecimal() and len(base) < _MAX_DIGITS else 0
    within, attempt = whole_number(part), whole_number(again)
    return number, base, max(index, -1 if within is None else within), 1 if attempt is None else attempt


def normalise(text: str) -> str:
    """Normalise an id typed by a person: lower case, with the letters Crockford reads as digits."""
    return text.strip().lower().translate(str.maketrans("ilo", "110"))


def _ticks(at: float) -> int:
    return max(0, int((at - EPOCH_S) * 1000)) % (1 << 5 * _TIME_CHARS)


def _base32(value: int, width: int) -> str:
    return "".join(ALPHABET[value >> 5 * place & 31] for place in reversed(range(width)))
