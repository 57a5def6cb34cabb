"""InterFormer against its equations in numpy; histories, and its sites."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.models import InterFormer
from tests.support import normal
from tests.support.histories import (
    REAL,
    TASKS,
    B,
    C,
    K,
    P,
    apply,
    dense,
    features_of,
    initialized,
    inputs,
)
from tests.support.nn import listed

D, N, SUMS, CLS, SEEDS, RECENT, HEADS = 8, 3, 3, 2, 2, 3, 2
MODEL = InterFormer(
    dim=D,
    num_layers=2,
    num_heads=HEADS,
    num_embeddings=N,
    num_sums=SUMS,
    num_cls=CLS,
    num_seeds=SEEDS,
    num_recent=RECENT,
    item_mlp=(10,),
    dot_mlp=(12,),
    cross_rank=4,
    head_mlp=(12,),
    max_length=8,
    age_buckets=5,
    age_unit=2.0,
    num_tasks=TASKS,
    recipe="f32",
)


def silu(x):
    return x / (1 + np.exp(-x))


def rms(x, params):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * params["scale"]


def layer_norm(x, params):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * params["scale"] + params["bias"]


def mlp(x, params, ends_linear=False):
    for i in range(len(params)):
        own = params[f"dense_{i}"]
        x = x @ own["kernel"] + (own["bias"] if "bias" in own else 0)
        if i == len(params) - 1 and ends_linear:
            continue
        x = silu(layer_norm(x, own["norm"]) if "norm" in own else x)
    return x
