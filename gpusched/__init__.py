"""gpusched: a GPU cluster over plain SSH. ``from gpusched import Cluster`` is the Python interface (`gpusched.api`)."""

TYPE_CHECKING = False  # as checkers know it; every command would load typing for the true one

if TYPE_CHECKING:
    from gpusched.api import Again as Again
    from gpusched.api import Cluster as Cluster
    from gpusched.api import Executor as Executor
    from gpusched.api import GpuschedError as GpuschedError
    from gpusched.api import Job as Job
    from gpusched.api import JobFailed as JobFailed
    from gpusched.api import JobState as JobState
    from gpusched.api import NoController as NoController
    from gpusched.api import Options as Options
    from gpusched.api import RemoteTraceback as RemoteTraceback
    from gpusched.api import UsageError as UsageError

__version__ = "0.1.0"


_PUBLIC = (
    "Again", "Cluster", "Executor", "GpuschedError", "Job", "JobFailed", "JobState", "NoController", "Options",
    "RemoteTraceback", "UsageError",
)  # fmt: skip


def __dir__() -> list[str]:
    """Return this module's and the public names without loading them, for completion in notebooks."""
    return sorted({*globals(), *_PUBLIC})


def __getattr__(name: str) -> object:
    """Load a public name of `gpusched.api` on first use: commands start without them."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'gpusched' has no attribute {name!r}")
    import importlib

    found: object = getattr(importlib.import_module("gpusched.api"), name)
    return found
