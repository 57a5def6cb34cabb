"""The configuration of a run: range checks, and what identifies it."""

import dataclasses
import json
import pathlib

import pytest

from loka_jax.models import Dcnv2, Dlrm
from loka_jax.train.config import (
    Dcnv2Config,
    DlrmConfig,
    EmbeddingConfig,
    LoopConfig,
    RunOptions,
)


def dlrm(**options):
    return DlrmConfig(name="x", model=Dlrm(**options))


LOOP_OPTIONS = [
    f.name for f in dataclasses.fields(LoopConfig) if f.name != "on_divergence"
]


@pytest.mark.parametrize("name", LOOP_OPTIONS)
def test_loop_options_must_be_positive(name):
    option = f"--loop.{name.replace('_', '-')}"
    with pytest.raises(ValueError, match=f"{option} -1 must be at least 1."):
        LoopConfig(**{name: -1})


@pytest.mark.parametrize(
    "make, sentence",
    [
        (
            lambda: LoopConfig(batch_size=10, microbatches=3),
            "--loop.batch-size 10 must be a multiple of --loop.microbatches 3.",
        ),
        (
            lambda: LoopConfig(batch_size=10**10),
            "--loop.batch-size 10000000000 must be at most 4194304.",
        ),
        (
            lambda: EmbeddingConfig(dim=0),
            "--embedding.dim 0 must be in 1..4096.",
        ),
        (
            lambda: EmbeddingConfig(init_stddev=float("nan")),
            "--embedding.init-stddev nan must be in [0, 10).",
        ),
        (
            lambda: DlrmConfig(name="x", model=Dlrm(), seed=-1),
            "--seed -1 must be in 0..2147483647.",
        ),
        (
            lambda: dlrm(dropout_rate=float("nan")),
            "--dropout-rate nan must be in [0, 1).",
        ),
        (lambda: dlrm(top_mlp=(8, 0)), "--top-mlp (8, 0) must be positive."),
        (
            lambda: Dcnv2Config(name="x", model=Dcnv2(num_cross_layers=0)),
            "--num-cross-layers 0 must be at least 1.",
        ),
        (
            lambda: dlrm(recipe="fp8_tensorwise_delayed:initialized"),
            "--recipe fp8_tensorwise_delayed:initialized needs initialized "
            "scales: leave out ':initialized'; training switches to it by itself.",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_option(make, sentence):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == sentence


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'fp8_rowwise'"):
        dlrm(recipe="fp8_rowise")


@pytest.mark.parametrize("text", ["abc", "5", "5:0", "-1:2", "1:2:3", ":"])
def test_profile_must_be_start_and_steps(text):
    with pytest.raises(ValueError, match="must be START:STEPS, for example 100:5"):
        RunOptions(profile=text)


def test_profile_names_a_range_of_steps():
    assert RunOptions(profile="100:5").profile_steps() == range(100, 105)
    assert not RunOptions().profile_steps()


def test_what_concerns_one_execution_is_no_part_of_the_identity():
    options = RunOptions(workdir=pathlib.Path("a"), resume=True, profile="1:2")
    config = dlrm()
    assert config.identity() == dataclasses.replace(config, run=options).identity()


def test_the_identity_is_json_and_tells_models_apart():
    identity = dlrm().identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity["model"]["kind"] == "Dlrm"
    assert identity["model"]["recipe"] == "fp8_tensorwise"
    assert identity != Dcnv2Config(name="x").identity()
