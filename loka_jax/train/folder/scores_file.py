"""scores.npy in a workdir: logits, labels and weights of the final evaluation.

A record has the fields `logits`, `labels` and `weights`; of several labels, one field
for each, which has these three. A label that an example lacks is NaN.
"""

import io
import os
import pathlib
from collections.abc import Mapping

import numpy as np

from loka_jax import jsonfile
from loka_jax.report import Scored
from loka_jax.train.breakdown import Scores

NAME = "scores.npy"
_FIELDS = [(name, np.float32) for name in Scored._fields]


def write_scores(workdir: str | os.PathLike, scores: Mapping[str, Scores]) -> None:
    """Writes a NumPy file with a record for each example, in one step.

    The scores are of the same examples, by label.
    """
    (first, *others) = scores.values()
    dtype = [(name, _FIELDS) for name in scores] if others else _FIELDS
    records = np.empty(len(first.logits), dtype)
    for name, part in scores.items():
        own = records[name] if others else records
        for field in Scored._fields:
            own[field] = getattr(part, field)
    file = io.BytesIO()
    np.save(file, records)
    jsonfile.write_bytes(pathlib.Path(workdir) / NAME, file.getvalue())


def read_scores(workdir: str | os.PathLike) -> dict[str, Scored]:
    """Returns the scored examples of a run by label; none if it has none.

    Of a single label the name is "". Of several, each has the examples that have it.

    Raises:
        ValueError: if the file is not what a run writes.
    """
    path = pathlib.Path(workdir) / NAME
    if not path.exists():
        return {}
    try:
        with open(path, "rb") as file:
            records = np.load(file, allow_pickle=False)
        if records.ndim == 1 and records.dtype == _FIELDS:
            return {"": _scored(records)}
        if records.ndim == 1 and records.dtype.names is not None:
            return {name: _scored(records[name]) for name in records.dtype.names}
    except (OSError, EOFError, ValueError, IndexError, TypeError):
        pass
    raise ValueError(f"{path} is broken: delete it, to do without it.")


def _scored(records: np.ndarray) -> Scored:
    """Returns the examples that have a label.

    Raises:
        ValueError: if one is not what a run writes.
    """
    records = records[~np.isnan(records["labels"])]
    logits, labels, weights = (records[x].astype(np.float32) for x in Scored._fields)
    if not np.all(np.isfinite(logits) & np.isin(labels, (0, 1)) & (weights > 0)):
        raise ValueError("it has other values than scores, labels and weights.")
    return Scored(logits, labels, weights)
