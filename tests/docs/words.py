"""The texts of generated tables on each key, state, reason and variable; the generator fails if one is missing."""

from __future__ import annotations

from gpusched.model.gpustates import HIDDEN_PROCESS_MEMORY_MIB
from gpusched.model.jobs import JobState
from gpusched.model.plan import ReasonCode
from gpusched.model.readings import GpuState, NodeState

DURATION = "duration"
LIMIT = "time limit"
MEMORY = "memory"
BOOL = "bool"

# Keys that say the same in a fixed unit, for programs that write the file.
TWINS = (
    "tick_s", "probe_timeout_s", "down_after_s", "node_fail_after_s", "grace_s", "session_keep_s",
    "connect_timeout_s", "fairshare_half_life_s", "keep_reports_s", "power_price_per_kwh", "memory_mib",
    "rated_power_w", "uplink_gbps",
)  # fmt: skip

SETTINGS = {
    "tick": (DURATION, "Pause between the controller's cycles; news ends it early."),
    "probe_timeout": (DURATION, "Time limit of a probe."),
    "connect_timeout": (DURATION, "For TCP and for the SSH handshake, each."),
    "down_after": (DURATION, "Silence after which a node is DOWN: no new jobs."),
    "node_fail_after": (
        DURATION,
        "Silence after which its jobs are requeued.",
    ),
    "launch_timeout": (DURATION, "Time limit for starting a job's containers, pulls included; then it is retried."),
    "max_retries": ("number", "Maximum restarts of a job after NODE_FAIL."),
    "grace": (DURATION, "Between a job's first signal and the kill."),
    "session_keep": (DURATION, "How long a detached job of `gpusched run` continues."),
    "admins": ("list of users", "Act on all jobs and nodes, like root."),
    "shared": (
        BOOL,
        "Other users of the login node may submit. Always true with the state folder `/var/lib/gpusched`.",
    ),
    "root_jobs": (
        BOOL,
        "In a shared installation: root may submit jobs, which run as root.",
    ),
    "allowed_mounts": (
        "list of absolute paths",
        "Node folders that jobs may mount, links resolved; admins may mount any. Default: none.",
    ),
    "capabilities": (
        "list: `IPC_LOCK`, `NET_RAW`; see capabilities(7)",
        "That other users' jobs keep.",
    ),
    "image_transports": (
        "list of podman's transports: `docker-archive`, `oci-archive`, ...",
        "Allowed in `--image` besides registries. podman reads files as the node's account.",
    ),
    "max_queued_jobs_per_user": ("number", "Pending jobs; each array task counts."),
    "max_queued_jobs_by_jobs": ("number", "Of these, submitted by jobs (`sbatch` inside a job)."),
    "max_queued_size_per_user": (
        MEMORY,
        "Their size in the store.",
    ),
    "job_dirs": (
        "absolute path",
        "Folder shared by all nodes, for a folder per job (GPUSCHED_JOB_DIR), which gpusched never removes. Default: "
        "on each node, until the job ends.",
    ),
    "network": ("network mode of the container engine", "For single-node jobs. Gangs always use the host's."),
    "known_hosts": ("path", "Instead of the usual known_hosts files."),
    "ssh_config": ("path", "Instead of `~/.ssh/config` and `/etc/ssh/ssh_config`."),
    "fairshare_half_life": (DURATION, "Age at which GPU hours count half."),
    "keep_reports": (DURATION, "Age at which nightly reports are removed."),
    "power_price": ("`0.30` or `0.30 EUR/kWh`", "For the costs in `gpusched power`."),
    "currency": ("text", "If the price names none."),
    "idle": ("mapping or `none`", "[Below](#idle)."),
    "logs": ("mapping", "Output kept in the state folder, [below](#settingslogs)."),
    "events": ("mapping", "[Below](#settingsevents)."),
    "backup": ("mapping", "[Backups](../guides/operating.md#backup), [below](#settingsbackup)."),
    "retrain_days": ("number", "Days of jobs for `--auto-retrain`."),
    "auto_promote": (
        BOOL,
        "Promote a candidate of `--auto-retrain` that is proven no worse.",
    ),
}
EVENTS = {
    "file": ("absolute path", "A line for each event is appended."),
    "webhook": ("URL", "Gets arrays of events by POST."),
}

