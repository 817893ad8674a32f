"""Run one Python function as a job: the text of this file is sent with it, followed by its payload.

The image needs nothing but Python. This file is read by whatever version that has, so that a wrong one can be
reported in words: nothing in it is newer than Python 3.6.
"""
# ruff: noqa: UP031

import base64
import hashlib
import json
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
import types
import zlib

MYPY = False  # as mypy knows it; there may be no typing that knows these names
if MYPY:
    from typing import Any

MIB = 1048576.0
MAGIC = b"gpusched result 1\n"
"""Start of a result: then a line of JSON (`outcome`, `error`, `size` and more), then the pickle."""


class NotRun(Exception):
    """The function cannot be run here; the message says why and what to do."""


class Facts:
    """The client's description of a call, from JSON.

    Attributes:
        many: The one argument is a list of arguments to call it with.
        python: The client's version.
        cloudpickle: Files of its cloudpickle, of this version; none where it is not needed.
        source: The function's file and its text, for tracebacks.
        result: Where its result is written.
        most: Bytes that a pickled result may have; with ``kept`` a larger one stays in the job's folder.
        folder: Where such a one is put instead, and what a checkpoint returns; "": the job's folder.
        tasks: How many processes call it on each node; ``gpus``: GPUs of each, 0: all of them.
        own: The process that the job began with.
    """

    def __init__(self, text: str) -> None:
        facts = json.loads(text)
        self.function = facts["function"]  # type: str
        self.many = facts["many"]  # type: bool
        self.python = facts["python"]  # type: list[int]
        self.protocol = facts["protocol"]  # type: int
        self.cloudpickle = facts["cloudpickle"]  # type: dict[str, str]
        self.version = facts["version"]  # type: str
        self.source = facts["source"]  # type: dict[str, str]
        self.most = facts["most"]  # type: int
        self.kept = facts["kept"]  # type: bool
        self.folder = facts["folder"]  # type: str
        self.tasks = facts["tasks"]  # type: int
        self.gpus = facts["gpus"]  # type: int
        self.result = ""
        self.own = os.getpid()


def run(facts_text: str, function: str, arguments: str) -> None:
    """Call the function, write its result, and exit this process: with 0, or 1 if it raised.

    ``function`` is a pickled callable, and ``arguments`` its positional and named ones; or nothing, and all three.
    """
    facts = Facts(unpack(facts_text).decode())
    program = os.path.abspath(__file__)
    facts.result = os.path.join(  # now: the function may change the environment
        os.environ["GPUSCHED_JOB_DIR"], "result.%s.%s" % (os.environ["GPUSCHED_ATTEMPT"], os.environ["NODE_RANK"])
    )
    if sys.path[0] == os.path.dirname(program):
        sys.path[0] = ""  # as `python -m` has it, and not the job's folder
    tasks = start_tasks(facts) if facts.tasks > 1 else {}
    try:
        code = wait_for_tasks(facts, tasks) if tasks else call_once(facts, function, arguments)
    finally:
        if os.getpid() == facts.own:
            os.unlink(program)
    sys.stdout.flush()
    sys.exit(code)


def call_once(facts: Facts, function: str, arguments: str) -> int:
    """Call the function in this process and write its result; return the exit code."""
    own, code = os.getpid(), 0
    try:
        call = load(facts, unpack(function), unpack(arguments))
        lend_source(facts)
        call = resumed(facts, call)
        checkpoint_on_signals(facts, call)
        try:
            value = [call[0](*each) for each in call[1][0]] if facts.many else call[0](*call[1], **call[2])
        except Exception as error:
            if os.getpid() != own:
                raise
            code = 1
            write(facts, *raised(facts, error))
        else:
            write(facts, *returned(facts, value))
        forget_checkpoint(facts, call)
    except NotRun as problem:
        code = 1
        sys.stderr.write("gpusched: %s\n" % problem)
        write(facts, {"outcome": "not run", "error": str(problem)}, b"")
    except SystemExit as end:
        if os.getpid() != own:  # a process that the function forked
            raise
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
        if code:
            write(facts, {"outcome": "exited", "error": "it called sys.exit(%r)" % (end.code,)}, b"")
        else:  # as the main functions of many a program end
            write(facts, *returned(facts, None))
    return code


# -- tasks: several processes on each node ---------------------------------------------------------------------------

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LEFT_S = 10  # so long the others have once a task has failed: they may wait for it for ever


