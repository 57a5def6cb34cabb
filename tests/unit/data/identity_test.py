"""The identity of a data set: equal for equal data, different in the part changed."""

import dataclasses
import json

import pytest

from loka_jax.data import DataConfig, open_data
from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from loka_jax.data.identity import identity_of_generated
from tests.support.data import HEADER, open_table, rows_text, table_config, write

TEXT = HEADER + rows_text(200)
GENERATED = DataConfig(examples=64, eval_examples=32, rows=(5, 6, 7))


def identity(folder, text=TEXT, **options):
    folder.mkdir(exist_ok=True)
    return open_table(write(folder / "clicks.csv", text), **options).identity


def differing(one, other):
    assert one.keys() == other.keys()
    return {part for part in one if one[part] != other[part]}


def test_equal_files_have_one_identity_wherever_they_lie(tmp_path):
    one, other = identity(tmp_path / "a"), identity(tmp_path / "b")
    assert one == other
    assert str(tmp_path) not in json.dumps(one)


def test_shards_have_the_identity_of_the_file_they_were_made_from(tmp_path):
    want = identity(tmp_path / "a")
    config = table_config(tmp_path / "a" / "clicks.csv")
    convert(config, find_sources(config), tmp_path / "shards")
    config = table_config(tmp_path / "shards")
    assert open_data(config, seed=0).identity == want


def test_identity_is_json_and_counts_rows(tmp_path):
    found = identity(tmp_path, test=write(tmp_path / "t.csv", HEADER + rows_text(9)))
    assert json.loads(json.dumps(found)) == found
    assert found["train"]["rows"] + found["valid"]["rows"] == 200
    assert found["test"]["rows"] == 9
    assert identity(tmp_path)["test"] is None


def flip_first_label(lines):
    return ["0" + lines[0][1:], *lines[1:]]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (flip_first_label, {"train"}),
        (lambda lines: lines[1::2] + lines[::2], {"train", "valid", "vocabulary"}),
        (
            lambda lines: [*lines, *lines[:5]],
            {"train", "valid", "vocabulary"},  # ids go by frequency
        ),
        (lambda lines: [line.replace("u1,", "x1,") for line in lines], {"vocabulary"}),
        (
            lambda lines: [*lines, "1,1,1,new,new\n"],
            {"train", "vocabulary", "schema"},
        ),
    ],
    ids=["label", "order", "appended", "vocabulary", "new value"],
)
def test_changed_rows_change_their_part(tmp_path, change, parts):
    lines = rows_text(200).splitlines(keepends=True)
    before = identity(tmp_path / "a", HEADER + "".join(lines))
    after = identity(tmp_path / "b", HEADER + "".join(change(lines)))
    assert differing(before, after) == parts


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"dense": ("age", "price")}, {"schema", "train"}),
        ({"dense": ("price",)}, {"schema", "train"}),
        ({"transform": "none"}, {"train"}),
        ({"valid_fraction": 0.2}, {"train", "valid"}),
        ({"encoding": "hash"}, {"schema", "train", "vocabulary"}),
    ],
)
def test_changed_options_change_their_part(tmp_path, options, parts):
    assert differing(identity(tmp_path), identity(tmp_path, **options)) >= parts


@pytest.mark.slow  # compiles the generator
def test_generated_data_are_known_by_options_and_seed():
    found = open_data(GENERATED, seed=0).identity
    assert json.loads(json.dumps(found)) == found
    assert found == identity_of_generated(GENERATED, 0)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"examples": 65}, {"train"}),
        ({"eval_examples": 33}, {"valid", "test"}),
        ({"rows": (5, 6, 8)}, {"schema"}),
        ({"world": 1}, {"model"}),
        ({"zipf": 1.2}, {"model"}),
        ({"latent_dim": 2}, {"model"}),
        ({"signal": 1.0}, {"model"}),
        ({"click_rate": 0.1}, {"model"}),
        ({"cache": "elsewhere"}, set()),
    ],
)
def test_options_of_generated_data_change_their_part(options, parts):
    other = dataclasses.replace(GENERATED, **options)
    before, after = (identity_of_generated(config, 0) for config in (GENERATED, other))
    assert differing(before, after) == parts


def test_another_seed_draws_other_generated_data():
    before, after = (identity_of_generated(GENERATED, seed) for seed in (0, 1))
    assert differing(before, after) == {"train", "valid", "test"}
