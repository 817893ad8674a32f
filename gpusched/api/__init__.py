"""gpusched from Python: functions and commands as jobs, and jobs as futures. Everything public is exported here.

In: functions, their arguments, options. Out: the same requests to `client` as the commands make; futures, and the data
of `gpusched ... --json`. May import: client, views, queue, config, model, job. Begin with `cluster`.
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
