"""Lists of the distinct places of sorted ids, for the owners of their rows, in Triton.

Two launches after the sort, where XLA takes about twenty: one counts the distinct
places of each owner by blocks of ids, the other adds up the counts of the blocks before
its own and writes. All are whole numbers, so that results are those of XLA's form.
Letters as in `ops.exchange`: N ids, L owners, C places in a list.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from loka_jax.triton.launch import power_of_two, require_triton
from loka_jax.triton.trees import launch_tree, static

_MAX_IDS = 2**30  # positions are int32
_MAX_OWNERS = 16  # each id is compared with all


class TuningConfig(NamedTuple):
    """The tunable parameters of the launches.

    Attributes:
        tile: ids that a program takes at a time.
        blocks: the most programs: each reads the counts of all.
    """

    tile: int = 1024
    blocks: int = 512
    num_warps: int = 4


CONFIG = TuningConfig()


class Lists(NamedTuple):
    """The way of ids to the owners of their rows; see `ops.exchange.Routed`.

    Attributes:
        asked: the rows of each owner's part.
        ends: the last of the sorted ids of each slot.
        slots: of each id.
        sorted_slots: the same in the order of the places.
        need: the distinct places of the owner that has most.
    """

    asked: Int[Array, "L C"]
    ends: Int[Array, "L C"]
    slots: Int[Array, "N"]
    sorted_slots: Int[Array, "N"]
    need: Int[Array, ""]


def why_not(ids: int, owners: int) -> str | None:
    """Returns why ids are not served, or None if they are."""
    if not 0 < ids <= _MAX_IDS:
        return f"{ids} ids are none, or more than {_MAX_IDS}"
    if owners > _MAX_OWNERS:
        return f"{owners} owners are more than {_MAX_OWNERS}"
    return None


def lists(
    places: UInt32[Array, "N"],
    positions: Int[Array, "N"],
    *,
    owners: int,
    part: int,
    capacity: int,
    config: TuningConfig = CONFIG,
) -> Lists:
    """Returns the lists; entries without a place are 2^31 - 1.

    Args:
        places: sorted; the owner of p is p // part, its row there p % part. Ids whose
            owner is L or more are ignored.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    n = places.size
    if reason := why_not(n, owners):
        raise ValueError(f"lists: {reason}.")
    require_triton()
    from loka_jax.triton import route_kernel  # not above: it imports Triton

    tiles = -(-n // config.tile)
    tiles_each = -(-tiles // config.blocks)
    blocks = -(-tiles // tiles_each)
    width = power_of_two(owners)
    how: Any = dict(grid=blocks, num_warps=config.num_warps)
    of = dict(n=n, part=part, owners=owners, width=width)
    of |= dict(tile=config.tile, tiles=tiles_each)

    def whole(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    kernel, counts = route_kernel.count_kernel, whole(blocks, width)
    counts = launch_tree(kernel, places, counts, static(**of), **how)
    of |= dict(capacity=capacity, blocks=blocks, height=power_of_two(blocks))
    of |= dict(unused_tiles=-(-owners * capacity // (blocks * config.tile)))
    given = static(places=places, positions=positions, counts=counts)
    wide = whole(owners, capacity)
    types = Lists(wide, wide, whole(n), whole(n), whole(1))
    out = launch_tree(route_kernel.write_kernel, given, types, static(**of), **how)
    return out._replace(need=out.need[0])
