"""Any table with named columns: CSV or TSV with a header (`.gz` too), or Parquet."""

import functools
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from loka_jax.data.blocks import BadRows, Block, Reader, check_columns
from loka_jax.data.files import data_format
from loka_jax.data.text import damage, read_text

PARQUET_BLOCK_ROWS = 1 << 17


def reader(path: pathlib.Path) -> Reader:
    """Returns the reader for the file's format, which its name tells.

    Raises:
        ValueError: if the name tells none.
    """
    kind = data_format(path)
    if kind is None:
        raise ValueError(
            f"{path} must end in .csv, .tsv (also .gz) or .parquet, so that its format "
            "is known: rename it."
        )
    if kind == "parquet":
        return read_parquet
    return functools.partial(read_text, delimiter="\t" if kind == "tsv" else ",")


def read_parquet(
    path: str, columns: tuple[str, ...], bad_rows: BadRows
) -> Iterator[Block]:
    """Yields the file's rows in its own types, page checksums verified.

    Raises:
        ValueError: with the file, if it is empty, damaged or lacks a column.
    """
    del bad_rows  # Parquet's rows cannot have a wrong number of columns.
    if os.path.getsize(path) == 0:
        raise ValueError(f"{path} is empty (0 bytes): get the file again.")
    done = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            check_columns(path, columns, file.schema_arrow.names)
            batches = file.iter_batches(PARQUET_BLOCK_ROWS, columns=list(columns))
            for batch in batches:
                rows = np.arange(done + 1, done + batch.num_rows + 1, dtype=np.int64)
                done += batch.num_rows
                yield Block(pa.Table.from_batches([batch]), rows, path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read: {_parquet_damage(error)}") from None


def _parquet_damage(error: Exception) -> str:
    if "magic bytes" in str(error):
        return "it is no whole Parquet file (its footer is missing); get it again."
    if "CRC" in str(error):
        return "a page does not match its checksum; get the file again."
    return damage(error)
