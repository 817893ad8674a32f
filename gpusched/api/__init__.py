"""gpusched from Python: functions and commands as jobs, and these as futures. Everything public is named here.

In: functions, what they are called with, options. Out: requests to `client`, which the commands make, too; futures, and
what `gpusched ... --json` says. May import: client, views, queue, config, model, job. Begin with `cluster`.
"""

from gpusched.api.cluster import Cluster, NoController
from gpusched.api.executor import Executor
from gpusched.api.jobs import Job, JobFailed, RemoteTraceback
from gpusched.api.options import Options
from gpusched.errors import GpuschedError, UsageError
from gpusched.job import Again
from gpusched.model.jobs import JobState

__all__ = [
    "Again",
    "Cluster",
    "Executor",
    "GpuschedError",
    "Job",
    "JobFailed",
    "JobState",
    "NoController",
    "Options",
    "RemoteTraceback",
    "UsageError",
]
