"""Answers of nodes: of the payload, and of a node without Python."""

ANSWER = {
    "cached": True, "boot_id": "b-1", "hostname": "dgx001", "cores": 128, "memory_total_mib": 1031000,
    "memory_available_mib": 900000, "load1": 1.5, "disk_free_mib": 5000, "containers": [
        {"name": "gpusched-0abc-1-0", "phase": "exited", "exit_code": 3, "id": "ignored", "cluster_id": "c"},
    ], "runtime_error": None, "runtime_version": "4.3.1", "source": "nvml", "gpu_error": None,
    "driver_version": "535.129.03", "gpus": [
        {"index": 0, "memory_total_mib": 81920, "power_w": 61, "links": {"1": 1250}, "processes": [{"pid": 7}]},
        {"index": 1, "error": "NVML: GPU is lost"},
    ], "clock": [1000.5, 1000.7],
}  # fmt: skip

SECTIONS = """motd

@gpusched-sections@

@@clock
1000

@@python3

@@boot_id
b-2

@@hostname
v100

@@cores
40

@@meminfo
MemTotal:       131072000 kB
MemAvailable:   120000000 kB

@@loadavg
0.25 0.10 0.05 1/200 4242

@@df
Filesystem     1024-blocks     Used Available Capacity Mounted on
/dev/sda1        102400000 58368000  40960000      59% /home

@@smi_gpus
0, GPU-1, Tesla V100-SXM2-32GB, 32510, 31000, 100, 287.33, 300.00, 71

@@smi_apps
GPU-1, 99, 30990

@@processes
99\tbob\t\tpython train.py --lr 1

@@end
"""
