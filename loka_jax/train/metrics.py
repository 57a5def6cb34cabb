"""AUC, log loss, NE and calibration, accumulated on the device.

`MetricState` holds only sums and counts, so two states merge by addition, and a
step adds to a state inside jit. `compute` turns it into numbers on the host, in
float64. B is the batch size; p = sigmoid(logit).

    log loss     = -mean(y log p + (1 - y) log(1 - p))
    NE           = log loss / H(mean y),  H(q) = -q log q - (1 - q) log(1 - q)
    calibration  = mean p / mean y
    AUC          = P(logit of a click > logit of a non-click) + P(equal) / 2

A weight is 1 for an example and 0 for padding, which never counts; a label is 0 or 1.
Any other weight or label makes `compute` raise; a NaN or infinite logit of an example
makes the results NaN. Neither is dropped silently.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

NUM_BUCKETS = 65_536
# Half of the buckets lie in |logit| < 8. A bucket is 0.0002 wide at 0, 0.002 at 15.
HALF_RANGE = 8.0
LOSS_CAP = 20.0  # nats: a click that was given a probability of 2e-9


class MetricState(NamedTuple):
    """Sums over the examples seen.

    Attributes:
        counts: examples per (label, bucket of the logit), exact up to 2^31 - 1.
        loss: sum of the log losses, as the unevaluated sum of two floats.
        prediction: sum of the predictions, likewise.
        non_finite: examples whose logit was NaN or infinite.
        unusable: rows whose weight or label was neither 0 nor 1.
    """

    counts: Int[Array, "2 buckets"]
    loss: Float[Array, "2"]
    prediction: Float[Array, "2"]
    non_finite: Int[Array, ""]
    unusable: Int[Array, ""]


def init() -> MetricState:
    """Returns the state before the first example."""
    return MetricState(
        counts=jnp.zeros((2, NUM_BUCKETS), jnp.int32),
        loss=jnp.zeros(2, jnp.float32),
        prediction=jnp.zeros(2, jnp.float32),
        non_finite=jnp.zeros((), jnp.int32),
        unusable=jnp.zeros((), jnp.int32),
    )


def update(
    state: MetricState,
    logits: Float[Array, "B"],
    labels: Float[Array, "B"],
    weights: Float[Array, "B"],
) -> MetricState:
    """Returns `state` with one batch added; pure, for use under jit.

    Sums are compensated (two float32), so 1e8 examples keep a relative error of 1e-6.
    """
    logits = logits.astype(jnp.float32)
    present = weights != 0
    usable = ((labels == 0) | (labels == 1)) & (weights == 1)
    finite = jnp.isfinite(logits)
    counted = usable & finite
    x = jnp.where(counted, logits, 0.0)  # NaN in a padded row must not reach a sum
    clicked = labels == 1
    # -log sigmoid(+-x), accurate for large |x|, where p itself rounds to 0 or 1.
    losses = jax.nn.softplus(jnp.where(clicked, -x, x))
    return MetricState(
        counts=state.counts.at[clicked.astype(jnp.int32), _bucket(x)].add(
            counted.astype(jnp.int32)
        ),
        loss=_add(state.loss, _sum(jnp.where(counted, losses, 0.0))),
        prediction=_add(
            state.prediction, _sum(jnp.where(counted, jax.nn.sigmoid(x), 0.0))
        ),
        non_finite=state.non_finite + _count(usable & ~finite),
        unusable=state.unusable + _count(present & ~usable),
    )


def merge(a: MetricState, b: MetricState) -> MetricState:
    """Returns the state of the examples of `a` and `b` together."""
    return MetricState(
        counts=a.counts + b.counts,
        loss=_add(a.loss, b.loss),
        prediction=_add(a.prediction, b.prediction),
        non_finite=a.non_finite + b.non_finite,
        unusable=a.unusable + b.unusable,
    )


def compute(state: MetricState) -> dict[str, float | int | None]:
    """Returns the metrics of the examples in `state`, on the host.

    AUC treats logits in the same bucket as ties, so logits that differ by less than
    0.0002 may be tied. On 2 M rows with logits spread as a model's it differs from the
    exact value by less than 1e-6.

    Returns:
        auc, logloss, ne, calibration, mean_label, mean_prediction: None if undefined
            (AUC and NE of a single class), NaN after a non-finite logit; count,
            non_finite: numbers of examples.

    Raises:
        ValueError: if a weight or label was neither 0 nor 1.
    """
    host: MetricState = jax.device_get(state)
    if unusable := int(host.unusable):
        raise ValueError(
            f"{unusable} rows have a weight or label other than 0 and 1: use labels 0 "
            "and 1, and weight 0 only for padding rows."
        )
    negatives, positives = np.asarray(host.counts, np.float64)
    num_clicks, finite = positives.sum(), negatives.sum() + positives.sum()
    non_finite = int(host.non_finite)
    names = ("auc", "logloss", "ne", "calibration", "mean_label", "mean_prediction")
    if non_finite:
        values = (float("nan"),) * len(names)
    elif not finite:
        values = (None,) * len(names)
    else:
        loss = float(np.sum(host.loss, dtype=np.float64) / finite)
        mean_prediction = float(np.sum(host.prediction, dtype=np.float64) / finite)
        mean_label = float(num_clicks / finite)
        entropy = _entropy(mean_label)
        values = (
            _auc(positives, negatives),
            loss,
            loss / entropy if entropy else None,
            mean_prediction / mean_label if mean_label else None,
            mean_label,
            mean_prediction,
        )
    numbers = dict(zip(names, values, strict=True))
    return numbers | {"count": int(finite) + non_finite, "non_finite": non_finite}


def capped_ne(state: MetricState) -> float | None:
    """Returns the NE in which no example has a log loss above `LOSS_CAP`.

    A few outliers cannot raise it, however far off their logits are. It is computed
    from the buckets of the logits; NaN after a non-finite logit, None if undefined.
    """
    host: MetricState = jax.device_get(state)
    if int(host.non_finite):
        return float("nan")
    negatives, positives = np.asarray(host.counts, np.float64)
    num_clicks, count = positives.sum(), negatives.sum() + positives.sum()
    entropy = _entropy(float(num_clicks / count)) if count else 0.0
    if not entropy:
        return None
    unit = (np.arange(NUM_BUCKETS) + 0.5) / (NUM_BUCKETS // 2) - 1.0
    x = HALF_RANGE * unit / (1.0 - np.abs(unit))
    losses = np.minimum(np.logaddexp(0.0, [x, -x]), LOSS_CAP)  # not clicked, clicked
    return float((negatives @ losses[0] + positives @ losses[1]) / count / entropy)


def _auc(positives: np.ndarray, negatives: np.ndarray) -> float | None:
    """Returns the area under the ROC curve of two histograms; ties count one half."""
    pairs = positives.sum() * negatives.sum()
    if not pairs:
        return None
    below = np.cumsum(negatives) - negatives
    return float(np.sum(positives * (below + negatives / 2)) / pairs)


def _entropy(rate: float) -> float:
    """Returns the entropy of a click rate in nats, 0 for a single class."""
    if rate in (0.0, 1.0):
        return 0.0
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))


def _bucket(x: Float[Array, "B"]) -> Int[Array, "B"]:
    """Returns the bucket of each logit: x / (c + |x|), divided into equal parts.

    It is monotone and has no clipped tail: the confident logits of a good model keep
    separate buckets, where equal parts of p = sigmoid(x) would tie them.
    """
    unit = x / (HALF_RANGE + jnp.abs(x))
    index = jnp.floor((unit + 1.0) * (NUM_BUCKETS // 2)).astype(jnp.int32)
    return jnp.clip(index, 0, NUM_BUCKETS - 1)


def _count(rows: Array) -> Int[Array, ""]:
    return jnp.sum(rows, dtype=jnp.int32)


def _add(a: Float[Array, "2"], b: Float[Array, "2"]) -> Float[Array, "2"]:
    """Returns the sum of two two-float numbers."""
    return jnp.stack(_two_sum((a[0], a[1]), (b[0], b[1])))


def _sum(x: Float[Array, "B"]) -> Float[Array, "2"]:
    """Returns the sum of `x` as two floats, in one reduction."""
    zero = np.float32(0)
    return jnp.stack(
        jax.lax.reduce((x, jnp.zeros_like(x)), (zero, zero), _two_sum, (0,))
    )


def _two_sum(a, b):
    """Returns `a + b` as (high, low), like its operands (Knuth's two-sum, normalized).

    It relies on XLA not reassociating float additions.
    """
    high = a[0] + b[0]
    shadow = high - a[0]
    error = (a[0] - (high - shadow)) + (b[0] - shadow)
    low = error + (a[1] + b[1])
    total = high + low
    return total, low - (total - high)
