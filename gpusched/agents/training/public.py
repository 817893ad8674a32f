"""``gpusched reproduce rltune --out``: weights for clusters without a record of their own, from public traces."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np

from gpusched.agents.common.origin import origin_of, paper_command
from gpusched.agents.common.request import UNTRAINED
from gpusched.agents.describe import describe_weights
from gpusched.agents.rltune.public import PublicCluster, train_public
from gpusched.agents.training.card import Data, new_card, trace_sha256, write_card
from gpusched.agents.training.gate import judge
from gpusched.agents.training.train import TrainedFiles
from gpusched.config.policies import BUILT_IN, WEIGHTS, load_policy, policy_file
from gpusched.config.weightfiles import CARD, KEPT_ANYWAY
from gpusched.config.weights import DEFAULT, digest_of, load_file, make_writable, save_model
from gpusched.errors import UsageError
from gpusched.model.policy import PolicySpec
from gpusched.model.units import count_of, iso_utc
from gpusched.sim.pool import Pool
from gpusched.sim.power import power_model
from gpusched.study.options import PaperOptions
from gpusched.study.paper import Advance
from gpusched.study.study import DEFAULT_GPUS_PER_NODE, Scenario
from gpusched.traces.load import load
from gpusched.traces.slicing import nodes_for_load, of_whole_gpus, select, slice_trace
from gpusched.traces.trace import Trace

LOADS = (0.9, 1.1)
MIN_JOBS, QUICK_MIN_JOBS = 250, 50  # of a virtual cluster, if none are named
MOST_JOBS, QUICK_JOBS = 5000, 200  # the last ones of each cluster


def make_public(options: PaperOptions, advance: Advance) -> list[TrainedFiles]:
    """Train on the virtual clusters of a trace; write weights and training card.

    Raises:
        UsageError: An option is missing or invalid.
        GpuschedError: A file cannot be read or written.
    """
    if options.trace is None:
        raise UsageError("--out needs the jobs of several clusters", "--trace FILE, such as philly_2017.csv.gz")
    started, spec, out = time.monotonic(), _policy(options), Path(options.out or "")
    make_writable(out.parent)
    trace = of_whole_gpus(load(options.trace, options.format))
    clusters = _clusters(trace, options)
    made = train_public(clusters, spec, advance)
    names, file = [cluster.name for cluster in clusters], Path(options.trace)
    given = msgspec.structs.replace(options, policies=(spec.name,), vcs=tuple(names))
    about = made.result.about | origin_of(paper_command("rltune", given), None, [file])
    rows = made.result.rows or ()  # of weights of the other clusters, on each
    verdict = judge(rows, is_start=any(row.policy == UNTRAINED and row.change == 0.0 for row in rows))
    if verdict.closed:
        verdict = msgspec.structs.replace(verdict, kept_anyway=True)
        about[KEPT_ANYWAY] = f"{verdict.outcome}: {verdict.line}"
    save_model(out, spec.agent or "", made.result.arrays, about)
    learned = select(trace, np.isin(trace.group, [trace.groups.index(name) for name in names]))
    data = Data(
        name=f"{count_of(len(names), 'cluster')} of {file.name}",
        jobs=sum(len(cluster.scenarios[0].trace) for cluster in clusters),
        sha256=trace_sha256(learned), held_out_jobs=0, public=True,
        last=None if trace.epoch is None else iso_utc(trace.epoch + float(learned.submit[-1])),
    )  # fmt: skip
    card = new_card(
        spec, DEFAULT, made.result, data, verdict, weights=digest_of(out.read_bytes()),
        decides=describe_weights(load_file(out, spec.agent or "")),
        wall_time_s=round(time.monotonic() - started, 1), notes=(f"command: {about['command']}",),
    )  # fmt: skip
    card_file = out.with_name(out.name.removesuffix(WEIGHTS) + CARD)
    write_card(card_file, card)
    return [TrainedFiles(partition=DEFAULT, weights=str(out), card_file=str(card_file), card=card)]


def _policy(options: PaperOptions) -> PolicySpec:
    """Return the built-in policy to train: one of rltune's."""
    name = options.policies[0] if options.policies else "rltune"
    file = policy_file(name, (BUILT_IN,))
    spec = load_policy(file) if file is not None and len(options.policies) < 2 else None
    if spec is None or spec.agent != "rltune":
        raise UsageError(f"--policy {' '.join(options.policies)}", "expected one, such as rltune or rltune-preempt")
    return spec


def _clusters(trace: Trace, options: PaperOptions) -> list[PublicCluster]:
    """Return the named virtual clusters, or all with enough jobs: the last jobs, on nodes for each load."""
    counts = np.bincount(trace.group[trace.group >= 0], minlength=len(trace.groups))
    least, most = (QUICK_MIN_JOBS, QUICK_JOBS) if options.quick else (MIN_JOBS, MOST_JOBS)
    names = options.vcs or [name for name, jobs in zip(trace.groups, counts, strict=True) if jobs >= least]
    loads, found = options.loads or LOADS, []
    for name in dict.fromkeys(names):
        own = slice_trace(trace, vc=name)
        own = select(own, np.arange(max(0, len(own) - most), len(own)))
        pools = [Pool.uniform(nodes_for_load(own, DEFAULT_GPUS_PER_NODE, at), DEFAULT_GPUS_PER_NODE) for at in loads]
        found.append(PublicCluster(name, loads, tuple(Scenario(own, pool, power_model(pool)) for pool in pools)))
    return found
