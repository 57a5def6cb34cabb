"""Calls of the Pallas kernels that work under `vmap` and with parameters missing."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import Fp8Array
from loka_jax.normed import (
    NO_VECTORS,
    Epilogue,
    Normed,
    NormGradients,
    NormResiduals,
    NormVectors,
    Outputs,
)
from loka_jax.pallas import dense_norm as _forward
from loka_jax.pallas import norm_backward as _norm_backward
from loka_jax.pallas import norm_quantize as _norm


def dense_norm(
    x: Float[Array, "m k"] | Fp8Array,
    w: Float[Array, "n k"] | Fp8Array,
    vectors: NormVectors,
    y_scale_inv: Float[Array, ""] | None,
    **static,
) -> Normed:
    """Returns the outputs of `pallas.dense_norm`."""
    kernel = functools.partial(_forward.dense_norm, **static)
    return one_by_one(kernel, x, w, _with_both(vectors), y_scale_inv=y_scale_inv)


def norm_quantize(
    z: Float[Array, "m n"],
    scales: tuple[Float[Array, "..."], ...],
    vectors: NormVectors,
    y_scale_inv: Float[Array, ""] | None,
    **static,
) -> Normed:
    """Returns the outputs of `pallas.norm_quantize`."""
    kernel = functools.partial(_norm.norm_quantize, **static)
    return one_by_one(kernel, z, scales, vectors, y_scale_inv=y_scale_inv)


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
    static = dict(epilogue=Epilogue("none"), want=want, interpret=interpret)
    out = norm_quantize(x, (), NO_VECTORS, scale_inv, **static)
    assert out.y_fp8 is not None
    amaxes = None if out.y_amax is None else fp8.amax_of_parts(out.y_amax)
    return out.y_fp8, amaxes


def norm_backward(
    dy: Float[Array, "m n"],
    residuals: NormResiduals,
    vectors: NormVectors,
    dz_scale_inv: Float[Array, ""] | None = None,
    **static,
) -> NormGradients:
    """Returns the outputs of `pallas.norm_backward`."""
    kernel = functools.partial(_norm_backward.norm_backward, **static)
    return one_by_one(kernel, dy, residuals, vectors, dz_scale_inv=dz_scale_inv)


def _with_both(vectors: NormVectors) -> NormVectors:
    """Returns both gamma and beta, with ones or zeros for a missing one."""
    _, gamma, beta = vectors
    if gamma is not None and beta is None:
        return vectors._replace(beta=jnp.zeros_like(gamma))
    if beta is not None and gamma is None:
        return vectors._replace(gamma=jnp.ones_like(beta))
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
