from tests.slurm.test_modes import *


def test_a(beside):
    site = beside.site
    site.configure(PriorityType="priority/basic")
    full(site, "dgx001", "dgx003")
    jobs = [str(site.sbatch("sleep 1000", "--gpus-per-node=8", f"--time={n}")) for n in (50, 40, 30, 20)]
    beside.promote("advise", "sjf")
    print(queue(site, "PriorityLong"))
    print(beside.run())
    print(queue(site, "PriorityLong"), beside.said)
    print(beside.run())
    print(queue(site, "PriorityLong"), beside.said)
    print({k: v for k, v in beside.slurm.config().items() if k.startswith("Prio")})


def test_b(beside):
    site = beside.site
    full(site, "dgx001", "dgx003")
    site.sbatch("sleep 1", "--array=0-149", "--time=50", "--gpus-per-node=8", "--nodes=2")
    last = [
        str(site.sbatch("sleep 1", "--array=0-149", f"--time={n}", "--gpus-per-node=8", "--nodes=2")) for n in (9, 8)
    ]
    beside.promote("advise", "sjf")
    r = beside.run()
    print(len(r), r[:3], r[-60:])
    q = queue(site, "PriorityLong")
    print(list(q.items())[:20], set(q.values()))


def test_c(beside):
    site = beside.site
    beside.promote("decide")
    beside.run()
    jobs = [str(site.sbatch("sleep 1000", "--gpus-per-node=8", *more)) for more in ((), ("--no-requeue",))]
    beside.run(start(jobs[0], "dgx001"), start(jobs[1], "dgx003"))
    for job in jobs:
        site.wait(job, "RUNNING")
    waits = str(site.sbatch("sleep 1000", "--gpus-per-node=8"))
    beside.run()
    print(beside.run(Preempt(jobs[0], waits), Preempt(jobs[1], waits)), beside.store.job(jobs[0]).preemptions)
    site.wait(jobs[0], "PENDING")
    for i in range(4):
        print(
            beside.run(start(waits, "dgx001")),
            queue(site, "Reason"),
            queue(site, "State"),
            beside.store.job(jobs[0]).preemptions,
            [j for j in beside.cycle._reader._slurm.jobs() if j.id == jobs[0]],
        )
        import time

        time.sleep(1)
