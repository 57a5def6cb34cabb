"""What the values of a categorical column look like, said before a model is trained.

A list in one text ("a|b|c") or a row number would train without an error, as thousands
of values that mean nothing.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow creates the functions of its compute module at import)

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loka_jax.data.encoding import Encoder, VocabularyEncoder
from loka_jax.terminal import shown

NUM_SHOWN = 5  # of the most frequent values
_NUM_SPLIT = 10_000  # of the most frequent values, searched for separators
_SEPARATORS = "|,; "
_MIN_ROWS = 50  # fewer say nothing about a column


def column_facts(
    column: str, encoder: Encoder, ranked: pa.Table, num_rows: int
) -> dict[str, Any]:
    """Returns the facts on a column, as JSON values.

    Args:
        column: its name.
        encoder: its encoder.
        ranked: the columns `value` and `count` of the rows that were counted, the most
            frequent values first.
        num_rows: the number of these rows.

    Returns:
        `rows` of its table; `values`, the size of its vocabulary, and `reserved` rows,
        both None for hashes; `counted_rows`; `most_frequent` values with their counts;
        `warning`, a sentence or None.
    """
    known = isinstance(encoder, VocabularyEncoder)
    top = ranked.slice(0, NUM_SHOWN).to_pylist()
    return {
        "rows": encoder.rows,
        "values": len(encoder.values) if known else None,
        "reserved": encoder.reserved if known else None,
        "counted_rows": num_rows,
        "most_frequent": [[shown(row["value"], 40), row["count"]] for row in top],
        "warning": _warning(column, ranked, num_rows),
    }


def _warning(column: str, ranked: pa.Table, num_rows: int) -> str | None:
    if num_rows < _MIN_ROWS:
        return None
    if (guess := _separator(ranked)) is not None:
        separator, share, parts, values = guess
        return (
            f"{shown(column)} looks multi-valued: {share:.0%} of its rows hold "
            f"{separator!r}, and {values:,} values are made of {parts:,} parts, but "
            "each is trained as one value: name the column with --data.multi, and "
            "--data.separator."
        )
    counted = pc.sum(ranked["count"]).as_py() or 0  # of lists, more than rows
    if len(ranked) >= 0.8 * max(num_rows, counted):
        return (
            f"{shown(column)} has {len(ranked):,} values in {num_rows:,} rows: nothing "
            "is learned from a value that is seen once; leave the column out, or raise "
            "--data.min-count."
        )
    return None


def _separator(ranked: pa.Table) -> tuple[str, float, int, int] | None:
    """Returns a separator in most rows, their share, and the numbers of parts, values.

    None if there is none, or if the parts are not far fewer than the values.
    """
    values = ranked["value"].slice(0, _NUM_SPLIT)
    counts = np.asarray(ranked["count"].slice(0, _NUM_SPLIT))
    for separator in _SEPARATORS:
        holds = np.asarray(pc.match_substring(values, separator))
        share = counts[holds].sum() / max(counts.sum(), 1)
        if share < 0.5:
            continue
        texts = values.filter(pa.array(holds)).combine_chunks()
        parts = pc.list_flatten(pc.split_pattern(texts, separator))
        num_parts = len(pc.unique(pc.utf8_trim_whitespace(parts)))
        if 2 * num_parts <= len(values):
            return separator, float(share), num_parts, len(values)
    return None
