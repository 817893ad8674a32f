"""Programs for nodes must run on old ones, and the rest must start fast."""

import ast
import json
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import gpusched.nodes.payload
from gpusched.nodes import watchdog
from gpusched.nodes.payload import jsontext
from gpusched.nodes.probe import request_script
from gpusched.nodes.watchdog import guard

PAYLOAD = sorted(Path(gpusched.nodes.payload.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", PAYLOAD, ids=lambda p: p.name)
def test_payload_is_python_3_6_and_standard_library_only(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 6))
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            ours = name == "pynvml" or name.startswith("gpusched.nodes.payload")
            assert ours or name.partition(".")[0] in sys.stdlib_module_names, name
            assert name != "__future__"  # annotations from the future came with 3.7


def test_constant_command_survives_any_login_shell() -> None:
    from gpusched.model.resources import Node, RuntimeName, Settings

    node = Node(name="n", partition="p", address="n", gpus=1, cores=1, memory_mib=1, runtime=RuntimeName.PROCESS)
    script = request_script(node, "c", Settings())
    assert script.argv[:2] == ("sh", "-c")
    assert not set("!\n'") & set(script.argv[2])
    assert "n" not in script.argv[3:]


@pytest.mark.parametrize("module", ["gpusched.nodes.transport", "gpusched.nodes.probe", "gpusched.nodes.local"])
def test_heavy_libraries_are_not_imported(module: str) -> None:
    code = f"import sys, {module}; print(*(m for m in ('paramiko', 'numpy', 'cryptography') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


SLOW_TO_IMPORT = ("collections", "enum", "functools", "json", "re", "signal", "string", "subprocess", "threading")
PROBE = """
import sys; sys.path[:0] = sys.argv[1:]
from gpusched.nodes.payload import attempts, engines, events, health, kernel, main, nvml
engines.ENGINE_TIMEOUT_S = 600.0
assert engines.run_engine(["echo", "asked"]) == "asked\\n"
assert nvml.load().NVMLError(3).value == 3
print(*sys.modules)
"""


def test_slow_modules_are_not_imported_by_a_probe() -> None:
    """Each costs as much CPU as Python's own start or half of it, on every node at every tick."""
    pynvml = find_spec("pynvml")
    assert pynvml is not None
    paths = [str(PAYLOAD[0].parents[3]), str(Path(str(pynvml.origin)).parent)]
    command = [sys.executable, "-I", "-S", "-c", PROBE, *paths]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert set(SLOW_TO_IMPORT) & set(done.stdout.split()) == set()


VALUES = [{"a": [1, -2.5e300, None, True, {}], 'é"\n\ud800': 10**30, "b": [[]]}, [float("inf")], "x", 7, {3: None}]
TEXTS = [
    ' {"a": [1, 2.0e3, NaN, -Infinity], "a": "\\u00e9"}\n', "12", '"a\tb"', "", " ", "{", "[1,]", "[1] x", "nul", "-",
    "01", "\ufeff1", '"\\u12"',
]  # fmt: skip


def decoded(decode: object, text: str, strict: bool) -> str:
    try:
        return repr(decode(text, strict=strict))  # type: ignore[operator]
    except ValueError:
        return "no JSON"


@pytest.mark.parametrize("interpreter", ["CPython", "another"])
def test_the_payloads_json_is_jsons(interpreter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreter == "another":
        monkeypatch.setattr(jsontext, "_scanners", {})
    for value in VALUES:
        assert jsontext.dumps(value) == json.dumps(value, separators=(",", ":"))
    for text in (*map(json.dumps, VALUES), *TEXTS):
        for strict in (True, False):
            assert decoded(jsontext.loads, text, strict) == decoded(json.loads, text, strict), text
    for wrong in (b"bytes", {1}):
        with pytest.raises(TypeError):
            jsontext.dumps(wrong)
    with pytest.raises(RecursionError):
        jsontext.loads("[" * 10**6)


ALONE = """
import sys; sys.path.insert(0, sys.argv[1])
from gpusched.nodes.payload.jsontext import loads
for text in sys.argv[2:]:
    try: print(repr(loads(text)))
    except ValueError: print("no JSON")
assert "json" not in sys.modules or sys.version_info >= (3, 12)
"""


def test_text_that_is_no_json_is_detected_without_importing_json() -> None:
    command = [sys.executable, "-I", "-S", "-c", ALONE, str(PAYLOAD[0].parents[3])]
    done = subprocess.run([*command, *TEXTS, '{"step": 1, '], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [*(decoded(json.loads, text, True) for text in TEXTS), "no JSON"]


def test_watchdog_cuts_off_only_what_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = threading.Event()
    with guard(time.monotonic() - 1, cut.set):
        assert cut.wait(300)
    spared, late, due = threading.Event(), threading.Event(), 2**30  # in thirty years, until this machine is that old
    with guard(due, spared.set):
        pass
    with guard(due, late.set):  # comes after the one that ended, so that one has had its time
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: due + 1.0)
        with guard(0.0, list):  # whose coming is looked at
            assert late.wait(300)
    assert not spared.is_set()
