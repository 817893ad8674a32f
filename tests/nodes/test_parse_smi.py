"""nvidia-smi's words in the forms of drivers 470 and 535 (written after their format: no GPU on the test machine)."""
# ruff: noqa: E501

from gpusched.model.readings import Gpu, GpuProcess
from gpusched.nodes.parse_smi import parse_gpus

A100 = """\
0, GPU-5a4b1c22-8a36-0f0e-b3c5-2f2a1d6b7a01, NVIDIA A100-SXM4-80GB, 81920, 41216, 97, 352.41, 400.00, 64, 0, Disabled, 535.129.03
1, GPU-5a4b1c22-8a36-0f0e-b3c5-2f2a1d6b7a02, NVIDIA A100-SXM4-80GB, 81920, 4, [N/A], 68.11, 400.00, 35, 0, Enabled, 535.129.03
2, GPU-5a4b1c22-8a36-0f0e-b3c5-2f2a1d6b7a03, NVIDIA A100-SXM4-80GB, 81920, 0, 0, 61.90, 400.00, 33, 3, Disabled, 535.129.03
"""
A100_APPS = """\
GPU-5a4b1c22-8a36-0f0e-b3c5-2f2a1d6b7a01, 4711, 40960
GPU-5a4b1c22-8a36-0f0e-b3c5-2f2a1d6b7a01, 4712, [N/A]
"""
V100 = """\
0, GPU-11111111-2222-3333-4444-555555555555, Tesla V100-SXM2-32GB, 32510, 0, 0, 42.10, 300.00, 36
1, GPU-11111111-2222-3333-4444-666666666666, Tesla V100-SXM2-32GB, 32510, 31000, 100, 287.33, 300.00, 71
"""
LOST_ROW = """\
0, GPU-aa, NVIDIA A100-SXM4-80GB, 81920, 0, 0, 61.90, 400.00, 33, 0, Disabled, 535.129.03
1, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], \
[GPU is lost], [GPU is lost], [GPU is lost], 535.129.03
2, GPU-cc, NVIDIA A100-SXM4-80GB, [Unknown Error], [Unknown Error], [Unknown Error], ERR!, 400.00, 33, 0, Disabled, \
535.129.03
"""


def test_a100_with_processes() -> None:
    known = {4711: {"user": "ada", "command": "python train.py", "container": "gpusched-0abc-1-0"}}
    reading = parse_gpus(A100, A100_APPS, known)
    assert reading.driver_version == "535.129.03"
    assert reading.error is None
    assert reading.gpus[0] == Gpu(
        index=0, uuid="GPU-5a4b1c22-8a36-0f0e-b3c5-2f2a1d6b7a01", name="NVIDIA A100-SXM4-80GB", memory_total_mib=81920,
        memory_used_mib=41216, utilization_pct=97.0, power_w=352.41, power_limit_w=400.0, temperature_c=64,
        ecc_errors=0, mig_mode=False, processes=(
            GpuProcess(pid=4711, user="ada", command="python train.py", memory_used_mib=40960,
                       container="gpusched-0abc-1-0"),
            GpuProcess(pid=4712),
        ),
    )  # fmt: skip


def test_unknown_figures_are_none_not_zero() -> None:
    mig = parse_gpus(A100).gpus[1]
    assert (mig.utilization_pct, mig.mig_mode, mig.energy_j) == (None, True, None)
    assert mig.mig_error == "slices are read by NVML only"
    assert parse_gpus(A100).gpus[2].ecc_errors == 3


def test_a_figure_beyond_all_gpus_is_unknown() -> None:
    for figure, found in (((1 << 53) - 1, (1 << 53) - 1), (1 << 53, None), ("-1e300", None), ("inf", None), ("nan", None)):
        (gpu,) = parse_gpus(f"0, GPU-a, Tesla V100, {figure}, 0, 0, 42.10, 300.00, 36\n").gpus
        assert (gpu.memory_total_mib, gpu.memory_used_mib) == (found, 0), figure


def test_v100_by_the_short_query() -> None:
    reading = parse_gpus(V100)
    assert [g.memory_used_mib for g in reading.gpus] == [0, 31000]
    assert [(g.ecc_errors, g.mig_mode, g.power_limit_w) for g in reading.gpus] == [(None, None, 300.0)] * 2
    assert reading.driver_version is None


def test_lost_gpus_have_an_error_and_the_others_their_figures() -> None:
    well, lost, broken = parse_gpus(LOST_ROW).gpus
    assert (well.error, well.power_w) == (None, 61.9)
    assert (lost.index, lost.error, lost.memory_total_mib, lost.uuid) == (1, "nvidia-smi: GPU is lost", None, None)
    assert (broken.uuid, broken.error) == ("GPU-cc", "nvidia-smi: Unknown Error")


def test_a_gpu_is_lost_only_where_its_memory_cannot_be_read() -> None:
    """A single figure in error is a figure that is not known."""
    odd = "1, GPU-bb, NVIDIA A100-SXM4-80GB, 81920, 4, 0, [Unknown Error], 400.00, 35, 0, Disabled, 535.129.03\n"
    (gpu,) = parse_gpus(odd).gpus
    assert (gpu.error, gpu.power_w, gpu.memory_total_mib) == (None, None, 81920)
    (gpu,) = parse_gpus(odd.replace("81920", "[N/A]")).gpus
    assert (gpu.error, gpu.memory_total_mib) == ("nvidia-smi: Unknown Error", None)
    (gpu,) = parse_gpus(odd.replace("81920", "[N/A]").replace("[Unknown Error]", "61.0")).gpus
    assert (gpu.error, gpu.power_w) == (None, 61.0)


def test_gpus_come_in_the_order_of_their_numbers() -> None:
    rows = V100.splitlines()
    text = f"{rows[1]}\nUnable to determine the device handle for GPU 2\n{rows[0]}\n"
    reading = parse_gpus(text)
    assert [g.index for g in reading.gpus] == [0, 1, 2]
    assert reading.gpus[1].memory_used_mib == 31000
    assert reading.gpus[2].error == "nvidia-smi: Unable to determine the device handle for GPU 2"


def test_a_gpu_without_handle() -> None:
    text = "Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error\n" + V100
    reading = parse_gpus(text)
    assert [g.index for g in reading.gpus] == [0, 1]
    assert reading.error is not None
    assert "0000:3B:00.0" in reading.error
    numbered = parse_gpus("Unable to determine the device handle for GPU3: 0000:3B:00.0: GPU is lost\n")
    assert "GPU3" in str(numbered.error or numbered.gpus)


def test_complaints_alone() -> None:
    reading = parse_gpus("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
    assert reading.gpus == ()
    assert reading.error is not None
    assert "couldn't communicate" in reading.error
    assert parse_gpus("") == parse_gpus("\n")


def test_lines_that_are_no_rows_are_complaints_the_first_three() -> None:
    reading = parse_gpus("1, 2, 3\nx" + ", 0" * 8 + "\nnvidia-smi: odd\nfourth\n" + V100)
    assert len(reading.gpus) == 2
    assert reading.error == f"nvidia-smi: 1, 2, 3; nvidia-smi: x{', 0' * 8}; nvidia-smi: odd"


def test_odd_lines_of_processes_are_passed_over() -> None:
    apps = "GPU-cc, x, 5\nGPU-cc, 7\nGPU-cc, 8, 90 MiB\nGPU-cc, 9, 1, 2\nGPU-dd, 10, 1\n"
    row = "2, GPU-cc, X, 81920, 0, 0, 61.90, 400.00, 33, 0, Disabled, 535"
    (gpu,) = parse_gpus(row, apps, {8: {"user": "eve"}}).gpus
    assert gpu.processes == (GpuProcess(pid=8, user="eve", memory_used_mib=90),)


def test_any_of_its_first_figures_says_that_a_gpu_is_lost_and_no_later_one() -> None:
    for column, lost in ((1, True), (2, True), (3, True), (4, True), (5, True), (6, True), (7, False), (8, False)):
        fields = "2, GPU-cc, X, [N/A], 0, 0, 61.90, 400.00, 33, 0, Disabled, 535".split(", ")
        fields[column] = "[GPU requires reset]"
        (gpu,) = parse_gpus(", ".join(fields)).gpus
        assert (gpu.error is not None) is lost, column
