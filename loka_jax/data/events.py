"""Event logs: batches of histories, gathered by index from a log of all events.

The log has the events of all splits, sorted by user and time. An example (an anchor) is
an event, and its history the events of its user that are strictly earlier: never those
of the same time, whose order nobody knows. Where a sequence has several examples
(`targets="all"`), two events of a user may not have one time.

Batches are stratified: of the examples in the order of their lengths a batch has one of
each of B equal ranges, so that all batches have about equally many rows: one program
serves them, and few of its rows are padding. A stream comes in the order of time.

The log is held in memory. E is the number of events, B that of sequences in a batch.
"""

import copy
import math
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

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
from loka_jax.data.capacities import capacities, ladder, most_rows
from loka_jax.data.config import DataConfig
from loka_jax.data.reader import key_of, stratified
from loka_jax.data.sequences import (
    Arrays,
    EventLog,
    Layout,
    Sequences,
    Shape,
    arrays_of,
    rows_of,
)

_EQUAL_EVENTS = 2048.0
# Of so many batches the usual capacity is the mean of their rows and so many standard
# deviations: one batch of some 30,000 has more.
_SAMPLED, _STDS = 32, 4.0


def batch_of(arrays: Arrays) -> Batch:
    """Returns a batch of an event log."""
    samples, labels, weights, events = arrays
    return Batch(
        dense=np.zeros((len(samples), 0), np.float32),
        ids=samples,
        labels=labels if labels.shape[1] > 1 else labels[:, 0],
        weights=weights,
        events=Events(*events),  # pyright: ignore[reportArgumentType]
    )


def layout_of(config: DataConfig, schema: Schema) -> Layout:
    """Returns the layout of the sequences of an event log."""
    contexts, is_all = len(schema.context), config.targets == "all"
    limits = config.history, contexts, config.interleave, is_all, config.row_capacity
    return Layout(*limits, len(schema.actions))


