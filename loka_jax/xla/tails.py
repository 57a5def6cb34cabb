"""The tails of `tails` by XLA: they serve every shape, and are the kernels' reference.

XLA decides how many passes a tail takes.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import E4M3
from loka_jax.normed import XHAT_SCALE_INV, Epilogue, NormResiduals
from loka_jax.tails import (
    CrossGradients,
    Forms,
    Fp8Copies,
    NormTail,
    Scaled,
    Written,
)
from loka_jax.xla.dense_norm import ACTIVATIONS, norm_backward, normalize


def cross_tail(
    z: Scaled,
    x0: Scaled,
    x: Float[Array, "m n"],
    bias: Float[Array, "n"] | None = None,
    *,
    want: Forms,
    y_scale_inv: Float[Array, ""] | None = None,
) -> Written:
    """Returns `x0 * (z + bias) + x`, computed in float32."""
    y = decode(x0) * _plus(decode(z), bias) + x.astype(jnp.float32)
    return write(y, want, y_scale_inv)


def cross_tail_backward(
    d: Scaled,
    r: Float[Array, "m n"] | None,
    x0: Scaled,
    z: Scaled,
    bias: Float[Array, "n"] | None,
    dx0: Float[Array, "m n"] | None,
    *,
    want: Forms,
    u_scale_inv: Float[Array, ""] | None = None,
    keep_g: bool = True,
) -> CrossGradients:
    """Returns the gradients of `cross_tail` where y has the gradient `g = d + r`.

    The gradient of x is g, or d if there is no r.

    Args:
        d: first summand of g.
        r: second summand, bfloat16, or None.
        x0, z, bias: of the forward pass.
        dx0: bfloat16, to which the gradient of x0 is added; zero if None.
        want: the forms of u.
        u_scale_inv: scale of the FP8 form.
        keep_g: return g if there is an r.
    """
    g = _sum(d, r)
    u = g * decode(x0)
    own = g * _plus(decode(z), bias)
    own = own if dx0 is None else own + dx0.astype(jnp.float32)
    return CrossGradients(
        u=write(u, want, u_scale_inv),
        dx0=own.astype(jnp.bfloat16),
        g=g.astype(jnp.bfloat16) if keep_g and r is not None else None,
        dbias=None if bias is None else jnp.sum(u, axis=0),
    )


def norm_tail(
    z: Scaled,
    r: Float[Array, "m n"] | None = None,
    bias: Float[Array, "n"] | None = None,
    *,
    epilogue: Epilogue,
    want: Forms,
    y_scale_inv: Float[Array, ""] | None = None,
    keep: bool = True,
) -> NormTail:
    """Returns `activation(norm(z + bias + r))` and what its backward pass reads.

    Args:
        z: the product.
        r: bfloat16 summand, or None.
        bias: None if absent.
        epilogue: norm and activation; no gamma and beta.
        want: the forms of y.
        y_scale_inv: scale of the FP8 form.
        keep: return residuals.
    """
    argument = _plus(_sum(z, r), bias)
    xhat, rstd = normalize(argument, epilogue)
    y = write(ACTIVATIONS[epilogue.activation](xhat), want, y_scale_inv)
    if not keep:
        return NormTail(y, None)
    if epilogue.norm == "none":
        return NormTail(y, NormResiduals(xhat.astype(jnp.bfloat16), None))
    stored = fp8.saturate(xhat / XHAT_SCALE_INV, E4M3)
    return NormTail(y, NormResiduals(stored, rstd))


def norm_tail_backward(
    d: Scaled,
    r: Float[Array, "m n"] | None,
    residuals: NormResiduals,
    *,
    epilogue: Epilogue,
    want: Forms,
    dz_scale_inv: Float[Array, ""] | None = None,
) -> Written:
    """Returns the gradient of z, where y has the gradient `d + r`.

    Args:
        d: first summand of the gradient of y.
        r: second summand, bfloat16, or None.
        residuals, epilogue: of the forward pass.
        want: the forms of the result.
        dz_scale_inv: scale of the FP8 form.
    """
    dz, _, _ = norm_backward(_sum(d, r), residuals, epilogue=epilogue)
    return write(dz, want, dz_scale_inv)


def decode(x: Scaled) -> Float[Array, "m n"]:
    """Returns the float32 matrix that `x` stands for."""
    value = x.data.astype(jnp.float32)
    for scale in x.scales:
        value = value * scale
    return value


def write(
    x: Float[Array, "m n"], want: Forms, scale_inv: Float[Array, ""] | None
) -> Written:
    """Returns a float32 matrix in the requested forms.

    Args:
        x: the matrix.
        want: its forms.
        scale_inv: of the FP8 form.
    """
    copies = None
    if want.fp8 is not None:
        assert scale_inv is not None
        data = fp8.cast(x, scale_inv, want.fp8).data
        data_t = data.T if want.transposed else None
        copies = Fp8Copies(data, data_t, scale_inv)
    return Written(
        bf16=x.astype(jnp.bfloat16) if want.bf16 else None,
        fp8=copies,
        amaxes=fp8.amax_of_parts(x) if want.amax else None,
    )


def _sum(d: Scaled, r: Array | None) -> Array:
    value = decode(d)
    return value if r is None else value + r.astype(jnp.float32)


def _plus(z: Array, bias: Array | None) -> Array:
    return z if bias is None else z + bias[None, :]
