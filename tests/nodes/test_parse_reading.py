"""Answers of the payload, whatever stands around them."""

import msgspec
import pytest

from gpusched.model.readings import ContainerReading, KernelLog, NodeReading, XidMessage
from gpusched.model.slices import SliceProfile
from gpusched.nodes.parse_reading import find_answer, parse_reading, reading_of_sections, split_sections
from tests.nodes.answers import ANSWER, SECTIONS

NOISE = b"Welcome to dgx001!\n\x1b[31mplease read the motd\n"


def line(answer: dict[str, object]) -> bytes:
    return NOISE + b"\n@gpusched-probe@ " + msgspec.json.encode(answer) + b"\nlogout\n"


def reading_of(answer: dict[str, object]) -> NodeReading:
    found = find_answer(line(answer))
    assert found is not None
    return parse_reading("n1", found, sent=999.0, received=1001.0)


def test_a_whole_answer_among_noise() -> None:
    reading = reading_of(ANSWER)
    assert (reading.node, reading.time, reading.boot_id, reading.cores) == ("n1", 1001.0, "b-1", 128)
    assert reading.gpus[0].links == {1: 1250}
    assert reading.gpus[0].utilization_pct is None
    assert reading.gpus[1].error == "NVML: GPU is lost"
    assert reading.containers == (
        ContainerReading(name="gpusched-0abc-1-0", phase="exited", exit_code=3, cluster_id="c"),
    )


def test_clock_skew_halves_the_round_trip() -> None:
    assert reading_of(ANSWER).clock_skew_s == pytest.approx(0.6), "a clock that is ahead counts upwards"
    assert reading_of({**ANSWER, "clock": [990.5, 990.7]}).clock_skew_s == pytest.approx(-9.4)


def test_no_answer() -> None:
    assert find_answer(NOISE) is None
    assert find_answer(b"@gpusched-probe@ {}") is None  # only at the beginning of a line


