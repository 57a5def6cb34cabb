"""Scores equal the evaluation's for lists, weights of their values, and of examples."""

import dataclasses

import chex
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import parquet

import loka_jax
from loka_jax.export import export_run, loader
from loka_jax.predict import score_file
from loka_jax.train.config import EmbeddingConfig
from tests.support import predict as support

LISTS = {
    "multi": ("tags", "genres"),
    "multi_weights": ("tags=strengths",),
    "weight": "importance",
}


def table(count, *, seed=0, values=9):
    """Returns rows with lists of 0 to 4 values, some of them missing, and weights."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 5, count)
    tags = [[f"t{t}" for t in draw.integers(0, values, n)] for n in lengths]
    genres = [None if len(t) == 1 else [x[1:] for x in t[::-1]] for t in tags]
    user = draw.integers(0, 12, count)
    clicked = draw.random(count) < 1 / (1 + np.exp(1 + user / 6 - lengths))
    return pa.table(
        {
            "label": clicked.astype(int),
            "importance": draw.uniform(0.5, 4, count),
            "price": draw.lognormal(size=count),
            "user": [f"u{i}" for i in user],
            "item": draw.integers(0, 9, count),
            "tags": tags,
            "genres": genres,
            "strengths": [list(draw.random(len(t))) for t in tags],
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lists")
    parquet.write_table(table(200), folder / "train.parquet")
    # Not a multiple of the batch size; some tags are new.
    test = folder / "test.parquet"
    parquet.write_table(table(75, seed=1, values=12), test)
    config = support.config(folder, path="train.parquet", test=str(test), **LISTS)
    config = dataclasses.replace(
        config, embedding=EmbeddingConfig(dim=16, pooling=("genres=sum",))
    )
    return support.train(folder, config)._replace(test=test)


@pytest.fixture(scope="module")
def expected(trained):
    """The probabilities of the evaluation's logits."""
    logits = trained.logits.astype(np.float64)
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


def test_scores_of_lists_are_the_evaluations(trained, expected):
    rows = parquet.read_table(trained.test)
    model = loka_jax.load(trained.workdir)
    scores = model.scores(rows.drop_columns(["label", "importance"]))
    assert np.array_equal(scores, expected)
    losses = -np.where(rows["label"], np.log(scores), np.log1p(-scores))
    chex.assert_trees_all_close(
        float(np.average(losses, weights=rows["importance"])),
        trained.summary["final_eval"]["logloss"],
        rtol=1e-6,
    )


def test_scores_of_a_file_with_lists_are_the_evaluations(trained, expected, tmp_path):
    out = tmp_path / "scores.parquet"
    score_file(loka_jax.load(trained.workdir), trained.test, out, keys=("user",))
    scores = parquet.read_table(out)
    assert np.array_equal(scores["score"], expected)
    assert scores["user"] == parquet.read_table(trained.test)["user"]


def test_lists_are_no_keys_of_a_csv_file(trained, tmp_path):
    model = loka_jax.load(trained.workdir)
    with pytest.raises(ValueError, match="--data.keys tags holds .*list<.* .parquet"):
        score_file(model, trained.test, tmp_path / "s.csv", keys=("user", "tags"))
    assert not list(tmp_path.iterdir())


def test_exported_lists_are_scored_as_the_evaluations(trained, expected, tmp_path):
    options = {"batch_sizes": (32,), "platforms": ("cpu",)}  # that of the run
    found = export_run(trained.workdir, tmp_path / "model", **options)
    assert found.differences == {32: 0.0}
    rows = parquet.read_table(trained.test).to_pydict()
    assert np.array_equal(loader.load(tmp_path / "model").scores(rows), expected)


def test_lists_and_their_weights_count(trained, expected):
    """Otherwise, equal scores would say nothing about them."""
    rows = parquet.read_table(trained.test)
    model = loka_jax.load(trained.workdir)
    lengths = np.asarray(pc.list_value_length(rows["tags"]))
    for name in ("tags", "strengths"):
        turned = pa.array([values[::-1] for values in rows[name].to_pylist()])
        place = rows.column_names.index(name)
        scores = model.scores(rows.set_column(place, name, turned))
        assert (scores != expected)[lengths > 1].mean() > 0.8
