"""A FUSE file system that passes everything on to a folder, with errors on demand: `FuseMount`.

It implements FUSE's protocol (linux/fuse.h, 7.31), in a process of its own, without a library. As with every FUSE,
the kernel drops pages that cannot be written back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_IN = struct.Struct("=IIQQIIII")
_OUT = struct.Struct("=IiQ")
_ENTRY, _OPEN, _HANDLE = struct.Struct("=QQQQII"), struct.Struct("=QII"), struct.Struct("=Q")
_VALID_S = 1
_MAX_WRITE = 1 << 17
READS, WRITES, SYNCS, CHANGES = 1, 2, 4, 8
"""Operations for `FuseMount.fail`: sums of these. Changes: files that are made, removed, renamed or truncated."""


class FuseMount:
    """A mounted pass-through file system. ``folder``: where its files are; ``mountpoint``: a folder."""

    def __init__(self, folder: Path, mountpoint: Path) -> None:
        self._orders, self.mountpoint = mountpoint.with_name(mountpoint.name + ".orders"), mountpoint
        self.heal()
        argv = [sys.executable, str(Path(__file__)), str(folder), str(mountpoint), str(self._orders)]
        self._server = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert self._server.stdout is not None
        if not self._server.stdout.readline():
            self._server.communicate()
            raise OSError(errno.ENODEV, "FUSE cannot be mounted here")

    def fail(self, what: int, after: int, times: int = 1) -> None:
        """Let ``after`` operations of a kind pass, then answer ``times`` of them with EIO."""
        part = self._orders.with_suffix(".part")
        part.write_text(f"{what} {after} {times}")
        part.rename(self._orders)

    def heal(self) -> None:
        """Fail nothing more."""
        self.fail(0, 0, 0)

    def close(self) -> None:
        """Unmount it; its process ends by that."""
        subprocess.run(["umount", "-l", self.mountpoint], check=False)
        self._server.kill()
        self._server.communicate()


class _Server:
    """Answers requests. A node is an O_PATH descriptor of the file behind it, so that renames do not matter."""

    def __init__(self, device: int, root: str, orders: Path) -> None:
        self._device, self._orders = device, orders
        self._nodes: dict[int, int] = {1: os.open(root, os.O_PATH)}
        self._numbers: dict[tuple[int, int], int] = {}
        self._lookups: dict[int, int] = {}
        self._next, self._stamp, self._failing = 2, (0, 0), [0, 0, 0]

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, _MAX_WRITE + 65536)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return  # unmounted
            _, code, unique, node, uid, gid, _, _ = _IN.unpack_from(request)
            answer = _OPERATIONS.get(code)
            if code in (2, 36, 42):  # forget, interrupt, batch_forget: no reply
                if code == 2:
                    self._forget(node, _HANDLE.unpack_from(request, 40)[0])
                elif code == 42:
                    for at in range(struct.unpack_from("=I", request, 40)[0]):
                        self._forget(*struct.unpack_from("=QQ", request, 48 + 16 * at))
                continue
            result, failed = b"", -errno.ENOSYS
            if answer is not None:
                try:
                    self._refuse(code, request)
                    result, failed = answer(self, node, request[40:], uid, gid) or b"", 0
                except OSError as error:
                    result, failed = b"", -(error.errno or errno.EIO)
            try:
                os.write(self._device, _OUT.pack(16 + len(result), failed, unique) + result)
            except OSError as error:  # the caller was killed
                if error.errno != errno.ENOENT:
                    raise

    def _refuse(self, code: int, request: bytes) -> None:
        found = self._orders.stat()
        stamp = found.st_ino, found.st_mtime_ns
        if stamp != self._stamp:
            self._stamp, self._failing = stamp, [int(word) for word in self._orders.read_text().split()]
        kind = {15: READS, 16: WRITES, 20: SYNCS, 30: SYNCS} | dict.fromkeys((10, 12, 35, 45), CHANGES)
        if code == 4 and request[40] & 8:
            kind[4] = CHANGES
        if not kind.get(code, 0) & self._failing[0]:
            return
        self._failing[1] -= 1
        if self._failing[1] < 0 and self._failing[2] > 0:
            self._failing[2] -= 1
            raise OSError(errno.EIO, "as ordered")

    def path(self, node: int) -> str:
        return f"/proc/self/fd/{self._nodes[node]}"

    def _attributes(self, node: int) -> bytes:
        s = os.fstat(self._nodes[node])
        times = [s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns]
        return struct.pack(
            "=QQQQQQIIIIIIIIII", s.st_ino, s.st_size, s.st_blocks, *(t // 10**9 for t in times),
            *(t % 10**9 for t in times), s.st_mode, s.st_nlink, s.st_uid, s.st_gid, s.st_rdev, 4096, 0,
        )  # fmt: skip

    def _entry(self, parent: int, name: bytes) -> bytes:
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent])
        status = os.fstat(found)
        key = status.st_dev, status.st_ino
        number = self._numbers.get(key)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[key], self._nodes[number] = number, found
        else:
            os.close(found)
        self._lookups[number] = self._lookups.get(number, 0) + 1
        return _ENTRY.pack(number, 0, _VALID_S, _VALID_S, 0, 0) + self._attributes(number)

    def _forget(self, node: int, count: int) -> None:
        if node == 1 or node not in self._nodes:
            return
        self._lookups[node] -= count
        if self._lookups[node] <= 0:
            status = os.fstat(self._nodes[node])
            self._numbers.pop((status.st_dev, status.st_ino), None)
            os.close(self._nodes.pop(node))
            del self._lookups[node]

    def initialize(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        _, minor, ahead, _ = struct.unpack_from("=IIII", data)
        flags = 1 << 5  # big writes
        return struct.pack("=IIIIHHIIHHI", 7, min(31, minor), ahead, flags, 12, 9, _MAX_WRITE, 1, 0, 0, 0) + bytes(28)

    def lookup(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        return self._entry(node, data.rstrip(b"\0"))

    def get_attributes(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        return struct.pack("=QII", _VALID_S, 0, 0) + self._attributes(node)

    def set_attributes(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        valid, _, _, size, _, at, mt, _, atn, mtn, _, mode, _, user, group, _ = struct.unpack_from(
            "=IIQQQQQQIIIIIIII", data
        )
        path = self.path(node)
        if valid & 6:
            os.chown(path, user if valid & 2 else -1, group if valid & 4 else -1)
        if valid & 1:
            os.chmod(path, mode & 0o7777)
        if valid & 8:
            os.truncate(path, size)
        if valid & (16 | 32):
            now = os.stat(path)
            accessed = at * 10**9 + atn if valid & 16 and not valid & 128 else now.st_atime_ns
            changed = mt * 10**9 + mtn if valid & 32 and not valid & 256 else None
            if changed is None:
                os.utime(path)
            else:
                os.utime(path, ns=(accessed, changed))
        return self.get_attributes(node, b"", uid, gid)

    def read_link(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        return os.readlink(b"", dir_fd=self._nodes[node])

    def _made(self, node: int, name: bytes, uid: int, gid: int) -> bytes:
        os.chown(name, uid, gid, dir_fd=self._nodes[node], follow_symlinks=False)
        return self._entry(node, name)

    def link_symbolically(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        name, target = data.split(b"\0")[:2]
        os.symlink(target, name, dir_fd=self._nodes[node])
        return self._made(node, name, uid, gid)

    def make_node(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        mode, device = struct.unpack_from("=II", data)
        name = data[16:].rstrip(b"\0")
        os.mknod(name, mode, device, dir_fd=self._nodes[node])
        return self._made(node, name, uid, gid)

    def make_folder(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        name = data[8:].rstrip(b"\0")
        os.mkdir(name, struct.unpack_from("=I", data)[0] & 0o7777, dir_fd=self._nodes[node])
        return self._made(node, name, uid, gid)

    def unlink(self, node: int, data: bytes, uid: int, gid: int) -> None:
        os.unlink(data.rstrip(b"\0"), dir_fd=self._nodes[node])

    def remove_folder(self, node: int, data: bytes, uid: int, gid: int) -> None:
        os.rmdir(data.rstrip(b"\0"), dir_fd=self._nodes[node])

    def rename(self, node: int, data: bytes, uid: int, gid: int, skip: int = 8) -> None:
        (target,) = _HANDLE.unpack_from(data)
        old, new = data[skip:].split(b"\0")[:2]
        os.rename(old, new, src_dir_fd=self._nodes[node], dst_dir_fd=self._nodes[target])

    def rename2(self, node: int, data: bytes, uid: int, gid: int) -> None:
        if struct.unpack_from("=I", data, 8)[0]:
            raise OSError(errno.EINVAL, "flags")
        self.rename(node, data, uid, gid, 16)

    def link(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        (old,) = _HANDLE.unpack_from(data)
        name = data[8:].rstrip(b"\0")
        os.link(self.path(old), name, dst_dir_fd=self._nodes[node], follow_symlinks=True)
        return self._entry(node, name)

    def open(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        (flags,) = struct.unpack_from("=I", data)
        flags &= ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_APPEND)
        return _OPEN.pack(os.open(self.path(node), flags), 0, 0)

    def create(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        flags, mode = struct.unpack_from("=II", data)
        name = data[16:].rstrip(b"\0")
        flags = (flags | os.O_CREAT) & ~os.O_APPEND
        made = os.open(name, flags, mode & 0o7777, dir_fd=self._nodes[node])
        return self._made(node, name, uid, gid) + _OPEN.pack(made, 0, 0)

    def read(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        handle, offset, size = struct.unpack_from("=QQI", data)
        return os.pread(handle, size, offset)

    def write(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        handle, offset, size = struct.unpack_from("=QQI", data)
        return struct.pack("=II", os.pwrite(handle, data[40 : 40 + size], offset), 0)

    def statistics(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        s = os.statvfs(self.path(node))
        blocks = (s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree)
        return struct.pack("=QQQQQIIII", *blocks, s.f_bsize, s.f_namemax, s.f_frsize, 0) + bytes(24)

    def release(self, node: int, data: bytes, uid: int, gid: int) -> None:
        os.close(_HANDLE.unpack_from(data)[0])

    def sync(self, node: int, data: bytes, uid: int, gid: int) -> None:
        os.fsync(_HANDLE.unpack_from(data)[0])

    def nothing(self, node: int, data: bytes, uid: int, gid: int) -> None:
        """Flush: all is written at once."""

    def open_folder(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        return _OPEN.pack(os.open(self.path(node), os.O_RDONLY | os.O_DIRECTORY), 0, 0)

    def read_folder(self, node: int, data: bytes, uid: int, gid: int) -> bytes:
        handle, offset, size = struct.unpack_from("=QQI", data)
        found = b""
        for at, name in enumerate(sorted(os.listdir(handle))[offset:], offset + 1):
            raw = os.fsencode(name)
            status = os.stat(name, dir_fd=handle, follow_symlinks=False)
            one = struct.pack("=QQII", status.st_ino, at, len(raw), stat.S_IFMT(status.st_mode) >> 12) + raw
            one += bytes(-len(one) % 8)
            if len(found) + len(one) > size:
                break
            found += one
        return found


_Operation = Callable[[Any, int, bytes, int, int], bytes | None]
_OPERATIONS: dict[int, _Operation] = {
    1: _Server.lookup, 3: _Server.get_attributes, 4: _Server.set_attributes, 5: _Server.read_link,
    6: _Server.link_symbolically, 8: _Server.make_node, 9: _Server.make_folder, 10: _Server.unlink,
    11: _Server.remove_folder, 12: _Server.rename, 13: _Server.link, 14: _Server.open, 15: _Server.read,
    16: _Server.write, 17: _Server.statistics, 18: _Server.release, 20: _Server.sync, 25: _Server.nothing,
    26: _Server.initialize, 27: _Server.open_folder, 28: _Server.read_folder, 29: _Server.release, 30: _Server.sync,
    35: _Server.create, 45: _Server.rename2,
}  # fmt: skip


def _main() -> None:
    root, mountpoint, orders = sys.argv[1:]
    os.umask(0)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"gpusched-test", mountpoint.encode(), b"fuse", 0, options.encode()):
        raise SystemExit(os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    _Server(device, root, Path(orders)).serve()


if __name__ == "__main__":
    _main()
