"""Functions as programs: what runs in a job is run here, by Pythons as images have them."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import linecache
import operator
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import gpusched
import gpusched.job.call
from gpusched import Again
from gpusched.api import functions
from gpusched.client.results import StoredResult
from gpusched.errors import UsageError
from gpusched.job.call import MAGIC
from gpusched.model.resources import LogSettings, Settings
from tests.testbed import wait_until

BARE = ("-I", "-S")
"""A Python without anything installed, as an image may have it."""


class Ran(NamedTuple):
    """How a program ended; ``header`` and ``value`` of its result, {} and None where there is none."""

    code: int
    out: str
    err: str
    header: dict[str, Any]
    value: Any
    left: list[str]
    data: bytes


def run(text: str, folder: Path, *flags: str, cwd: Path | None = None, keep: bool = False) -> Ran:
    job_dir = folder / "job"
    job_dir.mkdir(exist_ok=True)
    (job_dir / "program.1.0.py").write_text(text)
    env = {"GPUSCHED_JOB_DIR": str(job_dir), "GPUSCHED_ATTEMPT": "1", "NODE_RANK": "0", "PATH": os.environ["PATH"],
           "WORLD_SIZE": "2", "RANK": "0", "GPUSCHED_JOB_ID": "j", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, *flags, "-u", str(job_dir / "program.1.0.py")], env=env, cwd=cwd or folder, text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    result, header, value, data = job_dir / "result.1.0", dict[str, Any](), None, b""
    if result.exists():
        line, _, data = result.read_bytes().removeprefix(MAGIC).partition(b"\n")
        header = json.loads(line)
        assert len(data) == header["size"]
        value = pickle.loads(data) if data and not keep else None
        result.unlink()
    return Ran(done.returncode, done.stdout, done.stderr, header, value, os.listdir(job_dir), data)


def sent(function: Callable[..., Any], *args: Any, modules: list[str] | None = None, **kwargs: Any) -> str:
    return functions.program([function], [(args, kwargs)], Settings(), {"modules": modules}).text


def test_it_runs_where_nothing_is_installed(tmp_path: Path) -> None:
    offset = 40

    def add(number: int, more: int = 0) -> int:
        print("adding")
        return offset + number + more

    done = run(sent(add, 1, more=1), tmp_path, *BARE)
    assert (done.code, done.out, done.err, done.value) == (0, "adding\n", "", 42)
    assert done.header["outcome"] == "returned"
    assert done.left == []


def test_an_exception_comes_back_with_its_traceback(tmp_path: Path) -> None:
    def divide(by: int) -> float:
        return 1 / by  # the line that fails

    done = run(sent(divide, 0), tmp_path, *BARE)
    assert (done.code, done.header["outcome"]) == (1, "raised")
    assert done.header["error"] == "ZeroDivisionError: division by zero"
    assert isinstance(done.value, ZeroDivisionError)
    assert "1 / by" in done.err
    assert done.err == done.header["traceback"]
    assert "call.py" not in done.err

    def unlike() -> None:
        class Own(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("not me")

        raise Own("there")

    done = run(sent(unlike), tmp_path, *BARE)
    assert (done.code, done.value, done.header["error"].endswith("Own: there")) == (1, None, True)

    def one_way() -> None:
        class Own(Exception):
            def __init__(self, what: str, number: int) -> None:
                super().__init__(what)

        raise Own("there", 3)

    done = run(sent(one_way), tmp_path, *BARE)
    assert (done.code, done.value, done.header["error"].endswith("Own: there")) == (1, None, True)
    # The lines of a file that is not here, as the client's seldom is.
    away = tmp_path / "away.py"
    away.write_text("def fail():\n    raise KeyError('k')  # in away.py\n")
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(away.read_text(), str(away), "exec"), scope)
    text = sent(scope["fail"])
    away.unlink()
    linecache.clearcache()
    assert "raise KeyError('k')  # in away.py" in run(text, tmp_path, *BARE).err


@pytest.mark.parametrize(
    ("code", "ends", "outcome"), [(0, 0, "returned"), (None, 0, "returned"), (3, 3, "exited"), ("no", 1, "exited")]
)
def test_sys_exit_ends_the_job(tmp_path: Path, code: object, ends: int, outcome: str) -> None:
    done = run(sent(sys.exit, code), tmp_path)
    assert (done.code, done.header["outcome"], done.value) == (ends, outcome, None)


def test_a_process_that_it_forks_leaves_no_result(tmp_path: Path) -> None:
    def fork(gives_up: bool) -> int:
        child = os.fork()
        if not child:
            sys.exit(5)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if gives_up:
            os._exit(7)
        return code

    done = run(sent(fork, False), tmp_path)
    assert (done.code, done.value, done.left) == (0, 5, [])
    done = run(sent(fork, True), tmp_path)
    assert (done.code, done.header, done.left) == (7, {}, ["program.1.0.py"])


def test_code_of_another_python_is_rejected_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "VERSION", [3, 99, 1])
    done = run(sent(lambda: 1), tmp_path, *BARE)
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert (done.code, done.header["outcome"]) == (1, "not run")
    assert f"was sent by Python 3.99, and Python {here}, which is here, cannot run its code" in done.header["error"]
    assert 'python="python3.99"' in done.err
    assert done.err.count("\n") == 1
    # What every Python has by name needs no code.
    assert run(sent(operator.add, 1, 2), tmp_path, *BARE).value == 3


def test_the_runner_is_read_by_old_pythons() -> None:
    ast.parse(functions._runner(), feature_version=(3, 6))
    assert Path(gpusched.job.call.__file__).read_text("utf-8") == functions._runner()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of the user's own, which no image has: ``mine.work.double`` needs ``mine.tools``."""
    package = tmp_path / "src" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "tools.py").write_text("def twice(x):\n    return 2 * x\n")
    (package / "work.py").write_text("from mine import tools\ndef double(x):\n    return tools.twice(x)\n")
    monkeypatch.syspath_prepend(package.parent)
    import mine.work  # type: ignore[import-not-found]

    yield mine.work
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]


