"""What the columns of a table are taken for."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax.data import DataConfig
from loka_jax.data.infer import infer_columns

N = 300
DRAW = np.random.default_rng(0)
DAY = datetime.datetime(2026, 11, 1)
CLICK = [i % 2 for i in range(N)]
COLUMNS = {
    "click": CLICK,
    "purchase": [int(i % 9 == 0) for i in range(N)],
    "at": [DAY + datetime.timedelta(hours=i) for i in range(N)],
    "weight": [0.5 + i % 3 for i in range(N)],
    "user": [f"u{i % 40}" for i in range(N)],
    "adId": [1000 + i % 60 for i in range(N)],
    "site": [2**40 + 7 * (i % 30) for i in range(N)],
    "rating": [1 + i % 5 for i in range(N)],
    "flag": [i % 3 == 0 for i in range(N)],
    "tags": [[f"t{j}" for j in range(i % 4)] for i in range(N)],
    "genres": [f"g{i % 3}|g{i % 5}" for i in range(N)],
    "scores": [[0.5] for i in range(N)],
    "price": [None if i % 7 == 0 else i / 3 for i in range(N)],
    "age": [18 + i % 70 for i in range(N)],
    "row_id": list(range(N)),
    "session": [f"s{i}" for i in range(N)],
    "same": ["x"] * N,
    "nothing": pa.nulls(N),
    "place": [{"lat": 1.0}] * N,
    "__index_level_0__": list(range(N)),
}
KINDS = {
    "label": "click",
    "time": "at",
    "weight": "weight",
    "categorical": ("user", "adId", "site", "rating", "flag"),
    "multi": ("tags", "genres"),
    "dense": ("price", "age"),
    "separator": "|",
}


def written(folder, columns=COLUMNS, name="log.parquet"):
    parquet.write_table(pa.table(columns), folder / name)
    return str(folder / name)


def inferred(path, **options):
    options = {"label": "click", **options} if "labels" not in options else options
    return infer_columns(DataConfig(kind="table", path=path, **options))


def kinds_of(config, names=KINDS):
    return {name: getattr(config, name) for name in names}


def test_kinds_are_those_of_names_types_and_values(tmp_path):
    config, notes = inferred(written(tmp_path))
    assert kinds_of(config) == KINDS
    text = "\n".join(notes)
    assert "by 300 rows" in notes[0] and "user (40 values)" in text
    for why in (
        "purchase (may be a label)",
        "scores (lists of fractions, as weights are)",
        "row_id (a value of its own in nearly each row)",
        "session (a value of its own in nearly each row)",
        "same (one value)",
        "nothing (no value)",
        "place (no numbers or text)",
        "__index_level_0__ (an index of pandas)",
    ):
        assert why in text
    assert notes[-1].endswith("--data.multi tags genres --data.dense price age")


def test_text_files_hold_the_same_kinds(tmp_path):
    flat = {k: v for k, v in COLUMNS.items() if k not in ("tags", "scores", "place")}
    lines = [",".join(flat)]
    for row in zip(*(pa.array(v).to_pylist() for v in flat.values()), strict=True):
        lines.append(",".join("" if value is None else str(value) for value in row))
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    config, _ = inferred(str(tmp_path / "log.csv"))
    assert kinds_of(config) == KINDS | {"multi": ("genres",)}


def test_options_say_what_they_name_and_the_rest_is_inferred(tmp_path):
    path = written(tmp_path)
    config, _ = inferred(path, label="purchase", dense=("age", "rating"), time="row_id")
    assert config.label == "purchase" and config.time == "row_id"
    assert config.dense == ("age", "rating")
    assert config.categorical == ("user", "adId", "site", "flag")
    config, _ = inferred(path, labels=("click", "purchase"), weight="price")
    assert config.labels == ("click", "purchase") and config.weight == "price"
    assert config.dense == ("age",)
    config, _ = inferred(path, multi=("tags",), multi_weights=("tags=scores",))
    assert config.multi == ("tags",) and config.separator is None


def test_a_validation_file_needs_no_time(tmp_path):
    valid = written(tmp_path, name="valid.parquet")
    config, notes = inferred(written(tmp_path), valid=valid)
    assert config.time is None and "at (a time)" in "\n".join(notes)


@pytest.mark.parametrize(
    "columns, said",
    [
        ({"user": COLUMNS["user"]}, "none holds 0 and 1 under a usual name"),
        (
            {"click": CLICK, "buy": CLICK, "user": COLUMNS["user"]},
            "click, buy may be the label: name it with --data.label",
        ),
        ({"label": CLICK, "same": COLUMNS["same"]}, "has no column for the model"),
        ({"label": COLUMNS["user"], "age": CLICK}, "not a number: write labels as 0"),
    ],
)
def test_what_cannot_be_inferred_is_said(tmp_path, columns, said):
    with pytest.raises(ValueError, match=said):
        inferred(written(tmp_path, columns), label="label")


def test_a_folder_of_several_tables_is_told_apart(tmp_path):
    written(tmp_path, {"label": CLICK, "caf\u00e9": COLUMNS["user"]}, "a.parquet")
    written(tmp_path, {"cafe\u0301": COLUMNS["user"]}, "b.parquet")  # one character
    why = "a.parquet and .*b.parquet are no files of one table .* has no label\\)"
    with pytest.raises(ValueError, match=why):
        inferred(str(tmp_path))
    (tmp_path / "b.parquet").rename(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match="notes.txt must end in .* or name the table"):
        inferred(str(tmp_path))
    path = str(tmp_path / "*.parquet")
    assert inferred(path, label="label").config.categorical == ("caf\u00e9",)


def test_the_only_column_with_a_label_s_name_is_it(tmp_path):
    columns = {"user": COLUMNS["user"], "is_click": CLICK}
    config, _ = inferred(written(tmp_path, columns), label="label")
    assert config.label == "is_click" and config.categorical == ("user",)
