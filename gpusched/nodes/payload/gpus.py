"""Reads the GPUs in a child process, so that a driver that hangs or crashes costs the GPU it hangs on and no more."""
# ruff: noqa: UP022, UP031

import os
import time

from gpusched.nodes.payload import attempts
from gpusched.nodes.payload.child import Child
from gpusched.nodes.payload.engines import read_text

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from collections.abc import Iterator
    from typing import Any

GPU_LIMIT_S = 4.0
READ_LIMIT_S = 0.2  # for what a child has found by the time we come to it
SMI_LIMIT_S = 10.0
MOST_STUCK = 16  # children of earlier readings that hang in the kernel: more would fill the node with processes
GPU_FIELDS = (
    "index,uuid,name,memory.total,memory.used,utilization.gpu,power.draw,enforced.power.limit,temperature.gpu,"
    "ecc.errors.uncorrected.volatile.total,mig.mode.current,driver_version"
)
OLD_GPU_FIELDS = "index,uuid,name,memory.total,memory.used,utilization.gpu,power.draw,power.limit,temperature.gpu"


def messages(only: "list[int] | None", want_links: bool, request: "dict[str, Any]") -> "Iterator[dict[str, Any]]":
    """Yield the kernel's log, once and first, as the driver may hang; then what `nvml.messages` yields.

    Instead of the latter, why that module cannot be had: a disk may have spoilt it.
    """
    wanted = only is None and (request.get("want_kernel") or request.get("listen"))
    log = kernel_log(request) if wanted else None
    if log is not None:
        yield {"kernel": log}
    try:
        from gpusched.nodes.payload import nvml
    except Exception as error:
        yield {"init_error": "%s: %s" % (type(error).__name__, error), "spoilt": True}
        return
    yield from nvml.messages(
        only, want_links, bool(log and (log["messages"] or log["events"])), bool(request.get("want_profiles"))
    )


def kernel_log(request: "dict[str, Any]") -> "dict[str, Any] | None":
    """See `gpusched.nodes.payload.kernel`; None on any error: the GPUs are worth more."""
    try:
        from gpusched.nodes.payload import kernel

        return kernel.read(request)
    except Exception:
        return None


class Stuck:
    """Children that SIGKILL could not end, noted in a file from one reading to the next; without its folder, none."""

    def __init__(self, path: str) -> None:
        self.path = path
        noted = [line.split() for line in (read_text(path) or "").splitlines()]
        pairs = [one for one in noted if len(one) == 2 and one[0].isdigit()]
        self.left = [[pid, began] for pid, began in pairs if attempts.start_time(int(pid)) == began]
        if len(self.left) < len(noted):
            self._write("w", self.left)

    def note(self, pid: int) -> None:
        """Note a child that was killed; whether it is gone is found at the next reading."""
        began = attempts.start_time(pid)
        if began:
            self._write("a", [[str(pid), began]])

    def _write(self, mode: str, noted: "list[list[str]]") -> None:
        try:
            with open(self.path, mode) as file:
                file.write("".join(" ".join(one) + "\n" for one in noted))
        except OSError:
            pass


