"""What the kernel says about a node and about processes."""
# ruff: noqa: UP031

import os

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from typing import Any

COMMAND_CHARS = 120


def read() -> "dict[str, Any]":
    """Return the node's facts; what cannot be read is None."""
    memory = meminfo()
    return {
        "boot_id": first_line("/proc/sys/kernel/random/boot_id"),
        "hostname": os.uname().nodename,
        "cores": len(os.sched_getaffinity(0)),
        "memory_total_mib": memory.get("MemTotal"),
        "memory_available_mib": memory.get("MemAvailable"),
        "load1": load1(),
        "disk_free_mib": disk_free_mib(os.path.expanduser("~")),
    }


def first_line(path: str) -> "str | None":
    """Return the first line of a file, or None."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return None


def meminfo() -> "dict[str, int]":
    """Return /proc/meminfo in MiB."""
    sizes = {}
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                key, value = line.split(":", 1)
                sizes[key] = int(value.split()[0]) // 1024
                if key == "MemAvailable":
                    break
    except (OSError, ValueError, IndexError):
        pass
    return sizes


def load1() -> "float | None":
    """Return the one-minute load average."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def disk_free_mib(path: str) -> "int | None":
    """Space that a user without privileges may still fill."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize >> 20


def describe_processes(answer: "dict[str, Any]", attempts: "list[dict[str, Any]]") -> None:
    """Add owner, command and gpusched container to every process of the answer's GPUs, or to nvidia-smi's pids."""
    for gpu in answer.get("gpus", ()):
        for process in gpu.get("processes", ()):
            process.update(describe(process["pid"], attempts))
    pids = answer.get("smi_pids")
    if pids is not None:
        answer["processes"] = {str(pid): describe(pid, attempts) for pid in pids}


def describe(pid: int, attempts: "list[dict[str, Any]]") -> "dict[str, Any]":
    """Owner, command line and gpusched container of a process, by the node's (not a container's) pid."""
    return {"user": user_of(pid), "command": command_of(pid), "container": container_of(pid, attempts)}


def user_of(pid: int) -> "str | None":
    """Login name of a process's owner, else the uid as text; None where there is no such process (here)."""
    try:
        uid = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return None
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)


def command_of(pid: int) -> "str | None":
    """Return its command line, printable and cut to 120 characters."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            raw = file.read(4096)
    except OSError:
        return None
    text = raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text[:COMMAND_CHARS] or first_line("/proc/%d/comm" % pid)


def container_of(pid: int, attempts: "list[dict[str, Any]]") -> "str | None":
    """Return the name of the attempt that a process belongs to; None for a foreign process."""
    try:
        from gpusched.nodes.payload.attempts import attribute

        return attribute(pid, attempts)
    except Exception:  # the figures must arrive even if the job of a process is unknown
        return None
