"""Mean and covariance of a weight's rows and columns: LoKA's model of weights.

    W (k, n) ~ MN(Mean, U, V),  that is  vec(W) ~ N(vec(Mean), V (x) U)

with U (k, k) over rows and V (n, n) over columns, learned from the weight at successive
steps by flip-flop with an exponential moving average of momentum m. Of Wc = W - Mean,
Mean that of the weights before:

    U' = Wc V^-1 Wc^T / n      U <- m U + (1 - m) U',  scaled to trace(U) = k
    V' = Wc^T U^-1 Wc / k      V <- m V + (1 - m) V'

Inverses are triangular solves with Cholesky factors. U has a fixed scale, for it and
V share one. Early on (1 - m) is larger, so that each weight counts about as much.
Mean is a bias-corrected average of W with a momentum p of its own, so that U and V
describe how the weight has been moving; with mean "zero" they carry all of its
structure. A W independent of those before is off their mean by 2 / (1 + p) of its
variance, which Wc is corrected for.

References:
    LoKA, arXiv 2605.10886, section on Probe.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.probe import blocks

MOMENTUM = 0.99  # 0.9 leaves an error of a third in V (x) U, 0.99 of 9 %
_PRIOR = 8.0  # weights that independence counts as, where rows and columns are as many
MEAN_MOMENTUM = 0.5  # a mean over longer would be of weights that have long moved on


class MatrixNormal(NamedTuple):
    """What is known of a weight.

    Attributes:
        steps: weights seen.
        moves: differences from the mean that U and V were learned from.
        mean: moving average of the weight.
        rows: U in blocks on the diagonal, trace k.
        columns: V likewise, zeros as long as no difference was seen.
    """

    steps: Float[Array, ""]
    moves: Float[Array, ""]
    mean: Float[Array, "k n"]
    rows: Float[Array, "b s s"]
    columns: Float[Array, "c t t"]


def no_weights(k: int, n: int, *, max_bytes: int = blocks.MAX_BYTES) -> MatrixNormal:
    """Returns what is known of a weight (k, n) before any was seen."""
    return MatrixNormal(
        steps=jnp.zeros((), jnp.float32),
        moves=jnp.zeros((), jnp.float32),
        mean=jnp.zeros((k, n), jnp.float32),
        rows=_identity(k, max_bytes),
        columns=jnp.zeros_like(_identity(n, max_bytes)),
    )


def update(
    known: MatrixNormal,
    w: Float[Array, "k n"],
    *,
    momentum: float = MOMENTUM,
    mean_momentum: float = MEAN_MOMENTUM,
    mean: Literal["average", "zero"] = "average",
    moves_covariances: bool = True,
) -> MatrixNormal:
    """Returns what is known with one weight more; one that is not finite adds nothing.

    The first weight only sets the mean.

    Args:
        known: of the weights before.
        w: the weight.
        momentum: of the covariances.
        mean_momentum: of the mean.
        mean: "zero" leaves it at zero.
        moves_covariances: False moves the mean alone, at a fraction of the cost.
    """
    w = w.astype(jnp.float32)
    off, averaged = w, known.mean
    if mean == "average":
        off = w - known.mean
        rate = _rate(mean_momentum, known.steps)
        averaged = known.mean + rate * off
        off = off * ((1 + mean_momentum) / 2) ** 0.5
    is_finite = jnp.isfinite(jnp.sum(w))
    after = known._replace(steps=known.steps + 1, mean=averaged)
    if moves_covariances:
        has_mean = known.steps > 0 if mean == "average" else jnp.asarray(True)
        is_off = has_mean & (jnp.max(jnp.abs(off)) > 0)
        after = _where(is_off, _flip_flop(after, off, momentum), after)
    return _where(is_finite, after, known)


def _rate(momentum: float, seen: Float[Array, ""]) -> Float[Array, ""]:
    """Returns the weight of the next value in a bias-corrected average of `seen`."""
    return (1 - momentum) / (1 - momentum ** (seen + 1))


def _where(condition, a: MatrixNormal, b: MatrixNormal) -> MatrixNormal:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def _flip_flop(known: MatrixNormal, off, momentum: float) -> MatrixNormal:
    """Returns what is known after one weight more, that lies `off` the mean."""
    k, n = off.shape
    row_size, column_size = known.rows.shape[-1], known.columns.shape[-1]
    # One weight has fewer rows or columns than a covariance has directions. So both
    # begin as those of independent elements, which count as some weights.
    size = jnp.mean(off * off) * _identity_like(n, known.columns)
    columns = jnp.where(known.moves == 0, size, known.columns)
    prior = _PRIOR * max(k / n, n / k)
    rate = jnp.maximum(1 - momentum, 1 / (known.moves + 1 + prior))
    moved = _gram(_whiten(off, columns), row_size) / n
    rows = (1 - rate) * known.rows + rate * moved
    rows = rows * (k / jnp.trace(rows, axis1=1, axis2=2).sum())
    moved = _gram(_whiten(off.T, rows), column_size) / k
    columns = (1 - rate) * columns + rate * moved
    return known._replace(moves=known.moves + 1, rows=rows, columns=columns)


def _whiten(x: Float[Array, "p q"], covariance: Float[Array, "b s s"]):
    """Returns `x L^-T` for the factor L of a covariance over the columns of x."""
    parts = blocks.split(x, covariance.shape[-1])
    whitened = blocks.solve(blocks.factor(covariance), parts)
    return blocks.join(whitened, x.shape[1])


def _gram(x: Float[Array, "p q"], size: int) -> Float[Array, "b s s"]:
    """Returns the blocks of `x x^T`."""
    parts = blocks.split(x.T, size)  # [q, b, s]
    return jnp.einsum("qbs,qbt->bst", parts, parts, precision="highest")


def _identity(k: int, max_bytes: int) -> Float[Array, "b s s"]:
    size = blocks.block_size(k, max_bytes)
    like = jnp.zeros((-(-k // size), size, size), jnp.float32)
    return _identity_like(k, like)


def _identity_like(k: int, like: Float[Array, "b s s"]) -> Float[Array, "b s s"]:
    """Returns the identity over k features, zero where a block is padded."""
    diagonal = blocks.split(jnp.ones((k,), jnp.float32), like.shape[-1])
    return diagonal[:, :, None] * jnp.eye(like.shape[-1], dtype=jnp.float32)[None]
