"""Real click logs, where a developer has them: the counts that their authors state."""

import pathlib

import numpy as np
import pytest

from loka_jax.data import DataConfig, open_data
from tests.support.data import rows_of

SHARED = pathlib.Path(__file__).parents[4] / "shared"
FOLDER = SHARED / "data" / "criteo_kaggle_sample"


def test_criteo_sample_has_the_known_counts_and_finite_values(tmp_path):
    if not FOLDER.is_dir():
        pytest.skip("needs the sample of Criteo in shared/data beside this checkout")
    config = DataConfig(kind="criteo", path=str(FOLDER), cache=str(tmp_path))
    splits = open_data(config, seed=0)
    report = splits.report["splits"]
    assert splits.report["examples"]["test"] == 10_000
    assert report["test"]["positives"] == 2260
    assert report["train"]["positives"] + report["valid"]["positives"] == 3489
    assert splits.report["bad_rows"]["count"] == 0
    # Only I2 is ever negative.
    assert report["test"]["columns"]["I2"]["negative"] == 1010
    dense = rows_of(splits).dense
    assert dense.min() == np.float32(-np.log(3)) and dense.max() < 15
