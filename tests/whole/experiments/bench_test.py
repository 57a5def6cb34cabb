"""Benchmarks of kernels, run without a GPU: what they measure is XLA alone."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import (
    attention_cases,
    candidates,
    hstu,
    jagged_attention,
    latency,
    models,
    padded_attention,
)
from experiments.configs import histories
from loka_jax.ops.jagged_attention import BY_XLA


def test_attention_is_timed_by_xla_in_both_forms(tmp_path):
    out = tmp_path / "attention.json"
    arguments = jagged_attention.Arguments(cases=("tiny",), here=True, out=out)
    jagged_attention.main(arguments)
    (row,) = json.loads(out.read_text())["rows"]
    forms = {f"xla {x} {y}" for x in ("dense", "jagged") for y in ("forward", "both")}
    assert row["forms"].keys() == forms
    assert all(record["us"] > 0 for record in row["forms"].values())


def test_softmax_attention_is_timed_by_xla(tmp_path):
    out = tmp_path / "attention.json"
    how = dict(cases=("tiny",), here=True, out=out, softmax=True)
    jagged_attention.main(jagged_attention.Arguments(**how))
    (row,) = json.loads(out.read_text())["rows"]
    assert row["forms"].keys() == {"xla jagged forward", "xla jagged both"}
    assert all(record["us"] > 0 for record in row["forms"].values())


def test_candidates_of_one_history_are_timed_in_one_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "_LEAST_CALLS", 3)
    out, sizes = tmp_path / "candidates.json", {"histories": (8,), "candidates": (1, 9)}
    candidates.main(candidates.Arguments(config="fp8_hstu", out=out, **sizes))
    rows = json.loads(out.read_text())["rows"]
    assert [row["candidates"] for row in rows] == [1, 9]
    assert rows[0]["over_single_passes"] == 1
    ratio = 9 * rows[0]["p50_us"] / rows[1]["p50_us"]
    assert rows[1]["over_single_passes"] == ratio
    call = candidates.call_of(candidates.model_with("fp8_hstu", 8), 8, 9)
    (scores,) = call()
    assert len(np.unique(scores[:9])) > 1 and np.isfinite(scores).all()


def test_both_forms_of_xla_are_one_attention():
    case = attention_cases.Case(size=8, max_length=16, batch=2, heads=2)
    offsets = case.offsets()
    q, k, v, gradient = attention_cases.padded_operands(case)
    padded = [x[:, : case.max_length].astype("float32") for x in (q, k, v, gradient)]
    rows = [x.reshape(-1, *x.shape[2:]) for x in padded]
    dense = padded_attention.dense(case.size, case.max_length)["both"](*padded)
    jagged = jagged_attention._whole(case, jnp.asarray(offsets), BY_XLA)["both"](*rows)
    for x, y in zip(dense, jagged, strict=True):
        np.testing.assert_allclose(x.reshape(y.shape), y, rtol=1e-4, atol=1e-6)


def test_speedups_are_over_each_anchor_of_the_same_work():
    times = {"xla dense both": 8.0, "cudnn softmax forward": 3.0, "pallas both": 2.0}
    forms = {name: {"us": us} for name, us in times.items()} | {"pallas forward": {}}
    assert jagged_attention.speedups(forms) == {"xla dense both": 4.0}


def tiny_hstu(*lengths):
    """Returns a model of sequences of these lengths, its variables and its fields."""
    model = hstu.sequences_of(histories.fp8_hstu().model, lengths)
    model = model.clone(max_length=12, recipe="f32", implementation="xla")
    (fields,) = models.make_inputs(((sum(lengths), 1, 32),), 0)
    return model, model.init(jax.random.key(0), fields), fields


def test_dense_and_jagged_sequences_are_one_model():
    model, variables, fields = tiny_hstu(12, 12)
    jagged, dense = (
        np.asarray(x.apply(variables, fields))
        for x in (model, model.clone(is_dense=True))
    )
    np.testing.assert_allclose(jagged, dense, rtol=1e-4, atol=1e-6)
    assert len(np.unique(jagged)) == 2


def test_sequences_of_differing_lengths_have_the_logits_of_each_alone():
    lengths = 5, 12, 2
    model, variables, fields = tiny_hstu(*lengths)
    together = np.asarray(model.apply(variables, fields))
    alone = [
        np.asarray(model.clone(lengths=(len(own),)).apply(variables, own))
        for own in jnp.split(fields, np.cumsum(lengths)[:-1])
    ]
    np.testing.assert_allclose(together, np.concatenate(alone), rtol=1e-4, atol=1e-6)
    assert len(np.unique(together)) == 3


def test_a_quarter_of_the_rows_are_drawn():
    lengths = hstu.CASES["m_quarter"].lengths(4096)
    assert len(lengths) == 32
    assert 2 <= min(lengths) < max(lengths) <= 2048
    assert np.mean(lengths) == pytest.approx(1024, rel=0.3)


def test_flops_of_the_medium_hstu_are_those_of_the_benchmark():
    # Attention 180.4 G, UVQK 77.3 G, projection 58.0 G of a sample.
    model = hstu.sequences_of(histories.fp8_hstu_m().model, (4096,))
    assert round(hstu.flops_of(model, is_training=True) / 1e9, 1) == 315.7