def test_the_functions_own_package_goes_along(tmp_path: Path, own: ModuleType) -> None:
    import cloudpickle

    before = cloudpickle.list_registry_pickle_by_value()  # other tests of this process may have added to it
    assert run(sent(own.double, 21), tmp_path, *BARE).value == 42
    assert run(sent(lambda: own.double(3), modules=["mine"]), tmp_path, *BARE).value == 6
    done = run(sent(own.double, 21, modules=[]), tmp_path, *BARE)
    assert done.header["outcome"] == "not run"
    assert "mine.work.double needs mine, which cannot be imported here (No module named 'mine')" in done.err
    assert 'modules=["mine"]' in done.err
    # An array's functions are all looked at, and the list of modules is as it was.
    assert functions.program([own.double, own.double], [((1,), {})] * 2, Settings(), array=True).of_tasks
    assert cloudpickle.list_registry_pickle_by_value() == before


@pytest.mark.parametrize(
    "way", [["main.py"], ["-m", "main"], ["-m", "app.main"], ["-c", "exec(open('main.py').read())"]]
)
def test_modules_beside_a_program_are_sent(tmp_path: Path, way: list[str]) -> None:
    source = tmp_path / "src"
    (source / "spaces").mkdir(parents=True)
    (source / "app").mkdir()
    (source / "model.py").write_text("from spaces import deep\ndef size():\n    return deep.SIZE\n")
    (source / "spaces" / "deep.py").write_text("SIZE = 42\n")  # a package without __init__.py
    main = (
        "import json, model\nfrom gpusched.api import functions\nfrom gpusched.model.resources import Settings\n"
        "def work():\n    return model.size(), json.dumps(1)\n"
        "print(functions.program([work], [((), {})], Settings()).text)\n"
    )
    for place in (source, source / "app"):
        (place / "main.py").write_text(main)
    env = os.environ | {"PYTHONPATH": str(Path(gpusched.__file__).parents[1])}
    text = subprocess.run(
        [sys.executable, *way], cwd=source, env=env, text=True, capture_output=True, check=True
    ).stdout
    assert run(text, tmp_path, *BARE).value == (42, "1")


