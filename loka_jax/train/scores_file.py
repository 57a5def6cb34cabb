"""scores.npy in a workdir: logits, labels and weights of the final evaluation."""

import io
import os
import pathlib

import numpy as np

from loka_jax import jsonfile
from loka_jax.report import Scored
from loka_jax.train.breakdown import Scores

NAME = "scores.npy"


def write_scores(workdir: str | os.PathLike, scores: Scores) -> None:
    """Writes a NumPy file with a record for each example, in one step."""
    records = np.empty(len(scores.logits), [(x, np.float32) for x in Scored._fields])
    for name in Scored._fields:
        records[name] = getattr(scores, name)
    file = io.BytesIO()
    np.save(file, records)
    jsonfile.write_bytes(pathlib.Path(workdir) / NAME, file.getvalue())


def read_scores(workdir: str | os.PathLike) -> Scored | None:
    """Returns the scored examples of a run; None if it has none.

    Raises:
        ValueError: if the file is not what a run writes.
    """
    path = pathlib.Path(workdir) / NAME
    if not path.exists():
        return None
    try:
        with open(path, "rb") as file:
            records = np.load(file, allow_pickle=False)
        columns = [records[name].astype(np.float32) for name in Scored._fields]
        logits, labels, weights = columns
        is_usable = np.isfinite(logits) & np.isin(labels, (0, 1)) & (weights > 0)
        if records.ndim == 1 and is_usable.all():
            return Scored(*columns)
    except (OSError, EOFError, ValueError, IndexError, TypeError):
        pass
    raise ValueError(f"{path} is broken: delete it, to do without it.")
