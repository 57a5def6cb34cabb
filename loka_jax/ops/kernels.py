"""Calls of the Pallas kernels that work under `vmap` and with parameters missing."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import Fp8Array
from loka_jax.normed import Normed, NormGradients, Outputs
from loka_jax.pallas import dense_norm as _forward
from loka_jax.pallas import norm_backward as _norm_backward
from loka_jax.pallas import norm_quantize as _norm

# Optional operands by the names the kernels have for them.
Vectors = dict[str, Array]


def dense_norm(
    x: Float[Array, "m k"] | Fp8Array,
    w: Float[Array, "n k"] | Fp8Array,
    vectors: Vectors,
    **static,
) -> Normed:
    """Returns what `pallas.dense_norm` writes."""
    kernel = functools.partial(_forward.dense_norm, **static)
    return one_by_one(kernel, x, w, **_with_both(vectors))


def norm_quantize(
    z: Float[Array, "m n"],
    scales: tuple[Float[Array, "..."], ...],
    vectors: Vectors,
    **static,
) -> Normed:
    """Returns what `pallas.norm_quantize` writes."""
    kernel = functools.partial(_norm.norm_quantize, **static)
    return one_by_one(kernel, z, scales=scales, **vectors)


def quantizes(m: int, k: int) -> bool:
    """Returns whether `quantize` serves rows of this shape."""
    return _norm.why_not(m, k, norm="none") is None


def quantize(
    x: Float[Array, "m k"], scale_inv: Float[Array, ""] | None = None, *, interpret
) -> tuple[Fp8Array, Float[Array, "p"] | None]:
    """Returns rows in E4M3, and under a given scale the amaxes of p parts of them.

    Args:
        x: bfloat16.
        scale_inv: scale of all rows, beyond which they saturate; None for one a row.
        interpret: as in `pallas.norm_quantize`.
    """
    scaling = "rowwise" if scale_inv is None else "tensorwise"
    want = Outputs(y=False, y_fp8=scaling, y_amax=scale_inv is not None)
    given = {} if scale_inv is None else {"y_scale_inv": scale_inv}
    static = dict(norm="none", activation="none", want=want, interpret=interpret)
    found = norm_quantize(x, (), given, **static)
    assert found.y_fp8 is not None
    amaxes = None if found.y_amax is None else fp8.amax_of_parts(found.y_amax)
    return found.y_fp8, amaxes


def norm_backward(
    dy: Float[Array, "m n"],
    xhat: Float[Array, "m n"],
    rstd: Float[Array, "..."] | None,
    vectors: Vectors,
    **static,
) -> NormGradients:
    """Returns what `pallas.norm_backward` writes."""
    kernel = functools.partial(_norm_backward.norm_backward, **static)
    return one_by_one(kernel, dy, xhat, rstd, **vectors)


def _with_both(vectors: Vectors) -> Vectors:
    """Returns gamma and beta, ones or zeros for a missing one: kernels want both."""
    if "gamma" in vectors and "beta" not in vectors:
        return vectors | {"beta": jnp.zeros_like(vectors["gamma"])}
    if "beta" in vectors and "gamma" not in vectors:
        return vectors | {"gamma": jnp.ones_like(vectors["beta"])}
    return vectors


def one_by_one(kernel: Callable, *args, **kwargs):
    """Returns `kernel(*args, **kwargs)`; under `vmap` one call follows another.

    JAX would give a batched kernel another grid axis, which kernels that stay on their
    SMs and count their tiles do not expect.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    out_trees = []

    @sequential_vmap
    def call(*leaves):
        args, kwargs = jax.tree.unflatten(tree, leaves)
        out, out_tree = jax.tree.flatten(kernel(*args, **kwargs))
        out_trees.append(out_tree)
        return tuple(out)

    out = call(*leaves)
    return jax.tree.unflatten(out_trees[0], out)
