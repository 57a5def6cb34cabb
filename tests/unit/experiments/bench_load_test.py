"""The benchmark of a served model runs anywhere, and loses nothing."""

import json

import pytest

from experiments.configs import find_config
from loka_jax.data.generated import schema_of
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.export.encoding import inputs_as_given
from loka_jax.export.folder import write_model
from loka_jax.export.forms import make_form
from loka_jax.predict.trained import untrained

pytest.importorskip("aiohttp")

from experiments.bench import load  # noqa: E402


def test_a_load_without_an_answer_is_described():
    load_of = load._summary(20.0, 1.0, 1.0, [], [1])
    assert "answered a second; no answer; " in load._line(load_of)


@pytest.mark.slow
def test_a_served_model_loses_nothing_in_a_restart(tmp_path):
    config = find_config("fp8_dlrm_tiny")
    schema = schema_of(config.data)
    trained = untrained(config, schema)
    forms = (make_form(trained, "cpu", rows, DispatchPlan()) for rows in (8, 32))
    write_model(trained, inputs_as_given(schema), forms, tmp_path / "model")
    out = tmp_path / "out.json"
    load.main(
        load.Arguments(
            model=tmp_path / "model",
            out=out,
            rates=(20, 40),
            minutes=0.4,
            malformed=0.2,
            max_rows=32,
        )
    )
    first, second = json.loads(out.read_text())["loads"]
    assert (first["offered_per_s"], second["offered_per_s"]) == (20, 40)
    for seen in (first, second):
        assert seen["lost"] == seen["wrong"] == 0
        assert seen["malformed_not_400"] == seen["refused_though_right"] == 0
        assert seen["restarts"] == 1 and seen["malformed"] > 10
        assert seen["statuses"].keys() == {"200", "400"}
        assert 0 < seen["latency_ms"]["p50"] <= seen["latency_ms"]["p99"]
