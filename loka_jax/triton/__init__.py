"""Provider `triton`: kernels through jax-triton, the optional extra `triton`.

Arrays in, arrays out. Each module has `why_not`, which says in a sentence why a problem
is not served (None if it is), and functions that launch its kernels:

    matmul        fp8_matmul: product of FP8 operands
    dot_features  dot_features, dot_features_backward: dot products of pairs of vectors
    route         lists: of the distinct places of ids, for the owners of their rows
    merge         merge_lists: ascending lists in one, and the former positions
    row_wire      encode, decode: rows for the wire
    row_update    sum_runs, sgd, rowwise_adagrad: sums of gradients by row, row updates
    cross_gradient    the gradient of a cross network's features, in its parts
    cross_tail    what follows the product of a cross layer, each way
    joined_cast   FP8 forms of joined features
    packed        pack, sum_packed, unpack: vectors in 8 bits for the wire
    norm_tail     norm, residual and activation after a product, each way
    joined_norm   norm of joined embeddings plus a residual, each way
    gated_norm    what the second product of an HSTU layer reads, each way

Importing this package imports neither Triton nor jax-triton: a module `*_kernel` does,
at its first launch.
"""

from loka_jax.triton.launch import (
    Implementation,
    chosen,
    is_left_out,
    left_out,
    why_not_here,
    why_not_installed,
)
from loka_jax.triton.matmul import fp8_matmul, why_not

__all__ = [
    "Implementation",
    "chosen",
    "fp8_matmul",
    "is_left_out",
    "left_out",
    "why_not",
    "why_not_here",
    "why_not_installed",
]
