"""A model with a first-order part is a logistic regression at its start."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.data import DataConfig
from loka_jax.models import Dcnv2, Dlrm, Mmoe, Wukong
from loka_jax.train import baselines, build, first_order
from loka_jax.train.config import Config, EmbeddingConfig, LoopConfig
from loka_jax.train.evaluation import evaluate
from tests.support import train as support

ROWS = 400
OPTIONS = {"recipe": "bf16", "first_order": True}


@pytest.fixture
def data(tmp_path):
    """Returns a log of two labels, a list and an owner's table that two columns use."""
    draw = np.random.default_rng(0)
    lines = ["click,buy,x,y,user,friend,tags"]
    for _ in range(ROWS):
        user, friend = draw.integers(0, 9, 2)
        tags = "|".join(f"t{t}" for t in draw.integers(0, 5, draw.integers(0, 3)))
        click, buy = draw.random(2) < np.array([0.2, 0.1]) * (1 + user % 3)
        x, y = draw.normal(2, 3, 2)
        lines.append(f"{click:d},{buy:d},{x},{y},u{user},u{friend},{tags}")
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines) + "\n")
    return DataConfig(
        kind="table",
        path=str(path),
        label="click",
        dense=("x", "y"),
        categorical=("user", "friend"),
        multi=("tags",),
        separator="|",
        share=("friend=user",),
        transform=("none",),
        cache=str(tmp_path / "cache"),
    )


def config(data, model, **options):
    return Config(
        name="first",
        model=model,
        data=data,
        embedding=EmbeddingConfig(dim=8, **options),
        loop=LoopConfig(batch_size=64, epochs=1),
    )


@pytest.mark.parametrize(
    "model",
    [
        Dlrm(bottom_mlp=(8,), top_mlp=(8,), **OPTIONS),
        Dcnv2(num_cross_layers=1, deep_mlp=(8,), **OPTIONS),
        Wukong(bottom_mlp=(8,), num_layers=1, fmb_mlp=(8,), top_mlp=(8,), **OPTIONS),
        Mmoe(bottom_mlp=(8,), expert_mlp=(8,), tower_mlp=(8,), **OPTIONS),
    ],
    ids=lambda model: type(model).__name__,
)
def test_its_first_logits_are_those_of_the_regression(data, model):
    if isinstance(model, Mmoe):
        data = dataclasses.replace(data, label="label", labels=("click", "buy"))
    run = build.build(config(data, model), say=lambda _: None)
    assert first_order.starts_at_regression(run)
    state = first_order.at_regression(run, run.init())

    valid = run.splits.valid
    found = evaluate(run, state, valid)
    fitted = baselines.fit_regressions(run.splits.train, valid)
    rows = baselines.sample(valid, 10**6)  # in another order
    expected = np.stack([regression.logits(rows) for regression in fitted], axis=1)
    logits = found.logits.reshape(len(found.logits), -1)
    real = np.sort(logits[found.weights > 0], axis=0)
    wanted = np.sort(expected[rows.weights > 0], axis=0)
    assert np.ptp(wanted) > 0.5
    np.testing.assert_allclose(real, wanted, atol=0.02)  # bfloat16 embeddings


def test_only_files_on_one_device_have_a_regression(data):
    model = Dlrm(bottom_mlp=(8,), top_mlp=(8,), **OPTIONS)
    for other in (
        config(data, dataclasses.replace(model, first_order=False)),
        config(support.DATA, model),
        config(data, model, dims=("tags=4",)),
    ):
        run = build.build(other, say=lambda _: None)
        assert not first_order.starts_at_regression(run)


def test_only_more_than_chance_is_clearly_better(data, monkeypatch):
    model = Dlrm(bottom_mlp=(8,), top_mlp=(8,), **OPTIONS)
    run = build.build(config(data, model), say=lambda _: None)
    state = first_order.at_regression(run, run.init())
    assert not first_order.is_clearly_better(run, state)  # it is the same
    fitted = run.baselines.regressions

    def with_bias(bias):
        others = tuple(x._replace(bias=x.bias + bias) for x in fitted)
        monkeypatch.setitem(vars(run.baselines), "regressions", others)
        return first_order.is_clearly_better(run, state)

    assert with_bias(3.0) and not with_bias(0.02)


def test_without_the_part_a_head_starts_at_random():
    model = Dlrm(bottom_mlp=(8,), top_mlp=(8,), recipe="bf16")
    inputs = jnp.ones((2, 3)), jnp.ones((2, 4, 8))
    params = model.init(jax.random.key(0), *inputs)["params"]
    assert np.any(params["head"]["kernel"]) and "first_order" not in params
