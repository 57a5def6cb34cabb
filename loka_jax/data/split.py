"""The rows of the files of a conversion, and which split each belongs to.

Of the training file's rows, the hashed or the latest ones are for validation. A rule is
asked block by block, in both passes over the file, and gives the same answer whatever
the size of the blocks.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from loka_jax.data.blocks import BadRows, Block
from loka_jax.data.config import DataConfig, columns_of, features_of
from loka_jax.data.files import Sources, filters_of, reader_of
from loka_jax.data.places import DataFile, listed, shown
from loka_jax.data.reader import key_of, mix
from loka_jax.data.values import is_positive, parse_labels, parse_times
from loka_jax.terminal import clip

_SPLIT, _KEEP = 0, 1  # streams of hashed row numbers


class SplitReader:
    """Reads the files, as often as needed, and gives every row its split."""

    def __init__(
        self, config: DataConfig, sources: Sources, progress: Callable[[str, int], None]
    ):
        """Opens nothing yet; `progress` takes a stage and the number of rows read."""
        if not sources.valid and not config.valid_fraction > 0:
            raise ValueError(
                "There are no validation rows: name a file with --data.valid, or set "
                "--data.valid-fraction above 0."
            )
        if sources.valid and config.time is not None and not config.is_log:
            raise ValueError(
                f"{names_of(sources.valid)} holds the validation rows, so that none "
                "are split off by time: leave out --data.time, or that file."
            )
        self._config, self._sources, self._progress = config, sources, progress
        self._labels = columns_of(config).labels
        names = config.user, config.time, config.weight
        further = [name for name in names if name is not None]
        self._filters = filters_of(config)
        columns = (*self._labels, *features_of(config), *further)
        self._columns = tuple(dict.fromkeys(columns))
        self._by_time: SplitByTime | None = None

    def learn_rule(self) -> None:
        """Finds where validation begins, if rows are split by time."""
        column = self._config.time
        if column is None or self._sources.valid:
            return
        bad_rows = BadRows(self._config.max_bad_rows)
        parts = self._read(("train",), (column,), bad_rows, "reading times")
        blocks = (block for _, _, block in parts)
        self._by_time = split_by_time(blocks, column, self._config.valid_fraction)

    def rule(self) -> str:
        """Returns a phrase that says which rows are the validation rows."""
        if self._sources.valid:
            which = self._config.valid if "valid" in self._filters else None
            which = which or names_of(self._sources.valid)
            return f"validation rows are those of {which}"
        if self._by_time is not None:
            return self._by_time.phrase()
        return (
            f"validation rows are the fraction {self._config.valid_fraction:g} of the "
            "training file's rows with the lowest hashed row number (SplitMix64)"
        )

    def blocks(
        self, splits: tuple[str, ...], bad_rows: BadRows, stage: str
    ) -> Iterator[tuple[str, Block]]:
        """Yields each block with its split, without the negatives that are not kept."""
        rate = self._config.keep_negatives
        for split, first, block in self._read(splits, self._columns, bad_rows, stage):
            if split != "train":
                yield split, block
                continue
            number = np.arange(first, first + len(block.rows))
            if self._sources.valid:
                is_valid = np.zeros(len(number), bool)
            elif self._by_time is not None:
                is_valid = self._by_time.is_valid(block)
            else:
                is_valid = hashed(number, _SPLIT) < self._config.valid_fraction
            is_train = ~is_valid
            if rate < 1:
                is_kept = hashed(number, _KEEP) < rate
                is_train &= is_kept | is_positive(parse_labels(block, self._labels))
            for part, chosen in (("train", is_train), ("valid", is_valid)):
                if part in splits and chosen.any():
                    yield part, block.filter(chosen)

    def _read(
        self,
        splits: tuple[str, ...],
        columns: tuple[str, ...],
        bad_rows: BadRows,
        stage: str,
    ) -> Iterator[tuple[str, int, Block]]:
        """Yields the files' blocks with their split and the number of the first row."""
        read = 0
        for split in splits:
            done = 0  # rows read of this split's files
            for path in getattr(self._sources, split):
                for block in self._blocks_of(path, columns, bad_rows):
                    read += len(block.rows)
                    self._progress(stage, read)
                    block = self._filtered(split, path, block)
                    if len(block.rows):
                        yield split, done, block
                    done += len(block.rows)

    def _blocks_of(
        self, path: DataFile, columns: tuple[str, ...], bad_rows: BadRows
    ) -> Iterator[Block]:
        """Yields the blocks of a file, with the columns of filters."""
        compared = (name for x in self._filters.values() for name in x.columns)
        columns = tuple(dict.fromkeys((*columns, *compared)))
        return reader_of(self._config, path)(str(path), columns, bad_rows)

    def _filtered(self, split: str, path: DataFile, block: Block) -> Block:
        """Returns the rows of a block that are of a split.

        Raises:
            ValueError: if one of them is of another split, too.
        """
        if not self._filters:
            return block
        masks = {
            name: self._filters[name].mask(block)
            if name in self._filters
            else np.ones(len(block.rows), bool)
            for name, paths in self._sources._asdict().items()
            if path in paths
        }
        for name, mask in masks.items():
            if name != split and (both := mask & masks[split]).any():
                row = block.rows[np.argmax(both)]
                raise ValueError(
                    f"{path} row {row} is of the {split} and of the {name} rows: "
                    "give --data.train, --data.valid and --data.test filters that "
                    "have no row in common."
                )
        return block.filter(masks[split])


