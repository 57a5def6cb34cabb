"""Tells what the columns of a table are: label, time, weight, and kinds of features.

By the first rows of the training file. What options name stays as they say; a feature
option that is given names all columns of its kind. Nothing is guessed of what a label
may leak into: columns that look like a further label are left out.
"""

import dataclasses
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from loka_jax.data.blocks import (
    NULL_WORDS,
    BadRows,
    Block,
    as_dates,
    element_type,
    find_columns,
    pc,
    plain,
)
from loka_jax.data.config import DataConfig, columns_of
from loka_jax.data.files import Sources, column_types, find_sources, reader_of
from loka_jax.data.places import DataFile, listed
from loka_jax.data.transform_options import is_number, parse_transforms, usual_of
from loka_jax.data.transforms import seconds
from loka_jax.data.values import MISSING_WORDS, parse_instants, parse_numbers
from loka_jax.terminal import clip

_ROWS = 100_000  # that are looked at
_FILES = 8  # of which, at most
_FEW = 50  # values of whole numbers that are names rather than amounts
_OWN = 0.9  # share of different values of a column that says nothing of other rows
_LACKS = 0.05  # share of missing values that an indicator tells
_DATES = 7305, 47482  # days since 1970: a time from 1990 to 2100
_WEEKS = 14  # days, at least, by which weekdays are told apart from days
_BUCKETS = "buckets:16"
_LEAST = 200  # rows that a share can be judged by
_LABELS = frozenset(
    "label click clicks clicked is_click is_clicked target y conversion converted "
    "is_conversion purchase purchased buy bought like liked correct".split()
)
_WEIGHTS = frozenset("weight weights sample_weight example_weight".split())
_TIMES = frozenset(
    "time timestamp ts date datetime day dt event_time event_date created_at".split()
)
# Words in the names of whole numbers that are no amounts.
_NAMES = frozenset(
    "id ids hash code zip key user member customer item product sku ad campaign "
    "advertiser publisher creative banner brand shop store seller category cat type "
    "device os browser country region city state site page url query skill problem "
    "movie song artist video channel genre".split()
)


class Inferred(NamedTuple):
    """What the columns of a table are: options that name all, and lines that say so."""

    config: DataConfig
    notes: tuple[str, ...]


class _Column(NamedTuple):
    """A column: its kind, and what is said beside its name."""

    kind: str
    note: str = ""


def infer_columns(config: DataConfig) -> Inferred:
    """Returns the options with the columns that they do not name.

    Raises:
        ValueError: if no column is clearly the label, or none is left for the model.
    """
    sources = find_sources(config)
    path = sources.train[0]
    types = column_types(config, path)
    nested = {n for n, t in types.items() if t and pa.types.is_nested(element_type(t))}
    names = tuple(name for name in types if name not in nested)
    table = _first_rows(config, sources.train, names)
    columns = {name: _look(name, table.column(name), table.num_rows) for name in names}
    columns |= {name: _Column("left out", "no numbers or text") for name in nested}
    for name, steps in parse_transforms(config.transform).items():
        if name in columns and columns[name].kind != "time":
            columns[name] = _Column("dense" if is_number(steps) else "of a time")
    config = _with_roles(config, columns, sources)
    _require_numbers(table, [n for n in columns_of(config).labels if n in names], path)
    named = {*columns_of(config).labels, config.time, config.weight}
    named |= {*config.weights_of_multi.values()}
    features = ("categorical", "multi", "dense")
    given = {kind: getattr(config, kind) for kind in features}
    named |= {name for names in given.values() for name in names}
    if not config.lists:  # whose names are those of events
        find_columns(str(path), tuple(sorted(n for n in named if n)), [*types])
    found = defaultdict(list)
    for name, (kind, _) in columns.items():
        if name not in named:
            found[kind].append(name)
    chosen = {kind: given[kind] or tuple(found[kind]) for kind in features}
    if not any(chosen.values()):
        raise ValueError(
            f"{path} has no column for the model beside {listed(sorted(names))}: name "
            "some with --data.categorical or --data.dense."
        )
    if any(columns[name].note == "text with |" for name in chosen["multi"]):
        chosen["separator"] = config.separator or "|"
    config = dataclasses.replace(config, **chosen)
    transform = _transforms(config, columns, table)
    config = dataclasses.replace(config, transform=transform)
    return Inferred(config, tuple(_notes(config, columns, str(config.path), table)))


def _first_rows(
    config: DataConfig, files: tuple[DataFile, ...], names: tuple[str, ...]
) -> pa.Table:
    """Returns the first rows of the file, or of some of several, in equal parts.

    Raises:
        ValueError: if the files are not of one table.
    """
    first = files[0]
    files = files[:: -(-len(files) // _FILES)]
    parts = []
    for file in files:
        if lacking := _composed(names) - _composed(column_types(config, file)):
            raise ValueError(
                f"{first} and {file} are no files of one table ({file} has no "
                f"{listed(sorted(lacking))}): name those of one alone, as in "
                "--data.path 'logs/*.csv'."
            )
        rows = 0
        reader = reader_of(config, file)
        for block in reader(str(file), names, BadRows(config.max_bad_rows)):
            left = _ROWS // len(files) - rows
            parts.append(block.table.slice(0, left))
            rows += parts[-1].num_rows
            if rows == _ROWS // len(files):
                break
    return pa.concat_tables(parts, promote_options="permissive")


def _composed(names: Iterable[str]) -> set[str]:
    return {unicodedata.normalize("NFC", name) for name in names}


def _with_roles(
    config: DataConfig, columns: dict[str, _Column], sources: Sources
) -> DataConfig:
    """Returns the options with label, weight and time."""
    roles: dict[str, str] = {}
    given = {*config.labels, *config.categorical, *config.multi, *config.dense}
    free = [name for name in columns if name not in given]
    if not config.labels and config.label not in columns:
        may_be = [n for n in free if columns[n].kind == "label"]
        if config.label != DataConfig().label or len(may_be) != 1:
            which = f"{', '.join(may_be)} may be the label"
            raise ValueError(
                f"no column is named {config.label!r}, and "
                f"{which if may_be else 'none holds 0 and 1 under a usual name'}: name "
                "it with --data.label, or several with --data.labels."
            )
        roles["label"] = may_be[0]
    weights = [name for name in free if columns[name].kind == "weight"]
    if config.weight is None and weights:
        roles["weight"] = weights[0]
    times = [name for name in free if columns[name].kind == "time"]
    if config.time is None and times and not sources.valid:
        roles["time"] = min(times, key=lambda name: "date" not in columns[name].note)
    return dataclasses.replace(config, **roles)


def _require_numbers(table: pa.Table, labels: list[str], path: DataFile) -> None:
    """Raises ValueError for a label that holds text."""
    for label in labels:
        array = plain(table.column(label).combine_chunks())
        values, numbers = _with_numbers(array)
        if _is_text(array.type) and numbers is None:
            raise ValueError(
                f"{path} column {label!r} holds {clip(repr(values[0].as_py()))}, not a "
                "number: write labels as 0 and 1, or name another with --data.label."
            )


def _transforms(
    config: DataConfig, columns: dict[str, _Column], table: pa.Table
) -> tuple[str, ...]:
    """Returns the transforms, and what may be worth making of columns without."""
    given = parse_transforms(config.transform)
    block = Block(table, np.arange(1, table.num_rows + 1), str(config.path))
    usual = usual_of(config.transform)
    times = [name for name, column in columns.items() if column.kind == "time"]
    own = [x for x in config.transform if x not in {f"{name}=none" for name in times}]
    for name in config.dense:
        if name not in given:
            values = parse_numbers(block, name, "dense", "leave it out")
            lacks = values.missing | np.isnan(values.values)
            more = [_BUCKETS] + (["missing"] if lacks.mean() > _LACKS else [])
            steps = (usual, *(x for x in more if x.partition(":")[0] not in usual))
            own.append(f"{name}={','.join(steps)}")
    times.sort(key=lambda name: (name != config.time, not columns[name].note))
    if times and times[0] not in given and not config.is_log:
        days = seconds(parse_instants(block, times[0])) / 86400
        first, last = np.nanmin(days), np.nanmax(days)
        if _DATES[0] <= first <= last <= _DATES[1]:
            of_week = ",weekday" if last - first >= _WEEKS else ""
            own.append(f"{times[0]}=hour{of_week}")
    return tuple(own)


def _look(name: str, column: pa.ChunkedArray, rows: int) -> _Column:
    """Returns what a column is by its name and values."""
    array = plain(column.combine_chunks())
    if element_type(array.type) != array.type:
        return _look_at_lists(array)
    if name.startswith("__index_level_"):
        return _Column("left out", "an index of pandas")
    if as_dates(array) is not None and array.null_count == 0:
        return _Column("time", "a date")
    values, numbers = _with_numbers(array)
    different = len(pc.unique(values))
    if different <= 1:
        return _Column("left out", "one value" if different else "no value")
    if numbers is not None:
        return _look_at_numbers(name, numbers, different)
    if _is_text(array.type) and _has_bars(values):
        return _Column("multi", "text with |")
    if different > _OWN * len(values) and len(values) >= _LEAST:
        return _Column("left out", "a value of its own in nearly each row")
    return _Column("categorical", f"{different:,}")


def _with_numbers(array: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    """Returns the values that are not missing, and their numbers if all are some."""
    if not _is_text(array.type):
        values = array.drop_null()
        is_number = _is_number(array.type)
        return values, values.cast(pa.float64(), safe=False) if is_number else None
    array = pc.utf8_trim_whitespace(array)
    words = pa.array(["", *NULL_WORDS], array.type)
    values = array.filter(pc.invert(pc.is_in(array, words))).drop_null()
    return values, _as_numbers(values)


def _look_at_lists(array: pa.Array) -> _Column:
    values = pc.list_flatten(array).drop_null()
    if pa.types.is_floating(values.type):
        return _Column("left out", "lists of fractions, as weights are")
    return _Column("multi", f"{len(pc.unique(values)):,}")


def _look_at_numbers(name: str, numbers: pa.Array, different: int) -> _Column:
    low, high = pc.min_max(numbers).as_py().values()
    is_whole = pc.all(pc.equal(numbers, pc.floor(numbers))).as_py()
    plain_name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = {*re.split(r"[^a-z]+", plain_name)}
    if plain_name in _LABELS and different == 2 and (low, high) == (0, 1):
        return _Column("label")
    if plain_name in _WEIGHTS and low >= 0:
        return _Column("weight")
    if plain_name in _TIMES:
        return _Column("time")
    if not is_whole:
        return _Column("dense")
    is_name = bool(words & _NAMES) or max(-low, high) >= 2**31
    if is_name and different > _OWN * len(numbers) and len(numbers) >= _LEAST:
        return _Column("left out", "a value of its own in nearly each row")
    if is_name or (different <= _FEW and 4 * different <= len(numbers)):
        return _Column("categorical", f"{different:,}")
    return _Column("dense")


def _as_numbers(values: pa.Array) -> pa.Array | None:
    """Returns texts as numbers, without missing ones; None if one is no number."""
    is_missing = pc.is_in(values, pa.array(MISSING_WORDS, values.type))
    try:
        return values.filter(pc.invert(is_missing)).cast(pa.float64())
    except pa.ArrowInvalid:
        return None


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_number(kind: pa.DataType) -> bool:
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return is_number or pa.types.is_decimal(kind)


def _has_bars(values: pa.Array) -> bool:
    """Returns whether texts are lists of few values with a bar between them."""
    lists = values.filter(pc.match_substring(values, "|"))
    if 2 * len(lists) < len(values):
        return False
    parts = pc.list_flatten(pc.split_pattern(lists, "|"))
    return 2 * len(pc.unique(parts)) <= len(pc.unique(lists))


def _notes(config: DataConfig, columns: dict[str, _Column], path: str, table):
    """Yields the lines that say what the columns are, and how to change that."""
    labels = columns_of(config).labels
    roles = {"label": labels, "time": (config.time,), "weight": (config.weight,)}
    kinds = {
        **roles,
        "categorical": config.categorical,
        "multi-valued": config.multi,
        "dense": config.dense,
    }
    used = {name for names in kinds.values() for name in names}
    used |= {*config.weights_of_multi.values()}
    yield f"Columns of {path}, by {table.num_rows:,} rows:"
    for kind, names in kinds.items():
        if shown := [_shown(n, columns) for n in names if n is not None]:
            yield f"  {kind}: {', '.join(shown)}"
    others = {n: c for n, c in columns.items() if n not in used}
    why = {"label": "may be a label", "time": "a time", "weight": "a weight"}
    if others:
        said = (
            f"{clip(n)} ({why.get(c.kind) or c.note or c.kind})"
            for n, c in others.items()
        )
        yield f"  left out: {', '.join(said)}"
    options = ("categorical", "multi", "dense")
    line = (
        f"--data.{name} {' '.join(map(clip, getattr(config, name)))}"
        for name in options
        if getattr(config, name)
    )
    yield f"To change a kind, name all of its columns: {' '.join(line)}"


def _shown(name: str, columns: dict[str, _Column]) -> str:
    note = columns[name].note if name in columns else ""
    return f"{clip(name)} ({note} values)" if note[:1].isdigit() else clip(name)