class GpuReadout:
    """One reading of all GPUs; begins when it is made, ends with `collect`."""

    def __init__(self, request: "dict[str, Any]") -> None:
        self.budget = float(request.get("deadline_s", 12.0))
        self.began = time.monotonic()
        self.until = self.began + self.budget
        self.found = {}  # type: dict[int, dict[str, Any]]
        self.places = []  # type: list[dict[str, Any]]
        self.answer = {"source": "nvml", "gpu_error": None, "driver_version": None}  # type: dict[str, Any]
        self.todo = None  # type: list[int] | None
        self.request = request
        root = attempts.default_root(request.get("cluster_id", ""), request.get("node", ""))
        self.stuck = Stuck(os.path.join(root, "stuck"))
        self.child = None  # type: Child | None
        if len(self.stuck.left) < MOST_STUCK:
            self.child = Child(messages(None, bool(request.get("want_links")), request))

    def collect(self) -> "dict[str, Any]":
        """Return the part of the answer about GPUs."""
        if self.child is None:
            pids = ", ".join(pid for pid, _ in self.stuck.left[:3])
            trouble = "%d earlier readings hang in the driver (processes %s..): not read" % (len(self.stuck.left), pids)
            return dict(self.answer, source="none", gpu_error=trouble, gpus=[])
        # A child with more to say than its pipe holds waits for us.
        self.until = max(self.until, time.monotonic() + READ_LIMIT_S)
        while self.todo is None or self.todo:
            limit = self.until if self.todo is None else min(self.until, time.monotonic() + GPU_LIMIT_S)
            try:
                message = self.child.next(limit)
                waited = GPU_LIMIT_S if self.todo else time.monotonic() - self.began
                trouble = "NVML did not answer in %.0f s" % waited
            except EOFError:
                message, trouble = None, "NVML crashed"
            if message is None:
                self.skip(trouble)
            elif "init_error" in message:
                self.child.kill()
                instead = self.without_nvml(message["init_error"])
                return dict(instead, spoilt=message.get("spoilt", False), kernel=self.answer.get("kernel"))
            else:
                self.take(message)
            if self.answer["gpu_error"]:
                break
        self.finish()
        self.answer["gpus"] = [self.found[i] for i in sorted(self.found)]
        return self.answer

    def take(self, message: "dict[str, Any]") -> None:
        """Take in a message of the child."""
        if "kernel" in message:
            self.answer["kernel"] = message["kernel"]
        elif "count" in message:
            self.answer["driver_version"] = message["driver_version"]
            if self.todo is None:
                self.todo = list(range(message["count"]))
        elif "gpu" in message and self.todo:
            self.found[message["gpu"]["index"]] = message["gpu"]
            self.todo.remove(message["gpu"]["index"])

    def skip(self, trouble: str) -> None:
        """Blame the GPU at which the child is stuck, and continue with the others in a new child."""
        self.kill()
        if self.todo is None:
            self.answer.update(source="none", gpu_error=trouble)
            return
        late = time.monotonic() >= self.until
        for index in self.todo if late else self.todo[:1]:
            self.found[index] = {"index": index, "error": trouble}
        self.todo = [] if late else self.todo[1:]
        if self.todo:
            self.child = Child(messages(self.todo, False, self.request))

    def kill(self) -> None:
        """End the child; one that hangs in the driver cannot be."""
        assert self.child is not None
        if self.child.fd >= 0:
            self.child.kill()
            self.stuck.note(self.child.pid)

    def finish(self) -> None:
        """Wait briefly for the links, which come last and are worth no more than a moment."""
        assert self.child is not None
        if any("error" in gpu for gpu in self.found.values()) or self.answer["gpu_error"]:
            self.kill()
        else:
            try:
                message = self.child.next(min(self.until, time.monotonic() + GPU_LIMIT_S)) or {}
            except EOFError:
                message = {}
            self.places = message.get("places", [])
            for index, near in message.get("links", {}).items():
                self.found[int(index)]["links"] = near
            self.child.kill()

    def without_nvml(self, why: str) -> "dict[str, Any]":
        """Return what nvidia-smi prints, to be parsed by gpusched; both reasons if it does not work either."""
        import subprocess

        def ask(query: str) -> str:
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=SMI_LIMIT_S
            )
            output = done.stdout.decode("utf-8", "replace").strip()
            return output or "nvidia-smi: " + done.stderr.decode("utf-8", "replace").strip()

        try:
            text = ask("--query-gpu=" + GPU_FIELDS)
            if "not a valid field" in text:
                text = ask("--query-gpu=" + OLD_GPU_FIELDS)
            apps = ask("--query-compute-apps=gpu_uuid,pid,used_memory")
        except (OSError, subprocess.SubprocessError) as error:
            what = "there is no nvidia-smi" if isinstance(error, FileNotFoundError) else "nvidia-smi: %s" % error
            return {"source": "none", "gpu_error": "%s; %s" % (why, what), "gpus": []}
        fields = [line.split(",")[1].strip() for line in apps.splitlines() if line.count(",") == 2]
        pids = [int(pid) for pid in fields if pid.isdigit()]
        return {"source": "nvidia-smi", "smi_gpus": text, "smi_apps": apps, "smi_pids": pids, "gpus": []}
