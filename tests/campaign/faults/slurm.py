"""Slurm's own daemons die or stand still, and people change what gpusched has leased."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusched.model.slurm import LEASE
from tests.campaign.faults.base import NODES, Fault
from tests.campaign.ledger import now

UNSAVED_S = 15.0

if TYPE_CHECKING:
    from tests.campaign.slurmsite import BesideSlurm


class _Slurm(Fault):
    lasts = False
    site: BesideSlurm  # type: ignore[assignment]

    def run_as_root(self, *words: str) -> None:
        """Run a command as root if slurmctld answers; it may be refused."""
        if self.site.is_answering():
            self.site.site.run(words, check=False)


class Ctld(_Slurm):
    """``kill -9`` of slurmctld, once it has saved its state; started again later."""

    lasts = True

    def inject(self) -> None:
        if self.site.accepted and self.site.is_answering() and (waiting := self.site.pending()):
            self.site.site.wait_saved(waiting[-1])
        self.site.ledger.read()
        # What began or ended since it last saved its state it may forget, and run again.
        self.site.repeated |= {line.job for line in self.site.ledger.lines if line.time > now() - UNSAVED_S}
        self.site.site.kill_slurmctld()

    def heal(self) -> None:
        self.site.site.start_slurmctld()


class CtldFreeze(_Slurm):
    """Slurmctld stands still."""

    lasts = True

    def inject(self) -> None:
        self.site.site.freeze_slurmctld()
        self.site.is_frozen = True

    def heal(self) -> None:
        self.site.site.thaw_slurmctld()
        self.site.is_frozen = False


class Dbd(_Slurm):
    """``kill -9`` of slurmdbd; started again later."""

    lasts = True

    def inject(self) -> None:
        self.site.site.kill_slurmdbd()

    def heal(self) -> None:
        self.site.site.start_slurmdbd()


class Slurmd(_Slurm):
    """``kill -9`` of a node's slurmd; its jobs go on. Started again later."""

    lasts, nodes = True, NODES

    def inject(self) -> None:
        self.site.site.kill_slurmd(self.node)

    def heal(self) -> None:
        self.site.lacks_slurmd = True  # once slurmctld answers
        self.site.people()


class Drain(_Slurm):
    """A person drains a node, and resumes it."""

    lasts, nodes = True, NODES

    def inject(self) -> None:
        self.run_as_root("scontrol", "update", f"NodeName={self.node_name}", "State=DRAIN", "Reason=by hand")

    def heal(self) -> None:
        self.site.resume.add(self.node_name)


class Reserve(_Slurm):
    """A person reserves a node for the hour after next, and takes it back."""

    lasts, nodes = True, NODES

    def inject(self) -> None:
        self.run_as_root("scontrol", "create", "reservation", "ReservationName=theirs", f"Nodes={self.node_name}",
                  "StartTime=now+60minutes", "Duration=60", "Users=root")  # fmt: skip

    def heal(self) -> None:
        self.run_as_root("scontrol", "delete", "ReservationName=theirs")


class LeaseDeleted(_Slurm):
    """A person deletes gpusched's reservation."""

    def inject(self) -> None:
        self.run_as_root("scontrol", "delete", f"ReservationName={LEASE}")


class Changed(_Slurm):
    """A person changes a job that waits, perhaps while it is leased: held and released, another limit, top priority."""

    def inject(self) -> None:
        waiting = self.site.pending()
        if not waiting:
            return
        job = waiting[self.pick(len(waiting))]
        how = self.pick(97) % 3
        if how == 0:
            self.run_as_root("scontrol", "hold", job)
            self.run_as_root("scontrol", "release", job)
        elif how == 1:
            self.run_as_root("scontrol", "update", f"JobId={job}", "TimeLimit=20")
        else:
            self.run_as_root("scontrol", "update", f"JobId={job}", "Nice=-100")


class Withdrawn(_Slurm):
    """A person takes the pins off a job that waits."""

    def inject(self) -> None:
        if waiting := self.site.pending():
            job = waiting[self.pick(len(waiting))]
            self.run_as_root("scontrol", "update", f"JobId={job}", "ReservationName=", "ReqNodeList=")
