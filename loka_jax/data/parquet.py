"""Reads Parquet files in blocks of bounded size, whatever their row groups hold."""

import math
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from loka_jax.data.blocks import (
    BadRows,
    Block,
    element_type,
    find_columns,
    list_lengths,
    pc,
    plain,
)
from loka_jax.data.places import bytes_of, open_file
from loka_jax.data.text import damage
from loka_jax.terminal import clip

BLOCK_BYTES = 1 << 26
MAX_BLOCK_ROWS = 1 << 17
MAX_WHOLE_BYTES = 1 << 28


def read_parquet(
    path: str,
    columns: tuple[str, ...],
    bad_rows: BadRows,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[Block]:
    """Yields the file's rows in the file's types, after verifying page checksums.

    Parquet's rows cannot have a wrong number of columns. A block has about
    `block_bytes`, unless a single row is larger.

    Raises:
        ValueError: with the file, if it is empty, damaged, lacks a column, or has one
            of a nested type.
    """
    del bad_rows
    try:
        if bytes_of(path) == 0:
            raise ValueError(f"{path} is empty (0 bytes): get the file again.")
        yield from _parquet_blocks(path, columns, block_bytes)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {damage(error)}") from None


def read_schema(path: str) -> pa.Schema:
    """Returns the names and types of a file's columns.

    Raises:
        ValueError: with the file, if it is damaged.
    """
    try:
        with open_file(path) as file:
            return parquet.read_schema(file)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {damage(error)}") from None


def _parquet_blocks(
    path: str, columns: tuple[str, ...], block_bytes: int
) -> Iterator[Block]:
    with open_file(path) as file:
        metadata = parquet.read_metadata(file)
    schema = metadata.schema.to_arrow_schema()
    places = find_columns(path, columns, schema.names)
    names = [schema.names[place] for place in places]
    for name in names:
        if pa.types.is_nested(element_type(kind := schema.field(name).type)):
            raise ValueError(
                f"{path} column {name!r} holds {clip(kind)}, neither numbers nor "
                "text: leave it out, or convert it first."
            )
    done = 0
    rows_at_once = _rows_at_once(metadata, columns, block_bytes)
    for batch in _batches(path, metadata, names, rows_at_once):
        batch.validate(full=True)  # text is not checked to be UTF-8 otherwise
        for part in _unpacked(batch, block_bytes):
            rows = np.arange(done + 1, done + part.num_rows + 1, dtype=np.int64)
            done += part.num_rows
            yield Block(part.select(names).rename_columns(columns), rows, path)
    if done != metadata.num_rows:
        raise ValueError(
            f"{path} states {metadata.num_rows} rows and holds {done}: get the file "
            "again."
        )


def _batches(
    path: str, metadata: parquet.FileMetaData, names: list[str], rows_at_once: int
) -> Iterator[pa.RecordBatch]:
    """Yields the rows, with text as indices into a dictionary if Arrow can.

    A small file may hold far more text than fits the memory. Arrow makes no indices of
    DELTA_BYTE_ARRAY and DELTA_LENGTH_BYTE_ARRAY, and tells it when it meets them, even
    in the midst of a row group: then the rows that are left come as they are.
    """
    done = 0
    try:
        leaves = _leaves(metadata, names)
        for batch in _decoded(path, metadata, names, rows_at_once, leaves):
            done += batch.num_rows
            yield batch
        return
    except (OSError, pa.ArrowNotImplementedError) as error:
        if "DictAccumulator" not in str(error):
            raise
    for batch in _decoded(path, metadata, names, max(1, rows_at_once // 16), []):
        if done < batch.num_rows:
            yield batch.slice(done)
        done = max(0, done - batch.num_rows)


def _decoded(path, metadata, names, rows_at_once, leaves) -> Iterator[pa.RecordBatch]:
    with (
        open_file(path) as raw,
        parquet.ParquetFile(
            raw,
            metadata=metadata,
            page_checksum_verification=True,
            read_dictionary=leaves,
            pre_buffer=False,
            buffer_size=_buffer_bytes(path, len(names)),
        ) as file,
    ):
        yield from file.iter_batches(rows_at_once, columns=names)


def _buffer_bytes(path: str, num_columns: int) -> int:
    """Returns how much of a column is read at once, or 0 for a whole row group.

    Where a page is damaged, Arrow believes its size only if it reads in parts, and may
    then take 2 GB: thus in parts only where a row group may not fit the memory.
    """
    if bytes_of(path) <= MAX_WHOLE_BYTES:
        return 0
    return max(1 << 12, min(1 << 20, MAX_WHOLE_BYTES // num_columns))


def _rows_at_once(
    metadata: parquet.FileMetaData, columns: tuple[str, ...], block_bytes: int
) -> int:
    """Returns how many rows fit into a block before their text is unpacked."""
    # The sizes of single columns are not asked for: where the metadata of one is
    # damaged, Arrow's binding ends the process.
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    sizes = [group.total_byte_size / max(group.num_rows, 1) for group in groups]
    # A number takes 8 bytes, even if all are equal and encoded in none.
    rows = block_bytes / (max([0.0, *sizes]) + 8 * len(columns))
    return max(1, min(MAX_BLOCK_ROWS, int(rows)))


def _unpacked(batch: pa.RecordBatch, block_bytes: int) -> Iterator[pa.Table]:
    """Yields the batch in plain types, in parts of about `block_bytes` of text."""
    texts = [c for c in batch.columns if pa.types.is_dictionary(element_type(c.type))]
    if _most_bytes(texts) * batch.num_rows <= block_bytes:
        yield _plain_table(batch)
        return
    ends = np.cumsum(sum(map(_text_bytes, texts)))  # bytes up to the end of each row
    start = 0
    while start < batch.num_rows:
        before = ends[start - 1] if start else 0
        end = int(np.searchsorted(ends, before + block_bytes, side="right"))
        part = batch.slice(start, max(end, start + 1) - start)
        yield _plain_table(part)
        start += part.num_rows


def _leaves(metadata: parquet.FileMetaData, columns: list[str]) -> list[str]:
    """Returns the paths of the columns and of their lists' elements."""
    paths = (metadata.schema.column(i).path for i in range(metadata.num_columns))
    starts = tuple(f"{name}." for name in columns)
    return [path for path in paths if path in columns or path.startswith(starts)]


def _most_bytes(texts: list[pa.Array]) -> float:
    """Returns a bound on the bytes of a row's text; none is known for lists."""
    if any(not pa.types.is_dictionary(column.type) for column in texts):
        return math.inf
    longest = (pc.max(pc.binary_length(c.dictionary)).as_py() or 0 for c in texts)
    return float(sum(longest))


def _text_bytes(column: pa.Array) -> np.ndarray:
    """Returns the length of each row's text, at most, in bytes."""
    if not pa.types.is_dictionary(column.type):
        ends = np.cumsum(list_lengths(column))
        done = np.append(0, np.cumsum(_text_bytes(pc.list_flatten(column))))
        return np.diff(done[np.append(0, ends)])
    lengths = np.asarray(pc.binary_length(column.dictionary), np.int64)
    lengths = np.append(lengths, 0)  # the last is for null
    return lengths[np.asarray(pc.fill_null(column.indices, -1))]


def _plain_table(batch: pa.RecordBatch) -> pa.Table:
    columns = [plain(column) for column in batch.columns]
    return pa.table(columns, names=batch.schema.names)
