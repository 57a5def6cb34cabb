"""OneTrans against its equations in numpy; candidates, the pyramid, and its sites."""

import jax
import numpy as np
import pytest

from loka_jax.models import OneTrans
from tests.support.histories import (
    REAL,
    SWITCHES,
    TASKS,
    C,
    P,
    assert_candidates_are_alone,
    assert_drops_in_training,
    assert_fog_keeps_sites,
    assert_follows,
    assert_later_rows_change_nothing,
    bounded,
    dense,
    features_of,
    inputs,
)
from tests.support.nn import listed

D, L, HEADS = 16, 3, 2
MODEL = OneTrans(
    dim=D,
    num_layers=2,
    num_heads=HEADS,
    num_tokens=L,
    ffn_factor=2,
    item_mlp=(10,),
    head_mlp=(12,),
    max_length=8,
    age_buckets=5,
    age_unit=2.0,
    num_tasks=TASKS,
    activation="relu",
    recipe="f32",
)


def norm(x, params):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * params["scale"]


def mixed(x, params, name):
    """Returns products of rows by one weight, of the last L by one of their own."""
    rows = x[:-L]
    parts = [dense(rows, params[name])] if len(rows) else []
    return np.concatenate([*parts, each_dense(x[-L:], params[f"{name}_tokens"])])


def each_dense(x, params):
    """Returns the product of each of L tokens by its own weight."""
    return np.einsum("lk,lkf->lf", x, params["kernel"]) + params["bias"]


def mixed_norm(x, params, name):
    rows, tokens = x[:-L], norm(x[-L:], params[f"{name}_tokens"])
    return np.concatenate([norm(rows, params[name]) if len(rows) else rows, tokens])


def layer(model, x, params, kept):
    """Returns what goes on of the rows and tokens of a history."""

    def before(name, x):
        return x if model.branch_norm else mixed_norm(x, params, name)

    def after(name, x):
        return mixed_norm(x, params, name) if model.branch_norm else x

    h = before("attention_norm", x)
    going_on = len(x) - min(kept, len(x) - L) - L
    own = each_dense(h[-L:], params["qkv_tokens"])
    rows = h[:-L] @ np.zeros((D, 3 * D))
    if "qkv" in params:
        rows = dense(h[:-L], params["qkv"])
    elif len(rows):
        rows[:, D:] = dense(h[:-L], params["kv"])
        if kept:
            rows[:, :D] = dense(h[:-L], params["q"])
    q, k, v = np.split(np.concatenate([rows, own]), 3, axis=1)
    q, k, v = (y.reshape(len(y), HEADS, -1) for y in (q[going_on:], k, v))
    q, k = bounded(model, q, k, params)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(D / HEADS)
    i, j = np.indices(scores.shape[1:])
    shares = np.where(j <= i + going_on, np.exp(scores), 0)
    shares = shares / shares.sum(-1, keepdims=True)
    seen = np.einsum("hij,jhe->ihe", shares, v).reshape(len(q), D)
    z = x[going_on:] + after("attention_norm", mixed(seen, params, "out"))
    hidden = np.maximum(mixed(before("ffn_norm", z), params, "ffn_in"), 0)
    return z + after("ffn_norm", mixed(hidden, params, "ffn_out"))


def equations(model, params, rows, given):
    context, fields = rows
    mlp = params["item_mlp"]
    items = np.maximum(dense(fields.reshape(C, -1), mlp["dense_0"]), 0)
    features = features_of(model, params, given)
    x = (dense(items, mlp["dense_1"]) + features) * model.input_scale
    out = []
    for sequence in np.flatnonzero(REAL):
        start, end = given.offsets[sequence : sequence + 2]
        known = np.concatenate([fields[end - 1], context[sequence]]).reshape(-1)
        tokens = dense(known, params["tokens"]["dense_0"]).reshape(L, D)
        tokens = (tokens + features[end - 1]) * model.input_scale
        part = np.concatenate([x[start + P : end - 1], tokens])
        for number, kept in enumerate((*(model.pyramid or (C,)), 0)):
            part = layer(model, part, params[f"layer_{number}"], kept)
        part = part if model.branch_norm else norm(part, params["norm_out"])
        flat = part.reshape(-1)
        hidden = np.maximum(dense(flat, params["head_mlp"]["dense_0"]), 0)
        out.append(dense(hidden, params["head"]))
    return np.stack(out)


@pytest.mark.parametrize("options", [{"pyramid": (3,)}, *SWITCHES])
def test_the_model_and_its_gradients_follow_its_equations(options):
    assert_follows(equations, MODEL.clone(**options))


def test_candidates_of_one_history_are_scored_as_if_each_were_alone():
    assert_candidates_are_alone(MODEL.clone(num_layers=3, pyramid=(2, 1)))


def test_among_targets_a_later_row_changes_no_earlier_logit():
    assert_later_rows_change_nothing(MODEL)


def test_sizes_that_do_not_fit_are_refused():
    args = inputs()
    with pytest.raises(ValueError, match="a multiple of --num-heads 3"):
        jax.eval_shape(MODEL.clone(num_heads=3).init, jax.random.key(0), *args)
    with pytest.raises(ValueError, match="must name 1 numbers of rows"):
        jax.eval_shape(MODEL.clone(pyramid=(3, 2)).init, jax.random.key(0), *args)
    args = (*args[:2], args[2]._replace(candidates=None))
    with pytest.raises(ValueError, match="--data.targets last"):
        jax.eval_shape(MODEL.clone(pyramid=(3,)).init, jax.random.key(0), *args)


def test_rows_are_dropped_in_training_only():
    assert_drops_in_training(MODEL, [0.125] * 2 + [0.25] * 8)


def test_fog_keeps_the_sites():
    assert_fog_keeps_sites(MODEL.clone(recipe="fp8_rowwise", dim=64), *inputs())


def test_every_product_is_a_site():
    sites = listed(MODEL.clone(recipe="fp8_rowwise", dim=64), *inputs())
    mixed = ("qkv", "out", "ffn_in", "ffn_out")
    expected = {f"layer_{i}/{x}_tokens" for i in range(2) for x in mixed}
    # Of the last layer only the tokens go on.
    expected |= {f"layer_0/{x}" for x in mixed} | {"layer_1/kv"}
    expected |= {f"layer_{i}/{x}" for i in range(2) for x in ("scores", "values")}
    others = {"item_mlp/dense_0", "item_mlp/dense_1", "tokens/dense_0"}
    assert set(sites) == expected | others | {"head_mlp/dense_0", "head"}
    assert sites["head"].recipe == "f32"
    for name in ("scores", "qkv_tokens"):
        assert "a batched product" in str(sites[f"layer_0/{name}"].why_not)
