"""Scores rows with the model in this folder; needs jax, and what jax installs.

    import loader

    model = loader.load("model")
    model.scores({"price": [1.5, 2.0], "user": ["u1", "u7"]})

`experiments/export.py` copies this file into each folder that it writes. There is one
program for each platform and batch size. Rows that fill none are padded with the first
ones; more rows than the largest holds are split; their order is kept.

A program can do anything that a GPU or CPU can: load only folders that you trust.
"""

import functools
import hashlib
import importlib.util
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

FORMAT = 2
MODEL = "model.json"
# Roundings that the model makes are made, as weights were rounded when exporting.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
PADDING = -1  # in place of an id in a list
_MISSING = ("", "NA", "N/A", "NULL", "null", "None", "\\N")
_NUMBER = re.compile(
    r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf(inity)?|nan)", re.I
)
_MAX_WEIGHT = 1e12
_DTYPES = dict(F32="f4", I32="i4", I64="i8", U32="u4", BOOL="?", I8="i1", U8="u1")
_DTYPES |= dict(F8_E4M3=ml_dtypes.float8_e4m3fn, F8_E5M2=ml_dtypes.float8_e5m2)
_DTYPES |= dict(F8_E8M0=ml_dtypes.float8_e8m0fnu, BF16=ml_dtypes.bfloat16)


class Inputs(NamedTuple):
    """The inputs of the model for some rows."""

    dense: np.ndarray  # float32 [rows, n]
    ids: np.ndarray  # int32 [rows, f], of fields with one value
    # For each multi-valued field: ids, int32 [rows, slots], PADDING where a list is
    # shorter, and their weights, float32, or None.
    bags: tuple[tuple[np.ndarray, np.ndarray | None], ...] = ()


def load(folder: Any = None) -> "Model":
    """Returns the model of a folder, by default this one, after checking its files.

    Raises:
        ValueError: in one sentence, if a file is damaged, or no program runs here.
    """
    path = pathlib.Path(__file__).parent if folder is None else pathlib.Path(folder)
    description = _description(path)
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    programs = [p for p in description["programs"] if p["platform"] == here]
    if not programs:
        platforms = sorted({p["platform"] for p in description["programs"]})
        raise ValueError(
            f"{path} has programs for {' and '.join(platforms)}, and JAX runs on "
            f"{here}: export it with --platforms {' '.join(platforms)} {here}."
        )
    own = getattr(jax.devices()[0], "compute_capability", None)
    if other := {p["compute_capability"] for p in programs} - {None, own}:
        raise ValueError(
            f"{path} has kernels for compute capability {other.pop()}, and this GPU "
            f"has {own}: export it on this machine, or with --plan off."
        )
    return Model(path, description, programs)


