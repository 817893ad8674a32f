"""The cluster that a campaign torments where Slurm is the engine: people use sbatch, gpusched decides by lease."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from gpusched.model.ids import slurm_id
from gpusched.model.jobs import ENDED
from gpusched.model.slurm import LEASE
from tests.campaign.schedule import Work
from tests.campaign.tormented import Tormented
from tests.slurm.conftest import SlurmCluster
from tests.testbed import wait_until
from tests.testbed.slurm import USERS, SlurmSite


class BesideSlurm(Tormented, SlurmCluster):
    """An installation in mode decide in both partitions.

    Attributes:
        accepted: Slurm's ids -> work; an array's has the array's.
        ordered: Jobs that were cancelled.
        resumed: What a person had to put right in Slurm.
        repeated: Jobs that Slurm may have run more than once: their node's slurmd was killed under them.
    """

    settings: Mapping[str, object] = {**SlurmCluster.settings, "tick": "1s"}

    def __init__(self, site: SlurmSite, folder: Path) -> None:
        super().__init__(site, folder)
        self.set_up()
        folder.chmod(0o777)
        self.ledger.open_to_all(self.testbed.nodes)  # jobs are of two users
        self.accepted: dict[str, Work] = {}
        self.ordered: set[str] = set()
        self.repeated: set[str] = set()
        self.unordered: list[Work] = []
        self._waiting: list[Work] = []
        self.resume: set[str] = set()  # nodes that a person wants back
        self.resumed: list[str] = []
        self.write_inventory()

    def write_inventory(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        policies: Mapping[str, str] | None = None,
        nodes: Mapping[str, Mapping[str, object]] | None = None,
        leave_out: Iterable[str] = (),
    ) -> None:
        """Nodes are not read by SSH."""
        super().write_inventory(settings, nodes={n.name: {"transport": "none"} for n in self.testbed.nodes})

    def start(self) -> None:
        """Put gpusched in charge of all nodes, and wait until it is."""
        self.begin()
        wait_until(lambda: self.database.exists(), 60, "the store")
        self.cli("policy", "promote", "easy", "--mode", "decide", "--force", "a campaign")
        wait_until(self.has_lease, 60, "the lease")

    def has_lease(self) -> bool:
        """Whether Slurm has a reservation of ours."""
        shown = self.site.run(["scontrol", "-o", "show", "reservation"], check=False).stdout
        return f"ReservationName={LEASE} " in shown

    # ---- jobs -----------------------------------------------------------------------------------------------

    def submit_work(self, work: Work) -> None:
        """Submit it, or later, where slurmctld does not answer now."""
        self._waiting.append(work)
        while self._waiting and self.is_answering():
            self._sbatch(self._waiting.pop(0))

    def is_answering(self) -> bool:
        """Whether slurmctld is there and runs."""
        return bool(self.site.slurmctld) and not self.is_frozen

    is_frozen = lacks_slurmd = False

    def _sbatch(self, work: Work) -> None:
        user = USERS[work.number % 2]
        nodes = 2 if work.shape == "gang" else 1
        words = ["sbatch", "--parsable", "--output=/dev/null", f"--job-name=w{work.number}", "-p", work.partition,
                 f"--nodes={nodes}", f"--gpus-per-node={max(1, work.gpus)}", "--time=10"]  # fmt: skip
        words += {"array": ["--array=0-2"], "held": ["--hold"], "once": ["--no-requeue"]}.get(work.shape, [])
        seconds = 0.5 if work.shape == "limit" else work.seconds
        script = f"#!/bin/sh\nexec sh {self.ledger.folder}/job.sh {seconds} {work.code}\n"
        done = self.site.run(words, user, input=script, check=False)
        if done.returncode:
            self._waiting.insert(0, work)
            return
        self.accepted[done.stdout.split(";")[0].strip()] = work

    def order(self, work: Work) -> None:
        """Cancel, or release."""
        for job, one in list(self.accepted.items()):
            if one is not work:
                continue
            words = ["scontrol", "release", job] if work.shape == "held" else ["scancel", job]
            if work.shape != "held":
                self.ordered.add(job)
            if not self.is_answering() or self.site.run(words, check=False).returncode:
                self.unordered.append(work)
            return
        self.unordered.append(work)

    def pending(self) -> list[str]:
        """Slurm's ids of jobs that wait, without arrays' tasks."""
        if not self.is_answering():
            return []
        return self.site.run(["squeue", "-h", "-t", "PENDING", "-o", "%A"], check=False).stdout.split()

    def unfinished(self) -> int:
        """How many Slurm knows that have not ended, or have not been submitted."""
        if not self.is_answering():
            return len(self.accepted)
        done = self.site.run(["squeue", "-h", "-r", "-o", "%i"], check=False)
        return len(self._waiting) + (len(done.stdout.split()) if done.returncode == 0 else 1)

    def people(self) -> None:
        """Submit and order again what Slurm did not answer."""
        unordered, self.unordered = self.unordered, []
        while self._waiting and self.is_answering():
            self._sbatch(self._waiting.pop(0))
        for work in unordered:
            self.order(work)
        if self.lacks_slurmd and self.is_answering():
            self.site.start_nodes()
            self.lacks_slurmd = False
        if self.is_answering() and self._counts_gpus_of_nobody():
            # Slurm 22.05 does after slurmctld was killed under jobs, and would start nothing more there.
            self.site.run(["scontrol", "reconfigure"], check=False)
            self.resumed.append("slurmctld")
        if self.is_answering():
            delayed = self.site.run(["squeue", "-h", "-t", "PENDING", "-o", "%A %r"], check=False).stdout.splitlines()
            for job in (line.split()[0] for line in delayed if line.endswith(" BeginTime")):  # requeued: two minutes
                self.site.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)
        for node in list(self.resume) if self.is_answering() else ():
            self.site.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], check=False)
            self.resume.discard(node)

    def _counts_gpus_of_nobody(self) -> bool:
        """Whether Slurm has GPUs allocated while no job runs or ends."""
        if self.site.run(["squeue", "-h", "-t", "RUNNING,COMPLETING,CONFIGURING"], check=False).stdout.strip():
            return False
        return "AllocTRES=gres" in self.site.run(["scontrol", "-o", "show", "nodes"], check=False).stdout

    def has_ended(self) -> bool:
        """Whether all have ended, by Slurm and by the store."""
        if self.unordered or self._waiting or self.resume or self.lacks_slurmd or self.pending():
            self.people()
        return self.unfinished() == 0 and all(job.state in ENDED for job in self.records())

    def wait_clean(self, timeout: float = 20) -> None:
        """Withdraw gpusched, and wait until nothing of it is left in Slurm."""
        for partition in self.partitions:
            self.cli("policy", "rollback", "-p", partition)
        wait_until(lambda: not self.has_lease(), timeout, "the end of the lease")

    # ---- what must hold -------------------------------------------------------------------------------------

    def tasks(self) -> dict[str, Work]:
        """Return the running jobs and tasks of arrays."""
        return {
            task: work
            for job, work in self.accepted.items()
            for task in ([f"{job}_{n}" for n in range(3)] if work.shape == "array" else [job])
        }

    def violations(self) -> Iterator[str]:
        """Jobs against their ledger, Slurm's accounting and the store."""
        self.ledger.read()
        starts = Counter((line.job, line.attempt, line.rank) for line in self.ledger.lines if line.what == "start")
        yield from (f"doubled: {key} began {count} times" for key, count in starts.items() if count > 1)
        yield from (f"GPU shared: {line}" for line in self.ledger.lines if line.what == "clash")
        ends = {line.job: int(line.more) for line in self.ledger.lines if line.what == "end"}
        runs = Counter(job for job, _ in {(job, attempt) for job, attempt, _ in starts})
        mirrored = {slurm_id(job.id): job for job in self.records()}
        for task, work in self.tasks().items():
            cancelled = task.split("_")[0] in self.ordered
            found = mirrored.get(task)
            if found is None:
                yield f"lost: {task} (w{work.number}) is not in the store"
                continue
            wanted = "FAILED" if work.code else "COMPLETED"
            if task not in ends and not cancelled and task not in self.repeated:
                yield f"lost: {task} (w{work.number}) did not run to its end; the store has {found.state}"
            if str(found.state) != wanted and not cancelled and task not in self.repeated:
                yield f"{task} (w{work.number}) is {found.state} ({found.message}), it ended with {ends.get(task)}"
            if runs[task] > 1 and task not in self.repeated:  # an attempt whose slurmd was dead has not begun
                yield f"{task} (w{work.number}) was run {runs[task]} times"
        if "Traceback" in self.controller_log:
            at = self.controller_log.index("Traceback")
            yield f"a traceback in the log: {self.controller_log[at:at + 1500]}"
        left = self.site.run(["scontrol", "-o", "show", "reservation"]).stdout
        yield from (f"left: {line}" for line in left.splitlines() if LEASE in line)
