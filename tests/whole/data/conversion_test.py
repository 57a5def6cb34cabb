"""Conversions in processes of their own: memory, signals, a full disk."""

import gzip
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.commands import signalled
from tests.support.data import HEADER, rows_text, write

SCRIPT = pathlib.Path(__file__).parents[3] / "experiments" / "convert.py"
COLUMNS = "--data.label click --data.dense price age --data.categorical user item"

# A peak is that of all conversions so far.
CONVERT = """
import pathlib, sys
from loka_jax.data import DataConfig, open_data
for path in sys.argv[1:]:
    names = tuple(f"c{i}" for i in range(1000))
    columns = {"dense": names} if "columns" in path else {"categorical": ("c",)}
    cache = str(pathlib.Path(path).parent / "cache")
    open_data(DataConfig(kind="table", path=path, cache=cache, **columns), seed=0)
    status = pathlib.Path("/proc/self/status").read_text()
    print(int(status.partition("VmHWM:")[2].split()[0]) * 1024, flush=True)
"""


def equal_cells(path, size, count):
    indices = pa.array(np.zeros(count, np.int32))
    cells = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * size]))
    table = pa.table({"label": np.arange(count) % 2, "c": cells})
    parquet.write_table(table, path)


def plain_cells(path):
    """Writes equal cells one by one, which only compression makes small."""
    cells = pa.array(["x" * 20_000]).take(pa.array(np.zeros(10_000, np.int32)))
    table = pa.table({"label": np.arange(10_000) % 2, "c": cells})
    options = {"use_dictionary": False, "compression": "zstd"}
    with parquet.ParquetWriter(path, table.schema, **options) as file:
        for _ in range(13):
            file.write_table(table)


def long_text(path):
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write("label,c\n")
        for i in range(60_000):
            file.write(f"{i % 2},{'x' * 20_000}\n")


def many_columns(path):
    columns = {f"c{i}": np.zeros(150_000, np.int8) for i in range(1000)}
    columns["label"] = np.arange(150_000) % 2
    parquet.write_table(pa.table(columns), path)


MAKERS = {
    "long.parquet": lambda path: equal_cells(path, size=20_000, count=130_000),
    "huge.parquet": lambda path: equal_cells(path, size=4_000_000, count=650),
    "plain.parquet": plain_cells,
    "text.csv.gz": long_text,
    "short.csv": lambda path: path.write_text("label,c\n" + "0,\n1,\n" * 4_000_000),
    "columns.parquet": many_columns,
}


@pytest.mark.drill
def test_conversions_of_hostile_files_stay_below_two_gigabytes(tmp_path):
    for name, make in MAKERS.items():
        make(tmp_path / name)
    command = [sys.executable, "-c", CONVERT, *(tmp_path / name for name in MAKERS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peaks = dict(zip(MAKERS, map(int, done.stdout.split()), strict=True))
    assert max(peaks.values()) < 2 << 30, peaks


@pytest.mark.parametrize(
    ("signal_number", "code", "said"),
    [
        (signal.SIGINT, 130, "\ninterrupted: nothing was written\n"),
        (signal.SIGTERM, 143, ""),
    ],
)
def test_signal_ends_without_leaving_anything(tmp_path, signal_number, code, said):
    source = write(tmp_path / "clicks.csv", HEADER + rows_text(1_000_000))
    command = [sys.executable, SCRIPT, "--data.path", source, *COLUMNS.split()]
    command += ["--out", tmp_path / "shards"]
    ended = signalled(command, signal_number, tmp_path, ".shards.partial-*")
    assert ended == (code, said)
    assert [path.name for path in tmp_path.iterdir()] == ["clicks.csv"]


@pytest.mark.parametrize(
    ("size", "message"),
    [("200k", "bytes free, and .* take"), ("480k", "No space left on device after")],
    ids=["shards", "vocabularies"],
)
def test_a_full_disk_ends_a_conversion_in_one_sentence(tmp_path, size, message):
    rng = np.random.default_rng(0)
    lines = (f"{i % 2},{i},{i},{rng.bytes(16).hex()},i\n" for i in range(20_000))
    source = write(tmp_path / "a.csv", HEADER + "".join(lines))
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size={size} none {disk}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount]).returncode:
        pytest.skip("needs the right to mount a disk of its own (unshare -rm)")
    convert = f"{sys.executable} {SCRIPT} --data.path {source} {COLUMNS}"
    convert += f" --out {disk / 'shards'}; code=$?; ls -A {disk}; exit $code"
    command = ["unshare", "-rm", "sh", "-c", f"{mount} && {convert}"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    assert re.search(message, result.stderr)
    amounts = re.findall(r"\d[\d,]*", result.stderr.split("disk", 1)[1])
    assert len(set(amounts)) >= 2
    assert not result.stdout  # nothing is left
