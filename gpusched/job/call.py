"""Runs one Python function as a job: the text of this file travels with it, its payload behind it.

The image needs nothing but Python. This file is read by whatever version that has, so that a wrong one can be told in
words: nothing in it is newer than Python 3.6.
"""
# ruff: noqa: UP031

import base64
import json
import os
import pickle
import sys
import traceback
import types
import zlib

MYPY = False  # as mypy knows it; there may be no typing that knows these names
if MYPY:
    from typing import Any

MIB = 1048576.0
MAGIC = b"gpusched result 1\n"
"""Begins a result: then a line of JSON (`outcome`, `error`, `size` and more), then the pickle."""


class NotRun(Exception):
    """The function cannot be run here; the text says why and what to do."""


class Facts:
    """What the client says of a call, from JSON.

    Attributes:
        many: The one argument is a list of arguments to call it with.
        python: The client's version.
        cloudpickle: Files of its cloudpickle, of this version; none where it is not needed.
        source: The function's file and its text, for tracebacks.
        result: Where what comes of it is written.
        most: Bytes that a pickled result may have; with ``kept`` a larger one may stay where it is written.
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
        self.result = ""


def run(facts_text: str, function: str, arguments: str) -> None:
    """Call it, write down what came of it, and end this process: with 0, or 1 where it raised.

    ``function`` is a pickled callable, and ``arguments`` its positional and named ones; or nothing, and all three.
    """
    facts = Facts(unpack(facts_text).decode())
    own, program = os.getpid(), os.path.abspath(__file__)
    facts.result = os.path.join(  # now: the function may change the environment
        os.environ["GPUSCHED_JOB_DIR"], "result.%s.%s" % (os.environ["GPUSCHED_ATTEMPT"], os.environ["NODE_RANK"])
    )
    if sys.path[0] == os.path.dirname(program):
        sys.path[0] = ""  # as `python -m` has it, and not the job's folder
    code = 0
    try:
        call = load(facts, unpack(function), unpack(arguments))
        lend_source(facts)
        try:
            value = [call[0](*each) for each in call[1][0]] if facts.many else call[0](*call[1], **call[2])
        except Exception as error:
            if os.getpid() != own:
                raise
            code = 1
            write(facts, *raised(facts, error))
        else:
            write(facts, *returned(facts, value))
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
    finally:
        if os.getpid() == own:
            os.unlink(program)
    sys.stdout.flush()
    sys.exit(code)


def unpack(text: str) -> bytes:
    """What `gpusched.api.functions.packed` packed."""
    return zlib.decompress(base64.b64decode(text))


def load(facts: Facts, function: bytes, arguments: bytes) -> "Any":
    """The callable, its positional and its named arguments.

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
    """Make the client's cloudpickle the one that is imported, unless the same is installed."""
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
    """Let tracebacks show lines of the function's file, which is not here."""
    import linecache

    for name, text in facts.source.items():
        if not os.path.exists(name):
            lines = text.splitlines(True)
            linecache.cache[name] = (len(text), None, lines, name)


def describe(error: BaseException) -> str:
    """The last line of a traceback."""
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def dumps(facts: Facts, value: "Any") -> bytes:
    """The pickle of what goes back."""
    protocol = min(facts.protocol, pickle.HIGHEST_PROTOCOL)
    try:
        return pickle.dumps(value, protocol)
    except Exception:
        if not facts.cloudpickle:
            raise
        import cloudpickle

        return cloudpickle.dumps(value, protocol)  # type: ignore[no-any-return]


def returned(facts: Facts, value: "Any") -> "tuple[dict[str, Any], bytes]":
    """The result of a call that returned.

    Raises:
        NotRun: It cannot travel.
    """
    try:
        data = dumps(facts, value)
    except Exception as error:
        raise NotRun("what %s returned cannot be pickled: %s" % (facts.function, describe(error))) from None
    if len(data) > facts.most and not facts.kept:
        raise NotRun(
            "what %s returned takes %.1f MiB, and at most %.1f travel back (settings.logs.max_per_job): write it to a "
            "disk that you can read, and return its path" % (facts.function, len(data) / MIB, facts.most / MIB)
        )
    return {"outcome": "returned"}, data


def raised(facts: Facts, error: Exception) -> "tuple[dict[str, Any], bytes]":
    """The result of a call that raised; its traceback goes to stderr, too."""
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
    """Put the result into the job's folder, whole."""
    header = dict(header, size=len(data), python=list(sys.version_info[:3]), function=facts.function)
    with open(facts.result + ".part", "wb") as file:
        file.write(MAGIC + json.dumps(header).encode() + b"\n" + data)
    os.chmod(facts.result + ".part", 0o644)  # an image may have a user of its own; the folder keeps others out
    os.rename(facts.result + ".part", facts.result)
