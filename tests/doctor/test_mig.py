"""Findings of `check` on GPUs in MIG mode, and on the needs of cutting."""

from pathlib import Path

from gpusched.doctor import examine
from gpusched.doctor.mig import judge_mig
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.resources import MigSettings, Node, RuntimeName
from gpusched.model.slices import MigSlice
from gpusched.nodes.transport import CommandResult
from tests.doctor.conftest import WriteInventory, of
from tests.testbed import Testbed


def judge(gpu: Gpu, mig: MigSettings | None = None, tried: CommandResult | None = None) -> list[tuple[str, str]]:
    node = Node(
        name="n", partition="p", address="n", gpus=1, cores=8, memory_mib=8192, runtime=RuntimeName.PODMAN, mig=mig
    )
    reading = NodeReading(node="n", time=0.0, gpus=(gpu,))
    return [(found.status, f"{found.message}; {found.hint}") for found in judge_mig(node, reading, tried, "gs")]


def cut(**changes: object) -> Gpu:
    one = {"gpu": 0, "profile": "1g.10gb", "ci": 0}
    slices = [MigSlice(start=0, uuid="MIG-a", gi=7, **one), MigSlice(start=1, gi=8, **one | {"ci": None} | changes)]
    return Gpu(index=0, mig_mode=True, slices=tuple(slices))


def test_slices_are_counted() -> None:
    assert judge(Gpu(index=0, mig_mode=False)) == []
    assert judge(cut(uuid="MIG-b")) == [("ok", "GPU 0 cut into 2 1g.10gb; ")]


def test_instances_that_jobs_cannot_get_are_named() -> None:
    (ok, part) = judge(cut())
    assert ok[0] == "ok"
    assert part[0] == "warn"
    assert "instance 8 of GPU 0" in part[1]
    ((status, words),) = judge(Gpu(index=0, mig_mode=True))
    assert status == "fail"
    assert "without slices" in words
    ((status, words),) = judge(Gpu(index=0, mig_mode=True, mig_error="not permitted"))
    assert status == "fail"
    assert "cannot be read: not permitted" in words


def test_on_demand_needs_mig_and_permission() -> None:
    done = CommandResult(0, b"", b"")
    assert judge(Gpu(index=0, mig_mode=True), MigSettings(), done) == [("ok", "GPUs may be cut on demand; ")]
    ((status, words), _) = judge(Gpu(index=0, name="Tesla V100"), MigSettings(), done)
    assert (status, words.partition(";")[0]) == ("fail", "GPU 0 cannot be cut: Tesla V100 has no MIG")
    denied = CommandResult(1, b"", b"sudo: a password is required\n")
    ((status, words),) = judge(Gpu(index=0, mig_mode=False), MigSettings(), denied)
    assert status == "fail"
    assert "a password is required" in words
    assert "gs ALL=(root) NOPASSWD: /usr/bin/nvidia-smi mig *" in words


def test_the_sudo_line_is_tried_on_the_node(testbed: Testbed, write_inventory: WriteInventory, tmp_path: Path) -> None:
    node = testbed.nodes[0]
    node.cut_gpu(3, "3g.40gb:0", "3g.40gb:4")
    on_demand = "{mode: on-demand, command: nvidia-smi, cdi_command: nvidia-ctk cdi}"
    findings = examine(write_inventory(node.name, mig=on_demand), tmp_path)
    assert {f.message for f in findings if f.check == "mig"} == {
        "GPU 3 cut into 2 3g.40gb", "GPUs may be cut on demand",
    }  # fmt: skip
    assert set(of(findings, node.name, "fail")) == set()
    findings = examine(write_inventory(node.name, mig="on-demand"), tmp_path)
    assert "sudoers" in of(findings, node.name, "fail")["mig"].hint
