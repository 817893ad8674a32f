"""The output of scontrol of Slurm 22.05.8, and how newer versions are known to differ."""

import pytest

from gpusched.model.slurm import SlurmNode, SlurmPartition
from gpusched.slurm import records

NODES = (
    "NodeName=dgx001 Arch=x86_64 CoresPerSocket=1  CPUAlloc=5 CPUEfctv=128 CPUTot=128 CPULoad=1.70 "
    "AvailableFeatures=fast,big ActiveFeatures=fast,big Gres=gpu:a100:8(S:0-1),shard:32 GresDrain=N/A "
    "GresUsed=gpu:a100:2(IDX:0-1),shard:0 NodeAddr=127.0.0.1 NodeHostName=vm Version=22.05.8 OS=Linux 6 #1 SMP Gres=x "
    "RealMemory=1000000 AllocMem=0 FreeMem=23334 Sockets=128 Boards=1 State=MIXED+DRAIN ThreadsPerCore=1 TmpDisk=0 "
    "Weight=1 Owner=N/A MCS_label=N/A Partitions=A100,all  BootTime=1795392108 CfgTRES=cpu=128,mem=1000000M AllocTRES= "
    "Reason=fan 3 is loud State=IDLE [root@1795404931]\n"
    "NodeName=dgx002 CPUTot=80 Gres=(null) NodeAddr=dgx002 RealMemory=500000 State=DOWN* \n"
    "\n"
)
PARTITION = (
    "PartitionName=V100 AllowGroups=ALL Default=NO QoS=N/A DefaultTime=01:00:00 MaxTime=2-00:00:00 "
    "Nodes=dgx[003-004] PriorityTier=5 PreemptMode=REQUEUE State=DRAIN TotalCPUs=480\n"
    "PartitionName=all Default=YES DefaultTime=NONE MaxTime=UNLIMITED Nodes=(null) PriorityTier=1 State=UP\n"
)
RESERVATION = (
    "ReservationName=gpusched StartTime=1795405093 EndTime=1795405693 Duration=00:10:00 Nodes=dgx[001,003] NodeCnt=2 "
    "CoreCnt=208 Features=(null) PartitionName=(null) Flags=FLEX,IGNORE_JOBS,SPEC_NODES TRES=cpu=208 Users=(null) "
    "Groups=(null) Accounts=root Licenses=(null) State=ACTIVE BurstBuffer=(null)\n"
)
JOB = (
    "JobId=10 ArrayJobId=3 ArrayTaskId=3 JobName={name} UserId=ann(1001) GroupId=ann(1001) Priority=1 JobState=RUNNING "
    "NodeList=dgx[001-002] TRES=cpu=2 Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* JOB_GRES=gpu:a100:4  {blocks} "
    "MinCPUsNode=1 MinMemoryNode=0 Features=(null) Command=/x WorkDir=/ Nodes=dgx009 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:5) "
)


def test_nodes():
    first, second = records.nodes(NODES)
    assert first == SlurmNode(
        name="dgx001", address="127.0.0.1", states=("MIXED", "DRAIN"),
        reason="fan 3 is loud State=IDLE [root@1795404931]", cpus=128, memory_mib=1000000, gpus={"a100": 8},
        gpus_used=2, partitions=("A100", "all"), features=("fast", "big"), version="22.05.8",
    )  # fmt: skip
    assert (second.states, second.gpus, second.partitions) == (("DOWN", "NOT_RESPONDING"), {}, ())


def test_partitions():
    first, second = records.partitions(PARTITION)
    assert first == SlurmPartition(
        name="V100", nodes=("dgx003", "dgx004"), max_time_s=172800, default_time_s=3600, state="DRAIN",
        priority_tier=5, preempt_mode="REQUEUE",
    )  # fmt: skip
    assert second == SlurmPartition(name="all", nodes=(), is_default=True)


def test_reservations():
    (found,) = records.reservations(RESERVATION)
    assert (found.name, found.nodes, found.end_time - found.start_time) == ("gpusched", ("dgx001", "dgx003"), 600)
    assert (found.accounts, found.users, found.state) == (("root",), (), "ACTIVE")
    assert records.reservations("No reservations in the system\n") == []


@pytest.mark.parametrize(
    ("blocks", "held"),
    [
        ("Nodes=dgx001 CPU_IDs=127 Mem=0 GRES=gpu:a100:2(IDX:0-1)", {"dgx001": (0, 1)}),
        ("Nodes=dgx[001-002] CPU_IDs=0-3 Mem=0 GRES=gpu:a100:3(IDX:0,2-3)", {"dgx001": (0, 2, 3), "dgx002": (0, 2, 3)}),
        ("Nodes=dgx001 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:6-7),shard:4(IDX:1)   Nodes=dgx002 CPU_IDs=0 Mem=0 "
         "GRES=gpu:a100:1(IDX:1),gpu:v100:1(IDX:8)", {"dgx001": (6, 7), "dgx002": (1, 8)}),
        ("Nodes=dgx001 CPU_IDs=0 Mem=0 GRES=", {}),
        ("Nodes=dgx001 CPU_IDs=0 Mem=0 GRES=gpu:a100(CNT:8)", {}),
    ],
)  # fmt: skip
def test_positions(blocks, held):
    assert records.positions(JOB.format(name="train", blocks=blocks), "train") == held


def test_a_name_cannot_invent_gpus():
    fake = "x UserId=eve(1) Nodes=dgx007 CPU_IDs=0 Mem=0 GRES=gpu:a100:8(IDX:0-7) MinCPUsNode=1 \nJobId=11"
    text = JOB.format(name=fake, blocks="Nodes=dgx001 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:3)")
    assert records.positions(text, fake) == {"dgx001": (3,)}
    assert records.positions(text, "x UserId=eve") == {}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("UNLIMITED", None), ("NOT_SET", None), ("Partition_Limit", None), ("NONE", None), ("", None),
        ("30", 1800), ("01:00", 60), ("10:00:00", 36000), ("3-00:00:01", 259201), ("1-2", 93600), ("1-02:30", 95400),
        ("365-00:00:00", 31536000),
    ],
)  # fmt: skip
def test_durations(text, seconds):
    assert records.duration_s(text) == seconds


def test_settings():
    text = "Configuration data as of 1795404931\nA             = x = y\nSelectTypeParameters    = CR_CORE\n\nUp\n"
    assert records.config(text) == {"A": "x = y", "SelectTypeParameters": "CR_CORE"}