def start_tasks(facts: Facts) -> "dict[int, int]":
    """Fork a process per task; return process -> local rank in the parent, {} in a task, which has its rank set."""
    nodes, node = int(os.environ["WORLD_SIZE"]), int(os.environ["NODE_RANK"])
    found = {}  # type: dict[int, int]
    for local in range(facts.tasks):
        pid = os.fork()
        if pid:
            found[pid] = local
            continue
        rank = str(node * facts.tasks + local)
        os.environ.update(RANK=rank, LOCAL_RANK=str(local), WORLD_SIZE=str(nodes * facts.tasks))
        os.environ.update(LOCAL_WORLD_SIZE=str(facts.tasks), SLURM_PROCID=rank, SLURM_LOCALID=str(local))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if facts.gpus:
            own = visible[local * facts.gpus : (local + 1) * facts.gpus]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        facts.result += ".%d" % local
        facts.most //= facts.tasks
        return {}
    return found


def wait_for_tasks(facts: Facts, tasks: "dict[int, int]") -> int:
    """Wait for all tasks, forward signals to them, and join their results; return the highest exit code."""
    left, codes, received = set(tasks), {}, []  # type: set[int], dict[int, int], list[int]

    def to_all(number: int) -> None:
        for pid in left:
            try:
                os.kill(pid, number)
            except OSError:
                pass

    def pass_on(number: int, frame: "Any") -> None:
        received.append(number)
        to_all(number)

    for number in SIGNALS:
        signal.signal(number, pass_on)
    signal.signal(signal.SIGALRM, lambda number, frame: to_all(signal.SIGKILL))
    while left:
        pid, status = os.wait()
        if pid not in left:
            continue
        left.remove(pid)
        codes[tasks[pid]] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        if codes[tasks[pid]] and not received:
            to_all(signal.SIGTERM)
            signal.alarm(LEFT_S)
    signal.alarm(0)
    join_results(facts, codes)
    return max(codes.values())


def join_results(facts: Facts, codes: "dict[int, int]") -> None:
    """Write one result for the node: the tasks' headers as ``tasks`` of one, then their pickles."""
    headers, paths = [], ["%s.%d" % (facts.result, local) for local in range(facts.tasks)]
    for local, path in enumerate(paths):
        try:
            with open(path, "rb") as file:
                file.readline()
                headers.append(json.loads(file.readline().decode()))
        except (OSError, ValueError):
            said = "task %d ended with exit code %d and left no result" % (local, codes[local])
            headers.append({"outcome": "not run", "error": said, "size": 0})
    order = {"raised": 0, "exited": 1, "not run": 2, "returned": 3}  # what was first is seldom that it was ended
    worst = min(headers, key=lambda one: order[one["outcome"]])
    whole = {"outcome": worst["outcome"], "tasks": headers, "size": sum(one["size"] for one in headers)}
    whole.update(function=facts.function, python=list(sys.version_info[:3]))
    with open(facts.result + ".part", "wb") as joined:
        joined.write(MAGIC + json.dumps(whole).encode() + b"\n")
        for local, path in enumerate(paths):
            if headers[local]["size"]:
                with open(path, "rb") as file:
                    file.readline()
                    file.readline()
                    shutil.copyfileobj(file, joined)
    os.chmod(facts.result + ".part", 0o644)
    os.rename(facts.result + ".part", facts.result)
    for path in paths:
        if os.path.exists(path):
            os.unlink(path)


# -- checkpoints: what is called when the job starts again -----------------------------------------------------------

ANSWER_S = 90.0


def has_checkpoint(function: "Any") -> bool:
    """Return whether the callable provides the call for the job's restart."""
    return not isinstance(function, type) and callable(getattr(function, "checkpoint", None))


def again_path(facts: Facts) -> str:
    """Return the path of the call for the job's next start."""
    folder = facts.folder or os.environ["GPUSCHED_JOB_DIR"]
    return os.path.join(folder, "gpusched-again.%s" % os.environ["GPUSCHED_JOB_ID"])


def resumed(facts: Facts, call: "Any") -> "Any":
    """Return the call saved by a checkpoint, else the one submitted."""
    if facts.many or not has_checkpoint(call[0]):
        return call
    try:
        with open(again_path(facts), "rb") as file:
            return pickle.load(file)
    except FileNotFoundError:
        return call
    except Exception as error:
        raise NotRun("what its checkpoint returned cannot be read: %s" % describe(error)) from None


