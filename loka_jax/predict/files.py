"""Scores a file of any size, in constant memory, to a file that is whole or absent."""

import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import csv, parquet

from loka_jax.data.blocks import BadRows, Block
from loka_jax.data.config import DataConfig
from loka_jax.data.files import find_files, reader_of, unchanged
from loka_jax.data.filters import Filter, parse_filter
from loka_jax.data.places import DataFile, stamp_of
from loka_jax.data.values import Counts
from loka_jax.options import require_folder
from loka_jax.predict.predictor import MEANT, Predictor

SCORE = "score"
_WRITERS = {".csv": csv.CSVWriter, ".parquet": parquet.ParquetWriter}


class Scored(NamedTuple):
    """The result of scoring a file.

    Attributes:
        bad_rows: rows that were left out for a wrong number of columns.
        seconds: the time it took, compilation included.
        counts: the values that a policy applied to, by kind, in total (`totals`) and by
            column (`columns`); `oov` counts those without an id of their own.
        warnings: a sentence on each column whose values are all unknown.
    """

    rows: int
    bad_rows: int
    seconds: float
    counts: dict[str, Any]
    warnings: list[str]


def score_file(
    predictor: Predictor,
    path: str | os.PathLike | Sequence[str],
    out: str | os.PathLike,
    *,
    where: str | None = None,
    keys: tuple[str, ...] = (),
    progress: Callable[[int], None] = lambda rows: None,
) -> Scored:
    """Scores the rows of files, in their order.

    Args:
        path: files like those that the run was trained on; labels are not needed. One
            or several paths, folders, globs, or addresses such as s3://bucket/folder.
        out: a new .parquet or .csv file: the key columns, then `score`, the click
            probability; of several tasks, `score_TASK` of each.
        where: which rows, as in "dt=2026-11-14"; None for all. The others of an event
            log are not scored, but are events of histories.
        keys: columns that are copied to `out`.
        progress: called with the number of rows scored so far.

    Raises:
        ValueError: one sentence with the file, the row or the column and the remedy.
        OSError: if `out` cannot be written.
    """
    paths = as_texts(path)
    out = pathlib.Path(out).expanduser()
    names = (SCORE,)
    if len(predictor.tasks) > 1:
        names = tuple(f"{SCORE}_{task}" for task in predictor.tasks)
    config = predictor.encoding.config
    files, rule = chosen_files(config, paths, where)
    _check_names(out, keys, names)
    start, rows, counts = time.monotonic(), 0, Counts()
    bad_rows = BadRows(config.max_bad_rows)
    columns = (*predictor.columns, *keys)
    blocks = blocks_of(config, files, rule, columns, bad_rows)
    with unchanged({file: stamp_of(file) for file in files}), _new_file(out) as write:
        for table, scores in predictor.scored(blocks, counts):
            scored = table.select(keys)
            _check_keys(out, scored)
            by_task = scores.reshape(len(scores), -1).T
            for name, column in zip(names, by_task, strict=True):
                scored = scored.append_column(name, pa.array(column))
            write(scored)
            rows += len(scores)
            progress(rows)
        if not rows:
            raise ValueError(
                f"{', '.join(paths)} has no rows to score: name a file that has some."
                if where is None
                else f"--data.where {where!r} takes no row of {', '.join(paths)}: "
                "correct it, or name another file."
            )
    seconds = time.monotonic() - start
    warnings = counts.warnings("the rows")
    return Scored(rows, bad_rows.count, seconds, counts.report(), warnings)


def as_texts(path: str | os.PathLike | Sequence[str]) -> tuple[str, ...]:
    """Returns one or several paths as texts."""
    return (str(path),) if isinstance(path, str | os.PathLike) else tuple(path)


def chosen_files(
    config: DataConfig, paths: tuple[str, ...], where: str | None
) -> tuple[tuple[DataFile, ...], Filter]:
    """Returns the files of paths, and which of their rows are meant.

    Of an event log all files are returned, as any may hold events of histories.
    """
    everything = Filter(())
    rule = everything if where is None else parse_filter(where, "--data.where")
    return find_files(paths, rule if config.user is None else everything), rule


def blocks_of(
    config: DataConfig,
    files: tuple[DataFile, ...],
    rule: Filter,
    columns: tuple[str, ...],
    bad_rows: BadRows,
) -> Iterator[Block]:
    """Yields the rows that are meant, with these columns.

    Of an event log all rows are, with a column `MEANT`.
    """
    columns = tuple(dict.fromkeys((*columns, *rule.columns)))
    for file in files:
        for block in reader_of(config, file)(str(file), columns, bad_rows):
            mask = rule.mask(block)
            if config.user is None:
                yield block.filter(mask)
            else:
                table = block.table.append_column(MEANT, pa.array(mask))
                yield block._replace(table=table)


def _check_keys(out: pathlib.Path, keys: pa.Table) -> None:
    """Raises ValueError if a file of this kind cannot hold a key column."""
    if out.suffix.lower() != ".csv":
        return
    types = pa.types
    without_text = types.is_nested, types.is_binary, types.is_large_binary
    without_text += types.is_fixed_size_binary, types.is_binary_view
    for field in keys.schema:
        is_extension = isinstance(field.type, pa.BaseExtensionType)  # such as UUIDs
        if is_extension or any(check(field.type) for check in without_text):
            raise ValueError(
                f"--data.keys {field.name} holds {field.type}, which CSV cannot: name "
                "an --out that ends in .parquet."
            )


def _check_names(
    out: pathlib.Path,
    keys: tuple[str, ...],
    names: tuple[str, ...],
):
    if out.suffix.lower() not in _WRITERS:
        raise ValueError(f"--out {out} must end in .parquet or .csv: rename it.")
    if os.path.lexists(out):
        raise ValueError(f"{out} exists already: remove it, or choose another --out.")
    require_folder("--out", out)
    if len(set(keys)) < len(keys):
        raise ValueError(f"--data.keys {' '.join(keys)}: name each column once.")
    for name in names:
        if name in keys:
            raise ValueError(
                f"--data.keys {name} is the name of the new column: leave it out, or "
                "copy it under another name first."
            )


@contextmanager
def _new_file(out: pathlib.Path) -> Iterator[Callable[[pa.Table], None]]:
    """Yields a function that appends rows to `out`, which appears when all is well."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    writer: Any = None

    def write(rows: pa.Table):
        nonlocal writer
        if writer is None:
            writer = _WRITERS[out.suffix.lower()](temporary, rows.schema)
        writer.write_table(rows)

    try:
        try:
            yield write
        finally:
            if writer is not None:
                writer.close()
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
