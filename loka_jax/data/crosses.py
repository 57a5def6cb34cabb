"""Crosses: pairs of columns whose values together have rows in a table.

    id(a, b) = 1 + (a - 1) (n - 1) + b - 1    if the rows are enough for all pairs
               1 + mix(a, b) mod (rows - 1)   else
               0                              where a or b is 0

a and b are ids, b one of n, so that nothing is stored with the rows: batches get the
ids of crosses when they are read, and exported programs when they run. A cross is a
multi-valued column: of two single values it has one, of a list and a value as many as
the list.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from loka_jax.data.batch import WHOLE, Bag, Batch, Dataset, Part, Position, Schema
from loka_jax.terminal import clip

MOST_ROWS = 2**31 - 1


class Cross(NamedTuple):
    """A cross of two columns, by its name "A*B"; the second one may hold lists.

    Attributes:
        rows: of its table.
        step: n - 1 if a pair has a row of its own, else 0.
    """

    name: str
    left: str
    right: str
    rows: int
    step: int = 0


def crosses_of(entries: tuple[str, ...], schema: Schema) -> tuple[Cross, ...]:
    """Returns the crosses of entries "A*B=ROWS".

    Raises:
        ValueError: for an entry of another form, or of columns without tables.
    """
    return tuple(_cross(entry, schema) for entry in entries)


def _cross(entry: str, schema: Schema) -> Cross:
    name, _, rows = entry.rpartition("=")
    left, _, right = name.partition("*")
    said = f"--embedding.crosses {clip(entry)}"
    if not rows.isdecimal() or not 2 <= int(rows) <= MOST_ROWS:
        raise ValueError(
            f"{said} must be COLUMN*COLUMN=ROWS, with 2 to {MOST_ROWS} rows for the "
            "pairs of values."
        )
    if schema.user is not None:
        raise ValueError(f"{said} is not for event logs: leave it out.")
    for column in (left, right):
        if column not in schema.fields:
            raise ValueError(
                f"{said} names the column {clip(column)!r}, which is not among "
                f"{', '.join(map(clip, schema.fields)) or 'those with a table'}: "
                "correct it."
            )
    if left == right or {left, right} <= {*schema.multi}:
        raise ValueError(
            f"{said} must name two columns, of which one at most holds lists."
        )
    if left in schema.multi:
        left, right = right, left
    sizes = dict(zip(schema.fields, schema.vocab_sizes, strict=True))
    is_exact = int(rows) >= rows_of_all(sizes[left], sizes[right])
    return Cross(name, left, right, int(rows), sizes[right] - 1 if is_exact else 0)


def rows_of_all(left: int, right: int) -> int:
    """Returns the rows of a cross of two tables in which each pair has its own."""
    return 1 + (left - 1) * (right - 1)


def with_crosses(schema: Schema, crosses: tuple[Cross, ...]) -> Schema:
    """Returns the schema of batches with crosses: further multi-valued columns."""
    if not crosses:
        return schema
    names = tuple(cross.name for cross in crosses)
    slots = dict(zip(schema.multi, schema.slots, strict=True))
    weighted = [x.name for x in crosses if x.right in schema.weighted_multi]
    return dataclasses.replace(
        schema,
        multi=(*schema.multi, *names),
        slots=(*schema.slots, *(slots.get(cross.right, 1) for cross in crosses)),
        vocab_sizes=(*schema.vocab_sizes, *(cross.rows for cross in crosses)),
        owners=(*schema.owners, *names) if schema.owners else (),
        weighted_multi=(*schema.weighted_multi, *weighted),
    )


def crossed(batch: Batch, schema: Schema, crosses: tuple[Cross, ...]) -> Batch:
    """Returns a batch with the bags of crosses, of NumPy or traced arrays.

    Args:
        schema: of the batch, without crosses.
    """
    bags = (_bag(batch, schema, cross) for cross in crosses)
    return batch._replace(bags=(*batch.bags, *bags))


def _bag(batch: Batch, schema: Schema, cross: Cross) -> Bag:
    """Returns the ids of a cross."""
    names, weights = schema.categorical, None
    left = batch.ids[:, names.index(cross.left), None]
    if cross.right in names:
        right = batch.ids[:, names.index(cross.right), None]
    else:
        right, weights = batch.bags[schema.multi.index(cross.right)]
    return Bag(pair_ids(left, right, cross.rows, cross.step), weights)


def pair_ids(left: Any, right: Any, rows: int, step: int) -> Any:
    """Returns the ids of pairs of ids, int32; -1 where `right` is. See `Cross`.

    The hash is that of MurmurHash3, in 32 bits, which JAX has without an option.
    """
    xp: Any = np if isinstance(left, np.ndarray) else jnp
    is_known = (left > 0) & (right > 0)
    other = xp.where(right < 0, -1, 0)
    if step:
        ids = 1 + (left - 1) * step + right - 1
        return xp.where(is_known, ids, other).astype(xp.int32)
    a, b = (x.astype(xp.uint32) for x in (left, right))
    h = a * xp.uint32(0x9E3779B1) ^ (b * xp.uint32(0x85EBCA77) + xp.uint32(0x165667B1))
    h = (h ^ (h >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
    h = (h ^ (h >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
    h = h ^ (h >> xp.uint32(16))
    ids = (xp.uint32(1) + h % xp.uint32(rows - 1)).astype(xp.int32)
    return xp.where(is_known, ids, other).astype(xp.int32)


class CrossedDataset(Dataset):
    """A split whose batches have crosses."""

    def __init__(self, dataset: Dataset, crosses: tuple[Cross, ...]):
        """Takes a split without crosses."""
        self._dataset, self._crosses = dataset, crosses
        self.schema = with_crosses(dataset.schema, crosses)
        self.num_examples = dataset.num_examples

    def batch(
        self, position: Position, batch_size: int, *, shuffle: bool, part: Part = WHOLE
    ) -> Batch:
        """Returns a part of the batch at `position`, see `Dataset.batch`."""
        own = self._dataset.batch(position, batch_size, shuffle=shuffle, part=part)
        return crossed(own, self._dataset.schema, self._crosses)
