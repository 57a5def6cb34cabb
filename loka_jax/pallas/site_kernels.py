"""The Pallas kernels as sites see them: whether each serves a site, and its launch.

Every kernel serves multiples of `ROWS` rows. Each kernel's `why_not` says which other
numbers it serves; callers pad what no kernel serves.
"""

from typing import NamedTuple

import jax.numpy as jnp

from loka_jax.fp8 import E4M3
from loka_jax.normed import XHAT_MAX_FEATURES, Outputs, norm_features
from loka_jax.pallas.activations import why_not as _why_not_activation
from loka_jax.pallas.dense_norm import dense_norm
from loka_jax.pallas.dense_norm_layout import Problem
from loka_jax.pallas.dense_norm_layout import why_not as _why_not_dense_norm
from loka_jax.pallas.norm_backward import norm_backward
from loka_jax.pallas.norm_backward import why_not as _why_not_norm_backward
from loka_jax.pallas.norm_quantize import norm_quantize
from loka_jax.pallas.norm_quantize import why_not as _why_not_norm_quantize
from loka_jax.pallas.tiles import ROWS
from loka_jax.recipe import OPERANDS, Recipe
from loka_jax.site import SiteKernel, SiteSpec

__all__ = ["KERNELS", "ROWS", "SiteKernels", "training_outputs", "why_not"]


class SiteKernels(NamedTuple):
    """The kernels that may run at a site."""

    dense_norm: SiteKernel
    norm_quantize: SiteKernel
    norm_backward: SiteKernel


def why_not(spec: SiteSpec, recipe: Recipe) -> str | None:
    """Returns why no Pallas kernel serves a site, or None if one may."""
    for name, size in (("m", spec.m), ("k", spec.k), ("n", spec.n)):
        if size == 0:
            return f"{name}=0"
    if jnp.dtype(recipe.compute_dtype) != jnp.bfloat16:
        return f"recipe {recipe.name!r} computes in {jnp.dtype(recipe.compute_dtype)}"
    casts = [cast for operand in OPERANDS for cast in recipe.casts(operand)]
    if any(cast.is_tiled for cast in casts):
        return f"recipe {recipe.name!r} scales in blocks"
    if recipe.fwd is not None:
        formats = {jnp.dtype(c.dtype) for c in (recipe.fwd.first, recipe.fwd.second)}
        if formats != {jnp.dtype(E4M3)}:
            return f"recipe {recipe.name!r} has a forward product that is not E4M3"
    return _why_not_activation(spec.activation)


def training_outputs(spec: SiteSpec, recipe: Recipe) -> Outputs:
    """Returns the outputs of a differentiated forward pass.

    The activations as `spec.out` says, and in bfloat16 always: the gradient of the next
    weight reads them. Normalized rows are kept in E4M3 where its finest scale holds
    every value of the norm and the recipe has dlhs in FP8, whose error is four times
    what this adds to the gradient (0.01). That of gamma is off by 0.03.
    """
    norm = spec.norm
    fits = norm != "none" and norm_features(norm, spec.n) <= XHAT_MAX_FEATURES
    return Outputs(
        y=True,
        y_fp8=None if spec.out == "compute" else spec.fp8_out,
        xhat=E4M3 if recipe.dlhs is not None and fits else jnp.bfloat16,
        rstd=norm != "none",
    )


def _dense_norm(spec: SiteSpec, recipe: Recipe) -> str | None:
    fwd = recipe.fwd
    by_row = by_column = False
    if fwd is not None:
        by_row = (spec.fp8_in or fwd.first.granularity) == "rowwise"
        by_column = fwd.second.granularity == "rowwise"
    problem = Problem(
        spec=spec,
        dtype=jnp.bfloat16 if fwd is None else E4M3,
        want=training_outputs(spec, recipe),
        has_affine=spec.has_affine,
        x_scale_by_row=by_row,
        w_scale_by_column=by_column,
    )
    return _why_not_dense_norm(problem)


def _norm_quantize(spec: SiteSpec, recipe: Recipe) -> str | None:
    del recipe
    return _why_not_norm_quantize(spec.m, spec.n, norm=spec.norm)


def _norm_backward(spec: SiteSpec, recipe: Recipe) -> str | None:
    xhat = training_outputs(spec, recipe).xhat
    assert xhat is not None
    return _why_not_norm_backward(spec.m, spec.n, norm=spec.norm, xhat_dtype=xhat)


KERNELS = SiteKernels(
    SiteKernel("dense_norm", _dense_norm, dense_norm),
    SiteKernel("norm_quantize", _norm_quantize, norm_quantize),
    SiteKernel("norm_backward", _norm_backward, norm_backward),
)
