"""Candidates: events to be scored, on the histories of their users.

The history of a candidate are the strictly earlier events of its user that are known.
Candidates of one user and time have one history, and are rows of one sequence, which
do not see each other: many are scored for little more than one.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from loka_jax.data.batch import Batch, Schema
from loka_jax.data.events import make_log
from loka_jax.data.sequences import Layout, Sequences, batch_of, ladder, rows_of

MOST_CANDIDATES = 512  # of a batch


class _Groups(NamedTuple):
    """Candidates with one history each, of at most `MOST_CANDIDATES`.

    Attributes:
        first: the first candidate of each, in the order of user and time.
        sizes: candidates of each.
        starts: the first event of the history.
        counts: events of the history.
    """

    first: Int[np.ndarray, "G"]
    sizes: Int[np.ndarray, "G"]
    starts: Int[np.ndarray, "G"]
    counts: Int[np.ndarray, "G"]


def are_candidates(records: np.ndarray) -> Bool[np.ndarray, "E"]:
    """Returns which records of an event log have no label."""
    return np.isnan(records["label"].reshape(len(records), -1)).all(axis=1)


def candidate_batches(
    schema: Schema, past: np.ndarray, new: np.ndarray, layout: Layout, batch_size: int
) -> Iterator[tuple[Batch, Int[np.ndarray, "n"]]]:
    """Yields batches of the candidates, and their numbers among all candidates.

    Args:
        schema: of the records.
        past: the records of known events, see `record_dtype_of`.
        new: those of the candidates, whose labels are not read. They may be known, too.
        layout: of the sequences that the model has learned from.
        batch_size: the most sequences of a batch.
    """
    order = np.lexsort((new["time"], new["user"]))
    past, new = past[np.lexsort((past["time"], past["user"]))], new[order]
    new["label"] = 0  # a number
    log = make_log([past, new], apart=True)
    groups = _grouped(past, new, layout)
    for part in _parts(groups.sizes, batch_size):
        own = _Groups(*(x[part] for x in groups))
        numbers = np.arange(own.first[0], own.first[-1] + own.sizes[-1])
        sequences = Sequences(
            anchors=_padded(len(past) + own.first, batch_size, len(past)),
            starts=_padded(own.starts, batch_size, 0),
            counts=_padded(own.counts, batch_size, 0),
            is_real=np.arange(batch_size) < len(own.first),
            candidates=len(past) + numbers,
            num_candidates=_padded(own.sizes, batch_size, 0),
        )
        rows = rows_of(sequences, layout)
        sizes = ladder(batch_size * layout.longest + MOST_CANDIDATES)
        batch = batch_of(
            *(log, schema, layout, sequences, rows),
            targets=np.flatnonzero(rows.is_last),
            capacity=min(size for size in sizes if size >= len(rows.event)),
            num_targets=MOST_CANDIDATES,
        )
        yield batch, order[numbers]


def _grouped(past: np.ndarray, new: np.ndarray, layout: Layout) -> _Groups:
    """Returns the groups of candidates `new`; both are sorted by user and time."""
    _, time = np.unique(
        np.concatenate([past["time"], new["time"]]), return_inverse=True
    )
    users, user = np.unique(
        np.concatenate([past["user"], new["user"]]), return_inverse=True
    )
    keys = user * (time.max(initial=0) + 1) + time
    of_past, of_new = keys[: len(past)], keys[len(past) :]
    is_first = np.diff(of_new, prepend=-1) != 0
    run = np.maximum.accumulate(np.where(is_first, np.arange(len(new)), 0))
    is_first |= (np.arange(len(new)) - run) % MOST_CANDIDATES == 0
    first = np.flatnonzero(is_first)
    ends = np.searchsorted(of_past, of_new[first])  # of strictly earlier events
    begins = np.searchsorted(user[: len(past)], user[len(past) + first])
    # Models of windows have learned from the rows of a candidate's answers, too.
    most = layout.history - layout.is_all
    counts = np.minimum(ends - begins, most)
    sizes = np.diff(first, append=len(new))
    return _Groups(first, sizes, ends - counts, counts)


def _parts(sizes: np.ndarray, batch_size: int) -> Iterator[slice]:
    """Yields the groups of each batch."""
    start, total = 0, 0
    for at, size in enumerate(sizes):
        if at - start == batch_size or total + size > MOST_CANDIDATES:
            yield slice(start, at)
            start, total = at, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))


def _padded(values: np.ndarray, count: int, fill: int) -> np.ndarray:
    return np.append(values, np.full(count - len(values), fill, values.dtype))
