"""Mean and covariance of a weight's rows and columns: LoKA's model of weights.

    W (k, n) ~ MN(Mean, U, V),  that is  vec(W) ~ N(vec(Mean), V (x) U)

with U (k, k) over rows and V (n, n) over columns, learned from the weight at successive
steps by flip-flop with an exponential moving average of momentum m. With Wc = W - Mean,
Mean that of the previous weights:

    U' = Wc V^-1 Wc^T / n      U <- m U + (1 - m) U',  scaled to trace(U) = k
    V' = Wc^T U^-1 Wc / k      V <- m V + (1 - m) V'

Inverses are triangular solves with Cholesky factors. The scale of U is fixed because
only the product of the scales of U and V is defined. Early on (1 - m) is larger, so
that all weights count about equally. Mean is a bias-corrected average of W with another
momentum p, so that U and V describe the movement of the weight. If the weights are
independent, Wc has 2 / (1 + p) times their variance, and is corrected for that.

References:
    LoKA, arXiv 2605.10886, section on Probe.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.probe import blocks

_MOMENTUM = 0.99  # 0.9 leaves an error of a third in V (x) U, 0.99 one of 9 %
_PRIOR = 8.0  # number of weights that the initial U and V count as, if k = n
_MEAN_MOMENTUM = 0.5  # a longer average would lag behind the weight


class MatrixNormal(NamedTuple):
    """The learned distribution of a weight.

    Attributes:
        moves: the number of deviations from the mean that U and V were learned from.
        rows: U in diagonal blocks, with trace k.
        columns: V in diagonal blocks; zeros before the first deviation.
    """

    steps: Float[Array, ""]
    moves: Float[Array, ""]
    mean: Float[Array, "k n"]
    rows: Float[Array, "b s s"]
    columns: Float[Array, "c t t"]


def empty_weights(k: int, n: int) -> MatrixNormal:
    """Returns the initial state for a weight (k, n)."""
    return MatrixNormal(
        steps=jnp.zeros((), jnp.float32),
        moves=jnp.zeros((), jnp.float32),
        mean=jnp.zeros((k, n), jnp.float32),
        rows=_identity(k),
        columns=jnp.zeros_like(_identity(n)),
    )


def update(
    state: MatrixNormal, w: Float[Array, "k n"], *, moves_covariances: bool = True
) -> MatrixNormal:
    """Returns the state after one more weight; one that is not finite is ignored.

    The first weight only sets the mean. Without `moves_covariances` only the mean is
    updated, at a fraction of the cost.
    """
    w = w.astype(jnp.float32)
    deviation = w - state.mean
    # The weight's share of a bias-corrected average.
    share = (1 - _MEAN_MOMENTUM) / (1 - _MEAN_MOMENTUM ** (state.steps + 1))
    mean = state.mean + share * deviation
    deviation = deviation * ((1 + _MEAN_MOMENTUM) / 2) ** 0.5
    is_finite = jnp.isfinite(jnp.sum(w))
    after = state._replace(steps=state.steps + 1, mean=mean)
    if moves_covariances:
        has_moved = (state.steps > 0) & (jnp.max(jnp.abs(deviation)) > 0)
        after = _where(has_moved, _flip_flop(after, deviation), after)
    return _where(is_finite, after, state)


def _where(condition, a: MatrixNormal, b: MatrixNormal) -> MatrixNormal:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def _flip_flop(state: MatrixNormal, deviation) -> MatrixNormal:
    """Returns the state with U and V updated by a weight's deviation from the mean."""
    k, n = deviation.shape
    # A single weight has too few rows or columns to determine U and V, so both start as
    # those of independent elements, which count as `prior` weights.
    independent = jnp.mean(deviation * deviation) * _identity(n)
    columns = jnp.where(state.moves == 0, independent, state.columns)
    prior = _PRIOR * max(k / n, n / k)
    rate = jnp.maximum(1 - _MOMENTUM, 1 / (state.moves + 1 + prior))
    rows = (1 - rate) * state.rows + rate * (_gram(_whiten(deviation, columns)) / n)
    rows = rows * (k / jnp.trace(rows, axis1=1, axis2=2).sum())
    columns = (1 - rate) * columns + rate * (_gram(_whiten(deviation.T, rows)) / k)
    return state._replace(moves=state.moves + 1, rows=rows, columns=columns)


def _whiten(x: Float[Array, "p q"], covariance: Float[Array, "b s s"]):
    """Returns `x L^-T` for the factor L of a covariance over the columns of x."""
    parts = blocks.split(x, covariance.shape[-1])
    whitened = blocks.solve(blocks.factor(covariance), parts)
    return blocks.join(whitened, x.shape[1])


def _gram(x: Float[Array, "p q"]) -> Float[Array, "b s s"]:
    """Returns the blocks of `x x^T`."""
    parts = blocks.split(x.T, blocks.block_size(x.shape[0]))  # [q, b, s]
    return jnp.einsum("qbs,qbt->bst", parts, parts, precision="highest")


def _identity(k: int) -> Float[Array, "b s s"]:
    """Returns the identity over k features, with zeros in the padding of a block."""
    size = blocks.block_size(k)
    diagonal = blocks.split(jnp.ones((k,), jnp.float32), size)
    return diagonal[:, :, None] * jnp.eye(size, dtype=jnp.float32)[None]
