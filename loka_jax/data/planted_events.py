"""A generated event log in which the order of a history matters, with its best NE.

    logit of event t = bias + effect[item_t] + effect[context]
                       + STRENGTH sign(item_{t-1}) weight[item_t]      0 at t = 0

Items come in pairs of the signs -1 and 1. A user prefers one sign: of its events the
share `PREFERENCE` has it, independently, so that given how many items of a history have
each sign, all orders are equally likely. Hence the best predictions are known

    with the order       sigmoid(logit)
    with a bag           the mean of sigmoid(logit) over the items of the history
    without a history    the mean over both signs

where a bag is the number of times that each item was seen, and "without" still knows
whether there is an event before. Effects and weights are normal.
"""

from typing import NamedTuple

import numpy as np

from loka_jax.data.batch import Schema
from loka_jax.data.config import DataConfig
from loka_jax.data.planted import ZIPF
from loka_jax.data.reader import record_dtype_of

STRENGTH = 1.5  # of the order's part, beside a standard deviation of 1 of the others
PREFERENCE = 0.8
EVENTS_OF_USER = 0.625  # on average, of the longest history; geometric
_SEED = 0  # of the planted model; the seed of a run draws the events


class PlantedLog(NamedTuple):
    """Generated events and what is the best to predict of them.

    Attributes:
        records: as `record_dtype_of` has them.
        best: the probability of each label with the order, with a bag, without history.
    """

    records: np.ndarray
    best: dict[str, np.ndarray]


def schema_of_events(config: DataConfig) -> Schema:
    """Returns the columns and table sizes of a generated event log."""
    return Schema(
        label="click",
        dense=(),
        categorical=("segment", "item"),
        vocab_sizes=config.rows,
        user="user",
        context=("segment",),
    )


def planted_log(config: DataConfig, count: int, *, seed: int, split: int) -> PlantedLog:
    """Returns `count` events of users that no other split has."""
    contexts, items = config.rows
    world, draws = np.random.default_rng(_SEED), np.random.default_rng((seed, split))
    effect, weight = world.normal(0, 0.7, items), world.normal(0, 1, items)
    of_context = world.normal(0, 0.7, contexts)
    mean = max(EVENTS_OF_USER * config.history, 2.0)
    lengths = draws.geometric(1 / mean, 4 + 2 * int(count / mean))
    while lengths.sum() < count:
        lengths = np.append(lengths, draws.geometric(1 / mean, 4))
    user = np.repeat(np.arange(len(lengths)), lengths)[:count]
    lengths = np.bincount(user)
    place = np.arange(count) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    segment = draws.integers(1, contexts, len(lengths))[user]
    prefers = draws.integers(0, 2, len(lengths))[user]
    is_preferred = draws.random(count) < PREFERENCE
    is_positive = np.where(is_preferred, prefers, 1 - prefers)
    pairs = max((items - 1) // 2, 1)
    odds = np.arange(1.0, pairs + 1) ** -ZIPF
    pair = draws.choice(pairs, count, p=odds / odds.sum())
    item = np.minimum(1 + 2 * pair + is_positive, items - 1)
    sign = 2.0 * is_positive - 1
    has_history = place > 0
    before = np.where(has_history, np.roll(sign, 1), 0)
    base = effect[item] + of_context[segment]
    scale = config.signal / np.hypot(1.0, STRENGTH)
    step = STRENGTH * weight[item] * has_history
    bias = _bias(scale * (base + step * before), config.click_rate)

    def chance(of_sign) -> np.ndarray:
        return 1 / (1 + np.exp(-(bias + scale * (base + step * of_sign))))

    seen = np.cumsum(is_positive) - is_positive
    seen = seen - np.repeat(seen[np.cumsum(lengths) - lengths], lengths)
    share = seen / np.maximum(place, 1)
    records = np.zeros(count, record_dtype_of(schema_of_events(config)))
    records["ids"] = np.stack([segment, item], axis=1)
    records["label"] = draws.random(count) < chance(before)
    records["user"] = user * 4 + split  # which no other split has
    records["time"] = np.cumsum(draws.exponential(60.0, count))
    best = {
        "the order": chance(before),
        "a bag": share * chance(1.0) + (1 - share) * chance(-1.0),
        "no history": (chance(1.0) + chance(-1.0)) / 2,
    }
    return PlantedLog(records, best)


def _bias(logit: np.ndarray, rate: float) -> float:
    """Returns what brings the mean probability to `rate`, by bisection."""
    low, high = -40.0, 40.0
    for _ in range(50):
        middle = (low + high) / 2
        is_low = np.mean(1 / (1 + np.exp(-(logit + middle)))) < rate
        low, high = (middle, high) if is_low else (low, middle)
    return low


def normalized_entropy(chance: np.ndarray, labels: np.ndarray) -> float:
    """Returns the log loss over the entropy of the mean label."""
    rate = float(np.mean(labels))
    loss = -np.mean(np.where(labels == 1, np.log(chance), np.log1p(-chance)))
    return float(loss / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))
