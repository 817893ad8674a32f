"""The launch of each rank."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.cluster.base import Operation
from gpusched.cluster.requests import (
    MASTER_PORTS,
    environment,
    hostfile,
    launch_request,
    master_port,
)
from gpusched.controller.launcher import Launcher
from gpusched.controller.secretfiles import SecretFiles
from gpusched.errors import UsageError
from gpusched.model.images import TRANSPORTS, image_error
from gpusched.model.jobs import JobRecord, JobState, Mount
from gpusched.model.outputs import expand_error, expand_output
from gpusched.model.readings import Gpu, NodeReading
from gpusched.model.resources import Inventory, RuntimeName
from gpusched.model.slices import MigSlice
from gpusched.queue.store import NodeRecord, RankRecord, Store
from tests import builders
from tests.builders import spec
from tests.controller.imagined import inventory

ID = "0123456789a"


def job(nodes: int = 1, gpus: tuple[int, ...] = (2, 3), **changes: Any) -> JobRecord:
    fields = {k: changes.pop(k) for k in ("array_id", "array_index", "attempt") if k in changes}
    job_id = changes.pop("id", ID)
    return builders.job(
        job_id, JobState.STARTING, spec=spec(nodes=nodes, gpus_per_node=len(gpus), **changes), master_port=23456,
        allocation=builders.allocation(job_id, {f"n{r}": gpus for r in range(nodes)}, cores=8, memory_mib=4096),
        **{"attempt": 2} | fields,
    )  # fmt: skip


def env(of: JobRecord, rank: int = 0, declared: Inventory | None = None) -> dict[str, str]:
    assert of.allocation is not None
    return environment(of, of.allocation.parts[rank], declared or inventory())


def with_node(name: str, **changes: Any) -> Inventory:
    declared = inventory()
    (partition,) = declared.partitions
    nodes = tuple(msgspec.structs.replace(n, **changes) if n.name == name else n for n in partition.nodes)
    return msgspec.structs.replace(declared, partitions=(msgspec.structs.replace(partition, nodes=nodes),))


def test_the_environment_of_a_gangs_rank() -> None:
    seen = env(job(nodes=2), 1)
    expected = {
        "WORLD_SIZE": "2", "RANK": "1", "NODE_RANK": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "n0",
        "MASTER_PORT": "23456", "GPUSCHED_NODELIST": "n0,n1", "GPUSCHED_NODE": "n1", "GPUSCHED_GPUS": "2,3",
        "GPUSCHED_ATTEMPT": "2", "SLURM_RESTART_COUNT": "1", "SLURM_PROCID": "1", "OMP_NUM_THREADS": "4",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }  # fmt: skip
    assert {k: seen[k] for k in expected} == expected
    assert "SLURM_ARRAY_TASK_ID" not in seen


def test_a_container_counts_its_gpus_from_0_a_process_by_nvml() -> None:
    assert env(job())["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert env(job(), declared=with_node("n0", runtime=RuntimeName.PROCESS))["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert env(job(gpus=()))["CUDA_VISIBLE_DEVICES"] == "", "no GPU asked for, none seen"


def test_slices_are_seen_by_uuid_wherever_the_job_runs(launcher: Launcher, tmp_path: Path) -> None:
    of, declared = job(gpus=(3004, 3000)), with_node("n0", runtime=RuntimeName.PROCESS)
    assert launches(launcher, of, declared) == []
    assert launcher.errors == {(ID, 2, 0): "n0 has no slice 2:slice@4 any more"}
    slices = tuple(
        MigSlice(gpu=2, start=start, profile=name, uuid=f"MIG-{start}", gi=gi, ci=0, device=gi)
        for gi, start, name in ((0, 0, "2g.20gb"), (1, 4, "3g.40gb"))
    )
    reading = NodeReading(node="n0", time=0.0, gpus=(Gpu(index=2, mig_mode=True, slices=slices),))
    with contextlib.closing(Store.create_or_open(tmp_path)) as store:
        store.put_nodes([NodeRecord(name="n0", reading=reading)])
    for inv in (inventory(), declared):
        (operation,) = launches(launcher, of, inv)
        assert operation.request is not None
        assert operation.request.slices == slices[::-1]
        assert operation.request.env["CUDA_VISIBLE_DEVICES"] == "MIG-4,MIG-0"
        assert operation.request.env["GPUSCHED_GPUS"] == "2:3g.40gb@4,2:2g.20gb@0"


def test_the_jobs_own_variables_override_defaults_but_not_its_identity() -> None:
    own = {"OMP_NUM_THREADS": "1", "MASTER_PORT": "1", "RANK": "9", "CUDA_VISIBLE_DEVICES": "7", "X": "$(y)\n'"}
    seen = env(job(env=own))
    assert (seen["OMP_NUM_THREADS"], seen["MASTER_PORT"], seen["X"]) == ("1", "1", "$(y)\n'")
    assert (seen["RANK"], seen["CUDA_VISIBLE_DEVICES"]) == ("0", "0,1")


def test_an_array_task_knows_which_it_is() -> None:
    seen = env(job(id=f"{ID}_7", array_id=ID, array_index=7))
    assert (seen["SLURM_ARRAY_TASK_ID"], seen["GPUSCHED_ARRAY_ID"], seen["GPUSCHED_JOB_ID"]) == ("7", ID, f"{ID}_7")


def test_a_script_has_slurms_variables_and_is_no_rank() -> None:
    asked = {"tasks_per_node": 2, "submit_dir": "/home/alice", "array_shape": (5, 0, 8, 2), "gpus_per_task": 1}
    plain, script = env(job(2), 1), env(job(2, script="#!/bin/sh", **asked), 1)
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"} <= plain.keys() - script.keys()
    slurm = {
        "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NPROCS": "4", "SLURM_JOB_GPUS": "2,3", "SLURM_GPUS": "4",
        "SLURM_CPUS_PER_TASK": "4", "SLURM_SUBMIT_DIR": "/home/alice", "SLURM_GPUS_PER_TASK": "1",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    }  # fmt: skip
    assert slurm.items() <= script.items()
    assert not slurm.keys() & plain.keys()
    assert script["SLURM_NTASKS"] == "4"
    assert slurm.keys() - env(job(2, slurm_env=True), 1).keys() == {"SLURM_SUBMIT_DIR", "SLURM_GPUS_PER_TASK"}
    by_core = env(job(memory_mib_per_cpu=512, slurm_env=True))
    assert (by_core["SLURM_MEM_PER_CPU"], "SLURM_MEM_PER_NODE" in by_core) == ("512", False), "one of the two"
    assert (script["SLURM_MEM_PER_NODE"], "SLURM_MEM_PER_CPU" in script) == ("4096", False)
    task = env(job(array_id="a", array_index=4, **asked))
    assert [task[f"SLURM_ARRAY_TASK_{n}"] for n in ("ID", "COUNT", "MIN", "MAX", "STEP")] == ["4", "5", "0", "8", "2"]


def test_the_fast_network_is_used_where_it_is_declared() -> None:
    declared = with_node("n0", fabric_address="10.9.0.1")
    assert env(job(nodes=2), 1, declared)["MASTER_ADDR"] == "10.9.0.1"
    assert hostfile(job(nodes=2), declared) == "10.9.0.1 slots=2\nn1 slots=2\n"
    assert hostfile(job(nodes=2, gpus=()), inventory()) == "n0 slots=1\nn1 slots=1\n"
    assert env(job(), declared=with_node("n0", transport="local"))["MASTER_ADDR"] == "127.0.0.1"


def test_gangs_are_held_share_the_hosts_network_and_get_a_hostfile() -> None:
    declared = msgspec.structs.replace(
        inventory(), settings=msgspec.structs.replace(inventory().settings, network="bridge")
    )
    for nodes, expected in ((1, ("bridge", False, None)), (2, ("host", True, "n0 slots=2\nn1 slots=2\n"))):
        of = job(nodes=nodes)
        assert of.allocation is not None
        request = launch_request(
            of, of.allocation.parts[0], declared, "c", secrets={"A": "b"}, run_as=None, mount_anything=True
        )
        assert (request.network, request.hold, request.hostfile) == expected
        assert request.name == f"gpusched-{ID}-2-0"
        assert "A" not in request.env


@pytest.mark.parametrize(
    ("path", "expanded"),
    [
        (None, None), ("/o", "/o"), ("/o/%j-%x.%u.%A.%a", f"/o/{ID}-j.alice.{ID}.0"), ("/o/100%", "/o/100%"),
        ("/o/%%j", "/o/%j"), ("/o/%z%N", "/o/%zn0"), ("/%n%t", "/00"), ("/é %j$(x)", f"/é {ID}$(x)"),
    ],
)  # fmt: skip
def test_output_patterns(path: str | None, expanded: str | None) -> None:
    assert expand_output(job(output=path), 0, "n0") == expanded


def test_a_scripts_output_is_one_file() -> None:
    of = job(2, script="#!/bin/sh", output="/out-%j", error="/err-%t")
    assert [expand_output(of, rank, f"n{rank}") for rank in (0, 1)] == [f"/out-{ID}", None]
    assert [expand_error(of, rank, f"n{rank}") for rank in (0, 1)] == ["/err-0", None]
    assert expand_error(job(output="/o-%j", error=f"/o-{ID}"), 0, "n0") is None, "both in one, in their order"
    assert expand_error(job(2, error="/e"), 1, "n1") == "/e.1"


def test_ranks_do_not_write_into_each_others_files() -> None:
    gang = job(nodes=2, output="/o/%j")
    assert [expand_output(gang, r, f"n{r}") for r in (0, 1)] == [f"/o/{ID}.0", f"/o/{ID}.1"]
    assert expand_output(job(nodes=2, output="/o/%N"), 1, "n1") == "/o/n1"
    assert expand_output(job(output="/o/%x", name="a/../b"), 0, "n0") == "/o/a_.._b"
    task = job(id=f"{ID}_3", array_id=ID, array_index=3, output="/o/%A_%a")
    assert expand_output(task, 0, "n0") == f"/o/{ID}_3"


def test_master_ports_are_steady_and_not_shared() -> None:
    first = master_port(ID, ())
    assert first == master_port(ID, ())
    assert first in MASTER_PORTS
    assert master_port(ID, {first}) in set(MASTER_PORTS) - {first}
    assert master_port(ID, set(MASTER_PORTS)) == first  # better than none


def test_a_launch_that_the_inventory_now_forbids_is_not_made() -> None:
    settings = msgspec.structs.replace(inventory().settings, allowed_mounts=("/data",), capabilities=("IPC_LOCK",))
    of = job(image="oci-archive:/data/x.tar")
    assert of.allocation is not None
    part = of.allocation.parts[0]
    for transports in ((), ("oci-archive",)):
        declared = msgspec.structs.replace(
            inventory(), settings=msgspec.structs.replace(settings, image_transports=transports)
        )
        if not transports:
            with pytest.raises(UsageError, match=r"settings\.image_transports"):
                launch_request(of, part, declared, "c", secrets={}, run_as=(1, 1), mount_anything=False)
            continue
        request = launch_request(of, part, declared, "c", secrets={}, run_as=(1, 1), mount_anything=False)
        assert (request.mounts_beneath, request.capabilities) == (("/data",), ("IPC_LOCK",))
        assert launch_request(
            of, part, declared, "c", secrets={}, run_as=None, mount_anything=True
        ).mounts_beneath is None  # fmt: skip
    file = job(image="/home/alice/my.sif")
    declared = with_node("n0", runtime=RuntimeName.APPTAINER)
    assert launch_request(file, part, declared, "c", secrets={}, run_as=(1, 1), mount_anything=False).image
    with pytest.raises(UsageError, match="is not a registry image name"):
        launch_request(file, part, inventory(), "c", secrets={}, run_as=(1, 1), mount_anything=False)


GOOD_IMAGES = (
    "busybox", "busybox:1", "docker.io/library/busybox:1.36-glibc", "localhost/gs/busybox:1",
    "nvcr.io/nvidia/pytorch:24.01-py3", "registry:5000/a/b__c-d.e:V_1", "[::1]:5000/x", "127.0.0.1:5000/x",
    "docker://quay.io/a/b:c", "docker:dind",
    "a@sha256:" + "0" * 64, "reg.example/a:b@sha256:" + "f" * 64, "0123abcd0123", "docker.io/library/oci:latest",
)  # fmt: skip
BAD_IMAGES = (
    "docker-archive:/etc/shadow", "docker-archive:x", "oci:/srv", "oci:latest", "dir:/root", "oci-archive:/x:y",
    "containers-storage:[overlay@/var/lib]x", "docker-daemon:busybox:1", "sif:/x", "tarball:/x", "ostree:x@/y",
    "/root/x.tar", "./x", "../x", "x/../../y", "docker://", "docker:///etc", "docker:/x", "http://x/y", "a:b:c", "x y",
    "Upper", "x:", "x@sha256:12", "-x", "",
)  # fmt: skip


@pytest.mark.parametrize("image", GOOD_IMAGES)
def test_names_in_registries_are_images(image: str) -> None:
    assert image_error(image, [RuntimeName.PODMAN, RuntimeName.DOCKER], ()) is None


@pytest.mark.parametrize("image", BAD_IMAGES)
def test_an_image_that_would_open_files_of_the_node_is_refused(image: str) -> None:
    for runtimes in ([RuntimeName.PODMAN], [RuntimeName.DOCKER, RuntimeName.APPTAINER]):
        assert image_error(image, runtimes, ("atomic",))
    assert image_error(image, [RuntimeName.APPTAINER], ()) is None, "apptainer opens it with the user's rights"
    transport = image.partition(":")[0]
    assert (image_error(image, [RuntimeName.PODMAN], TRANSPORTS) is None) == (transport in TRANSPORTS)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    store = Store.create_or_open(tmp_path)
    yield Launcher(store, SecretFiles(tmp_path), "c")
    store.close()


def launches(launcher: Launcher, of: JobRecord, declared: Inventory | None = None) -> list[Operation]:
    assert of.allocation is not None
    ranks = [
        RankRecord(job_id=of.id, attempt=of.attempt, rank=part.rank, node=part.node, runtime="podman")
        for part in of.allocation.parts
    ]
    return launcher.launch_operations(declared or inventory(), of, ranks)


def test_each_rank_is_launched_as_its_user(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = pwd.getpwnam("daemon")
    for own, run_as in ((daemon.pw_uid, None), (daemon.pw_uid - 1, (1, 1)), (daemon.pw_uid + 1, (1, 1))):
        monkeypatch.setattr(os, "getuid", lambda own=own: own)
        found = launches(launcher, msgspec.structs.replace(job(nodes=2), uid=daemon.pw_uid))
        assert [(w.verb, w.node, w.rank.rank) for w in found] == [("launch", "n0", 0), ("launch", "n1", 1)]
        expected = run_as and (daemon.pw_uid, daemon.pw_gid)
        assert [w.request.run_as for w in found if w.request] == [expected] * 2
    assert launches(launcher, msgspec.structs.replace(job(), uid=64077)) == []
    assert launcher.errors == {(ID, 2, 0): "refused: user id 64077 has no name here, so its group is unknown"}


def test_in_a_shared_installation_jobs_run_as_root_only_if_the_inventory_allows_it(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = pwd.getpwnam("daemon")
    monkeypatch.setattr(os, "getuid", lambda: daemon.pw_uid)
    replace, roots, own = msgspec.structs.replace, msgspec.structs.replace(job(), uid=0), daemon.pw_uid

    def declared(root_jobs: bool = False, shared: bool = True, **node: str) -> Inventory:
        plain = inventory()
        settings = replace(plain.settings, shared=shared, root_jobs=root_jobs)
        nodes = tuple(replace(one, **node) for one in plain.nodes)
        partitions = tuple(replace(one, nodes=nodes) for one in plain.partitions)
        return replace(plain, settings=settings, partitions=partitions)

    assert launches(launcher, roots, declared()) == []
    assert launcher.errors == {(ID, 2, 0): "refused: jobs of root need settings.root_jobs in inventory.yaml"}
    for allowed in (declared(root_jobs=True), declared(shared=False)):
        (found,) = launches(launcher, roots, allowed)
        assert found.request is not None
        assert (found.request.run_as, found.request.allow_root) == ((0, 0), True)
    # The controller's own user: as itself also on nodes that are entered as root.
    expected = {"user": (own, daemon.pw_gid), "become": (own, daemon.pw_gid), "key": None}
    for key, run_as in expected.items():
        (found,) = launches(launcher, replace(job(), uid=own), declared(**{key: {"become": "sudo"}.get(key, "root")}))
        assert found.request is not None
        assert (found.request.run_as, found.request.allow_root) == (run_as, False)


def test_the_nodes_of_a_script_have_one_key_and_one_node_has_none(launcher: Launcher, tmp_path: Path) -> None:
    of = job(2, script="#!/bin/sh\necho hi", signal="USR1", signal_before_s=60, signal_batch=True)
    spools = [o.request.spool for _ in range(2) for o in launches(launcher, of) if o.request is not None]
    assert {s["script"] for s in spools} == {"#!/bin/sh\necho hi"}
    assert len({s["key.pem"] for s in spools}) == 1, "also of those that are launched again"
    assert [msgspec.json.decode(s["settings.json"])["rank"] for s in spools] == [0, 1, 0, 1]
    assert "warning=USR1\nwarned=script\n" in spools[0]["settings"]
    key = next(tmp_path.rglob("*.pem"))
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    [alone] = [o.request for o in launches(launcher, job(script="#!/bin/sh")) if o.request is not None]
    assert "key.pem" not in alone.spool
    assert all(o.request is not None and o.request.spool == {} for o in launches(launcher, job(2)))


def test_only_presently_trusted_users_mount_anything(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2)
    of = job(mounts=(Mount("/etc", "/mnt"),))
    admins = msgspec.structs.replace(inventory().settings, admins=("alice",))
    trusting = msgspec.structs.replace(inventory(), settings=admins)
    for uid, declared, beneath in ((0, None, None), (2, None, None), (1, None, ()), (3, None, ()), (1, trusting, None)):
        (operation,) = launches(launcher, msgspec.structs.replace(of, uid=uid), declared)
        assert operation.request is not None
        assert operation.request.mounts_beneath == beneath


def test_a_failed_launch_shows_its_error_until_its_attempt_is_over(launcher: Launcher, tmp_path: Path) -> None:
    secret = job(secret_names=("A",))
    assert launches(launcher, secret) == []
    assert launcher.errors == {(ID, 2, 0): "refused: its secrets are no longer stored"}
    SecretFiles(tmp_path).write(ID, {"A": "x"})
    (operation,) = launches(launcher, secret)
    assert operation.request is not None
    assert operation.request.secrets == {"A": "x"}
    assert launches(launcher, job(nodes=4)) == []
    assert launcher.errors[ID, 2, 3] == "a node of its allocation left inventory.yaml"
    launcher.forget_errors({(ID, 2, 3), (ID, 9, 9)})
    assert list(launcher.errors) == [(ID, 2, 3)]
