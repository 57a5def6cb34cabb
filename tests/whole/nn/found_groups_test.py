"""Groups that are found in a program compute what their sites do apart."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from loka_jax import nn
from loka_jax.group import Dense
from loka_jax.nn import rewrite
from loka_jax.site import Choice
from tests.support.flow import MODELS, X, layers_of, loss
from tests.support.nn import initialized, listed, rounded

KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("as_users_do")


@pytest.mark.parametrize("plain", MODELS, ids=lambda m: type(m).__name__)
def test_a_group_computes_what_its_sites_do(plain):
    assert_same_in_group(plain)


def assert_same_in_group(plain, **options):
    """Asserts that groups by themselves compute what their sites do apart."""
    model = nn.convert(plain, recipe="bf16")
    variables = initialized(plain, X, **options)
    sites = [x for x in nn.list_sites(model, X, **options) if x.group is not None]
    grouped = {x.path: Choice.parse("group bf16") for x in sites}
    planned = nn.Planned(model, tuple(grouped.items()))
    listed = nn.list_sites(planned, X, **options)
    assert all(x.in_group for x in listed if x.path in grouped)
    models = plain, model, planned
    run = [jax.grad(functools.partial(loss, m, **options)) for m in models]
    exact, apart, found = jax.jit(lambda v: [f(v, X) for f in run])(variables)
    largest = max(np.linalg.norm(x) for x in jax.tree.leaves(exact))
    for x, y, z in zip(*map(jax.tree.leaves, (exact, apart, found)), strict=True):
        rounding = np.linalg.norm(x - y) + 2.0**-8 * np.linalg.norm(x)
        assert np.linalg.norm(x - z) < 3 * rounding + 2.0**-10 * largest


class Told(linen.Module):
    """Returns what it computes between, too; its einsums have the weight first."""

    is_told: bool = True

    @linen.compact
    def __call__(self, x):
        out = {}
        gate = self.param("gate", linen.initializers.lecun_normal(), (32, 64))
        last = self.param("last", linen.initializers.lecun_normal(), (64, 4, 8))
        y = out["gate"] = jnp.einsum("...d,df->...f", linen.LayerNorm()(x), gate)
        y = out["mlp"] = jnp.einsum("bf,fhd->hbd", linen.gelu(y), last)
        y = out["dense"] = linen.Dense(32)(y.transpose(1, 0, 2).reshape(x.shape))
        x = out["sum"] = x + y
        x = linen.Dense(32)(linen.LayerNorm()(x))
        return x, out if self.is_told else {}


def test_values_between_that_a_model_returns_do_not_keep_its_layers_apart():
    x = X.reshape(-1, 32)
    told, silent = (
        nn.convert(Told(is_told), recipe="f32") for is_told in (True, False)
    )
    variables = initialized(Told(), x)
    groups_of = lambda m: {k: v.group for k, v in listed(m, x).items()}  # noqa: E731
    assert groups_of(told) == groups_of(silent)
    group = groups_of(told)["gate"]
    assert layers_of(group) == [
        (None, "layer", "none", False),
        ("gate", "none", "gelu", False),
        ("last", "none", "none", False),
    ]
    assert layers_of(groups_of(told)["Dense_0"])[0] == (
        "Dense_0",
        "layer",
        "none",
        True,
    )
    grouped = nn.Planned(
        told, tuple((x.path, Choice.parse("group bf16")) for x in group.members)
    )
    expected = Told().apply(variables, x)
    for model in (told, grouped):
        found = jax.jit(model.apply)(variables, x)
        for a, b in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
            np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05)


class MixedPrecision(linen.Module):
    """Layers in bfloat16 and float32 in an order that is drawn; a head at the end."""

    seed: int

    @linen.compact
    def __call__(self, x):
        draws = random.Random(self.seed)
        results = [x]

        def dense():
            return linen.Dense(32, dtype=draws.choice([None, jnp.bfloat16]))

        for _ in range(8):
            kind = draws.choice(["dense", "norm", "act", "sum", "cast", "branch"])
            if kind == "dense":
                x = dense()(x)
            elif kind == "norm":
                x = linen.LayerNorm(dtype=draws.choice([None, jnp.bfloat16]))(x)
            elif kind == "act":
                x = draws.choice([linen.relu, linen.gelu, jnp.tanh])(x)
            elif kind == "sum":
                x = x + draws.choice(results)
            elif kind == "cast":
                x = x.astype(draws.choice([jnp.bfloat16, jnp.float32]))
            else:
                x = x + dense()(linen.relu(dense()(linen.LayerNorm()(x))))
            results.append(x)
        return linen.Dense(1, name="head")(x)[:, 0]


def test_no_product_of_a_group_runs_as_written_too(monkeypatch):
    """Else a group is computed for nothing: its results are those as written."""
    as_written, in_groups = [], 0

    def run(step, values):
        as_written.append(step.name)
        return run_as_written(step, values)

    run_as_written = rewrite._run_as_written
    monkeypatch.setattr(rewrite, "_run_as_written", run)
    for seed in range(24):
        model = nn.convert(MixedPrecision(seed), recipe="bf16")
        sites = nn.list_sites(model, X)
        members = [x.path for x in sites if x.group is not None]
        variables = jax.eval_shape(model.init, KEY, X)
        with nn.overriding(dict.fromkeys(members, Choice.parse("group bf16"))):
            jax.eval_shape(model.apply, variables, X)
        in_groups += len(members)
    assert in_groups > 50 and as_written and "dot_general" not in as_written


def test_contracted_dims_come_in_any_order():
    def function(parameters, x):
        y = jax.nn.relu(jnp.einsum("bd,dhk->bhk", x, parameters["first"]))
        dims = ((2, 1), (0, 1)), ((), ())
        return jax.lax.dot_general(y, parameters["second"], dims)

    parameters = {"first": rounded(32, 4, 8, seed=1), "second": rounded(8, 4, 48)}
    model = nn.convert(function, recipe="bf16")
    paths = {path: Choice.parse("group bf16") for path in parameters}
    with nn.overriding(paths):
        assert all(site.in_group for site in nn.list_sites(model, parameters, X))
        found = model(parameters, X)
    expected = function(parameters, X)
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.1)


class Scanned(linen.Module):
    """Layers under scan, of which each returns what it computes between."""

    @linen.compact
    def __call__(self, x):
        class Block(linen.Module):
            @linen.compact
            def __call__(self, x):
                y = linen.Dense(32)(x)
                return linen.LayerNorm()(x + y), {"dense": y}

        axes = dict(variable_axes={"params": 0}, split_rngs={"params": True})
        x, out = linen.scan(linen.remat(Block), length=2, **axes)(name="layers")(x)
        return x, {f"dense_{i}": out["dense"][i] for i in range(2)}


def test_values_between_that_a_scan_returns_do_not_keep_its_layers_apart():
    x = X.reshape(-1, 32)
    model = nn.convert(Scanned(), recipe="f32")
    (site,) = nn.list_sites(model, x)
    assert layers_of(site.group)[0] == ("layers/Dense_0", "layer", "none", True)
    grouped = nn.Planned(model, ((site.path, Choice.parse("group bf16")),))
    variables = initialized(Scanned(), x)
    expected = Scanned().apply(variables, x)
    found = jax.jit(grouped.apply)(variables, x)
    for a, b in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05)


class Dropped(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        for i in range(2):
            x = linen.silu(linen.Dense(64, name=f"dense_{i}")(x))
            x = linen.Dropout(0.25, deterministic=not train)(x)
        return x


class Orders(linen.Module):
    """Steps after products in orders that others write."""

    @linen.compact
    def __call__(self, x, train=True):
        drop = functools.partial(linen.Dropout, 0.25, deterministic=not train)
        x = x + drop()(linen.Dense(32, name="dropped")(x))
        h = linen.gelu(linen.Dense(64, name="up")(linen.LayerNorm()(x)), False)
        x = linen.LayerNorm()(x + drop()(linen.Dense(32, name="post")(h)))
        x = x + linen.silu(linen.RMSNorm()(linen.Dense(32, name="last")(x)))
        x = linen.LayerNorm()(jnp.tanh(linen.Dense(64, name="tanh")(x)))
        sums = [linen.Dense(32, name=f"sum_{i}")(x) for i in range(2)]
        x = linen.sigmoid(sums[0] + sums[1])
        up, gate = (linen.Dense(64, False, name=name)(x) for name in ("a", "gate"))
        x = linen.Dense(32, name="down")(drop()(linen.silu(gate) * up))
        return x * linen.sigmoid(linen.Dense(32, name="own_gate")(x))


def test_steps_are_found_in_every_order():
    plain = Orders()
    sites = listed(nn.convert(plain), X)
    (group,) = {site.group for site in sites.values()}
    found = [
        (*layer, x.norm.order)
        for layer, x in zip(layers_of(group), group.layers, strict=True)
    ]
    assert found == [
        ("dropped", "none", "none", True, "norm_act_sum"),
        (None, "layer", "none", False, "sum_norm_act"),
        ("up", "none", "exact_gelu", False, "sum_norm_act"),
        ("post", "layer", "none", True, "act_sum_norm"),
        ("last", "rms", "swish", True, "norm_act_sum"),
        ("tanh", "layer", "tanh", False, "act_norm"),
        ("sum_0", "none", "none", False, "sum_norm_act"),
        ("sum_1", "none", "sigmoid", True, "sum_norm_act"),
        ("a", "none", "none", False, "sum_norm_act"),
        ("gate", "none", "swish", True, "norm_act_mul"),
        ("down", "none", "none", False, "sum_norm_act"),
        ("own_gate", "none", "sigmoid", True, "norm_act_mul"),
    ]
    dropped = [x.member and x.member.path for x in group.layers if x.dropout]
    assert dropped == ["dropped", "post", "gate"]
    assert_same_in_group(plain, train=False)


class Crossed(linen.Module):
    """A cross network of full rank and one of low rank, beside a deep network."""

    @linen.compact
    def __call__(self, x):
        x0 = x
        for i in range(3):
            h = linen.Dense(16, False, name=f"v_{i}")(x) if i else x
            x = x0 * linen.Dense(32, name=f"u_{i}")(h) + x
        return jnp.concatenate([x, linen.relu(linen.Dense(32, name="deep")(x0))], 1)


def test_cross_networks_are_found_written_out():
    plain = Crossed()
    (group,) = {x.group for x in nn.list_sites(nn.convert(plain), X)}
    cross, deep = sorted(group.layers, key=lambda x: isinstance(x, Dense))
    paths = [[x.path for x in own] for own in cross.members]
    assert paths == [["u_0"], ["v_1", "u_1"], ["v_2", "u_2"]]
    assert cross.reads == deep.reads == 0 and deep.member.path == "deep"
    assert_same_in_group(plain)


def test_dropout_is_part_of_a_group_in_training():
    model = nn.convert(Dropped(), recipe="bf16")
    variables = initialized(model, X)
    paths = {f"dense_{i}": Choice.parse("group bf16") for i in range(2)}
    planned = nn.Planned(model, tuple(paths.items()))
    site, _ = nn.list_sites(planned, X)
    assert site.group is not None
    assert [layer.dropout for layer in site.group.layers] == [0.25, 0.25]

    @jax.jit
    def drawn(key):
        return [
            planned.apply(variables, X, rngs={"dropout": k})
            for k in (key, key, jax.random.fold_in(key, 1))
        ]

    first, again, other = map(np.asarray, drawn(KEY))
    np.testing.assert_array_equal(first, again)
    assert abs(np.mean(first == 0) - 0.25) < 0.04
    assert np.mean((first == 0) & (other == 0)) < 0.11
    scored = planned.apply(variables, X, train=False)
    assert np.all(scored != 0)
