"""Where GPUs and network cards sit and what they are connected to: sysfs and lldpctl, as any user may read them."""
# ruff: noqa: UP031

import os
import re
import select
import time

MYPY = False  # as mypy knows it; importing typing costs every probe 3 ms
if MYPY:
    from typing import Any

LLDP_LIMIT_S = 3.0
LLDP_BYTES = 1 << 20
MAX_NICS = 64  # of a node with more, the first are reported
_PCI = re.compile(r"(?:pci)?[0-9a-f]{4,8}:[0-9a-f]{2}(?::[0-9a-f]{2}\.[0-7])?")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) Gb/sec")
_LLDP = re.compile(r"lldp\.([^=]+?)\.(chassis|port)\.(name|mac|ifname|local|descr)=(.+)")
_KINDS = {"InfiniBand": "infiniband", "Ethernet": "roce"}


def read(gpus: "list[dict[str, Any]]", root: str = "/sys", lldp: "str | None" = None) -> "dict[str, Any]":
    """Return the node's wiring.

    Args:
        gpus: Index, bus address (NVML's form), NVLink domain and device file's number of each GPU; None where unknown.
        root: Where sysfs is.
        lldp: What lldpctl said; None: it is asked.

    Returns:
        A dict with the fields of `gpusched.model.readings.Wiring`; what cannot be read is None, or not there.
    """
    placed = []
    for gpu in gpus:
        bus = bus_name(gpu.get("bus"))
        path = "%s/bus/pci/devices/%s" % (root, bus)
        found = {"pci_path": pci_path(path), "numa": number(path + "/numa_node")} if bus else {}
        placed.append(dict(found, index=gpu["index"], domain=gpu.get("domain"), minor=gpu.get("minor")))
    nics = rdma_ports(root)
    taken = {nic["interface"] for nic in nics}
    nics += [nic for nic in interfaces(root) if nic["interface"] not in taken]
    near = lldp_neighbours(ask_lldp() if lldp is None else lldp)
    for nic in nics:
        nic.update(near.get(nic["interface"], {}))
    return {"gpus": placed, "nics": nics[:MAX_NICS]}


def bus_name(text: "Any") -> "str | None":
    """Return ``0000:3b:00.0`` of NVML's ``00000000:3B:00.0``."""
    match = re.match(r"(?:0000)?([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])$", str(text or "").lower())
    return match.group(1) if match else None


def rdma_ports(root: str) -> "list[dict[str, Any]]":
    """Return the ports of InfiniBand and RoCE cards."""
    found = []
    for device in names(root + "/class/infiniband"):
        folder = "%s/class/infiniband/%s" % (root, device)
        if os.path.exists(folder + "/device/physfn"):
            continue  # a virtual function: its card is there, too
        for port in names(folder + "/ports"):
            here = "%s/ports/%s" % (folder, port)
            up = "ACTIVE" in line(here + "/state")
            rate = _RATE.match(line(here + "/rate"))
            found.append({
                "name": device if port == "1" else "%s/%s" % (device, port),
                "kind": _KINDS.get(line(here + "/link_layer"), "rdma"),
                "interface": interface_of(folder, here, port),
                "up": up,
                "rate_gbps": float(rate.group(1)) if rate and up else None,
                "pci_path": pci_path(folder + "/device"),
                "numa": number(folder + "/device/numa_node"),
            })  # fmt: skip
    return found


def interface_of(device: str, port_folder: str, port: str) -> "str | None":
    """Return the network interface of a card's port."""
    name = line(port_folder + "/gid_attrs/ndevs/0")
    if name:
        return name
    there = names(device + "/device/net")
    same = [n for n in there if "%s" % ((number("%s/device/net/%s/dev_port" % (device, n)) or 0) + 1) == port]
    return next(iter(same or there), None)


def interfaces(root: str) -> "list[dict[str, Any]]":
    """Network interfaces with a device behind them: no bridges, bonds, tunnels, nor those of containers."""
    found = []
    for name in names(root + "/class/net"):
        folder = "%s/class/net/%s" % (root, name)
        device = os.path.realpath(folder + "/device")
        # A server's own management processor looks like a network card on USB.
        if not os.path.exists(folder + "/device") or "/usb" in device or os.path.exists(folder + "/device/physfn"):
            continue
        up = line(folder + "/operstate") == "up"
        speed = number(folder + "/speed")  # Mbit/s
        found.append({
            "name": name,
            "kind": "ethernet" if number(folder + "/type") != 32 else "infiniband",
            "interface": name,
            "up": up,
            "rate_gbps": speed / 1000.0 if speed and up else None,
            "pci_path": pci_path(folder + "/device"),
            "numa": number(folder + "/device/numa_node"),
        })  # fmt: skip
    return found


def pci_path(path: str) -> "list[str]":
    """Return the bridges from the root to a device, and the device; empty if it is not on PCI."""
    return [part for part in os.path.realpath(path).split("/") if _PCI.fullmatch(part)]


def lldp_neighbours(text: str) -> "dict[str, dict[str, str]]":
    """Interface -> the switch at its other end and the switch's port, of ``lldpctl -f keyvalue``."""
    found_by_interface = {}  # type: dict[str, dict[str, str]]
    for row in text.splitlines():
        match = _LLDP.match(row)
        if match:
            what = found_by_interface.setdefault(match.group(1), {})
            what.setdefault("%s.%s" % (match.group(2), match.group(3)), printable(match.group(4)))
    found = {}
    for name, what in found_by_interface.items():
        switch = first_of(what, ("chassis.name", "chassis.mac", "chassis.local"))
        if switch:
            port = first_of(what, ("port.ifname", "port.local", "port.descr", "port.mac"))
            found[name] = {"switch": switch, "switch_port": port}
    return found


def first_of(what: "dict[str, str]", keys: "tuple[str, ...]") -> "Any":
    """Return the first of these that is not empty."""
    return next((what[key] for key in keys if what.get(key)), None)


def ask_lldp() -> str:
    """Return what lldpctl prints; "" if it is missing, not permitted, or too slow."""
    import subprocess

    try:
        child = subprocess.Popen(
            ["lldpctl", "-f", "keyvalue"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return ""
    until, data = time.monotonic() + LLDP_LIMIT_S, b""
    try:
        fd = child.stdout.fileno()  # type: ignore[union-attr]
        while len(data) < LLDP_BYTES:
            left = until - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                return ""
            chunk = os.read(fd, 65536)
            if not chunk:
                break
            data += chunk
    finally:
        child.kill()
        child.stdout.close()  # type: ignore[union-attr]
        child.wait()
    return data.decode("utf-8", "replace")


def names(folder: str) -> "list[str]":
    """Return a folder's entries in order, at most as many as a node may have."""
    try:
        return sorted(os.listdir(folder))[: 4 * MAX_NICS]
    except OSError:
        return []


def line(path: str) -> str:
    """Return the first line of a small file; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return printable(file.read(4096).decode("utf-8", "replace").split("\n", 1)[0])
    except OSError:  # a card without a link answers EINVAL
        return ""


def number(path: str) -> "int | None":
    """Return a whole number from a file; None below 0: the kernel writes -1 for unknown."""
    try:
        value = int(line(path))
    except ValueError:
        return None
    return value if 0 <= value < 1 << 31 else None


def printable(text: str) -> str:
    """Printable, and not endless."""
    return "".join(c if c.isprintable() else "?" for c in text.strip())[:200]
