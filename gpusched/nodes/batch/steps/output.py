"""Where the output of a step's tasks goes: srun's own, with labels or without, or files by --output and --error."""

import os
import re
import sys

MYPY = False
if MYPY:
    from collections.abc import Mapping, Sequence

_PATTERN = re.compile(r"%(\d*)([%AajJNnstux])")


class Output:
    """Writes the output of tasks; ``captures``: whether it must, as they cannot simply inherit srun's own."""

    def __init__(
        self,
        given: "Mapping[str, str]",
        step: int,
        layout: "Sequence[tuple[int, list[int]]]",
        names: "Sequence[str]",
    ) -> None:
        self._label = "label" in given
        self._width = len(str(sum(len(tasks) for _, tasks in layout) - 1))
        self._where = {n: (position, names[rank]) for position, (rank, tasks) in enumerate(layout) for n in tasks}
        self._step = step
        self._paths = {"out": _file_of(given, "output"), "err": _file_of(given, "error") or _file_of(given, "output")}
        self._files = {}  # type: dict[str, int]
        self._rest = {}  # type: dict[tuple[str, int], bytes]
        self.captures = self._label or any(self._paths.values())

    def write(self, kind: str, number: int, data: bytes) -> None:
        """Write a part of a task's output; b"": its end."""
        target = self._target(kind, number)
        if not self._label:
            _write(target, data)
            return
        lines = (self._rest.pop((kind, number), b"") + data).split(b"\n")
        if data:
            self._rest[kind, number] = lines.pop()
        elif lines == [b""]:
            lines = []
        label = b"%*d: " % (self._width, number)
        _write(target, b"".join(label + line + b"\n" for line in lines))

    def close(self) -> None:
        """Write the text that has no line break at its end yet; then all is written."""
        for kind, number in list(self._rest):
            self.write(kind, number, b"")

    def _target(self, kind: str, number: int) -> int:
        own = 1 if kind == "out" else 2
        pattern = self._paths[kind]
        if pattern is None:
            return own
        if pattern.isdigit():  # the output of that task only
            return own if int(pattern) == number else self._open(os.devnull)
        return self._open(os.devnull if pattern == "none" else self._expand(pattern, number))

    def _open(self, path: str) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            except OSError as error:
                print(f"srun: error: {path}: {error.strerror}", file=sys.stderr, flush=True)
                self._files[path] = os.open(os.devnull, os.O_WRONLY)
        return self._files[path]

    def _expand(self, pattern: str, number: int) -> str:
        position, node = self._where[number]
        env = os.environ.get
        job = env("SLURM_JOB_ID", "")
        values = {
            "%": "%", "A": env("SLURM_ARRAY_JOB_ID", job), "a": env("SLURM_ARRAY_TASK_ID", "0"), "j": job,
            "J": f"{job}.{self._step}", "N": node, "n": str(position), "s": str(self._step),
            "t": str(number), "u": env("GPUSCHED_USER", ""), "x": env("SLURM_JOB_NAME", ""),
        }  # fmt: skip
        return _PATTERN.sub(lambda found: values[found.group(2)].zfill(int(found.group(1) or 0)), pattern)


def _file_of(given: "Mapping[str, str]", name: str) -> "str | None":
    return given[name] if given.get(name, "all") != "all" else None


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            continue
        except OSError:
            return
