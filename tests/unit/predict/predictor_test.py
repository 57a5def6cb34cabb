"""A run scores rows from its own folder as its evaluation did."""

import dataclasses
import json
import shutil

import chex
import jax
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv

import loka_jax
from loka_jax.data.values import Counts
from tests.support import predict as support
from tests.support.predict import RECIPE


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return support.train_and_lose_the_data(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def model(trained):
    return loka_jax.load(trained.workdir)


def probabilities(logits):
    return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def test_scores_are_the_evaluations_without_the_files_it_was_trained_on(trained, model):
    table = csv.read_csv(trained.test)
    scores = model.scores(table.drop_columns(["label"]))
    assert (model.config.model.recipe, scores.dtype) == (RECIPE, np.float32)
    assert np.array_equal(scores, probabilities(trained.logits))
    label = np.asarray(table["label"])
    loss = -np.mean(np.where(label, np.log(scores), np.log1p(-scores)))
    chex.assert_trees_all_close(
        float(loss), trained.summary["final_eval"]["logloss"], rtol=1e-6
    )


def test_rows_may_come_in_a_dict_of_any_types(trained, model):
    table = csv.read_csv(trained.test)
    columns = {name: table[name].to_numpy() for name in ("price", "user")}
    columns["item"] = pa.array(table["item"]).cast(pa.string()).dictionary_encode()
    assert np.array_equal(model.scores(columns), probabilities(trained.logits))


def test_unknown_and_missing_values_are_counted(model):
    counts = Counts()
    rows = {"price": [1.0, None], "user": ["u99", None], "item": [3, 3]}
    assert model.scores(rows, counts).shape == (2,)
    assert counts.report()["columns"] == {
        "price": {"missing": 1},
        "user": {"missing": 1, "oov": 1},
    }


def test_scores_that_are_no_numbers_are_refused(trained):
    model = loka_jax.load(trained.workdir)
    params = jax.tree.map(lambda x: x * np.nan, model._state.params)
    model._state = dataclasses.replace(model._state, params=params)
    rows = {"price": [1.0, 2.0], "user": ["u1", "u2"], "item": [3, 3]}
    with pytest.raises(ValueError, match="2 of 2 scores are no numbers"):
        model.scores(rows)


def test_no_rows_have_no_scores(model):
    rows = {"price": pa.array([], "f4"), "user": pa.array([], "str"), "item": []}
    assert model.scores(pa.table(rows)).shape == (0,)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"user": np.array(["u1", None, 3], object)}, "column 'user' is no list"),
        ({"price": 1.5}, "column 'price' is no list of values of one type"),
        ({"item": [1]}, "differ in length .*item 1.*: align them"),
    ],
)
def test_rows_that_are_no_table_are_refused(model, change, said):
    rows = {"price": [1.0, 2.0, 3.0], "user": ["u1", "u2", "u3"], "item": [1, 2, 3]}
    with pytest.raises(ValueError, match=said):
        model.scores(rows | change)
    with pytest.raises(ValueError, match="the rows are no table .*: give a data frame"):
        model.scores([1, 2])


def test_a_missing_column_is_named(model):
    with pytest.raises(ValueError, match="no column 'item', only price, user"):
        model.scores({"price": [1.0], "user": ["u1"]})


def copied(trained, tmp_path):
    return shutil.copytree(trained.workdir, tmp_path / "run")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run .* name the --workdir of one"):
        loka_jax.load(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_checkpoint_is_refused(trained, tmp_path):
    workdir = copied(trained, tmp_path)
    shutil.rmtree(workdir / "checkpoints")
    with pytest.raises(ValueError, match="no checkpoint yet"):
        loka_jax.load(workdir)


@pytest.mark.parametrize("change", ["missing", "another", "damaged"])
def test_a_lost_encoding_is_refused(trained, tmp_path, change):
    workdir = copied(trained, tmp_path)
    manifest = workdir / "encoding" / "manifest.json"
    if change == "missing":
        shutil.rmtree(manifest.parent)
    elif change == "another":
        value = json.loads(manifest.read_text())
        value["settings"]["transform"] = "none"
        manifest.write_text(json.dumps(value))
    else:
        (manifest.parent / "vocabulary-00.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="encoding of the run, cannot be used .*again"):
        loka_jax.load(workdir)
