"""Scores rows with the model in this folder; needs jax, and what jax installs.

    import loader

    model = loader.load("model")
    model.scores({"price": [1.5, 2.0], "user": ["u1", "u7"]})

`experiments/export.py` copies this file into each folder that it writes, with rows.py
and sequences.py. There is one program for each platform and batch size. Rows that fill
none are padded with the first ones; more rows than the largest holds are split; their
order is kept.

A model of histories takes events, of which it scores those without a label. Its batch
sizes are the rows of all histories and candidates of a call.

A program can do anything that a GPU or CPU can: load only folders that you trust.
"""

import functools
import hashlib
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import ml_dtypes
import numpy as np

FORMAT = 4
MODEL = "model.json"
# Roundings that the model makes are made, as weights were rounded when exporting.
COMPILER_OPTIONS = {"xla_allow_excess_precision": False}
_DTYPES = dict(F32="f4", I32="i4", I64="i8", U32="u4", BOOL="?", I8="i1", U8="u1")
_DTYPES |= dict(F8_E4M3=ml_dtypes.float8_e4m3fn, F8_E5M2=ml_dtypes.float8_e5m2)
_DTYPES |= dict(F8_E8M0=ml_dtypes.float8_e8m0fnu, BF16=ml_dtypes.bfloat16)


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
        rows, sequences = (_beside(folder, name) for name in ("rows", "sequences"))
        own = description["inputs"], vocabularies, sequences
        self.encoding = rows.encoding_of(*own)
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

        Of events those without a label have one, in their order, each on the earlier
        events of its user with a label. Other columns than those of `encoding.columns`
        are ignored; one that is missing or holds a value that is refused is a
        ValueError.
        """
        return self.probabilities(self.encoding.inputs(rows))

    def together(self, requests: Sequence[Any]) -> list[np.ndarray]:
        """Returns the `probabilities` of several inputs, which share calls."""
        ends = np.cumsum([self.encoding.num_scores(inputs) for inputs in requests])
        found = self.probabilities(self.encoding.joined(requests))
        return np.split(found, ends[:-1])

    def probabilities(self, inputs: Any) -> np.ndarray:
        """Returns `1 / (1 + exp(-logit))` of each row, computed in float64."""
        x = self.logits(inputs).astype(np.float64)
        small = np.exp(-np.abs(x))  # never overflows
        return (np.where(x >= 0, 1.0, small) / (1.0 + small)).astype(np.float32)

    def logits(self, inputs: Any) -> np.ndarray:
        """Returns the logit of each row, float32 [N], or [N, T] of T tasks.

        `inputs` are those that `encoding.inputs` returns.
        """
        count, tasks = self.encoding.num_scores(inputs), len(self.tasks)
        out = np.zeros((count, tasks) if tasks > 1 else count, np.float32)
        launched = [
            (self.program(size)(batch), numbers)
            for size, batch, numbers in self.encoding.batches(inputs, self.batch_sizes)
        ]
        for logits, numbers in launched:
            out[numbers] = np.asarray(logits)[: len(numbers)]
        if calibration := self.description["calibration"]:
            a, b = (np.array(calibration[name], np.float32) for name in "ab")
            out = out * a + b
        return out

    def warm(self) -> None:
        """Compiles all programs, so that no later call waits for it."""
        for size in self.batch_sizes:
            self.program(size)(self.encoding.blank(size))

    def _program(self, batch_size: int) -> Callable[[Any], jax.Array]:
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


def _beside(folder: pathlib.Path, name: str) -> ModuleType:
    """Returns a module of a folder, whatever other folders call theirs."""
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results_place(platform: str) -> jax.sharding.Sharding:
    """Returns where a program puts its results.

    A GPU writes them to the host's memory itself: a copy afterwards takes longer than
    the program of a small batch.
    """
    kind = "pinned_host" if platform == "cuda" else None
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


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
