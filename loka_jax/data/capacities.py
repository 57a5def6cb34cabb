"""The numbers of rows that batches of an event log may have, with padding.

They are a ladder, of which a batch has the smallest that holds it, so that few shapes
are compiled.
"""

from loka_jax.data.sequences import Layout

_STEP = 1.25  # from one capacity to the next: an eighth of the rows is padding
_MULTIPLE = 128  # of a capacity


def capacities(layout: Layout, sequences: int, devices: int = 1) -> list[int]:
    """Returns the numbers of rows that batches have, in falling order.

    Args:
        sequences: of a batch, or of the part of it on each of several devices.
    """
    most = sequences * layout.longest
    return ladder(min(most, (layout.limit or most * devices) // devices))


def ladder(most: int) -> list[int]:
    """Returns capacities in falling order, of which the first holds so many rows."""
    sizes = [_multiple(most)]
    while sizes[-1] > _MULTIPLE:
        below = _multiple(int(sizes[-1] / _STEP))
        sizes.append(below if below < sizes[-1] else sizes[-1] - _MULTIPLE)
    return sizes


def _multiple(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE
