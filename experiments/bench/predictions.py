"""Judges the performance model at sites that it was not fitted on.

    python experiments/bench/predictions.py --out predictions.json --tables A B
    python experiments/bench/predictions.py --tables H100 --fitted A B

Fits on nine tenths of the shapes of the tables, predicts every candidate at the others,
and so on for each tenth; sites of the same features are in one tenth, whatever their
rows. With tables of another device to fit on, all sites are predicted from those and
the two rooflines. Needs no GPU: the times are in the tables.

error      |predicted / measured - 1|
covered    measured times within 1.96 spreads of the predicted ones
regret     time of the candidate that is predicted to be the fastest, over the fastest
total      the same of the times of all sites together: a site counts by its time
by xla     the same if XLA's bfloat16 is always taken
"""

import collections
import dataclasses
import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import tyro

from experiments.bench import result as results
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.table import Entry, Table
from loka_jax.site import BF16, Choice, SiteSpec

_FOLDS = 10
_PASSES = ("training", "inference")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        tables: of one device; one of them has a roofline.
        fitted: of another device, to fit on; empty to leave shapes out instead.
        worst: the number of largest regrets to list.
    """

    out: pathlib.Path | None = None
    tables: tuple[pathlib.Path, ...] = ()
    fitted: tuple[pathlib.Path, ...] = ()
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


def main(arguments: Arguments) -> dict[str, Any]:
    """Judges, prints, writes and returns the result."""
    table = _merged([tables.read(path) for path in arguments.tables])
    if arguments.fitted:
        fitted = _merged([tables.read(path) for path in arguments.fitted])
        unknown = Table(table.header)
        model = PerformanceModel(unknown, roofline=table.roofline, fitted=fitted)
        points = [x for site in table.sites.items() for x in _predicted(model, *site)]
    else:
        points = list(_left_out(table))
    result = results.head("predictions", arguments) | {"sites": len(table.sites)}
    for name in _PASSES:
        judgement = judged([p for p in points if p.pass_name == name], arguments)
        print(name, {k: v for k, v in judgement.items() if k != "worst"})
        for row in judgement["worst"]:
            print("   ", row)
        result[name] = judgement
    results.write(arguments.out, result)
    return result


def judged(points: list[Point], arguments: Arguments) -> dict[str, Any]:
    """Returns the errors of predictions, and the regrets of the choices by them."""
    by_site = collections.defaultdict(list)
    for point in points:
        by_site[point.spec].append(point)
    regrets, by_xla, rows = [], [], []
    chosen_us = xla_us = best_us = 0.0
    for spec, candidates in by_site.items():
        best = min(candidates, key=lambda p: p.measured)
        chosen = min(candidates, key=lambda p: p.predicted)
        regrets.append(chosen.measured / best.measured - 1)
        xla = next(p for p in candidates if p.choice == BF16.name)
        by_xla.append(xla.measured / best.measured - 1)
        chosen_us += chosen.measured
        xla_us += xla.measured
        best_us += best.measured
        rows.append((regrets[-1], str(spec), chosen.choice, best.choice))
    return {
        "predictions": len(points),
        "median_error": statistics.median(p.error for p in points),
        "p90_error": _quantile([p.error for p in points], 0.9),
        "covered": statistics.mean(p.is_covered for p in points),
        "mean_regret": statistics.mean(regrets),
        "p95_regret": _quantile(regrets, 0.95),
        "largest_regret": max(regrets),
        "total_regret": chosen_us / best_us - 1,
        "mean_regret_by_xla": statistics.mean(by_xla),
        "largest_regret_by_xla": max(by_xla),
        "total_regret_by_xla": xla_us / best_us - 1,
        "worst": sorted(rows, reverse=True)[: arguments.worst],
    }


def _left_out(table: Table) -> Iterator[Point]:
    """Yields a point for each candidate, predicted without its shape."""
    shapes = sorted({(spec.k, spec.n) for spec in table.sites})
    for fold in range(_FOLDS):
        left_out = set(shapes[fold::_FOLDS])
        kept = {s: e for s, e in table.sites.items() if (s.k, s.n) not in left_out}
        model = PerformanceModel(dataclasses.replace(table, sites=kept))
        for spec, entry in table.sites.items():
            if (spec.k, spec.n) in left_out:
                yield from _predicted(model, spec, entry)


def _predicted(
    model: PerformanceModel, spec: SiteSpec, entry: Entry
) -> Iterator[Point]:
    """Yields a point for each candidate that was measured at a site."""
    for pass_name in _PASSES:
        measured = entry.times.get(pass_name, {})
        choices = [Choice.parse(name) for name in measured]
        predicted = model.predictions(spec, choices, pass_name)
        for name, time in predicted.items():
            yield Point(spec, pass_name, name, measured[name], *time)


def _merged(parts: list[Table]) -> Table:
    sites = {spec: entry for part in parts for spec, entry in part.sites.items()}
    roofline = next(part.roofline for part in parts if part.roofline is not None)
    return Table(parts[0].header, sites, roofline)


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
