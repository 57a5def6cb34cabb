"""What every data source hands on: fixed-shape batches, their schema, a position.

B is the batch size, n the number of dense columns, F of categorical columns (fields).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int

Array = jax.Array | np.ndarray  # the host's from files, the device's when generated


class Batch(NamedTuple):
    """One batch of click logs; a pytree whose shapes never change within a run.

    Attributes:
        dense: float32, already transformed (finite); n may be 0.
        ids: int32 rows of each field's own table, `0 <= id < vocab_sizes[f]`.
        labels: float32, 0 or 1.
        weights: float32; 1 for an example, 0 for a row that only pads.
    """

    dense: Float[Array, "B n"]
    ids: Int[Array, "B F"]
    labels: Float[Array, "B"]
    weights: Float[Array, "B"]


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns of a data set.

    Attributes:
        label: name of the label column.
        dense: names of the dense columns, in the order of `Batch.dense`.
        categorical: names of the fields, in the order of `Batch.ids`.
        vocab_sizes: rows of each field's table. Row 0 is included: it stands for
            values that are missing or were not seen often enough in training.
    """

    label: str
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    vocab_sizes: tuple[int, ...]

    def __post_init__(self):
        """Checks that there are features, each with one role and one table size."""
        if not self.dense and not self.categorical:
            raise ValueError(
                "The data has no features: name at least one column with "
                "--data.dense or --data.categorical."
            )
        names = (self.label, *self.dense, *self.categorical)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"Column {twice[0]!r} is named more than once among label, dense and "
                "categorical columns: give each column one role."
            )
        if len(self.vocab_sizes) != len(self.categorical):
            raise ValueError(
                f"{len(self.vocab_sizes)} table sizes for {len(self.categorical)} "
                "categorical columns: give one size for each."
            )
        if not all(1 <= rows < 2**31 for rows in self.vocab_sizes):
            raise ValueError(f"{self.vocab_sizes=} must all lie in [1, 2^31).")


class Position(NamedTuple):
    """The whole state of a reader: the batch that comes next."""

    epoch: int
    step: int
    seed: int


@runtime_checkable
class Dataset(Protocol):
    """One split: a set of examples that can be read from any position."""

    @property
    def schema(self) -> Schema:
        """The columns and table sizes."""
        ...

    @property
    def num_examples(self) -> int:
        """The examples of one epoch."""
        ...

    def num_batches(self, batch_size: int) -> int:
        """Returns the batches of one epoch, a padded last one included."""
        ...

    def batch(self, position: Position, batch_size: int, *, shuffle: bool) -> Batch:
        """Returns the batch at `position`, a pure function of the arguments."""
        ...


def num_batches(num_examples: int, batch_size: int) -> int:
    """Returns ceil(num_examples / batch_size)."""
    if not batch_size >= 1:
        raise ValueError(f"{batch_size=} must be at least 1.")
    return -(-num_examples // batch_size)


def next_position(position: Position, batches_per_epoch: int) -> Position:
    """Returns the position after `position`; an epoch's end starts the next."""
    epoch, step, seed = position
    if step + 1 < batches_per_epoch:
        return Position(epoch, step + 1, seed)
    return Position(epoch + 1, 0, seed)
