"""Turns raw rows into the inputs of an exported model, as training did.

`experiments/export.py` copies this file into each folder that it writes, where NumPy
and jax are, and nothing else.
"""

import functools
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import jax
import numpy as np

PADDING = -1  # in place of an id in a list
_MISSING = ("", "NA", "N/A", "NULL", "null", "None", "\\N")
_NUMBER = re.compile(
    r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf(inity)?|nan)", re.I
)
_MAX_WEIGHT = 1e12
_SINCE = datetime(1970, 1, 1, tzinfo=UTC)


class Inputs(NamedTuple):
    """The inputs of the model for some rows."""

    dense: np.ndarray  # float32 [rows, n]
    ids: np.ndarray  # int32 [rows, f], of fields with one value
    # For each multi-valued field: ids, int32 [rows, slots], PADDING where a list is
    # shorter, and their weights, float32, or None. Of histories, what
    # `sequences.Arrays` has as `events`, and `ids` are those of samples.
    bags: tuple[Any, ...] = ()


class Encoding:
    """Turns `columns` of raw values into a model's inputs, as training did."""

    def __init__(
        self, spec: dict[str, Any], arrays: Mapping[str, np.ndarray], transforms: Any
    ):
        """Takes the `inputs` of `model.json`, vocabularies, and that module."""
        self._arrays, self._dense = arrays, spec["dense"]
        self._transforms = transforms
        self._is_strict = spec["bad"] == "strict"
        self._single = [field for field in spec["fields"] if "slots" not in field]
        self._lists = [field for field in spec["fields"] if "slots" in field]
        self._finders: dict[str, Callable[[str | None], int]] = {}
        names = [*spec["dense"]["columns"], *(f["column"] for f in spec["fields"])]
        names += [field["weights"] for field in self._lists if field["weights"]]
        self.columns = tuple(dict.fromkeys(names))

    def blank(self, count: int) -> Any:
        """Returns inputs of a program of so many rows."""
        return self._zeros(count)

    def num_scores(self, inputs: Any) -> int:
        """Returns the number of rows that have a score."""
        return len(inputs.dense)

    def joined(self, requests: Sequence[Any]) -> Any:
        """Returns the inputs of several requests as one."""
        return jax.tree.map(lambda *x: np.concatenate(x), *requests)

    def batches(
        self, inputs: Any, sizes: Sequence[int]
    ) -> Iterator[tuple[int, Any, np.ndarray]]:
        """Yields a program's size, its inputs, and the numbers of the rows scored.

        Args:
            sizes: of programs, in rising order.
        """
        count = len(inputs.dense)
        for start in range(0, count, sizes[-1]):
            stop = min(start + sizes[-1], count)
            size = next(size for size in sizes if size >= stop - start)
            # Padded with the first rows, as an evaluation pads its last batch.
            padding = np.resize(np.arange(min(size, count)), size - (stop - start))
            rows = np.concatenate([np.arange(start, stop), padding])
            take = functools.partial(np.take, indices=rows, axis=0)
            yield size, jax.tree.map(take, inputs), np.arange(start, stop)

    def _zeros(self, count: int) -> Inputs:
        bags = []
        for field in self._lists:
            ids = np.zeros((count, field["slots"]), np.int32)
            bags.append((ids, ids.astype(np.float32) if field["weights"] else None))
        dense = np.zeros((count, len(self._dense["columns"])), np.float32)
        ids = np.zeros((count, len(self._single)), np.int32)
        return Inputs(dense, ids, tuple(bags))

    def inputs(self, rows: Mapping[str, Sequence[Any]]) -> Any:
        """Returns the inputs for rows; see `Model.scores`."""
        return self._inputs(rows)

    def _inputs(self, rows: Mapping[str, Sequence[Any]]) -> Inputs:
        for name in self.columns:
            if name not in rows:
                raise ValueError(f"there is no column {name!r}: add it to the rows.")
        lengths = {len(rows[name]) for name in self.columns}
        if len(lengths) > 1:
            raise ValueError(f"columns hold {sorted(lengths)} values: give as many.")
        inputs = self._zeros(lengths.pop())
        self._fill_dense(inputs.dense, rows)
        for j, field in enumerate(self._single):
            if field["kind"] == "part":
                inputs.ids[:, j] = self._part(field, rows[field["column"]])
                continue
            texts = _each(_text, rows[field["column"]], field["column"])
            inputs.ids[:, j] = _each(self._finder(field), texts, field["column"])
        for field, bag in zip(self._lists, inputs.bags, strict=True):
            self._fill_bag(field, rows, *bag)
        return inputs

    def _fill_dense(self, out: np.ndarray, rows: Mapping[str, Sequence[Any]]) -> None:
        spec = self._dense
        for j, name in enumerate(spec["columns"]):
            x = np.array(_each(self._clean, rows[name], name), np.float64)
            out[:, j] = self._transforms.dense(x, spec["steps"][j])

    def _part(self, field: dict[str, Any], values: Sequence[Any]) -> np.ndarray:
        """Returns the ids of a part of numbers or times."""
        read = self._clean if field["step"][0] == "buckets" else _instant
        x = np.array(_each(read, values, field["column"]), np.float64)
        return self._transforms.ids(x, field["step"])

    def _clean(self, value: Any) -> float:
        """Returns a dense value, NaN if it is missing, by the policy for bad ones."""
        limit, number = self._dense["huge_limit"], _number(value)
        x = math.nan if number is None else number
        kinds = dict(missing=number is None, nan=x != x, huge=abs(x) > limit)
        for kind, applies in kinds.items():
            if applies and self._is_strict:
                raise ValueError(f"which is {kind} and refused")
        return x if x != x else min(max(x, -limit), limit)

    def _fill_bag(self, field: dict[str, Any], rows, ids: np.ndarray, weights) -> None:
        """Writes the ids of a multi-valued field, and the weights if it has them."""
        column, find, name = field["column"], self._finder(field), field["weights"]
        split = functools.partial(_list, separator=field["separator"])
        lists = _each(split, rows[column], column)
        ids[:] = PADDING
        for at, values in enumerate(lists):
            texts = _each(_text, values, column, at)
            kept = [i for i, text in enumerate(texts) if text is not None]
            row_ids = _each(find, [texts[i] for i in kept], column, at)[: ids.shape[1]]
            ids[at, : len(row_ids)] = row_ids
            if weights is not None:
                own = _each(split, [rows[name][at]], name, at)[0]
                if len(own) != len(values):
                    why = f"not a weight for each of {len(values)} values"
                    raise _refusal(at, name, own, why)
                numbers = _each(_weight, [own[i] for i in kept], name, at)
                weights[at, : len(row_ids)] = numbers[: len(row_ids)]

    def _finder(self, field: dict[str, Any]) -> Callable[[str | None], int]:
        """Returns the function from a text, or None, to its id in a field."""
        if field["column"] not in self._finders:
            find = self._find(field["kind"], field["of"], field["rows"])
            self._finders[field["column"]] = lambda x: 0 if x is None else find(x)
        return self._finders[field["column"]]

    def _find(self, kind: str, of: str, rows: int) -> Callable[[str], int]:
        if kind == "vocabulary":
            text = self._arrays[f"{of}/bytes"].tobytes()
            ends = [0, *self._arrays[f"{of}/ends"].tolist()]
            cuts = enumerate(itertools.pairwise(ends), 1)
            known = {text[start:end].decode(): i for i, (start, end) in cuts}

            def find(text: str) -> int:
                if text not in known and self._is_strict:
                    raise ValueError("which is not in the vocabulary, and is refused")
                return known.get(text, 0)

            return find
        if kind == "modulo":
            return lambda text: 1 + _integer(text) % 2**64 % (rows - 1)
        if kind == "ids":
            return lambda text: _integer(text, 0, rows)
        salt = hashlib.blake2b(of.encode(), digest_size=16).digest()
        hashed = functools.partial(hashlib.blake2b, digest_size=8, key=salt)
        return lambda text: (
            1 + int.from_bytes(hashed(text.encode()).digest(), "little") % (rows - 1)
        )


