"""Options out of range are refused, by name."""

import math

import pytest

from loka_jax.data import DataConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_count", 0),
        ("hash_buckets", 1),
        ("huge_limit", 0.0),
        ("huge_limit", math.inf),
        ("huge_limit", math.nan),
        ("valid_fraction", -0.1),
        ("valid_fraction", 1.0),
        ("valid_fraction", math.nan),
        ("max_bad_rows", -1),
        ("examples", 0),
        ("examples", 2**31),
        ("eval_examples", 0),
        ("zipf", math.nan),
        ("latent_dim", 0),
        ("signal", -1.0),
        ("click_rate", 0.0),
        ("world", -1),
    ],
)
def test_value_out_of_range_is_named(name, value):
    option = "--data." + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"{option} .* must lie between"):
        DataConfig(**{name: value})


@pytest.mark.parametrize("rows", [(), (1,), (2**31,)])
def test_table_sizes_out_of_range_are_refused(rows):
    with pytest.raises(ValueError, match="--data.rows"):
        DataConfig(rows=rows)


def test_path_with_generated_data_names_the_remedy():
    with pytest.raises(ValueError, match="--data.kind table"):
        DataConfig(path="clicks.csv")


def test_criteo_columns_cannot_be_chosen():
    with pytest.raises(ValueError, match="fixed columns"):
        DataConfig(kind="criteo", path="x.tsv", dense=("I1",))


def test_validation_file_without_training_file_is_refused():
    with pytest.raises(ValueError, match="--data.valid needs --data.path"):
        DataConfig(kind="table", valid="valid.csv")
