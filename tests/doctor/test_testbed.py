"""check and init against real sshds, podman and NVML."""

from pathlib import Path

import pytest

from gpusched.bootstrap import Discovered, NotDiscovered, discover, inventory_text, parse_hosts
from gpusched.bootstrap import write_inventory as write_file
from gpusched.config.inventory import load_inventory
from gpusched.doctor import Finding, examine, worst
from gpusched.errors import UsageError
from gpusched.model.resources import RuntimeName, Settings
from tests.doctor.cdi import BREAK_CDI, MEND_CDI, MISSING
from tests.doctor.conftest import WriteInventory, of
from tests.testbed import Testbed


def test_a_healthy_cluster(testbed: Testbed, write_inventory: WriteInventory, tmp_path: Path) -> None:
    reported: list[Finding] = []
    findings = examine(write_inventory(), tmp_path / "state", on_findings=reported.extend)
    assert sorted(reported, key=repr) == sorted(findings, key=repr)
    for node in testbed.nodes:
        found = of(findings, node.name)
        assert not of(findings, node.name, "fail", "warn"), found
        assert {"ssh", "nvml", "gpus", "clock", "runtime", "disk"} <= set(found)
        assert found["gpus"].message == f"8 {node.model.name}"
        assert found["ssh"].message == "logged in as root"
        assert found["runtime"].message.startswith("podman ")
    assert worst(findings) == "ok"
    assert not (tmp_path / "state").exists()


def test_a_container_is_started_as_a_jobs_would_be(
    testbed: Testbed, write_inventory: WriteInventory, tmp_path: Path
) -> None:
    no_file, no_init, busy, no_image = testbed.nodes
    no_file.run(["sh", "-c", BREAK_CDI])
    no_init.run(["sed", "-i.bak", "s#^init_path.*#init_path = '/nope'#", "/etc/containers/containers.conf"])
    busy.nvml_set({f"gpu{i}.mem_used": 8 << 30 for i in range(8)})
    no_image.install_script(
        "podman", '#!/bin/sh\ncase $1 in inspect) exit 1 ;; images) exit 0 ;; esac\nexec /usr/bin/podman "$@"\n'
    )
    try:
        findings = examine(write_inventory(), tmp_path / "state")
        left = [n.run(["/usr/bin/podman", "ps", "-aq"]).stdout for n in testbed.nodes]
    finally:
        no_file.run(["sh", "-c", MEND_CDI])
        no_init.run(["sh", "-c", "mv /etc/containers/containers.conf.bak /etc/containers/containers.conf"])
    assert MISSING in of(findings, no_file.name, "fail")["container"].message
    assert "nvidia-ctk cdi generate" in of(findings, no_file.name)["container"].hint
    assert "container-init binary not found" in of(findings, no_init.name, "fail")["container"].message
    assert of(findings, busy.name, "ok")["container"].message == "not tried: no GPU is free now"
    assert "no image on the node yet" in of(findings, no_image.name, "ok")["container"].message
    assert left == [""] * 4
    assert of(examine(write_inventory(), tmp_path / "state"), no_file.name, "ok")["container"].message.startswith(
        "started one with GPU "
    )


def test_only_some_nodes(testbed: Testbed, write_inventory: WriteInventory, tmp_path: Path) -> None:
    path = write_inventory()
    subjects = {f.subject for f in examine(path, tmp_path, nodes=["dgx002"])}
    assert subjects & {n.name for n in testbed.nodes} == {"dgx002"}
    with pytest.raises(UsageError, match="no node named dgx9"):
        examine(path, tmp_path, nodes=["dgx9"])


