"""Runs on event logs: in the order of time, evaluated ahead, resumed bit for bit."""

import dataclasses

import numpy as np
import pytest

from loka_jax.data import DataConfig
from loka_jax.models import Hstu
from loka_jax.train.config import EmbeddingConfig, HstuConfig, LoopConfig, RunOptions
from tests.support import train as support
from tests.support.train import lines, train

LOG = DataConfig(
    kind="events",
    rows=(5, 21),
    examples=256,
    eval_examples=64,
    history=6,
    row_capacity=128,
    stream=True,
)
MODEL = Hstu(
    dim=16,
    num_layers=1,
    num_heads=1,
    qk_dim=16,
    v_dim=16,
    item_mlp=(),
    head_mlp=(16,),
    max_length=8,
    age_buckets=8,
    layer_dropout_rate=0.1,
    recipe="fp8_tensorwise_delayed",
)


def config(workdir, *, resume=False, data=LOG, model=MODEL, **loop):
    loop = {"batch_size": 32, "eval_every": 3, "log_every": 2, "save_every": 4} | loop
    return HstuConfig(
        name="events",
        model=model,
        data=data,
        embedding=EmbeddingConfig(dim=16),
        optim=support.OPTIM,
        loop=LoopConfig(**loop),
        run=RunOptions(workdir=workdir, resume=resume),
    )


def numbers(workdir):
    """Returns the lines of a run without what was measured of time and memory."""
    return [
        {key: x for key, x in line.items() if key not in support.MEASURED}
        for line in lines(workdir)
    ]


def test_a_stream_that_is_stopped_in_the_middle_goes_on_bit_for_bit(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, said = train(config(whole))
    assert code == 0 and "events were left out of histories" in said
    assert train(config(parts, max_steps=4))[0] == 0
    assert train(config(parts, resume=True))[0] == 0
    own = [line for line in numbers(parts) if line["step"] != 4]
    assert own == [line for line in numbers(whole) if line["step"] != 4]
    a, b = (np.load(workdir / "scores.npy") for workdir in (whole, parts))
    assert np.array_equal(a, b) and len(a) == LOG.eval_examples


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"microbatches": 2}, "--loop.microbatches"),
        ({"epochs": 2}, "--loop.epochs 1"),
        ({"data": dataclasses.replace(LOG, history=9)}, "--max-length 8"),
        ({"model": MODEL.clone(oldest=2)}, "add --window"),
        ({"data": DataConfig()}, "takes an event log"),
    ],
)
def test_what_does_not_go_with_an_event_log_is_refused(tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        train(config(tmp_path, **changes))
