"""NVML's Xid events, which some machines' kernel logs lack. NVML keeps none, so a process must wait for them.

A probe starts one listener per node, account and installation (`keep`). It holds a lock on a file, whose age is that
of the last probe; it ends within seconds once that file is gone (of drained nodes: nothing may hold a GPU open while it
is reset), and ten minutes after the last probe. It writes the newest events, of this boot, as lines of the kernel's.
"""
# ruff: noqa: UP031

import fcntl
import os
import time

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from typing import Any

LOCK, EVENTS = "xid-listener", "xid-events"
XID = 8  # nvmlEventTypeXidCriticalError
TIMEOUT = 10  # NVML_ERROR_TIMEOUT
WAIT_S = 5.0
TOUCH_S = 60.0  # between two signs of life of probes, and before a listener that ended is replaced
UNWANTED_S = 600.0  # without a probe
REPEATED_S = 1.0  # the same event again within this is the same
MAX_FAILURES = 12  # in a row, WAIT_S apart
MAX_EVENTS = 100
MAX_BYTES = 65536
PR_SET_NAME = 15


def root_of(request: "dict[str, Any]") -> str:
    """Return the folder of the listener's files: that of the installation's attempts."""
    from gpusched.nodes.payload.attempts import default_root

    return default_root(request["cluster_id"], request["node"])


def boot_id() -> str:
    """Return the boot's id; "" where there is none."""
    from gpusched.nodes.payload.facts import first_line

    return first_line("/proc/sys/kernel/random/boot_id") or ""


def heard(root: str) -> bytes:
    """Return the events of this boot, as lines of the kernel's log."""
    try:
        fd = os.open(os.path.join(root, EVENTS), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return b""
    try:
        first, _, lines = os.read(fd, MAX_BYTES).partition(b"\n")
    except OSError:
        return b""
    finally:
        os.close(fd)
    return lines if first.decode("utf-8", "replace") == boot_id() else b""


def is_listening(root: str) -> bool:
    """Return whether a listener holds the lock."""
    try:
        fd = os.open(os.path.join(root, LOCK), os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return is_locked(fd)
    finally:
        os.close(fd)


def is_locked(fd: int) -> bool:
    """Return whether another process has the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def keep(request: "dict[str, Any]") -> None:
    """Have one listener, or none, as the request wants; never fails: a file system without locks has none."""
    try:
        root = root_of(request)
        if not request["listen"]:
            os.unlink(os.path.join(root, LOCK))
        elif is_start_due(root) and os.fork() == 0:
            try:
                listen(root)
            finally:
                os._exit(0)
    except OSError:
        pass


def is_start_due(root: str) -> bool:
    """Return whether there is no listener, and none was started lately; show a running one that it is needed."""
    path = os.path.join(root, LOCK)
    try:
        age = time.time() - os.stat(path).st_mtime
    except OSError:
        age = TOUCH_S
        os.makedirs(root, mode=0o700, exist_ok=True)
    if 0 <= age < TOUCH_S:  # it lives, or died so lately that the next would, too
        return False
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.utime(fd)
        return not is_locked(fd)
    finally:
        os.close(fd)


def listen(root: str) -> None:
    """Record events until they are no longer needed. Runs in a child of the probe, which it outlives."""
    detach()
    fd = lock(root)
    if fd is None:
        return
    from gpusched.nodes.payload import nvml

    library = nvml.load()
    library.nvmlInit()
    buses, events = register(library)
    os.write(fd, b"%d\n" % os.getpid())  # from now on it listens
    lines, last, failures = heard(root).splitlines()[-MAX_EVENTS:], {}, 0  # type: Any, dict[Any, float], int
    while is_wanted(fd, root) and failures < MAX_FAILURES:
        try:
            event = library.nvmlEventSetWait_v2(events, int(WAIT_S * 1000))
        except library.NVMLError as error:  # a lost GPU costs a minute: the next listener leaves it out
            failures = 0 if error.value == TIMEOUT else failures + 1
            time.sleep(0 if error.value == TIMEOUT else WAIT_S)
            continue
        now, failures = time.clock_gettime(time.CLOCK_MONOTONIC), 0
        key = buses.get(address(event.device)), int(event.eventData)
        if event.eventType == XID and key[0] and now - last.get(key, -REPEATED_S) >= REPEATED_S:
            last[key] = now
            line = b"[%5d.%06d] NVRM: Xid (PCI:%s): %d" % (now, now % 1 * 1e6, key[0].encode(), key[1])
            lines = [*lines[-MAX_EVENTS + 1 :], line]
            write(root, lines)


def detach() -> None:
    """Leave the session of the probe: the probe's descriptors must close with it."""
    import ctypes

    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.closerange(3, 1024)
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"gpusched-xids", 0, 0, 0)


def lock(root: str) -> "int | None":
    """Return the lock's descriptor; None if another listener has it."""
    fd = os.open(os.path.join(root, LOCK), os.O_RDWR | os.O_NOFOLLOW)
    for _ in range(10):  # a probe that looks holds it for a moment
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(fd, 0)
            return fd
        except BlockingIOError:
            time.sleep(0.05)
    return None


def is_wanted(fd: int, root: str) -> bool:
    """Return whether the lock's file is there and a probe came lately; else the listener ends."""
    path = os.path.join(root, LOCK)
    try:
        found, ours = os.stat(path), os.fstat(fd)
        if (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino):
            return False
        if time.time() - found.st_mtime < UNWANTED_S:
            return True
        os.unlink(path)
    except OSError:
        pass
    return False


def register(library: "Any") -> "tuple[dict[int, str], Any]":
    """Return the PCI addresses of the GPUs that report Xids, by their handles, and the set of their events."""
    buses, events = {}, library.nvmlEventSetCreate()
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            pci = library.nvmlDeviceGetPciInfo(handle)
            library.nvmlDeviceRegisterEvents(handle, XID, events)
        except library.NVMLError:
            continue
        buses[address(handle)] = "%04x:%02x:%02x" % (pci.domain, pci.bus, pci.device)
    return buses, events


def address(handle: "Any") -> int:
    """Return what identifies a handle: NVML gives the same pointer each time."""
    import ctypes

    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def write(root: str, lines: "list[bytes]") -> None:
    """Replace the file of events, in one step; on a full disk it stays as it was."""
    path = os.path.join(root, EVENTS)
    try:
        fd = os.open(path + ".part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, b"\n".join([boot_id().encode(), *lines]) + b"\n")
        finally:
            os.close(fd)
        os.rename(path + ".part", path)
    except OSError:
        pass
