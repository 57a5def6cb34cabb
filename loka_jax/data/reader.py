"""Reads batches from records, from any position, shuffled or in order.

The shuffle is computed index by index, without a table: a Feistel network permutes the
numbers of `bits` bits, keyed by (seed, epoch); results at or beyond `size` are permuted
again until they fall below it (cycle walking). It needs no memory, start-up time or
state, whether there are ten rows or a billion.
"""

import numpy as np

from loka_jax.data.batch import (
    WHOLE,
    Bag,
    Batch,
    Dataset,
    Part,
    Position,
    Schema,
    examples_of,
)


def record_dtype_of(schema: Schema) -> np.dtype:
    """Returns the type of one row: numbers of 4 bytes without gaps.

    After the labels, dense columns and ids come the example's weight, the ids of each
    multi-valued field, and the weights of those values that have some. A row of an
    event log ends with its user's key and its time in seconds, of 8 bytes each.
    """
    tasks = len(schema.labels)
    label = ("label", "<f4") if tasks == 1 else ("label", "<f4", (tasks,))
    dense = ("dense", "<f4", (len(schema.dense),))
    ids = ("ids", "<i4", (len(schema.categorical),))
    weight = [("weight", "<f4")] if schema.weighted else []
    lists = [(f"bag_{i}", "<i4", (slots,)) for i, slots in enumerate(schema.slots)]
    weights = [
        (f"bag_weights_{i}", "<f4", (slots,))
        for i, slots in enumerate(schema.slots)
        if schema.multi[i] in schema.weighted_multi
    ]
    event = [] if schema.user is None else [("user", "<i8"), ("time", "<f8")]
    return np.dtype([label, dense, ids, *weight, *lists, *weights, *event])


class ShardDataset(Dataset):
    """One split of a folder of shards, or any records of `record_dtype_of(schema)`.

    Every batch is a pure function of (position, batch size), so that resuming costs
    nothing.
    """

    def __init__(self, schema: Schema, records: np.ndarray, name: str):
        """Reads records, which are one or more; `name` is for messages."""
        self.schema, self.num_examples = schema, len(records)
        self._name = name
        # Viewed as int32 words, a row is gathered by one copy, whatever its columns.
        self._words = records.view(np.int32).reshape(len(records), -1)
        self._places = _places(schema)
        self._vocab_sizes = np.asarray(schema.vocab_sizes, np.int32)

    def batch(
        self, position: Position, batch_size: int, *, shuffle: bool, part: Part = WHOLE
    ) -> Batch:
        """Returns a part of the batch at `position`, in host memory.

        Seed and epoch determine the order, the step a place in it; if not shuffled,
        rows come in the order of the files. The last batch is padded with the epoch's
        first rows at zero weight: real rows, so that batch norm is not misled.

        Raises:
            ValueError: if the step, a stored id or a label is out of range.
        """
        places = np.asarray(examples_of(self, position, batch_size, part))
        index = places % self.num_examples
        if shuffle:
            key = key_of(position.seed, position.epoch)
            index = permute(index, self.num_examples, key)
        weights = (places < self.num_examples).astype(np.float32)
        return self._split_columns(self._words.take(index, axis=0), weights)

    def _split_columns(self, words: np.ndarray, weights: np.ndarray) -> Batch:
        places = self._places
        floats = words.view(np.float32)
        ids = self._ids(words, "ids", 0)
        if not self.schema.fields:
            ids = np.zeros((len(words), 1), np.int32)  # of `table_rows`
        labels = floats[:, places["label"]].copy()
        if len(self.schema.labels) == 1:
            labels = labels[:, 0]
        is_none = np.isnan(labels) if labels.ndim == 2 else False  # of several tasks
        self._check("label", labels, (labels == 0) | (labels == 1) | is_none, "0 and 1")
        if self.schema.weighted:
            weights = weights * floats[:, places["weight"]].ravel()
            self._check_weights(weights)
        dense = np.ascontiguousarray(floats[:, places["dense"]])
        bags = tuple(self._bag(words, field) for field in range(len(self.schema.slots)))
        return Batch(dense, ids, labels, weights, bags)

    def _bag(self, words: np.ndarray, number: int) -> Bag:
        """Returns a multi-valued field's ids and, if they have some, their weights."""
        column = len(self.schema.categorical) + number
        ids = self._ids(words, f"bag_{number}", column, padding=1)
        place = self._places.get(f"bag_weights_{number}")
        if place is None:
            return Bag(ids, None)
        weights = np.ascontiguousarray(words.view(np.float32)[:, place])
        self._check_weights(weights)
        return Bag(ids, weights)

    def _ids(
        self, words: np.ndarray, part: str, first: int, padding: int = 0
    ) -> np.ndarray:
        """Returns ids of the fields from `first` on, after a check JAX would not make.

        `padding` is 1 where the id -1 is none, as in places that a list does not fill.
        """
        ids = np.ascontiguousarray(words[:, self._places[part]])
        width = 1 if padding else ids.shape[1]
        sizes = self._vocab_sizes[first : first + width]
        # A negative id is a huge unsigned number: one comparison catches both.
        outside = (ids + padding).view(np.uint32) >= (sizes + padding).view(np.uint32)
        if outside.any():
            row, place = np.argwhere(outside)[0]
            field = first if padding else place
            raise ValueError(
                f"{self._name} column {self.schema.fields[field]!r} holds id "
                f"{ids[row, place]}, outside its table of {self._vocab_sizes[field]} "
                "rows: convert the data again."
            )
        return ids

    def _check_weights(self, weights: np.ndarray) -> None:
        is_right = (weights >= 0) & (weights < np.inf)
        self._check("weight", weights, is_right, "finite ones of 0 or more")

    def _check(self, what: str, values: np.ndarray, is_right, allowed: str) -> None:
        if not is_right.all():
            raise ValueError(
                f"{self._name} holds the {what} {values[~is_right][0]:g}, where only "
                f"{allowed} are allowed: convert the data again."
            )


