"""What the tails of products are checked on: Triton's against XLA's, either way."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax import xla
from loka_jax.fp8 import E4M3, E5M2
from loka_jax.measure.check_families import (
    BF16,
    SHAPE,
    Case,
    by_both,
    in_fp8,
    normal,
    outer,
    product,
    scale_in_vector,
    uneven,
    vector,
)
from loka_jax.normed import NO_VECTORS, Epilogue, NormVectors
from loka_jax.tails import Dropout, Forms, Scale, Scaled
from loka_jax.triton import tails

# Terms of sums over rows are rounded to bfloat16, by 2^-9 of each; a term may be
# several times the root mean square of the sums.
_ROUNDED_TERMS = 2.0**-6
# Both layouts, the amax, and zeros around: all that a tail may write.
_FORWARD = Forms(fp8=E4M3, transposed=True, amax=True, shape=SHAPE, padded=True)
_BACKWARD = Forms(
    bf16=False, fp8=E5M2, transposed=True, amax=True, shape=SHAPE, padded=True
)


def norm_tails() -> list[Case]:
    """Returns the cases of each norm, an activation before or after it, either way."""
    epilogues = [Epilogue("block", "swish"), Epilogue("none", "relu")]
    epilogues += [Epilogue("layer", "gelu")]
    epilogues += [Epilogue("rms", "swish", order="act_sum_norm")]
    return [case for epilogue in epilogues for case in _norm_tails_of(epilogue)]


def _norm_tails_of(epilogue: Epilogue) -> list[Case]:
    """Returns the passes with a norm and an activation."""
    bias, gamma, beta = vector(3), 1 + vector(6) / 4, vector(7)
    vectors: Any = NormVectors(bias, None, None)
    if epilogue.norm == "layer":
        vectors = NormVectors(bias, gamma, beta)
    elif epilogue.norm == "rms":
        vectors = NO_VECTORS
    words = jnp.asarray(np.array([0x12345678, 0x9ABCDEF0], np.uint32))
    dropout = Dropout(words, 0.25) if epilogue.norm == "none" else None

    def draw():
        r = Scaled(jnp.asarray(uneven(*SHAPE, seed=1)))
        return [product(0), r], vectors, dropout, scale_in_vector()

    def draw_backward():
        *operands, scale = draw()
        how = dict(epilogue=epilogue, want=_under(scale, _FORWARD))
        _, residuals = jax.jit(functools.partial(xla.norm_tail, **how))(*operands)
        d = [Scaled(jnp.asarray(normal(*SHAPE, seed=i, dtype=BF16))) for i in (4, 5)]
        return d, residuals, vectors, dropout, scale

    def run(provider, *operands):
        *operands, scale = operands
        how = dict(epilogue=epilogue, want=_under(scale, _FORWARD))
        return provider.norm_tail(*operands, **how)

    def run_backward(provider, *operands):
        *operands, scale = operands
        how = dict(epilogue=epilogue, want=_under(scale, _BACKWARD))
        return provider.norm_tail_backward(*operands, **how)

    what = f"{epilogue.norm} norm and {epilogue.activation}"
    return [
        by_both(what, draw, run, tails),
        by_both(
            f"{what}, backward", draw_backward, run_backward, tails, _ROUNDED_TERMS
        ),
    ]


def _under(scale: Scale, want: Forms) -> Forms:
    """Returns forms under a scale."""
    return dataclasses.replace(want, scale_inv=scale)


def cross_tails() -> list[Case]:
    """Returns the cases of cross layers, beside a head too, and of their end."""

    def draw(make, **rest):
        return lambda: ([make(0), make(1)], make(9), rest, scale_in_vector())

    def run(provider, summands, x0, rest, scale, *, want, **how):
        want = want if want.fp8 is None else _under(scale, want)
        return provider.cross_tail(summands, x0, **rest, want=want, **how)

    def behind_a_head():
        return [outer(20), product(0)], in_fp8(9), {}, scale_in_vector()

    forward = functools.partial(run, want=_FORWARD)
    backward = functools.partial(run, want=_BACKWARD, has_row_sum=True)
    before_a_head = functools.partial(run, want=Forms(bf16=False, shape=SHAPE))
    of_vectors = dict(bias=vector(4), head=vector(5))
    return [
        by_both("cross layer", draw(product, bias=vector(4)), forward, tails),
        by_both("cross layer, backward", draw(in_fp8), backward, tails, _ROUNDED_TERMS),
        by_both("before a head", draw(in_fp8, **of_vectors), before_a_head, tails),
        by_both("behind a head", behind_a_head, backward, tails, _ROUNDED_TERMS),
        *_cross_gradients(),
    ]


def _cross_gradients() -> list[Case]:
    (m, n), first = SHAPE, 64
    parts = tuple(jax.ShapeDtypeStruct((m, x), BF16) for x in (first, n - first - 5))

    def draw():
        gradients = [[in_fp8(0), product(30)], [in_fp8(1)], [in_fp8(2)]]
        return gradients, [in_fp8(11), in_fp8(12)], [None, vector(21)]

    def draw_head():
        return [[product(0)], [outer(40)]], [product(11)], [None], product(50)

    def run(provider, *operands):
        return provider.cross_gradient(*operands, parts=parts, shape=SHAPE)

    return [
        by_both("gradient of features", draw, run, tails),
        by_both("gradient of a head", draw_head, run, tails),
    ]


def joined_casts() -> list[Case]:
    """Returns the case of features that are joined and cast."""

    def draw():
        parts = (uneven(SHAPE[0], n, seed=n, dtype="f4") for n in (13, 317))
        return *parts, scale_in_vector()

    def run(provider, first, second, scale):
        return provider.joined_cast(first, second, want=_under(scale, _FORWARD))

    return [by_both("joined features", draw, run, tails)]
