"""Hydra's launcher: ``python train.py --multirun hydra/launcher=submitit_gpusched`` makes each run a job here.

Hydra loads every module of this package at its start, and takes launchers from nowhere else, so this one stands beside
gpusched's own package. It is hydra-submitit-launcher with another executor (gpusched/integrations/submitit.py).
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

with contextlib.suppress(ModuleNotFoundError):  # a Hydra without that launcher: there is none of ours either
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher

    class GpuschedLauncher(BaseSubmititLauncher):  # type: ignore[misc]
        """Queue the runs of a sweep, and wait for what they return.

        Args:
            additional_parameters: Further options of ``gpusched submit``.
            params: Of `GpuschedQueueConf`.
        """

        _EXECUTOR = "gpusched"

        def __init__(self, additional_parameters: Any = None, **params: Any) -> None:
            super().__init__(**params, **(additional_parameters or {}))

    @dataclass
    class GpuschedQueueConf(BaseQueueConf):  # type: ignore[misc]
        """Hold what ``hydra.launcher`` may set: options of ``gpusched submit`` under their names; None: not given."""

        _target_: str = "hydra_plugins.gpusched_launcher.GpuschedLauncher"

        partition: str | None = None
        flavor: str | None = None
        gpus: Any = None
        gpus_per_task: int | None = None
        gpu_type: Any = None
        cpus_per_gpu: int | None = None
        mem_per_gpu: Any = None
        time: Any = None  # in place of timeout_min
        image: str | None = None
        mount: Any = None
        env: Any = None
        group: str | None = None
        qos: str | None = None
        nodelist: Any = None
        exclude: Any = None
        exclusive: bool | None = None
        preemptible: bool | None = None
        priority: int | None = None
        reservation: str | None = None
        comment: str | None = None

        # submitit's: the interpreter on the nodes, the warning before the limit, and how often a run goes on after it.
        python: str | None = None
        signal_delay_s: int = 120
        max_num_timeout: int = 0
        setup: list[str] | None = None

        additional_parameters: dict[str, Any] = field(default_factory=dict)

    ConfigStore.instance().store("submitit_gpusched", GpuschedQueueConf(), "hydra/launcher", provider="gpusched")
