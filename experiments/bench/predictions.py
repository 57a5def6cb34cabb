"""Judges the performance model at sites that it was not fitted on.

    python experiments/bench/predictions.py --out predictions.json --tables A B
    python experiments/bench/predictions.py --tables H100 --fitted A B [--known]

Fits on nine tenths of the shapes of the tables, predicts every candidate at the others,
and so on for each tenth; sites of the same features are in one tenth, whatever their
rows. With tables of another device to fit on, all sites are predicted from those and
the two rooflines; with `--known` also from this device's sites in the other tenths.
Needs no GPU: the times are in the tables.

error      |predicted / measured - 1|
covered    measured times within 1.96 spreads of the predicted ones
regret     time of the candidate that is predicted to be the fastest, over the fastest
total      the same of the times of all sites together: a site counts by its time
by xla     the same if XLA's bfloat16 is always taken
auto, tune the same of what these plans run after they measured: see `measured_choices`;
           `by_time` the fastest, `within_limits` what must gain enough to leave XLA
repeated   how far measurements of one program lie apart, largest over smallest
"""

import collections
import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tyro

from experiments.bench import measured_choices
from experiments.bench import result as results
from experiments.bench.measured_choices import BY_TIME, Outcome, TableGpu
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.policy import DEFAULT_LIMITS
from loka_jax.dispatch.table import Table
from loka_jax.ops.device import HOPPER
from loka_jax.ops.plan import resolve
from loka_jax.site import BF16, Choice, SiteSpec

_FOLDS = 10
_PASSES = ("training", "inference")
_LIMITS = {"by_time": BY_TIME, "within_limits": DEFAULT_LIMITS}
_SHORT_US = 20.0

# A model of performance that does not know a site, and the site.
type Case = tuple[PerformanceModel, SiteSpec]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        tables: of one device; one of them has a roofline.
        fitted: of another device, to fit on; empty to leave shapes out instead.
        known: whether sites of other shapes were measured on this device, too.
        worst: the number of largest regrets to list.
    """

    out: pathlib.Path | None = None
    tables: tuple[pathlib.Path, ...] = ()
    fitted: tuple[pathlib.Path, ...] = ()
    known: bool = False
    worst: int = 10


class Point(NamedTuple):
    """A candidate's measured and predicted time at a site."""

    spec: SiteSpec
    pass_name: str
    choice: str
    measured: float
    predicted: float
    spread: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return abs(self.predicted / self.measured - 1)

    @property
    def is_covered(self) -> bool:
        """True if the measured time is within the interval of the prediction."""
        distance = abs(math.log(self.predicted / self.measured))
        return distance <= 1.96 * self.spread


class Regret(NamedTuple):
    """What runs at a site, and what would be the fastest; times in microseconds."""

    site: str
    chosen: str
    best: str
    chosen_us: float
    best_us: float

    @property
    def share(self) -> float:
        """The time lost, relative to the fastest."""
        return self.chosen_us / self.best_us - 1


def main(arguments: Arguments) -> dict[str, Any]:
    """Judges, prints, writes and returns the result."""
    table = _merged([tables.read(path) for path in arguments.tables])
    if arguments.fitted:
        fitted = _merged([tables.read(path) for path in arguments.fitted])
        unknown = Table(table.header)
        model = PerformanceModel.of(unknown, roofline=table.roofline, fitted=fitted)
        cases = [(model, spec) for spec in table.sites]
        if arguments.known:
            cases = list(_left_out(table, model.with_table))
    else:
        cases = list(_left_out(table, PerformanceModel.of))
    result = results.head("predictions", arguments) | {"sites": len(table.sites)}
    for name in _PASSES:
        timed = [case for case in cases if table.sites[case[1]].times.get(name)]
        points = [point for case in timed for point in _predicted(case, table, name)]
        judgement = judged(points, arguments.worst)
        plans = {"auto": measured_choices.auto, "tune": measured_choices.tune}
        if name == "inference":
            del plans["tune"]  # which measures the training pass
        for plan, chosen_by in plans.items():
            judgement[plan] = {
                terms: checked(
                    functools.partial(chosen_by, limits=limits),
                    timed,
                    table,
                    name,
                    arguments.worst,
                )
                for terms, limits in _LIMITS.items()
            }
        _print(name, judgement)
        result[name] = judgement
    result["repeated"] = repeated(table)
    results.write(arguments.out, result)
    return result


def judged(points: list[Point], worst: int) -> dict[str, Any]:
    """Returns the errors of predictions, and the regrets of the choices by them."""
    by_site = collections.defaultdict(list)
    for point in points:
        by_site[point.spec].append(point)
    regrets, by_xla = [], []
    for spec, candidates in by_site.items():
        times = {point.choice: point.measured for point in candidates}
        chosen = min(candidates, key=lambda p: p.predicted)
        regrets.append(_regret(spec, chosen.choice, times))
        by_xla.append(_regret(spec, BF16.name, times))
    return {
        "predictions": len(points),
        "median_error": statistics.median(p.error for p in points),
        "p90_error": _quantile([p.error for p in points], 0.9),
        "covered": statistics.mean(p.is_covered for p in points),
        **summary(regrets, worst),
        "mean_regret_by_xla": statistics.mean(x.share for x in by_xla),
        "largest_regret_by_xla": max(x.share for x in by_xla),
        "total_regret_by_xla": _total(by_xla),
    }


