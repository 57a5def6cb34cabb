"""Measures rows per second of the input pipeline: shards, prefetch, conversion.

    python experiments/bench/input_pipeline.py --out result.json

The shards hold random rows with Criteo's 13 dense and 26 categorical columns and are
read shuffled, warm in the page cache; `prefetch` adds the background thread and the
copy to JAX's default device. `weighted` rows have an example weight; `lists` rows have
lists of up to 10 values, 5 on average, in two of the 26 columns. Conversions read a
Parquet file with as many rows as one timing reads, twice: they learn, then encode.

To try it: `--rows 20000 --measure-rows 20000 --repeats 1`.
"""

import dataclasses
import functools
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import tyro
from pyarrow import parquet

from experiments.bench import result as results
from loka_jax.data import DataConfig, Position, Schema, open_data
from loka_jax.data.batch import Dataset
from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from loka_jax.data.prefetch import prefetch
from loka_jax.data.reader import ShardDataset, record_dtype_of
from loka_jax.data.shards import ShardWriter, open_shards
from loka_jax.measure.timing import time_chains

NUM_DENSE, NUM_FIELDS, TABLE_ROWS, SLOTS = 13, 26, 100_000, 10
NUM_LISTS = 2  # of the fields, where there are lists
KINDS = ("one_hot", "weighted", "lists")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON; printed only if None.
        rows: rows in the shards.
        batch_size: rows of a batch.
        repeats: how often each case is timed; medians and ranges are reported.
        measure_rows: rows read in one timing.
    """

    out: pathlib.Path | None = None
    rows: int = 4_000_000
    batch_size: int = 8192
    repeats: int = 5
    measure_rows: int = 1_000_000


def main(arguments: Arguments) -> dict[str, Any]:
    """Times every case, prints, writes and returns the result."""
    size = arguments.batch_size
    steps = max(1, arguments.measure_rows // size)
    with tempfile.TemporaryDirectory() as folder:
        one_hot, weighted, lists = (
            _random_shards(pathlib.Path(folder) / kind, arguments.rows, _schema(kind))
            for kind in KINDS
        )
        stream = open_data(DataConfig(eval_examples=1 << 14), seed=0).train
        cases = {
            "shards_in_order": functools.partial(_direct, one_hot, size, False),
            "shards_shuffled": functools.partial(_direct, one_hot, size, True),
            "shards_prefetch": functools.partial(_prefetched, one_hot, size),
            "shards_weighted": functools.partial(_direct, weighted, size, True),
            "shards_lists": functools.partial(_direct, lists, size, True),
            "generated": functools.partial(_direct, stream, size, True),
        }
        times = time_chains(cases, calls=steps, rounds=arguments.repeats)
        rates = {
            name: _rates([size / us * 1e6 for us in (t.median_us, t.max_us, t.min_us)])
            for name, t in times.items()
        }
        rates |= _conversions(
            pathlib.Path(folder), arguments.measure_rows, arguments.repeats
        )
    result = results.head("input_pipeline", arguments) | {
        "columns": {"dense": NUM_DENSE, "categorical": NUM_FIELDS},
        "lists": {"columns": NUM_LISTS, "most_values": SLOTS},
        "cpu_cores": len(os.sched_getaffinity(0)),
        "rows_per_second": rates,
    }
    for name, rate in result["rows_per_second"].items():
        print(f"{name:20}{rate['median'] / 1e6:7.2f} M rows a second")
    results.write(arguments.out, result)
    return result


def _direct(data: Dataset, size: int, shuffle: bool, steps: int) -> Any:
    batches = data.num_batches(size)
    batch = None
    for step in range(steps):
        position = Position(step // batches, step % batches, 0)
        batch = data.batch(position, size, shuffle=shuffle)
    return batch


def _prefetched(data: Dataset, size: int, steps: int) -> None:
    start = Position(0, 0, 0)
    with prefetch(data, start, size, shuffle=True, num_batches=steps) as batches:
        for _, batch in batches:
            jax.block_until_ready(batch)


def _rates(rates: list[float]) -> dict[str, int]:
    """Returns the median, the least and the highest rate of a case."""
    names = ("median", "min", "max")
    return {name: round(rate) for name, rate in zip(names, rates, strict=True)}


def _conversions(folder: pathlib.Path, rows: int, repeats: int) -> dict[str, Any]:
    """Returns the rows per second of conversions, in turns."""
    configs = {kind: _parquet(folder, rows, kind) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(repeats):
        for kind, config in configs.items():
            start = time.perf_counter()
            convert(config, find_sources(config), folder / f"{kind}-{number}")
            seconds[kind].append(time.perf_counter() - start)
            shutil.rmtree(folder / f"{kind}-{number}")
    return {
        f"convert_{kind}": _rates([rows / f(t) for f in (statistics.median, max, min)])
        for kind, t in seconds.items()
    }


def _schema(kind: str) -> Schema:
    num_lists = NUM_LISTS if kind == "lists" else 0
    names = tuple(f"C{i}" for i in range(NUM_FIELDS))
    return Schema(
        label="label",
        dense=tuple(f"I{i}" for i in range(NUM_DENSE)),
        categorical=names[num_lists:],
        multi=names[:num_lists],
        slots=(SLOTS,) * num_lists,
        vocab_sizes=(TABLE_ROWS,) * NUM_FIELDS,
        weighted=kind == "weighted",
    )


def _random_shards(folder: pathlib.Path, rows: int, schema: Schema) -> ShardDataset:
    rng = np.random.default_rng(0)
    folder.mkdir()
    writer = ShardWriter(folder)
    for start in range(0, rows, 1 << 19):
        count = min(1 << 19, rows - start)
        writer.add_records("train", _records(rng, count, schema))
    writer.finish(schema, DataConfig())
    return ShardDataset(schema, open_shards(folder).records["train"], "bench")


def _records(rng: np.random.Generator, count: int, schema: Schema) -> np.ndarray:
    records = np.zeros(count, record_dtype_of(schema))
    records["label"] = rng.random(count) < 0.25
    records["dense"] = rng.random((count, NUM_DENSE), np.float32)
    records["ids"] = rng.integers(TABLE_ROWS, size=records["ids"].shape)
    if schema.weighted:
        records["weight"] = rng.random(count, np.float32)
    for field in range(len(schema.multi)):
        ids = rng.integers(TABLE_ROWS, size=(count, SLOTS))
        ids[np.arange(SLOTS) >= rng.integers(SLOTS + 1, size=(count, 1))] = -1
        records[f"bag_{field}"] = ids
    return records


def _parquet(folder: pathlib.Path, rows: int, kind: str) -> DataConfig:
    """Writes a table of random rows; returns how to convert it."""
    schema = _schema(kind)
    records = _records(np.random.default_rng(1), rows, schema)
    columns = {"label": records["label"]}
    columns |= {name: records["dense"][:, i] for i, name in enumerate(schema.dense)}
    if schema.weighted:
        columns["weight"] = records["weight"]
    columns |= {n: records["ids"][:, i] for i, n in enumerate(schema.categorical)}
    for field, name in enumerate(schema.multi):
        ids = records[f"bag_{field}"]
        ends = np.append(0, np.cumsum((ids >= 0).sum(axis=1)))
        columns[name] = pa.LargeListArray.from_arrays(ends, pa.array(ids[ids >= 0]))
    path = folder / f"{kind}.parquet"
    parquet.write_table(pa.table(columns), path)
    return DataConfig(
        kind="table",
        path=str(path),
        dense=schema.dense,
        categorical=schema.categorical,
        multi=schema.multi,
        weight="weight" if schema.weighted else None,
    )


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
