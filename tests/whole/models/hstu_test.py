"""HSTU against its equations in numpy; candidates, truncation, and its sites."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from loka_jax import checked
from loka_jax.dispatch.attention import IN_BF16, IN_FP8
from loka_jax.heads import Qkv
from loka_jax.models import Hstu
from loka_jax.nn import (
    PROBE,
    Planned,
    ProbeConfig,
    by_path,
    jagged_attention,
    mlp,
    pre_norm_dense,
    probing,
    site_context,
)
from loka_jax.nn.jagged_attention import JaggedAttention
from loka_jax.ops.device import HOPPER, Device
from loka_jax.probe import monitors
from loka_jax.probe.live_errors import LiveErrors
from loka_jax.probe.site import ErrorsAlone
from loka_jax.quality import MEASURES
from loka_jax.site import BF16, Choice
from tests.support import normal
from tests.support.histories import (
    REAL,
    SWITCHES,
    TASKS,
    B,
    C,
    P,
    apply,
    assert_candidates_are_alone,
    assert_drops_in_training,
    assert_fog_keeps_sites,
    assert_later_rows_change_nothing,
    bounded,
    dense,
    features_of,
    initialized,
    inputs,
)
from tests.support.nn import listed, record_calls

MODEL = Hstu(
    dim=16,
    num_layers=2,
    num_heads=2,
    qk_dim=4,
    v_dim=6,
    item_mlp=(10,),
    head_mlp=(12,),
    max_length=8,
    age_buckets=5,
    age_unit=2.0,
    num_tasks=TASKS,
    recipe="f32",
)


def norm(x, params):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * params["scale"] + params["bias"]


def silu(x):
    return x / (1 + np.exp(-x))


def layer(model, x, params, counts):
    contexts, candidates = counts
    read = x if model.branch_norm else norm(x, params["norm"])
    u, v, q, k = np.split(dense(read, params["uvqk"]), [12, 24, 32], 1)
    q, k, v = (part.reshape(len(x), 2, -1) for part in (q, k, v))
    q, k = bounded(model, q, k, params)
    scores = silu(np.einsum("ihd,jhd->hij", q, k) / 2) / model.max_length
    i, j = np.indices((len(x), len(x)))
    first = len(x) - candidates
    sees = (j <= i) & (j < first)
    if model.window is not None:
        is_near = np.minimum(i, first) - j < model.window
        sees &= is_near | (j < contexts + model.oldest)
    sees |= (i == j) | ((i < contexts) & (j < first))
    a = np.einsum("hij,jhe->ihe", scores * sees, v).reshape(len(x), -1)
    u = silu(u)
    joined = np.concatenate([u, a, norm(a, params["attention_norm"]) * u], axis=1)
    added = dense(joined, params["out"])
    if model.branch_norm:
        added /= np.sqrt(np.mean(added**2, axis=-1, keepdims=True) + 1e-6)
        added *= params["norm"]["scale"]
    return x + added


def equations(model, params, rows, given):
    context, fields = rows
    mlp = params["item_mlp"]
    flat = np.asarray(fields).reshape(C, -1)
    items = dense(np.maximum(dense(flat, mlp["dense_0"]), 0), mlp["dense_1"])
    x = items + features_of(MODEL, params, given)
    out = []
    for sequence, start in enumerate(given.offsets[:-1]):
        part = np.array(x[start : given.offsets[sequence + 1]])
        if not len(part):
            continue
        part[:P] += dense(np.asarray(context[sequence]), params["context"])
        part *= model.input_scale
        for number in range(MODEL.num_layers):
            counts = P, given.candidates[sequence]
            part = layer(model, part, params[f"layer_{number}"], counts)
        target = given.offsets[sequence + 1] - 1
        user = part[-1]
        user = user if model.branch_norm else norm(user, params["norm_out"])
        hidden = dense(user * items[target], params["head_mlp"]["dense_0"])
        out.append(dense(np.maximum(hidden, 0), params["head"]))
    return np.stack(out)


@pytest.mark.parametrize("changes", [{"window": 2, "oldest": 1}, *SWITCHES])
def test_the_model_follows_its_equations(changes):
    args, model = inputs(), MODEL.clone(**changes)
    params = initialized(model, *args)
    logits = apply(model, params, *args)
    expected = equations(model, jax.tree.map(np.float64, params), *args[1:])
    assert logits.shape == (B, TASKS)
    np.testing.assert_allclose(logits[REAL], expected, rtol=2e-4, atol=2e-4)


def test_candidates_of_one_history_are_scored_as_if_each_were_alone():
    assert_candidates_are_alone(MODEL)


def test_truncation_of_layers_that_see_no_more_changes_nothing():
    """A window of 3 rows sees no row that a truncation to 3 leaves out."""
    args = inputs()
    given = args[2]._replace(contextual=None)
    args = (args[0], (args[1][0][:, :0], args[1][1]), given)  # no context
    model = MODEL.clone(num_layers=1, window=3)
    params = initialized(model, *args)
    full = apply(model, params, *args)
    cut = model.clone(truncate_after=0, truncate_to=3)
    np.testing.assert_allclose(
        apply(cut, params, *args)[REAL], full[REAL], rtol=1e-5, atol=1e-5
    )
    assert not np.allclose(
        apply(model.clone(window=None), params, *args)[REAL], full[REAL]
    )


def test_sequences_of_targets_are_not_truncated():
    args = inputs()
    args = (*args[:2], args[2]._replace(candidates=None))
    with pytest.raises(ValueError, match="--data.targets last"):
        jax.eval_shape(MODEL.clone(truncate_after=1).init, jax.random.key(0), *args)


def test_among_targets_a_later_row_changes_no_earlier_logit():
    assert_later_rows_change_nothing(MODEL)


def test_rows_are_dropped_in_training_only():
    assert_drops_in_training(MODEL, [0.125])


def test_fog_keeps_the_sites():
    assert_fog_keeps_sites(MODEL.clone(recipe="fp8_rowwise", dim=64), *inputs())


def test_every_product_is_a_site():
    sites = listed(MODEL.clone(recipe="fp8_rowwise", dim=64), *inputs())
    products = ("uvqk", "attention", "out")
    of_layers = {f"layer_{i}/{name}" for i in range(2) for name in products}
    others = {"item_mlp/dense_0", "item_mlp/dense_1", "context", "head_mlp/dense_0"}
    assert set(sites) == of_layers | others | {"head"}
    assert sites["head"].recipe == "f32"
    # The rows, the columns of q and v, and the mean rows of a sequence; a head each.
    own = sites["layer_0/attention"]
    assert (own.spec.m, own.spec.k, own.spec.n, own.batch) == (C, 10, C // B, 2)


def test_products_of_a_layer_run_in_groups_with_its_norm_and_sum(monkeypatch):
    given = inputs()
    by_xla = MODEL.clone(recipe="bf16", num_layers=1, implementation="xla")
    params = initialized(by_xla, *given)
    calls = record_calls(
        monkeypatch, *((x, "run_group") for x in (mlp, pre_norm_dense))
    )

    def loss(model, params, *given):
        return jnp.mean(model.apply({"params": params}, *given) ** 2)

    def both(model):
        step = jax.value_and_grad(functools.partial(loss, model))
        return jax.jit(step)(params, *given)

    expected = both(by_xla)
    assert not calls
    found = both(by_xla.clone(implementation="group"))
    assert "xla" not in {
        x.choice.provider for _, (_, plans, *_) in calls for x in plans
    }
    layers = [[type(x.member).__name__ for x in own.layers] for _, (own, *_) in calls]
    assert layers.count(["NoneType", "Member"]) == layers.count(["Member"]) - 1 == 1
    # Each is off the exact one by a rounding or two of each value.
    ours, theirs = (ravel_pytree(x)[0] for x in (found, expected))
    assert np.linalg.norm(ours - theirs) <= 2**-6 * np.linalg.norm(theirs)


def test_an_attention_in_fp8_says_what_runs_it_and_why_not(monkeypatch):
    wrong: dict[str, str | None] = {}
    monkeypatch.setattr(checked, "why_wrong", wrong.get)
    model = MODEL.clone(recipe="fp8_rowwise", qk_dim=64, v_dim=64, num_layers=1)

    def attention(choice, device):
        choices = () if choice is None else (("layer_0/attention", choice),)
        with site_context(device=device):
            site = listed(Planned(model, choices), *inputs())["layer_0/attention"]
        return site.runs["fwd"], site.runs["dlhs"], site.why_not

    cpu, not_chosen = Device(platform="cpu"), "its choice is not FP8"
    by_xla = Choice("xla", IN_FP8.recipe)
    assert attention(None, HOPPER) == ("pallas bf16", "pallas bf16", not_chosen)
    assert attention(IN_BF16, HOPPER) == ("pallas bf16", "pallas bf16", not_chosen)
    assert attention(BF16, HOPPER) == ("xla bf16", "xla bf16", not_chosen)
    assert attention(IN_FP8, HOPPER) == ("pallas fp8 e4m3", "pallas bf16", None)
    assert attention(by_xla, HOPPER) == ("xla fp8 e4m3", "xla bf16", None)
    assert attention(IN_FP8, cpu) == ("xla fp8 e4m3", "xla bf16", None)
    wrong["jagged_attention_fp8"] = "they are wrong"
    assert attention(IN_FP8, HOPPER) == ("pallas bf16", "pallas bf16", "they are wrong")


@pytest.mark.parametrize(
    "observer", [ErrorsAlone(), ProbeConfig(recipes=("fp8_rowwise",))]
)
def test_probe_measures_the_error_of_its_forward_pass(observer):
    rows = normal(C, 2 * 4 * 16, dtype=jnp.bfloat16)  # U, V, Q and K
    offsets = jnp.array((0, 5, 5, 9), jnp.int32)  # the last rows are padding
    site = JaggedAttention(max_length=8)

    @jax.jit
    def run(rows):
        with probing(observer):
            qkv = Qkv((rows,), 2, 16)
            stats = site.init(jax.random.key(0), qkv, offsets)[PROBE]

            def out(rows, stats):
                return site.apply({PROBE: stats}, Qkv((rows,), 2, 16), offsets)

            y, pull = jax.vjp(out, rows, stats)
            return y, pull(y)

    (u, y), (gradient, stats) = run(rows)

    @functools.partial(jax.jit, static_argnums=0)
    def plain(is_fp8, rows):
        how = dict(scale=0.25, max_length=8, is_fp8=is_fp8)
        out = lambda *rows: jagged_attention(*rows, offsets, **how)  # noqa: E731
        y, pull = jax.vjp(out, *rows)
        return y, pull(y)

    u_given, *own = (x.reshape(C, 2, 16) for x in np.split(rows, 4, axis=1))
    v, q, k = own
    expected, of_rows = plain(False, [q, k, v])
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(u.reshape(C, 2, 16), u_given)
    dq, dk, dv = of_rows
    joined = [x.reshape(C, -1) for x in (u, dv, dq, dk)]
    np.testing.assert_array_equal(gradient, np.concatenate(joined, axis=1))
    exact, _ = plain(False, [x.astype(jnp.float32) for x in (q, k, v)])
    in_fp8, _ = plain(True, [q, k, v])
    noise = np.float64(in_fp8) - np.float64(exact)
    relative = np.linalg.norm(noise) / np.linalg.norm(exact)
    assert 0.02 < relative < 0.08
    (errors,) = by_path(stats).values()
    assert isinstance(errors, LiveErrors) and errors.steps == 1
    told = monitors.read(np.asarray(errors.monitors))
    np.testing.assert_allclose(told["out_rms"], np.sqrt(np.mean(exact**2)), rtol=1e-5)
    logits = np.max(np.abs(np.einsum("ihd,jhd->hij", *map(np.float64, (q, k))))) / 4
    assert logits <= told["largest_logit"] < 4 * logits
    seen = len(observer.recipes), 3
    assert errors.relative_l2.shape == seen
    np.testing.assert_allclose(errors.relative_l2[:, 0], relative, rtol=1e-4)
    assert np.isnan(errors.relative_l2[:, 1:]).all()
    parts = [slice(0, 5), slice(5, 9)]
    lost, whole = ([np.linalg.norm(x[i]) for i in parts] for x in (noise, exact))
    worst = np.asarray(errors.sums)[:, 0, MEASURES.index("worst_row"), 2]
    np.testing.assert_allclose(worst, np.max(np.divide(lost, whole)), rtol=1e-4)
