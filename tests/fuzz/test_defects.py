"""Inputs that once raised, hung or filled the memory, each the shortest: every one is answered in one line."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path

import pytest

from gpusched.model import relay as wire
from gpusched.model.ids import split_task
from tests.fuzz.running import run
from tests.fuzz.targets import opened

_SECTIONS = b"s\n@gpusched-sections@\n\n"
_SWF = b"1 0 0 9 1 -1 -1 1 -1 -1 1 1 1 1 1 1 -1 -1\n"
_SACCT = b"JobID|Submit|Start|End|State|AllocTRES\n1"
_SACCT += b"|2024-01-01T00:00:00|2024-01-01T00:00:01|2024-01-01T00:00:09|COMPLETED|"


def _packed_strangely() -> bytes:
    """Return a zip file of a compression that Python does not know."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("header.npy", b"x")
    data = bytearray(buffer.getvalue())
    data[8] = data[data.index(b"PK\x01\x02") + 10] = 99
    return bytes(data)


@pytest.mark.parametrize(
    ("target", "data", "answer"),
    [
        ("inventory", b"{nodes: n[1-2], x: " + b'\\"' * 200_000, "FileError"),  # every quote was followed to the end
        ("inventory", b"a" + b":" * 3000 + b" 1", "FileError"),  # the key was shown whole
        ("inventory", b'partitions: {p: {nodes: ["n' + b"[1]" * 2000 + b'"]}}', "FileError"),  # one call for each range
        ("policy", b"agent: dl2\nfallback: " + b"elastic" * 50, "FileError"),
        ("commands", b'{"command":"' + b"9" * 3000 + b'"}', "refused"),  # and here
        ("traces", b"swf 0 0\n; UnixStartTime: " + b"9" * 5000 + b"\n" + _SWF, "value"),
        ("traces", b"swf 0 0\n2 0 0 9 4 1 1 8 0 " + b"9" * 22 + b" 1 3 1 1 1 1 1 1\n" + _SWF, "value"),
        ("traces", b"gpusched 0 1\n" + _packed_strangely(), "FileError"),
        ("traces", b"sacct 0 1\n" + _SACCT + b"cpu=" + b"9" * 30 + b",gres/gpu=1", "FileError"),
        ("traces", b"sacct 0 1\n" + _SACCT + b"gres/gpu=1,mem=" + b"9" * 400 + b"T", "FileError"),
        ("traces", b"sacct 0 1\n" + _SACCT.replace(b"AllocTRES", b"TimelimitRaw") + b"9" * 5000, "FileError"),
        ("traces", b"sacct 0 1\n" + _SACCT.replace(b"AllocTRES", b"Timelimit") + b"9" * 400 + b":00", "FileError"),
        ("traces", b'philly 0 0\n[{"a": ' + b"9" * 5000 + b"}]", "FileError"),
        ("traces", b"helios 0 0\n" + gzip.compress(b"0" * (80 << 20)), "GpuschedError"),
        ("probe", _SECTIONS + b"@@meminfo\nMemTotal: \xc2\xb2 kB", "reading"),
        ("probe", _SECTIONS + b"@@smi_gpus\n@@processes\n\t\t\t", "reading"),
        ("probe", _SECTIONS + b"@@smi_gpus\n\xc2\xb2,,,,,,,,", "reading"),
        ("probe", _SECTIONS + b"@@smi_gpus\n0,,,,inf,nan,,,1e999", "reading"),
        ("probe", _SECTIONS + b"@@smi_gpus\n@@smi_apps\n" + b"GPU-1, 99, 1\n" * 100_000, "reading"),  # quadratic
        ("probe", _SECTIONS + b"@@attempts\nattempt a\n" + b"error x\n" * 300_000 + b"attempts_end\n", "reading"),
        ("probe", b"p\n@gpusched-probe@ " + b'{"source":"nvidia-smi","processes":[],"clock":[1,2]}', "protocol"),
        ("probe", b"oGPU ok", "none"),
        ("probe", b"o" + b"9" * 5000, "none"),
        ("http", b"GET / HTTP/1.1\r\nHost: \r\n\r\n" + b"localhost" * 1100, "421"),  # the second was quoted
        ("http", b"GET p://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", "400"),
        ("relay", b"r" + wire.frame(wire.EXITED), "GpuschedError"),
        ("relay", b"r" + wire.frame(wire.FAILED, b'{"message":"\xff"}'), "GpuschedError"),
        ("relay", b"r" + wire.frame(wire.FAILED, b'{"message":"' + b"x" * 5000 + b'"}'), "GpuschedError"),
        ("relay", b"r" + wire.frame(wire.OUTPUT) * 1_000_000, "value"),  # each frame copied the rest
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_is_answered(target: str, data: bytes, answer: str, tmp_path: Path) -> None:
    with opened(target, tmp_path) as door:
        report = run(target, door.make, door.ask, [lambda: data], 0, seed=0)
    assert not report.defects, report.defects
    assert dict(report.outcomes) == {answer: 1}


def test_a_trace_of_ours_that_announces_more_jobs_than_it_has(tmp_path: Path) -> None:
    with opened("traces", tmp_path) as door:
        report = run("traces", door.make, door.ask, [door.extremes[-1]], 0, seed=0)
    assert dict(report.outcomes) == {"FileError": 1}


def test_task_indices_are_ascii_digits() -> None:
    assert split_task("0123456789a_²") == ("0123456789a", -1)
