"""Good inventories: what the keys mean, where the file is found."""

from pathlib import Path

import pytest

from gpusched.config.inventory import flavor_nodes, load_inventory
from gpusched.config.paths import find_inventory
from gpusched.errors import FileError, UsageError
from gpusched.model.idle import IdleExempt, IdleRule, IdleRules
from gpusched.model.resources import (
    Flavor,
    Inventory,
    LogSettings,
    MigSettings,
    Node,
    RuntimeName,
    Settings,
    SharingSettings,
)


def load(tmp_path: Path, text: str) -> Inventory:
    (tmp_path / "inventory.yaml").write_text(text)
    return load_inventory(tmp_path / "inventory.yaml")


def test_every_key(tmp_path: Path) -> None:
    inventory = load(
        tmp_path,
        """
settings:
  tick: 500ms
  probe_timeout: 5s
  down_after: 2m
  node_fail_after: 1h
  connect_timeout_s: 2.5
  grace: 1m
  max_retries: 0
  power_price: 0.25 USD/kWh
  admins: [alice, bob]
  allowed_mounts: [/data, /home]
  capabilities: [IPC_LOCK, NET_RAW]
  image_transports: [docker-archive]
  network: bridge
  known_hosts: ~/known
  ssh_config: /etc/my_config
  fairshare_half_life: 14d
  logs: {max_per_job: 1M, max_total: 1G}
partitions:
  P:
    policy: sjf
    image: busybox:1
    max_time: 7d
    nodes:
      - name: n1
        address: n1.example.org
        transport: ssh
        user: gpu
        port: 2222
        key: ~/.ssh/id
        gpus: 2
        cores: 4
        memory: 1.5G
        gpu_type: A100
        gpu_indices: [3, 1]
        rated_power: 1.5 kW
        runtime: docker
        fabric_address: 192.168.0.1
      - {name: 1, transport: local, gpus: 0, cores: 1, memory_mib: 100, runtime: process, simulated_gpus: no,
         rated_power_w: 90}
    flavors:
      small: {gpus: 1, cores: 2, memory: 512M, time: '1:30:00'}
      long: {gpus: 1, cores: 2, memory: 512, time: 2-00:00:00}
""",
    )
    assert inventory.settings == Settings(
        tick_s=0.5,
        probe_timeout_s=5.0,
        down_after_s=120.0,
        node_fail_after_s=3600.0,
        connect_timeout_s=2.5,
        grace_s=60,
        max_retries=0,
        power_price_per_kwh=0.25,
        currency="USD",
        admins=("alice", "bob"),
        allowed_mounts=("/data", "/home"),
        capabilities=("IPC_LOCK", "NET_RAW"),
        image_transports=("docker-archive",),
        network="bridge",
        known_hosts="~/known",
        ssh_config="/etc/my_config",
        fairshare_half_life_s=14 * 86400,
        logs=LogSettings(max_mib_per_job=1, max_total_mib=1024),
    )
    (partition,) = inventory.partitions
    assert (partition.policy, partition.default_image, partition.max_time_s) == ("sjf", "busybox:1", 7 * 86400)
    assert partition.nodes == (
        Node(
            name="n1",
            partition="P",
            address="n1.example.org",
            user="gpu",
            port=2222,
            key="~/.ssh/id",
            gpus=2,
            cores=4,
            memory_mib=1536,
            gpu_type="A100",
            gpu_indices=(1, 3),
            rated_power_w=1500.0,
            runtime=RuntimeName.DOCKER,
            fabric_address="192.168.0.1",
        ),
        Node(
            name="1",
            partition="P",
            address="1",
            transport="local",
            gpus=0,
            cores=1,
            memory_mib=100,
            rated_power_w=90.0,
            runtime=RuntimeName.PROCESS,
        ),
    )
    assert [f.time_limit_s for f in partition.flavors] == [5400, 172800]


def test_ranges_defaults_and_merges(tmp_path: Path) -> None:
    inventory = load(
        tmp_path,
        """
defaults: {runtime: podman, user: root, cores: 1}
partitions:
  A:
    defaults: &like {gpus: 8, cores: 64, memory: 512G}
    nodes:
      - dgx[01-03,7]
      - {name: 'x[1-2]', address: '10.0.0.[8-9]', port: 22, gpu_indices: '0-2,5', user: gpu}
  B:
    defaults:
      <<: *like
      gpus: 4
    nodes: y[8-10]
""",
    )
    a, b = inventory.partitions
    assert [n.name for n in a.nodes] == ["dgx01", "dgx02", "dgx03", "dgx7", "x1", "x2"]
    assert [n.address for n in a.nodes][-2:] == ["10.0.0.8", "10.0.0.9"]
    assert [(n.gpus, n.indices(), n.user) for n in a.nodes][-2:] == [(4, (0, 1, 2, 5), "gpu")] * 2
    assert {(n.gpus, n.cores, n.user) for n in a.nodes[:4]} == {(8, 64, "root")}
    assert [(n.name, n.gpus, n.cores) for n in b.nodes] == [("y8", 4, 64), ("y9", 4, 64), ("y10", 4, 64)]