BACKUP = {
    "to": ("absolute path", "Folder of the backups; without it none are made."),
    "every": (DURATION, "Interval."),
    "keep": ("number", "Number of latest backups kept."),
    "keep_days": ("number", "Days for which one backup a day is kept."),
}
LOGS = {
    "max_per_job": (MEMORY, "Per rank."),
    "max_total": (MEMORY, "Beyond it the oldest are removed."),
}
IDLE = {
    "after": (DURATION, "Required. All GPUs of a job are idle for so long."),
    "below": ("percent", "Utilization below which a GPU is idle."),
    "then": ("`warn`, `signal`, `requeue` or `cancel`", "The action."),
    "warn_before": (DURATION, "Time of the warning before the action. Default: `15m`, at most half of `after`."),
    "exempt": ("mapping with `users`, `groups`, `names`, `partitions`", "Jobs without a rule. `names`: `jupyter-*`."),
    "sessions": (
        "mapping with `after`, `below`, `then`, `warn_before`",
        "Overrides for `gpusched run`. Sessions are cancelled where others are requeued.",
    ),
}
PARTITION = {
    "nodes": (
        "list of names, ranges such as `dgx[1-4]`, or mappings",
        "Required. A bare name or range is a node with the defaults.",
    ),
    "defaults": ("mapping of node keys", "Defaults of the partition's nodes."),
    "flavors": ("mapping: name -> flavor", "The largest one bounds free requests."),
    "policy": ("name", "A later promotion overrides it."),
    "auto_promote": (BOOL, "As in settings, for this partition."),
    "default": (BOOL, "The partition of jobs that name none; at most one."),
    "preemptible": (
        BOOL,
        "Default of `--preemptible`.",
    ),
    "idle": ("mapping or `none`", "Over the settings', [below](#idle)."),
    "placement": ("mapping", "[Below](#placement)."),
    "resizable": ("mapping", "[Below](#resizable)."),
    "slurm_env": (
        BOOL,
        "Default of `--slurm-env`.",
    ),
    "image": ("image", "For jobs that name none."),
    "max_time": (LIMIT, "The longest time limit. Default: the longest flavor's."),
}
PLACEMENT = {
    "max_spread": ("`rack` or `any`", "Default of `--max-spread`."),
    "wait": (DURATION, "Default of `--placement-wait`."),
}
RESIZABLE = {
    "min": ("number of GPUs", "Smaller jobs are refused."),
    "max": ("number of GPUs", "Larger jobs are refused. Default: the largest flavor."),
    "cooldown": (DURATION, "Default of `--cooldown`."),
    "batch": ("`fixed` or `scale`", "Default of `--batch`."),
    "default": (
        BOOL,
        "Jobs with `--gpus` and without `--flavor`, `--nodes`, `--gpus-per-node` or `--no-resizable` are resizable.",
    ),
}
NODE = {
    "name": ("name or range", "Required in a node's mapping."),
    "address": ("host name, IP address, `~/.ssh/config` alias, or range", "For SSH. Default: the name."),
    "fabric_address": ("host name or IP address", "In MASTER_ADDR and the hostfile. Default: the address."),
    "transport": (
        "`ssh`, `local` or `none`",
        "`local`: this machine. `none`, only under `engine: slurm`: never probed.",
    ),
    "user": ("user name", "Login user. Default: as in `~/.ssh/config`, else the controller's user."),
    "become": (
        "`sudo`",
        "Run commands by `sudo -n`.",
    ),
    "port": ("1 to 65535", "Default: as in `~/.ssh/config`, else 22."),
    "key": ("path", "Private key, tried first."),
    "gpus": ("0 to 64", "Required unless gpu_indices is given."),
    "cores": ("number", "Required. CPU cores for jobs."),
    "memory": (MEMORY, "Required. Memory for jobs."),
    "gpu_type": ("text", "For `--gpu-type` and `gpusched check`."),
    "gpu_indices": ("`[0, 1, 3]` or `0-3`", "NVML indices for jobs. Default: 0 to gpus-1."),
    "rated_power": (
        "`6.5kW`, `6500W` or `6500`",
        "Of the whole server, for inefficient energy.",
    ),
    "runtime": (
        "`podman`, `docker`, `apptainer`, `process`, or one of [another package](../guides/extending.md#a-runtime)",
        "Required. How jobs run.",
    ),
    "simulated_gpus": (BOOL, "Figures are simulated, for demonstrations only."),
    "sharing": (
        "mapping",
        "[Below](#sharing). Default: no.",
    ),
    "health": (
        "mapping: condition -> `warn`, `no-new-jobs`, `drain` or `requeue`",
        "Actions on [conditions](../guides/health.md) of its GPUs. Joined with those of `defaults`.",
    ),
    "kernel_log": (
        "absolute path",
        "File with kernel messages, for [Xids](../guides/health.md#sources-of-xids). Default: the kernel's buffer, "
        "else journald.",
    ),
    "health_checks": (
        "list of checks",
        "[Below](#health_checks). A node's list replaces that of `defaults`.",
    ),
    "mig": (
        "`fixed`, `on-demand` or mapping",
        "`fixed`: GPUs in MIG mode stay as they are cut. `on-demand`: gpusched cuts them. Mapping: [below](#mig). "
        "Default: `fixed`.",
    ),
}
HEALTH_CHECK = {
    "name": ("name", "Required."),
    "command": ("text", "Required. For `sh`, as the login account."),
    "every": (DURATION, "Between starts. Required without `before_job`."),
    "timeout": (DURATION, "After which it is killed, and hangs."),
    "before_job": (BOOL, "It must pass before a job starts."),
    "then": (
        "`warn`, `no-new-jobs` or `drain`",
        "`no-new-jobs` until it passes, `drain` until `gpusched resume`. `warn` is not for `before_job`.",
    ),
}
SHARING = {
    "mode": (
        "`mps`, `time-slicing` or `none`",
        "Required. `mps`: CUDA's Multi-Process Service, for jobs of one user. `time-slicing`: by the driver. "
        "`none`: to override `defaults`.",
    ),
    "slowdown": ("0 to 100", "Maximum predicted slowdown of either job."),
    "pipe": ("absolute path", "With `mps`: folder of the daemon's pipes."),
}
MIG = {
    "mode": ("`fixed` or `on-demand`", "Required in a mapping."),
    "gpus": ("`[0, 1, 3]` or `0-3`", "NVML indices that may be cut. Default: all."),
    "command": ("command", "Runs nvidia-smi as root on the node."),
    "cdi_command": ("command", "With podman: rewrites the CDI specification, after each cut."),
}
FLAVOR = {
    "gpus": ("number, or `1g.10gb:2`", "Required. Of the whole job; MIG slices by profile."),
    "cores": ("number", "Required. Of the whole job."),
    "memory": (MEMORY, "Required. Of the whole job."),
    "time": (LIMIT, "Required. Default and maximum time limit."),
}
LIMITS = {
    "gpus": ("number or `none`", "GPUs of running jobs."),
    "jobs": ("number or `none`", "Running jobs."),
    "queued": ("number or `none`", "Pending jobs; each array task counts. More are refused."),
    "gpu_hours": (
        "number or `none`",
        "In seven days; running jobs count by their time limit.",
    ),
    "time": ("time limit or `none`", "Longer jobs are refused."),
}
GROUP = {
    "members": (
        "list of users, or a mapping from users to shares",
        "A job is charged to `--group`, else to its user's first group.",
    ),
    "parent": ("name", "Also charged for its subgroups' jobs."),
    "limits": ("mapping of limits", "With its subgroups."),
    "shares": ("number", "Shares among the parent's groups, for `order: fairshare`."),
}
QOS = {
    "priority": ("number", "Added to its jobs'."),
    "users": ("list of users", "Who may use it; without both, everybody."),
    "groups": ("list of groups", "With subgroups."),
    "limits": ("mapping of limits", "Of all its jobs together."),
    "per_user": ("mapping of limits", "Of each user's jobs in it."),
    "preemptible": (
        BOOL,
        "Overrides the job's own setting.",
    ),
    "exempt": (BOOL, "Only its own limits count."),
}
SWITCH = {
    "nodes": (
        "list of names and ranges, or a text such as `dgx[1-4],dgx7`",
        "Directly on it; each is on one switch only.",
    ),
    "uplink": (
        "bit rate: `100G`, `4x100G`, `1.6T`, `400Gb/s`",
        "All uplinks, one direction. Default: unlimited.",
    ),
    "parent": ("name", "The switch above; without an entry it is at the top."),
}

