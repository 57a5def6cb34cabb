"""Mutated data files of every format: read, or refused in one sentence.

Every file is opened in another process. None may end it, take it above 2 GB or 60
seconds, or raise anything but a ValueError of one sentence; a file that is accepted has
as many rows as an independent reader finds in it.
"""

import csv
import gzip
import hashlib
import io
import json
import pathlib
import random
import re
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from tests.drills.damage import changed_json, flip_bits, mutated
from tests.support import drills
from tests.support.data import HEADER, criteo_line, rows_text, table_config, write

ROOT = pathlib.Path(__file__).parents[3]
ROWS = 300
# Files that once ended the process, raised another error, or took 4 GB.
FOUND = {"parquet": [5337, 5053, 5220], "shards": [183]}


def columns(path, **options):
    """Returns the options that open a file."""
    config = table_config(path, **options)
    names = "kind", "path", "cache", "label", "dense", "categorical", "max_bad_rows"
    return {name: getattr(config, name) for name in names}


# Makers: each writes a mutated file into a folder and returns the data's options.


def csv_text(rng):
    rows = rows_text(ROWS)
    if rng.random() < 0.5:
        rows = re.sub(r"u(\d)", r'"a ""user""\n\1"', rows)
    return (HEADER + rows).replace("\n", rng.choice(["\n", "\r\n", "\r"])).encode()


def make_csv(folder, rng):
    (folder / "a.csv").write_bytes(mutated(csv_text(rng), rng))
    return columns(folder / "a.csv", max_bad_rows=rng.choice([0, 3, 10**6]))


def make_gzip(folder, rng):
    """Writes a file damaged before or after it was packed, or of several parts."""
    text = csv_text(rng)
    way = rng.choice(["inside", "outside", "parts"])
    if way == "inside":
        packed = gzip.compress(mutated(text, rng), mtime=0)
    elif way == "outside":
        packed = mutated(gzip.compress(text, mtime=0), rng)
    else:
        packed = gzip.compress(text[:999]) + mutated(gzip.compress(b"1,2,"), rng)
    (folder / "a.csv.gz").write_bytes(packed)
    return columns(folder / "a.csv.gz", max_bad_rows=rng.choice([0, 3, 10**6]))


def make_criteo(folder, rng):
    lines = (criteo_line(str(i % 2), {1: str(i)}, {1: f"{i:08x}"}) for i in range(ROWS))
    (folder / "a.txt").write_bytes(mutated("".join(lines).encode(), rng))
    options = columns(folder / "a.txt", max_bad_rows=rng.choice([0, 3, 10**6]))
    return options | {"kind": "criteo", "dense": (), "categorical": ()}


def make_parquet(folder, rng):
    index = np.arange(1, ROWS + 1)
    kind = rng.choice([pa.string(), pa.large_string(), pa.string_view(), pa.binary()])
    users = pa.array([f"u{i % 7}" for i in index]).cast(kind)
    table = {"click": index % 2, "price": index * 0.5, "age": index}
    table |= {"user": users, "item": [f"i{i % 11}" for i in index]}
    path = folder / "a.parquet"
    parquet.write_table(
        pa.table(table),
        path,
        compression=rng.choice(["none", "snappy", "zstd", "gzip"]),
        use_dictionary=rng.choice([True, False]),
        write_page_checksum=rng.choice([True, False]),
        row_group_size=rng.choice([50, 1000]),
        data_page_version=rng.choice(["1.0", "2.0"]),
    )
    data = path.read_bytes()
    if rng.random() < 0.5:  # only the footer, and the rest in its place
        size = int.from_bytes(data[-8:-4], "little")
        body, footer = data[: -size - 8], data[-size - 8 : -8]
        footer = rng.choice([flip_bits, flip_bits, mutated])(footer, rng)
        data = body + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    else:
        data = mutated(data, rng)
    path.write_bytes(data)
    return columns(path)


def make_shards(folder, rng):
    """Changes a shard, a vocabulary or the manifest, with or without its digests."""
    folder = shutil.copytree(folder.parent / "shards", folder / "shards")
    manifest = folder / "manifest.json"
    path = folder / rng.choice(["train.records", "vocabulary-01.parquet", manifest])
    change = mutated
    if path == manifest and rng.random() > 0.3:
        change = changed_json
    data = change(path.read_bytes(), rng)
    path.write_bytes(data)
    if path != manifest and rng.random() < 0.7:  # signed, as a stranger would
        value = json.loads(manifest.read_text())
        entry = value["files"][path.name]
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if rng.random() < 0.5:
            entry["count"] = len(data) // 20
        manifest.write_text(json.dumps(value))
    return columns(folder)


MAKERS = {"csv": make_csv, "gzip": make_gzip, "criteo": make_criteo}
MAKERS |= {"parquet": make_parquet, "shards": make_shards}


def opened(requests):
    """Returns what came of opening each in turn, in a process of its own."""
    worker = subprocess.run(
        [sys.executable, "-m", "tests.drills.data_worker"],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    results = [json.loads(line) for line in worker.stdout.splitlines()]
    if len(results) < len(requests):
        path = requests[len(results)]["path"]
        pytest.fail(f"{path} ended the process: {worker.stderr[-2000:]}")
    return results


def check(request, result):
    path = pathlib.Path(request["path"])
    assert "crash" not in result, f"{path}: {result['crash']}"
    assert result["seconds"] < 60 and result["peak"] < 2 << 30, path
    if message := result.get("refusal"):
        assert message.isprintable() and message.endswith("."), (path, message)
        assert len(message) < 1000, path
    else:
        assert result["rows"] == rows_in(path, request), path


def rows_in(path, request):
    """Returns the number of rows that another reader finds."""
    if path.is_dir():
        return ROWS
    if path.suffix == ".parquet":
        return parquet.read_metadata(path).num_rows
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    has_header = request["kind"] != "criteo"
    quoting = csv.QUOTE_MINIMAL if has_header else csv.QUOTE_NONE
    delimiter = "," if has_header else "\t"
    text = io.StringIO(data.decode("utf-8-sig", errors="replace"), newline="")
    rows = csv.reader(text, delimiter=delimiter, quoting=quoting)
    return sum(1 for row in rows if row) - has_header


@pytest.mark.parametrize("seeds", [range(20), *drills([range(1000, 1250)])], ids=len)
@pytest.mark.parametrize("kind", MAKERS)
def test_mutated_files(tmp_path, kind, seeds):
    config = table_config(write(tmp_path / "a.csv", HEADER + rows_text(ROWS)))
    convert(config, find_sources(config), tmp_path / "shards")
    requests = []
    for seed in (*seeds, *FOUND.get(kind, ())):
        (tmp_path / str(seed)).mkdir()
        requests.append(MAKERS[kind](tmp_path / str(seed), random.Random(seed)))
    results = opened(requests)
    for request, result in zip(requests, results, strict=True):
        check(request, result)
    refused = sum("refusal" in result for result in results)
    assert 0 < refused < len(results), "mutations that are too strong or too weak"
