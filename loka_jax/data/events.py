"""Event logs: batches of histories, gathered by index from a log of all events.

The log has the events of all splits, sorted by user and time. An example (an anchor) is
an event, and its history the events of its user that are strictly earlier: never those
of the same time, whose order nobody knows. Where a sequence has several examples
(`targets="all"`), two events of a user may not have one time.

A batch is jagged: the rows of its sequences one after another, C of them. C is one of a
ladder of capacities, the smallest that holds the batch, so that few shapes are
compiled. The log is held in memory.

E is the number of events, B that of sequences in a batch, P of fields of a sample.
"""

import copy
import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from loka_jax.data.batch import (
    WHOLE,
    Batch,
    Dataset,
    Events,
    Part,
    Position,
    Schema,
    examples_of,
)
from loka_jax.data.config import DataConfig
from loka_jax.data.reader import key_of, permute

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
        first: the first event of the same user.
        before: the first event of the same user and time: those from `first` to
            `before` are strictly earlier.
    """

    ids: Int[np.ndarray, "E F"]
    labels: Float[np.ndarray, "E T"]
    weights: Float[np.ndarray, "E"]
    times: Float[np.ndarray, "E"]
    split: Int[np.ndarray, "E"]
    first: Int[np.ndarray, "E"]
    before: Int[np.ndarray, "E"]


def make_log(splits: list[np.ndarray]) -> EventLog:
    """Returns the log of the records of all splits, see `record_dtype_of`."""
    events = np.concatenate(splits)
    split = np.repeat(np.arange(len(splits)), [len(part) for part in splits])
    order = np.lexsort((events["time"], events["user"]))  # stable
    events, split = events[order], split[order]
    is_new_user = np.diff(events["user"], prepend=events["user"][0] + 1) != 0
    is_new_time = is_new_user | (np.diff(events["time"], prepend=-np.inf) != 0)
    has_weights = "weight" in (events.dtype.names or ())
    return EventLog(
        ids=np.ascontiguousarray(events["ids"]),
        labels=events["label"].reshape(len(events), -1),
        weights=events["weight"] if has_weights else np.ones(len(events), np.float32),
        times=np.ascontiguousarray(events["time"]),
        split=split.astype(np.int8),
        first=_start_of_run(is_new_user),
        before=_start_of_run(is_new_time),
    )


def _start_of_run(is_new: np.ndarray) -> np.ndarray:
    """Returns the index where the run of each element begins."""
    return np.maximum.accumulate(np.where(is_new, np.arange(len(is_new)), 0))


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
        sizes = [_multiple(min(most, self.limit or most))]
        while sizes[-1] > _MULTIPLE:
            below = _multiple(int(sizes[-1] / _STEP))
            sizes.append(below if below < sizes[-1] else sizes[-1] - _MULTIPLE)
        return sizes

    def targets(self, batch_size: int, capacity: int) -> int:
        """Returns the number of labels, with padding, of a batch."""
        return capacity // 2 if self.is_all else batch_size


def _multiple(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def layout_of(config: DataConfig, schema: Schema) -> Layout:
    """Returns the layout of the sequences of an event log."""
    contexts, is_all = len(schema.context), config.targets == "all"
    limits = config.history, contexts, config.interleave, is_all, config.row_capacity
    return Layout(*limits)


class EventDataset(Dataset):
    """A split of an event log: an example is an anchor, or a window of all its events.

    Attributes:
        left_out: events left out of histories so far, as a batch had no room for them.
        is_stream: examples come in the order of time.
    """

    def __init__(
        self,
        schema: Schema,
        log: EventLog,
        split: int,
        layout: Layout,
        *,
        stream: bool = False,
        name: str = "the event log",
    ):
        """Reads the examples of a split, in the order of time for a `stream`.

        Raises:
            ValueError: if an id is out of range, or two events of a user that are to be
                predicted in one sequence have one time.
        """
        self.schema, self.left_out = schema, 0
        self._log, self._split, self._layout = log, split, layout
        self.is_stream = stream
        _check(schema, log, name)
        own = log.split == split
        if layout.is_all:
            self._anchors, self._ends = _windows(log, own, layout.history)
        else:
            self._anchors = np.flatnonzero(own)
            if stream:
                order = np.argsort(log.times[self._anchors], kind="stable")
                self._anchors = self._anchors[order]
        self.num_examples = len(self._anchors)

    def window(self, first: int, count: int) -> "EventDataset":
        """Returns the examples from `first` on, in the order of time."""
        result = copy.copy(self)
        result._anchors = self._anchors[first : first + count]
        result.num_examples = len(result._anchors)
        return result

    def batch(
        self,
        position: Position,
        batch_size: int,
        *,
        shuffle: bool,
        part: Part = WHOLE,
    ) -> Batch:
        """Returns the batch at `position`, in host memory.

        Sequences of padding have no rows. A stream is never shuffled.

        Raises:
            ValueError: if the step is out of range.
        """
        places = np.asarray(examples_of(self, position, batch_size, part))
        index = places % self.num_examples
        if shuffle and not self.is_stream:
            key = key_of(position.seed, position.epoch)
            index = permute(index, self.num_examples, key)
        is_real, anchors = places < self.num_examples, self._anchors[index]
        log, layout = self._log, self._layout
        if layout.is_all:
            stops = self._ends[index]
            reach = np.minimum(anchors - log.first[anchors], layout.history // 2)
            starts = anchors - reach
        else:
            stops = log.before[anchors]
            starts = np.maximum(log.first[anchors], stops - layout.history)
        counts = np.where(is_real, stops - starts, 0)
        fixed = np.where(is_real, layout.contexts + (not layout.is_all), 0)
        most, *_ = ladder = layout.capacities(batch_size)
        counts, left_out = _shortened(counts, most - int(fixed.sum()), layout)
        self.left_out += left_out
        lengths = fixed + counts * layout.rows_of_event
        capacity = min(size for size in ladder if size >= lengths.sum())
        return self._gather(anchors, stops - counts, lengths, capacity)

    def _gather(
        self,
        anchors: Int[np.ndarray, "B"],
        starts: Int[np.ndarray, "B"],
        lengths: Int[np.ndarray, "B"],
        capacity: int,
    ) -> Batch:
        """Returns the batch of sequences of some rows, from their first events on."""
        log, layout, schema = self._log, self._layout, self.schema
        offsets = np.append(0, np.cumsum(lengths))
        total, size = offsets[-1], len(lengths)
        sequence = np.repeat(np.arange(size), lengths)
        place = np.arange(total) - offsets[sequence]
        step, half = np.divmod(place - layout.contexts, layout.rows_of_event)
        event = starts[sequence] + np.maximum(step, 0)
        is_event = step >= 0
        is_candidate = is_event & (layout.rows_of_event == 2) & (half == 0)
        if not layout.is_all:
            last = offsets[1:][lengths > 0] - 1
            event[last], is_candidate[last] = anchors[lengths > 0], True
        ids = log.ids[event][:, layout.contexts :]
        ids[is_candidate, ids.shape[1] - len(schema.actions) :] = 0
        ids[~is_event] = -1
        labels = log.labels[event]
        answers = np.where(np.isnan(labels), 0, labels + 1).astype(np.int32)
        answers[is_candidate | ~is_event] = 0
        if layout.is_all:
            previous = np.maximum(event - 1, starts[sequence])
            ages, positions = log.times[event] - log.times[previous], place
            is_target = is_candidate & (event >= anchors[sequence])
            targets = np.flatnonzero(is_target & (log.split[event] == self._split))
        else:
            ages = log.times[anchors[sequence]] - log.times[event]
            positions = lengths[sequence] - 1 - place
            targets = np.where(lengths > 0, offsets[1:] - 1, 0)
        count = layout.targets(size, capacity)
        is_real = _padded(np.ones(len(targets), bool), count, False)
        if not layout.is_all:
            is_real &= lengths > 0
        targets = _padded(targets, count, 0)
        at = np.append(event, 0)[targets]  # an empty batch has no events
        weights = np.where(is_real, log.weights[at], 0).astype(np.float32)
        real_labels = np.where(is_real[:, None], log.labels[at], 0).astype(np.float32)
        fill = functools.partial(_padded, count=capacity)
        events = Events(
            ids=fill(ids, fill=-1),
            answers=fill(answers, fill=0),
            positions=fill(positions.astype(np.int32), fill=0),
            ages=fill(np.where(is_event, ages, 0).astype(np.float32), fill=0),
            offsets=offsets.astype(np.int32),
            targets=targets.astype(np.int32),
            candidates=None if layout.is_all else (lengths > 0).astype(np.int32),
        )
        return Batch(
            dense=np.zeros((size, 0), np.float32),
            ids=log.ids[anchors][:, : layout.contexts],
            labels=real_labels if len(schema.labels) > 1 else real_labels[:, 0],
            weights=weights,
            events=events,
        )


def _windows(log: EventLog, own: np.ndarray, history: int):
    """Returns the first event to be predicted in each window, and the window's end.

    A user's first window has `history` targets, a further one half as many, with as
    many events before them. Windows without an event of the split are left out.
    """
    if (ties := log.before != np.arange(len(log.before))).any():
        at = int(np.argmax(ties))
        raise ValueError(
            f"Two events of a user have the time {log.times[at]:.12g}, so that their "
            "order is not known: set --data.targets last, or name a column of "
            "positions with --data.time."
        )
    rank = np.arange(len(log.first)) - log.first
    half = max(history // 2, 1)
    is_start = (rank == 0) | ((rank >= history) & ((rank - history) % half == 0))
    starts = np.flatnonzero(is_start)
    ends = np.append(starts[1:], len(rank))
    has_own = np.add.reduceat(own, starts) > 0
    return starts[has_own], ends[has_own]


def _shortened(
    counts: Int[np.ndarray, "B"], rows: int, layout: Layout
) -> tuple[Int[np.ndarray, "B"], int]:
    """Returns the longest counts lowered to fit in so many rows, and by how many."""
    room, low, high = rows // layout.rows_of_event, 0, int(counts.max(initial=0))
    if counts.sum() <= room:
        return counts, 0
    while low < high:
        middle = (low + high + 1) // 2
        fits = np.minimum(counts, middle).sum() <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    shorter = np.minimum(counts, low)
    return shorter, int((counts - shorter).sum())


def _padded(values: np.ndarray, count: int, fill) -> np.ndarray:
    """Returns the values with `fill` after them, `count` in all."""
    out = np.full((count, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out


def _check(schema: Schema, log: EventLog, name: str) -> None:
    """Refuses ids outside of their tables, and labels that are none."""
    for field, rows in enumerate(schema.vocab_sizes):
        ids = log.ids[:, field]
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= rows:
            raise ValueError(
                f"{name} column {schema.fields[field]!r} holds ids outside its table "
                f"of {rows} rows: convert the data again."
            )
    is_label = (log.labels == 0) | (log.labels == 1)
    if len(schema.labels) > 1:
        is_label |= np.isnan(log.labels)
    if not (is_label.all() and np.isfinite(log.weights).all()):
        raise ValueError(
            f"{name} holds a label that is neither 0 nor 1, or a weight that is not "
            "finite: convert the data again."
        )