NOTICES = {
    "to": ("list of receivers", "Besides users with `--mail`; see below."),
    "smtp": ("`host` or `host:port`", "Mail server. Default: `sendmail`."),
    "from": ("mail address", "Sender. Default: `gpusched@` the mail server."),
    "idle": (DURATION, "Idle time of GPUs until a notice."),
}
RECEIVER = {
    "webhook": ("URL", "Receives each notice as JSON by POST."),
    "command": (
        "list of words",
        "Receives it on stdin, for at most 30 s.",
    ),
    "notifier": ("name", "[Component](../guides/extending.md) that sends it."),
    "options": ("mapping of texts", "Options of the notifier."),
    "on": ("list", "Any of `begin`, `end`, `fail`, `requeue`, `limit`, `node`, `idle`, `all`."),
    "users": ("list of users", "Only their jobs. Default: all jobs, and nodes."),
}

JOB_STATES = {
    JobState.PENDING: "In the queue; see its reason.",
    JobState.STARTING: ("Its containers are being prepared, images pulled."),
    JobState.RUNNING: "All its ranks run.",
    JobState.COMPLETING: "Signalled, or its last ranks still run.",
    JobState.COMPLETED: "All ranks exited with 0.",
    JobState.FAILED: "A rank exited with another code, or the launch failed through the job's own fault.",
    JobState.CANCELLED: "Cancelled by a user.",
    JobState.TIMEOUT: "Exceeded its time limit.",
    JobState.OUT_OF_MEMORY: "A rank was killed for exceeding its requested memory.",
    JobState.NODE_FAIL: "Its node failed, and it may not be requeued.",
    JobState.PREEMPTED: ("Of a preempted attempt. The job itself is requeued and never has this state."),
}
NODE_STATES = {
    NodeState.IDLE: ("yes", "It answers, and no job holds resources on it."),
    NodeState.MIXED: ("yes", "Jobs hold some of its resources."),
    NodeState.ALLOCATED: ("yes, without GPUs", "Jobs hold all its GPUs."),
    NodeState.DOWN: (
        "no",
        "The node or its container engine does not answer, or its login or host key is refused.",
    ),
    NodeState.DRAINING: ("no", "Drained, held by a health check, or not in inventory.yaml any more; jobs run on it."),
    NodeState.DRAINED: ("no", "Drained, or held by a health check, and empty."),
    NodeState.UNKNOWN: ("no", "Not probed yet, or silent for less than `down_after`."),
}
GPU_STATES = {
    GpuState.FREE: "Available to jobs.",
    GpuState.ALLOCATED: "Held by a job.",
    GpuState.BUSY: "In use without a job: by a process that gpusched did not start, by an attempt being cleaned up, "
    f"or more than {HIDDEN_PROCESS_MEMORY_MIB} MiB of its memory are used by no process that NVML "
    "shows.",
    GpuState.LOST: "The driver cannot reach it or does not list it. The node's other GPUs stay in use.",
    GpuState.SLICED: "Cut into MIG slices, which have states of their own.",
    GpuState.UNUSABLE: "Present, but not allocated: it is in MIG mode without slices, or a "
    "[condition](../guides/health.md) keeps jobs off.",
    GpuState.UNKNOWN: "The node has not been probed, or neither NVML nor nvidia-smi answers there.",
}
REASONS = {
    ReasonCode.JOB_HELD_ADMIN: "Held by an admin: ask one for `gpusched release JOB`.",
    ReasonCode.JOB_HELD_USER: "Held by its user, until `gpusched release JOB`.",
    ReasonCode.PARTITION_UNKNOWN: (
        "Its partition was removed from the inventory: submit it to another one, or put the partition back."
    ),
    ReasonCode.BAD_CONSTRAINTS: (
        "It would not fit even on the empty partition, since the inventory has changed: request less, or more or "
        "other nodes (`-N`, `--nodelist`)."
    ),
    ReasonCode.NOT_ELIGIBLE: (
        "Slurm does not let it start; the message has Slurm's reason, `scontrol show job JOB` more."
    ),
    ReasonCode.DEPENDENCY_NEVER_SATISFIED: (
        "A job it depends on does not exist, or ended otherwise: `gpusched cancel JOB`, or `gpusched requeue` the "
        "other one. The job stays in the queue until then."
    ),
    ReasonCode.DEPENDENCY: "It depends on another job: see `gpusched why` of that one.",
    ReasonCode.BEGIN_TIME: "Not before a time (`--begin`, or the delay before a retry), which `gpusched show JOB` has.",
    ReasonCode.RESERVATION: (
        "Its reservation has not begun, ends too soon, is not for its user, or no longer exists: see `gpusched "
        "reservations`. If it can never run there, cancel it and submit it again."
    ),
    ReasonCode.ARRAY_TASK_LIMIT: "Its array has reached the `%N` limit on running tasks.",
    ReasonCode.ASSOC_GRP_GRES: (
        "Its user or a charged group has reached its GPU limit. The message names the limit and until when; "
        "`gpusched quota` shows all of yours."
    ),
    ReasonCode.ASSOC_MAX_JOBS: "Its user has reached the limit on running jobs.",
    ReasonCode.ASSOC_GRP_JOBS: "A group that is charged has reached its limit on running jobs.",
    ReasonCode.ASSOC_GRP_GRES_MINUTES: (
        "Its user or group has reached its limit on GPU hours in seven days. A shorter time limit is charged less."
    ),
    ReasonCode.QOS_GRP_GRES: "Its class has reached its GPU limit: wait, or use another `--qos`, here and below.",
    ReasonCode.QOS_GRP_JOBS: "Its class has reached its job limit.",
    ReasonCode.QOS_GRP_GRES_MINUTES: "Its class has reached its limit on GPU hours.",
    ReasonCode.QOS_MAX_GRES_PER_USER: "Its user has reached the GPU limit of the class.",
    ReasonCode.QOS_MAX_JOBS_PER_USER: "Its user has reached the job limit of the class.",
    ReasonCode.QOS_MAX_GRES_MINUTES_PER_USER: (
        "Its user has reached the limit on GPU hours of the class (not a Slurm reason)."
    ),
    ReasonCode.REQ_NODE_NOT_AVAIL: (
        "It would fit if resources that are DOWN, DRAINED, LOST, BUSY or UNUSABLE came back: see `gpusched nodes`; "
        "repair and `gpusched resume` the node, or end the foreign process. Or nodes are reserved and it could not "
        "end before that (`Reserved for maintenance`, `May be reserved for other job`): request a shorter limit, as "
        "`gpusched why` suggests."
    ),
    ReasonCode.RESOURCES: "Waits for resources that running jobs hold. The message has the latest time, if known.",
    ReasonCode.PRIORITY: "Other jobs are ahead of it in the queue. An admin can raise its priority.",
    ReasonCode.BACKFILL: (
        "Fits now, but would delay the head of the queue: request a shorter time limit, as `gpusched why` suggests."
    ),
    ReasonCode.POLICY: "Fits now, but the policy did not choose it in this cycle.",
    ReasonCode.REJECTED: (
        "The check of the plan rejected it: report it as a bug of the policy. The event `plan_rejected` has the "
        "details."
    ),
}

