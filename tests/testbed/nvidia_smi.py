#!/usr/bin/env python3
"""A stand-in for `nvidia-smi mig` on the testbed's nodes: it cuts the GPUs of nvml_stub.c, by the same file.

Known are mig -lgi, -cgi PROFILE[:START],... [-C], -dci and -dgi, with -i and -gi, and without mig: -i GPU with -mig 0
or 1, --query-gpu=mig.mode.current or --query-compute-apps=pid. Placements are checked against the file's profiles.
Every created or destroyed instance is written at once; the key `gpuI.smi_delay_ms` is the pause before each, and
`smi_denied=1` refuses all that changes something. Runs with a plain python3.

Called nvidia-ctk, it is a stand-in for `nvidia-ctk cdi generate --output=FILE`: a device G for each whole GPU and
G:I for each MIG device, with its device files and the variable GPU_G=present or GPU_G_I=present.
"""

import argparse
import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

FILE = os.environ.get("GPUSCHED_NVML_FILE", "/run/gpusched-testbed/nvml/nvml.conf")
NONE_FOUND, DENIED, FAILED = 6, 4, 3


class Refused(Exception):
    """The last line of nvidia-smi, and its exit code."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


class Profile:
    """A GPU instance profile of the file."""

    def __init__(self, line: str) -> None:
        number, slices, count, _, size, name, starts = line.split(";")
        self.id, self.slices, self.count, self.size, self.name = int(number), int(slices), int(count), int(size), name
        self.starts = [int(start) for start in starts.split(",")]

    def is_called(self, word: str) -> bool:
        """Whether a word of the command line names it: its id, or its name with or without MIG."""
        return word in (str(self.id), self.name, self.name.replace("MIG ", ""))


class Gpu:
    """One GPU as the file has it.

    GPU instances are [id, profile, start, size], compute instances [gi, ci, slices, uuid].
    """

    def __init__(self, index: int) -> None:
        self.index = index
        values = read_file()

        def value(key: str, otherwise: str = "") -> str:
            return values.get(f"gpu{index}.{key}", values.get(f"gpu*.{key}", otherwise))

        self.mig = value("mig", "0") == "1"
        self.pci = value("pci")
        self.uuid, self.delay_s = value("uuid"), float(value("smi_delay_ms", "0")) / 1000
        self.profiles = [Profile(line) for line in (value(f"mig_profile.{n}") for n in range(32)) if line]
        self.gis = [[int(word) for word in item.split(":")] for item in value("gis").split(",") if item]
        self.cis = [item.split(":", 3) for item in value("cis").split(",") if item]
        processes = [item.split(":") for item in value("procs").split(",") if item]
        self.busy = [item[0] for item in processes]
        self.in_use = {int(item[2]) for item in processes if len(item) > 2}

    def profile(self, word: str) -> Profile:
        """Return the profile that a word names."""
        for profile in self.profiles:
            if profile.is_called(word):
                return profile
        raise Refused(f'Option "-cgi": invalid GPU instance profile "{word}"', 2)

    def create(self, profile: Profile, start: "int | None") -> int:
        """Create a GPU instance; return its id."""
        taken = {unit for _, _, first, size in self.gis for unit in range(first, first + size)}
        starts = profile.starts if start is None else [s for s in profile.starts if s == start]
        if start is not None and not starts:
            raise Refused("Failed to create GPU instances: Invalid Argument", 2)
        of_it = [gi for gi in self.gis if gi[1] == profile.id]
        compute = sum(p.slices for gi in self.gis for p in self.profiles if p.id == gi[1])
        fitting = [s for s in starts if not taken & set(range(s, s + profile.size))]
        most = max(p.slices for p in self.profiles)
        if not fitting or len(of_it) >= profile.count or compute + profile.slices > most:
            print(
                f"Unable to create a GPU instance on GPU {self.index:2} using profile {profile.id}: "
                "Insufficient Resources"
            )
            raise Refused("Failed to create GPU instances: Insufficient Resources")
        first = {8: 0, 4: 1, 2: 3, 1: 7}.get(profile.size, 0) + fitting[0] // profile.size
        self.gis.append([first, profile.id, fitting[0], profile.size])
        self.write()
        name = f"{profile.name} (ID {profile.id:2})"
        print(f"Successfully created GPU instance ID {first:2} on GPU {self.index:2} using profile {name}")
        return first

    def create_compute(self, gi: int, profile: Profile) -> None:
        """Create the compute instance that spans a GPU instance."""
        uuid = f"MIG-{self.uuid[4:-8]}{self.index:04x}{gi:04x}"
        self.cis.append([str(gi), "0", str(profile.slices), uuid])
        self.cis.sort(key=lambda ci: int(ci[0]))
        self.write()
        print(
            f"Successfully created compute instance ID  0 on GPU {self.index:2} GPU instance ID {gi:2} "
            f"using profile {profile.name} (ID {profile.slices:2})"
        )

    def destroy_compute(self, ci: "list[str]") -> None:
        """Destroy a compute instance on which no process is."""
        where = f"compute instance ID {ci[1]:>2} from GPU {self.index:2} GPU instance ID {ci[0]:>2}"
        if int(ci[0]) in self.in_use:
            print(f"Unable to destroy {where}: In use by another client")
            raise Refused("Failed to destroy compute instances: In use by another client")
        self.cis.remove(ci)
        self.write()
        print(f"Successfully destroyed {where}")

    def destroy(self, gi: "list[int]") -> None:
        """Destroy a GPU instance without compute instances."""
        where = f"GPU instance ID {gi[0]:2} from GPU {self.index:2}"
        if any(int(ci[0]) == gi[0] for ci in self.cis):
            print(f"Unable to destroy {where}: In use by another client")
            raise Refused("Failed to destroy GPU instances: In use by another client")
        self.gis.remove(gi)
        self.write()
        print(f"Successfully destroyed {where}")

    def write(self) -> None:
        """Put its instances into the file, after the pause that the file asks for."""
        time.sleep(self.delay_s)
        gis = ",".join(":".join(map(str, gi)) for gi in self.gis)
        cis = ",".join(":".join(ci) for ci in self.cis)
        replace_lines({f"gpu{self.index}.gis": gis, f"gpu{self.index}.cis": cis})


def replace_lines(values: "dict[str, str]") -> None:
    """Put these values into the file in place of older ones."""
    with locked():
        with open(FILE) as file:
            lines = [line for line in file if line.partition("=")[0] not in values]
        part = f"{FILE}.{os.getpid()}"
        with open(part, "w") as file:
            file.writelines([*lines, *(f"{key}={value}\n" for key, value in values.items())])
        os.rename(part, FILE)


@contextmanager
def locked() -> "Iterator[None]":
    """One writer at a time."""
    with open(f"{FILE}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_file() -> "dict[str, str]":
    """Return the file's keys and values."""
    with open(FILE) as file:
        return dict(line.rstrip("\n").split("=", 1) for line in file if "=" in line and not line.startswith("#"))


