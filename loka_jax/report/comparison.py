"""Numbers of runs over one another: paired differences with 95 % intervals.

A difference is that of a run minus that of the run it is compared with, over pairs

    of examples:    both scored the same ones; DeLong's interval for the AUC, and
                    z sqrt(sum (w (d - mean d))^2) / sum w for the log loss
    of seeds:       runs alike but for their seed, and of equal seeds: Student's t

References:
    DeLong, DeLong, Clarke-Pearson: Comparing the areas under two or more correlated ROC
    curves. Biometrics 44 (1988).
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from loka_jax.jsonfile import as_dict
from loka_jax.report.render import flat, real
from loka_jax.report.run_files import RunFiles, final_of

METRICS = ("ne", "logloss", "auc", "calibration")
_Z = 1.959964  # of a 95 % interval
_SIDES: tuple[Any, ...] = ("left", "right")


class Scored(NamedTuple):
    """Scored examples of the final evaluation."""

    logits: Float[np.ndarray, "N"]
    labels: Float[np.ndarray, "N"]
    weights: Float[np.ndarray, "N"]


class ComparedRun(NamedTuple):
    """A run among others.

    Attributes:
        scored: its scored examples by label ("" if there is one); empty if they were
            not kept.
        again: the files whose rows were scored again for the comparison; "" if the
            examples are those of the final evaluation.
    """

    name: str
    files: RunFiles
    scored: dict[str, Scored]
    again: str = ""


class Difference(NamedTuple):
    """A mean difference over pairs.

    Attributes:
        half: half its 95 % interval; None for a single pair.
    """

    mean: float
    half: float | None
    count: int

    @property
    def is_clear(self) -> bool:
        """Whether 0 lies outside of the interval."""
        return self.half is not None and abs(self.mean) > self.half


def why_not_comparable(first: ComparedRun, run: ComparedRun) -> str | None:
    """Returns what the examples differ in that two runs were evaluated on, or None."""
    if first.again and run.again == first.again:
        return None
    base, other = first.files, run.files
    for name in ("kind", "label", "labels"):
        one, two = (as_dict(run.config.get("data")).get(name) for run in (base, other))
        if one != two:
            return f"data.{name} is {one} and {two}"
    one, two = final_of(base).split, final_of(other).split
    if one != two:
        return f"one was evaluated on {one}, the other on {two}"
    data = (as_dict(run.summary.get("data")) for run in (base, other))
    counts = [as_dict(facts.get("examples")).get(one) for facts in data]
    if None not in counts and counts[0] != counts[1]:
        return f"they were evaluated on {counts[0]} and {counts[1]} examples"
    return None


def by_examples(one: Scored, two: Scored) -> dict[str, Difference] | None:
    """Returns the differences of log loss, NE in percent and AUC over examples.

    None if they are not the same examples.
    """
    if not len(one.labels):
        return None
    if not all(np.array_equal(a, b) for a, b in zip(one[1:], two[1:], strict=True)):
        return None
    base, minus = _losses(one), _losses(two) - _losses(one)
    differences = {"logloss": _weighted_mean(minus, one.weights)}
    if base_loss := float(np.average(base, weights=one.weights)):
        percent = _weighted_mean(100 / base_loss * minus, one.weights)
        differences["ne_delta_pct"] = percent
    auc = _auc_difference(one, two)
    return differences if auc is None else differences | {"auc": auc}


def _losses(scored: Scored) -> Float[np.ndarray, "N"]:
    x = scored.logits.astype(np.float64)
    return np.logaddexp(0, np.where(scored.labels == 1, -x, x))


def _weighted_mean(values: Float[np.ndarray, "N"], weights: np.ndarray) -> Difference:
    weights = weights.astype(np.float64)
    mean = float(weights @ values / weights.sum())
    error = float(np.linalg.norm(weights * (values - mean)) / weights.sum())
    return Difference(mean, _Z * error, len(values))


def _auc_difference(one: Scored, two: Scored) -> Difference | None:
    """Returns the difference of the AUCs; None with weights, or for a single label."""
    clicked = one.labels == 1
    sizes = int(clicked.sum()), int((~clicked).sum())
    if min(sizes) < 2 or not np.all(one.weights == 1):
        return None
    before, after = (_placements(x.logits, clicked) for x in (one, two))
    clicks, others = (b - a for a, b in zip(before, after, strict=True))
    variance = clicks.var(ddof=1) / sizes[0] + others.var(ddof=1) / sizes[1]
    return Difference(float(clicks.mean()), _Z * float(variance) ** 0.5, sum(sizes))


def auc_half(scored: Scored) -> float | None:
    """Returns half DeLong's 95 % interval of an AUC; None as of the difference."""
    clicked = scored.labels == 1
    m, n = int(clicked.sum()), int((~clicked).sum())
    if min(m, n) < 2 or not np.all(scored.weights == 1):
        return None
    clicks, others = _placements(scored.logits, clicked)
    return _Z * float(clicks.var(ddof=1) / m + others.var(ddof=1) / n) ** 0.5


def _placements(
    logits: Float[np.ndarray, "N"], clicked: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each click the share of others below it, for others of clicks above.

    Equal logits count one half.
    """

    def below(values: np.ndarray, among: np.ndarray) -> np.ndarray:
        among = np.sort(among)
        left, right = (np.searchsorted(among, values, side) for side in _SIDES)
        return (left + right) / (2 * len(among))

    clicks, others = logits[clicked], logits[~clicked]
    return below(clicks, others), 1 - below(others, clicks)


def common_steps(
    base: RunFiles, other: RunFiles
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the evaluations of both runs at the same steps and on the same split."""

    def place(line: dict[str, Any]) -> tuple[float | None, str]:
        return real(line.get("step")), str(line.get("split"))

    lines = {place(line): line for line in base.evals if place(line)[0] is not None}
    return [(lines[place(x)], x) for x in other.evals if place(x) in lines]


def by_seeds(
    base: Sequence[ComparedRun], other: Sequence[ComparedRun]
) -> dict[str, Difference]:
    """Returns the differences of the final metrics over the seeds that both have."""
    one, two = ({seed_of(run): final_of(run.files) for run in g} for g in (base, other))
    pairs = [(one[seed].values, two[seed].values) for seed in one if seed in two]
    differences = {}
    for name in METRICS:
        values = [(real(a.get(name)), real(b.get(name))) for a, b in pairs]
        minus = [b - a for a, b in values if a is not None and b is not None]
        if count := len(minus):
            half = None
            if count > 1:
                error = np.std(minus, ddof=1) / count**0.5
                half = float(stdtrit(count - 1, 0.975) * error)
            differences[name] = Difference(float(np.mean(minus)), half, count)
    return differences


def seed_groups(runs: Sequence[ComparedRun]) -> list[list[ComparedRun]]:
    """Returns the runs in groups that are alike but for their seeds."""
    groups = defaultdict(list)
    for run in runs:
        config = {k: v for k, v in flat(run.files.config).items() if k != "seed"}
        groups[json.dumps(config, sort_keys=True, default=str)].append(run)
    return list(groups.values())


def seed_of(run: ComparedRun) -> str:
    """Returns the seed of a run as text, so that any value from a file serves."""
    return str(run.files.config.get("seed"))
