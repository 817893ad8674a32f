"""The GIST agent (Narantuya et al., "Multi-Agent Deep Reinforcement Learning-Based Resource Allocation in HPC/AI
Converged Cluster", CMC 2022): as published, and made useful for partitions of any size.
"""  # noqa: D205

from __future__ import annotations

from gpusched.agents.common.request import Report, Trained, TrainJob


def train_agent(job: TrainJob, report: Report) -> Trained:
    """One partition's agent; ``train: variant`` of the policy file says which.

    ``scale`` (the default) is the shared per-server network of `gpusched.agents.gist.scale`. ``masked``, ``paper`` and
    ``wait`` are the paper's own setting, `gpusched.agents.gist.published`.
    """
    variant = job.spec.settings.get("variant", "scale")
    if variant == "scale":
        from gpusched.agents.gist.scale import train_agent as train_scale

        return train_scale(job, report)
    from gpusched.agents.gist.published import train_agent as train_published

    return train_published(job, report)
