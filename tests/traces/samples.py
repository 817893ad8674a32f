"""Small samples in the documented formats, written here, and the real data where it is."""

# ruff: noqa: E501

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "traces"


def real(name: str) -> Path:
    """A file of ../shared/data/traces; without it the test is skipped, or fails in CI."""
    if not (SHARED / name).exists():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{SHARED / name} is missing")
        pytest.skip(f"{SHARED / name} is missing")
    return SHARED / name


PHILLY_CSV = """\
submit_time,duration_s,num_gpus,vc
2017-09-04 10:30:41,2240194.0,8,7f04ca
2017-09-07 03:58:57,3256045.0,1,6214e9
2017-09-07 03:58:57,12.5,2,6214e9
"""

PHILLY = """\
[
{
    "status": "Pass",
    "vc": "ee9e8c",
    "jobid": "application_1506638472019_14199",
    "attempts": [
        {"start_time": "2017-10-07 01:12:09", "end_time": "2017-10-07 01:13:23",
         "detail": [{"ip": "m47", "gpus": ["gpu0", "gpu1"]}, {"ip": "m48", "gpus": ["gpu0", "gpu1"]}]},
        {"start_time": "2017-10-07 01:13:30", "end_time": "2017-10-07 01:14:30",
         "detail": [{"ip": "m412", "gpus": ["gpu0", "gpu1", "gpu2", "gpu3"]}]}
    ],
    "submitted_time": "2017-10-07 01:11:39",
    "user": "ce2f4c"
},
{"status": "Killed", "vc": "ee9e8c", "jobid": "never", "attempts": [],
 "submitted_time": "2017-10-07 01:12:00", "user": "ce2f4c"},
{"status": "Pass", "vc": "11cb48", "jobid": "runs", "submitted_time": "2017-10-07 01:12:00", "user": "a",
 "attempts": [{"start_time": "2017-10-07 01:12:09", "end_time": null, "detail": [{"ip": "m1", "gpus": ["gpu0"]}]}]},
{"status": "Pass", "vc": "11cb48", "jobid": "lost", "submitted_time": "2017-10-07 01:12:00", "user": "a",
 "attempts": [{"start_time": "None", "end_time": "2017-10-07 01:12:09", "detail": []}]},
{"status": "Failed", "vc": "11cb48", "jobid": "early", "submitted_time": "2017-10-07 01:10:00", "user": "b",
 "attempts": [{"start_time": "2017-10-07 01:10:00", "end_time": "2017-10-07 02:10:00",
               "detail": [{"ip": "m1", "gpus": ["gpu0"]}]}]}
]
"""

HELIOS = """\
job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1425511,uXBbc,vcJkd,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0
1425512,uVMrF,vchbv,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:37,2020-06-09 18:45:46,249,10
1425513,uzqls,vcpDC,0,1,1,CANCELLED,2020-06-09 18:41:28,2020-06-09 18:41:28,2020-06-17 14:15:21,675233,0
1425514,uzqls,vcpDC,16,64,2,CANCELLED,2020-06-09 18:41:28,2020-06-09 18:50:28,2020-06-09 18:50:28,0,540
"""

SEREN = """\
job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time
5778432,u5907,1,8,128,Other,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:20:51+08:00,117,32,936.0
5778469,u5907,1,8,128,Pretrain,COMPLETED,2023-03-01 00:23:58+08:00,2023-03-01 00:24:11+08:00,2023-03-01 01:09:04+08:00,2693,13,21544.0
"""

KALOS = """\
job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,end_time,fail_time,stop_time,duration,queue,gpu_time
dlctk696s0jbvitv,uf794,8,64,960,1000,100.0,Other,FAILED,2023-05-17 11:00:58+00:00,2023-05-17 11:01:08+00:00,2023-05-17 11:01:16+00:00,2023-05-17 11:01:16+00:00,,18,10.0,1152.0
dlc1t2ypl09b8qtp,uf794,8,64,960,,100.0,Other,CANCELLED,2023-05-17 11:28:42+00:00,2023-05-17 11:28:54+00:00,2023-05-17 11:30:04+00:00,,2023-05-17 11:30:04+00:00,82,12.0,5248.0
dlc2,uf794,1,1,1,10,100.0,Other,CANCELLED,2023-05-17 11:28:42+00:00,,,,2023-05-17 11:30:04+00:00,82,12.0,82.0
"""

OPENB = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
openb-pod-0017,88000,327680,8,1000,,Burstable,Succeeded,9437497,10769854,9437497
openb-pod-0022,4000,15258,1,220,,BE,Running,9679175,9973826,9679175
openb-pod-0035,11908,32768,1,1000,V100M16|V100M32,LS,Running,9967058,9968575,9967063
openb-pod-0005,20000,65536,0,0,,LS,Running,9967059,9968575,9967063
openb-pod-0061,11908,47104,1,1000,,BE,Pending,10001278,10001403,
"""

PAI_JOB = """\
one,i1,alice,Terminated,1000.0,2000.0
two,i2,bob,Failed,1100.0,1300.0
mixed,i3,bob,Terminated,1200.0,1500.0
waits,i4,bob,Waiting,1200.0,
unstarted,i5,bob,Failed,1250.0,1260.0
"""
PAI_TASK = """\
one,tensorflow,1.0,Terminated,1010.0,2000.0,600.0,29.296875,50.0,MISC
two,worker,2.0,Failed,1110.0,1300.0,400.0,10.0,200.0,V100
mixed,ps,1.0,Terminated,1210.0,1500.0,600.0,10.0,,MISC
mixed,worker,2.0,Terminated,1220.0,1490.0,400.0,10.0,50.0,T4
unstarted,worker,1.0,Failed,,,400.0,10.0,50.0,T4
"""
PAI_INSTANCE = """\
one,tensorflow,n,w,i1,Terminated,1020.0,1990.0,m1
two,worker,n1,w1,i2,Failed,1120.0,1290.0,m1
two,worker,n2,w2,i2,Failed,1125.0,1295.0,m2
mixed,ps,n1,w1,i3,Terminated,1215.0,1500.0,m2
mixed,worker,n2,w2,i3,Terminated,1225.0,1490.0,m2
mixed,worker,n3,w3,i3,Terminated,,,m2
"""

SWF = """\
; Version: 2.2
; UnixStartTime: 1000000000
; MaxProcs: 128
1 0 10 100 4 -1 -1 8 3600 1024 1 3 1 -1 1 -1 -1 -1
2 5 -1 50.5 2 -1 -1 -1 -1 -1 0 4 1 -1 1 -1 1 30
3 6 7 60 2 -1 -1 2 100 -1 1 -1 1 -1 1 -1 -1 -1
3 6 7 30 2 -1 -1 2 100 -1 2 -1 1 -1 1 -1 -1 -1
4 7 -1 0 2 -1 -1 2 100 -1 5 -1 1 -1 1 -1 -1 -1
"""

GAVEL_7 = """\
A3C\tcd x && python3 a.py\t--steps\t1\t7176\t0.0\t1
LM (batch size 5)\tcd x\t-n\t1\t1267\t50.5\t4
A3C\tcd x\t--steps\t1\t100\t60.0\t4
"""
GAVEL_10 = "A3C\tpython3 a.py\trl\t--steps\t1\t7176\t1\t1.0\t-1.0\t12.5\n"

# As Slurm 22.05 printed it: times, ids and nodes are the real ones.
SACCT = """\
JobIDRaw|JobID|User|Partition|Submit|Eligible|Start|End|TimelimitRaw|AllocTRES|ReqTRES|State|NNodes|AllocCPUS|Suspended|NodeList
1|1|root|A100|2026-11-23T03:50:27|2026-11-23T03:50:27|2026-11-23T03:50:28|2026-11-23T03:50:34|5|billing=1,cpu=1,gres/gpu:a100=2,gres/gpu=2,node=1|billing=1,cpu=1,gres/gpu=2,mem=1000000M,node=1|COMPLETED|1|1|00:00:00|dgx001
2|2|root|A100|2026-11-23T03:50:27|2026-11-23T03:50:27|2026-11-23T03:50:28|2026-11-23T03:50:32|60|billing=1,cpu=1,gres/gpu:a100=4,gres/gpu=4,node=1|billing=1,cpu=1,gres/gpu:a100=4,gres/gpu=4,mem=1000000M,node=1|COMPLETED|1|1|00:00:00|dgx001
3|3|root|A100|2026-11-23T03:50:27|2026-11-23T03:50:32|2026-11-23T03:50:32|2026-11-23T03:50:33|UNLIMITED|billing=1,cpu=1,gres/gpu:a100=1,gres/gpu=1,node=1|billing=1,cpu=1,gres/gpu=1,mem=1000000M,node=1|COMPLETED|1|1|00:00:00|dgx001
4|4|root|A100|2026-11-23T03:50:27|2026-11-23T03:50:30|2026-11-23T03:50:33|2026-11-23T03:50:35|525600|billing=1,cpu=1,gres/gpu:a100=1,gres/gpu=1,node=1|billing=1,cpu=1,gres/gpu=1,mem=1000000M,node=1|COMPLETED|1|1|00:00:00|dgx001
7|7|root|A100|2026-11-23T03:50:28|2026-11-23T03:50:28|2026-11-23T03:50:35|2026-11-23T03:50:37|1|billing=2,cpu=2,gres/gpu:a100=16,gres/gpu=16,node=2|billing=2,cpu=2,gres/gpu=16,mem=2000000M,node=2|COMPLETED|2|2|00:00:00|dgx[001,003]
8|8|root|V100|2026-11-23T03:50:28|2026-11-23T03:50:28|2026-11-23T03:50:28|2026-11-23T03:50:30|Partition_Limit|billing=1,cpu=1,gres/gpu:v100=3,gres/gpu=3,node=1|billing=1,cpu=1,gres/gpu=3,mem=500000M,node=1|REQUEUED|1|1|00:00:00|dgx002
8|8|root|V100|2026-11-23T03:50:30|2026-11-23T03:52:31|2026-11-23T03:52:31|2026-11-23T03:52:39|525600|billing=1,cpu=1,gres/gpu:v100=3,gres/gpu=3,node=1|billing=1,cpu=1,gres/gpu=3,mem=500000M,node=1|COMPLETED|1|1|00:00:00|dgx002
9|9|root|V100|2026-11-23T03:50:28|2026-11-23T03:50:28|2026-11-23T03:50:28|2026-11-23T03:50:28|525600|billing=1,cpu=1,gres/gpu:v100=3,gres/gpu=3,node=1|billing=1,cpu=1,gres/gpu=3,mem=500000M,node=1|COMPLETED|1|1|00:00:00|dgx002
10|10|root|V100|2026-11-23T03:50:28|2026-11-23T03:50:28|2026-11-23T03:50:28|Unknown|525600|billing=1,cpu=1,gres/gpu:v100=1,gres/gpu=1,node=1|billing=1,cpu=1,gres/gpu=1,mem=500000M,node=1|RUNNING|1|1|00:00:00|dgx002
12|12|root|V100|2026-11-23T03:50:28|2026-11-23T03:50:28|2026-11-23T03:50:28|2026-11-23T03:50:37|10|billing=1,cpu=1,gres/gpu:v100=1,gres/gpu=1,node=1|billing=1,cpu=1,gres/gpu=1,mem=500000M,node=1|COMPLETED|1|1|00:00:03|dgx002
13|6_0|root|A100|2026-11-23T03:50:28|2026-11-23T03:50:28|2026-11-23T03:50:28|2026-11-23T03:50:30|2|billing=1,cpu=1,gres/gpu:a100=8,gres/gpu=8,node=1|billing=1,cpu=1,gres/gpu=8,mem=1000000M,node=1|COMPLETED|1|1|00:00:00|dgx003
6|6_2|root|A100|2026-11-23T03:50:28|2026-11-23T03:50:33|2026-11-23T03:50:33|2026-11-23T03:50:35|2|billing=1,cpu=1,gres/gpu:a100=8,gres/gpu=8,node=1|billing=1,cpu=1,gres/gpu=8,mem=1000000M,node=1|COMPLETED|1|1|00:00:00|dgx003
"""
