"""The limit on the rise of the loss that FP8 causes.

A rise is accepted if its upper end is below the limit. If only its lower end is, the
data cannot tell, and more held-out examples would: their number grows with the square
of the interval over what is left of the limit.
"""

import math
from collections.abc import Iterable

from loka_jax.measure.intervals import Interval


def total(effects: Iterable[Interval]) -> Interval:
    """Returns the sum of independent effects: means add up, half widths in squares."""
    effects = list(effects)
    mean = sum(effect.mean for effect in effects)
    half = math.hypot(*(effect.half for effect in effects))
    return Interval(mean, mean - half, mean + half)


def why_harmful(effect: Interval, limit: float, examples: int | None = None):
    """Returns why a relative rise of the loss is not accepted, or None if it is.

    Args:
        effect: the rise.
        limit: on it.
        examples: from which it was measured; None if that is not known.
    """
    if effect.high <= limit:
        return None
    rise = "FP8 in the forward products raises the loss by"
    if not effect.mean < limit:
        return f"{rise} {effect.mean:.3%}, above {limit:.2%}"
    up_to = f"{rise} up to {effect.high:.3%}, above {limit:.2%}: the data cannot tell"
    factor = (effect.half / (limit - effect.mean)) ** 2
    if examples is None:
        return f"{up_to}, {factor:,.1f} times as many held-out examples would"
    needed = math.ceil(factor * examples)
    return f"{up_to}, {needed:,} held-out examples would ({examples:,} were used)"