def test_nodes_that_cannot_be_asked(testbed: Testbed, write_inventory: WriteInventory, tmp_path: Path) -> None:
    testbed.node("dgx001").stop_sshd()
    testbed.node("dgx002").new_host_key()
    testbed.node("dgx003").cut()
    lines = testbed.known_hosts.read_text().splitlines(keepends=True)
    testbed.known_hosts.write_text("".join(line for line in lines if "dgx004" not in line))
    try:
        findings = examine(write_inventory(), tmp_path)
    finally:
        testbed.known_hosts.write_text("".join(lines))
    assert set(of(findings, "dgx001", "fail")) == {"ssh"}
    assert set(of(findings, "dgx003", "fail")) == {"ssh"}
    assert of(findings, "dgx001")["ssh"].message.startswith("nothing is listening on "), "its name stands beside it"
    changed, unknown = of(findings, "dgx002")["host key"], of(findings, "dgx004")["host key"]
    assert "CHANGED" in changed.message
    assert "SHA256:" in unknown.message
    assert "ssh-keyscan" in unknown.hint
    assert worst(findings) == "fail"


def test_a_wrong_key(testbed: Testbed, write_inventory: WriteInventory, tmp_path: Path) -> None:
    path = write_inventory("dgx001")
    path.write_text(path.read_text().replace("user: root", "user: nobody"))
    assert set(of(examine(path, tmp_path), "dgx001", "fail")) == {"login"}


def test_sick_gpus(testbed: Testbed, write_inventory: WriteInventory, tmp_path: Path) -> None:
    lost, odd, few, none = testbed.nodes
    lost.nvml_set({"gpu3.error": 15, "gpu1.mig": 1})
    odd.nvml_set({"gpu2.ecc.1.0": 7})
    few.nvml_set(count=6)
    none.hide_nvml()
    findings = examine(write_inventory(gpu_type="A100"), tmp_path)
    assert of(findings, lost.name, "fail")["gpus"].message.startswith("GPU 3 is lost: ")
    assert of(findings, lost.name, "fail")["mig"].message.startswith("GPU 1 is in MIG mode")
    assert of(findings, odd.name, "fail")["ecc"].message == "GPU 2 has 7 uncorrected memory errors"
    assert of(findings, few.name, "fail")["gpus"].message == "GPU 6, 7 are declared but missing (6 found)"
    assert set(of(findings, none.name, "fail")) == {"nvml"}
    assert "driver" in of(findings, none.name)["nvml"].hint
    assert of(findings, odd.name, "warn")["gpu type"].message.endswith("the driver reports Tesla V100-SXM2-32GB")


def test_declared_too_much(testbed: Testbed, write_inventory: WriteInventory, tmp_path: Path) -> None:
    findings = examine(write_inventory("dgx001", cores=9999, memory="999T", gpus=4), tmp_path)
    assert set(of(findings, "dgx001", "fail")) == {"cores", "memory"}
    assert of(findings, "dgx001", "warn")["gpus"].message == "4 declared, 8 found"


def test_a_noisy_shell_without_python(testbed: Testbed, write_inventory: WriteInventory, tmp_path: Path) -> None:
    node = testbed.node("dgx001")
    (node.disk / "home/.bashrc").write_text("echo Welcome to the cluster\n")
    node.hide("python3")
    findings = examine(write_inventory(node.name), tmp_path)
    assert of(findings, node.name, "warn")["shell"].message == 'logging in prints "Welcome to the cluster"'
    assert "python3" in of(findings, node.name, "warn")


@pytest.mark.slow
def test_runtimes(testbed: Testbed, write_inventory: WriteInventory, tmp_path: Path) -> None:
    no_cdi, no_podman, hung, broken = testbed.nodes
    no_cdi.run(["mv", "/etc/cdi", "/etc/cdi.away"])
    no_podman.hide("podman")
    hung.hang_runtime("podman")
    broken.install_script("podman", "#!/bin/sh\necho 'boom: $(no)' >&2\nexit 125\n")
    try:
        findings = examine(write_inventory(), tmp_path)
    finally:
        no_cdi.run(["mv", "/etc/cdi.away", "/etc/cdi"])
        hung.unhang_runtime("podman")
    assert "nvidia-ctk cdi generate" in of(findings, no_cdi.name, "fail")["cdi"].hint
    assert of(findings, no_podman.name, "fail")["runtime"].message == "podman is not installed"
    assert of(findings, hung.name, "fail")["runtime"].message == "podman does not work: no answer within 10 s"
    assert of(findings, broken.name, "fail")["runtime"].message == "podman does not work: boom: $(no)"


