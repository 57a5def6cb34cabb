"""The times of all candidates at any site: measured ones, and predictions.

    predicted   by a regression over measured sites, one for each candidate and pass
    in a chain  the time alone, and a difference that is linear in the bytes moved

Predictions need the roofline of this device and of the one that the table is from: work
is counted in what either allows. Without a roofline there are only measured times.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from loka_jax.dispatch.candidates import candidates, table_key
from loka_jax.dispatch.regression import LEAST_POINTS, Prediction, Regression
from loka_jax.dispatch.table import Entry, Table
from loka_jax.dispatch.work import place, work
from loka_jax.measure.roofline import Roofline
from loka_jax.ops.device import HOPPER, Device
from loka_jax.recipe import GemmRecipe
from loka_jax.site import Choice, SiteSpec

_PASSES = ("training", "inference")
_FORMS = (" in", " out", " in out")
# Standard deviation of log time that another device than the table's adds.
_TRANSFER = 0.15


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


class PerformanceModel:
    """Measured times, and a model of those that are not."""

    def __init__(
        self,
        table: Table,
        *,
        roofline: Roofline | None = None,
        fitted: Table | None = None,
        device: Device = HOPPER,
    ):
        """Takes the measurements; regressions are fitted when they are needed.

        Args:
            table: measurements on this device.
            roofline: of this device; that of `fitted` if None.
            fitted: measurements that predictions are fitted on, of this or another
                device; without its roofline nothing is predicted.
            device: that candidates are planned for.
        """
        self.table = table
        self._fitted = table if fitted is None else fitted
        self._roofline = roofline or self._fitted.roofline
        self._device = device
        self._regressions: dict[tuple[str, str], Regression | None] = {}
        self._estimates: dict[SiteSpec, Estimates] = {}

    def with_table(self, table: Table) -> "PerformanceModel":
        """Returns the model with other measurements on this device."""
        other = PerformanceModel(
            table, roofline=self._roofline, fitted=self._fitted, device=self._device
        )
        other._regressions = self._regressions  # fitted on the same times
        return other

    def measured(self) -> "PerformanceModel":
        """Returns the model without predictions."""
        nothing = Table(self.table.header)
        return PerformanceModel(self.table, fitted=nothing, device=self._device)

    def estimates(self, spec: SiteSpec) -> Estimates:
        """Returns the times and errors at a site, for exactly its number of rows."""
        key = table_key(spec)
        if key not in self._estimates:
            self._estimates[key] = self._estimated(key)
        return self._estimates[key]

    def predict(
        self, spec: SiteSpec, choice: Choice, pass_name: str
    ) -> Prediction | None:
        """Returns the predicted time of a candidate; None if it cannot be predicted.

        Args:
            spec: the site.
            choice: the candidate.
            pass_name: "training" or "inference".
        """
        regression = self._regression(choice, pass_name)
        if regression is None or self._roofline is None:
            return None
        parts = work(spec, choice, pass_name, self._roofline)
        us, spread = regression.predict(parts, place(spec, choice))
        if self._roofline != self._fitted.roofline:
            spread = math.hypot(spread, _TRANSFER)
        return Prediction(us, spread)

    def _estimated(self, spec: SiteSpec) -> Estimates:
        measured = self.table.sites.get(spec, Entry())
        times = {name: dict(by_name) for name, by_name in measured.times.items()}
        spreads: dict[str, dict[str, float]] = {}
        for choice in candidates(spec, self._device):
            if choice.name in measured.failures:
                continue
            for pass_name in _PASSES:
                for name, time in self._predicted(spec, choice, pass_name, times):
                    times.setdefault(name, {})[choice.name] = time.us
                    spreads.setdefault(name, {})[choice.name] = time.spread
        entry = dataclasses.replace(
            measured,
            times=times,
            errors=_at_any_rows(self.table, spec, "errors"),
            effects=_at_any_rows(self.table, spec, "effects"),
            refused=_at_any_rows(self.table, spec, "refused"),
        )
        return Estimates(entry, spreads)

    def _predicted(
        self, spec: SiteSpec, choice: Choice, pass_name: str, times
    ) -> Iterator[tuple[str, Prediction]]:
        """Yields the predictions that a candidate lacks, by pass and form of chain."""
        alone = times.get(pass_name, {}).get(choice.name)
        predicted = None if alone else self.predict(spec, choice, pass_name)
        if predicted is not None:
            yield pass_name, predicted
        alone, spread = predicted or (alone, 0.0)
        if alone is None or choice.provider != "pallas" or self._roofline is None:
            return
        for form in _FORMS:
            name = f"{pass_name}{form}"
            factors = self._differences.get((name, *_handed(choice)))
            if choice.name not in times.get(name, {}) and factors is not None:
                us = alone + float(_traffic(spec, self._roofline) @ factors)
                yield name, Prediction(max(us, alone / 2), spread)

    def _regression(self, choice: Choice, pass_name: str) -> Regression | None:
        key = (pass_name, choice.name)
        if key not in self._regressions:
            self._regressions[key] = self._fit(choice, pass_name)
        return self._regressions[key]

    def _fit(self, choice: Choice, pass_name: str) -> Regression | None:
        """Returns the regression of a candidate; None without enough measurements."""
        times = {
            spec: entry.times[pass_name][choice.name]
            for spec, entry in self._fitted.sites.items()
            if choice.name in entry.times.get(pass_name, {})
        }
        if self._fitted.roofline is None or len(times) < LEAST_POINTS:
            return None
        roofline = self._fitted.roofline
        return Regression(
            np.stack([work(spec, choice, pass_name, roofline) for spec in times]),
            np.stack([place(spec, choice) for spec in times]),
            np.array(list(times.values())),
        )

    @functools.cached_property
    def _differences(self) -> dict:
        """The factors of the difference that a chain makes, by pass and `_handed`."""
        roofline, points = self._fitted.roofline, {}
        if roofline is None:
            return {}
        for spec, entry in self._fitted.sites.items():
            for pass_name, form in itertools.product(_PASSES, _FORMS):
                alone = entry.times.get(pass_name, {})
                for name, us in entry.times.get(f"{pass_name}{form}", {}).items():
                    key = f"{pass_name}{form}", *_handed(Choice.parse(name))
                    point = _traffic(spec, roofline), us - alone[name], alone[name]
                    points.setdefault(key, []).append(point)
        return {
            key: _least_squares(*map(np.array, zip(*found, strict=True)))
            for key, found in points.items()
            if len(found) >= LEAST_POINTS
        }


def _at_any_rows(table: Table, spec: SiteSpec, name: str) -> dict[str, Any]:
    """Returns a field of a site by source, from the nearest rows that have it.

    They are those of a model's operands, of which the rows of a batch are draws.
    """
    found = {}
    for other in sorted(table.sites, key=lambda x: -abs(math.log(x.m / spec.m))):
        if dataclasses.replace(other, m=spec.m) == spec:
            found |= getattr(table.sites[other], name)
    return found


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
