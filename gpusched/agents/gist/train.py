"""Training of a GIST agent; ``train: variant`` of the policy file says which.

``scale`` (the default) is the shared per-server network of `scale`. ``masked``, ``paper`` and ``wait`` are the paper's
own setting: episodes are few jobs of the partition's single-server flavors with run times equal to the limits. What
comes out is measured in that setting, exactly. It decides nothing live: its network has one output per flavor and
server, and knows no jobs but those of the flavors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gpusched.agents.common.request import UNTRAINED, ResultRow, TrainerResult, TrainingReport, TrainJob, settings_of
from gpusched.agents.gist import dqn, expectimax, naive
from gpusched.agents.gist.clusters import VARIANTS, Clusters
from gpusched.agents.gist.scale import ScaleTraining
from gpusched.agents.gist.setting import HOUR_S, EpisodeSetting, of_partition
from gpusched.errors import UsageError
from gpusched.model.suggest import did_you_mean

MOST_LEAVES = 20_000
"""Setting sizes beyond which the exact figures would take minutes."""


@dataclass(frozen=True)
class EpisodeSettings:
    """What episodes are like. gap_h: hours between submissions. jobs: Of an episode, the last one not counted."""

    gap_h: float = 0.0
    jobs: int = 4


def train_agent(job: TrainJob, report: TrainingReport) -> TrainerResult:
    """One partition's agent.

    Raises:
        UsageError: No such variant or hyper-parameter; too few jobs; in the paper's setting nodes of no inventory, or
            no flavor that fits one server.
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
    mine = ("gap_h", "jobs")
    hyper = settings_of(dqn.WAIT if variant == "wait" else dqn.DQNSettings(), settings, ("variant", *mine))
    episode = settings_of(EpisodeSettings(), {k: v for k, v in settings.items() if k in mine})
    setting = of_partition(job.declared, episode.gap_h, episode.jobs)
    learned = dqn.train(
        setting, variant, hyper, job.seed, device=job.device, report=report, checkpoint=job.checkpoint
    )  # fmt: skip
    return TrainerResult(
        arrays=learned.arrays,
        about={"variant": variant, "knows": "limit", "gap_h": f"{episode.gap_h:g}"},
        score=learned.best.utilization,
        hyper_parameters={"variant": variant, **asdict(episode), **asdict(hyper)},
        notes=(
            f"in the setting of Narantuya et al. (CMC 2022): {episode.jobs} jobs {setting.gap_s / HOUR_S:g} h apart, "
            f"U when one that needs every server could start, mean over all {len(setting.sequences())} sequences",
            f"best after {learned.best.episodes} of {len(learned.played)} episodes",
        ),
        rows=_rows(setting, f"{job.spec.name} ({variant})", learned),
    )


def _rows(setting: EpisodeSetting, name: str, learned: dqn.DQNResult) -> tuple[ResultRow, ...]:
    """The agent beside first fit, and beside the exact figures where these can be had in seconds."""
    found = [
        (name, "limit", learned.best.utilization),
        (UNTRAINED, "limit", learned.course[0].utilization),
        ("first fit, largest first", "nothing", first_fit(setting)),
    ]
    alike = len(set(s._replace(name="") for s in setting.servers)) == 1
    if alike and len(setting.servers) ** setting.jobs * len(setting.sequences()) <= MOST_LEAVES:
        found += [
            ("naive", "nothing", naive.exact(setting).utilization),
            ("starts whatever fits, worst servers", "nothing", expectimax.never_waits_at_worst(setting)),
            ("starts whatever fits, best servers", "limit", expectimax.never_waits(setting)),
            ("best online", "limit", expectimax.best_online(setting)),
            ("optimum (all jobs known beforehand)", "oracle", expectimax.clairvoyant(setting)),
        ]
    return tuple(ResultRow(policy=p, knows=k, figure="utilization", value=v) for p, k, v in found)


def first_fit(setting: EpisodeSetting) -> float:
    """Mean U over all sequences of starting whatever fits, largest first, on the first server that has room."""
    clusters = Clusters(setting, "masked", len(setting.sequences()), 0, setting.sequences())
    batch = clusters.begin()
    while (batch.job >= 0).any():
        clusters.step(batch.mask.argmax(axis=1))  # servers come before the queue
    return float(batch.utilization.mean())
