"""How histories of an event log become the jagged rows of a batch.

A batch is jagged: the rows of its sequences one after another, C of them. C is one of a
ladder of capacities, the smallest that holds the batch, so that few shapes are
compiled.

E is the number of events, B that of sequences in a batch, P of fields of a sample, R of
rows that are no padding, N of labels.
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from loka_jax.data.batch import Batch, Events, Schema
from loka_jax.data.config import DataConfig

_STEP = 1.25  # from one capacity to the next: an eighth of the rows is padding
_MULTIPLE = 128  # of a capacity


class EventLog(NamedTuple):
    """Events, sorted by user and time; those of one time in the order of the files.

    Attributes:
        ids: of the fields, int32.
        labels: NaN where one of several is missing.
        weights: of the events as examples.
        times: seconds, float64.
        split: the number of each event's split.
        row: the number of each event in the order of the files.
        first: the first event of the same user.
        before: the first event of the same user and time: those from `first` to
            `before` are strictly earlier.
    """

    ids: Int[np.ndarray, "E F"]
    labels: Float[np.ndarray, "E T"]
    weights: Float[np.ndarray, "E"]
    times: Float[np.ndarray, "E"]
    split: Int[np.ndarray, "E"]
    row: Int[np.ndarray, "E"]
    first: Int[np.ndarray, "E"]
    before: Int[np.ndarray, "E"]


class Layout(NamedTuple):
    """How a sequence is laid out in rows.

    Attributes:
        history: the most events, beside a candidate.
        contexts: P, rows before the events.
        is_interleaved: an event is two rows, without and with its answers.
        is_all: each event is a target; else a candidate follows the events.
        limit: the most rows of a batch; None for no limit.
    """

    history: int
    contexts: int
    is_interleaved: bool
    is_all: bool
    limit: int | None

    @property
    def rows_of_event(self) -> int:
        """Rows of an event of the history."""
        return 2 if self.is_interleaved or self.is_all else 1

    @property
    def longest(self) -> int:
        """The most rows of a sequence."""
        return self.contexts + self.history * self.rows_of_event + (not self.is_all)

    def capacities(self, batch_size: int) -> list[int]:
        """Returns the numbers of rows that batches have, in falling order."""
        most = batch_size * self.longest
        return ladder(min(most, self.limit or most))

    def targets(self, batch_size: int, capacity: int) -> int:
        """Returns the number of labels, with padding, of a batch."""
        return capacity // 2 if self.is_all else batch_size


def ladder(most: int) -> list[int]:
    """Returns capacities in falling order, of which the first holds so many rows."""
    sizes = [_multiple(most)]
    while sizes[-1] > _MULTIPLE:
        below = _multiple(int(sizes[-1] / _STEP))
        sizes.append(below if below < sizes[-1] else sizes[-1] - _MULTIPLE)
    return sizes


def _multiple(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def layout_of(config: DataConfig, schema: Schema) -> Layout:
    """Returns the layout of the sequences of an event log."""
    contexts, is_all = len(schema.context), config.targets == "all"
    limits = config.history, contexts, config.interleave, is_all, config.row_capacity
    return Layout(*limits)


class Sequences(NamedTuple):
    """The events of each sequence of a batch, by their numbers in a log.

    Attributes:
        anchors: an event of each, whose sample's fields are read. Sequences without
            rows, which are padding, come last.
        starts: the first event of each history.
        counts: events of each history.
        is_real: whether a sequence is no padding.
        candidates: after the histories, those of all sequences in order; None where
            events of the histories are to be predicted.
        num_candidates: of each sequence.
    """

    anchors: Int[np.ndarray, "B"]
    starts: Int[np.ndarray, "B"]
    counts: Int[np.ndarray, "B"]
    is_real: Bool[np.ndarray, "B"]
    candidates: Int[np.ndarray, "n"] | None
    num_candidates: Int[np.ndarray, "B"]

    def lengths(self, layout: Layout) -> Int[np.ndarray, "B"]:
        """Returns the rows of each sequence."""
        fixed = np.where(self.is_real, layout.contexts, 0) + self.num_candidates
        return fixed + self.counts * layout.rows_of_event


class Rows(NamedTuple):
    """The rows of a batch, without padding.

    Attributes:
        sequence: of each row.
        event: of each row; of the first P rows of a sequence, any.
        is_candidate: whether a row has an event without what is known of it later.
        is_last: whether a row has one of the candidates after a history.
        offsets: of the sequences.
    """

    sequence: Int[np.ndarray, "R"]
    place: Int[np.ndarray, "R"]
    event: Int[np.ndarray, "R"]
    is_event: Bool[np.ndarray, "R"]
    is_candidate: Bool[np.ndarray, "R"]
    is_last: Bool[np.ndarray, "R"]
    offsets: Int[np.ndarray, "B_plus_1"]


def rows_of(sequences: Sequences, layout: Layout) -> Rows:
    """Returns the rows of sequences, one after another."""
    lengths = sequences.lengths(layout)
    offsets = np.append(0, np.cumsum(lengths))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(offsets[-1]) - offsets[sequence]
    step, half = np.divmod(place - layout.contexts, layout.rows_of_event)
    event = sequences.starts[sequence] + np.maximum(step, 0)
    is_event = step >= 0
    is_candidate = is_event & (layout.rows_of_event == 2) & (half == 0)
    is_last = place >= (lengths - sequences.num_candidates)[sequence]
    if sequences.candidates is not None:
        event[is_last] = sequences.candidates
    is_candidate |= is_last
    return Rows(sequence, place, event, is_event, is_candidate, is_last, offsets)


def batch_of(
    log: EventLog,
    schema: Schema,
    layout: Layout,
    sequences: Sequences,
    rows: Rows,
    *,
    targets: Int[np.ndarray, "n"],
    capacity: int,
    num_targets: int,
) -> Batch:
    """Returns a batch, padded to its capacity and a number of labels.

    Args:
        targets: rows with an event to be predicted.
    """
    fill = functools.partial(_padded, count=capacity)
    is_real = _padded(np.ones(len(targets), bool), num_targets, False)
    targets = _padded(targets, num_targets, 0)
    at = np.append(rows.event, 0)[targets]  # an empty batch has no events
    labels = np.where(is_real[:, None], log.labels[at], 0).astype(np.float32)
    ids, answers = _known(log, schema, layout, rows)
    positions, ages = _places(log, layout, sequences, rows)
    # Where events are predicted in turn, no row may see a later one.
    has_contextual = layout.contexts and not layout.is_all
    contextual = np.full(len(sequences.counts), layout.contexts, np.int32)
    num_candidates = sequences.num_candidates.astype(np.int32)
    events = Events(
        ids=fill(ids, fill=-1),
        answers=fill(answers, fill=0),
        positions=fill(positions.astype(np.int32), fill=0),
        ages=fill(np.where(rows.is_event, ages, 0).astype(np.float32), fill=0),
        offsets=rows.offsets.astype(np.int32),
        targets=targets.astype(np.int32),
        contextual=contextual if has_contextual else None,
        candidates=None if sequences.candidates is None else num_candidates,
    )
    return Batch(
        dense=np.zeros((len(sequences.anchors), 0), np.float32),
        ids=log.ids[sequences.anchors][:, : layout.contexts],
        labels=labels if len(schema.labels) > 1 else labels[:, 0],
        weights=np.where(is_real, log.weights[at], 0).astype(np.float32),
        events=events,
    )


def _known(log: EventLog, schema: Schema, layout: Layout, rows: Rows):
    """Returns ids and answers of the rows: no more than is known at each."""
    ids = log.ids[rows.event][:, layout.contexts :]
    ids[rows.is_candidate, ids.shape[1] - len(schema.actions) :] = 0
    ids[~rows.is_event] = -1
    labels = log.labels[rows.event]
    answers = np.where(np.isnan(labels), 0, labels + 1).astype(np.int32)
    answers[rows.is_candidate | ~rows.is_event] = 0
    return ids, answers


def _places(log: EventLog, layout: Layout, sequences: Sequences, rows: Rows):
    """Returns positions and ages of the rows.

    Candidates of a history all have the place and the time of its first one.
    """
    of, lengths = rows.sequence, np.diff(rows.offsets)
    first = (lengths - np.maximum(sequences.num_candidates, 1))[of]
    times = log.times[np.where(rows.is_last, sequences.anchors[of], rows.event)]
    if not layout.is_all:
        positions = np.maximum(first - rows.place, 0)
        return positions, log.times[sequences.anchors[of]] - times
    # No later event may tell where or when an earlier one was.
    starts, ends = sequences.starts, sequences.starts + sequences.counts
    before = np.where(rows.is_last, ends[of], rows.event) - 1
    before = np.maximum(before, starts[of])
    is_first = rows.is_last & (sequences.counts == 0)[of]
    ages = np.where(is_first, 0, times - log.times[before])
    return np.where(rows.is_last, first, rows.place), ages


def _padded(values: np.ndarray, count: int, fill) -> np.ndarray:
    """Returns the values with `fill` after them, `count` in all."""
    out = np.full((count, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out