def chosen_gpus(options: argparse.Namespace) -> "list[Gpu]":
    """Return the GPUs in MIG mode that -i names, or all."""
    indices = [int(word) for word in options.i.split(",")] if options.i else range(int(read_file()["count"]))
    found = [gpu for gpu in map(Gpu, indices) if gpu.mig]
    if not found:
        raise Refused("No MIG-enabled devices found.", NONE_FOUND)
    return found


def list_instances(gpus: "list[Gpu]") -> None:
    """Print what -lgi prints."""
    if not any(gpu.gis for gpu in gpus):
        raise Refused("No GPU instances found: Not Found", NONE_FOUND)
    print("| GPU instances:                                        |")
    for gpu in gpus:
        for number, profile, start, size in gpu.gis:
            name = next(p.name for p in gpu.profiles if p.id == profile)
            print(f"|{gpu.index:4}  {name:18}{profile:5}{number:11}{start:10}:{size} |")


def act(options: argparse.Namespace) -> None:
    """Carry out the command line."""
    gpus = chosen_gpus(options)
    if options.lgi:
        list_instances(gpus)
        return
    if read_file().get("smi_denied") == "1":
        raise Refused("Insufficient Permissions", DENIED)
    wanted = {int(word) for word in options.gi.split(",")} if options.gi else None
    for gpu in gpus:
        made = []
        for word in options.cgi.split(",") if options.cgi else ():
            name, _, start = word.partition(":")
            made.append((gpu.create(gpu.profile(name), int(start) if start else None), gpu.profile(name)))
        for gi, profile in made if options.C else ():
            gpu.create_compute(gi, profile)
        if options.dci:
            for ci in [ci for ci in gpu.cis if wanted is None or int(ci[0]) in wanted]:
                gpu.destroy_compute(ci)
        if options.dgi:
            for gi_ in [gi for gi in gpu.gis if wanted is None or gi[0] in wanted]:
                gpu.destroy(gi_)


