"""Training of a GIST agent, selected by ``train: variant`` of the policy file.

``scale`` (the default) is the shared per-server network of `scale`. ``masked``, ``paper`` and ``wait`` are the paper's
own setting: episodes of a few jobs of the partition's single-server flavors, with run times equal to the limits. The
result is evaluated exactly in that setting. The network has one output per flavor and server, so it decides only in the
partition that it was trained for (`paper_pass`), and that of ``wait`` nowhere.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gpusched.agents.common.request import UNTRAINED, ResultRow, TrainerResult, TrainingReport, TrainJob, settings_of
from gpusched.agents.gist import dqn, expectimax, naive
from gpusched.agents.gist.clusters import VARIANTS, Clusters
from gpusched.agents.gist.scale import ScaleTraining
from gpusched.agents.gist.setting import HOUR_S, EpisodeSetting, of_partition, tables_of
from gpusched.errors import UsageError
from gpusched.model.suggest import did_you_mean

MOST_LEAVES = 20_000
"""Largest setting for exact figures; beyond it they take minutes."""


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings of episodes.

    Attributes:
        gap_h: Hours between submissions. jobs: Per episode, without the last one.
        patience_days: Not of episodes: a job that has waited longer goes first, see `paper_pass`. The longest flavor of
            the paper runs for 14 days.
    """

    gap_h: float = 0.0
    jobs: int = 4
    patience_days: float = 30.0


def train_agent(job: TrainJob, report: TrainingReport) -> TrainerResult:
    """Train the agent of one partition.

    Raises:
        UsageError: The variant or a hyper-parameter does not exist, or there are too few jobs; in the paper's setting:
            the nodes belong to no inventory, or no flavor fits one server.
    """
    settings = job.spec.settings
    variant = settings.get("variant", "scale")
    if variant == "scale":
        return ScaleTraining(job, report).run()
    variant = str(variant)
    if variant not in VARIANTS:
        raise UsageError(f"train: variant {variant!r}{did_you_mean(variant, ['scale', *VARIANTS])}")
    if job.declared is None:
        raise UsageError(f"the {variant} variant needs flavors", "name an inventory: --inventory F")
    episode_keys = ("gap_h", "jobs", "patience_days")
    hyper = settings_of(dqn.WAIT if variant == "wait" else dqn.DQNSettings(), settings, ("variant", *episode_keys))
    episode = settings_of(EpisodeSettings(), {k: v for k, v in settings.items() if k in episode_keys})
    setting = of_partition(job.declared, episode.gap_h, episode.jobs)
    learned = dqn.train(
        setting, variant, hyper, job.seed, device=job.device, report=report, checkpoint=job.checkpoint
    )  # fmt: skip
    return TrainerResult(
        arrays={**learned.arrays, **tables_of(setting)},
        about={
            "variant": variant,
            "knows": "limit",
            "gap_h": f"{episode.gap_h:g}",
            "patience_s": str(episode.patience_days * 86400),
        },
        score=learned.best.utilization,
        hyper_parameters={"variant": variant, **asdict(episode), **asdict(hyper)},
        notes=(
            f"in the setting of Narantuya et al. (CMC 2022): {episode.jobs} jobs {setting.gap_s / HOUR_S:g} h apart, "
            f"U when one that needs every server could start, mean over all {len(setting.sequences())} sequences",
            f"best after {learned.best.episodes} of {len(learned.episode_utilization)} episodes",
        ),
        rows=_rows(setting, f"{job.spec.name} ({variant})", learned),
    )


def _rows(setting: EpisodeSetting, name: str, learned: dqn.DQNResult) -> tuple[ResultRow, ...]:
    """Return rows for the agent, first fit, and the exact figures if these take only seconds."""
    rows = [
        (name, "limit", learned.best.utilization),
        (UNTRAINED, "limit", learned.evaluations[0].utilization),
        ("first fit, largest first", "nothing", first_fit(setting)),
    ]
    bounds: list[tuple[str, str, float]] = []
    identical = len(set(s._replace(name="") for s in setting.servers)) == 1
    if identical and len(setting.servers) ** setting.jobs * len(setting.sequences()) <= MOST_LEAVES:
        rows.append(("naive", "nothing", naive.exact(setting).utilization))
        bounds = [
            ("starts whatever fits, worst servers", "nothing", expectimax.never_waits_at_worst(setting)),
            ("starts whatever fits, best servers", "limit", expectimax.never_waits(setting)),
            ("best online", "limit", expectimax.best_online(setting)),
            ("optimum (all jobs known beforehand)", "oracle", expectimax.clairvoyant(setting)),
        ]
    return tuple(
        ResultRow(policy=p, knows=k, figure="utilization", value=v, bound=is_bound)
        for is_bound, some in ((False, rows), (True, bounds))
        for p, k, v in some
    )


def first_fit(setting: EpisodeSetting) -> float:
    """Return mean U over all sequences of starting every job that fits, largest first, on the first such server."""
    clusters = Clusters(setting, "masked", len(setting.sequences()), 0, setting.sequences())
    batch = clusters.begin()
    while (batch.job >= 0).any():
        clusters.step(batch.mask.argmax(axis=1))  # the first valid action: servers are numbered before the queue
    return float(batch.utilization.mean())
