"""Types shared by all data sources: fixed-shape batches, schema, reader position.

B is the batch size, n the number of dense columns, F the number of categorical columns
(fields), T the number of tasks: label columns. Of an event log: C rows (tokens) of all
histories together, N labels, P fields of a sample, K fields of an event.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int

MAX_SLOTS = 1024  # values in a list
Array = jax.Array | np.ndarray  # NumPy if read from files, on the device if generated


class Bag(NamedTuple):
    """The values of a multi-valued field, padded to H of them.

    Attributes:
        ids: int32, rows in the field's table; -1 where a list is shorter than H.
        weights: float32, of each value; None if all are 1.
    """

    ids: Int[Array, "B H"]
    weights: Float[Array, "B H"] | None


class Events(NamedTuple):
    """The jagged sequences of a batch of an event log: rows, with offsets.

    Sequence b is the rows `offsets[b]` to `offsets[b + 1]`, the oldest first; one of
    padding has none. A row is an event with its answers, or without (a candidate, whose
    answers are to be predicted). The first P rows of a sequence hold no event, but are
    left for the fields of the sample.

    Attributes:
        ids: int32, rows in each field's table; -1 where there is no event, and 0 of
            what is known of an event once it has happened, at a candidate.
        answers: int32, 0 unknown, 1 for the label 0, 2 for the label 1.
        positions: int32, rows before the candidates of the sequence; from its first
            where the model has learned from candidates among the events.
        ages: float32, seconds before the candidates, 0 or more; since the event before
            where positions count from the first row.
        offsets: int32.
        targets: int32, the row of each label; 0 of padding.
        contextual: int32, rows at the start of each sequence that see its history;
            None for none, as where candidates stand among the events.
        candidates: int32, rows at the end of each sequence that do not see each other;
            None where candidates stand among the events.
    """

    ids: Int[Array, "C K"]
    answers: Int[Array, "C T"]
    positions: Int[Array, "C"]
    ages: Float[Array, "C"]
    offsets: Int[Array, " B_plus_1"]
    targets: Int[Array, "N"]
    contextual: Int[Array, "B"] | None
    candidates: Int[Array, "B"] | None


class Batch(NamedTuple):
    """One batch of click logs; a pytree whose shapes never change within a run.

    Attributes:
        dense: float32, already transformed (finite); n may be 0.
        ids: int32, the row in each field's table, `0 <= id < vocab_sizes[f]`.
        labels: float32, 0 or 1; [B, T] of several tasks, NaN where a row has no label.
        weights: float32; 0 for a padding row, 1 for an example unless the data are
            weighted.
        bags: the multi-valued fields, in the order of `Schema.multi`.
        events: the sequences of an event log, of which `ids` has the fields of the
            sample, and `labels` and `weights` one entry for each target.
    """

    dense: Float[Array, "B n"]
    ids: Int[Array, "B F"]
    labels: Float[Array, "B"] | Float[Array, "B T"]
    weights: Float[Array, "B"]
    bags: tuple[Bag, ...] = ()
    events: Events | None = None


def ids_of_labels(batch: Batch) -> Int[np.ndarray, "N F"]:
    """Returns the ids of the fields at each label of a batch in host memory."""
    if batch.events is None:
        return np.asarray(batch.ids)
    # The part of each device has an offset more than sequences.
    devices = len(batch.events.offsets) - len(batch.ids)
    found = []
    for i in range(devices):
        part = jax.tree.map(lambda x, i=i: np.split(x, devices)[i], batch)
        events = part.events
        samples = np.searchsorted(events.offsets, events.targets, "right") - 1
        samples = np.minimum(samples, len(part.ids) - 1)
        of_events = events.ids[events.targets]
        found.append(np.concatenate([part.ids[samples], of_events], axis=1))
    return np.concatenate(found)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The names of the columns by role, in the order of a batch's arrays.

    Attributes:
        label: the label column, the first if there are several.
        categorical: the fields with one value.
        multi: the multi-valued fields.
        further_labels: the label columns after the first.
        user: of an event log, the column of its users; None for examples apart.
        context: the fields of a sample, the first of `categorical`.
        actions: the last of `categorical`: known once an event has happened.
    """

    label: str
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    multi: tuple[str, ...] = ()
    further_labels: tuple[str, ...] = ()
    user: str | None = None
    context: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """The label columns, each a task, in the order of T."""
        return (self.label, *self.further_labels)

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields, in the order of their tables."""
        return (*self.categorical, *self.multi)


@dataclass(frozen=True, kw_only=True)
class Schema(Columns):
    """The columns of a data set, and what the model must know of them.

    Attributes:
        vocab_sizes: number of rows of each field's table, including row 0, which
            stands for values that are missing or too rare in training; first those of
            `categorical`, then those of `multi`.
        owners: the field whose table each field uses; () if each has its own.
        slots: H, the most values in a list of each multi-valued field.
        weighted_multi: those of `multi` whose values have weights.
        weighted: whether examples have weights other than 1.
    """

    vocab_sizes: tuple[int, ...]
    owners: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    weighted_multi: tuple[str, ...] = ()
    weighted: bool = False

    @property
    def table_rows(self) -> tuple[int, ...]:
        """The rows of each table of a model.

        Without fields it has one row, the same for all examples: a batch's ids are 0.
        """
        return self.vocab_sizes or (1,)

    @property
    def tables(self) -> tuple[int, ...]:
        """The number of the field whose table each field uses."""
        return tuple(self.fields.index(name) for name in self.owners or self.fields)

    def __post_init__(self):
        """Checks that each feature has exactly one role and each field a table size."""
        if not self.dense and not self.fields:
            raise ValueError(
                "The data has no features: name at least one column with "
                "--data.dense or --data.categorical."
            )
        names = (*self.labels, *self.dense, *self.fields)
        repeated = sorted(name for name, n in Counter(names).items() if n > 1)
        if repeated:
            raise ValueError(
                f"Column {repeated[0]!r} is named more than once among label, dense, "
                "categorical and multi columns: give each column one role."
            )
        if len(self.vocab_sizes) != len(self.fields):
            raise ValueError(
                f"{len(self.vocab_sizes)} table sizes for {len(self.fields)} "
                "categorical columns: give one size for each."
            )
        are_slots = all(1 <= slots <= MAX_SLOTS for slots in self.slots)
        if len(self.slots) != len(self.multi) or not are_slots:
            raise ValueError(
                f"slots {self.slots} must have a number in 1..{MAX_SLOTS} for each of "
                f"{len(self.multi)} multi columns."
            )
        if not set(self.weighted_multi) <= set(self.multi):
            raise ValueError(f"{self.weighted_multi=} must be among {self.multi=}.")
        sizes = dict(zip(self.fields, self.vocab_sizes, strict=True))
        if self.owners and [sizes.get(o) for o in self.owners] != [*sizes.values()]:
            raise ValueError(
                f"{self.owners=} must name, for each field, one with as many rows."
            )
        for name, rows in sizes.items():
            if not 1 <= rows < 2**31:
                raise ValueError(
                    f"The table of column {name!r} has {rows} rows: give it 1 or more, "
                    "and fewer than 2^31."
                )


class Position(NamedTuple):
    """The next batch to read; a reader has no other state."""

    epoch: int
    step: int
    seed: int


class Part(NamedTuple):
    """A slice of each batch, of `count` equal ones: what a process reads of it."""

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int) -> range:
        """Returns the rows of a batch in the part, `B i / P` to `B (i + 1) / P`."""
        if batch_size % self.count:
            raise ValueError(
                f"--loop.batch-size {batch_size} must be a multiple of the "
                f"{self.count} processes: change it, or use fewer processes."
            )
        size = batch_size // self.count
        return range(self.index * size, (self.index + 1) * size)


WHOLE = Part()


@runtime_checkable
class Dataset(Protocol):
    """One split: a set of examples that can be read from any position."""

    schema: Schema
    num_examples: int

    def num_batches(self, batch_size: int) -> int:
        """Returns the number of batches in one epoch, counting a padded last one."""
        if not batch_size >= 1:
            raise ValueError(f"{batch_size=} must be at least 1.")
        return -(-self.num_examples // batch_size)

    def batch(
        self, position: Position, batch_size: int, *, shuffle: bool, part: Part = WHOLE
    ) -> Batch:
        """Returns a part of the batch at `position`, a pure function of the arguments.

        `batch_size` is that of the whole batch.
        """
        ...


def examples_of(
    dataset: Dataset, position: Position, batch_size: int, part: Part
) -> range:
    """Returns the numbers in the epoch of the examples of a part of a batch.

    Those from `num_examples` on are padding.
    """
    batches = dataset.num_batches(batch_size)
    if not 0 <= position.step < batches:
        raise ValueError(f"{position.step=} must lie in [0, {batches}).")
    rows, start = part.rows(batch_size), position.step * batch_size
    return range(start + rows.start, start + rows.stop)


def next_position(position: Position, batches_per_epoch: int) -> Position:
    """Returns the position after `position`, in the next epoch after the last batch."""
    epoch, step, seed = position
    if step + 1 < batches_per_epoch:
        return Position(epoch, step + 1, seed)
    return Position(epoch + 1, 0, seed)


def event_rows(batch: Batch) -> int | None:
    """Returns the rows of a batch of an event log; those of others are all alike."""
    return None if batch.events is None else len(batch.events.ids)


def alike(pairs: Sequence[tuple[Position, Batch]]) -> list[Sequence]:
    """Returns the batches of a call, apart if their events have other rows.

    Each mix of shapes would be a program to compile.
    """
    rows = {event_rows(batch) for _, batch in pairs}
    return [pairs] if len(rows) == 1 else [[pair] for pair in pairs]