@pytest.mark.parametrize("text", [b"{", b"[]", b"nonsense"])
def test_broken_answer(text: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        find_answer(b"\n@gpusched-probe@ " + text + b"\n")


@pytest.mark.parametrize("change", [{"gpus": [{}]}, {"containers": [{"name": "x", "phase": "odd"}]}, {"cores": "many"}])
def test_answer_that_breaks_the_contract(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        reading_of({**ANSWER, **change})


def test_answer_by_nvidia_smi_is_parsed_here() -> None:
    smi = {
        "smi_gpus": "0, GPU-1, Tesla V100-SXM2-32GB, 32510, 31000, 100, 287.33, 300.00, 71",
        "smi_apps": "GPU-1, 99, 30990",
        "processes": {"99": {"user": "bob", "command": "sh", "container": None}},
    }
    reading = reading_of({**ANSWER, **smi, "source": "nvidia-smi", "gpus": []})
    assert reading.source == "nvidia-smi"
    assert reading.gpus[0].processes[0].user == "bob"
    failed = reading_of({**ANSWER, "source": "nvidia-smi", "gpus": [], "smi_gpus": "NVIDIA-SMI has failed"})
    assert (failed.source, failed.gpu_error) == ("none", "nvidia-smi: NVIDIA-SMI has failed")


def test_sections_of_a_node_without_python() -> None:
    sections = split_sections(SECTIONS)
    assert sections is not None
    reading = reading_of_sections("n2", sections, sent=999.0, received=1001.0)
    assert (reading.boot_id, reading.cores, reading.memory_total_mib, reading.load1) == ("b-2", 40, 128000, 0.25)
    assert reading.disk_free_mib == 40000, "what is available: not what is used, nor what root may still have"
    assert reading.clock_skew_s == 0.5
    ahead = reading_of_sections("n2", {**sections, "clock": "1009"}, sent=999.0, received=1001.0)
    assert ahead.clock_skew_s == 9.5
    gpu = reading.gpus[0]
    assert (gpu.memory_used_mib, gpu.processes[0].user, gpu.processes[0].container) == (31000, "bob", None)
    assert gpu.processes[0].command == "python train.py --lr 1"
    assert reading.containers is None
    assert split_sections("no such thing") is None


def test_sections_without_anything_to_read() -> None:
    sections = split_sections("\n@gpusched-sections@\n\n@@cores\n\n@@df\n")
    assert sections is not None
    reading = reading_of_sections("n2", sections, sent=0, received=1)
    assert (reading.source, reading.cores, reading.clock_skew_s) == ("none", None, None)
    assert "neither python3 nor nvidia-smi" in str(reading.gpu_error)


def test_odd_lines_of_a_node_without_python_are_unknown_not_wrong() -> None:
    sections = split_sections(SECTIONS)
    assert sections is not None
    df = "Filesystem 1024-blocks Used Available Capacity Mounted on"

    def odd(**changes: str) -> NodeReading:
        return reading_of_sections("n2", {**sections, **changes}, sent=999.0, received=1001.0)

    assert odd(df=df).disk_free_mib is None, "no line but the heading"
    assert odd(df=f"{df}\n/dev/sda1 1 2 4096").disk_free_mib is None, "broken off"
    assert odd(df=f"{df}\n/dev/sda1 1 2 4096 5%  /").disk_free_mib == 4
    assert odd(df=f"{df}\n/dev/sda1 1 2 - 5%  /").disk_free_mib is None
    assert [odd(loadavg=text).load1 for text in ("", "x 1 1", "1.2.3", "7 1 1")] == [None, None, None, 7.0]
    memory = odd(meminfo="MemTotal:\nno colon\nMemAvailable:  2047 kB")
    assert (memory.memory_total_mib, memory.memory_available_mib) == (None, 1)
    assert (odd(boot_id="").boot_id, odd(hostname="").hostname, odd(cores="many").cores) == (None, None, None)
    found = odd(processes="7\tbroken\n99\t\tbox\t\x1bsh x").gpus[0].processes[0]
    assert (found.user, found.container, found.command) == (None, "box", "?sh x")
    assert odd(processes="99\tbob\t").gpus[0].processes[0].user is None
    none = odd(smi_gpus="NVIDIA-SMI has failed")
    assert (none.source, none.gpu_error) == ("none", "nvidia-smi: NVIDIA-SMI has failed")
    assert odd().source == "nvidia-smi"


def test_the_last_answer_counts() -> None:
    """Start-up files may print anything, an older answer too."""
    assert find_answer(line({"cores": 1}) + line({"cores": 2})) == {"cores": 2}
    found = split_sections(SECTIONS + SECTIONS.replace("b-2", "b-3"))
    assert found is not None
    assert found["boot_id"] == "b-3"


def test_each_gpu_that_mig_may_be_turned_on_of_has_its_models_profiles() -> None:
    sent = [{"name": "1g.5gb", "compute": 1, "memory_units": 1}, {"name": "7g.40gb", "compute": 7, "memory_units": 8}]
    gpus = [
        {"index": 0, "name": "A100", "mig_mode": True, "mig_profiles": sent},
        {"index": 1, "name": "A100", "mig_mode": False},
        {"index": 2, "name": "V100"},
        {"index": 3, "name": "A100", "mig_mode": False, "error": "lost"},
        {"index": 4, "name": "H100", "mig_mode": False},
    ]
    reading = reading_of({**ANSWER, "gpus": gpus})
    one, seven = (
        SliceProfile(name=p["name"], compute=p["compute"], memory_units=p["memory_units"], gpu_compute=7,
                     gpu_memory_units=8) for p in sent
    )  # type: ignore[arg-type]  # fmt: skip
    assert [gpu.mig_profiles for gpu in reading.gpus] == [(one, seven), (one, seven), (), (), ()]
    assert [gpu.mig_profiles for gpu in reading_of({**ANSWER, "gpus": gpus[1:3]}).gpus] == [(), ()]


@pytest.mark.parametrize(
    "odd", [None, 7, {"gpus": 7}, {"source": "kernel"}, {"source": "k", "now_us": 1, "messages": 7}]
)
def test_what_sysfs_and_the_kernels_log_hold_fails_no_reading(odd: object) -> None:
    reading = reading_of({**ANSWER, "wiring": odd, "kernel": odd})
    assert (reading.kernel, reading.boot_id) == (None, "b-1")
    assert reading.wiring is None or not reading.wiring.gpus


def test_messages_of_the_kernel_and_events_of_nvml_are_read_of_an_answer() -> None:
    kernel = {
        "source": "kernel", "now_us": 99_000_000,
        "messages": [[7_000_000, "NVRM: Xid (PCI:0000:3b:00): 31, pid=47, name=sh, Ch 8"], [8_000_000, "eth0: up"]],
        "events": [[2_000_000, "NVRM: Xid (PCI:0000:3B:00): 31,"], [1_999_999, "NVRM: Xid (PCI:0000:3B:00): 31,"],
                   [12_000_000, "NVRM: Xid (3b:00): 31,"], [12_000_001, "NVRM: Xid (3b:00): 31,"],
                   [7_000_000, "NVRM: Xid (PCI:0000:3b:00): 32,"], [7_000_000, "NVRM: Xid (PCI:0000:3c:00): 31,"]],
    }  # fmt: skip
    found = reading_of({**ANSWER, "kernel": kernel}).kernel
    xid = XidMessage(at_us=7_000_000, number=31, bus="0000:3b:00", pid=47, process="sh")
    assert found == KernelLog(
        source="kernel", now_us=99_000_000, messages=(
            XidMessage(at_us=1_999_999, number=31, bus="0000:3b:00"), xid,
            XidMessage(at_us=7_000_000, number=32, bus="0000:3b:00"),
            XidMessage(at_us=7_000_000, number=31, bus="0000:3c:00"),
            XidMessage(at_us=12_000_001, number=31, bus="0000:3b:00"),
        ),
    ), "what is within five seconds of the same message of the log is that one"  # fmt: skip
