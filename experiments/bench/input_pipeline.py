"""Measures rows per second of the input pipeline: shards, prefetch, generated.

    python experiments/bench/input_pipeline.py --out result.json

The shards hold random rows with Criteo's 13 dense and 26 categorical columns and are
read shuffled, warm in the page cache; `prefetch` adds the background thread and the
copy to JAX's default device.

To try it: `--rows 20000 --measure-rows 20000 --repeats 1`.
"""

import dataclasses
import functools
import os
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
import tyro

from experiments.bench import result as results
from loka_jax.data import DataConfig, Position, Schema, open_data
from loka_jax.data.batch import Dataset
from loka_jax.data.prefetch import Prefetcher
from loka_jax.data.reader import ShardDataset
from loka_jax.data.shards import ShardWriter, open_shards, record_dtype
from loka_jax.measure.timing import time_chains

NUM_DENSE, NUM_FIELDS, TABLE_ROWS = 13, 26, 100_000


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
        shards = _random_shards(pathlib.Path(folder), arguments.rows)
        stream = open_data(DataConfig(eval_examples=1 << 14), seed=0).train
        cases = {
            "shards_in_order": functools.partial(_direct, shards, size, False),
            "shards_shuffled": functools.partial(_direct, shards, size, True),
            "shards_prefetch": functools.partial(_prefetched, shards, size),
            "generated": functools.partial(_direct, stream, size, True),
        }
        times = time_chains(cases, calls=steps, rounds=arguments.repeats)
    result = results.head("input_pipeline", arguments) | {
        "columns": {"dense": NUM_DENSE, "categorical": NUM_FIELDS},
        "cpu_cores": len(os.sched_getaffinity(0)),
        "rows_per_second": {
            name: {
                "median": round(size / taken.median_us * 1e6),
                "min": round(size / taken.max_us * 1e6),
                "max": round(size / taken.min_us * 1e6),
            }
            for name, taken in times.items()
        },
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
    with Prefetcher(data, start, size, shuffle=True, num_batches=steps) as batches:
        for _, batch in batches:
            jax.block_until_ready(batch)


def _random_shards(folder: pathlib.Path, rows: int) -> ShardDataset:
    schema = Schema(
        label="label",
        dense=tuple(f"I{i}" for i in range(NUM_DENSE)),
        categorical=tuple(f"C{i}" for i in range(NUM_FIELDS)),
        vocab_sizes=(TABLE_ROWS,) * NUM_FIELDS,
    )
    rng = np.random.default_rng(0)
    writer = ShardWriter(folder)
    for start in range(0, rows, 1 << 19):
        count = min(1 << 19, rows - start)
        records = np.zeros(count, record_dtype(NUM_DENSE, NUM_FIELDS))
        records["label"] = rng.random(count) < 0.25
        records["dense"] = rng.random((count, NUM_DENSE), np.float32)
        records["ids"] = rng.integers(TABLE_ROWS, size=(count, NUM_FIELDS))
        writer.add_shard("train", records)
    writer.finish(schema, sources=[], settings={}, report={})
    return ShardDataset(schema, open_shards(folder).shards["train"], "bench")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
