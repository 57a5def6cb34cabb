"""InterFormer against its equations in numpy; histories, and its sites."""

import jax
import numpy as np
import pytest

from loka_jax.models import InterFormer
from tests.support.histories import (
    REAL,
    SWITCHES,
    TASKS,
    B,
    C,
    P,
    apply,
    assert_drops_in_training,
    assert_fog_keeps_sites,
    assert_follows,
    bounded,
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


def mlp(x, params, ends_linear=True):
    """Returns dense layers, each but the last with a norm and an activation."""
    count = sum("dense" in name for name in params)
    for i in range(count):
        x = dense(x, params[f"dense_{i}"])
        if i < count - 1 or not ends_linear:
            x = silu(layer_norm(x, params[f"norm_{i}"]))
    return x


def gate(y, params):
    z = rms(y, params["norm"])
    return silu(z * dense(z, params["gate"]))


def turned(x, places):
    """Returns [rows, heads, d] as complex numbers times e^(i angle)."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** (-2 * np.arange(half) / x.shape[-1])
    z = x[..., :half] + 1j * x[..., half:]
    z = z * np.exp(1j * np.multiply.outer(places, speeds))[:, None, :]
    return np.concatenate([z.real, z.imag], axis=-1)


def shares(scores):
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def attention(q, k, v, params):
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[-1])
    seen = np.einsum("hij,jhd->ihd", shares(scores), v)
    return dense(seen.reshape(len(q), -1), params["out"])


def heads(x, parts):
    split = x.reshape(len(x), parts, HEADS, -1)
    return [split[:, i] for i in range(parts)]


def places_of(s):
    return len(s) - np.arange(len(s))


def history(model, s, params):
    """Returns S_sum of [CLS; rows]."""
    pma = params["pma"]
    q, k = bounded(model, pma["queries"], s[:, None], pma)
    # Seeds, each of heads, whose keys and values are the rows.
    scores = np.einsum("qcd,jcd->qj", q, k) / np.sqrt(s.shape[1])
    pooled = shares(scores) @ s
    pooled = dense(pooled.reshape(SEEDS, -1), pma["out"])
    recent = np.zeros((RECENT, s.shape[1]))
    newest = s[CLS:][::-1][:RECENT]
    recent[: len(newest)] = newest
    return gate(np.concatenate([s[:CLS], pooled, recent]), params)


def interaction(x, params):
    lower = np.tril_indices(len(x), -1)
    pairs = (x @ x.T)[lower]
    first = params["dot_mlp"]["dense_0"]["kernel"]
    pairs = np.pad(pairs, (0, len(first) - len(pairs)))
    dot = mlp(pairs, params["dot_mlp"]).reshape(N, -1)
    flat, net = x.reshape(-1), params["cross_net"]
    crossed = flat * dense(dense(flat, net["v_0"]), net["u_0"]) + flat
    cross = params["cross"]["kernel"].T @ crossed.reshape(x.shape)
    residual = params["residual"]["kernel"].T @ x
    return layer_norm(dot + cross + residual, params["norm"])


def sequence(model, s, x_sum, params):
    """Returns the rows after a PFFN by the weight X_sum^T W of the sample, and MHA."""
    pffn, own = params["pffn"], params["attention"]

    def before(name, x):
        return x if model.branch_norm else rms(x, params[name])

    def after(name, x):
        return rms(x, params[name]) if model.branch_norm else x

    weight = pffn["kernel"] @ x_sum  # of a sample, [D, D]
    added = before("pffn_norm", s) @ weight + pffn["bias"] @ x_sum
    z = s + after("pffn_norm", added)
    q, k, v = heads(dense(before("attention_norm", z), own["qkv"]), 3)
    q, k = (turned(y, places_of(z)) for y in bounded(model, q, k, own))
    return z + after("attention_norm", attention(q, k, v, own))


def equations(model, params, rows, given):
    context, fields = (np.asarray(x, np.float64) for x in rows)
    e = fields.reshape(C, -1)
    e = rms(e, params["mask_norm"])
    items = mlp(e * mlp(e, params["mask"]), params["item_mlp"])
    zero = params | {"position": np.zeros((8, D))}
    items = (items + features_of(model, zero, given)) * model.input_scale
    out = []
    for number in np.flatnonzero(REAL):
        start, end = given.offsets[number : number + 2]
        known = np.concatenate([fields[end - 1], context[number]]).reshape(-1)
        x = mlp(known, params["tokens"]).reshape(N, D) * model.input_scale
        s = items[start + P : end - 1]
        for layer in range(model.num_layers):
            own = params[f"features_{layer}"]
            x_sum = gate(own["lce"]["kernel"].T @ x, own)
            s = s if layer else np.concatenate([x_sum[:CLS], s])
            s_sum = history(model, s, params[f"history_{layer}"])
            both = np.concatenate([x, s_sum])
            x = interaction(both, params[f"interaction_{layer}"])
            s = sequence(model, s, x_sum, params[f"sequence_{layer}"])
        s_sum = history(model, s, params[f"history_{model.num_layers}"])
        flat = np.concatenate([x, s_sum]).reshape(-1)
        hidden = mlp(flat, params["head_mlp"], ends_linear=False)
        out.append(dense(hidden, params["head"]))
    return np.stack(out)


@pytest.mark.parametrize("options", SWITCHES)
def test_the_model_and_its_gradients_follow_its_equations(options):
    assert_follows(equations, MODEL.clone(**options))


def test_an_empty_history_is_its_summary_of_features():
    def without_history(given):
        # Of the first sequence the sample's row and the candidate alone.
        offsets = np.array([0, 2, 2, 6], np.int32)
        return given._replace(offsets=offsets, targets=np.array([1, 0, 5], np.int32))

    assert_follows(equations, MODEL, without_history)


def test_what_lies_outside_of_a_history_changes_no_logit():
    """Events of others, rows of padding, and what came after."""
    dense_features, rows, given = inputs()
    params = initialized(MODEL, dense_features, rows, given)

    def logits(fields, given=given):
        return np.asarray(
            apply(MODEL, params, dense_features, (rows[0], fields), given)
        )

    expected, starts = logits(rows[1]), given.offsets[:-1]
    of_first = logits(rows[1].at[starts[0] + P].add(1.0))
    assert (of_first != expected).all(1).tolist() == [True, False, False]
    padding = logits(rows[1].at[given.offsets[-1] :].add(1.0))
    np.testing.assert_array_equal(padding[REAL], expected[REAL])
    answers = given.answers.copy()
    answers[given.offsets[1] - 1] += 1  # what is known of an event later
    known = logits(rows[1], given._replace(answers=answers % 3))
    np.testing.assert_array_equal(known[REAL], expected[REAL])


def test_the_order_of_a_history_counts():
    dense_features, rows, given = inputs()
    params = initialized(MODEL, dense_features, rows, given)
    order = np.arange(C)
    order[[1, 2]] = 2, 1  # the oldest two of the first history

    def logits(order):
        events = given._replace(answers=given.answers[order])
        return apply(MODEL, params, dense_features, (rows[0], rows[1][order]), events)

    changed = np.abs(logits(order) - logits(np.arange(C)))
    assert (changed[0] > 1e-3).all() and (changed[1:] < 1e-6).all()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_heads": 3}, "twice --num-heads"),
        ({"num_cls": 4}, "--num-sums 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        jax.eval_shape(MODEL.clone(**changes).init, jax.random.key(0), *inputs())


def test_events_that_are_all_targets_are_refused():
    args = inputs()
    args = (*args[:2], args[2]._replace(candidates=None))
    with pytest.raises(ValueError, match="--data.targets last"):
        jax.eval_shape(MODEL.init, jax.random.key(0), *args)


def test_rows_are_dropped_in_training_only():
    assert_drops_in_training(MODEL, [0.125] * 2 + [0.25] * 8)


def test_fog_keeps_the_sites():
    assert_fog_keeps_sites(MODEL.clone(recipe="fp8_rowwise", dim=64), *inputs())


def test_every_product_is_a_site():
    sites = listed(MODEL.clone(recipe="fp8_rowwise", dim=64), *inputs())
    layers = range(MODEL.num_layers)
    attention = ("scores", "values", "out")
    expected = {f"features_{i}/{x}" for i in layers for x in ("lce/compress", "gate")}
    expected |= {
        f"sequence_{i}/{x}"
        for i in layers
        for x in (
            "pffn",
            "pffn_sample",
            *(f"attention/{y}" for y in ("qkv", *attention)),
        )
    }
    expected |= {
        f"history_{i}/{x}"
        for i in range(MODEL.num_layers + 1)
        for x in ("gate", *(f"pma/{y}" for y in attention))
    }
    interaction = ("dot_mlp/dense_0", "dot_mlp/dense_1", "cross_net/u_0")
    interaction += ("cross_net/v_0", "cross/compress", "residual/compress")
    expected |= {f"interaction_{i}/{x}" for i in layers for x in interaction}
    expected |= {"mask/dense_0", "item_mlp/dense_0", "item_mlp/dense_1"}
    expected |= {"tokens/dense_0", "head_mlp/dense_0", "head"}
    assert set(sites) == expected
    # The weight of a sample has a low rank: its columns are the summary's embeddings.
    own = sites["sequence_0/pffn_sample"]
    longest = MODEL.max_length + CLS
    assert (own.batch, own.spec.m, own.spec.k, own.spec.n) == (B, longest, SUMS, 64)
