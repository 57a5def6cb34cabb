"""A run on an event log scores candidates as its evaluation did."""

import dataclasses
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

import loka_jax
from loka_jax.data import DataConfig
from loka_jax.export import export_run, loader
from loka_jax.models import InterFormer, OneTrans
from loka_jax.predict import evaluate_files, score_file
from loka_jax.train.scores import read_scores
from tests.support import train as support
from tests.unit.data import unfold_test as lists
from tests.whole.train import events_test as runs

USERS, EVENTS = 9, 12
MODEL = runs.MODEL.clone(recipe="f32", max_length=16, window=5, layer_dropout_rate=0.0)
SMALL: dict[str, Any] = dict(
    dim=16, num_heads=1, item_mlp=(), head_mlp=(16,), age_buckets=8
)
SMALL |= dict(max_length=16, recipe="f32")
ONETRANS = OneTrans(num_layers=2, num_tokens=2, **SMALL)
INTERFORMER = InterFormer(num_layers=1, dot_mlp=(8,), cross_rank=4, **SMALL)


def write(path, events):
    lines = [f"u{u},{t},i{i},{y}\n" for u, t, i, y in events]
    path.write_text("user,when,item,click\n" + "".join(lines))
    return path


@pytest.fixture(
    scope="module",
    params=[
        ("last", MODEL),
        ("all", MODEL),
        ("last", ONETRANS.clone(pyramid=(4,))),
        ("all", ONETRANS),
        ("last", INTERFORMER),
    ],
    ids=lambda x: f"{x[0]}-{type(x[1]).__name__}",
)
def trained(request, tmp_path_factory):
    """A run; its events and the last ones of each user, on which it was evaluated."""
    targets, model = request.param
    folder = tmp_path_factory.mktemp(targets)
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
        targets=targets,
    )
    own = runs.config(folder / "run", data=data, model=model, eval_every=None)
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
    few = tmp_path / "few.csv"  # of which the others are histories
    where = f"when={last[0][1]} and user!=u0"
    done = score_file(model, tmp_path / "log.csv", few, keys=("user",), where=where)
    assert csv.read_csv(few)["user"].to_pylist() == [f"u{u}" for u in range(1, USERS)]
    np.testing.assert_allclose(
        csv.read_csv(few)["score"], found["score"][1:], rtol=1e-5
    )
    csv.write_csv(pa.table(table(past, [])), tmp_path / "all.csv")
    with pytest.raises(ValueError, match="leave it empty in those to be scored"):
        score_file(model, tmp_path / "all.csv", tmp_path / "none.csv")
    judged = evaluate_files(model, tmp_path / "all.csv", by=("when",))
    (numbers,) = judged.overall.values()
    assert numbers["rows"] == len(past) and 0.5 < numbers["ne"] < 2
    late = past[-1][1]
    part = evaluate_files(model, tmp_path / "all.csv", where=f"when={late}").overall
    assert part["click"]["rows"] == USERS
    loss = judged.groups[str(late)]["click"]["logloss"]
    assert part["click"]["logloss"] == pytest.approx(loss, rel=1e-5)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """An exported run, and what was exported."""
    out = tmp_path_factory.mktemp("exported") / "model"
    options = {"batch_sizes": (16, 128), "platforms": ("cpu",)}
    found = export_run(trained[0] / "run", out, **options)
    return loader.load(out), found


def test_an_exported_model_has_the_scores_of_the_run(trained, exported):
    folder, past, last = trained
    model, found = exported
    # Programs may sum in another order.
    assert found.differences.keys() == {16, 128}
    assert max(found.differences.values()) < 1e-6
    new = [*last, *((0, 500, item, 0) for item in range(5)), (77, 3, 1, 0)]
    rows = table(past[::-1], new)  # the last user is new
    lists = {name: values.to_pylist() for name, values in rows.items()}
    expected = loka_jax.load(folder / "run").scores(rows)
    np.testing.assert_allclose(model.scores(lists), expected, rtol=1e-5)


