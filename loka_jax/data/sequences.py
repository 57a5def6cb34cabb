"""How histories of an event log become the jagged rows of a batch.

A batch is jagged: the rows of its sequences one after another, and rows of padding.

Candidates are events to be scored. The history of one are the known, strictly earlier
events of its user. Those of one user and time share it, in one sequence, as rows that
do not see each other: many cost little more than one.

Exported models have a copy of this file, which imports NumPy alone.

E is the number of events, B that of sequences, P of fields of a sample, R of rows that
are no padding, N of labels.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

MOST_CANDIDATES = 512  # of a batch


class EventLog(NamedTuple):
    """Events, sorted by user and time; those of one time in the order of the files.

    Attributes:
        ids: of the fields, int32.
        labels: NaN where one of several is missing.
        weights: of the events as examples.
        times: seconds, float64.
        split: the number of each event's split, -1 of one that is no example.
        row: the number of each event in the order of the files.
        first: the first event of the same user.
        before: the first event of the same user and time: those from `first` to
            `before` are strictly earlier.
    """

    ids: np.ndarray  # [E, F]
    labels: np.ndarray  # [E, T]
    weights: np.ndarray  # [E]
    times: np.ndarray  # [E]
    split: np.ndarray  # [E]
    row: np.ndarray  # [E]
    first: np.ndarray  # [E]
    before: np.ndarray  # [E]


def rows_of_lists(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which records are examples, and for each the number of its example.

    In place of a user they have 1 for an example and 0 for an event of its lists.
    """
    is_example = records["user"] == 1
    return is_example, np.cumsum(is_example) - is_example


