"""The kernel of `merge`. Importing this module imports Triton."""

import triton.language as tl

from loka_jax.triton.jit import jit


@jit
def merge_kernel(given, out, of):
    """Writes each entry, and its position in the lists, at its place among all."""
    i = tl.program_id(0) * of.tile + tl.arange(0, of.tile)
    is_entry = i < of.count * of.capacity
    entry = tl.load(given.at + i, mask=is_entry, other=0)
    own = i // of.capacity
    place = i % of.capacity
    for other in tl.static_range(of.count):
        before = _before(given.at + other * of.capacity, entry, own > other, of)
        place += tl.where(own == other, 0, before)
    tl.store(out.entries.at + place, entry, mask=is_entry)
    tl.store(out.order.at + place, i, mask=is_entry)


@jit
def _before(numbers, entry, is_after_equal, of):
    """Returns how many of the ascending numbers come before each entry."""
    low = tl.zeros_like(entry)
    high = low + of.capacity
    for _ in tl.static_range(of.halvings):
        middle = (low + high) // 2
        is_open = low < high
        number = tl.load(numbers + middle, mask=is_open, other=0)
        is_before = (number < entry) | (is_after_equal & (number == entry))
        low = tl.where(is_open & is_before, middle + 1, low)
        high = tl.where(is_open & (is_before == 0), middle, high)
    return low
