"""The kernels of `route`. Importing this module imports Triton."""

import triton.language as tl

from loka_jax.triton.jit import jit

_BAD_ID = tl.constexpr(2**31 - 1)  # as in ops/embedding.py


@jit
def count_kernel(places, counts, of):
    """Writes how many distinct places of each owner begin in each block."""
    all_owners = tl.arange(0, of.width)
    count = tl.zeros([of.width], tl.int32)
    for t in range(of.tiles):
        i = (tl.program_id(0) * of.tiles + t) * of.tile + tl.arange(0, of.tile)
        _, owner, _, is_first = _entries(places.at, i, of)
        begins = is_first[:, None] & (owner[:, None] == all_owners[None, :])
        count += tl.sum(begins.to(tl.int32), axis=0)
    tl.store(counts.at + tl.program_id(0) * of.width + all_owners, count)


@jit
def write_kernel(given, out, of):
    """Writes the lists, the slots of the ids in both orders, and the longest list."""
    block = tl.program_id(0)
    b = tl.arange(0, of.height)
    at = given.counts.at + b[:, None] * of.width + tl.arange(0, of.width)[None, :]
    all_counts = tl.load(at, mask=(b < of.blocks)[:, None], other=0)
    totals = tl.sum(all_counts, axis=0)
    starts = tl.cumsum(totals, axis=0) - totals
    # Distinct places in the blocks before this one.
    count = tl.sum(tl.sum(tl.where((b < block)[:, None], all_counts, 0), axis=0))
    tl.store(out.need.at, tl.max(totals), mask=block == 0)

    for t in range(of.tiles):
        i = (block * of.tiles + t) * of.tile + tl.arange(0, of.tile)
        place, owner, is_id, is_first = _entries(given.places.at, i, of)
        begun = count + tl.cumsum(is_first.to(tl.int32), axis=0)
        rank = begun - 1 - _of_owner(starts, owner, of.width)
        count += tl.sum(is_first.to(tl.int32))
        fits = is_id & (rank < of.capacity)
        slot = tl.where(fits, owner * of.capacity + rank, _BAD_ID)
        tl.store(out.sorted_slots.at + i, slot, mask=i < of.n)
        position = tl.load(given.positions.at + i, mask=i < of.n, other=0)
        tl.store(out.slots.at + position, slot, mask=i < of.n)
        row = (place % of.part).to(tl.int32)
        tl.store(out.asked.at + slot, row, mask=fits & is_first)
        following = tl.load(given.places.at + i + 1, mask=i + 1 < of.n, other=0)
        is_last = (i + 1 == of.n) | (following != place)
        tl.store(out.ends.at + slot, i, mask=fits & is_last)

    for t in range(of.unused_tiles):
        slot = (block * of.unused_tiles + t) * of.tile + tl.arange(0, of.tile)
        used = _of_owner(totals, slot // of.capacity, of.width)
        is_unused = (slot < of.owners * of.capacity) & (slot % of.capacity >= used)
        nothing = tl.zeros_like(slot) + _BAD_ID
        tl.store(out.asked.at + slot, nothing, mask=is_unused)
        tl.store(out.ends.at + slot, nothing, mask=is_unused)


@jit
def _entries(places, i, of):
    """Returns place and owner of sorted ids; whether they have one, are its first."""
    place = tl.load(places + i, mask=i < of.n, other=0)
    preceding = tl.load(places + i - 1, mask=(i > 0) & (i < of.n), other=0)
    owner = (place // of.part).to(tl.int32)
    is_id = (i < of.n) & (owner < of.owners)
    return place, owner, is_id, is_id & ((i == 0) | (preceding != place))


@jit
def _of_owner(values, owner, width: tl.constexpr):
    """Returns the value of each owner, 0 if there is none."""
    is_its = owner[:, None] == tl.arange(0, width)[None, :]
    return tl.sum(tl.where(is_its, values[None, :], 0), axis=1)
