"""The tails of `tails` by XLA: they serve every shape, and are the kernels' reference.

XLA decides how many passes a tail takes.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import E4M3
from loka_jax.normed import (
    NO_VECTORS,
    Epilogue,
    NormResiduals,
    NormVectors,
    xhat_scale_inv,
)
from loka_jax.tails import (
    CrossTail,
    Dropout,
    Forms,
    NormTailGradients,
    Outer,
    Scaled,
    TailResiduals,
    Written,
)
from loka_jax.unbiased import uniform
from loka_jax.xla.dense_norm import (
    ACTIVATIONS,
    affine,
    decode_xhat,
    norm_backward,
    normalize,
    plus,
)
from loka_jax.xla.matmul import cut


def cross_tail(
    summands: Sequence[Scaled | Outer],
    x0: Scaled,
    bias: Float[Array, "n"] | None = None,
    head: Float[Array, "n"] | None = None,
    *,
    want: Forms,
    has_row_sum: bool = False,
) -> CrossTail:
    """Returns `y = x0 * s`, s the sum of the summands and the bias, in float32.

    With a head its dots, too.
    """
    shape = want.shape_of(x0.data)
    s = plus(_sum(summands, shape), bias)
    y = cut(decode(x0), shape) * s
    return CrossTail(
        y=write(y, want),
        row_sum=jnp.sum(y, axis=0) if has_row_sum else None,
        dots=None if head is None else jnp.sum(y * head[None, :], axis=1),
    )


def cross_gradient(
    gradients: Sequence[Sequence[Scaled | Outer]],
    products: Sequence[Scaled],
    biases: Sequence[Float[Array, "n"] | None],
    x0: Scaled | None = None,
    *,
    parts: Sequence[jax.ShapeDtypeStruct],
    shape: tuple[int, int],
) -> tuple[tuple[Float[Array, "m _"], ...], Float[Array, "n"] | None]:
    """Returns the gradient of each part of x0, and of a head, summed in float32.

        dx0 = d_0 + sum over l of d_l * s_l    s_l = 1 + z_1 + bias_1 + ... + bias_l
        dw  = sum over rows of e * x0 * s_L    where a head w gives e w^T to d_L

    XLA joins it with what reads it.

    Args:
        gradients: summands of d_0 and so on, of the features before each layer and
            after the last; an outer product among the last if a head reads these.
        products: z_1 and so on, of each layer.
        biases: float32, of each layer; None if absent.
        x0: the features; None without a head.
        parts: the types of the arrays into which columns are split; columns past them
            have no gradient.
        shape: rows and columns of the features.
    """
    zeros = jnp.zeros((), jnp.float32)
    first, *rest = (_sum(d, shape) if d else zeros for d in gradients)
    total, s = first, jnp.ones((), jnp.float32)
    for d, z, bias in zip(rest, products, biases, strict=True):
        s = s + plus(_matrix(z, shape), bias)
        total = total + d * s
    each = zip(columns_of(parts, total), parts, strict=True)
    dx0 = tuple(x.astype(part.dtype) for x, part in each)
    head = None
    if x0 is not None:
        (outer,) = (x for x in gradients[-1] if isinstance(x, Outer))
        head = jnp.sum(outer.column[:, None] * _matrix(x0, shape) * s, axis=0)
    return dx0, head


def columns_of(parts: Sequence[jax.ShapeDtypeStruct], x: Array) -> Iterator[Array]:
    """Yields the columns of a matrix that each of its parts has."""
    ends = itertools.accumulate(part.shape[1] for part in parts)
    for part, end in zip(parts, ends, strict=True):
        yield x[:, end - part.shape[1] : end]


def joined_cast(*parts: Float[Array, "m _"], want: Forms) -> Written:
    """Returns the columns of all parts, then zeros, in the requested forms."""
    x = jnp.concatenate([x.astype(jnp.float32) for x in parts], axis=1)
    return write(fp8.pad_to(x, want.shape_of(x)), want)


def norm_tail(
    summands: Sequence[Scaled],
    vectors: NormVectors = NO_VECTORS,
    dropout: Dropout | None = None,
    *,
    epilogue: Epilogue,
    want: Forms,
    xhat: DTypeLike | None = E4M3,
) -> tuple[Written, TailResiduals | None]:
    """Returns what follows a product as `normed` says, and what backward reads.

    Args:
        summands: the product, then what is added to it, at a place in `epilogue.order`.
        vectors: bias, and gamma and beta of a norm of whole rows.
        dropout: of y; None for none.
        epilogue: norm and activation, and their order.
        want: the forms of y.
        xhat: dtype in which normalized rows are kept, E4M3 or bfloat16 (always
            bfloat16 without a norm); None to return no residuals.
    """
    shape = want.shape_of(summands[0].data)
    first, *others = (_matrix(x, shape) for x in summands)
    argument = plus(first, vectors.bias)
    activate = ACTIVATIONS[epilogue.activation]
    if epilogue.acts_first:
        argument = dropped(activate(argument), dropout)
    if not (epilogue.adds_last or epilogue.multiplies):
        argument = functools.reduce(jnp.add, others, argument)
    normed, rstd = normalize(argument, epilogue)
    y = affine(normed, vectors)
    if not epilogue.acts_first:
        y = dropped(activate(y), dropout)
    if epilogue.adds_last:
        y = functools.reduce(jnp.add, others, y)
    if epilogue.multiplies:
        y = y * others[0]
    y = write(y, want)
    if xhat is None:
        return y, None
    if epilogue.norm == "none" or jnp.dtype(xhat) != jnp.dtype(E4M3):
        stored = normed.astype(jnp.bfloat16)
    else:
        scale_inv = xhat_scale_inv(epilogue.norm, shape[1])
        stored = fp8.saturate(normed / scale_inv, E4M3)
    keeps_product = epilogue.keeps_product(len(summands))
    has_xhat = epilogue.norm != "none" or not keeps_product
    product = summands[0] if keeps_product else None
    factor = summands[1] if epilogue.multiplies else None
    kept = _pad(stored, want) if has_xhat else None
    return y, TailResiduals(kept, rstd, product, factor)


def norm_tail_backward(
    gradients: Sequence[Scaled],
    residuals: TailResiduals,
    vectors: NormVectors = NO_VECTORS,
    dropout: Dropout | None = None,
    *,
    epilogue: Epilogue,
    want: Forms,
) -> NormTailGradients:
    """Returns the gradients of z and the vectors.

    Args:
        gradients: of y; they are added.
        residuals, vectors, dropout, epilogue: of the forward pass. Without a norm, y in
            any of its forms serves the backward pass of relu, which reads only signs.
        want: the forms of dz.
    """
    shape = want.shape_of(gradients[0].data)
    dy, dsum = _sum(gradients, shape), None
    last = epilogue
    if epilogue.acts_first:
        last = dataclasses.replace(epilogue, activation="none")
    else:
        dy = dropped(dy, dropout)
    dz, dgamma, dbeta = dy, None, None
    xhat = None if residuals.xhat is None else cut(residuals.xhat, shape)
    argument = None
    if residuals.product is not None:
        argument = plus(_matrix(residuals.product, shape), vectors.bias)
        if not epilogue.acts_first:
            xhat = argument
    if residuals.factor is not None:
        assert xhat is not None
        u = affine(decode_xhat(xhat, epilogue.norm), vectors)
        dsum = _pad(dy * ACTIVATIONS[epilogue.activation](u), want)
        dsum, dy = dsum.astype(jnp.bfloat16), dy * _matrix(residuals.factor, shape)
    if xhat is not None:
        kept = NormResiduals(xhat, residuals.rstd)
        dz, dgamma, dbeta = norm_backward(dy, kept, vectors, epilogue=last)
    if epilogue.order == "act_sum_norm":
        dsum = _pad(dz.astype(jnp.bfloat16), want)
    if epilogue.acts_first:
        dz = dropped(dz, dropout)
    if argument is not None and epilogue.acts_first:
        (dz,) = jax.vjp(ACTIVATIONS[epilogue.activation], argument)[1](dz)
    dbias = None if vectors.bias is None else jnp.sum(dz, axis=0)
    of_vectors = NormVectors(dbias, dgamma, dbeta)
    return NormTailGradients(write(dz, want), of_vectors, dsum)


def dropped(y: Float[Array, "m n"], dropout: Dropout | None) -> Float[Array, "m n"]:
    """Returns `y` after dropout, in its dtype."""
    if dropout is None:
        return y
    u = uniform(dropout.words, jnp.arange(y.shape[0]), y.shape[1])
    return jnp.where(u < dropout.rate, 0.0, y / (1 - dropout.rate))


def decode(x: Scaled) -> Float[Array, "m n"]:
    """Returns the float32 matrix that `x` stands for."""
    value = x.data.astype(jnp.float32) * x.unit
    for scale in x.scales:
        value = value * scale.value
    return value


def in_bf16(x: Scaled) -> Float[Array, "m n"]:
    """Returns the matrix that `x` stands for in bfloat16.

    Scales are powers of two, so this is exact where the product of the two is a normal
    number. XLA makes a bfloat16 factor part of the FP8 product that it multiplies, and
    takes no pass over the result as it does in float32.
    """
    if not x.scales:
        return decode(x).astype(jnp.bfloat16)
    factor = decode(Scaled(jnp.ones((1, 1), jnp.float32), x.scales, x.unit))
    return x.data.astype(jnp.bfloat16) * factor.astype(jnp.bfloat16)


def _matrix(x: Scaled | Outer, shape: tuple[int, int]) -> Array:
    """Returns the float32 matrix that `x` stands for, without padding."""
    if isinstance(x, Outer):
        return x.column[:, None] * x.row[None, :]
    return cut(decode(x), shape)


def write(x: Float[Array, "m n"], want: Forms) -> Written:
    """Returns a float32 matrix in the requested forms."""
    x = _pad(x, want)
    data = None
    if want.fp8 is not None:
        assert want.scale_inv is not None
        data = fp8.cast(x, want.scale_inv.value, want.fp8).data
    return Written(
        bf16=x.astype(jnp.bfloat16) if want.bf16 else None,
        fp8=data,
        fp8_t=data.T if data is not None and want.transposed else None,
        scale_inv=want.scale_inv,
        amaxes=fp8.amax_of_parts(x) if want.amax else None,
    )


def _pad(x: Array, want: Forms) -> Array:
    rows, columns = x.shape
    return fp8.pad_to(x, want.written_shape((rows, columns)))


def _sum(summands: Sequence[Scaled | Outer], shape: tuple[int, int]) -> Array:
    return functools.reduce(jnp.add, (_matrix(x, shape) for x in summands))
