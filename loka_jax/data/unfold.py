"""Examples with lists of the events before them, as the events of a log.

The row `item 3, time 9, items [1, 2], times [5, 7]` is three events, of which the last
one is the example. Each row has a history of its own, whoever its user is.
"""

import numpy as np
import pyarrow as pa

from loka_jax.data.blocks import Block
from loka_jax.data.config import DataConfig, columns_of
from loka_jax.data.encoding import elements_of
from loka_jax.data.event_options import HISTORY


def unfolded(block: Block, config: DataConfig) -> Block:
    """Returns the events of a block's rows: those of their lists, then the row.

    Column `HISTORY` is 1 in examples and 0 in events of lists. These have the row's
    context and weight, and no labels or actions unless there are lists of them.

    Raises:
        ValueError: for lists of a row that differ in length, or elements of another
            type than the column of the row.
    """
    lists, time = config.lists_of, config.time or ""
    parts = {
        column: elements_of(block, name, config.separator)
        for column, name in lists.items()
    }
    lengths = parts[time][1]
    for column, (_, counts) in parts.items():
        if (differ := counts != lengths).any():
            at = int(np.argmax(differ))
            raise ValueError(
                f"{block.file} row {block.rows[at]} has {counts[at]} values in column "
                f"{lists[column]!r} and {lengths[at]} in {lists[time]!r}: give each "
                "event one in both."
            )
    row = np.repeat(np.arange(len(lengths)), lengths + 1)
    is_example = np.zeros(len(row), bool)
    is_example[np.cumsum(lengths + 1) - 1] = True
    # Elements come first where both are one after another.
    index = np.where(is_example, lengths.sum() + row, np.cumsum(~is_example) - 1)
    columns = columns_of(config)
    names = (time, config.weight, *columns.labels, *columns.fields)
    table = {}
    for name in dict.fromkeys(name for name in names if name is not None):
        own = pa.nulls(len(lengths))
        if name in block.table.column_names:
            own = block.column(name)
        if name in parts:
            both = _joined(block, name, parts[name][0].column(lists[name]), own)
            table[name] = both.take(pa.array(index))
        elif name in (*columns.labels, *columns.actions):
            table[name] = own.take(pa.array(row, mask=~is_example))
        else:
            table[name] = own.take(pa.array(row))
    table[HISTORY] = pa.array(is_example.astype(np.int8))
    return Block(pa.table(table), block.rows[row], block.file)


def _joined(block: Block, name: str, elements: pa.Array, own: pa.Array) -> pa.Array:
    """Returns the elements of lists, and then the column's own values."""
    tables = [pa.table({name: values}) for values in (elements, own)]
    try:
        both = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        raise ValueError(
            f"{block.file} column {name!r} holds {own.type}, and lists of its events "
            f"{elements.type}: convert one of them."
        ) from None
    joined = both.column(name).combine_chunks()
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined
