"""Provider `xla`: XLA's own dots in every recipe. Arrays in, arrays out."""

from loka_jax.xla.dense_norm import (
    ACTIVATIONS,
    dense_norm,
    norm_activation,
    norm_backward,
)
from loka_jax.xla.matmul import (
    describe,
    fp8_matmul,
    fp8_product,
    high_precision_matmul,
    why_not,
)

__all__ = [
    "ACTIVATIONS",
    "dense_norm",
    "describe",
    "fp8_matmul",
    "fp8_product",
    "high_precision_matmul",
    "norm_activation",
    "norm_backward",
    "why_not",
]