class LogEncoding(Encoding):
    """Turns events into records, and these into sequences, as predictions do."""

    def __init__(
        self,
        spec: dict[str, Any],
        arrays: Mapping[str, np.ndarray],
        sequences: Any,
        transforms: Any,
    ):
        """Takes what `Encoding` takes, and the module `sequences`."""
        super().__init__(spec, arrays, transforms)
        self._log, self._sequences = spec["log"], sequences
        self._layout = sequences.Layout(**self._log["layout"])
        names = self._log["user"], self._log["time"], *self._log["labels"]
        self.columns = tuple(dict.fromkeys((*self.columns, *names)))

    def blank(self, count: int) -> Any:
        """Returns inputs of a program of so many rows: of an event without a past."""
        ((_, inputs, _),) = self.batches(self._records(1), (count,))
        return inputs

    def num_scores(self, inputs: np.ndarray) -> int:
        """Returns the number of events without a label."""
        return int(np.count_nonzero(self._sequences.are_candidates(inputs)))

    def joined(self, requests: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the records of several requests, whose users are others in each."""
        records, users = np.concatenate(requests), 0
        for part in np.split(records, np.cumsum([len(x) for x in requests])[:-1]):
            part["user"] += users
            users = part["user"].max() + 1
        return records

    def batches(
        self, inputs: np.ndarray, sizes: Sequence[int]
    ) -> Iterator[tuple[int, Any, np.ndarray]]:
        """Yields sizes, inputs and numbers, see `Encoding.batches`."""
        is_new = self._sequences.are_candidates(inputs)
        shapes = [self._sequences.candidate_shape(size) for size in sizes]
        parts = inputs[~is_new], inputs[is_new], self._layout, shapes
        for batch, shape, numbers in self._sequences.candidate_batches(*parts):
            dense = np.zeros((shape.sequences, 0), np.float32)
            yield shape.rows, Inputs(dense, batch.samples, batch.events), numbers

    def inputs(self, rows: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """Returns the records of events; see `Model.scores`."""
        ids, log = self._inputs(rows).ids, self._log
        records = self._records(len(ids))
        records["ids"] = ids
        users = _each(_user, rows[log["user"]], log["user"])
        records["user"] = np.unique(users, return_inverse=True)[1]
        records["time"] = _each(_time, rows[log["time"]], log["time"])
        for task, name in enumerate(log["labels"]):
            records["label"][:, task] = _each(_label, rows[name], name)
        if not self.num_scores(records):
            raise ValueError(
                f"no row lacks a value in column {log['labels'][0]!r}: leave it empty "
                "in those to be scored; earlier events with a label are histories."
            )
        return records

    def _records(self, count: int) -> np.ndarray:
        """Returns records of zeros, without labels."""
        tasks, fields = len(self._log["labels"]), len(self._single)
        dtype = [("label", "<f4", (tasks,)), ("ids", "<i4", (fields,))]
        records = np.zeros(count, [*dtype, ("user", "<i8"), ("time", "<f8")])
        records["label"] = np.nan
        return records


def encoding_of(
    spec: dict[str, Any],
    arrays: Mapping[str, np.ndarray],
    sequences: Any,
    transforms: Any,
) -> Encoding:
    """Returns the encoding of rows, or of events if it has a `log`."""
    if "log" in spec:
        return LogEncoding(spec, arrays, sequences, transforms)
    return Encoding(spec, arrays, transforms)


def _each(function, values, column: str, row: int | None = None) -> list[Any]:
    """Returns the function of each value; each is of `row`, or of a row of its own."""
    results = []
    for at, value in enumerate(values):
        try:
            results.append(function(value))
        except (ValueError, OverflowError) as error:
            where = at if row is None else row
            raise _refusal(where, column, value, str(error)) from None
    return results


def _refusal(at: int, column: str, value: Any, why: str) -> ValueError:
    where = f"row {at + 1} column {column!r}"
    return ValueError(f"{where} holds {repr(value)[:40]}, {why}: correct it.")


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        text = value.strip()
        if text in _MISSING:
            return None
        if _NUMBER.fullmatch(text):
            return float(text)
    elif value is None or isinstance(value, bool | int | float | np.number | np.bool_):
        return None if value is None else float(value)
    raise ValueError("which is no number")


def _user(value: Any) -> str:
    text = _text(value)
    if text is None:
        raise ValueError("where each row needs a user")
    return text


def _time(value: Any) -> float:
    """Returns a number, or the seconds of a date since 1970, in UTC without a zone."""
    if isinstance(value, np.datetime64):
        value = value.astype("datetime64[us]").item()
    if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
        value = None if value in _MISSING else _date(value)
    if isinstance(value, datetime):
        since = value.replace(tzinfo=value.tzinfo or UTC) - _SINCE
        return since // timedelta(microseconds=1) * 1e-6
    number = _number(value)
    if number is None or not np.isfinite(number):
        raise ValueError("where each row needs a time")
    return number


def _instant(value: Any) -> float:
    """Returns a time, which may be missing: NaN."""
    is_none = value is None or value != value or value in (math.inf, -math.inf)
    if is_none or (isinstance(value, str) and value.strip() in _MISSING):
        return math.nan
    return _time(value)


def _date(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("which is neither a number nor a date") from None


def _label(value: Any) -> float:
    number = _number(value)
    if number is None or number != number:
        return float("nan")
    if number not in (0, 1):
        raise ValueError("where only 0, 1 and none are allowed")
    return number


def _weight(value: Any) -> float:
    number = _number(value)
    if number is None or not 0 <= number <= _MAX_WEIGHT:
        raise ValueError(f"no weight in 0 to {_MAX_WEIGHT:g}")
    return number


def _text(value: Any) -> str | None:
    """Returns a value as text; None for a missing one."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or value == "" or value != value:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int):
        return str(value)
    if isinstance(value, float) and abs(value) < 2**53 and value.is_integer():
        return str(int(value))
    raise ValueError("which is neither text nor an integer")


def _list(value: Any, separator: str | None) -> Sequence[Any]:
    if isinstance(value, list | tuple | np.ndarray):
        return list(value)
    if value is None:
        return ()
    if separator is None:
        raise ValueError("which is no list")
    text = _text(value)
    return () if text is None else text.split(separator)


def _integer(text: str, low: int = -(2**63), high: int = 2**64) -> int:
    is_hex = re.fullmatch("0[xX][0-9a-fA-F]{1,16}", text)
    if is_hex or re.fullmatch("-?[0-9]{1,20}", text):
        number = int(text, 16 if is_hex else 10)
        if low <= number < high:
            return number
    raise ValueError(f"no integer in {low}..{high - 1}")
