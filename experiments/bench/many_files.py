"""Rows a second and memory of reading a folder of many Parquet files.

    python experiments/bench/many_files.py --out many_files_cpu.json

Writes a log of days, a Hive partition each with some files: ids as text, numbers, and
a list. Then, each in a process of its own, whose largest memory is recorded: pyarrow
alone reads every column; `open_data` learns the vocabularies and writes shards, as the
first run on a folder does; batches are read of these shards, as every epoch does.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa
import tyro
from pyarrow import dataset, parquet

from experiments.bench import result as results
from loka_jax.data import DataConfig, Position, open_data

_BATCH = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        rows: of all files.
        files: numbers of files of so many rows in all that are read.
        work: of this process: internal.
    """

    rows: int = 5_000_000
    files: tuple[int, ...] = (15, 60)
    work: str | None = None


def main(arguments: Arguments) -> None:
    """Writes the files, reads them by each way, prints and writes."""
    if arguments.work is not None:
        way, folder = arguments.work.split(":", 1)
        print(json.dumps(_measured(way, pathlib.Path(folder))))
        return
    result = results.head("many_files", arguments) | {"cases": []}
    rows = arguments.rows // max(arguments.files)
    with tempfile.TemporaryDirectory() as root:
        for files in arguments.files:
            folder = pathlib.Path(root) / str(files) / "logs"
            for file in range(files):
                _write(folder, file, rows)
            for way in _WAYS:
                case = {"files": files, "rows": files * rows, "way": way}
                case |= _in_process(way, folder)
                case["rows_per_second"] = case["rows"] / case["seconds"]
                result["cases"].append(case)
                print(case, flush=True)
                results.write(arguments.out, result)


def _write(folder: pathlib.Path, file: int, rows: int) -> None:
    """Writes one of five files of a day."""
    draw = np.random.default_rng(file)
    day = np.datetime64("2026-11-01") + np.timedelta64(file // 5, "D")
    second = np.sort(draw.integers(0, 86_400, rows)).astype("timedelta64[s]")
    ids = {"user": 300_000, "item": 50_000, "query": 20_000, "site": 900, "slot": 8}
    tags = draw.integers(0, 400, 3 * rows)
    columns: dict[str, Any] = {
        name: [f"{name}{i}" for i in (count * draw.random(rows) ** 2).astype(int)]
        for name, count in ids.items()
    }
    offsets = np.sort(draw.integers(0, 3 * rows, rows - 1))
    offsets = np.concatenate([[0], offsets, [3 * rows]]).astype(np.int32)
    columns["tags"] = pa.ListArray.from_arrays(offsets, [f"t{i}" for i in tags])
    columns["price"] = draw.lognormal(2, 1, rows).round(2)
    columns["age"] = draw.integers(0, 90, rows)
    columns["time"] = day.astype("datetime64[s]") + second
    columns["click"] = draw.integers(0, 2, rows)
    place = folder / f"dt={day}"
    place.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), place / f"part-{file}.parquet")


def _in_process(way: str, folder: pathlib.Path) -> dict[str, float]:
    """Returns seconds and the largest memory of a way, in a process of its own."""
    command = [sys.executable, "-m", "experiments.bench.many_files"]
    done = subprocess.run(
        [*command, "--work", f"{way}:{folder}"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def _measured(way: str, folder: pathlib.Path) -> dict[str, float]:
    before = _peak()
    seconds = _WAYS[way](folder)
    return {"seconds": seconds, "memory_bytes": _peak(), "memory_before_bytes": before}


def _peak() -> int:
    """Returns the largest memory of this process so far, in bytes."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _by_pyarrow(folder: pathlib.Path) -> float:
    begun = time.perf_counter()
    for batch in dataset.dataset(folder, partitioning="hive").to_batches():
        assert batch.num_columns
    return time.perf_counter() - begun


def _opened(folder: pathlib.Path):
    config = DataConfig(
        kind="table",
        path=str(folder),
        cache=str(folder.parent / "cache"),
        label="click",
        categorical=("user", "item", "query", "site", "slot"),
        multi=("tags",),
        dense=("price", "age"),
    )
    return open_data(config, seed=0)


def _converted(folder: pathlib.Path) -> float:
    begun = time.perf_counter()
    _opened(folder)
    return time.perf_counter() - begun


def _epoch(folder: pathlib.Path) -> float:
    train = _opened(folder).train
    begun = time.perf_counter()
    for step in range(train.num_batches(_BATCH)):
        train.batch(Position(0, step, 0), _BATCH, shuffle=True)
    return time.perf_counter() - begun


_WAYS = {
    "pyarrow alone": _by_pyarrow,
    "vocabularies and shards": _converted,
    "an epoch of batches": _epoch,
}

if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
