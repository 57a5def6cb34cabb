"""The identity of a data set: equal for equal data, different in the part changed."""

import dataclasses
import json

import pytest

from loka_jax.data import DataConfig, open_data
from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from loka_jax.data.open import identity_of_generated
from tests.support.data import HEADER, open_table, rows_text, table_config, write

LINES = rows_text(200).splitlines(keepends=True)
GENERATED = DataConfig(examples=64, eval_examples=32, rows=(5, 6, 7))


def identity(folder, lines=LINES, **options):
    folder.mkdir(exist_ok=True)
    path = write(folder / "clicks.csv", HEADER + "".join(lines))
    return open_table(path, **options).identity


def differing(one, other):
    assert one.keys() == other.keys()
    return {part for part in one if one[part] != other[part]}


def test_equal_files_and_their_shards_have_one_identity_wherever_they_lie(tmp_path):
    test = write(tmp_path / "t.csv", HEADER + rows_text(9))
    one = identity(tmp_path / "a", test=test)
    assert one == identity(tmp_path / "b", test=test)
    assert str(tmp_path) not in json.dumps(one)
    assert json.loads(json.dumps(one)) == one
    assert one["train"]["rows"] + one["valid"]["rows"] == 200
    assert one["test"]["rows"] == 9 and identity(tmp_path)["test"] is None
    config = table_config(tmp_path / "a" / "clicks.csv", test=test)
    convert(config, find_sources(config), tmp_path / "shards")
    assert open_data(table_config(tmp_path / "shards"), seed=0).identity == one


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda lines: [*lines[:-1], "1" + lines[-1][1:]], {"train"}),
        (lambda lines: lines[1::2] + lines[::2], {"train", "valid", "vocabulary"}),
        # Ids go by frequency.
        (lambda lines: [*lines, *lines[:5]], {"train", "valid", "vocabulary"}),
        (lambda lines: [line.replace("u1,", "x1,") for line in lines], {"vocabulary"}),
        (lambda lines: [*lines, "1,1,1,n,n\n"], {"train", "vocabulary", "schema"}),
    ],
    ids=["label", "order", "appended", "vocabulary", "new value"],
)
def test_changed_rows_change_their_part(tmp_path, change, parts):
    before, after = identity(tmp_path / "a"), identity(tmp_path / "b", change(LINES))
    assert differing(before, after) == parts


def test_changed_options_change_their_part(tmp_path):
    before = identity(tmp_path)
    other_order = identity(tmp_path, dense=("age", "price"))
    assert differing(before, other_order) >= {"schema", "train"}
    assert "train" in differing(before, identity(tmp_path, transform=("none",)))


@pytest.mark.parametrize(
    ("options", "seed", "parts"),
    [
        ({"examples": 65}, 0, {"train"}),
        ({"eval_examples": 33}, 0, {"valid", "test"}),
        ({"rows": (5, 6, 8)}, 0, {"schema"}),
        ({"signal": 1.0}, 0, {"model"}),
        ({"click_rate": 0.3}, 0, {"model"}),
        ({"cache": "elsewhere"}, 0, set()),
        ({}, 1, {"train", "valid", "test"}),
    ],
)
def test_options_and_seed_of_generated_data_change_their_part(options, seed, parts):
    before = identity_of_generated(GENERATED, 0)
    other = dataclasses.replace(GENERATED, **options)
    assert differing(before, identity_of_generated(other, seed)) == parts
