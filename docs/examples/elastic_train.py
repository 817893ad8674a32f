"""A training that stops when it is asked to, and goes on at another size: plain PyTorch under torchrun, CPU or GPU.

    torchrun --standalone --nproc-per-node 2 elastic_train.py --steps 2000

The batch is that of all processes together and stays the same at every size, so the losses do too, but for the order in
which sums are taken. As a job of gpusched it is asked by TERM, and its checkpoint lies in the job's folder.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from gpusched import job


def samples(step: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step: a stand-in for indexed data, the same however workers split it."""
    x = torch.randn(count, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return x, torch.sin(x.sum(dim=1, keepdim=True))


def main() -> None:
    """Train to the last step, or to where it is asked to stop."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=2000)
    options.add_argument("--batch", type=int, default=24)
    options.add_argument("--save-every", type=int, default=100)
    options.add_argument("--pause", type=float, default=0.0, help="seconds that each step takes longer")
    args = options.parse_args()

    on_gpu = torch.cuda.is_available()
    # A rank that is killed while the group forms, or whose node is lost, makes the others wait for so long.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=2))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    checkpoint = os.path.join(os.environ.get("GPUSCHED_JOB_DIR", "."), "checkpoint.pt")
    step, loss = 0, torch.zeros(())
    if os.path.exists(checkpoint):
        kept = torch.load(checkpoint, map_location=device)
        step = kept["step"]
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])

    job.stop_when_asked()
    began, first = time.monotonic(), step
    while step < args.steps:
        x, y = (part[rank::world].to(device) for part in samples(step, args.batch))
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).sum() / args.batch  # of the whole batch, whatever share is ours
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        step += 1
        time.sleep(args.pause)

        stop = torch.tensor(float(job.asked_to_stop()), device=device)
        dist.all_reduce(stop, dist.ReduceOp.MAX)  # all stop after the same step
        if stop or step % args.save_every == 0 or step == args.steps:
            if rank == 0:
                parts = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(parts, f"{checkpoint}.part")
                os.replace(f"{checkpoint}.part", checkpoint)
            job.saved(step, gpus=world)
        job.progress(step, args.steps, (step - first) * args.batch / (time.monotonic() - began))
        if stop:
            break

    dist.all_reduce(loss.detach())
    if rank == 0:
        print(f"step {step}: loss {loss.item():.12f} on {world}", flush=True)
    dist.destroy_process_group()
    # Where ranks come and go, a group that was asked to stop forms again: its agents must not take it for done.
    sys.exit(int(step < args.steps and os.environ.get("GPUSCHED_RESIZE") == "hot"))


if __name__ == "__main__":
    main()