def _places(schema: Schema) -> dict[str, slice]:
    """Returns where each part of a record lies, in words of 4 bytes."""
    parts = record_dtype_of(schema).fields or {}
    return {
        name: slice(offset // 4, (offset + kind.itemsize) // 4)
        for name, (kind, offset, *_) in parts.items()
    }


_ROUNDS = 6
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


def mix(x: np.ndarray) -> np.ndarray:
    """Returns a well mixed 64-bit hash of each uint64, bijectively.

    References:
        Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014
        (the finalizer of SplitMix64).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*numbers: int) -> np.uint64:
    """Returns a 64-bit key made from several numbers; their order matters."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        word = np.array([number % 2**64], np.uint64)
        state = mix((state + _MULTIPLIER) ^ mix(word + _MULTIPLIER))
    return state[0]


def permute(
    index: np.ndarray, size: int | np.ndarray, key: np.uint64 | np.ndarray
) -> np.ndarray:
    """Returns the image of each index under a permutation of `range(size)`, int64.

    Args:
        index: int64, each in [0, size).
        size: of all, or of each.
        key: of the permutation: one of all, or one of each.
    """
    bits = max(2, int(np.max(size, initial=1) - 1).bit_length())
    rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _MULTIPLIER
    keys = mix(rounds[:, None] ^ key)  # one column, or one of each
    out = _feistel(index.astype(np.uint64), bits, keys)
    sizes = np.broadcast_to(size, index.shape)
    outside = np.flatnonzero(out >= sizes)
    while len(outside):
        own = keys[:, outside] if np.ndim(key) else keys
        out[outside] = _feistel(out[outside], bits, own)
        outside = outside[out[outside] >= sizes[outside]]
    return out.astype(np.int64)


def stratified(
    epoch: np.uint64, step: int, batch_size: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the examples of a batch, one of each stratum, and which are no padding.

    The strata are `batch_size` equal ranges of the `count` examples. An epoch takes
    each example once; its last batch has none of the strata that are smaller by one.

    Args:
        epoch: the key of its permutations.
        step: of the epoch.
    """
    bounds = np.arange(batch_size + 1) * count // batch_size
    sizes = np.diff(bounds)
    is_real = step < sizes
    keys = mix(np.arange(1, batch_size + 1, dtype=np.uint64) ^ epoch)
    places = np.full(int(is_real.sum()), step)
    taken = permute(places, sizes[is_real], keys[is_real])
    index = np.zeros(batch_size, np.int64)
    index[is_real] = bounds[:-1][is_real] + taken
    return index, is_real


def _feistel(x: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Permutes the numbers of `bits` bits; the halves may be of unequal width."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    for key in keys:
        left = x >> np.uint64(right_bits)
        right = x & np.uint64((1 << right_bits) - 1)
        left ^= mix(right ^ key) >> np.uint64(64 - left_bits)
        x = (right << np.uint64(left_bits)) | left
        left_bits, right_bits = right_bits, left_bits
    return x