class Model:
    """An exported model.

    Attributes:
        description: the contents of `model.json`.
        tasks: names of what is predicted.
        encoding: how rows become inputs; its `columns` are what a row must have.
        batch_sizes: those of the programs, the smallest first.
        program: returns the compiled program of a batch size, from inputs to logits.
    """

    def __init__(self, folder: pathlib.Path, description: dict, programs: list[dict]):
        """Takes the parts of a folder; `load` reads and checks them."""
        self.description = description
        self.tasks = tuple(description["outputs"])
        vocabularies = read_arrays(folder / "vocabulary.safetensors")
        self.encoding = Encoding(description["inputs"], vocabularies)
        self._programs = {
            p["batch_size"]: (p, (folder / p["file"]).read_bytes()) for p in programs
        }
        self.batch_sizes = tuple(sorted(self._programs))
        self._vendor = str((folder / "vendor").resolve())
        arrays = read_arrays(folder / "weights.safetensors")
        used = {name for p in programs for name in (*p["weights"], *p["tables"])}
        self._arrays = {name: jax.device_put(arrays[name]) for name in used}
        self.program = functools.cache(self._program)

    def scores(self, rows: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """Returns the probability of each row, float32 [N], or [N, T] of T tasks.

        Other columns than those of `encoding.columns` are ignored; one that is missing
        or holds a value that is refused is a ValueError.
        """
        return self.probabilities(self.encoding.inputs(rows))

    def probabilities(self, inputs: Inputs) -> np.ndarray:
        """Returns `1 / (1 + exp(-logit))` of each row, computed in float64."""
        x = self.logits(inputs).astype(np.float64)
        small = np.exp(-np.abs(x))  # never overflows
        return (np.where(x >= 0, 1.0, small) / (1.0 + small)).astype(np.float32)

    def logits(self, inputs: Inputs) -> np.ndarray:
        """Returns the logit of each row, float32 [N], or [N, T] of T tasks."""
        count, parts = len(inputs.dense), []
        for start in range(0, count, self.batch_sizes[-1]):
            stop = min(start + self.batch_sizes[-1], count)
            size = next(size for size in self.batch_sizes if size >= stop - start)
            # Padded with the first rows, as an evaluation pads its last batch.
            padding = np.resize(np.arange(min(size, count)), size - (stop - start))
            rows = np.concatenate([np.arange(start, stop), padding])
            take = functools.partial(np.take, indices=rows, axis=0)
            logits = self.program(size)(jax.tree.map(take, inputs))
            parts.append((logits, stop - start))
        none = np.zeros((0, len(self.tasks)) if len(self.tasks) > 1 else 0, np.float32)
        return np.concatenate([none, *(np.asarray(x)[:kept] for x, kept in parts)])

    def warm(self) -> None:
        """Compiles all programs, so that no later call waits for it."""
        for size in self.batch_sizes:
            self.program(size)(self.encoding.blank(size))

    def _program(self, batch_size: int) -> Callable[[Inputs], jax.Array]:
        if importlib.util.find_spec("flatbuffers") is None:
            sys.path.append(self._vendor)  # JAX reads programs with it, but lacks it
        from jax import export

        entry, content = self._programs[batch_size]
        if entry["compute_capability"] is not None:
            importlib.import_module("jax.experimental.mosaic.gpu")  # runs its kernels
        run = jax.jit(
            export.deserialize(bytearray(content)).call,
            compiler_options=COMPILER_OPTIONS,
            out_shardings=results_place(entry["platform"]),
        )
        weights = [self._arrays[name] for name in entry["weights"]]
        tables = [self._arrays[name] for name in entry["tables"]]
        return lambda inputs: run(weights, tables, *inputs)


def results_place(platform: str) -> jax.sharding.Sharding:
    """Returns where a program puts its results.

    A GPU writes them to the host's memory itself: a copy afterwards takes longer than
    the program of a small batch.
    """
    kind = "pinned_host" if platform == "cuda" else None
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


class Encoding:
    """Turns `columns` of raw values into a model's inputs, as training did."""

    def __init__(self, spec: dict[str, Any], arrays: Mapping[str, np.ndarray]):
        """Takes the `inputs` of `model.json`, and the vocabularies."""
        self._arrays, self._dense = arrays, spec["dense"]
        self._is_strict = spec["bad"] == "strict"
        self._single = [field for field in spec["fields"] if "slots" not in field]
        self._lists = [field for field in spec["fields"] if "slots" in field]
        self._finders: dict[str, Callable[[str | None], int]] = {}
        names = [*spec["dense"]["columns"], *(f["column"] for f in spec["fields"])]
        names += [field["weights"] for field in self._lists if field["weights"]]
        self.columns = tuple(dict.fromkeys(names))

    def blank(self, count: int) -> Inputs:
        """Returns inputs of zeros."""
        bags = []
        for field in self._lists:
            ids = np.zeros((count, field["slots"]), np.int32)
            bags.append((ids, ids.astype(np.float32) if field["weights"] else None))
        dense = np.zeros((count, len(self._dense["columns"])), np.float32)
        ids = np.zeros((count, len(self._single)), np.int32)
        return Inputs(dense, ids, tuple(bags))

    def inputs(self, rows: Mapping[str, Sequence[Any]]) -> Inputs:
        """Returns the inputs for rows; see `Model.scores`."""
        for name in self.columns:
            if name not in rows:
                raise ValueError(f"there is no column {name!r}: add it to the rows.")
        lengths = {len(rows[name]) for name in self.columns}
        if len(lengths) > 1:
            raise ValueError(f"columns hold {sorted(lengths)} values: give as many.")
        inputs = self.blank(lengths.pop())
        self._fill_dense(inputs.dense, rows)
        for j, field in enumerate(self._single):
            texts = _each(_text, rows[field["column"]], field["column"])
            inputs.ids[:, j] = _each(self._finder(field), texts, field["column"])
        for field, bag in zip(self._lists, inputs.bags, strict=True):
            self._fill_bag(field, rows, *bag)
        return inputs

    def _fill_dense(self, out: np.ndarray, rows: Mapping[str, Sequence[Any]]) -> None:
        spec = self._dense
        for j, name in enumerate(spec["columns"]):
            x = np.array(_each(self._clean, rows[name], name), np.float64)
            if spec["transform"] == "log1p":
                x = np.copysign(np.log1p(np.abs(x)), x)
            elif spec["transform"] == "standardize":
                x = (x - spec["mean"][j]) / spec["std"][j]
            out[:, j] = x

    def _clean(self, value: Any) -> float:
        """Returns a dense value as a number, by the policy for bad ones."""
        limit, number = self._dense["huge_limit"], _number(value)
        x = 0.0 if number is None else number
        kinds = dict(missing=number is None, nan=x != x, huge=abs(x) > limit)
        for kind, applies in kinds.items():
            if applies and self._is_strict:
                raise ValueError(f"which is {kind} and refused")
        return 0.0 if x != x else min(max(x, -limit), limit)

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


def read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a safetensors file, mapped into memory."""
    data = np.memmap(path, np.uint8, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        first, last = (start + offset for offset in entry["data_offsets"])
        dtype = np.dtype(_DTYPES[entry["dtype"]])
        arrays[name] = data[first:last].view(dtype).reshape(entry["shape"])
    return arrays


def _description(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of `model.json`, after comparing all digests."""
    path = folder / MODEL
    if not path.is_file():
        raise ValueError(f"{folder} holds no model ({MODEL} is missing): export one.")
    try:
        value = json.loads(path.read_bytes())
        if value.pop("digest") != digest_of(value):
            raise KeyError
        made_by, files = value["format"], value["files"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _lost(path, "is damaged") from None
    if made_by != FORMAT:
        raise ValueError(
            f"{path} has format {made_by}, and this loader reads {FORMAT}: use the "
            "loader.py beside it."
        )
    for name, digest in files.items():
        file = folder / name
        if not file.is_file():
            raise _lost(file, "is missing")
        with open(file, "rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != digest:
                raise _lost(file, "is damaged")
    return value


def digest_of(value: dict[str, Any]) -> str:
    """Returns the digest of all else in `model.json`."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _lost(path: pathlib.Path, how: str) -> ValueError:
    return ValueError(f"{path} {how}: restore it from a copy, or export again.")
