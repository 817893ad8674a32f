"""Fifty job scripts by their option lines, as people have them in public repositories; written anew.

Shapes are those that Slurm would give: nodes; on each GPUs, cores, GiB and tasks; minutes. None: what is left to the
partition. Where a script is refused: the line, and what is said of it. Nodes, tasks, cores and memory were compared
with what Slurm 22.05.8 gave the same lines on nodes like these; it differs in one: of a node that is exclusive it gives
all cores and GPUs, but not all memory.
"""

from __future__ import annotations

from typing import NamedTuple

INVENTORY = """\
defaults: {runtime: podman}
partitions:
  gpu:
    image: docker.io/pytorch/pytorch
    defaults: {gpus: 8, cores: 128, memory: 1024G, gpu_type: A100-SXM4-80GB}
    nodes: ["g[01-08]"]
    flavors:
      whole: {gpus: 64, cores: 1024, memory: 8192G, time: 7d}
  old:
    image: docker.io/pytorch/pytorch
    defaults: {gpus: 4, cores: 40, memory: 384G, gpu_type: V100}
    nodes: ["v[1-4]"]
    flavors:
      whole: {gpus: 16, cores: 160, memory: 1536G, time: 7d}
  cpu:
    image: docker.io/library/debian
    defaults: {gpus: 0, cores: 128, memory: 512G}
    nodes: ["c[1-4]"]
    flavors:
      whole: {gpus: 0, cores: 512, memory: 2048G, time: 7d}
"""


class Shape(NamedTuple):
    nodes: int
    gpus: int
    cores: int | None
    gib: float | None
    tasks: int
    minutes: int | None = None


class Refused(NamedTuple):
    line: int
    says: str


class Case(NamedTuple):
    name: str
    lines: str
    result: Shape | Refused
    partition: str | None = "gpu"  # said on the command line, as theirs are not ours
    body: str = "srun python train.py"


TORCHRUN = 'srun torchrun --nnodes $SLURM_NNODES --rdzv_backend c10d --rdzv_endpoint "$head:29500" train.py'
CASES = [
    # -- torchrun over several nodes
    Case("pytorch's example of several nodes", """\
        #SBATCH --job-name=multinode-example
        #SBATCH --nodes=4
        #SBATCH --ntasks=4
        #SBATCH --gpus-per-task=1
        #SBATCH --cpus-per-task=4
        """, Shape(4, 1, 4, None, 1), body=TORCHRUN),
    Case("two tasks with two GPUs each", """\
        #SBATCH --job-name=multinode
        #SBATCH --nodes=2
        #SBATCH --ntasks=4
        #SBATCH --gpus-per-task=2
        #SBATCH --cpus-per-task=4
        """, Shape(2, 4, 8, None, 2), body=TORCHRUN),
    Case("torchtitan", """\
        #SBATCH --job-name=torchtitan_multi_node

        #SBATCH --ntasks=4

        #SBATCH --nodes=4

        #SBATCH --gpus-per-task=8

        #SBATCH --cpus-per-task=96
        """, Shape(4, 8, 96, None, 1), body=TORCHRUN),
    Case("one agent on each of two nodes", """\
        #SBATCH --job-name=t
        #SBATCH --nodes=2
        #SBATCH --ntasks=2
        #SBATCH --gres=gpu:4
        #SBATCH --cpus-per-task=16
        #SBATCH -o /data/logs/train_%A.log
        #SBATCH -e /data/logs/train_%A.err
        #SBATCH --time=00-05:00:00
        """, Shape(2, 4, 16, None, 1, 300), body=TORCHRUN),
    Case("fine-tuning on 4 x 8", """\
        #SBATCH --job-name=sft
        #SBATCH --nodes=4
        #SBATCH --ntasks-per-node=1
        #SBATCH --gres=gpu:a100:8
        #SBATCH --cpus-per-task=64
        #SBATCH --mem=900G
        #SBATCH --time=72:00:00
        #SBATCH --output=logs/%x-%j.out
        #SBATCH --error=logs/%x-%j.err
        """, Shape(4, 8, 64, 900, 1, 4320), body=TORCHRUN),
    Case("whole nodes with all their memory", """\
        #SBATCH -p batch
        #SBATCH -A llm
        #SBATCH -J openllama2
        #SBATCH -N 2                       # 64x8x4
        #SBATCH -t 04:00:00                # wall time
        #SBATCH --ntasks-per-node=1        # tasks per node
        #SBATCH --exclusive                # exclusive node access
        #SBATCH --mem=0                    # all mem avail
        #SBATCH --mail-type=FAIL           # only send email on failure
        #SBATCH --output=out.log
        """, Shape(2, 8, 128, 1024, 1, 240), body=TORCHRUN),
    Case("the same, with more tasks than cores allowed", """\
        #SBATCH -N 2
        #SBATCH --ntasks-per-node=1
        #SBATCH --exclusive
        #SBATCH --mem=0
        #SBATCH --overcommit               # needed for pytorch
        """, Shape(2, 8, 128, 1024, 1), body=TORCHRUN),
    Case("hydra over 8 nodes", """\
        #SBATCH --partition=boost_usr_prod
        #SBATCH --account=iscrb_llm
        #SBATCH --qos=normal
        #SBATCH --nodes=8
        #SBATCH --gpus-per-node=4
        #SBATCH --ntasks-per-node=1
        #SBATCH --cpus-per-task=32
        #SBATCH --mem=480GB
        #SBATCH --time=24:00:00
        """, Shape(8, 4, 32, 480, 1, 1440), body=TORCHRUN),
    Case("GPUs in total over two nodes", """\
        #SBATCH -J fsdp
        #SBATCH -N 2
        #SBATCH -G 16
        #SBATCH --ntasks-per-node=1
        #SBATCH -c 100
        #SBATCH -t 1-12
        """, Shape(2, 8, 100, None, 1, 2160), body=TORCHRUN),
    Case("cores by GPU", """\
        #SBATCH --time=3-00:00:00                    # Set the maximum runtime
        #SBATCH --nodes=2                      # node count
        #SBATCH --ntasks-per-node=4            # number of tasks per node
        #SBATCH --cpus-per-gpu=16
        #SBATCH --gpus-per-node=4              # Number of GPUs for the task
        #SBATCH --mail-user=someone@example.org
        #SBATCH --mail-type=BEGIN,END,FAIL
        """, Shape(2, 4, 64, None, 4, 4320), body=TORCHRUN),
    Case("elastic: two to four nodes", """\
        #SBATCH --job-name=elastic
        #SBATCH --nodes=2-4
        #SBATCH --gpus-per-node=8
        """, Shape(2, 8, None, None, 1), body=TORCHRUN),
    Case("features that are not GPUs", """\
        #SBATCH --nodes=8
        #SBATCH --ntasks-per-node=4
        #SBATCH --time=24:00:00
        #SBATCH --gres=gpu:4
        #SBATCH --constraint=gpu_mem:80gb
        #SBATCH --dependency=afterok:12345
        """, Refused(6, "#SBATCH --constraint=gpu_mem:80gb: only GPU types are supported"), body=TORCHRUN),
    Case("Pyxis, with a file of enroot", """\
        #SBATCH --job-name=llm_ft_v7             # Job name
        #SBATCH --nodes=2                        # Number of nodes
        #SBATCH --ntasks-per-node=8              # Tasks per node (1 task per GPU)
        #SBATCH --cpus-per-task=14               # CPUs per task
        #SBATCH --gpus-per-node=8                # GPUs per node
        #SBATCH --container-image=/project/image/nemo.sqsh
        #SBATCH --container-mounts=/project/audio:/workspace,/project:/project
        """, Refused(7, "#SBATCH --container-image=/project/image/nemo.sqsh: an enroot file"), body=TORCHRUN),
    Case("Pyxis, with an image of a registry", """\
        #SBATCH --nodes=2
        #SBATCH --ntasks-per-node=8
        #SBATCH --cpus-per-task=14
        #SBATCH --gpus-per-node=8
        #SBATCH --container-image=nvcr.io#nvidia/pytorch:24.11-py3
        #SBATCH --container-mounts=/project/audio:/workspace,/project:/project:ro
        """, Shape(2, 8, 112, None, 8), body=TORCHRUN),
    Case("a warning for the steps", """\
        #SBATCH --nodes=2
        #SBATCH --gres=gpu:8
        #SBATCH --ntasks-per-node=8             # This needs to match Trainer(devices=...)
        #SBATCH --mem=0
        #SBATCH --time=0-02:00:00
        #SBATCH --signal=SIGUSR1@90
        """, Shape(2, 8, None, 1024, 8, 120)),
    # -- several nodes, a task for each GPU
    Case("open_clip", """\
        #SBATCH --nodes=8
        #SBATCH --gres=gpu:4
        #SBATCH --ntasks-per-node=4
        #SBATCH --cpus-per-task=6
        #SBATCH --wait-all-nodes=1
        #SBATCH --job-name=open_clip
        """, Shape(8, 4, 24, None, 4)),
    Case("GPUs, cores and memory by GPU", """\
        #SBATCH --nodes=2
        #SBATCH --gpus=16
        #SBATCH --ntasks-per-node=8
        #SBATCH --cpus-per-gpu=12
        #SBATCH --mem-per-gpu=100G
        """, Shape(2, 8, 96, 800, 8)),
    Case("a GPU for each of 16 tasks, wherever", """\
        #SBATCH --ntasks=16
        #SBATCH --gpus-per-task=1
        #SBATCH --cpus-per-task=12
        #SBATCH --mem-per-cpu=4G
        """, Shape(2, 8, 96, 384, 8)),
    Case("nodes by name", """\
        #SBATCH --nodelist=g[03-04]
        #SBATCH --gres=gpu:8
        #SBATCH --ntasks-per-node=8
        #SBATCH --cpus-per-task=12
        """, Shape(2, 8, 96, None, 8)),
    Case("fewer nodes by name than nodes", """\
        #SBATCH --nodes=4
        #SBATCH --nodelist=g01,g02
        #SBATCH --gres=gpu:8
        """, Refused(3, "#SBATCH --nodelist=g01,g02: it names 2 nodes, and --nodes says 4")),
    Case("one switch, for so long", """\
        #SBATCH -N 4
        #SBATCH --gres=gpu:8
        #SBATCH --switches=1@12:00:00
        """, Shape(4, 8, None, None, 1)),
    Case("heterogeneous placement of tasks", """\
        #SBATCH -N 2
        #SBATCH --gres=gpu:8
        #SBATCH -m cyclic
        """, Refused(4, "#SBATCH -m cyclic: tasks go to nodes by blocks")),
    # -- one node with GPUs
    Case("one GPU, the usual way", """\
        #SBATCH --job-name=LoRA_Train
        #SBATCH --partition=gpu
        #SBATCH --gres=gpu:1
        #SBATCH --nodes=1
        #SBATCH --ntasks-per-node=1
        #SBATCH --cpus-per-task=8
        #SBATCH --mem=32G
        #SBATCH --time=02:00:00
        #SBATCH --output=lora_train_%j.out
        """, Shape(1, 1, 8, 32, 1, 120), partition=None),
    Case("short options", """\
        # Usage:  sbatch slurm_train.sh cnn

        #SBATCH -p gpu
        #SBATCH --gres=gpu:1
        #SBATCH -n 4
        #SBATCH --mem=16G
        #SBATCH -t 02:00:00
        #SBATCH -o slurm-%j.out
        #SBATCH -e slurm-%j.err
        """, Shape(1, 1, None, 16, 4, 120), partition=None),
    Case("values behind a blank", """\
        #SBATCH --job-name=goat
        #SBATCH --gpus 4
        #SBATCH --nodes 1
        #SBATCH --cpus-per-task 10
        #SBATCH --ntasks-per-node 4
        #SBATCH --constraint=a100
        #SBATCH --exclude=g07,g08
        #SBATCH --signal=USR1@100
        #SBATCH --requeue
        """, Shape(1, 4, 40, None, 4)),
    Case("a type of GPU in gres and in constraint", """\
        #SBATCH --cpus-per-task=32
        #SBATCH --gres=gpu:a100:2
        #SBATCH --constraint=a100
        #SBATCH --mem=200G
        """, Shape(1, 2, 32, 200, 1)),
    Case("a type that is not here", """\
        #SBATCH --job-name=pretrain
        #SBATCH --gres=gpu:h200:2
        #SBATCH --mem=100G
        """, Refused(3, "#SBATCH --gres=gpu:h200:2: the cluster has no GPUs of type 'h200'")),
    Case("a part of a GPU", """\
        #SBATCH -A power-users_v2
        #SBATCH --gres=gpu:1g.10gb:1
        """, Shape(1, 1, None, None, 1)),
    Case("shards", """\
        #SBATCH --mem=16G
        #SBATCH --cpus-per-task=4
        #SBATCH --gres=gpu:1 --gres=shard:11264      # GPU and VRAM in MB
        """, Refused(4, "#SBATCH --gres=shard:11264: the only generic resource is GPUs")),
    Case("GPUs and their memory", """\
        #SBATCH --gpus=2
        #SBATCH --mem=24GB
        #SBATCH --ntasks=8
        #SBATCH --gres=gpu:2,VramPerGpu:24GB
        """, Refused(5, "#SBATCH --gres=gpu:2,VramPerGpu:24GB: the only generic resource")),
    Case("several partitions", """\
        #SBATCH --job-name=nist
        #SBATCH --partition=mit_preemptable,mit_normal_gpu
        #SBATCH --gres=gpu:1
        """, Refused(3, "#SBATCH --partition=mit_preemptable,mit_normal_gpu: there is no partition 'mit_preemptable'"),
        partition=None),
    Case("a partition that is not here", """\
        #SBATCH --nodes=1
        #SBATCH --gpus-per-node=1
        #SBATCH --partition=gpu_h100
        """, Refused(4, "#SBATCH --partition=gpu_h100: there is no partition 'gpu_h100'"), partition=None),
    Case("memory in MB, days and hours", """\
        #SBATCH --account=rrg-someone
        #SBATCH --gpus-per-node=1
        #SBATCH --cpus-per-task=4
        #SBATCH --mem=16000M             # higher than before
        #SBATCH --time=0-00:30
        #SBATCH --output=%x-%j.out
        """, Shape(1, 1, 4, 15.625, 1, 30)),
    Case("eight GPUs, one task", """\
        #SBATCH --nodes=1
        #SBATCH --gpus-per-node=8
        #SBATCH --cpus-per-task=8
        #SBATCH --ntasks=1
        #SBATCH --time=48:00:00
        #SBATCH --output=/dev/null
        #SBATCH --mem=160G
        """, Shape(1, 8, 8, 160, 1, 2880)),
    Case("a signal for the script, requeued, appended", """\
        #SBATCH --job-name=infer
        #SBATCH --nodes=1
        #SBATCH --mem=0
        #SBATCH --ntasks-per-node=1
        #SBATCH -c 32
        #SBATCH --array=0-10%1
        #SBATCH --gres=gpu:4
        #SBATCH --open-mode=append
        #SBATCH --requeue
        #SBATCH --signal=B:USR1@180
        """, Shape(1, 4, 32, 1024, 1)),
    Case("a signal for the script, requeued", """\
        #SBATCH --nodes=1
        #SBATCH --mem=0
        #SBATCH -c 32
        #SBATCH --array=0-10%1
        #SBATCH --gres=gpu:4
        #SBATCH --requeue
        #SBATCH --signal=B:USR1@180
        """, Shape(1, 4, 32, 1024, 1)),
    Case("tasks with MPS", """\
        #SBATCH -o ./job.out.%j
        #SBATCH -D ../
        #SBATCH --nodes=1
        #SBATCH --constraint=gpu
        #SBATCH --gres=gpu:a100:4
        #SBATCH --nvmps
        """, Refused(5, "#SBATCH --constraint=gpu: 'gpu' is not a GPU type here")),
    Case("an option that a site made up", """\
        #SBATCH --nodes=1
        #SBATCH --gres=gpu:a100:4
        #SBATCH --nvmps
        """, Refused(4, "#SBATCH --nvmps: sbatch has no such option")),
    Case("a type that is a part of a name", """\
        #SBATCH -C "v100|a100"
        #SBATCH --gpus=tesla_v100:2
        """, Shape(1, 2, None, None, 1), partition="old"),
    # -- arrays
    Case("a sweep", """\
        #SBATCH --job-name=sweep
        #SBATCH --array=8,18,28      # 30 jobs: 3 seeds x 10 tasks
        #SBATCH --gres=gpu:1
        #SBATCH --ntasks=1
        #SBATCH --cpus-per-task=16
        #SBATCH --output=logs/seed_%a_%j.out
        """, Shape(1, 1, 16, None, 1)),
    Case("gres without a number, an array, quotes", """\
        #SBATCH -J MyJob
        #SBATCH -N 1
        #SBATCH --ntasks-per-node=10
        #SBATCH --mem-per-cpu=8GB
        #SBATCH --time=48:00:00

        #SBATCH --gres=gpu
        #SBATCH --array=0-4

        ## RAN_DATE=$(date +%s)
        #SBATCH --output="/U-Net/log/output/out_%j.out"
        """, Shape(1, 1, 10, 80, 10, 2880)),
    Case("an array of one", """\
        #SBATCH --error=stdeo/fq2b_%A_%a.err
        # SBATCH --cpus-per-task=256
        #SBATCH --ntasks=1
        #SBATCH --cpus-per-task=64 # tops out at 56
        #SBATCH --gpus-per-node=1
        ##SBATCH --mem=16000M
        #SBATCH --mem=48000M
        #SBATCH --array=0-0%1
        """, Shape(1, 1, 64, 46.875, 1)),
    Case("a pattern that is not filled in", """\
        #SBATCH -N 1
        #SBATCH --ntasks-per-node=16
        #SBATCH -o Job.%J.out
        """, Refused(4, "#SBATCH -o Job.%J.out: %J is not supported"), partition="cpu"),
    # -- without GPUs
    Case("MPI on whole nodes", """\
        #SBATCH --nodes=4
        #SBATCH --tasks-per-node=32 # fastest is 2 cpus per task
        #SBATCH --cpus-per-task=2
        #SBATCH --mem=118G
        #SBATCH -t 1-12:00                      # Runtime in D-HH:MM format
        #SBATCH --array=0-9
        #SBATCH -o 'outputs/run-%j.output' #File to which STDOUT will be written
        #SBATCH --mail-user="someone@example.org"
        #SBATCH --mail-type=END
        #SBATCH --mail-type=FAIL
        """, Shape(4, 0, 64, 118, 32, 2160), partition="cpu"),
    Case("tasks that need two nodes", """\
        #SBATCH --ntasks=256
        #SBATCH --mem-per-cpu=2G
        """, Shape(2, 0, 128, 256, 128), partition="cpu"),
    Case("nothing but a name and a time", """\
        #SBATCH --job-name=copy
        #SBATCH --time=10
        """, Shape(1, 0, 1, None, 1, 10), partition="cpu"),
    Case("hyperthreads", """\
        #SBATCH -N 1
        #SBATCH --exclusive
        #SBATCH --ntasks-per-node=1
        #SBATCH --hint=nomultithread
        """, Shape(1, 0, 128, 512, 1), partition="cpu"),
    Case("the whole environment", """\
        #SBATCH --ntasks=1
        #SBATCH --export=ALL
        #SBATCH --mem=32gb
        """, Shape(1, 0, 1, 32, 1), partition="cpu"),
    Case("the login's environment", """\
        #SBATCH --nodes=1
        #SBATCH --cpus-per-task=8
        #SBATCH --get-user-env=L
        """, Shape(1, 0, 8, None, 1), partition="cpu"),
    Case("licenses and a scratch disk", """\
        #SBATCH -n 8
        #SBATCH -L matlab@db:1
        """, Refused(3, "#SBATCH -L: not supported: licenses are not counted"), partition="cpu"),
    Case("a whole node, and later", """\
        #SBATCH --exclusive
        #SBATCH --begin=now+1hour
        #SBATCH --hold
        #SBATCH --nice=50
        #SBATCH --parsable
        #SBATCH --no-requeue
        """, Shape(1, 0, 128, 512, 1), partition="cpu"),
]  # fmt: skip
