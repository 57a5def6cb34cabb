"""Readers of the source formats: CSV or TSV (`.gz` too), Parquet, Criteo's logs."""

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
# Criteo's display advertising logs (Kaggle 2014, and the terabyte's day files) have no
# header: the label, 13 integers, which may be empty or negative, and 26 categories of 8
# hexadecimal digits, which may be empty.
CRITEO_LABEL = "label"
CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))


def reader(path: pathlib.Path) -> Reader:
    """Returns the reader of a table with named columns, in the format its name implies.

    Raises:
        ValueError: if the name implies no format.
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


def read_criteo(
    path: str, columns: tuple[str, ...], bad_rows: BadRows
) -> Iterator[Block]:
    """Yields the rows of one of Criteo's tab separated files, plain or `.gz`."""
    names = (CRITEO_LABEL, *CRITEO_DENSE, *CRITEO_CATEGORICAL)
    return read_text(path, columns, bad_rows, delimiter="\t", names=names)


def read_parquet(
    path: str, columns: tuple[str, ...], bad_rows: BadRows
) -> Iterator[Block]:
    """Yields the file's rows in the file's types, after verifying page checksums.

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
        return "it is not a complete Parquet file (no footer); get it again."
    if "CRC" in str(error):
        return "a page does not match its checksum; get the file again."
    return damage(error)