def names_of(paths: tuple[DataFile, ...]) -> str:
    """Returns the files' names, for a message."""
    return listed([shown(path) for path in paths])


class SplitByTime(NamedTuple):
    """Validation rows are those of a time or later: rows of one time stay together.

    Attributes:
        since: the first time of the validation rows.
        until: the last time of the training rows.
        is_date: times are microseconds since 1970, read from dates.
    """

    column: str
    since: float
    until: float
    share: float
    is_date: bool

    def is_valid(self, block: Block) -> np.ndarray:
        """Returns a mask of the validation rows."""
        return parse_times(block, self.column)[0] >= self.since

    def phrase(self) -> str:
        """Returns the rule in words, for the output and the report."""
        since, until = (_shown(time, self.is_date) for time in (self.since, self.until))
        return (
            f"validation rows are the last {self.share:.2%} of the training file's "
            f"rows by {self.column!r}: those from {since} on, while the training rows "
            f"end at {until}"
        )


def hashed(row: np.ndarray, stream: int) -> np.ndarray:
    """Returns numbers in [0, 1), a hash of row numbers; streams are independent."""
    mixed = mix(row.astype(np.uint64) ^ key_of(stream))
    # 53 bits, so that a comparison is exact in float64.
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def split_by_time(blocks: Iterable[Block], column: str, fraction: float) -> SplitByTime:
    """Returns the rule that makes about the last `fraction` of the rows validation.

    With the times sorted, `since = times[n - round(fraction n)]`, at least the second
    one; the rows of that time are all for validation. It takes 8 bytes a row.
    """
    parts, kinds, file = [np.empty(0)], set(), ""
    for block in blocks:
        values, is_date = parse_times(block, column)
        parts.append(values)
        kinds.add(is_date)
        file = block.file
        if len(kinds) > 1:
            raise ValueError(
                f"{file} column {column!r} holds numbers in some rows and dates in "
                "others: write all times alike, or leave out --data.time."
            )
    times = np.sort(np.concatenate(parts))
    if not times.size or times[0] == times[-1]:
        raise ValueError(
            f"{file} column {column!r} has one time in all rows, so there is no last "
            "part: name another column with --data.time, or leave it out."
        )
    at = min(len(times) - round(fraction * len(times)), len(times) - 1)
    first = int(np.searchsorted(times, times[at], "left"))
    if not first:
        first = int(np.searchsorted(times, times[0], "right"))
    since, until = float(times[first]), float(times[first - 1])
    share = (len(times) - first) / len(times)
    return SplitByTime(column, since, until, share, kinds.pop())


def _shown(time: float, is_date: bool) -> str:
    if is_date:
        return str(np.datetime64(int(time), "us")).removesuffix(".000000")
    return clip(f"{time:.0f}" if time.is_integer() else repr(time))