def generate_cdi(output: str) -> None:
    """Write the CDI specification of what is there now."""
    devices = []
    for gpu in map(Gpu, range(int(read_file()["count"]))):
        whole = device_file(f"nvidia{gpu.index}", gpu.index)
        if not gpu.mig:
            devices.append(cdi_device(str(gpu.index), [whole]))
        for index, ci in enumerate(gpu.cis):
            cap = device_file(f"nvidia-caps/nvidia-cap{100 * gpu.index + int(ci[0])}", 20 + 10 * gpu.index + index)
            devices.append(cdi_device(f"{gpu.index}:{index}", [whole, cap]))
    os.makedirs(os.path.dirname(output), exist_ok=True)
    with open(f"{output}.part", "w") as file:
        json.dump({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}, file)
    os.rename(f"{output}.part", output)


def device_file(name: str, minor: int) -> "dict[str, object]":
    """Make a device file of the node, and return it as a CDI specification has it."""
    path = f"/run/gpusched-testbed/dev/{name}"
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(195, minor))
    return {"path": f"/dev/{name}", "hostPath": path, "type": "c", "major": 195, "minor": minor, "permissions": "rw"}


def cdi_device(name: str, nodes: "list[dict[str, object]]") -> "dict[str, object]":
    """Return a device of a CDI specification."""
    variable = f"GPU_{name.replace(':', '_')}=present"
    return {"name": name, "containerEdits": {"env": [variable], "deviceNodes": nodes}}


def switch_mode(index: int, on: bool) -> None:
    """Print and do what -mig does. A GPU in use keeps its mode, and nvidia-smi ends with 0 nevertheless."""
    gpu = Gpu(index)
    word = "enable" if on else "disable"
    if gpu.mig == on:
        print(f"{word.capitalize()}d MIG Mode for GPU {gpu.pci}")
    elif gpu.busy or gpu.gis:
        print(f"Warning: MIG mode is in pending {word} state for GPU {gpu.pci}:In use by another client")
    else:
        time.sleep(gpu.delay_s)
        replace_lines({f"gpu{index}.mig": str(int(on))})
        print(f"{word.capitalize()}d MIG Mode for GPU {gpu.pci}")
    print("All done.")


def whole_gpu(words: "list[str]") -> int:
    """Do what nvidia-smi does without mig: -mig 0 or 1, and two queries, of the GPU that -i names."""
    parser = argparse.ArgumentParser(prog="nvidia-smi", allow_abbrev=False)
    for option in ("-i", "-mig", "--query-gpu", "--query-compute-apps", "--format"):
        parser.add_argument(option)
    options = parser.parse_args(words)
    gpu = Gpu(int(options.i))
    if options.query_gpu == "mig.mode.current":
        print("Enabled" if gpu.mig else "Disabled")
    elif options.query_compute_apps == "pid":
        print("".join(f"{pid}\n" for pid in gpu.busy), end="")
    elif options.mig and read_file().get("smi_denied") == "1":
        print("Unable to enable MIG Mode: Insufficient Permissions")
        return DENIED
    elif options.mig:
        switch_mode(gpu.index, options.mig == "1")
    return 0


def main() -> int:
    """Do as the called program does; return its exit code."""
    if os.path.basename(sys.argv[0]) == "nvidia-ctk":
        generate_cdi(sys.argv[-1].partition("=")[2])
        return 0
    if sys.argv[1:2] != ["mig"]:
        return whole_gpu(sys.argv[1:])
    parser = argparse.ArgumentParser(prog="nvidia-smi mig", allow_abbrev=False)
    for flag in ("-lgi", "-C", "-dci", "-dgi"):
        parser.add_argument(flag, action="store_true")
    for option in ("-i", "-cgi", "-gi"):
        parser.add_argument(option)
    try:
        act(parser.parse_args(sys.argv[2:]))
    except Refused as why:
        print(why)
        return why.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
