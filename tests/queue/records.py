"""Jobs as the store keeps them."""

from __future__ import annotations

import msgspec

from gpusched.model.jobs import Allocation, Ending, JobRecord, JobState, NodeAllocation
from tests.builders import spec
from tests.controller.applying import NOW

ID = "0123456789a"


def job(job_id: str = ID, state: JobState = JobState.RUNNING, **changes: object) -> JobRecord:
    part = NodeAllocation(rank=0, node="n0", gpus=(1, 2), cores=3, memory_mib=4)
    full = JobRecord(
        id=job_id, user="älice", uid=7, spec=spec(name="a 'b' \n \U0001f680"), state=state, submit_time=NOW + 0.125,
        allocation=Allocation(job_id, (part,)), ending=Ending(outcome=JobState.TIMEOUT, reason="r", kill_at=NOW),
        excluded_nodes=("n1",), energy_j=1.5, start_time=NOW + 1,
    )  # fmt: skip
    return msgspec.structs.replace(full, **changes)
