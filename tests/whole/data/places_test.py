"""Files by paths, folders, globs and partitions, here and in an object store."""

import os
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, fs, parquet

from loka_jax.data import DataConfig, places
from loka_jax.data import open as open_lib
from loka_jax.data.files import find_sources
from loka_jax.data.filters import is_filter, parse_filter
from tests.support.data import open_table, rows_of

DAYS = tuple(f"2026-11-{day:02d}" for day in range(1, 6))
HOURS = ("2026-11-02T11", "2026-11-02T12")
COLUMNS = {"dense": ("row",), "categorical": ("user", "dt"), "transform": ("none",)}


def table(first, count=40):
    rows = range(first, first + count)
    values = {"click": [i % 2 for i in rows], "row": list(rows)}
    return pa.table(values | {"user": [f"u{i % 7}" for i in rows]})


@pytest.fixture
def logs(tmp_path):
    """A folder of days, with a marker as Spark writes, and a file that is none."""
    for number, day in enumerate(DAYS):
        folder = tmp_path / "logs" / f"dt={day}"
        folder.mkdir(parents=True)
        parquet.write_table(table(100 * number), folder / "part-0.parquet")
        (folder / "_SUCCESS").touch()
    (tmp_path / "logs" / "README.md").write_text("x")
    return tmp_path / "logs"


def names(path, **options):
    found = find_sources(DataConfig(kind="table", path=path, **options))
    return [[places.shown(file) for file in files] for files in found]


def parts(*days):
    return [f"dt=2026-11-{day:02d}/part-0.parquet" for day in days]


def row_numbers(splits, split):
    return sorted(rows_of(splits, split).dense[:, 0].astype(int).tolist())


def test_files_of_folders_paths_and_globs_come_in_their_order(logs):
    everything = [parts(1, 2, 3, 4, 5), [], []]
    assert names(str(logs)) == everything
    assert names(f"{logs}/*/*.parquet") == names(f"{logs}/**/part-?.par*") == everything
    assert names(f"{logs}/dt=2026-11-0[1-2]") == [parts(1, 2), [], []]
    days = tuple(f"{logs}/dt={day}" for day in (DAYS[3], DAYS[0]))
    assert names(days) == [parts(4, 1), [], []]
    assert names(days, valid=f"{logs}/dt={DAYS[1]}") == [parts(4, 1), parts(2), []]


def test_folders_may_be_splits(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / split).mkdir()
        parquet.write_table(table(0), tmp_path / split / "part-0.parquet")
    assert [len(files) for files in names(str(tmp_path))] == [1, 1, 1]


def test_ranges_of_days_are_splits_and_partitions_are_columns(logs):
    options = {
        "train": "dt<2026-11-04",
        "valid": "dt=2026-11-04",
        "test": "dt>2026-11-04 and dt<=2026-11-05",
    }
    assert names(str(logs), **options) == [parts(1, 2, 3), parts(4), parts(5)]
    splits = open_table(logs, **COLUMNS, **options)
    for split, days in (("train", (0, 1, 2)), ("valid", (3,)), ("test", (4,))):
        rows = [i for day in days for i in range(100 * day, 100 * day + 40)]
        assert row_numbers(splits, split) == rows
    assert splits.report["categorical"]["dt"]["values"] == 3
    assert "those of dt=2026-11-04" in splits.report["split_rule"]
    stamps = splits.report["splits"]["train"]["stamps"]
    path = logs / f"dt={DAYS[0]}" / "part-0.parquet"
    assert stamps[str(path)] == [path.stat().st_size, path.stat().st_mtime_ns]


def test_ranges_of_a_column_are_splits(tmp_path):
    path = tmp_path / "log.csv"
    csv.write_csv(table(0, 300), path)
    columns = COLUMNS | {"categorical": ("user",)}
    first = open_table(path, **columns, train="row<200", valid="row>=250")
    assert row_numbers(first, "train") == list(range(200))
    assert row_numbers(first, "valid") == list(range(250, 300))
    other = open_table(path, **columns, train="row<200", valid="row>=260")
    assert row_numbers(other, "valid") == list(range(260, 300))  # not from the cache
    with pytest.raises(ValueError, match="row 101 is of the train and of the valid"):
        open_table(path, **columns, train="row<200", valid="row>=100")
    with pytest.raises(ValueError, match="has no rows for the valid split"):
        open_table(path, **columns, train="row<200", valid="row>=1000")


