"""Real click logs, where a developer has them: the counts that their authors state."""

import pathlib

import numpy as np
import pytest

from loka_jax.data import DataConfig, open_data
from tests.support.data import rows_of

SHARED = pathlib.Path(__file__).parents[4] / "shared"
FOLDER = SHARED / "data" / "criteo_kaggle_sample"


def opened(path, cache, **options):
    config = DataConfig(kind="criteo", path=str(path), cache=str(cache), **options)
    return open_data(config, seed=0)


def test_criteo_sample_has_the_known_counts_and_finite_values(tmp_path):
    if not FOLDER.is_dir():
        pytest.skip("needs the sample of Criteo in shared/data beside this checkout")
    splits = opened(FOLDER, tmp_path)
    report = splits.report["splits"]
    assert splits.report["examples"]["test"] == 10_000
    assert report["test"]["positives"] == 2260
    assert report["train"]["positives"] + report["valid"]["positives"] == 3489
    assert splits.report["bad_rows"]["count"] == 0
    # Only I2 is ever negative.
    assert report["test"]["columns"]["I2"]["negative"] == 1010
    dense = rows_of(splits).dense
    assert dense.min() == np.float32(-np.log(3)) and dense.max() < 15

    valid = str(FOLDER / "criteo_merged_test_10000.tsv.gz")
    path = FOLDER / "criteo_merged_train_16031.tsv.gz"
    splits = opened(path, tmp_path, valid=valid)
    values = np.array(splits.train.schema.vocab_sizes) - 1
    assert (values.sum(), values.min(), values.max()) == (62_069, 3, 8530)
    found = splits.report["splits"]["valid"]
    missing = (found["columns"].get(f"C{i}", {}) for i in range(1, 27))
    present = 260_000 - sum(column.get("missing", 0) for column in missing)
    # 13.6 % of the categorical values of the test file never occur in training.
    assert round(found["totals"]["oov"] / present, 3) == 0.136
