"""Provider `xla`: XLA's own dots in every recipe. Arrays in, arrays out.

fp8_matmul        FP8 product; `why_not` says in a sentence why sizes are not
                  served, or None if they are
norm_activation   norm and activation; every site is served
dense_norm        reference of `pallas.dense_norm`
norm_backward     backward pass of activation and norm
cross_gradient    the gradient of a cross network's features
cross_tail        what follows the product of a cross layer, either way
joined_cast       FP8 forms of joined features
norm_tail         norm, residual and activation, and their backward pass
pack, sum_packed, unpack
                  vectors in 8 bits for the wire
"""

from loka_jax.xla import tails
from loka_jax.xla.dense_norm import (
    ACTIVATIONS,
    dense_norm,
    norm_activation,
    norm_backward,
)
from loka_jax.xla.matmul import (
    cut,
    describe,
    fp8_matmul,
    fp8_product,
    fp8_product_to_fp8,
    high_precision_matmul,
    is_padded,
    why_not,
)
from loka_jax.xla.packed import pack, sum_packed, unpack
from loka_jax.xla.tails import (
    cross_gradient,
    cross_tail,
    joined_cast,
    norm_tail,
    norm_tail_backward,
)

__all__ = [
    "ACTIVATIONS",
    "cross_gradient",
    "cross_tail",
    "cut",
    "dense_norm",
    "describe",
    "fp8_matmul",
    "fp8_product",
    "fp8_product_to_fp8",
    "high_precision_matmul",
    "is_padded",
    "joined_cast",
    "norm_activation",
    "norm_backward",
    "norm_tail",
    "norm_tail_backward",
    "pack",
    "sum_packed",
    "tails",
    "unpack",
    "why_not",
]