@pytest.mark.parametrize(
    "options, why",
    [
        ({"train": "dt<2020-01-01"}, "'dt<2020-01-01' takes none of the 5 files"),
        ({"train": "tomorrow"}, "must be comparisons, as in 'dt<2026-11-13'"),
        ({"valid": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_what_takes_no_file_is_said(logs, options, why):
    with pytest.raises(ValueError, match=why):
        names(str(logs), **options)


@pytest.mark.parametrize(
    "text, values, holds",
    [
        ("a<2026-11-02", ["2026-11-01", "2026-11-02", None], [1, 0, 0]),
        ("a>=9", [10, 9, 8], [1, 1, 0]),
        ("a>=9", ["10", "9", "8"], [1, 1, 0]),
        ("a!=x", ["x", "y"], [0, 1]),
        (
            "a >= 2026-11-02T12",
            np.array(["2026-11-02T11", "2026-11-02T12"], "M8[s]"),
            [0, 1],
        ),
    ],
)
def test_values_are_compared_as_what_they_are(text, values, holds):
    (comparison,) = parse_filter(text, "--data.train").comparisons
    assert comparison.holds(pa.array(values)).tolist() == [bool(x) for x in holds]
    assert is_filter(text) and not is_filter("logs/day")


def test_other_file_systems_are_read_by_the_same_code(logs, monkeypatch):
    """An address whose file system is a folder, in place of a store."""
    system = fs.SubTreeFileSystem(str(logs.parent), fs.LocalFileSystem())
    monkeypatch.setattr(places, "_system_of", lambda store: system)
    assert_same_as_local("s3://logs", logs)


def assert_same_as_local(address, logs):
    days = {"train": "dt<2026-11-05", "valid": "dt=2026-11-05"}
    assert names(address, **days) == names(str(logs), **days)
    assert names(f"{address}/*/part-*.parquet") == names(str(logs))
    assert names(f"{address}/dt={DAYS[0]}/part-0.parquet") == [parts(1), [], []]
    how = COLUMNS | days | {"cache": str(logs.parent / "cache")}
    near, far = (open_table(path, **how) for path in (logs, address))
    assert near.identity == far.identity
    assert open_table(address, **how).folder.path == far.folder.path
    with pytest.raises(ValueError, match="there is no file at .*nothing"):
        names(f"{address}/nothing")


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The address of a server that speaks the protocol of S3."""
    pytest.importorskip("moto.server")
    port = 17_000 + os.getpid() % 9_000
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
    for name, value in (address | keys | {"AWS_DEFAULT_REGION": "us-east-1"}).items():
        monkeypatch.setenv(name, value)
    places._system_of.cache_clear()
    yield lambda: fs.S3FileSystem(
        endpoint_override=address["AWS_ENDPOINT_URL"], allow_bucket_creation=True
    )
    server.terminate()
    server.wait()


def test_a_bucket_is_read_as_a_folder_is(logs, store):
    deadline = time.monotonic() + 30
    while True:
        try:
            store().create_dir("clicks")
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    fs.copy_files(
        str(logs),
        "clicks/logs",
        source_filesystem=fs.LocalFileSystem(),
        destination_filesystem=store(),
    )
    assert_same_as_local("s3://clicks/logs", logs)


def test_a_file_that_appears_while_others_are_read_is_said(logs, monkeypatch):
    def convert(*arguments, **options):
        convert_files(*arguments, **options)
        parquet.write_table(table(900), logs / f"dt={DAYS[0]}" / "part-1.parquet")

    convert_files = open_lib.convert
    monkeypatch.setattr(open_lib, "convert", convert)
    with pytest.raises(ValueError, match="files appeared in .* start again"):
        open_table(logs, **COLUMNS)


def test_what_became_of_files_is_said():
    before = {"train": {"a": [1, 5], "b": [1, 5], "c": [1, 5]}}
    now = {"train": {"a": (1, 5), "b": (1, 6), "d": (1, 5)}, "test": {"e": (1, 1)}}
    assert places.changes(before, now) == [
        "d of the train files is new",
        "c of the train files is gone",
        "b of the train files has changed",
        "e of the test files is new",
    ]
