"""The kernels of `row_update`. Importing this module imports Triton.

A program takes a block of entries, sorted by id, and adds up its part of each run of
equal ids. A run inside the block is finished. Of a run that the block's edges cut, the
program hands the part's sum on: two entries a block, of the first run and of the last,
which are the same problem again ("carried"), a block's length over 2 times smaller.

    what follows into the block      the first entry handed on has the run's id and sum
    what goes on behind the block    the second one has; 0 if the first has the sum
    neither                          the entry has `BAD_ID`

The 0 keeps the entries of a run neighbours, which is all that the next level asks for.

`no_type_check` keeps the run-time type checks of the tests off functions that are
source text for Triton's compiler rather than Python.
"""

# Triton is an optional extra; where it is missing pyright takes this package for it.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

_BAD_ID = tl.constexpr(2**31 - 1)  # as in ops/embedding.py
_NO_ID = tl.constexpr(-1)  # beside the first and the last entry


@triton.jit
@no_type_check
def sum_runs_kernel(
    ids,
    places,
    grads,
    sums_so_far,  # the same memory as `sums`, or nothing
    sums,
    carried_ids,
    carried_places,
    carried,
    n: tl.constexpr,
    dim: tl.constexpr,
    is_carried: tl.constexpr,
    positions: tl.constexpr,
    tile_dim: tl.constexpr,
):
    """Writes the sums of the runs that are finished here.

    Gradient and sum of an entry stand at its place and its position; of a carried one
    the other way round.
    """
    i, id, follows, ends, begins = _entries(ids, n, positions)
    place = tl.load(places + i, mask=i < n, other=0)
    source = i if is_carried else place
    target = place if is_carried else i
    d = _columns(dim, tile_dim)
    s = _running_sums(grads, source, id != _BAD_ID, begins, d, dim, positions, tile_dim)
    at = sums + target.to(tl.int64)[:, None] * dim + d
    tl.store(at, s, mask=(ends & ~follows)[:, None] & (d < dim))
    cut = _hand_on(id, follows, ends, s, d, carried_ids, carried, dim, positions)
    # Only of the first entry handed on is the place asked for: there a run can end.
    to_place = carried_places + 2 * tl.program_id(0) + tl.zeros_like(i)
    tl.store(to_place, target, mask=cut)


@triton.jit
@no_type_check
def update_rows_kernel(
    ids,
    order,
    grads,
    lr,
    old_table,  # the same memory as `table`
    old_state,  # the same memory as `state`, or nothing
    table,
    state,
    carried_ids,
    carried,
    n: tl.constexpr,
    dim: tl.constexpr,
    is_carried: tl.constexpr,
    positions: tl.constexpr,
    tile_dim: tl.constexpr,
    is_adagrad: tl.constexpr,
    eps: tl.constexpr,
):
    """Updates the rows, in place, whose runs are finished here.

    Row-wise AdaGrad if `is_adagrad`, with `state` its accumulators; else SGD.
    """
    i, id, follows, ends, begins = _entries(ids, n, positions)
    d = _columns(dim, tile_dim)
    finished = ends & ~follows
    row = id.to(tl.int64)
    at = table + row[:, None] * dim + d
    inside = finished[:, None] & (d < dim)
    # Asked for before the gradients, so that their ways through memory overlap.
    rate = tl.load(lr)
    old = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if is_adagrad:
        acc = tl.load(state + row, mask=finished, other=0.0)
    source = i if is_carried else tl.load(order + i, mask=i < n, other=0)
    s = _running_sums(grads, source, id != _BAD_ID, begins, d, dim, positions, tile_dim)
    step = rate * s
    # Threads may hold copies of what they read: all of them read before one writes.
    tl.debug_barrier()
    if is_adagrad:
        acc += tl.sum(s * s, axis=1) / dim
        tl.store(state + row, acc, mask=finished)
        step = tl.div_rn(step, tl.sqrt_rn(acc)[:, None] + eps)
    tl.store(at, (old - step).to(table.dtype.element_ty), mask=inside)
    _hand_on(id, follows, ends, s, d, carried_ids, carried, dim, positions)


@triton.jit
@no_type_check
def _entries(ids, n: tl.constexpr, positions: tl.constexpr):
    """Returns the block's entries: positions, ids, and how they lie in their runs.

    `follows`: the run began in an earlier block. `ends`: it has no later entry.
    `begins`: it has no earlier one. The first two are False of a bad id; past the end
    all ids are bad.
    """
    first = tl.program_id(0) * positions
    i = first + tl.arange(0, positions)
    id = tl.load(ids + i, mask=i < n, other=_BAD_ID)
    previous = tl.load(ids + i - 1, mask=(i > 0) & (i <= n), other=_NO_ID)
    following = tl.load(ids + i + 1, mask=i + 1 < n, other=_NO_ID)
    before = tl.load(ids + first - 1, mask=first > 0, other=_NO_ID)
    used = id != _BAD_ID
    return i, id, used & (id == before), used & (id != following), id != previous


@triton.jit
@no_type_check
def _running_sums(
    grads,
    source,
    used,
    begins,
    d,
    dim: tl.constexpr,
    positions: tl.constexpr,
    tile_dim: tl.constexpr,
):
    """Returns the inclusive sums along each run in the block, float32."""
    # Beyond 2^31 elements the offsets of rows need 64 bits.
    at = grads + source.to(tl.int64)[:, None] * dim + d
    x = tl.load(at, mask=used[:, None] & (d < dim), other=0.0).to(tl.float32)
    flags = tl.broadcast_to(begins.to(tl.int32)[:, None], (positions, tile_dim))
    _, sums = tl.associative_scan((flags, x), 0, _join)
    return sums


@triton.jit
@no_type_check
def _join(left_begins, left, right_begins, right):
    """Joins two neighbouring parts. Selects, not multiplies: NaN stays in its run."""
    sums = tl.where(right_begins != 0, right, left + right)
    return left_begins | right_begins, sums


@triton.jit
@no_type_check
def _hand_on(
    id,
    follows,
    ends,
    s,
    d,
    carried_ids,
    carried,
    dim: tl.constexpr,
    positions: tl.constexpr,
):
    """Writes the two entries handed on; returns where the first one's sum stands."""
    entry = 2 * tl.program_id(0)
    k = tl.arange(0, positions)
    is_end = k == positions - 1
    to_id = carried_ids + entry + tl.zeros_like(k)
    tl.store(to_id, tl.where(follows, id, _BAD_ID), mask=k == 0)
    tl.store(to_id + 1, tl.where(ends, _BAD_ID, id), mask=is_end)

    at = carried + tl.cast(entry, tl.int64) * dim + d + tl.zeros_like(k)[:, None]
    cut = follows & (ends | is_end)  # one entry, or none
    tl.store(at, s, mask=cut[:, None] & (d < dim))
    rest = tl.where(follows[:, None], 0.0, s)
    tl.store(at + dim, rest, mask=is_end[:, None] & (d < dim))
    return cut


@triton.jit
@no_type_check
def _columns(dim: tl.constexpr, tile_dim: tl.constexpr):
    """Returns the positions along D, of which a thread takes 4 neighbours if it can.

    So it stores 16 bytes of float32. Without the hint the compiler takes as many as
    each array allows, and adds up everything once for every arrangement.
    """
    if dim % 4 == 0:
        neighbours: tl.constexpr = 4
    elif dim % 2 == 0:
        neighbours: tl.constexpr = 2
    else:
        neighbours: tl.constexpr = 1
    return tl.max_contiguous(tl.arange(0, tile_dim)[None, :], [1, neighbours])