class EventDataset(Dataset):
    """A split of an event log: an example is an anchor, or a window of all its events.

    Attributes:
        left_out: events left out of histories so far, as a batch had no room for them.
        is_stream: examples come in the order of time.
        devices: on which batches lie, each with a part of them.
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
        self.is_stream, self.devices = stream, 1
        _check(schema, log, name)
        own = log.split == split
        if layout.is_all:
            self._anchors, self._ends = _windows(log, own, layout.history)
        else:
            self._anchors = self._ends = np.flatnonzero(own)
        order = self._in_order()
        self._anchors, self._ends = self._anchors[order], self._ends[order]
        self.num_examples = len(self._anchors)
        self._usual: dict[int, int] = {}  # rows of a batch, by its sequences

    def _in_order(self) -> Int[np.ndarray, "n"]:
        """Returns the examples in the order of time, or of their lengths."""
        log, anchors = self._log, self._anchors
        if self.is_stream:
            return np.lexsort((log.row[anchors], log.times[anchors]))
        starts, stops = self._events_of(np.arange(len(anchors)))
        return np.lexsort((log.row[anchors], stops - starts))

    def over(self, devices: int) -> "EventDataset":
        """Returns the examples for batches that lie on several devices."""
        result = copy.copy(self)
        result.devices, result._usual = devices, {}
        return result

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

        Sequences of padding have no rows, and are the last. A stream is never shuffled;
        other epochs that are not shuffled all have one order. Over several devices each
        array has the part of one device after another: batches of equal shapes, whose
        offsets and targets count from the first row of the part.

        Raises:
            ValueError: if the step is out of range.
        """
        layout, size = self._layout, batch_size // self.devices
        most = most_rows(layout, size, self.devices)
        chosen = self._dealt(position, batch_size, shuffle)
        need, usual = self._need(chosen), self._usual_rows(batch_size)
        if self.is_stream:  # as if it were full, so that the last one has no program
            need = need * batch_size // sum(int(x.is_real.sum()) for x in chosen)
        need = min(max(need, usual), most)
        sizes = capacities(most, usual) if shuffle and usual else ladder(most)
        capacity = min(rows for rows in sizes if rows >= need)
        shape = Shape(capacity, size, layout.targets(size, capacity))
        parts = [self._fitting(one, most) for one in chosen]
        own = [self._laid_out(parts[i], shape) for i in part.rows(self.devices)]
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *own)

    def _dealt(
        self, position: Position, batch_size: int, shuffle: bool
    ) -> list["_Chosen"]:
        """Returns the sequences of the part of a batch on each device."""
        count, (epoch, step, seed) = self.num_examples, position
        places = np.asarray(examples_of(self, position, batch_size, WHOLE))
        index, is_real = places % count, places < count
        if not self.is_stream:
            key = key_of(seed, epoch) if shuffle else key_of()
            index, is_real = stratified(key, step, batch_size, count)
            order = np.lexsort((self._log.row[self._anchors[index]], ~is_real))
            index, is_real = index[order], is_real[order]
        starts, stops = self._events_of(index)
        starts = np.where(is_real, starts, stops)
        chosen = _Chosen(self._anchors[index], starts, stops, is_real)
        return [chosen.part(at) for at in dealt(stops - starts, self.devices)]

    def _need(self, chosen: list["_Chosen"]) -> int:
        """Returns the most rows of the parts of a batch."""
        of_event, fixed = self._layout.rows_of_event, self._fixed_rows
        rows = ((x.stops - x.starts) * of_event + x.is_real * fixed for x in chosen)
        return max(int(own.sum()) for own in rows)

    @property
    def _fixed_rows(self) -> int:
        """The rows of a sequence beside those of its history or window."""
        return self._layout.contexts + (not self._layout.is_all)

    def _usual_rows(self, batch_size: int) -> int:
        """Returns the most rows of nearly all batches of an epoch; 0 for a stream."""
        if self.is_stream:
            return 0
        if batch_size in self._usual:
            return self._usual[batch_size]
        full = max(self.num_examples // batch_size, 1)
        places = (Position(i, i % full, 0) for i in range(_SAMPLED))
        needs = [self._need(self._dealt(x, batch_size, True)) for x in places]
        usual = math.ceil(np.mean(needs) + _STDS * np.std(needs))
        self._usual[batch_size] = usual
        return usual

    def _events_of(self, index: Int[np.ndarray, "n"]) -> tuple[np.ndarray, np.ndarray]:
        """Returns where the events of examples begin and end in the log."""
        log, layout, anchors = self._log, self._layout, self._anchors[index]
        if layout.is_all:
            reach = np.minimum(anchors - log.first[anchors], layout.history // 2)
            return anchors - reach, self._ends[index]
        stops = log.before[anchors]
        return np.maximum(log.first[anchors], stops - layout.history), stops

    def _fitting(self, chosen: "_Chosen", rows: int) -> Sequences:
        """Returns sequences of at most so many rows, and counts what is left out."""
        (anchors, starts, stops, is_real), layout = chosen, self._layout
        fixed = np.where(is_real, self._fixed_rows, 0)
        counts = stops - starts
        counts, left_out = _shortened(counts, rows - int(fixed.sum()), layout)
        self.left_out += left_out
        return Sequences(
            anchors=anchors,
            starts=stops - counts,
            counts=counts,
            is_real=is_real,
            candidates=None if layout.is_all else anchors[is_real],
            num_candidates=(is_real & (not layout.is_all)).astype(np.int64),
        )

    def _laid_out(self, sequences: Sequences, shape: Shape) -> Batch:
        log, layout = self._log, self._layout
        rows = rows_of(sequences, layout)
        is_target = rows.is_last
        if layout.is_all:
            is_own = log.split[rows.event] == self._split
            is_target = rows.is_candidate & is_own
            is_target &= rows.event >= sequences.anchors[rows.sequence]
        targets = np.flatnonzero(is_target)
        arrays = arrays_of(log, layout, sequences, rows, targets=targets, shape=shape)
        return batch_of(arrays)


class _Chosen(NamedTuple):
    """The events of each sequence of a batch, before it is cut to the rows there are.

    Attributes:
        anchors: the first event to be predicted.
        starts: the first event of the history.
        stops: the end of the history, or of the window.
        is_real: False of padding, which has no events.
    """

    anchors: Int[np.ndarray, "B"]
    starts: Int[np.ndarray, "B"]
    stops: Int[np.ndarray, "B"]
    is_real: Bool[np.ndarray, "B"]

    def part(self, at: Int[np.ndarray, "b"]) -> "_Chosen":
        """Returns the sequences of some numbers."""
        return _Chosen(*(x[at] for x in self))


def dealt(events: Int[np.ndarray, "B"], devices: int) -> Int[np.ndarray, "G b"]:
    """Returns the sequences of each device: equally many, and about equal work.

    The longest are dealt first, one to each device in turn: the longer, the less work
    the device has. A sequence of n events is the work n^2 + 2,048 n, as attention takes
    as long as the products around it at about so many.
    """
    if devices == 1:
        return np.arange(len(events))[None]
    work = events.astype(np.float64) * (events + _EQUAL_EVENTS)
    own, load = [], np.zeros(devices)
    for longest in np.argsort(-work, kind="stable").reshape(-1, devices):
        turn = np.argsort(np.argsort(load, kind="stable"))
        own.append(longest[turn])
        load += work[own[-1]]
    return np.sort(np.stack(own, axis=1), axis=1)


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
    is_label |= np.isnan(log.labels) & (log.split < 0)[:, None]
    if len(schema.labels) > 1:
        is_label |= np.isnan(log.labels)
    if not (is_label.all() and np.isfinite(log.weights).all()):
        raise ValueError(
            f"{name} holds a label that is neither 0 nor 1, or a weight that is not "
            "finite: convert the data again."
        )
