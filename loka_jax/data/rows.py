"""The rows of the files of a conversion: which split each belongs to."""

import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from loka_jax.data import table
from loka_jax.data.blocks import BadRows, Block
from loka_jax.data.config import DataConfig
from loka_jax.data.files import Sources
from loka_jax.data.settings import columns_of
from loka_jax.data.split import SplitAtRandom, SplitRule, hashed, split_by_time
from loka_jax.data.values import is_positive, parse_labels

_KEEP = 1  # the stream of hashed row numbers that decides; 0 splits


class Rows:
    """Reads the files, as often as needed, and gives every row its split."""

    def __init__(
        self,
        config: DataConfig,
        sources: Sources,
        columns: tuple[str, ...],
        progress: Callable[[str, int], None],
    ):
        """Opens nothing yet.

        Args:
            config: the kind of the files and the split rule.
            sources: the files.
            columns: the columns to read, the labels among them.
            progress: called with the stage's name and the number of rows read so far.

        Raises:
            ValueError: if no rows would be for validation, or twice.
        """
        if not sources.valid and not config.valid_fraction > 0:
            raise ValueError(
                "There are no validation rows: name a file with --data.valid, or set "
                "--data.valid-fraction above 0."
            )
        if sources.valid and config.time is not None:
            raise ValueError(
                f"{names_of(sources.valid)} holds the validation rows, so that none "
                "are split off by time: leave out --data.time, or that file."
            )
        self._config, self._sources, self._progress = config, sources, progress
        further = [name for name in (config.time, config.weight) if name is not None]
        self._columns = tuple(dict.fromkeys((*columns, *further)))
        self._labels = columns_of(config).labels
        self._split: SplitRule = SplitAtRandom(config.valid_fraction)

    def learn_split(self) -> None:
        """Finds where validation begins, if rows are split by time."""
        column = self._config.time
        if column is None:
            return
        bad_rows = BadRows(self._config.max_bad_rows)
        parts = self._read(("train",), (column,), bad_rows, "reading times")
        blocks = (block for _, _, block in parts)
        self._split = split_by_time(blocks, column, self._config.valid_fraction)

    def split_rule(self) -> str:
        """Returns a phrase that says which rows are the validation rows."""
        if self._sources.valid:
            return f"validation rows are those of {names_of(self._sources.valid)}"
        return self._split.phrase()

    def blocks(
        self, splits: tuple[str, ...], bad_rows: BadRows, stage: str
    ) -> Iterator[tuple[str, Block]]:
        """Yields each block with its split, without the negatives that are not kept."""
        for split, first, block in self._read(splits, self._columns, bad_rows, stage):
            if split != "train":
                yield split, block
                continue
            is_train, is_valid = self._masks(block, first)
            for part, chosen in (("train", is_train), ("valid", is_valid)):
                if part in splits and chosen.any():
                    yield part, _chosen(block, chosen)

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
                read_file = table.reader_of(self._config, path)
                for block in read_file(str(path), columns, bad_rows):
                    rows = block.table.num_rows
                    read += rows
                    self._progress(stage, read)
                    yield split, done, block
                    done += rows

    def _masks(self, block: Block, first: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns which of the training file's rows are for training and validation."""
        rows = block.table.num_rows
        is_valid = np.zeros(rows, bool)
        if not self._sources.valid:
            is_valid = self._split.is_valid(block, first)
        if (rate := self._config.keep_negatives) == 1:
            return ~is_valid, is_valid
        is_kept = hashed(np.arange(first, first + rows), _KEEP) < rate
        is_kept |= is_positive(parse_labels(block, self._labels))
        return ~is_valid & is_kept, is_valid


def _chosen(block: Block, chosen: np.ndarray) -> Block:
    if chosen.all():
        return block
    return Block(block.table.filter(pa.array(chosen)), block.rows[chosen], block.file)


def names_of(paths: tuple[pathlib.Path, ...]) -> str:
    """Returns the files' names, for a message."""
    return ", ".join(path.name for path in paths)
