"""All-reduce between the GPUs of a job's nodes, as a health check before the job starts; without GPUs by gloo.

    torchrun --nnodes $GPUSCHED_NNODES --node-rank $GPUSCHED_NODE_RANK --nproc-per-node gpu \
        --master-addr $MASTER_ADDR --master-port $MASTER_PORT allreduce_check.py

It fails where a sum is wrong or the processes do not meet, and prints the bus bandwidth of several nodes together, as
nccl-tests define it: what each GPU's link carried. Within one node NVLink would be measured, so that is not printed.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> int:
    """Run the all-reduces; return the exit code."""
    options = argparse.ArgumentParser()
    options.add_argument("--mib", type=int, default=256, help="size of each all-reduce")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--timeout", type=int, default=45, help="seconds to wait for the other nodes")
    args = options.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=args.timeout))
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = torch.empty(args.mib << 18, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(args.rounds + 1):
        numbers.fill_(rank + 1)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    is_right = bool((numbers == world * (world + 1) / 2).all())
    dist.destroy_process_group()
    if not is_right:
        print(f"rank {rank} on {os.environ.get('GPUSCHED_NODE')}: wrong sums")
        return 1
    if int(os.environ["LOCAL_RANK"]) == 0:  # each node has its own history
        middle = sorted(seconds[1:])[args.rounds // 2]  # the first round makes the connections
        print(f"{world} processes, {args.mib} MiB in {1000 * middle:.1f} ms")
        if int(os.environ.get("GPUSCHED_NNODES", "1")) > 1:
            print(f"value={2 * (world - 1) / world * args.mib / 1024 / middle:.3f} GiB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