def test_an_exported_model_scores_many_candidates_and_requests_in_one_call(exported):
    model, _ = exported
    history = [("u1", 10 * t, f"i{t % 3}", t % 2) for t in range(9)]
    new = [("u1", 85, f"i{i}", None) for i in range(5)]
    calls, program = [], model.program
    model.program = lambda size: calls.append(size) or program(size)
    together = asked(model, [*history, *new])
    assert len(np.unique(together)) == 5 and len(calls) == 1
    alone = [asked(model, [*history, one])[0] for one in new]
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    # Events after the candidates, of their time or in another order change nothing.
    late = [("u1", 85, "i4", 1), ("u1", 99, "i1", 0), ("u2", 1, "i1", 1)]
    shuffled = [*late, *new, *history[::-1]]
    np.testing.assert_allclose(asked(model, shuffled), together, rtol=1e-5)
    unknown = asked(model, [*history, ("u1", 85, "never seen", None)])
    assert np.isfinite(unknown).all() and not np.isin(unknown, together).any()
    calls.clear()
    requests = [[*history, *new], new, history[:3] + new]
    requests = [columns_of_events(events) for events in requests]
    inputs = [model.encoding.inputs(x) for x in requests]
    parts = model.together(inputs)  # of one name of a user, who are others
    assert calls == [128]
    for part, one in zip(parts, requests, strict=True):
        np.testing.assert_allclose(part, model.scores(one), rtol=1e-5)
    model.program = program


def test_a_worker_answers_with_the_scores_of_a_requests_candidates(exported):
    app = pytest.importorskip("loka_jax.server.app")
    model, _ = exported
    names = "user", "when", "item", "click"
    events = [("u1", 10, "i1", 1), ("u1", 20, "i2", None), ("u1", 20, "i3", None)]
    rows = [dict(zip(names, event, strict=True)) for event in events]
    body = json.dumps({"rows": rows}).encode()
    columns = app.columns_of(body, model.encoding.columns, 8)
    (scores,) = model.together([model.encoding.inputs(columns)])
    np.testing.assert_array_equal(scores, asked(model, events))
    assert scores.shape == (2,)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"user": None}, "row 2 column 'user' holds None, where each row needs a user"),
        ({"when": None}, "row 2 column 'when' holds None, where each row needs a time"),
        ({"when": "soon"}, "row 2 column 'when' holds 'soon', which is neither a num"),
        ({"click": 2}, "row 2 column 'click' holds 2, where only 0, 1 and none"),
        ({"click": 1}, "no row lacks a value in column 'click': leave it empty in"),
        ({"item": 0.5}, "row 2 column 'item' holds 0.5, which is neither text nor"),
    ],
)
def test_an_irregular_event_is_one_sentence(exported, change, said):
    rows = {"user": "u1", "when": 3.0, "item": "i1", "click": None}
    events = [rows | {"click": 1}, rows | change]
    with pytest.raises(ValueError, match=said):
        exported[0].scores({name: [x[name] for x in events] for name in rows})


def test_a_run_on_lists_scores_and_exports_like_one_on_a_log(tmp_path):
    rows = lists.with_lists(lists.events())
    for name, part in (("train", rows[:-6]), ("valid", rows[-6:])):
        parquet.write_table(pa.Table.from_pylist(part), tmp_path / f"{name}.parquet")
    data = dataclasses.replace(
        lists.LISTS,
        path=str(tmp_path / "train.parquet"),
        valid=str(tmp_path / "valid.parquet"),
        cache=str(tmp_path / "cache"),
        encoding="vocabulary",
    )
    config = runs.config(tmp_path / "run", data=data, model=MODEL, eval_every=None)
    assert support.train(config)[0] == 0
    model = loka_jax.load(tmp_path / "run")
    (logged,) = read_scores(tmp_path / "run").values()
    new = pa.Table.from_pylist(rows[-6:]).drop_columns(["click", "user"])
    expected = 1 / (1 + np.exp(-logged.logits.astype(float)))
    np.testing.assert_allclose(model.scores(new), expected, rtol=1e-4)
    (numbers,) = evaluate_files(model, tmp_path / "valid.parquet").overall.values()
    assert numbers["rows"] == 6
    export_run(tmp_path / "run", tmp_path / "model", platforms=("cpu",))
    of_event = {name: of for of, name in lists.OF_EVENT.items()}
    loaded = loader.load(tmp_path / "model")
    for row, score in zip(rows[-6:], expected, strict=True):
        size = len(row["items"])
        columns = {name: [*row[of], row[name]] for name, of in of_event.items()}
        columns["click"][-1] = None
        same = {"history": [1] * (size + 1), "country": [row["country"]] * (size + 1)}
        np.testing.assert_allclose(loaded.scores(columns | same), [score], rtol=1e-4)


def columns_of_events(events):
    names = "user", "when", "item", "click"
    return dict(zip(names, map(list, zip(*events, strict=True)), strict=True))


def asked(model, events):
    return model.scores(columns_of_events(events))
