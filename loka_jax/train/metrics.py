"""AUC, log loss, NE and calibration of examples.

`MetricState` holds sums and counts, so two states merge by addition, and a step adds to
a state inside jit. `compute` turns it into numbers on the host, in float64. B is the
batch size; p = sigmoid(logit).

    log loss     = -mean(y log p + (1 - y) log(1 - p))
    NE           = log loss / H(mean y),  H(q) = -q log q - (1 - q) log(1 - q)
    calibration  = mean p / mean y
    AUC          = P(logit of a click > logit of a non-click) + P(equal) / 2

`auc` is no sum over examples: it ranks all logits of an evaluation on the host. Buckets
of logits would merge by addition, but no fixed ones are fine enough: a model that has
hardly learned spreads its logits over 0.001, anywhere.

A weight is 1 for an example and 0 for padding, which never counts; a label is 0 or 1.
A weighted state takes any finite weight that is not negative; `mean x` is then
`sum w x / sum w`, and a pair of examples counts `w_i w_j`.
The state of T tasks has a leading dim T, logits and labels [B, T]; `split_tasks` gives
the states of the tasks.

Any other weight or label makes `compute` raise; a NaN or infinite logit of an example
makes the results NaN. Neither is dropped silently.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

LOSS_CAP = 20.0  # nats: a click that was given a probability of 2e-9
_NUMBERS = ("logloss", "ne", "calibration", "mean_label", "mean_prediction")


class MetricState(NamedTuple):
    """Sums over the examples seen; counts are exact up to 2^31 - 1.

    Attributes:
        count: examples whose logit was finite; the sums below are over these.
        loss: sum of the log losses, as the unevaluated sum of two floats.
        capped_loss: sum of the log losses, each at most `LOSS_CAP`, likewise.
        prediction: sum of the predictions, likewise.
        non_finite: examples whose logit was NaN or infinite.
        unusable: rows whose label was neither 0 nor 1, or whose weight is refused.
        weight: sum of the weights, like `loss`; None if all weights are 0 or 1.
        click_weight: sum of those of clicks, or None.
    """

    count: Int[Array, ""]
    clicks: Int[Array, ""]
    loss: Float[Array, "2"]
    capped_loss: Float[Array, "2"]
    prediction: Float[Array, "2"]
    non_finite: Int[Array, ""]
    unusable: Int[Array, ""]
    weight: Float[Array, "2"] | None = None
    click_weight: Float[Array, "2"] | None = None


def init(*, weighted: bool = False, tasks: int = 1) -> MetricState:
    """Returns the state before the first example, of other weights than 1 if so."""
    dims = () if tasks == 1 else (tasks,)
    # Arrays of their own: a step donates each of them.
    names = ("count", "clicks", "non_finite", "unusable")
    counts = {name: jnp.zeros(dims, jnp.int32) for name in names}
    names = ("loss", "capped_loss", "prediction")
    names += ("weight", "click_weight") if weighted else ()
    sums = {name: jnp.zeros((*dims, 2), jnp.float32) for name in names}
    return MetricState(**counts, **sums)


def init_like(state: MetricState) -> MetricState:
    """Returns the state before the first example, of a state's weights and tasks."""
    return jax.tree.map(jnp.zeros_like, state)


def split_tasks(state: MetricState) -> list[MetricState]:
    """Returns the state of each task, on the host."""
    host: MetricState = jax.device_get(state)
    if host.count.ndim == 0:
        return [host]
    tasks = range(len(host.count))
    return [jax.tree.map(lambda x, task=task: x[task], host) for task in tasks]


def update(
    state: MetricState,
    logits: Float[Array, "B"] | Float[Array, "B T"],
    labels: Float[Array, "B"] | Float[Array, "B T"],
    weights: Float[Array, "B"] | Float[Array, "B T"],
) -> MetricState:
    """Returns `state` with one batch added; pure, for use under jit.

    Sums are compensated (two float32), so 1e8 examples keep a relative error of 1e-6.
    """
    if logits.ndim == 2:
        return jax.vmap(update, (0, 1, 1, 1))(state, logits, labels, weights)
    logits = logits.astype(jnp.float32)
    present = weights != 0
    is_label = (labels == 0) | (labels == 1)
    if state.weight is None:
        is_weight = weights == 1
    else:
        is_weight = (weights > 0) & jnp.isfinite(weights)
    usable = is_label & is_weight
    finite = jnp.isfinite(logits)
    counted = usable & finite
    x = jnp.where(counted, logits, 0.0)  # NaN in a padded row must not reach a sum
    clicked = labels == 1
    # -log sigmoid(+-x), accurate for large |x|, where p itself rounds to 0 or 1.
    losses = jnp.where(counted, jax.nn.softplus(jnp.where(clicked, -x, x)), 0.0)
    predictions = jnp.where(counted, jax.nn.sigmoid(x), 0.0)
    w = None if state.weight is None else jnp.where(counted, weights, 0.0)

    def add(total, values):
        return _add(total, _sum(values if w is None else w * values))

    state = state._replace(
        count=state.count + _count(counted),
        clicks=state.clicks + _count(counted & clicked),
        loss=add(state.loss, losses),
        capped_loss=add(state.capped_loss, jnp.minimum(losses, LOSS_CAP)),
        prediction=add(state.prediction, predictions),
        non_finite=state.non_finite + _count(usable & ~finite),
        unusable=state.unusable + _count(present & ~usable),
    )
    if w is None:
        return state
    return state._replace(
        weight=add(state.weight, jnp.ones_like(w)),
        click_weight=add(state.click_weight, clicked.astype(w.dtype)),
    )