def test_installed_modules_are_not_sent(tmp_path: Path, own: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "src" / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "theirs.py").write_text("def name():\n    return __name__\n")
    monkeypatch.syspath_prepend(installed)
    import theirs  # type: ignore[import-not-found]

    own.theirs = theirs
    exec("def asks():\n    return theirs.name()\n", own.__dict__)
    try:
        done = run(sent(own.asks), tmp_path, *BARE)
    finally:
        del sys.modules["theirs"]
    assert "mine.work.asks needs theirs, which cannot be imported here" in done.err


def test_modules_of_the_folder_it_starts_in_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("answer = 42\n")

    def look() -> int:
        import here  # type: ignore[import-not-found]

        return int(here.answer)

    assert run(sent(look), tmp_path, cwd=tmp_path).value == 42


def test_a_function_reports_its_progress(tmp_path: Path) -> None:
    from gpusched.job import asked_to_stop, progress, stop_when_asked

    def work() -> bool:
        stop_when_asked()
        progress(3, of=4)
        os.kill(os.getpid(), signal.SIGTERM)
        os.environ.clear()  # its result has its place all the same
        return asked_to_stop()

    done = run(sent(work), tmp_path, *BARE)
    assert (done.code, done.value, done.left) == (0, True, ["progress.json"])
    assert json.loads((tmp_path / "job" / "progress.json").read_text())["step"] == 3


def test_two_threads_report_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpusched import job

    dump, other = json.dump, threading.Thread(target=job.progress, args=(2,))

    def interrupted(*given: Any) -> None:
        if threading.current_thread() is not other:
            other.start()
            other.join()
        dump(*given)

    monkeypatch.setenv("GPUSCHED_JOB_DIR", str(tmp_path))
    monkeypatch.setattr(job.json, "dump", interrupted)
    job.progress(1)
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]
    assert json.loads((tmp_path / "progress.json").read_text())["step"] == 1


def test_a_job_that_cannot_report_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpusched import job

    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUSCHED_JOB_DIR", str(tmp_path / "file"))
    for report in (job.progress, job.saved):
        with pytest.warns(RuntimeWarning, match="cannot be written: Not a directory"):
            report(1)


def test_tasks_have_what_is_theirs(tmp_path: Path) -> None:
    program = functions.program([operator.mul], [((n, 7), {}) for n in range(3)], Settings(), array=True)
    assert [run(program.text + task, tmp_path, *BARE).value for task in program.of_tasks] == [0, 7, 14]
    chunks = functions.program([operator.mul], [(([(2, 3), (4, 5)],), {})], Settings(), array=True, is_batch=True)
    assert run(chunks.text + chunks.of_tasks[0], tmp_path, *BARE).value == [6, 20]


def test_a_result_that_cannot_be_returned_is_an_error(tmp_path: Path) -> None:
    done = run(sent(threading.Lock), tmp_path, *BARE)
    assert "what _thread.lock returned cannot be pickled" in done.header["error"] or "lock" in done.header["error"]
    assert done.header["outcome"] == "not run"
    small = Settings(logs=LogSettings(max_mib_per_job=1))
    text = functions.program([bytes], [((2 << 20,), {})], small).text
    done = run(text, tmp_path, *BARE)
    assert "what bytes returned takes 2.0 MiB; at most 0.8 MiB can be returned" in done.header["error"]
    shared = Settings(logs=LogSettings(max_mib_per_job=1), job_dirs="/shared")  # the client finds it there
    done = run(functions.program([bytes], [((2 << 20,), {})], shared).text, tmp_path)
    assert (done.header["file"], done.header["size"], done.left) == ("result.1.0.data", 0, ["result.1.0.data"])
    data = (tmp_path / "job/result.1.0.data").read_bytes()
    assert hashlib.sha256(data).hexdigest() == done.header["sha256"]
    assert len(pickle.loads(data)) == 2 << 20
    folder = tmp_path / "own"
    text = functions.program([bytes], [((2 << 20,), {})], small, {"result_dir": folder}).text
    assert f"cannot be written to {folder}: No such file" in run(text, tmp_path).header["error"]
    folder.mkdir()
    assert run(text, tmp_path).header["file"] == "gpusched-j.result.1.0.data"
    assert os.listdir(folder) == ["gpusched-j.result.1.0.data"]


def test_each_task_is_called_with_its_rank(tmp_path: Path) -> None:
    def ranks() -> tuple[str, ...]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "CUDA_VISIBLE_DEVICES")
        return tuple(os.environ[name] for name in names)

    given = {"ntasks_per_node": 2, "gpus_per_task": 2}
    done = run(functions.program([ranks], [((), {})], Settings(), given).text, tmp_path, *BARE, keep=True)
    assert (done.code, done.err, done.left) == (0, "", [])
    left = StoredResult(done.header, done.data).tasks()
    assert [pickle.loads(one.data) for one in left] == [
        ("0", "0", "4", "2", "0", "4,5"), ("1", "1", "4", "2", "1", "6,7"),
    ]  # fmt: skip


def test_a_task_that_fails_ends_the_others_and_is_the_one_reported(tmp_path: Path) -> None:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("mine")
        threading.Event().wait(600)

    text = functions.program([fail], [((), {})], Settings(), {"ntasks_per_node": 2}).text
    done = run(text, tmp_path, *BARE, keep=True)
    assert (done.code, done.header["outcome"]) == (143, "raised")
    assert [part["outcome"] for part in done.header["tasks"]] == ["not run", "raised"]
    assert "task 0 ended with exit code 143 and left no result" in done.header["tasks"][0]["error"]


class Count:
    """Count on from its checkpoint; the first call signals that it runs and waits for the checkpoint request."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def __call__(self, up: str) -> int:
        if not self.start:
            Path(up).touch()
            threading.Event().wait(600)
        return self.start

    def checkpoint(self, up: str) -> Again:
        return Again(Count(41), up=up)


@pytest.mark.parametrize("code", [0, 1])
def test_a_checkpoint_says_what_is_called_when_the_job_starts_again(tmp_path: Path, code: int) -> None:
    with pytest.raises(UsageError, match=r"Count.* has a checkpoint, and there is no folder where its next start"):
        sent(Count(), "up")
    text = functions.program([Count()], [((str(tmp_path / "up"),), {})], Settings(), {"result_dir": tmp_path}).text
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, text, tmp_path, *BARE)
        wait_until(lambda: (tmp_path / "up").exists() or first.done(), 60, "the call")
        program = str(tmp_path / "job/program.1.0.py")
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if program.encode() in (folder / "cmdline").read_bytes():
                    os.kill(int(folder.name), signal.SIGUSR1)
        ask = tmp_path / "job/ask.json"
        wait_until(lambda: ask.exists() or first.done(), 60, "what it asks")
        asked = json.loads(ask.read_text())
        assert (asked["attempt"], asked["words"]) == (1, ["scontrol", "requeue", "j"])
        (tmp_path / "job/answer.part").write_text(f"{asked['id']} {code}\nwhy\n")
        (tmp_path / "job/answer.part").rename(tmp_path / "job/answer")
        done = first.result(300)
    assert (done.code, done.header, done.left) == (0 if code == 0 else 128 + signal.SIGUSR1, {}, ["answer"])
    assert run(text, tmp_path, *BARE).value == 41
    assert not (tmp_path / "gpusched-again.j").exists()


def test_a_function_that_cannot_be_sent_is_rejected_at_once() -> None:
    lock = threading.Lock()
    with pytest.raises(
        UsageError, match=r"<lambda>, or what it is called with, cannot be pickled: TypeError: cannot pi"
    ):
        sent(lambda: lock)
    with pytest.raises(UsageError, match=r"what _operator.add is called with \(number 1\) cannot be pickled"):
        functions.program([operator.add], [((1,), {}), ((lock,), {})], Settings(), array=True)
    with pytest.raises(UsageError, match=r"modules: 'no[.]such' cannot be imported here"):
        sent(len, "x", modules=["no.such"])
    for name in ("python3; true", 'a"b', "a\nb", ""):
        with pytest.raises(UsageError, match="python: expected a name"):
            functions.command(name)


def test_names_for_people() -> None:
    partial = functools.partial(functools.partial(test_names_for_people, 1), 2)
    assert functions.name_of(partial) == f"{__name__}.test_names_for_people"
    assert functions.name_of(len) == "len"
    assert functions.name_of(operator.itemgetter(1)) == "operator.itemgetter"

    def odd() -> None: ...

    odd.__qualname__ = "a\x1b[31m\n"
    odd.__module__ = "__main__"
    assert functions.name_of(odd) == "a?[31m?"