def test_process_runtime(testbed: Testbed, write_inventory: WriteInventory, tmp_path: Path) -> None:
    findings = examine(write_inventory("dgx001", runtime="process"), tmp_path)
    assert not of(findings, "dgx001", "fail", "warn")


def test_a_broken_inventory_is_all_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text("settings: {tick: 5}\npartitions: {A: {}}\n")
    findings = of(examine(path, tmp_path / "state"), str(path), "fail")
    assert len([f for f in examine(path, tmp_path / "state") if f.status == "fail"]) == 2
    assert set(findings) == {"file"}


# init


def settings_of(testbed: Testbed) -> Settings:
    return Settings(known_hosts=str(testbed.known_hosts), connect_timeout_s=3, probe_timeout_s=10)


def test_init_round_trip(testbed: Testbed, tmp_path: Path) -> None:
    testbed.node("dgx004").cut()
    key, user = str(testbed.identity), "root"
    typed = [testbed.nodes[0].address, f"root@{testbed.nodes[1].address}", f"{testbed.nodes[2].address}:22"]
    hosts = parse_hosts([*typed, testbed.nodes[3].address])
    reported = []
    outcomes = discover(hosts, settings_of(testbed), user=user, key=key, on_progress=lambda h, o: reported.append(h))
    assert {h.typed for h in reported} == {h.typed for h in hosts}
    assert isinstance(outcomes[3], NotDiscovered)
    path = tmp_path / "inventory.yaml"
    write_file(path, inventory_text(outcomes, user=user, key=key))
    inventory = load_inventory(path)
    assert {p.name: [n.name for n in p.nodes] for p in inventory.partitions} == {
        "A100": ["dgx001", "dgx003"],
        "V100": ["dgx002"],
    }
    for node in inventory.nodes:
        assert (node.gpus, node.runtime, node.user, node.key) == (8, RuntimeName.PODMAN, user, key)
        assert node.rated_power_w is not None
    a100 = inventory.partition("A100")
    assert a100 is not None
    assert [(f.name, f.gpus) for f in a100.flavors][-2:] == [("l-A100", 8), ("f-A100", 16)]
    assert f"# - {testbed.nodes[3].address}" in path.read_text()
    assert "is an estimate" in path.read_text()
    with pytest.raises(UsageError, match="already exists"):
        write_file(path, "partitions: {}\n")
    assert load_inventory(path) == inventory
    assert [p.name for p in tmp_path.iterdir()] == ["inventory.yaml"]


def test_init_passes_check(testbed: Testbed, tmp_path: Path) -> None:
    outcomes = discover(
        parse_hosts([n.address for n in testbed.nodes]), settings_of(testbed), user="root", key=str(testbed.identity)
    )
    text = inventory_text(outcomes, user="root", key=str(testbed.identity))
    path = tmp_path / "inventory.yaml"
    write_file(path, text.replace("settings:\n", f"settings:\n  known_hosts: {testbed.known_hosts}\n"))
    findings = examine(path, tmp_path / "state")
    assert worst(findings) == "ok", [f for f in findings if f.status != "ok"]


def test_init_sees_docker(testbed: Testbed) -> None:
    node = testbed.node("dgx002")
    node.start_docker()
    node.hide("podman")
    (outcome,) = discover(parse_hosts([f"root@{node.address}"]), settings_of(testbed), key=str(testbed.identity))
    node.stop_docker()
    assert isinstance(outcome, Discovered)
    assert outcome.runtime is RuntimeName.DOCKER
