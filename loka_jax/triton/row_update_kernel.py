"""The kernels of `row_update`. Importing this module imports Triton.

A program adds up, in a block of entries sorted by id, its part of each run of equal
ids. A run inside the block is finished. For runs that cross an edge of the block, the
program carries partial sums to the next level, two entries per block: the same problem
again, smaller by a factor of half a block's length.

    run that began in an earlier block       the first carried entry has its id and sum
    run that continues in the next block     the second one does; 0 if the first has
                                             the sum already
    no such run                              the entry has `BAD_ID`

The 0 keeps the entries of a run adjacent, as the next level requires.
"""

import triton.language as tl

from loka_jax.triton.jit import jit
from loka_jax.triton.unbiased_kernel import hash32

_BAD_ID = tl.constexpr(2**31 - 1)  # as in ops/embedding.py
_NO_ID = tl.constexpr(-1)  # before the first and after the last entry


@jit
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

    An entry's gradient is at its place, its sum at its position; for a carried entry it
    is the other way round.
    """
    i, id, follows, ends, begins = _entries(ids, n, positions)
    place = tl.load(places + i, mask=i < n, other=0)
    source = i if is_carried else place
    target = place if is_carried else i
    d = _columns(dim, tile_dim)
    s = _running_sums(grads, source, id != _BAD_ID, begins, d, dim, positions, tile_dim)
    at = sums + target.to(tl.int64)[:, None] * dim + d
    tl.store(at, s, mask=(ends & ~follows)[:, None] & (d < dim))
    cut = _carry(id, follows, ends, s, d, carried_ids, carried, dim, positions)
    # Only the first carried entry needs its place: there a run can end.
    to_place = carried_places + 2 * tl.program_id(0) + tl.zeros_like(i)
    tl.store(to_place, target, mask=cut)


@jit
def update_rows_kernel(
    ids,
    order,
    grads,
    lr,
    words,  # of the noise, or anything
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
    depth: tl.constexpr,
    shards: tl.constexpr,
):
    """Updates in place the rows whose runs are finished here.

    By row-wise AdaGrad with the accumulators `state` if `is_adagrad`, else by SGD.
    Rounds stochastically if there are virtual shards, else to the nearest.
    """
    i, id, follows, ends, begins = _entries(ids, n, positions)
    d = _columns(dim, tile_dim)
    finished = ends & ~follows
    row = id.to(tl.int64)
    at = table + row[:, None] * dim + d
    inside = finished[:, None] & (d < dim)
    # Loaded before the gradients, so that the latencies overlap.
    rate = tl.load(lr)
    old = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if is_adagrad:
        acc = tl.load(state + row, mask=finished, other=0.0)
    source = i if is_carried else tl.load(order + i, mask=i < n, other=0)
    s = _running_sums(grads, source, id != _BAD_ID, begins, d, dim, positions, tile_dim)
    step = rate * s
    # Several threads may read the same values: all read before one writes.
    tl.debug_barrier()
    if is_adagrad:
        acc += tl.sum(s * s, axis=1) / dim
        tl.store(state + row, acc, mask=finished)
        step = tl.div_rn(step, tl.sqrt_rn(acc)[:, None] + eps)
    new = old - step
    if shards > 0:
        new = _rounded(new, _random_bits(id, d, words, depth, shards))
    tl.store(at, new.to(table.dtype.element_ty), mask=inside)
    _carry(id, follows, ends, s, d, carried_ids, carried, dim, positions)


@jit
def _entries(ids, n: tl.constexpr, positions: tl.constexpr):
    """Returns positions and ids of the block's entries, and follows, ends, begins.

    `follows`: the entry's run began in an earlier block. `ends`: it is the last of its
    run. `begins`: it is the first. The first two are False for a bad id; past the end
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


@jit
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


@jit
def _join(left_begins, left, right_begins, right):
    """Joins two adjacent parts. Selects, not multiplies: NaN stays in its run."""
    sums = tl.where(right_begins != 0, right, left + right)
    return left_begins | right_begins, sums


@jit
def _carry(
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
    """Writes the two carried entries; returns the mask of the first one's sum."""
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


@jit
def _random_bits(id, d, words, depth: tl.constexpr, shards: tl.constexpr):
    """Returns uniform integers below 2^16: `random_bits` of `ops.row_rounding`."""
    v = tl.load(words + 2) + (id // depth).to(tl.uint32)
    q = (id % depth).to(tl.uint32)
    low = q * shards + ((v - hash32(q)) & (shards - 1))
    of_row = hash32(low ^ tl.load(words))
    if shards > 1:
        of_row += (q.to(tl.uint64) * shards >> 32).to(tl.uint32)
    of_row = hash32(of_row ^ tl.load(words + 1))
    return hash32(of_row[:, None] + d.to(tl.uint32) * 0x9E3779B9) >> 16


@jit
def _rounded(x, bits):
    """Returns float32 values that bfloat16 has: `round_by` of `ops.row_rounding`."""
    words = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    # The sum may carry a NaN into another number.
    return tl.where(x == x, words.to(tl.float32, bitcast=True), x)


@jit
def _columns(dim: tl.constexpr, tile_dim: tl.constexpr):
    """Returns the positions along D, 4 adjacent ones per thread where D allows.

    That makes stores of 16 bytes in float32. Without the hint the compiler takes as
    many as each array allows, and computes all sums once for every layout.
    """
    if dim % 4 == 0:
        neighbours: tl.constexpr = 4
    elif dim % 2 == 0:
        neighbours: tl.constexpr = 2
    else:
        neighbours: tl.constexpr = 1
    return tl.max_contiguous(tl.arange(0, tile_dim)[None, :], [1, neighbours])
