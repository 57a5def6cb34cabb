import json
import os

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import jsonfile


def test_numbers_of_every_kind_become_strict_json():
    value = {"a": jnp.float32(1.5), "b": np.int64(2), "c": (True, None), 3: "x"}
    text = jsonfile.dumps(value)
    assert json.loads(text) == {"a": 1.5, "b": 2, "c": [True, None], "3": "x"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), jnp.float32(-jnp.inf)])
def test_non_finite_numbers_become_null_or_are_refused(bad):
    assert jsonfile.dumps([bad]) == "[null]"
    with pytest.raises(ValueError, match="no form in JSON"):
        jsonfile.jsonable([bad], nan_as_null=False)


def test_what_json_cannot_say_is_refused():
    with pytest.raises(ValueError, match="a ndarray has no form in JSON"):
        jsonfile.dumps({"x": np.zeros(3)})


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    jsonfile.write(path, 1)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        jsonfile.write(path, 2)
    assert jsonfile.read(path) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        jsonfile.read(path)


@pytest.mark.parametrize("tail", ['{"step": 3', "[3]\n", '{"step"\n{"step": 4}\n'])
def test_lines_end_where_a_killed_run_tore_them(tail, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + tail)
    assert [line["step"] for line in jsonfile.read_lines(path)] == [1, 2]


def test_no_file_has_no_lines(tmp_path):
    assert jsonfile.read_lines(tmp_path / "metrics.jsonl") == []


def test_a_mismatch_is_explained_field_by_field():
    saved = {"optim": {"lr": 0.1, "decay": 0}, "hidden": [8, 4], "old": 1}
    current = {"optim": {"lr": 0.3, "decay": 0}, "hidden": (8, 2), "new": "x"}
    assert jsonfile.explain_mismatch(saved, current) == [
        "hidden: saved [8, 4], now [8, 2]",
        "new: not saved, now 'x'",
        "old: saved 1, now absent",
        "optim.lr: saved 0.1, now 0.3",
    ]


def test_a_config_equals_itself_read_back():
    config = {"hidden": (8, 4), "optim": {}, "path": None}
    assert jsonfile.explain_mismatch(json.loads(jsonfile.dumps(config)), config) == []
