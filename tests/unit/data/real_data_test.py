"""Real click logs, where a developer has them: the counts that their authors state."""

import numpy as np

from loka_jax.data import DataConfig, open_data
from tests.support.data import real, rows_of

FRAPPE = "user item daytime weekday isweekend homework cost weather country city"


def test_criteo_sample_has_the_known_counts(tmp_path):
    path = real("criteo_kaggle_sample")
    config = DataConfig(kind="criteo", path=str(path), cache=str(tmp_path))
    splits = open_data(config, seed=0)
    report = splits.report["splits"]
    assert splits.report["examples"]["test"] == 10_000
    assert report["test"]["positives"] == 2260
    assert report["train"]["positives"] + report["valid"]["positives"] == 3489
    # Only I2 is ever negative.
    assert report["test"]["columns"]["I2"]["negative"] == 1010
    negative = [report[split]["totals"]["negative"] for split in ("train", "valid")]
    assert sum(negative) == 1523
    assert splits.report["bad_rows"]["count"] == 0


def test_criteo_vocabulary_holds_every_training_value(tmp_path):
    folder = real("criteo_kaggle_sample")
    config = DataConfig(
        kind="criteo",
        path=str(folder / "criteo_merged_train_16031.tsv.gz"),
        valid=str(folder / "criteo_merged_test_10000.tsv.gz"),
        cache=str(tmp_path),
    )
    splits = open_data(config, seed=0)
    values = np.array(splits.train.schema.vocab_sizes) - 1
    assert (values.sum(), values.min(), values.max()) == (62_069, 3, 8530)
    totals = splits.report["splits"]["valid"]["totals"]
    columns = splits.report["splits"]["valid"]["columns"]
    missing = sum(columns.get(f"C{i}", {}).get("missing", 0) for i in range(1, 27))
    # 13.6 % of the categorical values of the test file never occur in training.
    assert round(totals["oov"] / (260_000 - missing), 3) == 0.136


def test_criteo_dense_values_are_finite_and_small(tmp_path):
    path = real("criteo_kaggle_sample")
    config = DataConfig(kind="criteo", path=str(path), cache=str(tmp_path))
    dense = rows_of(open_data(config, seed=0)).dense
    assert np.isfinite(dense).all()
    assert dense.min() == np.float32(-np.log(3)) and dense.max() < 15


def test_frappe_has_the_known_splits(tmp_path):
    path = real("frappe_x1")
    config = DataConfig(
        kind="table",
        path=str(path),
        categorical=tuple(FRAPPE.split()),
        cache=str(tmp_path),
    )
    splits = open_data(config, seed=0)
    want = {"train": 202_027, "valid": 57_722, "test": 28_860}
    assert splits.report["examples"] == want
    report = splits.report["splits"]
    positives = [report[split]["positives"] for split in ("train", "valid", "test")]
    assert positives == [67_604, 19_063, 9536]
    assert splits.train.schema.dense == ()
    assert rows_of(splits, "test").dense.shape == (28_860, 0)
    assert 5300 < sum(splits.train.schema.vocab_sizes) <= 5382 + 10


def test_attribution_parquet_has_the_known_vocabularies(tmp_path):
    path = real("criteo_attribution_small")
    config = DataConfig(
        kind="table",
        path=str(path),
        label="click",
        categorical=("cat1", "cat4", "cat6", "cat8", "cat9"),
        cache=str(tmp_path),
    )
    splits = open_data(config, seed=0)
    assert splits.train.schema.vocab_sizes == (10, 15, 31, 12, 31)
    assert splits.report["examples"] == {"train": 115_382, "valid": 49_770}
    assert splits.report["splits"]["valid"]["positives"] == 18_001
