"""The service behind `gpusched check`: everything from the file to the GPUs, each with what is wrong and what to do."""

from gpusched.doctor.examine import examine
from gpusched.doctor.findings import Finding, Status, worst

__all__ = ["Finding", "Status", "examine", "worst"]