# A leading "?" marks a key that may be null; a meaning that is empty otherwise needs no explanation.
_JOB = {
    "id": "`ID_INDEX` of an array task, `ID_[3-9]` of several in one entry.",
    "name": "",
    "user": "",
    "partition": "",
    "flavor": "?",
    "state": "",
    "reason": "?Why it is in this state: a word; a sentence.",
    "message": "?Why it is in this state: a word; a sentence.",
    "nodes": "By rank.",
    "gpus": "",
    "submit_time": "",
    "eligible_time": "?",
    "start_time": "?",
    "end_time": "?",
    "elapsed_s": "?",
    "time_limit_s": "",
    "exit_code": "?",
    "energy_j": "?Measured, of its GPUs.",
    "array_id": "?",
    "array_index": "?",
    "array_tasks": "?Of several array tasks in one entry: indices, `3-9,12`; number.",
    "array_count": "?Of several array tasks in one entry: indices, `3-9,12`; number.",
    "attempt": "",
    "retries": "",
    "preemptions": "",
    "priority": "",
    "held_by": "?`user` or `admin`.",
    "policy": "?Those that decided its start.",
    "policy_version": "Those that decided its start.",
    "resizes": (
        "?Of a resizable job: `count`, `why` (the last), `cost_s` (mean), `lost_s` (work lost), `unusable` sizes, "
        "`frozen` (why it is no longer resized)."
    ),
    "progress": (
        "?As reported by the job: `step`, `of`, `steps_per_s`, `samples_per_s`, `time`, `left_s` (at its recent pace), "
        "`saved_step`, `saved_time`, `error`."
    ),
    "slower": "?Estimated slowdown by placement and neighbours: 0.2 is 1.2 times the time.",
    "fallback": "?While pending: why the partition's fallback decides.",
    "shared_with": "?",
    "idle": (
        "?While all GPUs of an active job are idle, under [a rule](../guides/idle.md): `since`, `idle_s`, "
        "`below`, `then`, `time` (of the action), `warned`, `acted`."
    ),
}
_SIZES_NOW = (
    "?Of a pending resizable job where the policy chooses sizes: `fits` (sizes that fit now), `least` (which it waits "
    "for), `given` (which the policy would start it with, or null), `shrinks` (jobs that would shrink first: `id`, "
    "`from`, `to`), `message`."
)
JSON: dict[str, dict[str, str]] = {
    "status": _JOB,
    "slurm": {
        "state": "",
        "reason": "?",
        "account": "",
        "qos": "",
        "partitions": "",
        "priority": "",
        "site_factor": "Set by mode advise or the site's plugin.",
        "restarts": "",
        "requeue": "",
        "reservation": "?",
        "nodelist": "As its user requested.",
        "pinned": "Of the start that mode decide requested: nodes, time.",
        "pinned_time": "?Of the start that mode decide requested: nodes, time.",
        "gres_positions": "Node: its GPUs' positions in gres.conf, if reported.",
    },
    "show": {
        "spec": "[Below](#spec).",
        "sizes_now": _SIZES_NOW,
        "spreads": "As in [why](#why).",
        "speeds": "By GPU count: reported steps per second.",
        "place_costs": (
            "Components of `slower`, racks first: `slower`, bounds `low` and `high`, `measurements`, `source` "
            "(`measured`, `formula`, `others`), `note`."
        ),
        "allocation": "By rank: `rank`, `node`, `gpus` (NVML indices), `cores`, `memory_mib`.",
        "excluded_nodes": "",
        "attempts": "{attempt}",
        "events": "Oldest first. {event}",
        "tasks": "Of an array, as in [status](#status).",
    },
    "attempt": {
        "attempt": "",
        "time": "",
        "nodes": "",
        "outcome": "?How and why it ended.",
        "message": "?How and why it ended.",
    },
    "event": {
        "time": "",
        "kind": "See [events](monitoring.md#events).",
        "node": "?",
        "user": "?",
        "data": "",
    },
    "spec": {
        "name": "",
        "partition": "",
        "flavor": "?",
        "nodes": "",
        "gpus_per_node": "",
        "cores_per_node": "",
        "memory_mib_per_node": "",
        "time_limit_s": "",
        "image": "?Null: the partition's.",
        "command": "",
        "workdir": "?",
        "env": "",
        "secret_names": "No output has the values.",
        "mounts": "`source`, `target`, `read_only`.",
        "output": "?Files as given; `error` null: as `output`.",
        "dependencies": "`kind`, `job_id`.",
        "begin_time": "?",
        "priority": "",
        "nice": "",
        "hold": "",
        "requeue": "",
        "preemptible": "",
        "signal": "Without SIG.",
        "signal_before_s": "?",
        "nodelist": "",
        "exclude": "",
        "gpu_types": "",
        "elastic": (
            "?Of a resizable job: `sizes` (allowed), `base_gpus`, `base_cores`, `base_memory_mib`, `cores` and "
            "`memory_mib` (minimum and maximum; null: in proportion to the GPUs), `batch`, `cooldown_s`. The resources "
            "above are of its current size."
        ),
        "max_spread": "`server`, `rack`; `any` or empty: anywhere.",
        "max_nodes": "?Most nodes for its GPUs; null: exactly `nodes`.",
        "placement_wait_s": "?Null: the policy's.",
        "exclusive": "",
        "share": "`pairs`, or empty.",
        "gpu_memory_mib": "?With `share`: per GPU.",
        "script": "?",
        "gpus_per_task": "For `srun`; GPUs 0: all of the node's.",
        "function": "Python function, or empty.",
        "array_shape": "Number of tasks, first index, last index, step.",
        "signal_batch": "",
        "submit_dir": "",
        "tasks_per_node": "For `srun`; GPUs 0: all of the node's.",
        "memory_mib_per_cpu": "0: requested otherwise.",
        "slurm_env": "",
        "error": "?Files as given; `error` null: as `output`.",
        "append": "",
        "group": "Empty: none.",
        "qos": "Empty: none.",
        "reservation": "Empty: none.",
        "mail": "Empty: none.",
        "notify": "",
        "pty": "",
        "profile": "Of its MIG slices, such as `1g.10gb`.",
        "session": "?Seconds that a session may be detached.",
        "comment": "",
    },
    "why": {
        "id": "",
        "state": "",
        "reason": "?The dominant reason: a word; a sentence.",
        "message": "?The dominant reason: a word; a sentence.",
        "exit_code": "?",
        "position": "?In its partition's queue, from 1.",
        "queue_length": "Eligible jobs that could run.",
        "nodes": "Of the partition: `name`, `fits` (bool), `message`.",
        "next_steps": "Most useful first.",
        "expected_start": (
            "?From simulations of the current queue with sampled run times: `median`, `low` and `high` (10th and 90th "
            "percentile; null: beyond the horizon), `by_limits` (if every job uses its whole time limit), `nodes` (the "
            "most frequent), `nodes_share` (of runs, 0 to 1), `never`? (why it does not start), `runs` (number), "
            "`assumptions`."
        ),
        "spreads": (
            "Of a pending job that may span nodes, for one server, one rack, and anywhere: `spread` (`server`, `rack`, "
            "`any`), `how` (options of `submit`), `start`, `low`, `high` (as above), `nodes`, `racks` (null without "
            "racks), `cost` (null: unknown, or the closest; else as `place_costs` in [show](#show), with an 80 % "
            "interval), `message`."
        ),
        "sooner": (
            "How it would start sooner: `what` (`with 4 GPUs`, `in V100`, ...), `how` (options of `submit`, a command, "
            "or null), `start`, `now` (it would start at once), `nodes`."
        ),
        "warning": "?Why nothing starts at all.",
        "fallback": "?As in [status](#status).",
        "stopped": "?Its preemptions: how often, when last, for which job.",
        "sizes_now": "?As in [show](#show).",
        "job": "As in [status](#status).",
    },
    "dry-run": {
        "dry_run": "",
        "spec": "[As above](#spec); `begin_time` in Unix seconds.",
    },
    "reservations": {
        "name": "",
        "kind": "`reservation` or `maintenance`.",
        "state": "`planned` or `active`.",
        "nodes": "",
        "gpus": "",
        "begin": "",
        "end": "",
        "users": "Whose jobs may run in it.",
        "groups": "Whose jobs may run in it.",
        "by": "Its creator; empty until processed.",
        "reason": "",
        "running": "",
        "late": "Other jobs on its nodes that may reach past its begin.",
    },
    "reserved": {
        "requested": "`reserve`, `maintenance`, `change` or `cancel`.",
        "name": "",
        "nodes": "",
        "begin": "",
        "end": "",
        "late": "Running jobs that may reach past its begin: `id`, `user`, `end`.",
    },
    "nodes": {
        "name": "",
        "partition": "",
        "state": "",
        "reason": "",
        "gpus_total": "",
        "gpus_free": "0 where the node accepts no jobs.",
        "power_w": "?Sums of the known GPUs.",
        "power_limit_w": "?Sums of the known GPUs.",
        "rated_power_w": "?",
        "cores_total": "",
        "cores_free": "",
        "memory_total_mib": "",
        "memory_free_mib": "",
        "load1": "?",
        "disk_free_mib": "?In the account's home.",
        "clock_skew_s": "?How far the node's clock is ahead.",
        "source": "Of GPU figures: `nvml`, `nvidia-smi`, `none`, `simulated`, `slurm` (not probed).",
        "driver_version": "?",
        "runtime_error": "?Why the engine could not be queried.",
        "last_seen": "?Time of its last answer, and seconds since.",
        "age_s": "?Time of its last answer, and seconds since.",
        "stale": "Older than three ticks (at least 15 s).",
        "gpus": "{gpus}",
        "reserved": "?Present or next reservation.",
        "slices": "MIG profile: slices a job could get now, and in all.",
        "conditions": "[Conditions](../guides/health.md). {conditions}",
    },
    "node-check": {
        "node": "",
        "check": "",
        "state": "?`ok`, `failed` or `hung`; null: it has never run.",
        "running": "",
        "since": "?",
        "began": "?Of the last run.",
        "ended": "?Of the last run.",
        "exit_code": "?Null where it hung.",
        "line": "",
        "value": "?Of that run.",
        "unit": "Of that run.",
        "median": "?Of the 20 values before the last.",
        "slow_since": "?Since when values are 20 % below the median.",
        "values": "The last 200, oldest first.",
    },
    "failures": {
        "node": "",
        "gpu": "?Null: the node as a whole.",
        "attempts": "",
        "failed": "Failures of a job name in a row on the same GPUs count once.",
        "out_of_memory": "In no other number.",
        "compared": "Attempts of job names that also ran elsewhere; those that failed.",
        "failed_compared": "Attempts of job names that also ran elsewhere; those that failed.",
        "expected": "Failures if these had failed as often as elsewhere.",
        "p_value": "Of so many failures, or more, by chance.",
        "corrected": "For the number of GPUs and nodes (Holm).",
        "named": "`corrected` is at most 0.05.",
    },
    "conditions": {
        "condition": "",
        "gpu": "?NVML index and UUID; null: of the node.",
        "uuid": "?NVML index and UUID; null: of the node.",
        "action": "",
        "since": "",
        "last_seen": "",
        "detail": "",
        "advice": "",
        "job": "?",
        "check": "?Of `check-failed`, `check-hung`, `check-slow`.",
    },
    "gpus": {
        "index": "",
        "uuid": "?",
        "name": "?",
        "state": "",
        "reason": "",
        "job": "?",
        "user": "?",
        "shared_with": "?",
        "shared_user": "?",
        "memory_total_mib": "?",
        "memory_used_mib": "?",
        "utilization_pct": "?",
        "power_w": "?",
        "power_limit_w": "?",
        "temperature_c": "?",
        "energy_j": "?NVML's counter since the driver was loaded.",
        "ecc_errors": "?Volatile uncorrected errors.",
        "mig_mode": "?",
        "processes": "{processes}",
        "slices": "Of a cut GPU: `label` (`3:1g.10gb@4`), `profile`, `start`, `uuid`, `state`, `reason`, "
        "`job`, `user`, `memory_total_mib`, `memory_used_mib`.",
    },
    "topology": {
        "source": "`declared`, `discovered` (LLDP, NVLink domains) or `none`.",
        "switches": "Upper ones first. {switch}",
        "nodes": "{wired-node}",
    },
    "switch": {
        "name": "",
        "nodes": "Directly on it.",
        "uplink_gbps": "?All uplinks together, one direction.",
        "parent": "?",
    },
    "wired-node": {
        "name": "",
        "partition": "",
        "switch": "?",
        "gpus_total": "",
        "read": "Whether the rest was ever read.",
        "islands": "Lists of GPUs that NVLink connects.",
        "domains": "NVLink domains: clusterUuid.cliqueId.",
        "fabric_gbps": "?All NICs for gangs (RDMA, else the fastest).",
        "gpus": "By index: `pci_path`? (from the root), `numa`?, `domain`?.",
        "nics": "By port. {nic}",
    },
    "nic": {
        "name": "`mlx5_0`, `mlx5_0/2` (a second port), or `eth0` without an RDMA device.",
        "kind": "`infiniband`, `roce`, `rdma` (another one) or `ethernet`.",
        "interface": "?",
        "up": "?",
        "rate_gbps": "?One direction; null also without a link.",
        "pci_path": "PCI addresses from the root.",
        "numa": "?",
        "switch": "?The neighbour and its port, by LLDP.",
        "switch_port": "?The neighbour and its port, by LLDP.",
    },
    "processes": {
        "pid": "",
        "user": "?",
        "command": "?",
        "memory_used_mib": "?",
        "container": "?Its attempt; null for a foreign process.",
        "utilization_pct": "?Where several processes use the GPU, if NVML reports it.",
        "gi": "?Id of its GPU instance, with MIG.",
    },
    "flavors": {
        "partition": "",
        "flavor": "",
        "gpus": "Of the whole job.",
        "cores": "Of the whole job.",
        "memory_mib": "Of the whole job.",
        "time_limit_s": "",
        "nodes": "?Their number; null where it never fits.",
        "share": "Its share of the partition (λ), 0 to 1.",
        "free_now": "",
    },
    "quota": {
        "users": "",
        "rows": "{quota-row}",
        "classes": "{quota-class}",
        "shares": "Empty without groups. {quota-share}",
        "now": "",
    },
    "quota-row": {
        "subject": "`user ann`, `group physics`, `class high`, `user ann in class high`.",
        "resource": "`gpus`, `jobs`, `queued`, `gpu_hours` or `time` (seconds).",
        "used": "?`gpu_hours`: in seven days, running jobs by their limits. Null for `time`.",
        "limit": "",
        "left": "?At least 0; null for `time`.",
        "reason": "Of jobs that it holds or refuses.",
        "frees": "?If exhausted: when some is free at the latest.",
    },
    "quota-class": {
        "name": "",
        "priority": "",
        "preemptible": "?Null: as the job specifies.",
        "exempt": "Only its own limits count.",
    },
    "quota-share": {
        "group": "Empty: none.",
        "user": "",
        "shares": "",
        "gpu_hours": "Recent usage, decayed with `fairshare_half_life`.",
        "place": "Rank under `order: fairshare`, from 1; equal users share one.",
    },
    "audit": {
        "seq": "Ascending; 0: in no file yet.",
        "time": "When it was applied or refused.",
        "unix_s": "",
        "host": "",
        "user": "",
        "uid": "As the kernel reports it; -1: unknown.",
        "via": "`inbox`, `relay`, `page`, `command` (an operator's), `job ID` (from inside it).",
        "origin": "Where it was typed, by the client's account; empty: unknown.",
        "command": "`malformed`: not a command.",
        "subject": "At most 20 jobs, nodes ...; `data.subjects`: their number.",
        "result": "`applied` or `refused`.",
        "reason": "",
        "data": "Of a policy's change: `policy`, `version`, `digest`, `forced` ...",
    },
    "audit-policy": {
        "partition": "",
        "policy": "",
        "version": "",
        "digest": "Of its weights; empty: none.",
        "act": "The [change](#policy) that made it active.",
        "user": "Empty: a change of files.",
        "since": "",
        "until": "?Null: it is active.",
        "forced": "",
        "starts": "That it decided: `job`, `time`, `nodes`.",
        "count": "",
    },
    "power": {
        "since": "As requested, or the first record.",
        "until": "",
        "by": "`partition`, `node`, `user` or `job`.",
        "currency": "",
        "price_per_kwh": "?",
        "rows": "{power-row}",
        "total": "{power-row}",
        "unheld_kwh": "?GPU energy while unallocated.",
        "held_idle": "{held-idle}",
        "simulated": "Nodes with simulated figures.",
    },
    "power-row": {
        "name": "Partition, node, user or job id.",
        "partition": "?",
        "user": "?",
        "hours": "?Of the window (T of Eq. 3); null for users and jobs.",
        "gpu_hours": "",
        "utilization": "?Eq. 4, 0 to 1; of users and jobs their part.",
        "measured_utilization": "?NVML's, 0 to 1, where known.",
        "idle_gpu_hours": "?GPU hours held below 5 % measured utilization (`idle.below`).",
        "idle_energy_kwh": "?Likewise, in these hours.",
        "idle_energy_unknown_share": (
            "?Likewise, in these hours."
        ),
        "energy_kwh": "?Measured; share of GPU time not measured: above 0 the energy is a lower bound.",
        "energy_unknown_share": "?Measured; share of GPU time not measured: above 0 the energy is a lower bound.",
        "rated_kwh": "?",
        "inefficient_kwh": "?Rated power × hours × (1 - utilization); its cost.",
        "inefficient_cost": "?Rated power × hours × (1 - utilization); its cost.",
        "cost": "?",
    },
    "held-idle": {
        "job": "",
        "name": "",
        "user": "",
        "partition": "",
        "nodes": "",
        "gpus": "Held; of these idle on average.",
        "idle_gpus": "Held; of these idle on average.",
        "idle_s": "",
    },
    "idle": {
        "since": "As requested, or the first record.",
        "until": "",
        "currency": "",
        "price_per_kwh": "?",
        "users": "Most idle GPU hours first. {idle-row}",
        "jobs": "Most idle GPU hours first. {idle-row}",
        "total": "As one of these.",
    },
    "idle-row": {
        "user": "",
        "job": "?Null in `users`.",
        "name": "?Null in `users`.",
        "partition": "?Null in `users`.",
        "gpu_hours": "",
        "idle_gpu_hours": "Held below the utilization threshold.",
        "energy_kwh": "?As [above](#power), of the idle hours.",
        "energy_unknown_share": "?As [above](#power), of the idle hours.",
        "cost": "?",
        "running": "",
    },
    "policy": {
        "name": "",
        "partition": "?",
        "state": "`live` (active), `shadow`, `candidate`, or `retired` (formerly active).",
        "version": "",
        "agent": "?",
        "trained_at": "?",
        "trace": "?Name and digest of its training workload.",
        "trace_sha256": "?Name and digest of its training workload.",
        "verdict": "?The replay of its promotion or of the last night.",
        "since": "?Since when and why it is in this state.",
        "by": "?Null: inventory.yaml.",
        "note": "?Since when and why it is in this state.",
        "fallback": "?Why its fallback decides, a shadow had no answer, or which component is broken.",
        "kept_anyway": "?Why the gate of its training was closed, if it was saved anyway.",
        "path": "?",
        "origin": "Package of its components, with the version of another.",
        "mode": "Under Slurm.",
    },
    "policy-change": {
        "time": "",
        "partition": "",
        "act": "`promote`, `rollback`, `inventory` (it names another) or `files` (they changed).",
        "user": "?Null: a change of files.",
        "from_name": "?",
        "from_version": "?",
        "name": "",
        "version": "",
        "forced": "",
        "reason": "",
        "verdict": "?The replay that justified a promotion.",
        "mode": "As above.",
    },
    "policy-page": {
        "name": "",
        "version": "",
        "description": "",
        "origin": "`site`, `built-in`, `frozen` (a promoted copy) or `candidate` (trained at night).",
        "path": "",
        "agent": "?",
        "order": "",
        "place": "",
        "backfill": "",
        "sizes": "`base` (as submitted) or a rule; with an agent the fallback's.",
        "fallback": "?",
        "budget_s": "?",
        "schedulers": "?Of an agent that chooses nodes.",
        "live": "Partitions where exactly this version is active.",
        "modes": "Partition: `mode`.",
        "weights": "Partition: what they decide by, or why they are unusable.",
        "cards": "Partition: its training card.",
        "shadows": "{shadow}",
        "differences": "Last differing decisions: `partition`, `time`, `live`, `shadow` (job: nodes; none: stopped).",
    },
    "shadow": {
        "partition": "",
        "version": "",
        "since": "",
        "until": "?",
        "by": "",
        "decisions": "Answers; of these the same as the live policy's.",
        "same": "Answers; of these the same as the live policy's.",
        "late": "Times it exceeded its budget.",
        "unusable": "Times it had no answer.",
        "trouble": "?Why it last had no answer.",
        "live_starts": "Jobs started; and had the shadow decided.",
        "shadow_starts": "Jobs started; and had the shadow decided.",
        "verdict": "?",
    },
    "verdict": {
        "partition": "`default` for a trace on nodes of no partition.",
        "candidate": "",
        "candidate_version": "",
        "incumbent": "",
        "incumbent_version": "",
        "since": "?First and last submission.",
        "until": "?First and last submission.",
        "days": "",
        "jobs": "Jobs that ended in both replays.",
        "incumbent_mean_jct_s": "?",
        "candidate_mean_jct_s": "?",
        "gain": "?Reduction of mean JCT by the candidate: 0.1 is 10 %.",
        "low": "?",
        "high": "?",
        "passed": "`low` is at least 0.",
        "line": "",
        "changes": "As [`change`](#replay) of a replay.",
    },
    "check": {
        "subject": "A file, a node, or `state`.",
        "check": "",
        "status": "`ok`, `warn` or `fail`.",
        "message": "",
        "hint": "What to do, or empty.",
    },
}

