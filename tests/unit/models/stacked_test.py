"""Wukong, DHEN and the mix against their papers' equations in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import nn
from loka_jax.models import Dhen, DhenDlrm, Wukong
from tests.support.models import (
    DENSE,
    B,
    D,
    F,
    assert_follows,
    flat,
    inputs,
    padded,
    pairs,
)

STACK = dict(bottom_mlp=(24,), dense_embeddings=2, num_layers=2, top_mlp=(32,))
make_wukong = functools.partial(
    Wukong, **STACK, fm_embeddings=4, lcb_embeddings=3, k=5, fmb_mlp=(24, 20)
)
make_dhen = functools.partial(Dhen, **STACK, dot=4, cross=2, linear=3, dot_mlp=(24,))
make_mix = functools.partial(
    DhenDlrm, **STACK, dot=3, cross=None, linear=2, dot_mlp=(24,), num_cross_layers=2
)


# The equations.


def stacked(eq, params, dense, embeddings, layer, per_field=1, features=None):
    """Returns the logits of layers of interactions."""
    x = embeddings.reshape(len(embeddings), F * per_field, -1)
    if dense.shape[1]:
        bottom = eq.mlp(params["bottom_mlp"], dense)
        x = np.concatenate([bottom.reshape(len(x), -1, x.shape[2]), x], axis=1)
    first = x
    for i in range(sum(name.startswith("layer_") for name in params)):
        x = layer(eq, params[f"layer_{i}"], x)
    top = flat(x) if features is None else features(eq, params, first, x)
    return eq.head(params["head"], eq.mlp(params["top_mlp"], top))


def compress(params, x):
    return np.einsum("nm,bnd->bmd", params["kernel"], x)


def residual(params, x):
    return compress(params["residual"], x) if "residual" in params else x


def fm_of_each(x, y):
    """Returns `X X^T Y` by the gram matrix of each example."""
    return np.einsum("bnd,bmd->bnm", x, x) @ y


def wukong_layer(eq, params, x, k=5):
    batch, n, d = x.shape
    if "fm_lcb" in params:
        weight = params["fm_lcb"]["kernel"]
        y, lcb = weight[None, :, :k], {"kernel": weight[:, k:]}
    else:
        attended = flat(compress(params["attended"], x))
        y = eq.mlp(params["attention"], attended, ends_linear=True)
        y, lcb = y.reshape(batch, n, k), params["lcb"]
    fm = flat(fm_of_each(x, y))
    if eq.norm == "block":  # of whole rows
        fm = fm / np.sqrt((fm**2).mean(1, keepdims=True) + 1e-6)
    else:
        fm = eq.normalize(fm, params.get("fm_norm", {}))
    fmb = eq.mlp(params["fmb"], fm, ends_linear=True).reshape(batch, -1, d)
    out = np.concatenate([fmb, compress(lcb, x)], axis=1)
    return eq.normalize(out + residual(params, x), params.get("norm", {}))


def concatenated(made):
    return np.concatenate(made, axis=1)


def dhen_layer(eq, params, x, heads=1, joined=concatenated):
    made = []
    if "dot_mlp" in params:
        dot = eq.mlp(params["dot_mlp"], padded(pairs(x)), ends_linear=True)
        made.append(dot.reshape(len(x), -1, x.shape[2]))
    if "cross" in params:
        crossed = eq.cross_net(params["cross_net"], flat(x)).reshape(x.shape)
        made.append(compress(params["cross"], crossed))
    if "linear" in params:
        made.append(compress(params["linear"], x))
    if "attention" in params:
        made.append(compress(params["attention"], encoded(eq, params, x, heads)))
    out = joined(made)
    return eq.normalize(out + residual(params, x), params.get("norm", {}))


def encoded(eq, params, x, heads):
    attention = params["self_attention"]
    qkv = eq.dense(attention["qkv"], x)
    seen = []
    for q, k, v in zip(
        *(np.split(a, heads, axis=2) for a in np.split(qkv, 3, axis=2)), strict=True
    ):
        shares = np.exp(np.einsum("bnd,bmd->bnm", q, k) / np.sqrt(q.shape[2]))
        seen.append(shares / shares.sum(2, keepdims=True) @ v)
    out = eq.dense(attention["out"], np.concatenate(seen, axis=2))
    h = eq.normalize(x + out, params["attention_norm"])
    ffn = eq.mlp(params["ffn"], h, ends_linear=True)
    return eq.normalize(h + ffn, params["ffn_norm"])


def mixed(eq, params, first, last):
    crossed = eq.cross_net(params["cross_net"], flat(first))
    joined = np.concatenate([flat(last), pairs(first), crossed], axis=1)
    return np.pad(joined, ((0, 0), (0, -joined.shape[1] % 64)))


@pytest.mark.parametrize("attention_mlp", [None, (16,)])
@pytest.mark.parametrize("num_dense", [DENSE, 0])
def test_wukong_follows_its_equations(num_dense, attention_mlp):
    model = make_wukong(recipe="f32", attention_mlp=attention_mlp)
    reference = functools.partial(stacked, layer=wukong_layer)
    assert_follows(model, reference, inputs(num_dense))


def test_with_block_norm_fm_is_normalized_over_the_whole_row():
    model = make_wukong(recipe="f32", norm="block", k=60)  # 300 columns and more
    layer = functools.partial(wukong_layer, k=60)
    assert_follows(model, functools.partial(stacked, layer=layer), inputs())


def test_a_row_of_a_table_holds_several_embeddings():
    model = make_wukong(recipe="f32", embeddings_per_field=2)
    reference = functools.partial(stacked, layer=wukong_layer, per_field=2)
    assert_follows(model, reference, inputs(dim=2 * D))


def test_as_many_embeddings_as_before_need_no_residual_map():
    model = make_wukong(recipe="f32", fm_embeddings=2, lcb_embeddings=3)
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs())["params"]
    assert "residual" not in params["layer_0"]
    assert_follows(model, functools.partial(stacked, layer=wukong_layer), inputs())


@pytest.mark.parametrize("rank", [None, 16])
def test_dhen_follows_its_equations(rank):
    model = make_dhen(recipe="f32", cross_rank=rank)
    assert_follows(model, functools.partial(stacked, layer=dhen_layer), inputs())


def test_dhen_with_attention_follows_its_equations():
    model = make_dhen(recipe="f32", dot=None, attention=3, num_heads=2)
    layer = functools.partial(dhen_layer, heads=2)
    assert_follows(model, functools.partial(stacked, layer=layer), inputs())


def test_a_sum_of_modules_follows_its_equation():
    model = make_dhen(recipe="f32", dot=3, cross=3, linear=3, ensemble="sum")
    layer = functools.partial(dhen_layer, joined=sum)
    assert_follows(model, functools.partial(stacked, layer=layer), inputs())


def test_the_mix_follows_its_equations():
    reference = functools.partial(stacked, layer=dhen_layer, features=mixed)
    assert_follows(make_mix(recipe="f32"), reference, inputs())


# Sites.


def listed(model):
    avals = jax.eval_shape(functools.partial(inputs, batch=64))
    return [
        (s.path, s.spec.m, s.spec.k, s.spec.n, s.batch)
        for s in nn.list_sites(model, *avals)
    ]


def test_sites_of_wukong():
    layer = [
        ("layer_0/fm_lcb/compress", 16, 5, 8, 64),  # 2 + 3 embeddings to k + n_L
        ("layer_0/fm_lcb/fm", 5, 16, 5, 64),
        ("layer_0/fmb/dense_0", 64, 25, 24, None),
        ("layer_0/fmb/dense_1", 64, 24, 20, None),
        ("layer_0/fmb/dense_2", 64, 20, 64, None),
        ("layer_0/residual/compress", 16, 5, 7, 64),
    ]
    bottom = [
        ("bottom_mlp/dense_0", 64, 5, 24, None),
        ("bottom_mlp/dense_1", 64, 24, 32, None),
    ]
    top = [("top_mlp/dense_0", 64, 112, 32, None), ("head", 64, 32, 1, None)]
    assert listed(make_wukong(num_layers=1)) == [*bottom, *layer, *top]


def test_sites_of_dhen():
    found = listed(make_dhen(num_layers=1, attention=1, num_heads=2, cross_rank=16))
    assert found[2:-2] == [
        ("layer_0/dot_mlp/dense_0", 64, 16, 24, None),  # 10 pairs, padded
        ("layer_0/dot_mlp/dense_1", 64, 24, 64, None),
        ("layer_0/cross_net/v_0", 64, 80, 16, None),
        ("layer_0/cross_net/u_0", 64, 16, 80, None),
        ("layer_0/cross/compress", 16, 5, 2, 64),
        ("layer_0/linear/compress", 16, 5, 3, 64),
        ("layer_0/self_attention/qkv", 320, 16, 48, None),
        ("layer_0/self_attention/scores", 5, 8, 5, 128),
        ("layer_0/self_attention/values", 5, 5, 8, 128),
        ("layer_0/self_attention/out", 320, 16, 16, None),
        ("layer_0/ffn/dense_0", 320, 16, 32, None),
        ("layer_0/ffn/dense_1", 320, 32, 16, None),
        ("layer_0/attention/compress", 16, 5, 1, 64),
        ("layer_0/residual/compress", 16, 5, 10, 64),
    ]


# Errors that a user can mend.


def refused(model):
    avals = jax.eval_shape(inputs)
    with pytest.raises(ValueError) as error:
        nn.list_sites(model, *avals)
    return str(error.value)


def test_rows_that_do_not_hold_whole_embeddings_are_refused():
    assert "--embedding.dim 16 must be a multiple of --embeddings-per-field 3" in (
        refused(make_wukong(embeddings_per_field=3))
    )


def test_dhen_without_a_module_is_refused():
    assert "set --dot, --cross" in refused(make_dhen(dot=None, cross=None, linear=None))


def test_a_sum_of_different_numbers_is_refused():
    message = refused(make_dhen(ensemble="sum"))
    assert "--ensemble sum of modules that make [4, 2, 3] embeddings" in message


def test_logits_are_float32_of_embeddings_in_bfloat16():
    dense, embeddings = jax.eval_shape(inputs)
    embeddings = jax.ShapeDtypeStruct(embeddings.shape, jnp.bfloat16)
    model = make_dhen(recipe="bf16")
    out, _ = jax.eval_shape(
        model.init_with_output, jax.random.key(0), dense, embeddings
    )
    assert (out.shape, out.dtype) == ((B,), jnp.float32)
