"""Provider `xla`: XLA's own dots in every recipe. Arrays in, arrays out."""

from loka_jax.xla.matmul import describe, fp8_matmul, high_precision_matmul, why_not

__all__ = ["describe", "fp8_matmul", "high_precision_matmul", "why_not"]