def test_gpus_are_shared_as_a_node_says_else_as_its_partition_does(tmp_path: Path) -> None:
    text = """\
partitions:
  A:
    defaults: {gpus: 1, cores: 1, memory: 1G, runtime: podman, sharing: {mode: mps, slowdown: 0.5}}
    nodes: [a, {name: b, sharing: {mode: none}}, {name: "c[1-2]", sharing: {mode: time-slicing, pipe: /run/mps}}]
  B: {nodes: [{name: d, gpus: 1, cores: 1, memory: 1G, runtime: podman}]}
"""
    found = {node.name: node.sharing for node in load(tmp_path, text).nodes}
    turns = SharingSettings(mode="time-slicing", slowdown=0.3, pipe="/run/mps")
    mps = SharingSettings(mode="mps", slowdown=0.5, pipe="/tmp/nvidia-mps")
    assert found == {"a": mps, "b": None, "c1": turns, "c2": turns, "d": None}


def test_gpus_are_cut_on_demand_if_declared_for_the_node_or_partition(tmp_path: Path) -> None:
    text = """\
partitions:
  A:
    defaults: {gpus: 4, cores: 1, memory: 1G, runtime: podman, mig: on-demand}
    nodes:
      - a
      - {name: b, mig: fixed}
      - {name: c, gpu_indices: 1-4, mig: {mode: on-demand, gpus: 3-6, command: nvidia-smi}}
  B: {nodes: [{name: d, gpus: 1, cores: 1, memory: 1G, runtime: podman}]}
"""
    a, b, c, d = load(tmp_path, text).nodes
    assert (a.mig, a.cut_on_demand()) == (MigSettings(), (0, 1, 2, 3))
    assert [(node.mig, node.cut_on_demand()) for node in (b, d)] == [(None, ())] * 2
    assert c.mig is not None
    assert (c.mig.command, c.cut_on_demand()) == (("nvidia-smi",), (3, 4))


@pytest.mark.parametrize("value", ["off", "{gpus: [1]}", '{mode: on-demand, command: "\'"}'])
def test_mig_is_fixed_or_on_demand(tmp_path: Path, value: str) -> None:
    text = (
        f"partitions:\n  A:\n    nodes: [{{name: a, gpus: 4, cores: 1, memory: 1G, runtime: podman, mig: {value}}}]\n"
    )
    with pytest.raises(FileError, match=r"on-demand|a command such as"):
        load(tmp_path, text)


def test_health_is_joined_kind_by_kind_the_nearest_word_counts(tmp_path: Path) -> None:
    text = """
defaults: {gpus: 1, cores: 1, memory: 1G, runtime: podman, kernel_log: /var/log/kern.log,
           health: {xid-gpu: drain, ecc: warn}}
partitions:
  p:
    defaults: {health: {ecc: requeue}}
    nodes: [a, {name: b, health: {xid-gpu: warn, temperature: no-new-jobs}}]
"""
    found = {node.name: {k: str(v) for k, v in node.health.items()} for node in load(tmp_path, text).nodes}
    assert found["a"] == {"xid-gpu": "drain", "ecc": "requeue"}
    assert found["b"] == {"xid-gpu": "warn", "ecc": "requeue", "temperature": "no-new-jobs"}
    assert load(tmp_path, text).nodes[0].kernel_log == "/var/log/kern.log"


def test_words_are_not_yaml_1_1(tmp_path: Path) -> None:
    inventory = load(
        tmp_path,
        "partitions:\n  no:\n    defaults: {gpus: 1, cores: 1, memory: 1G, runtime: podman}\n    nodes: [no, on, 012]\n"
        "    flavors:\n      s: {gpus: 1, cores: 1, memory: 1G, time: 12:00:00}\n",
    )
    assert [n.name for n in inventory.nodes] == ["no", "on", "012"]
    assert inventory.partitions[0].flavors[0].time_limit_s == 12 * 3600


def test_a_flavor_may_be_of_slices(tmp_path: Path) -> None:
    text = """\
partitions:
  A:
    defaults: {gpus: 2, cores: 32, memory: 64G, runtime: podman}
    nodes: [a]
    flavors:
      small: {gpus: 1g.10gb:2, cores: 4, memory: 8G, time: 1h}
      half: {gpus: 3G.40GB, cores: 8, memory: 16G, time: 1h}
      many: {gpus: 1g.10gb:8, cores: 32, memory: 64G, time: 1h}
"""
    partition = load(tmp_path, text).partitions[0]
    assert [(f.gpus, f.profile) for f in partition.flavors] == [(2, "1g.10gb"), (1, "3g.40gb"), (8, "1g.10gb")]
    assert partition.largest_flavor is not None
    assert partition.largest_flavor.name == "many", "8 sevenths are more than a half"
    with pytest.raises(FileError, match=r"found 15 slices of 1g\.10gb, .*split evenly across 1 node of"):
        load(tmp_path, text.replace("gb:8", "gb:15"))
    with pytest.raises(FileError, match=r"slices such as 1g.10gb:2"):
        load(tmp_path, text.replace("gb:8", "gb:0"))


