"""What a job writes into its folder: progress.json, saved.json, ask.json. Runs on the node: stdlib, Python 3.6+.

The folder is the job's own, so a file there may be anything: a link, a pipe, a gigabyte, no JSON. Nothing of it is
followed, waited for, or believed unless it is the few numbers that are asked for.
"""
# ruff: noqa: UP031

import errno
import os
import stat
import time

from gpusched.nodes.payload.jsontext import loads

MYPY = False  # as mypy knows it; importing typing costs time on every probe
if MYPY:
    from typing import Any


NAMES = ("progress", "saved", "ask")
SMALL_BYTES = 4096
LIMIT_S = 2.0  # for all files on a shared disk
OPEN_ROOT = "/var/lib/gpusched-node/"  # beneath it are the folders of jobs that are another user's than the account
MAX_LARGE_FILES = 3  # requests with a script that one reading brings: with them it stays below a megabyte more
_MAX_FILE_BYTES = {"progress": SMALL_BYTES, "saved": SMALL_BYTES, "ask": 150000}
_MAX_REQUEST_BYTES = 300000  # characters as sent, where one of the job's may take six
_NUMBERS = {
    "progress": tuple((name, name == "step") for name in "step of samples_per_s nodes ran_s paused_s".split()),
    "saved": (("step", True), ("gpus", False)),
}
_NOT_A_FILE = "!it is not a regular file"
_MAX_EXACT = float(1 << 53)  # up to there a number of steps is exact everywhere


def orphaned_folders(root: str, cluster_id: str, node: str) -> "list[str]":
    """Return jobs with a folder here but no attempt any more; ``root``: the folder of attempts.

    At most twenty, drawn at random: many may stay, as their jobs run or wait elsewhere, and must not hide ended ones.
    """
    jobs = names(os.path.join(root, "jobs")) + names(OPEN_ROOT + "%s/%s" % (cluster_id, node))
    here = {name.split("-")[1] for name in names(root) if name.count("-") == 3}  # made before the jobs' own
    return sorted(sorted([job for job in jobs if job not in here], key=lambda _: os.urandom(4))[:20])


def names(folder: str) -> "list[str]":
    """Return the sorted contents of a folder; empty if it does not exist."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def read(folder: str) -> "dict[str, tuple[str, float]]":
    """Name -> text and age in seconds of the files that are there; a text that cannot be had begins with ``!``."""
    found = {}
    for name in NAMES:
        try:
            found[name] = _read("%s/%s.json" % (folder, name), _MAX_FILE_BYTES[name])
        except FileNotFoundError:
            pass
        except OSError as error:
            link = error.errno == errno.ELOOP
            why = _NOT_A_FILE if link else "!it cannot be read: %s" % (error.strerror or error)
            found[name] = (why, 0.0)
    return found


def drop_surplus(files: "list[dict[str, tuple[str, float]]]") -> None:
    """Leave the larger requests of some jobs, by chance, to later readings where many jobs have one."""
    large = [one for one in files if "ask" in one and len(one["ask"][0]) > SMALL_BYTES]
    for one in sorted(large, key=lambda _: os.urandom(4))[MAX_LARGE_FILES:]:
        del one["ask"]


def _read(path: str, largest: int) -> "tuple[str, float]":
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            return _NOT_A_FILE, 0.0
        age = max(0.0, time.time() - facts.st_mtime)
        if facts.st_size > largest:
            return "!it is larger than %d bytes" % largest, age
        return os.read(descriptor, largest).decode("utf-8", "replace"), age
    finally:
        os.close(descriptor)


def parse(texts: "dict[str, tuple[str, float]]") -> "dict[str, Any]":
    """Return the fields ``progress``, ``saved``, ``ask`` and ``job_file_error`` of a ``ContainerReading``."""
    result = dict.fromkeys((*NAMES, "job_file_error"))  # type: dict[str, Any]
    for name in NAMES:
        if name in texts:
            text, age = texts[name]
            try:
                result[name] = dict(_parse_request(text) if name == "ask" else _numbers(name, text), age_s=age)
            except ValueError as error:
                result["job_file_error"] = "%s.json: %s" % (name, error)
    return result


def _parse_request(text: str) -> "dict[str, Any]":
    import json  # jobs seldom ask

    found = _object(text, strict=False)  # a shell that writes it leaves line breaks as they are
    words, script = found.get("words"), found.get("script")
    asked = {"id": found.get("id"), "attempt": found.get("attempt"), "words": words, "script": script}
    asked.update(cwd=found.get("cwd", ""), script_word=found.get("script_word", 0))
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ValueError("words is no list of texts")
    if not _is_count(asked["attempt"]) or not isinstance(asked["id"], str):
        raise ValueError("it has no id, or no attempt")
    if not isinstance(script or "", str) or not isinstance(asked["cwd"], str) or not _is_count(asked["script_word"]):
        raise ValueError("its script, or its folder, is no text")
    try:
        json.dumps(asked, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair: the controller would take the whole reading for broken
        raise ValueError("it is not valid UTF-8") from None
    if len(json.dumps(asked)) > _MAX_REQUEST_BYTES:
        raise ValueError("it is too large")
    return asked


def _is_count(value: "Any") -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _numbers(name: str, text: str) -> "dict[str, float | None]":
    found = _object(text)
    numbers = {}  # type: dict[str, float | None]
    for key, needed in _NUMBERS[name]:
        value = found.get(key)
        if value is None and not needed:
            numbers[key] = None
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MAX_EXACT:
            raise ValueError("%s is not a number from 0 to 2^53" % key)
        else:
            numbers[key] = float(value)
    return numbers


def _object(text: str, strict: bool = True) -> "dict[str, Any]":
    if text.startswith("!"):
        raise ValueError(text[1:])
    try:
        found = loads(text, strict)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found
