"""``submit --dry-run``: what would be asked for, and whether it could start."""

from __future__ import annotations

import os
import time

from gpusched.client.context import Client
from gpusched.client.submit import Prepared
from gpusched.client.why import explain_pending
from gpusched.config.users import user_name
from gpusched.model import ids
from gpusched.model.jobs import Job, JobState
from gpusched.views.why import Why


def dry_run(client: Client, prepared: Prepared) -> Why:
    """What ``why`` would say of this request, had it been queued now."""
    now, uid, spec = time.time(), os.getuid(), prepared.spec
    job = Job(
        id=ids.mint(now),
        user=user_name(uid),
        uid=uid,
        spec=spec,
        state=JobState.PENDING,
        priority=spec.priority - spec.nice,
        submit_time=now,
        eligible_time=spec.begin_time,
        held_by="user" if spec.hold else "",
    )
    return explain_pending(client, job)
