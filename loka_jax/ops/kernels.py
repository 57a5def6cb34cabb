"""Launches Pallas kernels, also under `vmap` and with missing parameters."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import Fp8Array
from loka_jax.mapped import one_by_one
from loka_jax.normed import NO_VECTORS, Epilogue, Normed, NormVectors, Outputs
from loka_jax.site import SiteKernel


def launch(kernel: SiteKernel, *operands, scale_inv: dict[str, Any], **static):
    """Returns the outputs of a Pallas kernel.

    Args:
        scale_inv: by name, the scale of an FP8 output that is fixed in advance.
    """
    run = functools.partial(kernel.run, **static)
    return one_by_one(run, *operands, **scale_inv)


def with_affine(vectors: NormVectors) -> NormVectors:
    """Returns both gamma and beta, with ones or zeros for a missing one."""
    _, gamma, beta = vectors
    if gamma is not None and beta is None:
        return vectors._replace(beta=jnp.zeros_like(gamma))
    if beta is not None and gamma is None:
        return vectors._replace(gamma=jnp.ones_like(beta))
    return vectors


def quantize(
    kernel: SiteKernel,
    x: Float[Array, "m k"],
    scale_inv: Float[Array, ""] | None = None,
    *,
    interpret,
) -> tuple[Fp8Array, Float[Array, "p"] | None]:
    """Returns rows in E4M3, and with a fixed scale the amaxes of p parts of them.

    Args:
        scale_inv: scale of all rows, beyond which they saturate; None for one a row.
    """
    scaling = "rowwise" if scale_inv is None else "tensorwise"
    want = Outputs(y=False, y_fp8=scaling, y_amax=scale_inv is not None)
    static = dict(epilogue=Epilogue("none"), want=want, interpret=interpret)
    outputs: Normed = launch(
        kernel, x, (), NO_VECTORS, scale_inv={"y_scale_inv": scale_inv}, **static
    )
    assert outputs.y_fp8 is not None
    amaxes = None if outputs.y_amax is None else fp8.amax_of_parts(outputs.y_amax)
    return outputs.y_fp8, amaxes
