"""GPUs in MIG mode as the probe reads them on real nodes: slices, processes, memory, profiles."""

import time

import pytest

from gpusched.model.readings import Gpu
from gpusched.model.resources import MigSettings
from gpusched.model.slices import MigSlice, share
from gpusched.nodes.probe import probe
from tests.nodes.nodes import declare, opened, settings_for
from tests.testbed import Testbed, TestNode

MIB = 1 << 20


@pytest.fixture
def node(testbed: Testbed) -> TestNode:
    """An A100 server, whose GPUs can be cut."""
    return testbed.nodes[0]


def read(testbed: Testbed, node: TestNode, mig: MigSettings | None = None) -> tuple[Gpu, ...]:
    """The GPUs of one reading."""
    declared, settings = declare(testbed, node, mig=mig), settings_for(testbed)
    with opened(declared, settings) as transport:
        return probe(transport, declared, "c1", settings, time.time).gpus


def parts(slices: tuple[MigSlice, ...]) -> list[tuple[str, int, int]]:
    """Profile, start and size of slices."""
    return [(s.profile, s.start, s.size) for s in slices]


def test_the_slices_of_a_cut_gpu_are_read(testbed: Testbed, node: TestNode) -> None:
    node.cut_gpu(3, "3g.40gb:4", "1g.10gb:0", "2g.20gb:2")
    node.cut_gpu(5)
    gpus = read(testbed, node)
    assert parts(gpus[3].slices) == [("1g.10gb", 0, 1), ("2g.20gb", 2, 2), ("3g.40gb", 4, 4)]
    first, _, last = gpus[3].slices
    assert (first.number, first.memory_mib, first.gi, first.ci, first.device) == (4000, 9728, 7, 0, 2)
    assert last.uuid is not None
    assert last.uuid.startswith("MIG-")
    assert (gpus[5].mig_mode, gpus[5].slices) == (True, ())
    assert [gpu.slices for gpu in gpus if not gpu.mig_mode] == [()] * 6
    # No figure of NVML's says how busy a GPU in MIG mode is: it is unknown, not 0.
    assert [gpu.utilization_pct is None for gpu in gpus] == [gpu.index in (3, 5) for gpu in gpus]
    assert gpus[3].power_w is not None


def test_profiles_come_with_their_placements(testbed: Testbed, node: TestNode) -> None:
    node.cut_gpu(0)
    node.cut_gpu(7)
    gpus = read(testbed, node)
    assert gpus[0].mig_profiles == gpus[7].mig_profiles
    by_name = {profile.name: profile for profile in gpus[0].mig_profiles}
    assert by_name["3g.40gb"].placements == ((0, 4), (4, 4))
    assert (by_name["1g.10gb+me"].profile_id, by_name["1g.10gb+me"].max_count) == (20, 1)
    assert share(by_name["1g.10gb"]) == 1 / 7
    assert share(by_name["3g.40gb"]) == 1 / 2
    assert share(by_name["7g.80gb"]) == 1


def test_profiles_are_asked_for_where_gpus_are_cut_on_demand(testbed: Testbed, node: TestNode) -> None:
    assert [gpu.mig_profiles for gpu in read(testbed, node)] == [()] * 8
    gpus = read(testbed, node, mig=MigSettings(gpus=(1,)))
    assert [(gpu.mig_mode, len(gpu.mig_profiles)) for gpu in gpus] == [(False, 7)] * 8
    assert all(gpu.mig_profiles == () for gpu in read(testbed, testbed.nodes[1], mig=MigSettings())), "a V100 has none"


def test_processes_and_memory_are_those_of_their_slice(testbed: Testbed, node: TestNode) -> None:
    node.cut_gpu(2, "1g.10gb:0", "1g.10gb:1")
    node.nvml_set({"gpu2.procs": f"1:{64 * MIB}:8", "gpu2.gi8.mem_used": 70 * MIB})
    gpu = read(testbed, node)[2]
    assert [(p.pid, p.memory_used_mib, p.gi) for p in gpu.processes] == [(1, 64, 8)]
    assert [(s.gi, s.memory_used_mib) for s in gpu.slices] == [(7, 0), (8, 70)]


def test_an_instance_that_a_broken_off_cut_left_is_no_device(testbed: Testbed, node: TestNode) -> None:
    node.cut_gpu(1, "1g.10gb:0")
    node.run(["nvidia-smi", "mig", "-i", "1", "-cgi", "14:2"])
    whole, left = read(testbed, node)[1].slices
    assert whole.usable
    assert (left.profile, left.start, left.uuid, left.ci, left.usable) == ("2g.20gb", 2, None, None, False)


def test_a_part_of_an_instance_is_not_handed_out(testbed: Testbed, node: TestNode) -> None:
    node.cut_gpu(1, "3g.40gb:0")
    node.nvml_set({"gpu1.cis": "1:0:1:MIG-a,1:1:2:MIG-b"})
    (instance,) = read(testbed, node)[1].slices
    assert (instance.profile, instance.usable) == ("3g.40gb", False)


def test_an_account_that_may_not_list_instances(testbed: Testbed, node: TestNode) -> None:
    node.cut_gpu(0, "1g.10gb:0")
    node.nvml_set({"gpu*.mig_monitor": 0})
    gpu = read(testbed, node)[0]
    assert gpu.slices == ()
    assert gpu.mig_error is not None
    assert "mig/monitor" in gpu.mig_error
