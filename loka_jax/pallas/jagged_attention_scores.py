"""What a pass of attention makes of scores, see `jagged_attention`.

Each class says, for a warpgroup's 64 fixed rows, what the sums weight streamed rows by,
and what is kept from one block to the next.

    Silu             silu(S), and its doubled slope
    Softmax          exp(S - m), m the largest score of a query so far
    SoftmaxGradient  p = exp(S - lse), and p (b y^T - delta)

Of a softmax, lse and delta are as in `xla.jagged_softmax`, and exponentials are powers
of two. Where m grows, what has been summed is made smaller. A query that has seen no
key has the lowest m, which is a number, so that hidden scores, -inf, weigh nothing.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, override

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.pallas import tiles
from loka_jax.pallas.jagged_attention_layout import BF16, LaunchLayout, Scratch
from loka_jax.pallas.tiles import ROWS

type Weighed = tuple[tuple[jax.Array, ...], list[jax.Array]]  # what is kept, weights

_LOWEST = -1e30  # of scores: a number, of which differences are none that is NaN
_LOG2_E = math.log2(math.e)


def scores_of(layout: LaunchLayout, refs: Scratch, stats: Any) -> "Silu":
    """Returns what a launch makes of scores.

    Args:
        stats: lse and delta of the queries, [heads, 2, rows], for the gradients of a
            softmax.
    """
    if not layout.is_softmax:
        return Silu(layout, refs, stats)
    return (SoftmaxGradient if layout.has_of_queries else Softmax)(layout, refs, stats)


class Silu:
    """HSTU's: no sum depends on what has been summed."""

    def __init__(self, layout: LaunchLayout, refs: Scratch, stats: Any):
        self.layout, self.kind, self.refs, self.stats = layout, layout.kind, refs, stats

    def start(self, head, row) -> tuple[jax.Array, ...]:
        """Returns what is kept before the first block."""
        del head, row
        return ()

    def of_block(self, slot, kept) -> tuple[jax.Array, ...]:
        """Returns what is kept, with what a block of x in a slot brings along."""
        del slot
        return kept

    def weigh(self, products, sums, kept, seen: Callable) -> Weighed:
        """Returns what is kept, and the weights of the block for each sum.

        Args:
            products: `a x^T`, and `b y^T` where slopes are wanted.
            sums: accumulators.
            seen: returns weights, or others, where a query sees a key, in the dtype of
                the operands.
        """
        del sums
        return kept, seen(self._weights(*products))

    def _weights(self, scores, by_value=None):
        h = scores * (self.layout.scale / 2)
        t = jnp.tanh(h)
        weights = []
        if self.kind.has_slopes:
            rise = 1.0 + t
            weights.append(by_value * (rise + rise * (h - h * t)))
        if self.kind.has_values:
            weights.append(h + h * t)
        return weights

    def results(self, totals, kept) -> Iterable[jax.Array]:
        """Returns results of sums."""
        del kept
        factors = self.layout.factors()
        return (x * y for x, y in zip(totals, factors, strict=True))

    def lse(self, kept) -> jax.Array | None:
        """Returns the logarithm of the sum of each row's exponentials; None of none."""
        del kept
        return None


class Softmax(Silu):
    """The forward pass of a softmax: keeps m log2 e, and the exponentials' sum."""

    @override
    def start(self, head, row):
        del head, row
        numbers = _LOWEST * _LOG2_E, 0.0
        full = (jnp.full(ROWS, number, jnp.float32) for number in numbers)
        return tuple(plgpu.layout_cast(x, tiles.PER_ROW) for x in full)

    @override
    def weigh(self, products, sums, kept, seen):
        (scores,) = products
        scores = seen([scores * (self.layout.scale * _LOG2_E)], hidden=-math.inf)
        (scores,), (largest, total) = scores, kept
        new = jnp.maximum(largest, jnp.max(scores, axis=1))
        share = jnp.exp2(largest - new)
        weights = jnp.exp2(scores - tiles.per_row(new, scores.shape[1]))
        for own in sums:
            own[...] = own[...] * tiles.per_row(share, own.shape[1])
        total = total * share + jnp.sum(weights, axis=1)
        return (new, total), [weights.astype(BF16)]

    @override
    def results(self, totals, kept):
        share = 1.0 / _or_one(kept[1])
        return (x * tiles.per_row(share, x.shape[1]) for x in totals)

    @override
    def lse(self, kept):
        largest, total = kept
        return (largest + jnp.log2(_or_one(total))) * (1 / _LOG2_E)


class SoftmaxGradient(Silu):
    """The backward passes of a softmax, which take lse and delta of each query.

    Where queries are fixed, these are kept; else they come with the blocks.
    """

    @override
    def start(self, head, row):
        if self.kind.by_key:
            return ()
        places = [self.stats.at[head, i, pl.ds(row, ROWS)] for i in range(2)]
        return tuple(_loaded(x, tiles.PER_ROW) for x in places)

    @override
    def of_block(self, slot, kept):
        if not self.kind.by_key:
            return kept
        wanted = range(1 + self.kind.has_slopes)
        places = [self.refs.of_queries.at[slot, i] for i in wanted]
        loaded = tuple(_loaded(x, tiles.PER_COLUMN) for x in places)
        plgpu.commit_smem()  # all threads have read them
        return loaded

    @override
    def weigh(self, products, sums, kept, seen):
        del sums
        scores, *by_value = products
        lse, *delta = (self._spread(x, scores.shape[1]) for x in kept)
        weights = []
        share = jnp.exp2(scores * (self.layout.scale * _LOG2_E) - lse * _LOG2_E)
        if self.kind.has_slopes:
            weights.append(share * (by_value[0] - delta[0]))
        if self.kind.has_values:
            weights.append(share)
        return () if self.kind.by_key else kept, seen(weights)

    def _spread(self, of_queries, columns):
        if self.kind.by_key:
            return tiles.per_column(of_queries)
        return tiles.per_row(of_queries, columns)


def _loaded(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def _or_one(total):
    """Returns sums of exponentials, 1 where there is none."""
    return lax.select(total > 0, total, jnp.ones_like(total))
