"""Criteo's display advertising logs: Kaggle 2014, and the terabyte's day files.

One example a line, 40 tab separated columns, no header: the label, 13 integers
(may be empty or negative), 26 categories of 8 hexadecimal digits (may be empty).
"""

import functools

from loka_jax.data.blocks import Reader
from loka_jax.data.text import read_text

LABEL = "label"
DENSE = tuple(f"I{i}" for i in range(1, 14))
CATEGORICAL = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = (LABEL, *DENSE, *CATEGORICAL)


def reader() -> Reader:
    """Returns the reader of these files, plain or `.gz`, whatever their names."""
    return functools.partial(read_text, delimiter="\t", names=COLUMNS)
