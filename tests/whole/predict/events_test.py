"""A run on an event log scores candidates as its evaluation did."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv

import loka_jax
from loka_jax.data import DataConfig
from loka_jax.export import export_run
from loka_jax.predict import evaluate_files, score_file
from loka_jax.train.scores import read_scores
from tests.support import train as support
from tests.whole.train import events_test as runs

USERS, EVENTS = 9, 12
MODEL = runs.MODEL.clone(recipe="f32", max_length=16, window=5, layer_dropout_rate=0.0)


def write(path, events):
    lines = [f"u{u},{t},i{i},{y}\n" for u, t, i, y in events]
    path.write_text("user,when,item,click\n" + "".join(lines))
    return path


@pytest.fixture(scope="module", params=["last", "all"])
def trained(request, tmp_path_factory):
    """A run; its events and the last ones of each user, on which it was evaluated."""
    folder = tmp_path_factory.mktemp(request.param)
    draw = np.random.default_rng(0)
    events = [
        (u, 10 * t, *draw.integers(0, (5, 2)))
        for t in range(EVENTS)
        for u in range(USERS)
    ]
    past, last = events[:-USERS], events[-USERS:]
    data = DataConfig(
        kind="table",
        path=str(write(folder / "train.csv", past)),
        valid=str(write(folder / "valid.csv", last)),
        cache=str(folder / "cache"),
        label="click",
        categorical=("item",),
        user="user",
        time="when",
        history=7,
        targets=request.param,
    )
    own = runs.config(folder / "run", data=data, model=MODEL, eval_every=None)
    # Places that a window or a history of another length changes are not learned.
    assert support.train(dataclasses.replace(own, seed=3))[0] == 0
    return folder, past, last


def columns(events, *, labels):
    user, when, item, click = zip(*events, strict=True) if events else [[]] * 4
    click = click if labels else [None] * len(click)
    return {"user": [f"u{u}" for u in user], "when": when, "item": item, "click": click}


def table(past, new):
    parts = [columns(past, labels=True), columns(new, labels=False)]
    joined = {name: [*parts[0][name], *parts[1][name]] for name in parts[0]}
    joined["item"] = [f"i{i}" for i in joined["item"]]
    return {name: pa.array(values) for name, values in joined.items()}


def test_candidates_have_the_scores_of_the_evaluation(trained):
    folder, past, last = trained
    model = loka_jax.load(folder / "run")
    assert set(model.columns) == {"user", "when", "item", "click"}
    scores = model.scores(table(past[::-1], last))
    (scored,) = read_scores(folder / "run").values()
    beside = support.summary(folder / "run")["baseline_ne"]  # of the same labels
    rate = np.mean([label for *_, label in past])
    labels = np.array([label for *_, label in last])
    loss = -np.mean(np.where(labels, np.log(rate), np.log1p(-rate)))
    entropy = -sum(p * np.log(p) for p in (labels.mean(), 1 - labels.mean()))
    assert beside["mean"] == pytest.approx(loss / entropy, rel=1e-5)
    expected = 1 / (1 + np.exp(-scored.logits.astype(float)))
    if model.config.data.targets == "all":  # windows of other lengths: other positions
        assert scores.shape == expected.shape and np.ptp(scores) > 0
        return
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


def test_many_candidates_have_the_scores_that_each_has_alone(trained):
    folder, past, _ = trained
    model = loka_jax.load(folder / "run")
    new = [(0, 500, item, 0) for item in range(5)] + [(1, 55, 3, 0)]
    together = model.scores(table(past, new))
    assert len(np.unique(together[:5])) == 5
    alone = [model.scores(table(past, [one]))[0] for one in new]
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    later = [(0, 700, 2, 1)]  # which no candidate sees
    np.testing.assert_array_equal(model.scores(table([*past, *later], new)), together)


def test_a_file_of_events_has_the_scores_of_its_candidates(trained, tmp_path):
    folder, past, last = trained
    model = loka_jax.load(folder / "run")
    rows = pa.table(table(past, last))
    csv.write_csv(rows, tmp_path / "log.csv")
    out = tmp_path / "scores.csv"
    done = score_file(model, tmp_path / "log.csv", out, keys=("user", "when"))
    assert done.rows == len(last)
    found = csv.read_csv(out)
    assert found["user"].to_pylist() == [f"u{u}" for u in range(USERS)]
    np.testing.assert_allclose(found["score"], model.scores(rows), rtol=1e-6)
    csv.write_csv(pa.table(table(past, [])), tmp_path / "all.csv")
    with pytest.raises(ValueError, match="leave it empty in those to be scored"):
        score_file(model, tmp_path / "all.csv", tmp_path / "none.csv")
    (numbers,) = evaluate_files(model, tmp_path / "all.csv").overall.values()
    assert numbers["rows"] == len(past) and 0.5 < numbers["ne"] < 2
    with pytest.raises(ValueError, match="an exported model scores rows apart"):
        export_run(folder / "run", tmp_path / "model")
