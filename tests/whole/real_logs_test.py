"""Real click logs, where a developer has them, from training to an exported model."""

import gzip
import json
import pathlib

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from sklearn.metrics import log_loss, roc_auc_score

from loka_jax.export import loader
from tests.support.commands import printed_by

SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
STEPS = 20


def movielens(folder):
    """Returns ratings by users of films with lists of genres, the last ones apart."""
    columns = "user", "item", "rating", "time"
    read = csv.ReadOptions(column_names=columns)
    tabs = csv.ParseOptions(delimiter="\t")
    rows = csv.read_csv(folder / "u.data.gz", read, tabs).sort_by("time").slice(80_000)
    films = gzip.decompress((folder / "u.item.gz").read_bytes()).decode("latin-1")
    genres = {}
    for line in films.splitlines():
        item, _, _, _, _, *flags = line.split("|")
        genres[int(item)] = [f"g{i}" for i, flag in enumerate(flags) if flag == "1"]
    likes = [int(rating > 3) for rating in rows["rating"].to_pylist()]
    tags = [genres[item] for item in rows["item"].to_pylist()]
    rows = rows.drop_columns("rating")
    rows = rows.append_column("like", pa.array(likes)).append_column("tags", [tags])
    return rows.slice(0, 16_000), rows.slice(16_000), "like"


def frappe(folder):
    """Returns a tenth of the rows to train on, and of those to test on."""
    names = ("train_reconstructed", "test")
    tables = [csv.read_csv(folder / f"frappe_x1_{name}.csv.gz") for name in names]
    train, test = (t.take(np.arange(0, t.num_rows, 10)) for t in tables)
    return train, test, "label"


@pytest.mark.parametrize(
    "name, read", [("movielens_100k", movielens), ("frappe_x1", frappe)]
)
def test_scores_are_the_same_by_every_command(name, read, tmp_path):
    if not (SHARED / name).is_dir():
        pytest.skip(f"needs shared/data/{name} beside this checkout")
    train, test, label = read(SHARED / name)
    parquet.write_table(train, tmp_path / "train.parquet")
    parquet.write_table(test, tmp_path / "test.parquet")
    parquet.write_table(test.drop_columns(label), tmp_path / "new.parquet")
    run, model = tmp_path / "run", tmp_path / "model"
    files = "--data.path", tmp_path / "train.parquet", "--data.test"
    files += tmp_path / "test.parquet", "--data.label", label
    # The last state, not the regression at the start, so that FP8 counts.
    short = "--loop.max-steps", STEPS, "--optim.plateau-patience", None
    cache = "--data.cache", tmp_path / "cache"
    said = printed_by(
        "train", "--config", "table", "--workdir", run, *files, *short, *cache
    )
    assert "sites in FP8" in said
    size = json.loads((run / "config.json").read_text())["loop"]["batch_size"]

    judged = tmp_path / "judged.json"
    options = "--data.path", tmp_path / "test.parquet", "--out", judged
    said = printed_by("evaluate", "--workdir", run, *options)
    assert f"weights of step {STEPS}." in said
    scores = tmp_path / "scores.parquet"
    options = "--data.path", tmp_path / "new.parquet", "--out", scores
    printed_by("predict", "--workdir", run, *options)
    options = "--out", model, "--batch-sizes", size, "--platforms", "cpu"
    printed_by("export", "--workdir", run, *options)

    predicted = parquet.read_table(scores)["score"].to_numpy()
    labels = test[label].to_numpy()
    found = json.loads(judged.read_text())["overall"][label]
    assert found["rows"] == len(labels) and found["clicks"] == labels.sum()
    assert found["auc"] == pytest.approx(roc_auc_score(labels, predicted), abs=1e-6)
    assert found["logloss"] == pytest.approx(log_loss(labels, predicted), abs=1e-6)
    assert found["ne"] < 1
    exported = loader.load(str(model)).scores(test.drop_columns(label).to_pydict())
    np.testing.assert_array_equal(exported, predicted)
