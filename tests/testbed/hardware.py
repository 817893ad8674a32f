"""The two GPU servers the testbed plays, as text files: NVML figures and a CDI specification."""

import json
from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True)
class Model:
    """A GPU model as NVML describes it."""

    key: str
    name: str
    memory_mib: int
    power_limit_w: int
    idle_power_w: int
    compute_capability: tuple[int, int]
    driver: str
    cuda: int
    nvlinks: int
    mig: bool


A100 = Model("a100", "NVIDIA A100-SXM4-80GB", 81920, 400, 55, (8, 0), "535.129.03", 12020, 12, mig=True)
V100 = Model("v100", "Tesla V100-SXM2-32GB", 32768, 300, 42, (7, 0), "470.223.02", 11040, 6, mig=False)

# `nvidia-smi mig -lgip` and `-lgipp` of an A100-SXM4-80GB (NVIDIA's Multi-Instance GPU User Guide). By NVML's number of
# the profile: id, compute units, count, MiB, memory units, name, starts.
A100_MIG = {
    0: "19;1;7;9728;1;MIG 1g.10gb;0,1,2,3,4,5,6",
    1: "14;2;3;19968;2;MIG 2g.20gb;0,2,4",
    2: "9;3;2;40192;4;MIG 3g.40gb;0,4",
    3: "5;4;1;40192;4;MIG 4g.40gb;0",
    4: "0;7;1;80640;8;MIG 7g.80gb;0",
    7: "20;1;1;9728;1;MIG 1g.10gb+me;0,1,2,3,4,5,6",
    9: "15;1;4;19968;2;MIG 1g.20gb;0,2,4,6",
}

# DGX-1's hybrid cube mesh: NVLinks between pairs of GPUs, as `nvidia-smi topo -m` prints them.
DGX1_LINKS = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


def pci_address(gpu: int) -> str:
    """The PCI address GPU `gpu` has on every node."""
    return f"00000000:{7 + 8 * gpu:02X}:00.0"


def uuid(node: int, gpu: int) -> str:
    """The UUID of GPU `gpu` on the node with number `node`."""
    return f"GPU-{node:08x}-0000-4000-8000-{gpu:012x}"


def nvml_conf(model: Model, node: int, gpus: int) -> str:
    """The stub's answers for a healthy, idle node (see nvml_stub.c for the keys)."""
    lines = [
        f"driver={model.driver}",
        f"nvml={model.cuda // 1000}.{model.driver}",
        f"cuda={model.cuda}",
        f"count={gpus}",
        f"gpu*.name={model.name}",
        f"gpu*.mem_total={model.memory_mib * MIB}",
        "gpu*.mem_used=0",
        f"gpu*.mem_reserved={600 * MIB}",
        "gpu*.util_gpu=0",
        "gpu*.util_mem=0",
        f"gpu*.power_mw={model.idle_power_w * 1000}",
        f"gpu*.power_limit_mw={model.power_limit_w * 1000}",
        "gpu*.temp_c=33",
        "gpu*.persistence=1",
        "gpu*.compute_mode=0",
        "gpu*.clocks_event_reasons=1",
        *("gpu*.pcie_width=16", "gpu*.pcie_width_max=16", "gpu*.pcie_gen=1", "gpu*.pcie_gen_max=4"),
        "gpu*.temp_slowdown_c=92",
        *(f"gpu*.field.{field}=0" for field in (29, 30, 31, 38, 45, 52, 59, 94)),
        f"gpu*.cc_major={model.compute_capability[0]}",
        f"gpu*.cc_minor={model.compute_capability[1]}",
        "gpu*.ecc_mode=1",
        *(f"gpu*.ecc.{kind}.{counter}=0" for kind in (0, 1) for counter in (0, 1)),
        f"gpu*.nvlinks={model.nvlinks}",
        *(["gpu*.mig=0", "gpu*.remapped=0,0,0,0"] if model.mig else []),
        *(f"gpu*.mig_profile.{number}={line}" for number, line in A100_MIG.items() if model.mig),
    ]
    for gpu in range(gpus):
        lines += [
            f"gpu{gpu}.uuid={uuid(node, gpu)}",
            f"gpu{gpu}.serial=16{node:06d}{gpu:05d}",
            f"gpu{gpu}.pci={pci_address(gpu)}",
            f"gpu{gpu}.energy_mj={1_000_000 * (gpu + 1)}",
        ]
    return "\n".join([*lines, *_topology(gpus), *_nvlinks(model, gpus)]) + "\n"


def _topology(gpus: int) -> list[str]:
    """Pairs share a PCIe switch (10), quads a socket (40), the halves only the system (50)."""
    lines = ["topo=50"]
    for a in range(gpus):
        for b in range(a + 1, gpus):
            if a // 4 == b // 4:
                lines.append(f"topo.{a}.{b}={10 if a // 2 == b // 2 else 40}")
    return lines


def _nvlinks(model: Model, gpus: int) -> list[str]:
    """Return the far end of every NVLink: six switches on an A100 server, other GPUs on a V100 server."""
    if model.nvlinks == 12:
        peers = [f"gpu*.nvlink{link}.peer=00000000:{0xC4 + link // 2:02X}:00.0" for link in range(12)]
        return [*peers, *(f"gpu*.nvlink{link}.peer_type=2" for link in range(12))]
    used = dict.fromkeys(range(gpus), 0)
    lines = []
    for (a, b), links in DGX1_LINKS.items():
        for _ in range(links if max(a, b) < gpus else 0):
            for near, far in ((a, b), (b, a)):
                link = used[near]
                used[near] += 1
                lines += [f"gpu{near}.nvlink{link}.peer={pci_address(far)}", f"gpu{near}.nvlink{link}.peer_type=0"]
    return [*lines, *(f"gpu{gpu}.nvlinks={links}" for gpu, links in used.items())]


def cdi_spec(gpus: int) -> str:
    """A CDI specification: `nvidia.com/gpu=0`.. and `=all` give a device node and `GPU_<i>=present` each."""

    def edits(indices: range) -> dict[str, object]:
        return {
            "env": [f"GPU_{i}=present" for i in indices],
            "deviceNodes": [
                {"path": f"/dev/nvidia{i}", "hostPath": f"/run/gpusched-testbed/dev/nvidia{i}", "type": "c",
                 "major": 195, "minor": i, "permissions": "rw"} for i in indices
            ],
        }  # fmt: skip

    devices = [{"name": str(i), "containerEdits": edits(range(i, i + 1))} for i in range(gpus)]
    devices.append({"name": "all", "containerEdits": edits(range(gpus))})
    return json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}, indent=1)
