"""The probe as it runs on a node: one request in, one line of JSON out.

Everything slow runs side by side (NVML in a child, the runtime here) and everything has a time limit of its own, so
that one hung driver or runtime costs its own part of the answer and nothing else.
"""
# ruff: noqa: UP031

import os
import sys
import time

from gpusched.nodes.payload import facts, gpus
from gpusched.nodes.payload.jsontext import dumps, loads

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from typing import Any

MARK = "@gpusched-probe@ "
DAY_S = 86400


def from_stdin() -> None:
    """Entry of the cached payload: the request is all of stdin."""
    request = loads(sys.stdin.buffer.read().decode())
    request["cached"] = True
    keep_fresh(sys.path[0])
    run(request)


def keep_fresh(folder: str) -> None:
    """Show that this payload is in use: one that is not is removed after a month (bootstrap.py)."""
    try:
        if time.time() - os.stat(folder).st_mtime > DAY_S:
            os.utime(folder)
    except OSError:
        pass


def run(request: "dict[str, Any]") -> None:
    """Answer one request (see `gpusched.nodes.probe.ProbeRequest`) on stdout."""
    began = time.time()
    os.environ["LC_ALL"] = "C"
    simulated = bool(request.get("simulated"))
    reading = None if simulated else gpus.GpuReadout(request)  # its child is at work while the runtime is asked
    answer = {"cached": request.get("cached", False)}  # type: dict[str, Any]
    answer.update(facts.read())
    found = attempts(answer, request)
    if reading is not None:
        gpu_part = reading.collect()
        answer.update(gpu_part, spoilt=answer.get("spoilt", False) or gpu_part.get("spoilt", False))
        facts.describe_processes(answer, found + unlisted(found, request))
    else:
        from gpusched.nodes.payload import simulated as simulation
        from gpusched.nodes.payload.attempts import default_root

        answer.update(simulation.read(default_root(request["cluster_id"], request["node"]), request, found))
    if request.get("want_links"):
        answer["wiring"] = wiring([] if reading is None else reading.places, request)
    answer["clock"] = [began, time.time()]
    sys.stdout.write("\n" + MARK + dumps(answer) + "\n")
    sys.stdout.flush()
    if request.get("listen") is not None and (not request["listen"] or answer.get("source") == "nvml"):
        from gpusched.nodes.payload import events

        events.keep(request)
    os._exit(0)  # a child stuck in the driver must not keep this process


def wiring(places: "list[dict[str, Any]]", request: "dict[str, Any]") -> "dict[str, Any] | None":
    """Return the node's wiring; None on any error, so that the rest of the answer survives."""
    try:
        from gpusched.nodes.payload import wiring as reader

        reader.LLDP_LIMIT_S = min(reader.LLDP_LIMIT_S, float(request.get("engine_timeout_s", 8.0)) / 4)
        return reader.read(places)
    except Exception:
        return None


def attempts(answer: "dict[str, Any]", request: "dict[str, Any]") -> "list[dict[str, Any]]":
    """Put gpusched's attempts, or why they could not be listed, into the answer; returns what is known of them."""
    answer.update(containers=None, runtime_error=None, runtime_version=None)
    try:
        from gpusched.nodes.payload import attempts as lister
        from gpusched.nodes.payload import engines, jobfiles

        engines.ENGINE_TIMEOUT_S = float(request.get("engine_timeout_s", engines.ENGINE_TIMEOUT_S))
        found, error, version = lister.list_attempts(
            request["cluster_id"], request["node"], request["runtime"], request.get("want_links", False)
        )
    except Exception as trouble:  # whatever is wrong with the runtime, the GPUs must still be reported
        answer.update(runtime_error="%s: %s" % (type(trouble).__name__, trouble), spoilt=True)
        return []
    answer.update(containers=None if error else found, runtime_error=error, runtime_version=version)
    root = lister.default_root(request["cluster_id"], request["node"])
    answer["job_folders"] = jobfiles.orphaned_folders(root, request["cluster_id"], request["node"])
    return found


def unlisted(found: "list[dict[str, Any]]", request: "dict[str, Any]") -> "list[dict[str, Any]]":
    """Return attempts with a folder that were not listed: if a runtime hangs, our processes must not look foreign."""
    try:
        from gpusched.nodes.payload.attempts import default_root

        names = set(os.listdir(default_root(request["cluster_id"], request["node"])))
    except (ImportError, OSError):
        return []
    names.difference_update(attempt["name"] for attempt in found)
    return [{"name": name} for name in sorted(names) if name.startswith("gpusched-")]
