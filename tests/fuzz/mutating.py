"""Inputs from valid seeds: tokens exchanged, dropped, repeated (which keeps most of the grammar), bytes broken."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

_TOKEN = re.compile(rb"[A-Za-z_][\w.-]*|[0-9][\w.:+-]*|\n[ \t]*|[ \t]+|.", re.DOTALL)
NUMBERS = [
    b"0",
    b"-1",
    b"1",
    b"2147483648",
    b"9223372036854775808",
    b"-9223372036854775809",
    b"9" * 30,
    b"9" * 400,
    b"9" * 5000,
    b"1e9",
    b"1e308",
    b"1e999",
    b"-1e999",
    b"1e-400",
    b"0.5",
    b"-0.0",
    b"0x10",
    b"1_000",
    b"NaN",
    b"nan",
    b"Infinity",
    b"-inf",
    "²".encode(),
    "٣".encode(),
    b"253402300800",
    b"-62135596801",
    b"0000-00-00",
    b"9999-12-31T23:59:60",
    b"2023-02-30 25:61:61",
    b"1-",
    b"[0-9999999]",
    b"dgx[1-99999]",
    b"99999999999d",
    b"-5m",
    b"1e400G",
]
WORDS = [
    b"",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b"~",
    b"\0",
    b"\x1b[2J",
    b"\x9b2J",
    "\u202e".encode(),
    "\u2028".encode(),
    b"\x85",
    b"\xff",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"\\u0000",
    b"\\u202e",
    b"\xef\xbb\xbf",
    b"\xf4\x90\x80\x80",
    b"../..",
    b"/dev/zero",
    b"%s%n",
    b"{0}",
    b"a" * 300,
    b"__class__",
    b"&a ",
    b"*a",
    b"<<: *a",
    b"!!python/object ",
    b"---\n",
    b"? ",
    b"|\n",
    b">-\n",
    b"'",
    b'"',
    b"`",
    b"\t",
    b"\r\n",
    b"\r",
    b",",
    b";",
    b"#",
    b"\\",
    b"@gpusched-probe@ ",
    b"\n@@",
    b"\x1f",
    b"\x1f\x8b\x08",
]
_LONG, MAX_LONG = (50, 1000, 20_000), 100_000


class Corpus:
    """Seeds and what their mutants are made of.

    Args:
        seeds: Valid inputs.
        words: Further words of the grammar, such as all keys of a file format.
    """

    def __init__(self, seeds: Sequence[bytes], words: Sequence[str] = ()) -> None:
        self.seeds = list(seeds)
        self._tokens = [_TOKEN.findall(seed) for seed in seeds]
        own = {t for tokens in self._tokens for t in tokens if t[:1].isalnum()} | {word.encode() for word in words}
        self._own = sorted(own) or [b"a"]

    def seed(self, rng: random.Random) -> bytes:
        """Return a seed, often with some of its tokens changed, so that much of the result is still valid."""
        tokens = list(rng.choice(self._tokens))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4, 8))):
            self._change(tokens, rng)
        return b"".join(tokens)

    def mutant(self, rng: random.Random) -> bytes:
        """Return a seed with changed tokens, and sometimes broken bytes."""
        data = self.seed(rng)
        return broken(data, rng) if rng.random() < 0.3 else data

    def _word(self, rng: random.Random) -> bytes:
        return rng.choice(rng.choice((NUMBERS, WORDS, self._own, self._own)))

    def _change(self, tokens: list[bytes], rng: random.Random) -> None:
        if not tokens:
            tokens.append(self._word(rng))
        at, kind = rng.randrange(len(tokens)), rng.random()
        end = at + rng.randint(1, 12)
        if kind < 0.5:
            while not tokens[at][:1].isalnum() and at + 1 < len(tokens) and rng.random() < 0.8:
                at += 1
            tokens[at] = self._word(rng)
        elif kind < 0.65:
            tokens.insert(at, self._word(rng))
        elif kind < 0.75:
            del tokens[at:end]
        elif kind < 0.85:
            other = rng.choice(self._tokens)
            start = rng.randrange(len(other) + 1)
            tokens[at:at] = other[start : start + rng.randint(1, 12)]
        elif kind < 0.98:
            tokens[at:at] = tokens[at:end]
        else:
            some = b"".join(tokens[at : at + rng.randint(1, 4)])
            tokens[at:at] = [some * min(rng.choice(_LONG), MAX_LONG // max(1, len(some)))]


def broken(data: bytes, rng: random.Random) -> bytes:
    """Return the data truncated, with other bytes, another encoding or other line ends."""
    at = rng.randrange(len(data) + 1)
    match rng.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[at:]
        case 2:
            return data[:at] + rng.randbytes(rng.randint(1, 9)) + data[at + 1 :]
        case 3:
            return data.replace(b"\n", b"\r\n")
        case 4:
            return b"\xef\xbb\xbf" + data
        case 5:
            return data.decode("utf-8", "replace").encode("utf-16")
        case 6:
            return data[:at] + data[:at]
        case _:
            return rng.randbytes(rng.randint(0, 200))
