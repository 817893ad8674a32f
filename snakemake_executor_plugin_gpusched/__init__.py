"""The name by which Snakemake finds `gpusched.integrations.snakemake`: it imports all packages named like this."""

from gpusched.integrations.snakemake import SnakemakeExecutor as Executor
from gpusched.integrations.snakemake import SnakemakeSettings as ExecutorSettings
from gpusched.integrations.snakemake import common_settings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
