"""The server's model is an exported folder, by the folder's own loader."""

import sys
from unittest import mock

import numpy as np

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


def test_a_folder_without_a_model_is_one_sentence(tmp_path, capsys):
    assert serve.main([str(tmp_path), "--worker", "0", "0"]) == 2
    assert "holds no exported model: name one." in capsys.readouterr().err
