"""Reads batches from memory-mapped shards, from any position, shuffled or in order."""

import numpy as np

from loka_jax.data import batch as batch_lib
from loka_jax.data.batch import WHOLE, Bag, Batch, Part, Position, Schema
from loka_jax.data.permutation import key_of, permute
from loka_jax.data.shards import record_dtype_of


class ShardDataset:
    """One split of a folder of shards.

    Every batch is a pure function of (position, batch size): the shuffle is global
    and computed index by index, so that resuming costs nothing.

    Attributes:
        schema: the columns and table sizes.
        num_examples: the number of rows in all shards together.
    """

    def __init__(self, schema: Schema, shards: list[np.ndarray], name: str):
        """Reads records of `record_dtype`; `name` is for messages.

        Raises:
            ValueError: if there are no rows.
        """
        self.schema = schema
        self._name = name
        # Viewed as int32 words, a row is gathered by one copy, whatever its columns.
        self._words = [shard.view(np.int32).reshape(len(shard), -1) for shard in shards]
        self._ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)
        self.num_examples = int(self._ends[-1]) if shards else 0
        if not self.num_examples:
            raise ValueError(f"{name} has no rows: name a file that has some.")
        self._places = _places(schema)
        self._vocab_sizes = np.asarray(schema.vocab_sizes, np.int32)

    def num_batches(self, batch_size: int) -> int:
        """Returns the number of batches in one epoch, counting a padded last one."""
        return batch_lib.num_batches(self.num_examples, batch_size)

    def batch(
        self,
        position: Position,
        batch_size: int,
        *,
        shuffle: bool,
        part: Part = WHOLE,
    ) -> Batch:
        """Returns a part of the batch at `position`, in host memory.

        Args:
            position: seed and epoch determine the order, the step a place in it.
            batch_size: rows of the batch. The last one is padded with the epoch's first
                rows at zero weight: real rows, so that batch norm is not misled.
            shuffle: if false, rows come in the order of the files, whatever the seed
                and the epoch.
            part: the slice of the batch to read; the others are not touched.

        Raises:
            ValueError: if the step, a stored id or a label is out of range.
        """
        batches = self.num_batches(batch_size)
        if not 0 <= position.step < batches:
            raise ValueError(f"{position.step=} must lie in [0, {batches}).")
        start = position.step * batch_size
        places = start + np.asarray(part.rows(batch_size))
        index = places % self.num_examples
        if shuffle:
            key = key_of(position.seed, position.epoch)
            index = permute(index, self.num_examples, key)
        weights = (places < self.num_examples).astype(np.float32)
        return self._split_columns(self._gather(index), weights)

    def _gather(self, index: np.ndarray) -> np.ndarray:
        """Returns the rows at `index`, in that order, as int32 words."""
        if len(self._words) == 1:
            return self._words[0].take(index, axis=0)
        out = np.empty((len(index), self._words[0].shape[1]), np.int32)
        shard_of = np.searchsorted(self._ends, index, side="right")
        for shard in np.unique(shard_of):
            (where,) = np.nonzero(shard_of == shard)
            words = self._words[shard]
            first = self._ends[shard] - len(words)
            out[where] = words.take(index[where] - first, axis=0)
        return out

    def _split_columns(self, words: np.ndarray, weights: np.ndarray) -> Batch:
        places = self._places
        floats = words.view(np.float32)
        ids = np.ascontiguousarray(words[:, places["ids"]])
        self._check_ids(ids)
        labels = floats[:, places["label"]].copy()
        if len(self.schema.labels) == 1:
            labels = labels[:, 0]
        self._check_labels(labels)
        if self.schema.weighted:
            weights = weights * floats[:, places["weight"]].ravel()
            self._check_weights(weights)
        dense = np.ascontiguousarray(floats[:, places["dense"]])
        bags = tuple(self._bag(words, field) for field in range(len(self.schema.slots)))
        return Batch(dense, ids, labels, weights, bags)

    def _bag(self, words: np.ndarray, field: int) -> Bag:
        """Returns a multi-valued field's ids and, if they have some, their weights."""
        ids = np.ascontiguousarray(words[:, self._places[f"bag_{field}"]])
        column = len(self.schema.categorical) + field
        # -1 is padding; any other negative number is a huge unsigned one, again.
        outside = (ids + 1).view(np.uint32) > np.uint32(self._vocab_sizes[column])
        if outside.any():
            self._refuse_id(int(ids[outside][0]), column)
        place = self._places.get(f"bag_weights_{field}")
        if place is None:
            return Bag(ids, None)
        weights = np.ascontiguousarray(words.view(np.float32)[:, place])
        self._check_weights(weights)
        return Bag(ids, weights)

    def _check_weights(self, weights: np.ndarray) -> None:
        """Raises ValueError for a weight that is negative or not finite."""
        wrong = ~((weights >= 0) & (weights < np.inf))
        if wrong.any():
            raise ValueError(
                f"{self._name} holds the weight {weights[wrong][0]:g}, where "
                "only finite ones of 0 or more are allowed: convert the data again."
            )

    def _check_labels(self, labels: np.ndarray) -> None:
        """Raises ValueError for a label that is not 0 or 1."""
        wrong = (labels != 0) & (labels != 1)
        if labels.ndim == 2:
            wrong &= ~np.isnan(labels)
        if wrong.any():
            raise ValueError(
                f"{self._name} holds the label {labels[wrong][0]:g}, where "
                "only 0 and 1 are allowed: convert the data again."
            )

    def _check_ids(self, ids: np.ndarray) -> None:
        """Raises ValueError for an id outside its table, which JAX would not notice."""
        # A negative id is a huge unsigned number: one comparison catches both.
        sizes = self._vocab_sizes[: ids.shape[1]]
        outside = ids.view(np.uint32) >= sizes.view(np.uint32)
        if outside.any():
            row, field = np.argwhere(outside)[0]
            self._refuse_id(int(ids[row, field]), int(field))

    def _refuse_id(self, bad_id: int, field: int) -> None:
        raise ValueError(
            f"{self._name} column {self.schema.fields[field]!r} holds id {bad_id}, "
            f"outside its table of {self._vocab_sizes[field]} rows: convert the data "
            "again."
        )


def _places(schema: Schema) -> dict[str, slice]:
    """Returns where each part of a record lies, in words of 4 bytes."""
    parts = record_dtype_of(schema).fields or {}
    return {
        name: slice(offset // 4, (offset + kind.itemsize) // 4)
        for name, (kind, offset, *_) in parts.items()
    }
