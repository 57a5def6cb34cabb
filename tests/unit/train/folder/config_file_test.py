"""Configurations in JSON: what is printed is read back, anything else is named."""

import json

import pytest

from experiments.configs import get_config, names
from loka_jax.train.folder.config_file import from_json, read_config


def values_of(name="fp8_dlrm_tiny"):
    return json.loads(json.dumps(get_config(name).identity()))


@pytest.mark.parametrize("name", names())
def test_every_configuration_is_read_back(name):
    assert from_json(values_of(name), "x") == get_config(name)


def test_what_is_not_there_has_its_default():
    values = values_of()
    del values["loop"]["look_every"], values["dispatch"]
    config = from_json(values, "x")
    assert config.loop.look_every == 64
    assert config == get_config("fp8_dlrm_tiny")


def test_an_integer_is_a_number_too():
    values = values_of()
    values["optim"]["lr"] = 1
    assert repr(from_json(values, "x").optim.lr) == "1.0"


def _set(values, path, value):
    *parents, last = path.split(".")
    for name in parents:
        values = values[name]
    values[last] = value


@pytest.mark.parametrize(
    "path, value, sentence",
    [
        ("sed", 1, r"sed is no field of this version: did you mean 'seed'\? rename"),
        ("data.min_cuont", 1, "data.min_cuont is no field .* mean 'min_count'"),
        ("embedding.xyz", 1, "embedding.xyz is no field .*: it has dim, "),
        ("model.parent", None, "model.parent is no field"),
        ("run", {}, "run is no field"),
        ("seed", "3", 'seed is "3" and must be an integer'),
        ("seed", True, "seed is true and must be an integer"),
        ("seed", 3.0, "seed is 3.0 and must be an integer"),
        ("optim.lr", "a", 'optim.lr is "a" and must be a number'),
        ("data.label", None, "data.label is null and must be a text"),
        ("data.encoding", "hsah", r"data.encoding is .* mean 'hash'\? Use one"),
        ("data.rows", 5, r"data.rows is 5 and must be a list \[...\]"),
        ("data.rows", [5, "x"], r'data.rows\[1\] is "x" and must be an integer'),
        ("loop.max_steps", "8", 'loop.max_steps is "8" and must be an integer'),
        ("loop", 3, "loop must be an object"),
        ("model.kind", "Dlmr", "model.kind is Dlmr, which is none of Dcnv2, Dhen, "),
        ("model", None, "model.kind is None"),
        ("loop.batch_size", -1, "--loop.batch-size -1 must be at least 1"),
        ("name", "../x", "name ../x must be letters, digits"),
    ],
)
def test_a_wrong_field_is_named(path, value, sentence):
    values = values_of()
    _set(values, path, value)
    with pytest.raises(ValueError, match=f"^a.json: {sentence}"):
        from_json(values, "a.json")


def test_a_field_that_must_be_there_is_named():
    values = values_of()
    del values["name"]
    with pytest.raises(ValueError, match="^a.json: name is missing: add it."):
        from_json(values, "a.json")


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_other_json_is_refused(value):
    with pytest.raises(ValueError, match="^a.json: "):
        from_json(value, "a.json")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot read the configuration .*a.json"):
        read_config(tmp_path / "a.json")