def checkpoint_on_signals(facts: Facts, call: "Any") -> None:
    """Save the callable's next call and requeue the job when it is signalled to end.

    Rank 0 does; the others wait until the job ends, as they may have a part in saving the work.
    """
    if facts.many or not has_checkpoint(call[0]):
        return
    own, signals = os.getpid(), (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

    def save(number: int, frame: "Any") -> None:
        if os.getpid() != own:  # a process that the function forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        for one in signals:
            signal.signal(one, signal.SIG_IGN)
        code = 1
        try:
            value = call[0].checkpoint(*call[1], **call[2])
            keep(facts, call if value is None else (value.function, value.args, value.kwargs))
            sys.stderr.write("gpusched: checkpoint after %s; the job is queued again\n" % number)
            code = 0 if queue_again() else 128 + number
        except BaseException:
            traceback.print_exc()
        if own == facts.own:
            os.unlink(os.path.abspath(__file__))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the function is in the middle of something

    for one in signals:
        signal.signal(one, save if os.environ["RANK"] == "0" else signal.SIG_IGN)


def keep(facts: Facts, call: "tuple[Any, ...]") -> None:
    """Save a call for the job's next start."""
    path = again_path(facts)
    data = dumps(facts, tuple(call))
    with open(path + ".part", "wb") as file:
        os.chmod(path + ".part", 0o600 if facts.folder else 0o644)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path + ".part", path)


def forget_checkpoint(facts: Facts, call: "Any") -> None:
    """Remove an earlier start's saved call once this call has ended."""
    if not facts.many and has_checkpoint(call[0]) and os.environ["RANK"] == "0" and os.path.exists(again_path(facts)):
        os.unlink(again_path(facts))


def queue_again() -> bool:
    """Request a requeue as `scontrol requeue` does inside a job script (nodes/batch/ask.sh); return success."""
    folder, asked = os.environ["GPUSCHED_JOB_DIR"], "%d-%d" % (os.getpid(), time.time())
    words = ["scontrol", "requeue", os.environ["GPUSCHED_JOB_ID"]]
    path = os.path.join(folder, "ask.json")
    with open(path + ".part", "w") as file:
        json.dump({"id": asked, "attempt": int(os.environ["GPUSCHED_ATTEMPT"]), "words": words}, file)
    os.chmod(path + ".part", 0o644)
    os.rename(path + ".part", path)
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until:
        try:
            with open(os.path.join(folder, "answer")) as answer:
                head, text = answer.readline().split(), answer.read()
        except OSError:
            head, text = [], ""
        if head[:1] == [asked]:
            os.unlink(path)
            sys.stderr.write(text)
            return head[1:] == ["0"]
        time.sleep(0.2)
    sys.stderr.write("gpusched: the controller has not answered\n")
    return False


def unpack(text: str) -> bytes:
    """Decode what `gpusched.api.functions.packed` encoded."""
    return zlib.decompress(base64.b64decode(text))


def load(facts: Facts, function: bytes, arguments: bytes) -> "Any":
    """Load the callable, its positional and its keyword arguments.

    Raises:
        NotRun: They cannot be had in this Python.
    """
    mine, theirs = "%d.%d" % sys.version_info[:2], "%d.%d" % tuple(facts.python[:2])
    if facts.cloudpickle and mine != theirs:
        raise NotRun(
            "%s was sent by Python %s, and Python %s, which is here, cannot run its code: use an image with Python %s, "
            'name another interpreter of the image (python="python%s"), or run your program with Python %s'
            % (facts.function, theirs, mine, theirs, theirs, mine)
        )
    if facts.protocol > pickle.HIGHEST_PROTOCOL:
        raise NotRun("Python %s is too old for %s: use an image with Python 3.8 or later" % (mine, facts.function))
    provide_cloudpickle(facts)
    try:
        found = pickle.loads(arguments)
        return (pickle.loads(function), *found) if function else found
    except ImportError as error:
        name = getattr(error, "name", None) or "a module"
        top = name.split(".")[0]
        raise NotRun(
            "%s needs %s, which cannot be imported here (%s): use an image that has it, or, where it is code of your "
            'own, send it along (modules=["%s"])' % (facts.function, name, error, top)
        ) from None
    except Exception as error:
        raise NotRun(
            "%s, or what it is called with, cannot be unpickled here (%s): are the same versions of its libraries in "
            "the image?" % (facts.function, describe(error))
        ) from None


