"""Rows become batches and scores in their order, whatever the model computes."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from loka_jax.data.blocks import Block
from loka_jax.data.values import Counts
from loka_jax.predict import predictor
from tests.support.predict import predictor_of, sigmoid

ROWS = {
    "price": np.arange(11.0) - 4,
    "user": ["u1", "new", None, "é"] + 7 * ["NA"],
    "item": [7, 3] + 9 * [99],
}


def test_scores_are_probabilities_in_the_order_of_the_rows(tmp_path):
    model, batches = predictor_of(tmp_path)
    counts = Counts()
    scores = model.scores(ROWS | {"other": [0] * 11}, counts)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, sigmoid(ROWS["price"]))
    # The last batch is padded with the first rows, as an evaluation pads it.
    prices = [batch.dense[:, 0].tolist() for batch in batches]
    assert prices == [[-4, -3, -2, -1], [0, 1, 2, 3], [4, 5, 6, -4]]
    assert batches[0].ids.tolist() == [[1, 1], [0, 2], [0, 0], [2, 0]]
    assert counts.report()["columns"] == {
        "price": {"negative": 4},
        "user": {"missing": 1, "oov": 1},
        "item": {"oov": 9},
    }
    assert (model.tasks, model.columns) == (("label",), ("price", "user", "item"))
    extremes = model.scores({"price": [-800, 800], "user": ["NA"] * 2, "item": [7, 7]})
    assert extremes.tolist() == [0, 1]


def test_a_column_of_unknown_values_is_said(tmp_path):
    model, _ = predictor_of(tmp_path)
    with pytest.warns(UserWarning, match="no value of column 'item' in the rows"):
        scores = model.scores(ROWS | {"item": range(100, 111)})
    np.testing.assert_array_equal(scores, sigmoid(ROWS["price"]))


def test_blocks_keep_their_rows_and_few_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(predictor, "_GROUP_BYTES", 60)
    model, batches = predictor_of(tmp_path)
    sizes, table = (1, 2, 0, 5, 3), pa.table(ROWS)
    given = []

    def blocks():
        for start, size in zip(np.cumsum(sizes) - sizes, sizes, strict=True):
            numbers = np.arange(start + 1, start + size + 1)
            given.append(size)
            yield Block(table.slice(start, size), numbers, "parts")

    found = []
    for rows, scores in model.scored(blocks(), Counts()):
        prices = rows["price"].to_numpy()
        np.testing.assert_array_equal(scores, sigmoid(prices))
        found.append(prices)
        # Of each row that was read, scores come at most a batch and a group later.
        assert sum(given) - sum(map(len, found)) < 4 + 4 + max(sizes)
    assert len(found) > 2
    np.testing.assert_array_equal(np.concatenate(found), ROWS["price"])
    assert len(batches) == 3


def test_what_has_no_scores_is_refused(tmp_path):
    model, _ = predictor_of(tmp_path)
    rows = {"price": [1.0, 2.0, 3.0], "user": ["u1", "u2", "u3"], "item": [1, 2, 3]}
    mixed = np.array(["u1", None, 3], object)
    strict, _ = predictor_of(tmp_path, bad="strict")
    lost, _ = predictor_of(tmp_path)
    none = np.array([np.nan, 1, np.nan, 0])
    lost._run_step = lambda state, seen, batch: (seen, none)
    for by, given, said in (
        (model, rows | {"user": mixed}, "column 'user' is no list"),
        (model, rows | {"price": 1.5}, "'price' is no list of values of one type"),
        (model, rows | {"item": [1]}, "differ in length .*item 1.*: align them"),
        (model, [1, 2], "the rows are no table .*: give a data frame"),
        (model, {"price": [1.0], "user": ["u1"]}, "no column 'item', only price, user"),
        (strict, ROWS, "row 2 .*not in the run's vocabulary"),
        (lost, rows, "2 of 3 scores are no numbers"),
    ):
        with pytest.raises(ValueError, match=said):
            by.scores(given)


STAND_INS = ("open_run", "read_trained", "load_encoding", "saved_plan")
STAND_INS += ("compiled_eval_step", "past_first_steps", "Predictor", "nn")


def loaded(**options):
    """Returns what is called for options of `load`, by name."""
    with mock.patch.multiple(
        predictor, **dict.fromkeys(STAND_INS, mock.DEFAULT)
    ) as found:
        predictor.load("run", **options)
    return SimpleNamespace(**found)


def test_the_saved_plan_runs_unless_it_is_off():
    seen = loaded(shards=4)
    seen.open_run.assert_called_once()
    assert seen.open_run.call_args.kwargs == {"best": True}  # as evaluations judged it
    source, run = seen.open_run.return_value, seen.read_trained.return_value
    encoding = seen.load_encoding.return_value
    seen.read_trained.assert_called_once_with(source, encoding.schema, 4)
    choices, model = seen.saved_plan.return_value.choices, source.config.model
    seen.nn.Planned.assert_called_once_with(model, choices)
    planned = seen.nn.Planned.return_value
    seen.past_first_steps.assert_called_once_with(planned, run.state)
    model = seen.past_first_steps.return_value
    seen.compiled_eval_step.assert_called_once_with(model, run.placement)
    step = seen.compiled_eval_step.return_value
    parts = (source.config, encoding, source.saved.step, run.state, step)
    parts += (source.calibration.return_value,)
    seen.Predictor.assert_called_once_with(*parts)

    seen = loaded(plan="off")
    clone = seen.open_run.return_value.config.model.clone
    clone.assert_called_once_with(implementation="xla")
    seen.nn.Planned.assert_called_once_with(clone.return_value, ())
    assert seen.read_trained.call_args.args[2] == 1
