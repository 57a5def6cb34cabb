"""The kernel of `adam`. Importing this module imports Triton.

A program updates a tile of one array, and has registers for its new values when it
writes their FP8 forms.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from loka_jax.triton.tail_kernel import read, store, write


@triton.jit
@no_type_check
def adam_kernel(given, out, of):
    """Updates parameters and both moments of some arrays.

    Programs `of.starts[i]` to `of.starts[i + 1]` have the tiles of array i.
    """
    program = tl.program_id(0)
    for i in tl.static_range(len(of.arrays)):
        if (program >= of.starts[i]) & (program < of.starts[i + 1]):
            _update(program - of.starts[i], given, out, i, of.arrays[i], of)


@triton.jit
@no_type_check
def _update(tile, given, out, i: tl.constexpr, of, adam):
    """Updates a tile of array i, and casts what it then holds."""
    tiles_n: tl.constexpr = (of.out_n + of.block_n - 1) // of.block_n
    row, column = tile // tiles_n * of.block_m, tile % tiles_n * of.block_n
    factors = given.factors.at
    rate, rate_scale = tl.load(factors + 3), tl.load(factors + 4)
    is_accepted = tl.load(factors + 5) != 0.0
    g = read(given.grads[i], row, column, of) * tl.load(factors)
    w = read(given.params[i], row, column, of)
    mu = read(given.mu[i], row, column, of)
    nu = read(given.nu[i], row, column, of)
    new_mu = (1 - adam.b1) * g + adam.b1 * mu
    new_nu = (1 - adam.b2) * (g * g) + adam.b2 * nu
    # Exactly rounded, as XLA's: the kernel waits for memory.
    root = tl.sqrt_rn(tl.div_rn(new_nu, tl.load(factors + 2))) + adam.eps
    step = rate * tl.div_rn(tl.div_rn(new_mu, tl.load(factors + 1)), root)
    w = tl.where(is_accepted, w + step * rate_scale, w)
    mu = tl.where(is_accepted, new_mu, mu)
    nu = tl.where(is_accepted, new_nu, nu)
    store(out.params[i], w, row, column, of.block_m, of.block_n)
    store(out.mu[i], mu, row, column, of.block_m, of.block_n)
    store(out.nu[i], nu, row, column, of.block_m, of.block_n)
    if of.is_copied:
        write(w, out.copies[i], given.scales[i], row, column, of)
