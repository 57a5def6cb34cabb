"""Mutated data files of every format: read, or refused in one sentence.

    pytest -m '' tests/drills/data_files_test.py

Every file is opened in another process. None may end it, take it above 2 GB or 60
seconds, or raise anything but a ValueError of one sentence; a file that is accepted has
as many rows as an independent reader finds in it.
"""

import csv
import gzip
import hashlib
import io
import itertools
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
from tests.support.data import HEADER, criteo_line, rows_text, table_config

ROOT = pathlib.Path(__file__).parents[3]
MEMORY = 2 << 30
ROWS = 300
TOKENS = [b'"', b",", b"\n", b"\r", b"\t", b"\0", b"\xff", b'""', b"\r\n", b"9" * 400]
TOKENS += [b"nan", b"-inf", b"1e999", b"\xef\xbb\xbf", b'"\n"', b" ", b"PAR1"]

# Files that once ended the process, raised another error, or took 4 GB.
FOUND = [("parquet", 5337), ("parquet", 5053), ("parquet", 5220), ("shards", 183)]


def flip_bits(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncate(data, rng):
    return data[: rng.randrange(len(data))]


def insert(data, rng):
    at = rng.randrange(len(data) + 1)
    token = rng.choice([*TOKENS, rng.randbytes(rng.randrange(1, 50))])
    return data[:at] + token + data[at:]


def overwrite(data, rng):
    at = rng.randrange(len(data))
    token = rng.choice([*TOKENS, bytes(rng.randrange(1, 9)), b"\xff" * 8])
    return data[:at] + token + data[at + len(token) :]


def chunk(data, rng):
    start = rng.randrange(len(data))
    return slice(start, min(len(data), start + rng.randrange(1, 500)))


def duplicate_chunk(data, rng):
    part = chunk(data, rng)
    return data[: part.stop] + data[part] + data[part.stop :]


def delete_chunk(data, rng):
    part = chunk(data, rng)
    return data[: part.start] + data[part.stop :]


def move_chunk(data, rng):
    part = chunk(data, rng)
    rest = data[: part.start] + data[part.stop :]
    at = rng.randrange(len(rest) + 1)
    return rest[:at] + data[part] + rest[at:]


def swap_lines(data, rng):
    lines = data.splitlines(keepends=True)
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[i], lines[j] = lines[j], lines[i]
    return b"".join(lines)


MUTATIONS = [flip_bits, truncate, insert, overwrite, duplicate_chunk, delete_chunk]
MUTATIONS += [move_chunk, swap_lines]


def mutate(data, rng):
    for _ in range(rng.choice([1, 1, 1, 3])):
        data = rng.choice(MUTATIONS)(data, rng) or b"\n"
    return data


# Makers: each writes a mutated file into a folder and returns the data's options.


def columns(path, **options):
    config = table_config(path, **options)
    names = "kind", "path", "cache", "label", "dense", "categorical", "max_bad_rows"
    return {name: getattr(config, name) for name in names}


def csv_text(rng):
    rows = rows_text(ROWS)
    if rng.random() < 0.5:
        rows = re.sub(r"u(\d)", r'"a ""user""\n\1"', rows)
    return (HEADER + rows).replace("\n", rng.choice(["\n", "\r\n", "\r"])).encode()


def make_csv(folder, rng):
    (folder / "a.csv").write_bytes(mutate(csv_text(rng), rng))
    return columns(folder / "a.csv", max_bad_rows=rng.choice([0, 3, 10**6]))


def make_gzip(folder, rng):
    """Writes a file damaged before or after it was packed, or of several parts."""
    text = csv_text(rng)
    packed = {
        "inside": lambda: gzip.compress(mutate(text, rng), mtime=0),
        "outside": lambda: mutate(gzip.compress(text, mtime=0), rng),
        "parts": lambda: (
            gzip.compress(text[:999]) + mutate(gzip.compress(b"1,2,"), rng)
        ),
    }
    (folder / "a.csv.gz").write_bytes(packed[rng.choice(list(packed))]())
    return columns(folder / "a.csv.gz", max_bad_rows=rng.choice([0, 3, 10**6]))


def make_criteo(folder, rng):
    lines = (criteo_line(str(i % 2), {1: str(i)}, {1: f"{i:08x}"}) for i in range(ROWS))
    (folder / "a.txt").write_bytes(mutate("".join(lines).encode(), rng))
    options = columns(folder / "a.txt", max_bad_rows=rng.choice([0, 3, 10**6]))
    return options | {"kind": "criteo", "dense": (), "categorical": ()}


def arrow_table(rng):
    index = np.arange(1, ROWS + 1)
    kind = rng.choice([pa.string(), pa.large_string(), pa.string_view(), pa.binary()])
    users = pa.array([f"u{i % 7}" for i in index]).cast(kind)
    numbers = {"click": index % 2, "price": index * 0.5, "age": index}
    return pa.table(numbers | {"user": users, "item": [f"i{i % 11}" for i in index]})


def make_parquet(folder, rng):
    path = folder / "a.parquet"
    parquet.write_table(
        arrow_table(rng),
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
        footer = rng.choice([flip_bits, flip_bits, mutate])(footer, rng)
        data = body + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    else:
        data = mutate(data, rng)
    path.write_bytes(data)
    return columns(path)


def make_shards(folder, rng, *, original):
    """Changes a shard, a vocabulary or the manifest, with or without its digests."""
    shutil.copytree(original, folder / "shards")
    folder = folder / "shards"
    manifest = folder / "manifest.json"
    name = rng.choice(["train-00000.npy", "vocabulary-01.parquet", "manifest.json"])
    if name != "manifest.json":
        data = mutate((folder / name).read_bytes(), rng)
        (folder / name).write_bytes(data)
        if rng.random() < 0.7:
            sign(manifest, name, data, rng)
    elif rng.random() < 0.3:
        manifest.write_bytes(mutate(manifest.read_bytes(), rng))
    else:
        value = json.loads(manifest.read_text())
        for _ in range(rng.choice([1, 1, 3])):
            change_field(value, rng)
        manifest.write_text(json.dumps(value))
    return columns(folder)


def sign(manifest, name, data, rng):
    """Makes the manifest fit a changed file, as a stranger would."""
    value = json.loads(manifest.read_text())
    entry = value["files"][name]
    entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if rng.random() < 0.5:
        entry["rows"] = (len(data) - 192) // 20
    manifest.write_text(json.dumps(value))


def change_field(value, rng):
    """Replaces, removes or adds an entry somewhere in nested lists and dicts."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = rng.choice(keys)
        inner = value[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.2:
            break
        value = inner
    junk = [
        None,
        True,
        -1,
        0,
        1,
        5.5,
        10**400,
        2**63,
        "5",
        "",
        "\ud800",
        "../x",
        "x" * 99,
    ]
    junk += [
        [],
        {},
        [1],
        {"a": 1},
        [[[]]],
        float("1e300"),
        json.loads("[" * 300 + "]" * 300),
    ]
    action = rng.choice(["replace", "replace", "remove", "add"])
    if action == "remove":
        del value[key]
    elif action == "replace":
        value[key] = rng.choice(junk)
    elif isinstance(value, dict):
        value[rng.choice(["new", "train-00001.npy", "\x1b[31m"])] = rng.choice(junk)
    else:
        value.append(rng.choice(junk))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    (folder / "a.csv").write_text(HEADER + rows_text(ROWS))
    config = table_config(folder / "a.csv")
    convert(config, find_sources(config), folder / "shards")
    return folder / "shards"


def mutant(folder, kind, seed, shards):
    """Writes a mutated file of a format and returns the options that open it."""
    place = folder / f"{kind}-{seed}"
    place.mkdir()
    rng = random.Random(seed)
    if kind == "shards":
        return make_shards(place, rng, original=shards)
    return MAKERS[kind](place, rng)


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
    path = request["path"]
    assert "crash" not in result, f"{path}: {result['crash']}"
    assert result["seconds"] < 60 and result["peak"] < MEMORY, path
    if message := result.get("refusal"):
        assert message.isprintable() and message.endswith("."), (path, message)
        assert len(message) < 1000, path
        return
    rows = sum(result["rows"].values()) + result["bad_rows"]
    assert rows == rows_in(pathlib.Path(path), request), path


def rows_in(path, request):
    """Returns the number of rows that another reader finds."""
    if path.is_dir():
        return ROWS
    if path.suffix == ".parquet":
        return parquet.read_metadata(path).num_rows
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    quoting = csv.QUOTE_NONE if request["kind"] == "criteo" else csv.QUOTE_MINIMAL
    delimiter = "\t" if request["kind"] == "criteo" else ","
    text = io.StringIO(data.decode("utf-8-sig", errors="replace"), newline="")
    rows = csv.reader(text, delimiter=delimiter, quoting=quoting)
    return sum(1 for row in rows if row) - (request["kind"] != "criteo")


MAKERS = {
    "csv": make_csv,
    "gzip": make_gzip,
    "criteo": make_criteo,
    "parquet": make_parquet,
    "shards": make_shards,
}


def test_a_few_mutated_files_of_every_format(tmp_path, shards):
    places = [*itertools.product(MAKERS, range(20)), *FOUND]
    requests = [mutant(tmp_path, kind, seed, shards) for kind, seed in places]
    for request, result in zip(requests, opened(requests), strict=True):
        check(request, result)


@pytest.mark.drill
@pytest.mark.parametrize("kind", MAKERS)
def test_many_mutated_files(tmp_path, shards, kind):
    requests = [mutant(tmp_path, kind, i, shards) for i in range(1000, 1250)]
    results = opened(requests)
    for request, result in zip(requests, results, strict=True):
        check(request, result)
    refused = sum("refusal" in result for result in results)
    assert 0 < refused < len(results), "mutations that are too strong or too weak"
