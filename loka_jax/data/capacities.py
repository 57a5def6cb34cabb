"""The numbers of rows that batches of an event log may have, with padding.

They are a ladder, of which a batch has the smallest that holds it. Each shape is a
program to compile, so that one of them is to hold all batches of a shuffled log.
"""

from loka_jax.data.sequences import Layout

_STEP = 1.25  # from one capacity to the next: an eighth of the rows is padding
_MULTIPLE = 128  # of a capacity
_ABOVE = 1.125  # times the usual capacity: no other is nearer


def most_rows(layout: Layout, sequences: int, devices: int = 1) -> int:
    """Returns the most rows that a batch has.

    Args:
        sequences: of a batch, or of the part of it on each of several devices.
    """
    most = sequences * layout.longest
    return _multiple(min(most, (layout.limit or most * devices) // devices))


def capacities(most: int, usual: int) -> list[int]:
    """Returns the numbers of rows that batches have, in falling order.

    Args:
        most: the first of them.
        usual: the most rows of nearly all batches.
    """
    usual = _multiple(usual)
    if _ABOVE * usual >= most:
        return [most]
    return [x for x in ladder(most) if x > _ABOVE * usual] + [usual]


def ladder(most: int) -> list[int]:
    """Returns capacities in falling order, of which the first holds so many rows."""
    sizes = [_multiple(most)]
    while sizes[-1] > _MULTIPLE:
        below = _multiple(int(sizes[-1] / _STEP))
        sizes.append(below if below < sizes[-1] else sizes[-1] - _MULTIPLE)
    return sizes


def _multiple(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE
