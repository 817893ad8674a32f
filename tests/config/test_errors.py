# ruff: noqa: E501 - a table reads best with one case per line
"""Every way an inventory can be wrong is one line: file:line, key, what was found, what was expected."""

import pytest

from gpusched.config.inventory import inventory_errors, load_inventory
from gpusched.errors import FileError
from gpusched.model.health import KIND

NODE = "gpus: 8, cores: 16, memory: 64G, runtime: podman"
NAME = "a name of at most 63 letters, digits, '.', '_', '-', the first a letter or digit"
NAME_OR_RANGE = f"{NAME}, or a range such as dgx[1-4]"
RANGE = "a range such as dgx[1-4], ascending, of at most 10000 hosts"
DURATION = "a time such as 72h, 1d12h, HH:MM:SS, D-HH:MM:SS or 90 (minutes)"
PERIOD = "a time with its unit, such as 500ms, 5s or 10m, greater than zero"
MEMORY = "a memory size such as 512M, 64G or 1T, greater than zero"
WATTS = "a power greater than zero, such as 6.5kW or 6500 (W)"
ADDRESS = "a host name, an IP address, an alias of ~/.ssh/config, or a range such as 10.0.0.[1-4]"
RATE = "a rate such as 100G, 4x100G or 400Gb/s, greater than zero"
INDICES = "GPU indices such as [0, 1, 3] or 0-3"
PARTITION_KEYS = "one of auto_promote, default, defaults, flavors, idle, image, max_time, nodes, placement, policy, preemptible, resizable, slurm_env"


def in_settings(text: str) -> str:
    return f"settings:\n  {text}\npartitions:\n  A:\n    nodes: [{{name: n1, {NODE}}}]\n"


def with_node(text: str) -> str:
    return f"partitions:\n  A:\n    defaults: {{{NODE}}}\n    nodes:\n      - n1\n      - {text}\n"


def with_check(text: str) -> str:
    return with_node(f"{{name: n2, health_checks: [{text}]}}")


def with_flavor(text: str, more: str = "") -> str:
    return f"partitions:\n  A:\n    defaults: {{{NODE}}}\n    nodes: 'n[1-2]'\n{more}    flavors:\n      s: {text}\n"


def with_partition(text: str) -> str:
    return f"partitions:\n  A:\n    nodes: [{{name: n1, {NODE}}}]\n    {text}\n"


def with_notices(text: str) -> str:
    return f"partitions:\n  A:\n    nodes: [{{name: n1, {NODE}}}]\nnotices:\n  to:\n    - {text}\n"


def with_switch(text: str) -> str:
    return (
        f"partitions:\n  A:\n    defaults: {{{NODE}}}\n    nodes: ['n[1-4]']\ntopology:\n"
        f"  r1: {{nodes: n[1-2], parent: spine}}\n  spine: {{}}\n  r2: {text}\n"
    )


AT = "partitions.A.nodes[1]"
CHECK = f"{AT}.health_checks[0]"
FL = "partitions.A.flavors.s"

BAD = {
    # The file as a whole
    "empty": ("", ":1: partitions: found nothing, expected at least one partition with its nodes"),
    "a list": ("- a\n", ":1: found a list, expected a mapping with partitions"),
    "a word": ("hello\n", ':1: found "hello", expected a mapping with partitions'),
    "no partitions": ("partitions:\n", ":1: partitions: found none, expected at least one partition with its nodes"),
    "partitions a list": ("partitions: [A]\n", ":1: partitions: found a list, expected a mapping: name of partition -> its nodes"),
    "unknown top key": (
        "partition: {}\n",
        ":1: partition: found an unknown key, expected one of defaults, engine, groups, limits, notices, partitions, qos, settings, topology: did you mean partitions?",
    ),
    "broken yaml": (
        "partitions:\n  A: {nodes: [a\n",
        ":3: found a YAML error (while parsing a flow sequence did not find expected ',' or ']'), expected valid YAML",
    ),
    "a tab": (
        "partitions:\n\tA: 1\n",
        ":2: found a YAML error (while scanning for the next token found character that cannot start any token), "
        "expected valid YAML",
    ),
    "control character": ("partitions:\n  A\x01: 1\n", ":2: found the character U+0001, expected text"),
    "two documents": ("partitions: {}\n---\na: 1\n", ":2: found a second document (---), expected one"),
    "a tag": ("partitions: !!python/object:os.system {}\n",
              ":1: partitions: found the tag tag:yaml.org,2002:python/object:os.system, expected no YAML tags"),
    "duplicate key": ("partitions:\n  A: {}\n  A: {}\n",
                      ":3: partitions.A: found the key again (first in line 2), expected each key once"),
    "a key that is a list": ("? [a]\n: 1\n", ":1: found a key that is not a word, expected plain text as the key"),
    "unknown alias": ("partitions: *nowhere\n",
                      ":1: partitions: found the alias *nowhere, expected one whose anchor ends before it"),
    "an alias of itself": ("partitions: &p\n  A: *p\n",
                           ":2: partitions.A: found the alias *p, expected one whose anchor ends before it"),
    "merge of a list of words": ("partitions:\n  A:\n    <<: [x]\n",
                                 ":3: partitions.A.<<: found a scalar, expected a mapping, or a list of them"),
    "far too deep": ("a: " + "[" * 40 + "]" * 40, ":1: found more than 32 levels, expected fewer"),
    # Settings
    "unknown setting": (in_settings("tik: 5s"), ":2: settings.tik: found an unknown key, expected one of admins, "
                        "allowed_mounts, auto_promote, backup, capabilities, connect_timeout, connect_timeout_s, currency, "
                        "down_after, down_after_s, events, fairshare_half_life, fairshare_half_life_s, grace, grace_s, "
                        "idle, image_transports, job_dirs, keep_reports, keep_reports_s, known_hosts, launch_timeout, logs, max_queued_jobs_by_jobs, "
                        "max_queued_jobs_per_user, max_queued_size_per_user, max_retries, network, node_fail_after, "
                        "node_fail_after_s, "
                        "power_price, power_price_per_kwh, probe_timeout, probe_timeout_s, retrain_days, root_jobs, session_keep, session_keep_s, shared, "
                        "ssh_config, tick, tick_s: did you mean tick?"),
    "duration without unit": (in_settings("tick: 5"), f":2: settings.tick: found 5, expected {PERIOD}"),
    "no duration": (in_settings("down_after: soon"), f':2: settings.down_after: found "soon", expected {PERIOD}'),
    "zero duration": (in_settings("tick: 0s"), f':2: settings.tick: found "0s", expected {PERIOD}'),
    "negative seconds": (in_settings("tick_s: -1"),
                         ":2: settings.tick_s: found -1, expected seconds from 0.01 to 31622400"),
    "both units": (in_settings("tick: 5s\n  tick_s: 5"),
                   ":3: settings.tick_s: found tick_s given twice, in two units, expected one of the two"),
    "fraction of a second": (in_settings("grace: 1500ms"),
                             ':2: settings.grace: found "1500ms", expected a time of whole seconds, such as 30s or 10m'),
    "negative price": (in_settings("power_price: -0.3"),
                       ":2: settings.power_price: found -0.3, expected a price per kWh such as 0.30 or 0.30 EUR/kWh"),
    "two currencies": (in_settings("power_price: 0.3 USD/kWh\n  currency: EUR"),
                       ":1: settings: found EUR and USD, expected one currency"),
    "retries a word": (in_settings("max_retries: many"),
                       ':2: settings.max_retries: found "many", expected a number of retries from 0 to 1000'),
    "retries a fraction": (in_settings("max_retries: 1.5"),
                           ":2: settings.max_retries: found 1.5, expected a number of retries from 0 to 1000"),
    "admins not a list": (in_settings("admins: root"), ':2: settings.admins: found "root", expected a list'),
    "an admin that is none": (in_settings("admins: [root, 'a b']"),
                              ':2: settings.admins[1]: found "a b", expected a user name'),
    "relative mount": (in_settings("allowed_mounts: [data]"),
                       ':2: settings.allowed_mounts[0]: found "data", expected an absolute path'),
    "no transport": (in_settings("image_transports: [oci-archiv]"),
                     ":2: settings.image_transports[0]: found \"oci-archiv\", expected one of atomic, "
                     "containers-storage, dir, docker-archive, docker-daemon, oci, oci-archive, ostree, sif, tarball: "
                     "did you mean oci-archive?"),
    "unknown log setting": (in_settings("logs: {max: 1G}"),
                            ":2: settings.logs.max: found an unknown key, expected one of max_per_job, max_total"),
    "settings a list": ("settings: [a]\npartitions: {}\n", ":1: settings: found a list, expected a mapping of settings"),
    "idle a word": (in_settings("idle: yes"), ':2: settings.idle: found "yes", expected none, or a mapping with after, '
                    "below, then, warn_before, exempt, sessions"),
    "idle without a time": (in_settings("idle: {then: cancel}"),
                            ":2: settings.idle.after: found nothing, expected how long all GPUs of a job may be idle, "
                            "such as 2h"),
    "idle below a number": (in_settings("idle: {after: 2h, below: 5}"),
                            ":2: settings.idle.below: found 5, expected a utilization such as 5%, greater than zero and "
                            "at most 100%"),
    "idle below too much": (in_settings("idle: {after: 2h, below: 101%}"),
                            ':2: settings.idle.below: found "101%", expected a utilization such as 5%, greater than zero '
                            "and at most 100%"),
    "idle action": (in_settings("idle: {after: 2h, then: kill}"),
                    ':2: settings.idle.then: found "kill", expected one of warn, signal, requeue, cancel'),
    "a session requeued": (in_settings("idle: {sessions: {after: 2h, then: requeue}}"),
                           ':2: settings.idle.sessions.then: found "requeue", expected one of warn, signal, cancel'),
    "idle warned too early": (in_settings("idle: {after: 10m, then: cancel, warn_before: 10m}"),
                              ":2: settings.idle: found 600 s and 600 s, expected a warn_before that is shorter than "
                              "after"),
    "idle exempt a list": (in_settings("idle: {after: 2h, exempt: [ann]}"),
                           ":2: settings.idle.exempt: found a list, expected a mapping with users, groups, names, "
                           "partitions"),
    "idle exempt no partition": (in_settings("idle: {after: 2h, exempt: {partitions: [B]}}"),
                                 ':2: settings.idle.exempt.partitions[0]: found "B", expected the name of a partition of '
                                 "this inventory"),
    "idle of a partition": (with_partition("idle: {then: cancel}"),
                            ":4: partitions.A.idle.after: found nothing, expected how long all GPUs of a job may be "
                            "idle, such as 2h"),
    "idle beside Slurm": ("engine: slurm\n" + with_partition("idle: {after: 2h}"),
                          ":5: partitions.A.idle: found a mapping, expected nothing: with engine: slurm, jobs are ended "
                          "by Slurm alone"),
    # Partitions
    "partition name": ("partitions:\n  'a b': {}\n", f':2: partitions.a b: found the name "a b", expected {NAME}'),
    "partition name with a slash": ("partitions:\n  ../x: {}\n", f':2: partitions.../x: found the name "../x", expected {NAME}'),
    "partition a word": ("partitions:\n  A: x\n", ':2: partitions.A: found "x", expected a mapping with nodes and flavors'),
    "unknown partition key": (
        with_partition("polcy: easy"),
        f":4: partitions.A.polcy: found an unknown key, expected {PARTITION_KEYS}: did you mean policy?",
    ),
    "placement a word": (with_partition("placement: rack"),
                         ':4: partitions.A.placement: found "rack", expected a mapping with max_spread, wait'),
    "placement on one server": (with_partition("placement: {max_spread: server}"),
                                ':4: partitions.A.placement.max_spread: found "server", expected one of rack, any'),
    "resizable a word": (with_partition("resizable: yes"), ':4: partitions.A.resizable: found "yes", expected a mapping with'
                         " min, max, cooldown, batch, default"),
    "resizable min above max": (with_partition("resizable: {min: 4, max: 2}"),
                                ":4: partitions.A.resizable: found min 4 and max 2, expected a max that is not below min"),
    "resizable min of none": (with_partition("resizable: {min: 0}"),
                              ':4: partitions.A.resizable.min: found 0, expected a number of GPUs from 1 to 1000000'),
    "resizable min of more than there are": (
        with_partition("resizable: {min: 999}"),
        ":4: partitions.A.resizable: found 999, expected a min of at most the partition's 8 GPUs",
    ),
    "resizable unknown key": (
        with_partition("resizable: {maximum: 4}"),
        ":4: partitions.A.resizable.maximum: found an unknown key, expected one of batch, cooldown, default, max, min: "
        "did you mean max?",
    ),
    "resizable batch": (with_partition("resizable: {batch: large}"),
                        ':4: partitions.A.resizable.batch: found "large", expected one of fixed, scale'),
    "no nodes key": ("partitions:\n  A: {policy: easy}\n", ":2: partitions.A.nodes: found nothing, expected a list of nodes"),
    "empty nodes": ("partitions:\n  A:\n    nodes: []\n", ":3: partitions.A.nodes: found none, expected at least one node"),
    "nodes commented out": ("partitions:\n  A:\n    nodes:\n    #  - n1\n",
                            ":3: partitions.A.nodes: found none, expected at least one node"),
    "nodes a mapping": ("partitions:\n  A:\n    nodes: {n1: 3}\n",
                        ":3: partitions.A.nodes: found a mapping, expected a list of nodes"),
    "policy a path": (with_partition("policy: ../easy"), f':4: partitions.A.policy: found "../easy", expected {NAME}'),
    "max_time": (with_partition("max_time: 1x"), f':4: partitions.A.max_time: found "1x", expected {DURATION}'),
    "image with a space": (with_partition("image: 'a b'"), ':4: partitions.A.image: found "a b", expected an image such as '
                           "docker.io/library/busybox:1, without spaces"),
    "name in defaults": (
        "defaults: {name: n}\npartitions: {}\n",
        ":1: defaults.name: found an unknown key, expected one of become, cores, gpu_indices, gpu_type, gpus, health, health_checks, kernel_log, key, "
        "memory, memory_mib, mig, port, rated_power, rated_power_w, runtime, sharing, simulated_gpus, transport, user",
    ),
    # Nodes
    "node a number list": (with_node("[1]"), f":6: {AT}: found a list, expected a node: a host name, or a mapping with a name"),
    "node nothing": (with_node(""), f":6: {AT}.name: found nothing, expected the node's name"),
    "node without name": (with_node("{address: h}"), f":6: {AT}.name: found nothing, expected the node's name"),
    "node name": (with_node("-x"), f':6: {AT}: found "-x", expected {NAME_OR_RANGE}'),
    "node name too long": (with_node("x" * 64), f':6: {AT}: found "{"x" * 64}", expected {NAME_OR_RANGE}'),
    "node name unicode": (with_node("knöten"), f':6: {AT}: found "knöten", expected {NAME_OR_RANGE}'),
    "node twice": (with_node("n1"), f':6: {AT}: found the node "n1" again (first in line 5), expected every node once'),
    "node twice in a range": (with_node("n[0-3]"),
                              f':6: {AT}: found the node "n1" again (first in line 5), expected every node once'),
    "address twice": (with_node("{name: n2, address: n1}"),
                      f':6: {AT}: found "n1" again (it is n1\'s), expected an address of its own for every node'),
    "range backwards": (with_node("n[4-2]"), f':6: {AT}: found "n[4-2]", expected {RANGE}'),
    "range of all": (with_node("n[1-999999999]"), f':6: {AT}: found "n[1-999999999]", expected {RANGE}'),
    "range repeats": (with_node("n[2-3,3]"), f':6: {AT}: found "n[2-3,3]", expected every number of the range once'),
    "unknown node key": (with_node("{name: n2, gpu: 4}"),
                         f":6: {AT}.gpu: found an unknown key, expected one of address, become, cores, fabric_address, "
                         "gpu_indices, gpu_type, gpus, health, health_checks, kernel_log, key, memory, memory_mib, mig, name, port, "
                         "rated_power, rated_power_w, runtime, sharing, simulated_gpus, transport, user: did you mean gpus?"),
    "check without a name": (with_check("{command: x, every: 1m}"), f":6: {CHECK}.name: found nothing, expected the check's name"),
    "check without a command": (with_check("{name: c, every: 1m}"),
                                f":6: {CHECK}.command: found nothing, expected a command for sh, of at most 8192 characters"),
    "check at no time": (with_check("{name: c, command: x}"),
                         f":6: {CHECK}.every: found nothing, expected how often it runs, such as 10m, or before_job: true"),
    "check every half second": (with_check("{name: c, command: x, every: 500ms}"),
                                f':6: {CHECK}.every: found "500ms", expected a time of whole seconds, such as 30s or 10m'),
    "check that only warns before a job": (with_check("{name: c, command: x, before_job: true, then: warn}"),
                                           f":6: {CHECK}: found then: warn, expected no-new-jobs or drain where before_job is true"),
    "checks beside Slurm": ("engine: slurm\n" + with_check("{name: c, command: x, every: 1m}"),
                            f":7: {AT}: found health_checks, expected no health_checks: with engine: slurm they are Slurm's"),
    "check twice": (with_check("{name: c, command: x, every: 1m}, {name: c, command: y, every: 1h}"),
                    f':6: {AT}.health_checks: found the name "c" again, expected every check once'),
    "unknown condition": (with_node("{name: n2, health: {xid-gpus: drain}}"),
                          f":6: {AT}.health.xid-gpus: found an unknown key, expected one of "
                          f"{', '.join(sorted(KIND))}: did you mean xid-gpu?"),
    "unknown action": (with_node("{name: n2, health: {ecc: drian}}"),
                       f':6: {AT}.health.ecc: found "drian", expected one of warn, no-new-jobs, drain, requeue: did you '
                       "mean drain?"),
    "a program's fault": (with_node("{name: n2, health: {xid-program: drain}}"),
                          f':6: {AT}.health.xid-program: found "drain", expected one of warn'),
    "health a word": (with_node("{name: n2, health: drain}"),
                      f':6: {AT}.health: found "drain", expected a mapping: kind of condition -> action'),
    "negative gpus": (with_node("{name: n2, gpus: -1}"), f":6: {AT}.gpus: found -1, expected a number of GPUs from 0 to 64"),
    "gpus quoted": (with_node("{name: n2, gpus: '8'}"), f':6: {AT}.gpus: found "8", expected a number of GPUs from 0 to 64'),
    "gpus nothing": (with_node("{name: n2, gpus: }"), f":6: {AT}.gpus: found nothing, expected a number of GPUs from 0 to 64"),
    "no cores": (with_node("{name: n2, cores: 0}"), f":6: {AT}.cores: found 0, expected a number of CPU cores from 1 to 100000"),
    "memory": (with_node("{name: n2, memory: lots}"), f':6: {AT}.memory: found "lots", expected {MEMORY}'),
    "negative memory": (with_node("{name: n2, memory: -4G}"), f':6: {AT}.memory: found "-4G", expected {MEMORY}'),
    "rated power": (with_node("{name: n2, rated_power: 6.5hp}"), f':6: {AT}.rated_power: found "6.5hp", expected {WATTS}'),
    "no rated power": (with_node("{name: n2, rated_power: 0}"), f":6: {AT}.rated_power: found 0, expected {WATTS}"),
    "runtime": (with_node("{name: n2, runtime: dokcer}"), f':6: {AT}.runtime: found "dokcer", expected one of podman, docker, '
                "apptainer, process: did you mean docker?"),
    "transport": (with_node("{name: n2, transport: rsh}"),
                  f':6: {AT}.transport: found "rsh", expected one of ssh, local: did you mean ssh?'),
    "port": (with_node("{name: n2, port: 65536}"), f":6: {AT}.port: found 65536, expected a port from 1 to 65535"),
    "become": (with_node("{name: n2, become: su}"), f":6: {AT}.become: found \"su\", expected one of sudo: did you mean sudo?"),
    "become of this machine": (
        with_node("{name: n2, become: sudo, transport: local}"),
        f":6: {AT}: found transport: local, expected become for nodes reached by ssh only",
    ),
    "user": (with_node("{name: n2, user: 'a;b'}"), f':6: {AT}.user: found "a;b", expected a user name'),
    "user that is an option": (with_node("{name: n2, user: -oProxyCommand}"),
                               f':6: {AT}.user: found "-oProxyCommand", expected a user name'),
    "address that is an option": (with_node("{name: n2, address: -oProxyCommand=x}"),
                                  f':6: {AT}.address: found "-oProxyCommand=x", expected {ADDRESS}'),
    "simulated": (with_node("{name: n2, simulated_gpus: maybe}"),
                  f':6: {AT}.simulated_gpus: found "maybe", expected true or false'),
    "fewer indices than gpus": (with_node("{name: n2, gpus: 8, gpu_indices: [0, 1]}"),
                                f":6: {AT}: found 2 gpu_indices, expected as many gpu_indices as gpus (8)"),
    "an index twice": (with_node("{name: n2, gpu_indices: [0, 0]}"),
                       f":6: {AT}.gpu_indices: found 0, 0, expected different GPU indices from 0 to 63"),
    "an index too large": (with_node("{name: n2, gpu_indices: [64]}"),
                           f":6: {AT}.gpu_indices[0]: found 64, expected a GPU index from 0 to 63"),
    "indices a word": (with_node("{name: n2, gpu_indices: all}"), f':6: {AT}.gpu_indices: found "all", expected {INDICES}'),
    "indices without end": (with_node("{name: n2, gpu_indices: 0-999999999}"),
                            f':6: {AT}.gpu_indices: found "0-999999999", expected {INDICES}'),
    "addresses and names": (with_node("{name: 'm[1-2]', address: '10.0.0.[1-3]'}"),
                            f":6: {AT}: found 3 addresses, expected as many addresses as names (2)"),
    "nowhere gpus": ("partitions:\n  A:\n    nodes:\n      - n1\n",
                     ":4: partitions.A.nodes[0].gpus: found nothing, expected how many GPUs the node has, here or in defaults"),
    "nowhere runtime": ("partitions:\n  A:\n    nodes:\n      - {name: n1, gpus: 1, cores: 1, memory: 1G}\n",
                        ":4: partitions.A.nodes[0].runtime: found nothing, expected podman, docker, apptainer or process, "
                        "here or in defaults"),
    # Flavors
    "flavors a list": ("partitions:\n  A:\n    nodes: [{name: n1, " + NODE + "}]\n    flavors: [s]\n",
                       ":4: partitions.A.flavors: found a list, expected a mapping: name of flavor -> gpus, cores, memory, time"),
    "flavor a word": (with_flavor("small"), f':6: {FL}: found "small", expected a mapping with gpus, cores, memory and time'),
    "flavor without time": (with_flavor("{gpus: 1, cores: 1, memory: 1G}"),
                            f":6: {FL}.time: found nothing, expected the time limit, such as 72h"),
    "flavor key": (with_flavor("{gpus: 1, cores: 1, memory: 1G, tme: 1h}"), f":6: {FL}.tme: found an unknown key, expected "
                   "one of cores, gpus, memory, memory_mib, time: did you mean time?"),
    "flavor time": (with_flavor("{gpus: 1, cores: 1, memory: 1G, time: 1y}"), f':6: {FL}.time: found "1y", expected {DURATION}'),
    "flavor too large": (with_flavor("{gpus: 24, cores: 24, memory: 24G, time: 1h}"),
                         f":6: {FL}: found 24 GPUs, 24 cores, 24G, expected what can be split evenly across "
                         "2 nodes of at most 8 GPUs, 16 cores, 64G"),
    "flavor in unequal parts": (with_flavor("{gpus: 9, cores: 16, memory: 16G, time: 1h}"),
                                f":6: {FL}: found 9 GPUs, 16 cores, 16G, expected what can be split evenly across "
                                "2 nodes of at most 8 GPUs, 16 cores, 64G"),
    "flavor longer than the partition": (
        with_flavor("{gpus: 1, cores: 1, memory: 1G, time: 3h}", more="    max_time: 2h\n"),
        f":7: {FL}: found a longer time limit, expected a time within the partition's max_time",
    ),
    "flavor name": ("partitions:\n  A:\n    nodes: [{name: n1, " + NODE + "}]\n    flavors: {a/b: {}}\n",
                    f':4: partitions.A.flavors.a/b: found the name "a/b", expected {NAME}'),
    # Sharing
    "sharing a word": (with_node("{name: n2, sharing: mps}"), ':6: partitions.A.nodes[1].sharing: found "mps", expected a mapping with mode, slowdown, pipe'),
    "no mode": (with_node("{name: n2, sharing: {slowdown: 1}}"), ":6: partitions.A.nodes[1].sharing.mode: found nothing, expected mps, time-slicing or none"),
    "mode mistyped": (with_node("{name: n2, sharing: {mode: mp}}"),
                      ':6: partitions.A.nodes[1].sharing.mode: found "mp", expected one of mps, time-slicing, none: did you mean mps?'),
    "slowdown in percent": (with_node("{name: n2, sharing: {mode: mps, slowdown: 30%}}"),
                            ':6: partitions.A.nodes[1].sharing.slowdown: found "30%", expected the part by which a job may be slower from 0 to 100'),
    "relative pipe": (with_node("{name: n2, sharing: {mode: mps, pipe: mps}}"),
                      ':6: partitions.A.nodes[1].sharing.pipe: found "mps", expected an absolute path without quotes, commas and colons'),
    # Notices
    "webhook without host": (with_notices("{webhook: 'https:///T0K3N'}"), ":6: notices.to[0].webhook: found another text, "
                             "expected a URL such as https://chat.example.org/hooks/gpusched"),
    "webhook to a file": (with_notices("{webhook: 'file:///etc/passwd'}"), ":6: notices.to[0].webhook: found another text, "
                          "expected a URL such as https://chat.example.org/hooks/gpusched"),
    "webhook and command": (with_notices("{webhook: 'https://a/b', command: [/x]}"), ":6: notices.to[0]: found webhook and command, expected a webhook, a command or a notifier"),
    "events as text": (in_settings("events: /x"), ':2: settings.events: found "/x", expected a mapping with file, webhook or both'),
    "events to a relative file": (in_settings("events: {file: x}"), ':2: settings.events.file: found "x", expected an absolute path'),
    "events to a secret": (in_settings("events: {webhook: T0K3N}"), ":2: settings.events.webhook: found another text, "
                           "expected a URL such as https://chat.example.org/hooks/gpusched"),
    "no recipient": (with_notices("{on: [end]}"), ":6: notices.to[0]: found none of them, expected a webhook, a command or a notifier"),
    "relative command": (with_notices("{command: [page, me]}"), ":6: notices.to[0].command: found page me, expected a command "
                         "whose first word is an absolute path"),
    "notice mistyped": (with_notices("{command: [/x], on: [ends]}"), ':6: notices.to[0].on[0]: found "ends", expected one of '
                        "begin, end, fail, requeue, limit, node, idle, all: did you mean end?"),
    # Switches
    "switch a word": (with_switch("n3"), ':8: topology.r2: found "n3", expected a mapping: name of switch -> nodes, uplink, parent'),
    "switch key": (with_switch("{node: n3}"), ":8: topology.r2.node: found an unknown key, expected one of nodes, parent, uplink, "
                   "uplink_gbps: did you mean nodes?"),
    "switch name": (with_switch("{}\n  a/b: {}"), f':9: topology.a/b: found the name "a/b", expected {NAME}'),
    "uplink without unit": (with_switch("{uplink: 100}"), f":8: topology.r2.uplink: found 100, expected {RATE}"),
    "uplink in bytes": (with_switch("{uplink: 12GB/s}"), f':8: topology.r2.uplink: found "12GB/s", expected {RATE}'),
    "no uplink": (with_switch("{uplink: 0x100G}"), f':8: topology.r2.uplink: found "0x100G", expected {RATE}'),
    "two uplinks": (with_switch("{uplink: 1G, uplink_gbps: 1}"),
                    ":8: topology.r2.uplink_gbps: found uplink_gbps given twice, in two units, expected one of the two"),
    "unknown node on a switch": (with_switch("{nodes: [n3, n5]}"), ':8: topology.r2.nodes: found the node "n5", expected the '
                                 "name of a node of this inventory"),
    "node on two switches": (with_switch("{nodes: n[2-3]}"),
                             ':8: topology.r2.nodes: found the node "n2" again (first on r1 in line 6), expected every node on one switch'),
    "node twice on a switch": (with_switch("{nodes: [n3, n3]}"),
                               ':8: topology.r2.nodes: found the node "n3" again (first on r2 in line 8), expected every node on one switch'),
    "parent mistyped": (with_switch("{parent: spien}"),
                        ':8: topology.r2.parent: found the parent "spien", expected a switch that is described here: did you mean spine?'),
    "its own parent": (with_switch("{parent: r2}"),
                       ":8: topology.r2.parent: found a circle (r2 -> r2), expected parents that lead to the top"),
    "parents in a circle": (with_switch("{parent: r3}\n  r3: {parent: r2}"),
                            ":8: topology.r2.parent: found a circle (r2 -> r3 -> r2), expected parents that lead to the top"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_error(name: str, tmp_path, monkeypatch) -> None:
    text, expected = BAD[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.yaml").write_text(text)
    with pytest.raises(FileError) as caught:
        load_inventory("inventory.yaml")
    assert caught.value.line() == f"inventory.yaml{expected}"
    assert caught.value.exit_code == 2
    assert caught.value.line() in [e.line() for e in inventory_errors("inventory.yaml")]


def test_all_errors_at_once(tmp_path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(
        f"settings: {{tick: 5}}\npartitions:\n  A:\n    defaults: {{{NODE}}}\n    nodes:\n      - n1\n      - {{name: n1}}\n"
        "      - {name: n2, gpus: x}\n    flavors:\n      s: {gpus: 1}\n  B: {}\n"
    )
    assert [(e.line_number, e.key) for e in inventory_errors(path)] == [
        (1, "settings.tick"),
        (7, "partitions.A.nodes[1]"),
        (8, "partitions.A.nodes[2].gpus"),
        (10, "partitions.A.flavors.s.cores"),
        (11, "partitions.B.nodes"),
    ]
    path.write_text(with_switch("{nodes: [n5], uplink: fast}") + "  r3: {nodes: [n3, n5]}\n  r4: {nodes: [n3]}\n")
    assert [(e.line_number, e.key) for e in inventory_errors(path)] == [
        (8, "topology.r2.uplink"),
        (9, "topology.r3.nodes"),
        (10, "topology.r4.nodes"),
    ]


def test_files_that_are_none(tmp_path) -> None:
    for path, found in (
        (tmp_path / "nowhere", "no such file or directory"),
        (tmp_path, "is a directory"),
        ("a\0b", "a name no file can have"),
    ):
        with pytest.raises(FileError) as caught:
            load_inventory(path)
        assert caught.value.found == found
    (tmp_path / "latin1").write_bytes("partitions: # für\n".encode("latin-1"))
    with pytest.raises(FileError, match="latin1:1: found the byte 0xfc, expected UTF-8 text"):
        load_inventory(tmp_path / "latin1")


@pytest.mark.parametrize("name", ["ALL", "CAP_CHOWN", "net_raw"])
def test_capabilities_are_the_kernels_by_the_engines_names(name: str, tmp_path) -> None:
    path = tmp_path / "inventory.yaml"
    path.write_text(in_settings(f"capabilities: [IPC_LOCK, {name}]"))
    with pytest.raises(FileError, match=r"settings.capabilities\[1\]: found .* expected one of CHOWN, DAC_OVERRIDE"):
        load_inventory(path)
