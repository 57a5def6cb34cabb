"""Configurations in JSON: what is printed is read back, anything else is named."""

import json

import pytest

from experiments.configs import get_config, names
from loka_jax.train.folder.config_file import from_json
from tests.support.configs import tiny


@pytest.fixture
def values():
    return json.loads(json.dumps(tiny("fp8_dlrm").identity()))


@pytest.mark.parametrize("name", names())
def test_every_configuration_is_read_back(name):
    values = json.loads(json.dumps(get_config(name).identity()))
    assert from_json(values, "x") == get_config(name)


def test_what_is_not_there_has_its_default(values):
    del values["loop"]["log_every"], values["dispatch"]
    values["optim"]["lr"] = 1  # an integer is a number, too
    config = from_json(values, "x")
    assert config.loop.log_every == 64 and repr(config.optim.lr) == "1.0"
    assert config.dispatch == tiny("fp8_dlrm").dispatch
    del values["name"]
    for wrong, sentence in ((values, r"it .* required field name\)"), ([], "")):
        with pytest.raises(ValueError, match=f"^a.json: {sentence}"):
            from_json(wrong, "a.json")


@pytest.mark.parametrize(
    "part, field, value, sentence",
    [
        ("data", "min_cuont", 1, "data.min_cuont is no field .* mean 'min_count'"),
        ("data", "encoding", "hsah", r"data.encoding .*: use one of vocabulary, "),
        ("data", "rows", [5, "x"], r"data.rows\[1\] is wrong .*int, got str"),
        ("model", "kind", "Dlmr", "model.kind is Dlmr, which is none of Dcnv2, Dhen, "),
        ("loop", "batch_size", -1, "--loop.batch-size -1 must be at least 1"),
    ],
)
def test_a_wrong_field_is_named(values, part, field, value, sentence):
    (values[part] if part else values)[field] = value
    with pytest.raises(ValueError, match=f"^a.json: {sentence}"):
        from_json(values, "a.json")