def merge(a: MetricState, b: MetricState) -> MetricState:
    """Returns the state of the examples of `a` and `b` together."""

    if a.count.ndim == 1:
        return jax.vmap(merge)(a, b)

    def add(x: Array, y: Array) -> Array:
        return _add(x, y) if x.ndim else x + y

    return jax.tree.map(add, a, b)


def compute(state: MetricState) -> dict[str, float | int | None]:
    """Returns the metrics of the examples in the state of one task, on the host.

    They are None if undefined (NE of a single class), and NaN after a non-finite logit;
    `count` and `non_finite` are numbers of examples.

    Raises:
        ValueError: if a label was neither 0 nor 1, or a weight is refused.
    """
    host: MetricState = jax.device_get(state)
    if unusable := int(host.unusable):
        allowed = "0 and 1" if host.weight is None else "0 and positive numbers"
        raise ValueError(
            f"{unusable} rows have a label other than 0 and 1, or a weight other than "
            f"{allowed}: use these, and weight 0 for padding rows."
        )
    finite, non_finite = int(host.count), int(host.non_finite)
    counts = {"count": finite + non_finite, "non_finite": non_finite}
    if non_finite or not finite:
        return dict.fromkeys(_NUMBERS, math.nan if non_finite else None) | counts
    weight, click_weight = _weights(host)
    loss = _value(host.loss) / weight
    mean_prediction = _value(host.prediction) / weight
    mean_label = click_weight / weight
    entropy = _entropy(mean_label)
    values = (
        loss,
        loss / entropy if entropy else None,
        mean_prediction / mean_label if mean_label else None,
        mean_label,
        mean_prediction,
    )
    return dict(zip(_NUMBERS, values, strict=True)) | counts


def _weights(host: MetricState) -> tuple[float, float]:
    """Returns the sum of all weights and of those of clicks."""
    if host.weight is None or host.click_weight is None:
        return float(host.count), float(host.clicks)
    return _value(host.weight), _value(host.click_weight)


class CappedNe(NamedTuple):
    """The NE in which no example has a log loss above `LOSS_CAP`.

    A few outliers cannot raise it, however far off their logits are.

    Attributes:
        ne: NaN after a non-finite logit, None if undefined.
        of_half: the NE of predicting one half, as an untrained model does; 1 at least.
        rarer: the examples of the rarer label.
    """

    ne: float | None
    of_half: float
    rarer: int


def capped_ne(state: MetricState) -> CappedNe:
    """Returns the NE with capped losses; of several tasks, that of the worst."""

    def badness(task: CappedNe) -> float:
        return math.inf if task.ne is None or math.isnan(task.ne) else task.ne

    tasks = [_capped_ne(task) for task in split_tasks(state)]
    defined = [task for task in tasks if task.ne is not None]
    return max(defined, key=badness, default=tasks[0])


def _capped_ne(host: MetricState) -> CappedNe:
    clicks, count = int(host.clicks), int(host.count)
    rarer = min(clicks, count - clicks)
    weight, click_weight = _weights(host)
    entropy = _entropy(click_weight / weight) if weight else 0.0
    of_half = max(1.0, math.log(2) / entropy) if entropy else 1.0
    if int(host.non_finite):
        return CappedNe(float("nan"), of_half, rarer)
    ne = _value(host.capped_loss) / weight / entropy if entropy else None
    return CappedNe(ne, of_half, rarer)


def auc(
    logits: Float[np.ndarray, "N"],
    labels: Float[np.ndarray, "N"],
    weights: Float[np.ndarray, "N"],
) -> float | None:
    """Returns the area under the ROC curve; ties count one half.

    It is `sum w_i w_j (x_i > x_j)` over clicks i and others j, over all pairs, in
    float64: exact without other weights than 0 (padding) and 1, up to 2^52 pairs. Both
    are sums over clicks in one order, and no term of the first is larger than that of
    the second, so that no rounding brings the quotient above 1.

    Returns:
        None for a single class, NaN if the logit of an example is not finite.
    """
    present = weights > 0
    logits, clicked, weights = logits[present], labels[present] == 1, weights[present]
    if not np.isfinite(logits).all():
        return float("nan")
    clicks, others, w = logits[clicked], logits[~clicked], weights.astype(np.float64)
    # Below, `before` is the weight of the non-clicks before each place.
    if (w == 1).all():  # sorting takes a third of the time of finding an order
        others, before = np.sort(others), np.arange(len(others) + 1.0)
    else:
        order = np.argsort(others)
        others = others[order]
        before = np.concatenate([[0.0], np.cumsum(w[~clicked][order])])
    w = w[clicked]
    pairs = (w * before[-1]).sum()
    if not pairs:
        return None
    below = before[np.searchsorted(others, clicks, side="left")]
    not_above = before[np.searchsorted(others, clicks, side="right")]
    return float((w * ((below + not_above) / 2)).sum() / pairs)


def probabilities(logits: Float[np.ndarray, "*N"]) -> Float[np.ndarray, "*N"]:
    """Returns `1 / (1 + exp(-logit))` as float32, computed in float64."""
    x = logits.astype(np.float64)
    small = np.exp(-np.abs(x))  # never overflows
    return (np.where(x >= 0, 1.0, small) / (1.0 + small)).astype(np.float32)


def _entropy(rate: float) -> float:
    """Returns the entropy of a click rate in nats, 0 for a single class."""
    if rate in (0.0, 1.0):
        return 0.0
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))


def _value(x: Float[Array | np.ndarray, "2"]) -> float:
    """Returns a two-float number in float64."""
    return float(np.sum(np.asarray(x, np.float64)))


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
