"""From a decision to launches: first the intent in the store, then the operations that carry it out."""

from __future__ import annotations

import logging
import os
import pwd
from collections.abc import Collection

from gpusched.cluster.base import REFUSED, Operation, RankKey
from gpusched.cluster.requests import has_steps, launch_request, master_port
from gpusched.controller.nodestate import usable_slices
from gpusched.controller.ranks import rank_key
from gpusched.controller.secretfiles import SecretFiles
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.attemptrecords import attempt_record
from gpusched.model.jobs import Allocation, JobRecord, JobState, NodeAllocation
from gpusched.model.outputs import expand_output
from gpusched.model.policy import PolicySpec
from gpusched.model.readings import NodeReading
from gpusched.model.resources import Inventory, Node
from gpusched.model.slices import MigSlice, gpu_label, is_slice
from gpusched.queue.lifecycle import transition_to
from gpusched.queue.store import RankRecord, Store

_log = logging.getLogger(__name__)


class Launcher:
    """Starts jobs. ``errors``: reasons of rejected launches, by us or by the node, until their attempt is over."""

    def __init__(self, store: Store, secrets: SecretFiles, cluster_id: str, shared: bool = False) -> None:
        self._store, self._secrets, self._cluster_id, self._shared = store, secrets, cluster_id, shared
        self.errors: dict[RankKey, str] = {}

    def forget_errors(self, current: set[RankKey]) -> None:
        """Drop the errors of all ranks but ``current``."""
        for key in self.errors.keys() - current:
            del self.errors[key]

    def record_intent(
        self,
        inventory: Inventory,
        job: JobRecord,
        allocation: Allocation,
        policy: PolicySpec,
        ports: set[int | None],
        now: float,
    ) -> tuple[JobRecord, list[RankRecord]]:
        """Record the intent to start a pending job in the store, before anything is sent.

        The job's MASTER_PORT is added to ``ports``, those in use.

        Returns:
            The job in STARTING, and its ranks.
        """
        port = master_port(job.id, ports)
        ports.add(port)
        fields = {"allocation": allocation, "attempt": job.attempt + 1, "start_time": None, "reason": "", "message": ""}
        fields |= {"master_port": port, "policy": policy.name, "policy_version": policy.version}
        data = {"nodes": {p.node: list(p.gpus) for p in allocation.parts}, "policy": policy.name}
        job, event = transition_to(job, JobState.STARTING, now, event="starting", data=data, **fields)
        ranks = [rank_record(inventory, job, part, now) for part in allocation.parts]
        self._store.put_jobs([job])
        self._store.put_ranks(ranks)
        self._store.append([event])
        return job, ranks

    def launch_operations(self, inventory: Inventory, job: JobRecord, ranks: Collection[RankRecord]) -> list[Operation]:
        """Return the operations that launch these ranks; failures go to ``errors``."""
        operations = []
        readings = {rank.node: self._reading(rank.node) for rank in ranks}
        for rank in ranks:
            try:
                operations.append(self._launch(inventory, job, rank, readings[rank.node]))
            except UsageError as error:
                self.errors[rank_key(rank)] = f"{REFUSED}: {error.line()}"
            except GpuschedError as error:
                self.errors[rank_key(rank)] = error.line()
            except OSError as error:  # our own disk, not the job's fault: the next cycle retries
                _log.warning("cannot be launched yet: %s", error, extra={"job": job.id, "node": rank.node})
            except Exception as error:  # no node's fault; the other jobs go ahead
                self.errors[rank_key(rank)] = f"{REFUSED}: {type(error).__name__}: {error}"[:500]
        return operations

    def _reading(self, node: str) -> NodeReading | None:
        record = self._store.node_record(node)
        return record.reading if record is not None else None

    def _launch(
        self, inventory: Inventory, job: JobRecord, rank: RankRecord, reading: NodeReading | None
    ) -> Operation:
        assert job.allocation is not None
        secrets = self._secrets.read(job.id) if job.spec.secret_names else {}
        if secrets is None:
            raise GpuschedError(f"{REFUSED}: its secrets are no longer stored")
        program = self._secrets.programs.read(job) if job.spec.function else ""
        if program is None:
            raise GpuschedError(f"{REFUSED}: its function is no longer stored")
        if any(inventory.node(p.node) is None for p in job.allocation.parts):
            raise GpuschedError("a node of its allocation left inventory.yaml")
        part = next(p for p in job.allocation.parts if p.rank == rank.rank)
        # By the present inventory, which may name other admins than at submission.
        trusted = job.uid in (0, os.getuid()) or job.user in inventory.settings.admins
        shared = self._shared or inventory.settings.shared
        allow_root = inventory.settings.root_jobs or not shared
        if job.uid == 0 and not allow_root:
            raise GpuschedError(f"{REFUSED}: jobs of root need settings.root_jobs in inventory.yaml")
        request = launch_request(
            job, part, inventory, self._cluster_id, secrets=secrets, program=program, allow_root=allow_root,
            run_as=_run_as(job, inventory.node(part.node) if shared else None),
            mount_anything=trusted, steps_key=self._secrets.steps_key(job.id) if has_steps(job) else None,
            joins=rank.hot == "joins", slices=_slices(part, reading),
            record=_record(job, rank, reading),
        )  # fmt: skip
        return Operation(verb="launch", node=rank.node, rank=rank, request=request)


def rank_record(inventory: Inventory, job: JobRecord, part: NodeAllocation, now: float) -> RankRecord:
    """Return the record of a rank that is to be launched."""
    node = inventory.node(part.node)
    assert node is not None
    return RankRecord(
        job_id=job.id,
        attempt=job.attempt,
        rank=part.rank,
        node=part.node,
        runtime=node.runtime,
        gpus=part.gpus,
        intended_at=now,
        output=expand_output(job, part.rank, part.node),
        sharing=node.sharing.mode if job.spec.share and node.sharing is not None else "",
    )


def _record(job: JobRecord, rank: RankRecord, reading: NodeReading | None) -> bytes:
    at = rank.intended_at
    return attempt_record(job, rank.rank, rank.runtime, rank.gpus, at, reading, at or job.submit_time)


def _slices(part: NodeAllocation, reading: NodeReading | None) -> tuple[MigSlice, ...]:
    """Return a rank's slices by its node's last reading; none if it has whole GPUs.

    Raises:
        GpuschedError: One is not there.
    """
    if not any(map(is_slice, part.gpus)):
        return ()
    found = usable_slices(reading)
    if missing := [number for number in part.gpus if number not in found]:
        raise GpuschedError(f"{part.node} has no slice {gpu_label(missing[0])} any more")
    return tuple(found[number] for number in part.gpus)


def _run_as(job: JobRecord, shared_node: Node | None) -> tuple[int, int] | None:
    """Return the submitter's ids; None: the job runs as the node's account.

    ``shared_node``: in a shared installation, the job's node. Entered as root, it runs the jobs of the controller's
    user as this user, too.
    """
    entered_as_root = shared_node is not None and (shared_node.become == "sudo" or shared_node.user == "root")
    if job.uid == os.getuid() and not (entered_as_root and job.uid):
        return None
    try:
        return job.uid, pwd.getpwuid(job.uid).pw_gid
    except KeyError:
        raise GpuschedError(f"{REFUSED}: user id {job.uid} has no name here, so its group is unknown") from None