def make_log(
    splits: list[np.ndarray], *, apart: bool = False, are_lists: bool = False
) -> EventLog:
    """Returns the log of the records of all splits, see `record_dtype_of`.

    Args:
        apart: whether a split comes after another, as if users were others in each.
        are_lists: the records are those of `rows_of_lists`.
    """
    events = np.concatenate(splits)
    is_example = np.ones(len(events), bool)
    if are_lists:
        is_example, events["user"] = rows_of_lists(events)
    split = np.repeat(np.arange(len(splits)), [len(part) for part in splits])
    order = np.lexsort((events["time"], events["user"]) + (split,) * apart)  # stable
    events, split, is_example = events[order], split[order], is_example[order]
    is_new_user = np.diff(events["user"], prepend=events["user"][0] + 1) != 0
    is_new_user |= apart & (np.diff(split, prepend=0) != 0)
    is_new_time = is_new_user | (np.diff(events["time"], prepend=-np.inf) != 0)
    has_weights = "weight" in (events.dtype.names or ())
    return EventLog(
        ids=np.ascontiguousarray(events["ids"]),
        labels=events["label"].reshape(len(events), -1),
        weights=events["weight"] if has_weights else np.ones(len(events), np.float32),
        times=np.ascontiguousarray(events["time"]),
        split=np.where(is_example, split, -1).astype(np.int8),
        row=order,
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
        actions: the last fields of an event, which a candidate lacks.
        one_candidate: each candidate has a sequence of its own.
    """

    history: int
    contexts: int
    is_interleaved: bool
    is_all: bool
    limit: int | None
    actions: int = 0
    one_candidate: bool = False

    @property
    def rows_of_event(self) -> int:
        """Rows of an event of the history."""
        return 2 if self.is_interleaved or self.is_all else 1

    @property
    def longest(self) -> int:
        """The most rows of a sequence."""
        return self.contexts + self.history * self.rows_of_event + (not self.is_all)

    def targets(self, batch_size: int, capacity: int) -> int:
        """Returns the number of labels, with padding, of a batch."""
        return capacity // 2 if self.is_all else batch_size


class Shape(NamedTuple):
    """The rows, sequences and labels of a batch, with padding."""

    rows: int
    sequences: int
    targets: int


def candidate_shape(rows: int) -> Shape:
    """Returns the shape of an exported program of so many rows."""
    return Shape(rows, *[min(rows, MOST_CANDIDATES)] * 2)


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

    anchors: np.ndarray  # [B]
    starts: np.ndarray  # [B]
    counts: np.ndarray  # [B]
    is_real: np.ndarray  # [B]
    candidates: np.ndarray | None  # [n]
    num_candidates: np.ndarray  # [B]

    def lengths(self, layout: Layout) -> np.ndarray:
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

    sequence: np.ndarray  # [R]
    place: np.ndarray  # [R]
    event: np.ndarray  # [R]
    is_event: np.ndarray  # [R]
    is_candidate: np.ndarray  # [R]
    is_last: np.ndarray  # [R]
    offsets: np.ndarray  # [B + 1]


def rows_of(sequences: Sequences, layout: Layout) -> Rows:
    """Returns the rows of sequences, one after another."""
    lengths = sequences.lengths(layout)
    offsets = np.append(0, np.cumsum(lengths))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(offsets[-1]) - offsets[sequence]
    step, half = np.divmod(place - layout.contexts, layout.rows_of_event)
    event = sequences.starts[sequence] + np.maximum(step, 0)
    is_event = step >= 0
    is_last = place >= (lengths - sequences.num_candidates)[sequence]
    if sequences.candidates is not None:
        event[is_last] = sequences.candidates
    is_candidate = is_last | (is_event & (layout.rows_of_event == 2) & (half == 0))
    return Rows(sequence, place, event, is_event, is_candidate, is_last, offsets)


class Arrays(NamedTuple):
    """A batch.

    Attributes:
        samples: ids of the fields of each sequence's sample.
        labels: 0 of padding.
        weights: 0 of padding.
        events: the arrays of `loka_jax.data.Events`, in its order.
    """

    samples: np.ndarray  # [B, P]
    labels: np.ndarray  # [N, T]
    weights: np.ndarray  # [N]
    events: tuple[np.ndarray | None, ...]


def arrays_of(
    log: EventLog,
    layout: Layout,
    sequences: Sequences,
    rows: Rows,
    *,
    targets: np.ndarray,
    shape: Shape,
) -> Arrays:
    """Returns a batch, padded to its shape.

    Args:
        targets: rows with an event to be predicted.
    """
    fill = functools.partial(_padded, count=shape.rows)
    is_real = _padded(np.ones(len(targets), bool), shape.targets, False)
    targets = _padded(targets, shape.targets, 0)
    at = np.append(rows.event, 0)[targets]  # an empty batch has no events
    ids, answers = _known(log, layout, rows)
    positions, ages = _places(log, layout, sequences, rows)
    # Where events are predicted in turn, no row may see a later one.
    has_contextual = layout.contexts and not layout.is_all
    contextual = np.full(len(sequences.counts), layout.contexts, np.int32)
    num_candidates = sequences.num_candidates.astype(np.int32)
    events = (
        fill(ids, fill=-1),
        fill(answers, fill=0),
        fill(positions.astype(np.int32), fill=0),
        fill(np.where(rows.is_event, ages, 0).astype(np.float32), fill=0),
        rows.offsets.astype(np.int32),
        targets.astype(np.int32),
        contextual if has_contextual else None,
        None if sequences.candidates is None else num_candidates,
    )
    return Arrays(
        samples=log.ids[sequences.anchors][:, : layout.contexts],
        labels=np.where(is_real[:, None], log.labels[at], 0).astype(np.float32),
        weights=np.where(is_real, log.weights[at], 0).astype(np.float32),
        events=events,
    )


def _known(log: EventLog, layout: Layout, rows: Rows):
    """Returns ids and answers of the rows: no more than is known at each."""
    ids = log.ids[rows.event][:, layout.contexts :]
    ids[rows.is_candidate, ids.shape[1] - layout.actions :] = 0
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


class _Groups(NamedTuple):
    """Candidates with one history each.

    Attributes:
        first: the first candidate of each, in the order of user and time.
        sizes: candidates of each.
        starts: the first event of the history.
        counts: events of the history.
    """

    first: np.ndarray  # [G]
    sizes: np.ndarray  # [G]
    starts: np.ndarray  # [G]
    counts: np.ndarray  # [G]


def are_candidates(records: np.ndarray) -> np.ndarray:
    """Returns which records of an event log have no label."""
    return np.isnan(records["label"].reshape(len(records), -1)).all(axis=1)


def candidate_batches(
    past: np.ndarray, new: np.ndarray, layout: Layout, shapes: Sequence[Shape]
) -> Iterator[tuple[Arrays, Shape, np.ndarray]]:
    """Yields batches of the candidates, and their numbers among all candidates.

    Args:
        past: the records of known events, see `record_dtype_of`.
        new: those of the candidates, whose labels are not read. They may be known, too.
        layout: of the sequences that the model has learned from.
        shapes: of batches, in rising order; the last holds the longest sequence.
    """
    order = np.lexsort((new["time"], new["user"]))
    past, new = past[np.lexsort((past["time"], past["user"]))], new[order]
    new["label"] = 0  # a number
    log, largest = make_log([past, new], apart=True), shapes[-1]
    most = max(min(largest.targets, largest.rows - layout.longest + 1), 1)
    most = 1 if layout.one_candidate else most
    groups = _grouped(past, new, layout, most)
    lengths = layout.contexts + groups.counts * layout.rows_of_event + groups.sizes
    for part in _parts(groups.sizes, lengths, largest):
        own = _Groups(*(x[part] for x in groups))
        numbers = np.concatenate([*map(np.arange, own.first, own.first + own.sizes)])
        need = Shape(int(lengths[part].sum()), len(part), len(numbers))
        shape = next(shape for shape in shapes if np.less_equal(need, shape).all())
        size = shape.sequences
        sequences = Sequences(
            anchors=_padded(len(past) + own.first, size, len(past)),
            starts=_padded(own.starts, size, 0),
            counts=_padded(own.counts, size, 0),
            is_real=np.arange(size) < len(own.first),
            candidates=len(past) + numbers,
            num_candidates=_padded(own.sizes, size, 0),
        )
        rows = rows_of(sequences, layout)
        targets = np.flatnonzero(rows.is_last)
        batch = arrays_of(log, layout, sequences, rows, targets=targets, shape=shape)
        yield batch, shape, order[numbers]


def _grouped(past: np.ndarray, new: np.ndarray, layout: Layout, most: int) -> _Groups:
    """Returns the groups of candidates `new`, of at most so many each.

    Both are sorted by user and time.
    """
    _, time = np.unique(
        np.concatenate([past["time"], new["time"]]), return_inverse=True
    )
    _, user = np.unique(
        np.concatenate([past["user"], new["user"]]), return_inverse=True
    )
    of_past, of_new = np.split(user * (time.max(initial=0) + 1) + time, [len(past)])
    is_first = np.diff(of_new, prepend=-1) != 0
    run = np.maximum.accumulate(np.where(is_first, np.arange(len(new)), 0))
    is_first |= (np.arange(len(new)) - run) % most == 0
    first = np.flatnonzero(is_first)
    ends = np.searchsorted(of_past, of_new[first])  # of strictly earlier events
    begins = np.searchsorted(user[: len(past)], user[len(past) + first])
    # Models of windows have learned from the rows of a candidate's answers, too.
    counts = np.minimum(ends - begins, layout.history - layout.is_all)
    return _Groups(first, np.diff(first, append=len(new)), ends - counts, counts)


def _parts(sizes, lengths, largest: Shape) -> Iterator[np.ndarray]:
    """Yields the groups of each batch, of all lengths: batches of few shapes."""
    needs = np.stack([lengths, np.ones_like(sizes), sizes], axis=1)
    count = int(np.ceil(needs.sum(axis=0) / largest).max())
    turn, place = np.divmod(np.arange(len(sizes)), count)
    batch = np.abs(place - turn % 2 * (count - 1))  # to and fro
    order = np.argsort(-lengths, kind="stable")[np.argsort(batch, kind="stable")]
    for some in np.split(order, np.cumsum(np.bincount(batch))[:-1]):
        start, used = 0, 0
        for at, need in enumerate(needs[some]):
            if np.greater(used + need, largest).any():
                yield some[start:at]
                start, used = at, 0
            used = used + need
        yield some[start:]


def _padded(values: np.ndarray, count: int, fill) -> np.ndarray:
    """Returns the values with `fill` after them, `count` in all."""
    out = np.full((count, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out