JOB_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": (
        "Its GPUs on this node: in podman and docker, whose containers see no others, from 0; else NVML indices."
    ),
    "CUDA_DEVICE_ORDER": "Makes CUDA number GPUs as NVML does.",
    "MASTER_ADDR": "fabric_address of rank 0's node, else its address.",
    "MASTER_PORT": "20000 to 29999, the same for all ranks.",
    "WORLD_SIZE": "Number of nodes.",
    "RANK": "Of this node, from 0.",
    "NODE_RANK": "Of this node, from 0.",
    "LOCAL_RANK": "Always 0: gpusched starts one process per node.",
    "OMP_NUM_THREADS": "Cores per GPU on this node.",
    "CUDA_MPS_PIPE_DIRECTORY": "With `--share` by MPS: folder of the daemon's pipes.",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "With `--share` by MPS: `--gpu-mem` per GPU, enforced by CUDA.",
    "GPUSCHED_JOB_ID": "",
    "GPUSCHED_JOB_NAME": "",
    "GPUSCHED_ATTEMPT": "1 for the first start.",
    "GPUSCHED_PARTITION": "",
    "GPUSCHED_NODE": "This node.",
    "GPUSCHED_NODELIST": "All nodes, by rank.",
    "GPUSCHED_GPUS": "NVML indices of its GPUs on this node.",
    "GPUSCHED_GPUS_PER_NODE": "",
    "GPUSCHED_USER": "Who submitted it.",
    "GPUSCHED_ARRAY_ID": "In tasks of arrays.",
    "GPUSCHED_ARRAY_INDEX": "In tasks of arrays.",
    "GPUSCHED_CONTAINER": "Name of the attempt, which marks its processes.",
    "GPUSCHED_JOB_DIR": (
        "The job's own folder, kept between attempts ([progress](../guides/submitting.md#progress)); removed once the "
        "job has ended, except with `job_dirs`."
    ),
    "GPUSCHED_GPUS_TOTAL": "Of the whole job.",
    "GPUSCHED_GPUS_MIN": "Of [resizable jobs](../guides/resizing.md): minimum and maximum GPUs.",
    "GPUSCHED_GPUS_MAX": "Of [resizable jobs](../guides/resizing.md): minimum and maximum GPUs.",
    "GPUSCHED_GPUS_BASE": "Of resizable jobs: GPUs that batch size and learning rate were tuned for.",
    "GPUSCHED_BATCH": "Of resizable jobs: `fixed` or `scale`, as submitted.",
    "GPUSCHED_RESIZE": "Of jobs with `--resizable hot`.",
    "GPUSCHED_RESIZES": "Of resizable jobs: number of resizes.",
    "GPUSCHED_HOSTFILE": "In gangs: a file with one line per rank, `address slots=GPUS`.",
    "GPUSCHED_SPOOL": "In job scripts: folder of the script, srun and scontrol; marks its processes.",
    "GPUSCHED_RUN_PID": "In job scripts, for srun: the process with the job's variables.",
    "SLURM_JOB_ID": "Not a number.",
    "SLURM_JOB_NAME": "",
    "SLURM_JOB_PARTITION": "",
    "SLURM_JOBID": "Not a number.",
    "SLURM_JOB_USER": "",
    "SLURM_JOB_UID": "",
    "SLURM_JOB_ACCOUNT": "Its group, class of service, reservation, if any.",
    "SLURM_JOB_QOS": "Its group, class of service, reservation, if any.",
    "SLURM_JOB_RESERVATION": "Its group, class of service, reservation, if any.",
    "SLURM_JOB_GPUS": "NVML indices of its GPUs on this node.",
    "SLURM_JOB_CPUS_PER_NODE": "Cores of each node.",
    "SLURM_NODELIST": "All nodes, by rank, as a plain list.",
    "SLURM_NPROCS": "Tasks of the whole job; default: one per node.",
    "SLURM_NTASKS_PER_NODE": "`srun` tasks per node.",
    "SLURM_TASKS_PER_NODE": "`srun` tasks of all nodes.",
    "SLURM_CPUS_PER_TASK": "Cores.",
    "SLURM_MEM_PER_NODE": "MiB.",
    "SLURM_MEM_PER_CPU": "MiB; with `--mem-per-cpu`, in place of SLURM_MEM_PER_NODE.",
    "SLURM_GPUS": "Of the whole job.",
    "SLURM_GPUS_PER_NODE": "",
    "SLURM_GPUS_PER_TASK": "With `--gpus-per-task`.",
    "SLURM_GTIDS": "Always 0.",
    "SLURM_SUBMIT_DIR": "Where it was submitted.",
    "SLURM_JOB_NUM_NODES": "Number of nodes.",
    "SLURM_NNODES": "Number of nodes.",
    "SLURM_JOB_NODELIST": "All nodes, by rank, as a plain list.",
    "SLURM_NODEID": "This node's rank.",
    "SLURM_PROCID": "This node's rank.",
    "SLURM_LOCALID": "Always 0.",
    "SLURM_NTASKS": "Tasks of the whole job; default: one per node.",
    "SLURM_CPUS_ON_NODE": "The job's cores and GPUs on this node.",
    "SLURM_GPUS_ON_NODE": "The job's cores and GPUs on this node.",
    "SLURM_RESTART_COUNT": "0 for the first start.",
    "SLURMD_NODENAME": "This node.",
    "SLURM_ARRAY_JOB_ID": "In tasks of arrays.",
    "SLURM_ARRAY_TASK_ID": "In tasks of arrays.",
    "SLURM_ARRAY_TASK_COUNT": "The array's number of tasks, last and first index, step.",
    "SLURM_ARRAY_TASK_MIN": "The array's number of tasks, last and first index, step.",
    "SLURM_ARRAY_TASK_MAX": "The array's number of tasks, last and first index, step.",
    "SLURM_ARRAY_TASK_STEP": "The array's number of tasks, last and first index, step.",
}
READ_VARIABLES = {
    "GPUSCHED_STATE": (
        "The state folder. Default: `/var/lib/gpusched` if it is one, else `$XDG_STATE_HOME/gpusched`, else "
        "`~/.local/state/gpusched`."
    ),
    "GPUSCHED_INVENTORY": (
        "The inventory file, or the folder of inventory.yaml. Default: `./inventory.yaml` if yours, root's or (as "
        "root) the user's of sudo, else `$XDG_CONFIG_HOME/gpusched/inventory.yaml`, else "
        "`/etc/gpusched/inventory.yaml`."
    ),
    "GPUSCHED_POLICIES": (
        "A folder of policies that override the built-in ones. Default: `policies/` beside the inventory, if it exists."
    ),
    "SLURM_CONF": "Under `engine: slurm`: the slurm.conf for Slurm's commands.",
    "GPUSCHED_DEBUG": "`1` shows the traceback of an internal error.",
    "JOURNAL_STREAM": "Set by systemd: if stderr is the journal, [the log](../guides/operating.md#the-log) is for it.",
    "XDG_STATE_HOME": "See GPUSCHED_STATE. On nodes: location of the attempts' folders, else `~/.local/state`.",
    "XDG_CONFIG_HOME": "See GPUSCHED_INVENTORY.",
    "XDG_CACHE_HOME": "Location of compiled scheduling passes; on nodes: of the cached probe. Default: `~/.cache`.",
    "NUMBA_CACHE_DIR": "Overrides the folder of compiled passes.",
    "GPUSCHED_COMPILED": (
        "`always`: short replays and forecasts are compiled, too. `numba`: numba itself caches the passes, as for an "
        "unknown version of it; commands start more slowly."
    ),
    "SSH_AUTH_SOCK": "The SSH agent whose keys are tried.",
}
