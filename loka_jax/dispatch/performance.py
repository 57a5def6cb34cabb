"""The times of all candidates at any site: measured ones, and predictions.

    predicted   by a regression over measured sites, one for each provider and pass,
                that learns from what was measured on this device since
    in a chain  the time alone, and a difference that is linear in the bytes moved

Predictions need the roofline of this device and of the one that the table is from: work
is counted in what either allows. Without a roofline there are only measured times.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from loka_jax.dispatch.candidates import RECIPES, candidates, table_key
from loka_jax.dispatch.regression import (
    LEAST_POINTS,
    Points,
    Prediction,
    Regression,
    fit,
)
from loka_jax.dispatch.table import Entry, Table
from loka_jax.dispatch.work import least_us, place, roles_of, work
from loka_jax.measure.roofline import Roofline
from loka_jax.ops.device import HOPPER, Device
from loka_jax.recipe import GemmRecipe, Role
from loka_jax.site import ALONE, BF16, Choice, SiteSpec

_PASSES = ("training", "inference")
_FORMS = (" in", " out", " in out")
# Distance of an FP8 product from one in bfloat16; other scales are at distance 1.
_OTHER_FORMAT = 2.0


class Estimates(NamedTuple):
    """The times and errors of a site's candidates.

    Attributes:
        entry: times of all candidates in all passes, as a table has them; errors of
            this site at any number of rows.
        spreads: of the predicted times alone, by pass and candidate: the standard
            deviation of their logarithm.
    """

    entry: Entry
    spreads: Mapping[str, Mapping[str, float]]

    def spread(self, pass_name: str, choice: Choice) -> float | None:
        """Returns the spread of a predicted time; None if it was measured."""
        return self.spreads.get(pass_name, {}).get(choice.name)


class _Fit(NamedTuple):
    """The regression of a provider's candidates, and the kind of each by its name."""

    regression: Regression
    kinds: Mapping[str, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Fits:
    """What predictions are made by, fitted when it is needed first.

    Attributes:
        table: measurements of this or another device; without its roofline nothing is
            predicted.
    """

    table: Table

    @functools.cached_property
    def fit(self) -> Callable[[str, str], _Fit | None]:
        """Returns the fit of a provider and a pass; None without enough measurements.

        A function, which takes a second for each at its first call.
        """
        return functools.cache(self._fit)

    def _fit(self, provider: str, pass_name: str) -> _Fit | None:
        by_name = collections.defaultdict(list)
        for spec, entry in self.table.sites.items():
            for name, us in entry.times.get(pass_name, {}).items():
                if name.partition(" ")[0] == provider:
                    by_name[name].append((spec, us))
        enough = {x: y for x, y in by_name.items() if len(y) >= LEAST_POINTS}
        if self.table.roofline is None or not enough:
            return None
        kinds = {name: kind for kind, name in enumerate(enough)}
        choices = [Choice.parse(name) for name in enough]
        measured = [
            (spec, choice, us) for choice in choices for spec, us in enough[choice.name]
        ]
        problems = [(spec, choice) for spec, choice, _ in measured]
        times = np.array([us for *_, us in measured])
        roles = roles_of(pass_name)
        alike = np.array([[_alike(a, b, roles) for b in choices] for a in choices])
        points = _points(problems, pass_name, self.table.roofline, kinds)
        return _Fit(fit(points, times, alike), kinds)

    @functools.cached_property
    def differences(self) -> dict[tuple, np.ndarray]:
        """The factors of the difference that a chain makes, by pass and `handed`."""
        roofline, points = self.table.roofline, {}
        if roofline is None:
            return {}
        for spec, entry in self.table.sites.items():
            for pass_name, form in itertools.product(_PASSES, _FORMS):
                alone = entry.times.get(pass_name, {})
                for name, us in entry.times.get(f"{pass_name}{form}", {}).items():
                    key = f"{pass_name}{form}", *_handed(Choice.parse(name))
                    point = _traffic(spec, roofline), us - alone[name], alone[name]
                    points.setdefault(key, []).append(point)
        return {
            key: _least_squares(*map(np.array, zip(*samples, strict=True)))
            for key, samples in points.items()
            if len(samples) >= LEAST_POINTS
        }


@dataclasses.dataclass(frozen=True, eq=False)
class PerformanceModel:
    """Measured times, and a model of those that are not.

    Attributes:
        table: measurements on this device.
        roofline: of this device; None without predictions.
        doubt: spreads off its prediction at which a time is given.
        predicts: whether candidates are predicted.
        recipes: of the candidates.
    """

    table: Table
    fits: Fits
    roofline: Roofline | None
    device: Device = HOPPER
    doubt: float = 0.0
    predicts: bool = True
    recipes: tuple[str, ...] = RECIPES

    @classmethod
    def of(
        cls,
        table: Table,
        *,
        roofline: Roofline | None = None,
        fitted: Table | None = None,
        device: Device = HOPPER,
    ) -> "PerformanceModel":
        """Returns the model of measurements on this device.

        Args:
            roofline: that of `fitted` if None.
            fitted: measurements that predictions are fitted on, of this or another
                device; `table` if None.
        """
        fits = Fits(table if fitted is None else fitted)
        return cls(table, fits, roofline or fits.table.roofline, device)

    def with_table(self, table: Table) -> "PerformanceModel":
        """Returns the model with other measurements on this device."""
        return dataclasses.replace(self, table=table, doubt=0.0, predicts=True)

    def hopeful(self, doubt: float) -> "PerformanceModel":
        """Returns the model with predicted times at the ends of their intervals.

        At the lower ones, those of XLA's bfloat16 at the upper ones: a plan by it has
        what may be the fastest wherever it may pay to leave XLA's bfloat16.
        """
        return dataclasses.replace(self, doubt=doubt)

    def measured(self) -> "PerformanceModel":
        """Returns the model without predictions of candidates."""
        return dataclasses.replace(self, predicts=False)

    def in_bf16(self) -> "PerformanceModel":
        """Returns the model without FP8, which is fitted in a fraction of the time."""
        table, fits = _in_bf16(self.table), Fits(_in_bf16(self.fits.table))
        return dataclasses.replace(self, table=table, fits=fits, recipes=("bf16",))

    def estimates(self, spec: SiteSpec) -> Estimates:
        """Returns the times and errors at a site, for exactly its number of rows."""
        return self._estimates(table_key(spec))

    def predictions(
        self, spec: SiteSpec, choices: Sequence[Choice], pass_name: str
    ) -> dict[str, Prediction]:
        """Returns the predicted times of candidates, by the name of each.

        Those that cannot be predicted are left out.
        """
        predicted: dict[str, Prediction] = {}
        for provider in ALONE:
            found = self._fit_here(provider, pass_name)
            if found is None or self.roofline is None:
                continue
            served = [choice for choice in choices if choice.name in found.kinds]
            if not served:
                continue
            points = self._points_here(found, [(spec, x) for x in served], pass_name)
            times = found.regression.predict(points)
            for choice, (us, spread) in zip(served, times, strict=True):
                least = least_us(spec, choice, pass_name, self.roofline)
                predicted[choice.name] = Prediction(max(us, least), spread)
        return predicted

    @functools.cached_property
    def _estimates(self) -> Callable[[SiteSpec], Estimates]:
        return functools.cache(self._estimated)

    def _estimated(self, spec: SiteSpec) -> Estimates:
        measured = self.table.sites.get(spec, Entry())
        times = {name: dict(by_name) for name, by_name in measured.times.items()}
        spreads: dict[str, dict[str, float]] = {}
        choices = [
            choice
            for choice in candidates(spec, self.device, self.recipes)
            if self.predicts and choice.name not in measured.failures
        ]

        def add(name: str, choice: Choice, time: Prediction):
            off = self.doubt * (1 if choice == BF16 else -1)
            us = time.us * math.exp(off * time.spread)
            times.setdefault(name, {})[choice.name] = us
            spreads.setdefault(name, {})[choice.name] = time.spread

        for pass_name in _PASSES:
            known = measured.times.get(pass_name, {})
            missing = [choice for choice in choices if choice.name not in known]
            alone = {name: Prediction(us, 0.0) for name, us in known.items()}
            alone |= self.predictions(spec, missing, pass_name)
            for choice in (choice for choice in choices if choice.name in alone):
                by_form = self._by_form(spec, choice, pass_name, alone[choice.name])
                for name, time in by_form:
                    if choice.name not in measured.times.get(name, {}):
                        add(name, choice, time)
        any_rows = {
            name: _at_any_rows(self.table, spec, name)
            for name in ("errors", "effects", "refused")
        }
        entry = dataclasses.replace(measured, times=times, **any_rows)
        return Estimates(entry, spreads)

    def _by_form(
        self, spec: SiteSpec, choice: Choice, pass_name: str, alone: Prediction
    ) -> Iterator[tuple[str, Prediction]]:
        """Yields a candidate's time alone, and a kernel's in each form of chain."""
        yield pass_name, alone
        if choice.provider != "pallas" or self.roofline is None:
            return
        for form in _FORMS:
            name = f"{pass_name}{form}"
            factors = self.fits.differences.get((name, *_handed(choice)))
            if factors is not None:
                us = alone.us + float(_traffic(spec, self.roofline) @ factors)
                yield name, Prediction(max(us, alone.us / 2), alone.spread)

    @functools.cached_property
    def _fit_here(self) -> Callable[[str, str], _Fit | None]:
        """Returns the fit of a provider that knows what was measured here, too."""
        return functools.cache(self._given_here)

    def _given_here(self, provider: str, pass_name: str) -> _Fit | None:
        found = self.fits.fit(provider, pass_name)
        if found is None:
            return None
        problems, times = [], []
        for spec, entry in self.table.sites.items():
            fitted = self.fits.table.sites.get(spec, Entry()).times.get(pass_name, {})
            for name, us in entry.times.get(pass_name, {}).items():
                if name in found.kinds and fitted.get(name) != us:
                    problems.append((spec, Choice.parse(name)))
                    times.append(us)
        if not problems:
            return found
        points = self._points_here(found, problems, pass_name)
        regression = found.regression.given(points, np.array(times))
        return found._replace(regression=regression)

    def _points_here(
        self, found: _Fit, problems: Sequence[tuple[SiteSpec, Choice]], pass_name: str
    ) -> Points:
        """Returns candidates of a provider at sites, on this device."""
        assert self.roofline is not None
        is_other = self.roofline != self.fits.table.roofline
        return _points(problems, pass_name, self.roofline, found.kinds, is_other)


def _in_bf16(table: Table) -> Table:
    """Returns a table without times in FP8."""
    sites = {
        spec: dataclasses.replace(
            entry,
            times={
                name: {x: us for x, us in times.items() if x.endswith(" bf16")}
                for name, times in entry.times.items()
            },
        )
        for spec, entry in table.sites.items()
    }
    return Table(table.header, sites, table.roofline)


def _points(
    problems: Sequence[tuple[SiteSpec, Choice]],
    pass_name: str,
    roofline: Roofline,
    kinds: Mapping[str, int],
    is_other: bool = False,
) -> Points:
    """Returns candidates of a provider at sites, on a device with this roofline."""
    return Points(
        np.stack([work(*problem, pass_name, roofline) for problem in problems]),
        np.stack([place(*problem) for problem in problems]),
        np.array([kinds[choice.name] for _, choice in problems]),
        np.full(len(problems), is_other),
    )


def _alike(a: Choice, b: Choice, roles: Sequence[Role]) -> float:
    """Returns the correlation of what two candidates' factors get wrong in some roles.

    In inference that is 1 for recipes that differ in the gradients' products only.
    """
    distance = 0.0
    for role in roles:
        first, second = a.recipe.gemm(role), b.recipe.gemm(role)
        if first is None or second is None:
            distance += _OTHER_FORMAT * (first is not second)
            continue
        distance += first.first.granularity != second.first.granularity
        distance += first.first.scaling != second.first.scaling
    return math.exp(-distance)


def _at_any_rows(table: Table, spec: SiteSpec, name: str) -> dict[str, Any]:
    """Returns a field of a site by source, from the nearest rows that have it.

    They are those of a model's operands, of which the rows of a batch are draws.
    """
    values = {}
    for other in sorted(table.sites, key=lambda x: -abs(math.log(x.m / spec.m))):
        if dataclasses.replace(other, m=spec.m) == spec:
            values |= getattr(table.sites[other], name)
    return values


def _handed(choice: Choice) -> tuple[GemmRecipe | None, bool]:
    """Returns what a chain saves or costs with: the cast of lhs, and if drhs needs one.

    A drhs in FP8 reads another layout than is handed on.
    """
    return choice.recipe.fwd, choice.recipe.drhs is not None


def _traffic(spec: SiteSpec, roofline: Roofline) -> np.ndarray:
    """Returns a launch, and the times to move a byte of each element of lhs and y."""
    sizes = (spec.m * spec.k, spec.m * spec.n)
    return np.array([roofline.launch_us, *(x / roofline.bytes_per_us for x in sizes)])


def _least_squares(parts, differences, alone) -> np.ndarray:
    """Returns the factors with the least squares of errors relative to the time."""
    factors, *_ = np.linalg.lstsq(parts / alone[:, None], differences / alone)
    return factors
