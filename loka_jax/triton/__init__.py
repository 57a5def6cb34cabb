"""Provider `triton`: kernels through jax-triton, the optional extra `triton`.

Arrays in, arrays out. `matmul` multiplies FP8 operands, `norm_quantize` is the norm,
activation and cast of rows after a product, `dot_features` the pairwise dot products
of vectors, `row_update` sums gradients by row and updates embedding rows. Importing
this package imports neither Triton nor jax-triton: a kernel's own module, `*_kernel`,
does, at its first launch.
"""

from loka_jax.triton.launch import (
    Implementation,
    chosen,
    why_not_here,
    why_not_installed,
)
from loka_jax.triton.matmul import fp8_matmul, why_not

__all__ = [
    "Implementation",
    "chosen",
    "fp8_matmul",
    "why_not",
    "why_not_here",
    "why_not_installed",
]