def provide_cloudpickle(facts: Facts) -> None:
    """Make the client's cloudpickle importable, unless the same version is installed."""
    if not facts.cloudpickle:
        return
    try:
        import cloudpickle

        if cloudpickle.__version__ == facts.version:
            return
    except Exception:
        pass
    for name in [n for n in sys.modules if n.split(".")[0] == "cloudpickle"]:
        del sys.modules[name]
    package = types.ModuleType("cloudpickle")
    package.__path__ = []
    sys.modules["cloudpickle"] = package
    for name in ("cloudpickle.cloudpickle", "cloudpickle"):
        module = sys.modules.get(name) or types.ModuleType(name)
        module.__package__ = "cloudpickle"
        sys.modules[name] = module
        exec(compile(facts.cloudpickle[name], "<%s>" % name, "exec"), module.__dict__)
        if name != "cloudpickle":
            setattr(package, name.split(".")[1], module)


def lend_source(facts: Facts) -> None:
    """Provide the function's source for tracebacks; its file is not here."""
    import linecache

    for name, text in facts.source.items():
        if not os.path.exists(name):
            lines = text.splitlines(True)
            linecache.cache[name] = (len(text), None, lines, name)


def describe(error: BaseException) -> str:
    """Return the last line of a traceback."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def dumps(facts: Facts, value: "Any") -> bytes:
    """Pickle the value to return."""
    protocol = min(facts.protocol, pickle.HIGHEST_PROTOCOL)
    try:
        return pickle.dumps(value, protocol)
    except Exception:
        if not facts.cloudpickle:
            raise
        import cloudpickle

        return cloudpickle.dumps(value, protocol)  # type: ignore[no-any-return]


def returned(facts: Facts, value: "Any") -> "tuple[dict[str, Any], bytes]":
    """Return the result of a call that returned.

    Raises:
        NotRun: It cannot travel.
    """
    try:
        data = dumps(facts, value)
    except Exception as error:
        raise NotRun("what %s returned cannot be pickled: %s" % (facts.function, describe(error))) from None
    if len(data) <= facts.most:
        return {"outcome": "returned"}, data
    if not facts.kept and not facts.folder:
        raise NotRun(
            "what %s returned takes %.1f MiB; at most %.1f MiB can be returned (settings.logs.max_per_job): name a "
            "folder that the job and you both see (result_dir=...), or write it to one and return its path"
            % (facts.function, len(data) / MIB, facts.most / MIB)
        )
    return dict(put_aside(facts, data), outcome="returned"), b""


def put_aside(facts: Facts, data: bytes) -> "dict[str, Any]":
    """Write a value that is too large to send where the client finds it; return its header fields."""
    name = os.path.basename(facts.result) + ".data"
    if facts.folder:
        name = "gpusched-%s.%s" % (os.environ["GPUSCHED_JOB_ID"], name)
    path = os.path.join(facts.folder or os.path.dirname(facts.result), name)
    try:
        with open(path + ".part", "wb") as file:
            os.chmod(path + ".part", 0o600 if facts.folder else 0o644)
            file.write(data)
        os.rename(path + ".part", path)
    except OSError as error:
        raise NotRun(
            "what %s returned takes %.1f MiB, and cannot be written to %s: %s"
            % (facts.function, len(data) / MIB, os.path.dirname(path), error.strerror)
        ) from None
    return {"file": name, "folder": facts.folder, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def raised(facts: Facts, error: Exception) -> "tuple[dict[str, Any], bytes]":
    """Return the result of a call that raised; also print its traceback to stderr."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, trace))
    sys.stderr.write(text)
    try:
        data = dumps(facts, error)
        pickle.loads(data)  # many an exception of a library's can be pickled, but not unpickled
    except Exception:
        data = b""
    kept = data if len(data) <= facts.most else b""
    return {"outcome": "raised", "error": describe(error), "traceback": text[-100000:]}, kept


def write(facts: Facts, header: "dict[str, Any]", data: bytes) -> None:
    """Write the result into the job's folder, atomically."""
    header = dict(header, size=len(data), python=list(sys.version_info[:3]), function=facts.function)
    with open(facts.result + ".part", "wb") as file:
        file.write(MAGIC + json.dumps(header).encode() + b"\n" + data)
    os.chmod(facts.result + ".part", 0o644)  # an image may have a user of its own; the folder keeps others out
    os.rename(facts.result + ".part", facts.result)
