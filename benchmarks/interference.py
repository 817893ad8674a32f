"""How well placements' step times and the slowdown beside others are predicted, on what was held out.

    .venv/bin/python -m benchmarks.interference PROFILES [--seeds 5] [--skip placement|pairs|probes ...]

PROFILES: a folder with Sia's placement/MODEL-placements-CLUSTER.csv, Gavel's gavel_throughputs.json and
contention/*.csv. Nothing is chosen by these tables: a model is fitted on a part, and judged on the rest.

- placement: each placement of a model on a machine is left out, with all its batch sizes; mean relative error of the
  step time, without a model (taken as on the fewest GPUs at that batch size), by the formula on a
  series that it was not fitted on (the files of scalability, on AWS up to 16 servers after 4), and how often the
  interval that is to hold in 80 % did.
- pairs: one pair in five is left out, in both directions; mean absolute error of what is left of the speed, without a
  model (the median of the others) and by the formula alone (without what families are off by).
- probes: a whole family is left out, then three pairs of each of its kinds with others are measured (both directions),
  and all other pairs of these with the fitted kinds are predicted, and those among themselves; then the former with
  three for all the family.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import pair_fit
from benchmarks.measured_tables import pairs_of, read_pairs, read_steps
from benchmarks.pair_fit import InterferenceTable
from gpusched.sched.interference import pairs as by_pairs
from gpusched.sched.interference import placement as by_placement
from gpusched.sched.interference.pairs import ClassEffect
from gpusched.sched.state import Floats, Ints
from gpusched.sim.profiles import read_profiles
from gpusched.sim.profiles.placement import is_placement

FOLDS, PROBES, COVER = 5, 3, 0.8


def placements(folder: Path) -> None:
    """Print a line per machine."""
    print(f"{'placement':22}{'steps':>6}{'error':>8}{'without':>9}{'series':>8}{'80 % held':>11}  by model")
    files = sorted(path for path in folder.rglob("*-placements-*.csv*") if is_placement(path.name.removesuffix(".gz")))
    measured = [read_steps(path) for path in files]
    for machine in dict.fromkeys(one.machine for one in measured):
        off, blind, larger, held, by_model = [], [], [], [], []
        for path, one in zip(files, measured, strict=True):
            if one.machine != machine:
                continue
            times = one.times
            places, where = np.unique(np.column_stack(times.placed), axis=0, return_inverse=True)
            where = where.reshape(-1)
            mine: list[float] = []
            for place in range(len(places)):
                out, rest = np.flatnonzero(where == place), np.flatnonzero(where != place)
                part = by_placement.StepTimes(times.placed.only(rest), times.batch[rest], times.step_s[rest])
                fit = by_placement.fit(part, bus=one.bus)
                estimate, real = fit.step_s(times.placed.only(out), times.batch[out]), times.step_s[out]
                low, high = pair_fit.steps_between(fit, estimate, COVER)
                mine += list(np.abs(estimate / real - 1)[np.isfinite(estimate)])
                held += list(((low <= real) & (real <= high))[np.isfinite(estimate)])
                blind += list(np.abs(_fewest(part, times.batch[out]) / real - 1)[np.isfinite(estimate)])
            off += mine
            by_model.append(f"{one.model} {np.mean(mine):.3f}")
            if (other := path.with_name(path.name.replace("-placements-", "-scalability-"))).exists():
                more = read_steps(other).times
                formula = by_placement.fit(times, bus=one.bus)._replace(measured={})
                estimate = formula.step_s(more.placed, more.batch)
                larger += list(np.abs(estimate / more.step_s - 1)[np.isfinite(estimate)])
        print(f"{machine:22}{len(off):6}{np.mean(off):8.3f}{np.nanmean(blind):9.3f}{np.mean(larger):8.3f}"
              f"{np.mean(held):11.1%}  {', '.join(by_model)}")  # fmt: skip


def _fewest(times: by_placement.StepTimes, batch: Floats) -> Floats:
    """Mean step on the fewest GPUs that these batch sizes were measured on; NaN: on none."""
    found = np.full(len(batch), np.nan)
    for place, one in enumerate(batch):
        rows = np.flatnonzero(times.batch == one)
        if len(rows):
            gpus = times.placed.gpus[rows]
            found[place] = times.step_s[rows[gpus == gpus.min()]].mean()
    return found


def pairs(tables: dict[str, InterferenceTable], seeds: int) -> None:
    """Print a line per table."""
    print(f"\n{'pairs held out':22}{'pairs':>6}{'error':>8}{'without':>9}{'formula':>9}{'80 % held':>11}")
    for name, table in tables.items():
        off, blind, formula, held = [], [], [], []
        numbers = np.minimum(table.job, table.beside) * len(table.kinds) + np.maximum(table.job, table.beside)
        _, pair = np.unique(numbers, return_inverse=True)
        pair = pair.reshape(-1)
        for seed in range(seeds):
            fold = (np.random.default_rng(seed).permutation(pair.max() + 1) % FOLDS)[pair]
            for one in range(FOLDS):
                out, rest = np.flatnonzero(fold == one), np.flatnonzero(fold != one)
                fit, real = pair_fit.fit(table.only(rest)), table.ratio[out]
                estimate = fit.ratio(table.job[out], table.beside[out])
                low, high = fit.interval(estimate, COVER)
                plain = fit._replace(offsets=np.zeros_like(fit.offsets)).ratio(table.job[out], table.beside[out])
                off += list(np.abs(estimate - real))
                formula += list(np.abs(plain - real))
                blind += list(np.abs(np.median(table.ratio[rest]) - real))
                held += list((low <= real) & (real <= high))
        print(f"{name:22}{len(table.ratio):6}{np.mean(off):8.4f}{np.mean(blind):9.3f}{np.mean(formula):9.4f}"
              f"{np.mean(held):11.1%}")  # fmt: skip


def probes(tables: dict[str, InterferenceTable], seeds: int) -> None:
    """Print a line per table."""
    head = ("error", 8), ("without", 9), ("80 % held", 11), ("among", 9), ("3 for all", 11)
    print(f"\n{'family after 3 probes':22}{'new':>6}{''.join(f'{name:>{room}}' for name, room in head)}  by family")
    for name, table in tables.items():
        family = np.array([sorted(set(table.families)).index(one) for one in table.families])
        each: dict[str, list[float]] = {}
        off, blind, held, among, of_all = [], [], [], [], []
        for new, label in enumerate(sorted(set(table.families))):
            inside = np.flatnonzero((family[table.job] != new) & (family[table.beside] != new))
            if not len(inside):
                continue
            fit = pair_fit.fit(table.only(inside))
            kinds = np.flatnonzero(family == new)
            with_others = np.flatnonzero((family[table.job] == new) != (family[table.beside] == new))
            for seed in range(seeds):
                rng = np.random.default_rng(seed)
                known, probed = _probed(table, fit, kinds, with_others, rng, apart=True)
                rest = np.setdiff1d(with_others, probed)
                estimates = [
                    by_pairs.expected(known[table.job[r]], [known[table.beside[r]]], noise=fit.noise) for r in rest
                ]
                real = table.ratio[rest]
                errors = np.abs(np.array([one.ratio for one in estimates]) - real)
                off += list(errors)
                each.setdefault(label, []).extend(errors)
                held += [one.low <= r <= one.high for one, r in zip(estimates, real, strict=True)]
                blind += list(np.abs(np.median(table.ratio[inside]) - real))
                for row in np.flatnonzero((family[table.job] == new) & (family[table.beside] == new)):
                    one = by_pairs.expected(known[table.job[row]], [known[table.beside[row]]])
                    among.append(abs(one.ratio - float(table.ratio[row])))
                known, probed = _probed(table, fit, kinds, with_others, rng, apart=False)
                for row in np.setdiff1d(with_others, probed):
                    one = by_pairs.expected(known[table.job[row]], [known[table.beside[row]]])
                    of_all.append(abs(one.ratio - float(table.ratio[row])))
        by_family = ", ".join(f"{label} {np.mean(errors):.3f}" for label, errors in each.items())
        print(f"{name:22}{len(off) // seeds:6}{np.mean(off):8.4f}{np.mean(blind):9.3f}{np.mean(held):11.1%}"
              f"{np.mean(among or np.nan):9.4f}{np.mean(of_all):11.4f}  {by_family}")  # fmt: skip


def _probed(
    table: InterferenceTable,
    fit: pair_fit.PairFit,
    kinds: Ints,
    with_others: Ints,
    rng: np.random.Generator,
    *,
    apart: bool,
) -> tuple[list[ClassEffect], Ints]:
    """Return the estimates of all kinds after three measured pairs of each new one, and their rows.

    Not ``apart``: three in all, and what they say of one holds for all of the family.
    """
    known, rows = list(fit.kinds), []
    for group in ([kind] for kind in kinds) if apart else [list(kinds)]:
        new = fit.prior
        mine = [row for row in with_others if table.job[row] in group or table.beside[row] in group]
        ends = {(int(table.job[row]), int(table.beside[row])): row for row in mine}
        both = [pair for pair in ends if pair[0] in group and pair[::-1] in ends]
        for place in rng.permutation(len(both))[:PROBES]:
            job, other = both[place]
            rows += [ends[job, other], ends[other, job]]
            with_new, with_other = (float(np.log(table.ratio[row])) for row in rows[-2:])
            new, _ = by_pairs.observed([new, known[other]], [(0, 1)], [1.0], with_new, fit.noise)
            _, new = by_pairs.observed([known[other], new], [(0, 1)], [1.0], with_other, fit.noise)
        for kind in group:
            known[kind] = new
    return known, np.array(rows, np.int64)


def _tables(folder: Path) -> dict[str, InterferenceTable]:
    gavel = read_profiles([next(folder.rglob("gavel_throughputs.json*"))])
    files = {
        "network (DeepShare)": "deepshare_pairs.csv", "same GPUs (PAL)": "pal_colocation_norm_speed.csv",
        "one server (HiEST)": "hiest_power8.csv",
    }  # fmt: skip
    tables = {name: read_pairs(next(folder.rglob(file))) for name, file in files.items()}
    return tables | {f"{kind} (Gavel)": pairs_of(gavel, kind) for kind in ("P100", "K80", "V100")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--skip", nargs="*", default=[], choices=("placement", "pairs", "probes"))
    asked = parser.parse_args(arguments)
    if "placement" not in asked.skip:
        placements(asked.profiles)
    tables = _tables(asked.profiles)
    if "pairs" not in asked.skip:
        pairs(tables, asked.seeds)
    if "probes" not in asked.skip:
        probes(tables, asked.seeds)


if __name__ == "__main__":
    main()
