"""The server's model is an exported folder, by the folder's own loader."""

import sys
from unittest import mock

import numpy as np
import pytest

from experiments import serve


def test_a_scorer_hands_each_request_the_scores_of_its_rows(tmp_path, monkeypatch):
    (tmp_path / "loader.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path])
    loader = mock.Mock()
    monkeypatch.setitem(sys.modules, "loader", loader)
    model = loader.load.return_value
    model.description = {"name": "run", "step": 3, "path": "secret"}
    model.together.side_effect = lambda batch: [2 * rows for rows in batch]
    scorer = serve.Scorer(str(tmp_path))
    loader.load.assert_called_once_with(str(tmp_path))
    model.warm.assert_called_once_with()
    assert scorer.health == {"name": "run", "step": 3}
    batch = np.split(np.arange(6), [2, 3])  # of 2, 1 and 3 rows
    assert scorer.run(batch) == [[0, 2], [4], [6, 8, 10]]


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--max-rows", "0", "--max-rows 0 must be at least 1."),
        ("--wait-ms", "-1", "--wait-ms -1.0 must be at least 0."),
    ],
)
def test_limits_are_refused_before_it_listens(
    tmp_path, monkeypatch, capsys, option, value, why
):
    (tmp_path / "loader.py").touch()
    listen = mock.Mock()
    monkeypatch.setattr(serve, "supervise", listen)
    assert serve.main([str(tmp_path), option, value]) == 2
    assert capsys.readouterr().err == f"error: {why}\n"
    listen.assert_not_called()


def test_a_folder_without_a_model_is_one_sentence(tmp_path, capsys):
    assert serve.main([str(tmp_path), "--worker", "0", "0"]) == 2
    assert "holds no exported model: name one." in capsys.readouterr().err