def test_several_local_nodes_share_a_machine(tmp_path: Path) -> None:
    text = "partitions:\n  A:\n    defaults: {transport: local, gpus: 0, cores: 1, memory: 1G, runtime: process}\n"
    inventory = load(tmp_path, text + "    nodes: [{name: a, address: here}, {name: b, address: here}]\n")
    assert len(inventory.nodes) == 2


def nodes(*gpus: int) -> tuple[Node, ...]:
    return tuple(
        Node(
            name=f"n{i}",
            partition="p",
            address="x",
            gpus=g,
            cores=8 * g,
            memory_mib=1024 * g,
            runtime=RuntimeName.PODMAN,
        )
        for i, g in enumerate(gpus)
    )


@pytest.mark.parametrize(
    ("gpus", "room", "expected"),
    [(8, (8, 8), 1), (16, (8, 8), 2), (16, (8, 4), None), (12, (8, 8), 2),
     (24, (8, 8, 8, 8), 3), (8, (4, 4), 2), (6, (2, 4), None)],
)  # fmt: skip
def test_flavor_nodes(gpus: int, room: tuple[int, ...], expected: int | None) -> None:
    flavor = Flavor(name="f", gpus=gpus, cores=gpus, memory_mib=1024 * gpus, time_limit_s=60)
    assert flavor_nodes(flavor, nodes(*room)) == expected


def test_where_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUSCHED_INVENTORY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("gpusched.config.paths.SYSTEM_INVENTORY", tmp_path / "etc/inventory.yaml")
    with pytest.raises(UsageError) as caught:
        find_inventory()
    for place in ("inventory.yaml", "config/gpusched/inventory.yaml", "etc/inventory.yaml"):
        assert str(tmp_path / place) in caught.value.line()
    assert "gpusched init" in caught.value.hint
    for place in ("etc/inventory.yaml", "config/gpusched/inventory.yaml", "inventory.yaml"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
        assert find_inventory().absolute() == tmp_path / place
    (tmp_path / "site").mkdir()
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(tmp_path / "site"))
    with pytest.raises(UsageError, match="GPUSCHED_INVENTORY names"):
        find_inventory()
    (tmp_path / "site/inventory.yaml").touch()
    assert find_inventory() == tmp_path / "site/inventory.yaml"
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(tmp_path / "etc/inventory.yaml"))
    assert find_inventory() == tmp_path / "etc/inventory.yaml"


def test_idle_rules_of_a_partition_are_its_own_keys_else_those_of_the_settings(tmp_path: Path) -> None:
    inventory = load(
        tmp_path,
        """
settings:
  idle: {after: 2h, then: requeue, exempt: {users: [ann], groups: [physics], names: ["nb-*"], partitions: [C]}}
partitions:
  A: {nodes: [a], defaults: &d {gpus: 1, cores: 1, memory: 1G, runtime: podman}}
  B: {nodes: [b], defaults: *d, idle: {after: 10m, below: 2.5%, warn_before: 1m, sessions: {after: 1h}}}
  C: {nodes: [c], defaults: *d, idle: none}
  D: {nodes: [d], defaults: *d, idle: {then: warn, sessions: {then: cancel, warn_before: 1h, below: 10%}}}
""",
    )
    a, b, c, d = (partition.idle for partition in inventory.partitions)
    exempt = IdleExempt(users=("ann",), groups=("physics",), names=("nb-*",), partitions=("C",))
    assert a == IdleRules(
        jobs=IdleRule(after_s=7200, then="requeue", warn_before_s=900),
        sessions=IdleRule(after_s=7200, then="cancel", warn_before_s=900),
        exempt=exempt,
    )
    assert b == IdleRules(
        jobs=IdleRule(after_s=600, then="requeue", warn_before_s=60),
        sessions=IdleRule(after_s=3600, then="cancel", warn_before_s=60),
        below=0.025,
        sessions_below=0.025,
        exempt=exempt,
    )
    assert c == IdleRules()
    assert d == IdleRules(
        jobs=IdleRule(after_s=7200),
        sessions=IdleRule(after_s=7200, then="cancel", warn_before_s=3600),
        sessions_below=0.1,
        exempt=exempt,
    )


def test_only_sessions_may_have_a_rule_and_short_times_are_warned_half_way(tmp_path: Path) -> None:
    text = "partitions: {A: {nodes: [a], defaults: {gpus: 1, cores: 1, memory: 1G, runtime: podman}}}\n"
    inventory = load(tmp_path, "settings: {idle: {sessions: {after: 60s, then: cancel}}}\n" + text)
    rules = inventory.partitions[0].idle
    assert (rules.jobs, rules.sessions) == (None, IdleRule(after_s=60, then="cancel", warn_before_s=30))
