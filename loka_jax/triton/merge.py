"""Ascending lists merged into one, with the former position of each entry, in Triton.

A launch, where a sort takes a dozen: the place of an entry is its own in its list, plus
for each other list the number of entries there that come before it, by binary search.
Equal numbers keep their order, so that the results are those of a stable sort.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from loka_jax.triton.launch import require_triton
from loka_jax.triton.trees import launch_tree, static

_MAX_LISTS = 16  # each entry is looked for in all
_MAX_ENTRIES = 2**30  # positions are int32


class TuningConfig(NamedTuple):
    """The tunable parameters of the launch."""

    tile: int = 256
    num_warps: int = 4


CONFIG = TuningConfig()


def why_not(lists: int, entries: int) -> str | None:
    """Returns why lists are not served, or None if they are."""
    if lists > _MAX_LISTS:
        return f"{lists} lists are more than {_MAX_LISTS}"
    if not 0 < entries <= _MAX_ENTRIES:
        return f"{entries} entries are none, or more than {_MAX_ENTRIES}"
    return None


def merge_lists(
    lists: Int[Array, "K C"], *, config: TuningConfig = CONFIG
) -> tuple[Int[Array, "N"], Int[Array, "N"]]:
    """Returns the entries of all lists in ascending order, and their former positions.

    Those in `lists.reshape(-1)`. N = K C.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    count, capacity = lists.shape
    if reason := why_not(count, lists.size):
        raise ValueError(f"merge_lists: {reason}.")
    require_triton()
    from loka_jax.triton import merge_kernel  # not above: it imports Triton

    whole = jax.ShapeDtypeStruct((lists.size,), jnp.int32)
    of = dict(count=count, capacity=capacity, halvings=capacity.bit_length())
    out = launch_tree(
        merge_kernel.merge_kernel,
        lists,
        static(entries=whole, order=whole),
        static(**of, tile=config.tile),
        grid=-(-lists.size // config.tile),
        num_warps=config.num_warps,
    )
    return out.entries, out.order