def checked(
    chosen_by: Callable[[PerformanceModel, TableGpu], Outcome],
    cases: Sequence[Case],
    table: Table,
    pass_name: str,
    worst: int,
) -> dict[str, Any]:
    """Returns the regrets of what a plan runs after measuring, and what it measured."""
    outcomes, regrets = [], []
    for model, spec in cases:
        outcome = chosen_by(model, TableGpu(table, spec, pass_name))
        outcomes.append(outcome)
        times = table.sites[spec].times[pass_name]
        regrets.append(_regret(spec, outcome.choice, times))
    return {
        "mean_measured": statistics.mean(x.measured for x in outcomes),
        "most_measured": max(x.measured for x in outcomes),
        "not_measured": sum(x.measured == 0 for x in outcomes),
        "mean_rounds": statistics.mean(x.rounds for x in outcomes),
        "most_rounds": max(x.rounds for x in outcomes),
        **summary(regrets, worst),
    }


def summary(regrets: Sequence[Regret], worst: int) -> dict[str, Any]:
    """Returns the mean and the largest regrets, and the sites of the largest."""
    shares = [x.share for x in regrets]
    rows = sorted(regrets, key=lambda x: -x.share)[:worst]
    return {
        "mean_regret": statistics.mean(shares),
        "p95_regret": _quantile(shares, 0.95),
        "largest_regret": max(shares),
        "above_a_tenth": sum(share > 0.1 for share in shares),
        "total_regret": _total(regrets),
        "worst": [{"regret": row.share, **row._asdict()} for row in rows],
    }


def repeated(table: Table) -> dict[str, Any]:
    """Returns how far measurements of one program in inference lie apart.

    Recipes that differ in the gradients' products only have one program there, which
    some sites have times of from several processes. Of at most 20 us.
    """
    spans = []
    for spec, entry in table.sites.items():
        programs = collections.defaultdict(set)
        for name, us in entry.times.get("inference", {}).items():
            plan = resolve(spec, Choice.parse(name), HOPPER)
            programs[name.partition(" ")[0], plan.fwd, plan.is_fused].add(us)
        spans += [max(x) / min(x) - 1 for x in programs.values() if _is_repeated(x)]
    return {
        "programs": len(spans),
        "median": statistics.median(spans),
        "p90": _quantile(spans, 0.9),
        "largest": max(spans),
    }


def _is_repeated(times: set[float]) -> bool:
    return len(times) > 1 and max(times) <= _SHORT_US


def _regret(spec: SiteSpec, chosen: str, times: dict[str, float]) -> Regret:
    best = min(times, key=lambda name: times[name])
    return Regret(str(spec), chosen, best, times[chosen], times[best])


def _total(regrets: Sequence[Regret]) -> float:
    return sum(x.chosen_us for x in regrets) / sum(x.best_us for x in regrets) - 1


def _left_out(
    table: Table, model_of: Callable[[Table], PerformanceModel]
) -> Iterator[Case]:
    """Yields each site with a model that does not know its shape."""
    shapes = sorted({(spec.k, spec.n) for spec in table.sites})
    for fold in range(_FOLDS):
        left_out = set(shapes[fold::_FOLDS])
        kept = {s: e for s, e in table.sites.items() if (s.k, s.n) not in left_out}
        model = model_of(dataclasses.replace(table, sites=kept))
        for spec in table.sites:
            if (spec.k, spec.n) in left_out:
                yield model, spec


def _predicted(case: Case, table: Table, pass_name: str) -> Iterator[Point]:
    """Yields a point for each candidate that was measured at a site."""
    model, spec = case
    measured = table.sites[spec].times[pass_name]
    choices = [Choice.parse(name) for name in measured]
    for name, time in model.predictions(spec, choices, pass_name).items():
        yield Point(spec, pass_name, name, measured[name], *time)


def _print(name: str, judgement: dict[str, Any]):
    for key, value in judgement.items():
        if isinstance(value, dict):
            for terms, part in value.items():
                _print(f"{name} {key} {terms}", part)
    print(name, {k: v for k, v in judgement.items() if isinstance(v, int | float)})
    for row in judgement.get("worst", ()):
        print("   ", row)


def _merged(parts: list[Table]) -> Table:
    sites = {spec: entry for part in parts for spec, entry in part.sites.items()}
    roofline = next(part.roofline for part in parts if part.roofline is not None)
    return Table(parts[0].header, sites, roofline)


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
