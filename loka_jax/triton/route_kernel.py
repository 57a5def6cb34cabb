"""The kernels of `route`. Importing this module imports Triton.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

_BAD_ID = tl.constexpr(2**31 - 1)  # as in ops/embedding.py


@triton.jit
@no_type_check
def count_kernel(
    places,
    counts,
    n: tl.constexpr,
    part: tl.constexpr,
    owners: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    tiles: tl.constexpr,
):
    """Writes how many distinct places of each owner begin in each block."""
    all_owners = tl.arange(0, width)
    count = tl.zeros([width], tl.int32)
    for t in range(tiles):
        i = (tl.program_id(0) * tiles + t) * tile + tl.arange(0, tile)
        _, owner, _, is_first = _entries(places, i, n, part, owners)
        begins = is_first[:, None] & (owner[:, None] == all_owners[None, :])
        count += tl.sum(begins.to(tl.int32), axis=0)
    tl.store(counts + tl.program_id(0) * width + all_owners, count)


@triton.jit
@no_type_check
def write_kernel(
    places,
    positions,
    counts,
    asked,
    ends,
    slots,
    sorted_slots,
    need,
    n: tl.constexpr,
    part: tl.constexpr,
    owners: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    tiles: tl.constexpr,
    capacity: tl.constexpr,
    blocks: tl.constexpr,
    height: tl.constexpr,
    unused_tiles: tl.constexpr,
):
    """Writes the lists, the slots of the ids in both orders, and the longest list."""
    block = tl.program_id(0)
    b = tl.arange(0, height)
    at = counts + b[:, None] * width + tl.arange(0, width)[None, :]
    all_counts = tl.load(at, mask=(b < blocks)[:, None], other=0)
    totals = tl.sum(all_counts, axis=0)
    starts = tl.cumsum(totals, axis=0) - totals
    # Distinct places in the blocks before this one.
    count = tl.sum(tl.sum(tl.where((b < block)[:, None], all_counts, 0), axis=0))
    tl.store(need, tl.max(totals), mask=block == 0)

    for t in range(tiles):
        i = (block * tiles + t) * tile + tl.arange(0, tile)
        place, owner, is_id, is_first = _entries(places, i, n, part, owners)
        begun = count + tl.cumsum(is_first.to(tl.int32), axis=0)
        rank = begun - 1 - _of_owner(starts, owner, width)
        count += tl.sum(is_first.to(tl.int32))
        fits = is_id & (rank < capacity)
        slot = tl.where(fits, owner * capacity + rank, _BAD_ID)
        tl.store(sorted_slots + i, slot, mask=i < n)
        position = tl.load(positions + i, mask=i < n, other=0)
        tl.store(slots + position, slot, mask=i < n)
        row = (place % part).to(tl.int32)
        tl.store(asked + slot, row, mask=fits & is_first)
        following = tl.load(places + i + 1, mask=i + 1 < n, other=0)
        is_last = (i + 1 == n) | (following != place)
        tl.store(ends + slot, i, mask=fits & is_last)

    for t in range(unused_tiles):
        slot = (block * unused_tiles + t) * tile + tl.arange(0, tile)
        used = _of_owner(totals, slot // capacity, width)
        is_unused = (slot < owners * capacity) & (slot % capacity >= used)
        nothing = tl.zeros_like(slot) + _BAD_ID
        tl.store(asked + slot, nothing, mask=is_unused)
        tl.store(ends + slot, nothing, mask=is_unused)


@triton.jit
@no_type_check
def _entries(places, i, n: tl.constexpr, part: tl.constexpr, owners: tl.constexpr):
    """Returns place and owner of sorted ids; whether they have one, are its first."""
    place = tl.load(places + i, mask=i < n, other=0)
    preceding = tl.load(places + i - 1, mask=(i > 0) & (i < n), other=0)
    owner = (place // part).to(tl.int32)
    is_id = (i < n) & (owner < owners)
    return place, owner, is_id, is_id & ((i == 0) | (preceding != place))


@triton.jit
@no_type_check
def _of_owner(values, owner, width: tl.constexpr):
    """Returns the value of each owner, 0 if there is none."""
    is_its = owner[:, None] == tl.arange(0, width)[None, :]
    return tl.sum(tl.where(is_its, values[None, :], 0), axis=1)
