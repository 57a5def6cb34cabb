"""Readers of the source formats: CSV or TSV (`.gz` too), Parquet, Criteo's logs."""

import functools
import pathlib
from collections.abc import Iterator

from loka_jax.data.blocks import BadRows, Block, Reader
from loka_jax.data.config import DataConfig
from loka_jax.data.files import data_format
from loka_jax.data.parquet import read_parquet
from loka_jax.data.text import read_text

# Criteo's display advertising logs (Kaggle 2014, and the terabyte's day files) have no
# header: the label, 13 integers, which may be empty or negative, and 26 categories of 8
# hexadecimal digits, which may be empty.
CRITEO_LABEL = "label"
CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))


def reader_of(config: DataConfig, path: pathlib.Path) -> Reader:
    """Returns the reader of a file of the data that `config` describes.

    Raises:
        ValueError: if the file's name implies no format.
    """
    return read_criteo if config.kind == "criteo" else reader(path)


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
    """Yields the rows of one of Criteo's tab separated files, plain or `.gz`.

    Those of `test.txt` have no label.
    """
    names = (CRITEO_LABEL, *CRITEO_DENSE, *CRITEO_CATEGORICAL)
    return read_text(path, columns, bad_rows, delimiter="\t", names=names)
