"""Work for a Slurm site: a long queue, as many waiting jobs as a benchmark wants; jobs that run and end."""

import random
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.testbed.slurm import USERS, SlurmSite
from tests.testbed.waiting import wait_until

GPUS = (1, 1, 1, 2, 2, 4, 8)
MINUTES = (10, 60, 240, 720, 1440, 2880)


def occupy(site: SlurmSite) -> list[int]:
    """Fill all GPUs with jobs that sleep, and wait until they run; their ids."""
    nodes = [(node.name, node.model.key.upper(), str(node.gpus)) for node in site.testbed.nodes]
    jobs = [
        site.sbatch("sleep 100000", "-p", part, "-w", name, f"--gpus-per-node={gpus}", "--time=2-0", "--job-name=busy")
        for name, part, gpus in nodes
    ]
    for job in jobs:
        site.wait(job, "RUNNING")
    return jobs


def fill(site: SlurmSite, count: int, singles: int = 2000, tasks: int = 200) -> None:
    """Submit jobs that wait for GPUs: `singles` by themselves, the others as tasks of arrays of `tasks` each.

    Four processes submit at once: some 400 submissions a second. Both users, both partitions, one or two nodes.
    """
    singles = min(count, singles)
    arrays = [min(tasks, count - at) for at in range(singles, count, tasks)]
    orders = [*([] for _ in range(singles)), *([f"--array=0-{size - 1}"] for size in arrays)]
    shapes = list(_shapes(len(orders)))
    by_user = {
        user: [[*shape, *order] for shape, order in zip(shapes[i::2], orders[i::2], strict=True)]
        for i, user in enumerate(USERS)
    }
    parts = [(user, lines[i::2]) for user, lines in by_user.items() for i in range(2)]
    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(lambda part: _submit(site, *part), parts))


def _shapes(count: int) -> Iterator[list[str]]:
    for at in range(count):
        shape = ["-p", ("A100", "V100")[at % 3 == 2], f"--gpus-per-node={GPUS[at % 7]}", f"-c{1 + at % 4}"]
        yield [*shape, f"--nodes={1 + (at % 11 == 0)}", f"--time={MINUTES[at % 6]}", f"--job-name=j{at}"]


def _submit(site: SlurmSite, user: str, jobs: list[list[str]]) -> None:
    """One shell submits them all: a process for each sbatch is dear enough."""
    script = "".join(f"sbatch -Q -o /dev/null --wrap='sleep 600' {' '.join(words)} || exit 1\n" for words in jobs)
    site.run(["sh"], user, input=script, timeout_s=600)


def pending(site: SlurmSite) -> int:
    """How many jobs wait, tasks of arrays counted each."""
    out: subprocess.CompletedProcess[str] = site.run(["squeue", "-h", "-r", "-t", "PENDING", "-o", "%i"])
    return out.stdout.count("\n")


SACCT = (
    "JobIDRaw,JobID,User,Partition,Submit,Eligible,Start,End,TimelimitRaw,AllocTRES,ReqTRES,State,NNodes,AllocCPUS,"
    "Suspended,NodeList"
)


def sacct(site: SlurmSite, begin: float) -> str:
    """Return what was there since then, as the guide says."""
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(begin))
    return site.run(["env", "SLURM_TIME_FORMAT=%s", "sacct", "-a", "-X", "-P", "-D", "-S", since, "-o", SACCT]).stdout


def completed(site: SlurmSite, begin: float, count: int, timeout_s: float = 240) -> str:
    """The same, once so many jobs have come to their end and slurmdbd knows it."""
    wait_until(lambda: sacct(site, begin).count("|COMPLETED|") == count, timeout_s, f"the end of {count} jobs", 0.2)
    return sacct(site, begin)


def sleepers(site: SlurmSite, count: int, longest_s: float, over_s: float, seed: int) -> None:
    """So many jobs of 1 to 16 GPUs, a second or longer, come over so many seconds (0: are let go at one moment)."""
    draw, lines = random.Random(seed), []
    for number in range(count):
        gpus = 16 if number % 25 in (10, 11) else draw.choice([1] * 5 + [2] * 3 + [4] * 3 + [8] * 2)
        nodes, seconds, limit = max(1, gpus // 8), draw.uniform(1, longest_s), draw.choice((1, 2, 5))
        gap = f"sleep {draw.expovariate(count / over_s):.2f}" if over_s else "true"
        lines.append(
            f"{gap}; sbatch {'' if over_s else '-H'} -Q -o /dev/null -N{nodes} --gpus-per-node={gpus // nodes} "
            f"-t{limit} --wrap='sleep {seconds:.2f}' || exit 1"
        )
    site.run(["sh"], input="\n".join(lines), timeout_s=over_s + 600)
    if not over_s:
        ids = site.run(["squeue", "-h", "-o", "%i"]).stdout.split()
        site.run(["scontrol", "release", ",".join(sorted(ids, key=int))])
