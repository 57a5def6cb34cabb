"""Measures rows per second of the input pipeline: shards, prefetch, generated.

    python experiments/bench/input_pipeline.py --out result.json

The shards hold random rows with Criteo's 13 dense and 26 categorical columns and are
read shuffled, warm in the page cache; `prefetch` adds the background thread and the
copy to JAX's default device.
"""

import dataclasses
import json
import os
import pathlib
import platform
import statistics
import tempfile
import time

import jax
import numpy as np
import pyarrow
import tyro

from loka_jax.data import DataConfig, Position, Schema, open_data
from loka_jax.data.batch import Dataset
from loka_jax.data.prefetch import Prefetcher
from loka_jax.data.reader import ShardDataset
from loka_jax.data.shards import ShardWriter, open_shards, record_dtype

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

    out: str | None = None
    rows: int = 4_000_000
    batch_size: int = 8192
    repeats: int = 5
    measure_rows: int = 1_000_000


def main(arguments: Arguments) -> None:
    """Times every case, prints and writes the result."""
    steps = max(1, arguments.measure_rows // arguments.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        shards = _random_shards(pathlib.Path(folder), arguments.rows)
        stream = open_data(DataConfig(eval_examples=1 << 14), seed=0).train
        cases = {
            "shards_in_order": lambda: _direct(shards, arguments, steps, False),
            "shards_shuffled": lambda: _direct(shards, arguments, steps, True),
            "shards_prefetch": lambda: _prefetched(shards, arguments, steps),
            "generated": lambda: _direct(stream, arguments, steps, True),
            "generated_prefetch": lambda: _prefetched(stream, arguments, steps),
        }
        rates = {name: [] for name in cases}
        for case in cases.values():
            case()  # warms the page cache, and compiles
        for _ in range(arguments.repeats):  # interleaved, so that noise is shared
            for name, case in cases.items():
                start = time.perf_counter()
                case()
                seconds = time.perf_counter() - start
                rates[name].append(steps * arguments.batch_size / seconds)
    result = _environment(arguments) | {
        "rows_per_second": {
            name: {
                "median": round(statistics.median(rate)),
                "min": round(min(rate)),
                "max": round(max(rate)),
            }
            for name, rate in rates.items()
        }
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out is not None:
        pathlib.Path(arguments.out).write_text(text + "\n")


def _direct(data: Dataset, arguments: Arguments, steps: int, shuffle: bool) -> None:
    batches = data.num_batches(arguments.batch_size)
    batch = None
    for step in range(steps):
        position = Position(step // batches, step % batches, 0)
        batch = data.batch(position, arguments.batch_size, shuffle=shuffle)
    jax.block_until_ready(batch)


def _prefetched(data: Dataset, arguments: Arguments, steps: int) -> None:
    start, size = Position(0, 0, 0), arguments.batch_size
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


def _environment(arguments: Arguments) -> dict:
    return {
        "benchmark": "input_pipeline",
        "arguments": dataclasses.asdict(arguments) | {"out": None},
        "columns": {"dense": NUM_DENSE, "categorical": NUM_FIELDS},
        "device": jax.devices()[0].device_kind,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
            "pyarrow": pyarrow.__version__,
        },
    }


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
