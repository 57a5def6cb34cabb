"""Small batches of histories, and what models of them share, in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from loka_jax import nn
from loka_jax.data import Events
from tests.support import normal
from tests.support.nn import listed

B, P, K, D, TASKS = 3, 1, 2, 8, 2
LENGTHS = (6, 0, 4)
C = 12
REAL = np.array(LENGTHS) > 0


def events(candidates=1, lengths=LENGTHS):
    """Sequences whose last rows are candidates, each a target."""
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    draws = np.random.default_rng(0)
    targets = [
        stop - candidates + i if stop > start else 0
        for start, stop in zip(offsets[:-1], offsets[1:], strict=True)
        for i in range(candidates)
    ]
    return Events(
        ids=draws.integers(0, 9, (C, K), dtype=np.int32),
        answers=draws.integers(0, 3, (C, TASKS), dtype=np.int32),
        positions=draws.integers(0, 8, C, dtype=np.int32),
        ages=draws.uniform(0, 99, C).astype(np.float32),
        offsets=offsets,
        targets=np.array(targets, np.int32),
        contextual=np.full(B, P, np.int32),
        candidates=np.where(np.array(lengths) > 0, candidates, 0).astype(np.int32),
    )


def inputs(**options):
    """Returns what models of histories are called with."""
    rows = normal(B, P, D), normal(C, K, D, seed=1)
    return jnp.zeros((B, 0)), rows, events(**options)


def candidate_of(rows, several, number):
    """Returns rows and events of the first sequence of `several` with one candidate."""
    places = np.array([0, 1, 2, 3 + number, *range(6, 12), 0, 0])
    one = several._replace(
        **{x: getattr(several, x)[places] for x in ("ids", "answers", "positions")},
        ages=several.ages[places],
        offsets=np.array([0, 4, 4, 4], np.int32),
        targets=np.array([3, 0, 0], np.int32),
        candidates=np.array([1, 0, 0], np.int32),
    )
    return (rows[0], rows[1][places]), one


def dense(x, params):
    """Returns a dense layer."""
    return x @ params["kernel"] + params.get("bias", 0.0)


def features_of(model, params, given):
    """Returns what is added to the rows of events."""
    ages = np.sqrt(given.ages / model.age_unit).astype(int)
    x = params["position"][given.positions]
    x = x + params["age"][np.minimum(ages, model.age_buckets - 1)]
    for task in range(TASKS):
        x = x + params[f"answer_{task}"][given.answers[:, task]]
    return x


# Together they are FOG's form of a layer; tanh is its other bound.
FOG = {"branch_norm": True, "qk_norm": "rms", "input_scale": 3.0}
SWITCHES = [{}, FOG, {"qk_norm": "tanh"}]


def bounded(model, q, k, params):
    """Returns queries and keys [rows, heads, d], bounded as the model has it."""
    if model.qk_norm == "tanh":
        alphas = params["q_norm"]["alpha"], params["k_norm"]["alpha"]
        return np.tanh(alphas[0] * q), np.tanh(alphas[1] * k)
    if model.qk_norm == "rms":
        return (x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) for x in (q, k))
    return q, k


def assert_fog_keeps_sites(model, *args):
    """Asserts that FOG's form has the same sites in the same recipes."""

    def recipes(model):
        return {path: site.recipe for path, site in listed(model, *args).items()}

    before = recipes(model)
    assert "fp8_rowwise" in before.values()
    assert recipes(model.clone(**FOG)) == before


def initialized(model, *args):
    """Returns parameters that are drawn here: nothing is computed by JAX."""
    params = jax.eval_shape(model.init, jax.random.key(0), *args)["params"]
    leaves, tree = jax.tree.flatten(params)
    draws = np.random.default_rng(3)
    leaves = [0.4 * draws.normal(size=x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(tree, leaves)


@functools.partial(jax.jit, static_argnums=0)
def apply(model, params, *args):
    """Returns the model's logits."""
    return model.apply({"params": params}, *args)


@functools.partial(jax.jit, static_argnums=0)
def _both_ways(model, weights, params, rows, dense_features, given):
    """Returns logits, and the gradients of their weighted sum."""

    def loss(params, rows):
        logits = model.apply({"params": params}, dense_features, rows, given)
        return jnp.sum(jnp.where(REAL[:, None], logits * weights, 0)), logits

    grads, logits = jax.grad(loss, (0, 1), has_aux=True)(params, rows)
    return logits, {**grads[0], "rows": grads[1]}


def assert_follows(equations, model, changed=lambda given: given):
    """Asserts that a model has the logits and gradients of equations in numpy.

    Gradients are compared in a random direction for each part of the parameters, and
    for the embeddings.

    Args:
        equations: from model, parameters, embeddings and events to the logits of the
            sequences that have events.
        changed: from events to events.
    """
    dense_features, rows, given = inputs()
    given = changed(given)
    params = initialized(model, dense_features, rows, given)
    draws = np.random.default_rng(5)
    weights = draws.normal(size=(B, TASKS)).astype(np.float32)
    logits, grads = _both_ways(model, weights, params, rows, dense_features, given)

    def reference(changes=None, size=0.0):
        values = jax.tree.map(np.float64, {**params, "rows": rows})
        for name, change in (changes or {}).items():
            add = lambda x, y: x + size * y  # noqa: E731
            values[name] = jax.tree.map(add, values[name], change)
        return equations(model, values, values["rows"], given)

    assert logits.shape == (B, TASKS)
    np.testing.assert_allclose(logits[REAL], reference(), rtol=2e-4, atol=2e-4)
    for name, own in grads.items():
        change = jax.tree.map(lambda x: draws.normal(size=x.shape), own)
        found = sum(map(np.vdot, jax.tree.leaves(own), jax.tree.leaves(change)))
        ahead, behind = (reference({name: change}, size) for size in (1e-6, -1e-6))
        slope = np.sum(weights[REAL] * (ahead - behind)) / 2e-6
        np.testing.assert_allclose(found, slope, rtol=2e-3, atol=2e-3, err_msg=name)


def assert_drops_in_training(model, recorded):
    """Asserts that dropout is drawn in training alone, by the rates of its places.

    Args:
        recorded: the rates of the `nn.Dropout` of a pass, in order.
    """
    model = model.clone(input_dropout_rate=0.125, layer_dropout_rate=0.25)
    args, rates = inputs(), []
    params = initialized(model, *args)

    def record(call, given, kwargs, context):
        module = context.module
        if isinstance(module, nn.Dropout) and not module.deterministic:
            rates.append(module.rate)
        return call(*given, **kwargs)

    @functools.partial(jax.jit, static_argnums=0)
    def run(train, params, *args):
        rngs = {"dropout": jax.random.key(1)}
        with linen.intercept_methods(record):
            return model.apply({"params": params}, *args, train=train, rngs=rngs)

    plain = run(False, params, *args)
    assert rates == []
    expected = apply(model, params, *args)
    np.testing.assert_allclose(plain, expected, rtol=1e-5, atol=1e-5)
    dropped = run(True, params, *args)
    assert rates == recorded
    assert np.all(np.asarray(dropped)[REAL] != np.asarray(plain)[REAL])


def assert_candidates_are_alone(model):
    """Asserts that each candidate of a history has the logits that it has alone."""
    _, rows, several = inputs(candidates=3, lengths=(6, 0, 0))
    dense_features = jnp.zeros((B, 0))
    params = initialized(model, dense_features, rows, several)
    together = apply(model, params, dense_features, rows, several)
    for number in range(3):
        alone = candidate_of(rows, several, number)
        alone = apply(model, params, dense_features, *alone)
        np.testing.assert_allclose(together[number], alone[0], rtol=1e-5, atol=1e-5)


def assert_later_rows_change_nothing(model):
    """Asserts that of events that are all targets none sees a later one."""
    given = events()._replace(
        contextual=None, candidates=None, targets=np.arange(P, 6, dtype=np.int32)
    )
    rows = normal(B, P, D), normal(C, K, D, seed=1)
    params = initialized(model, jnp.zeros((B, 0)), rows, given)

    def logits(fields):
        args = jnp.zeros((B, 0)), (rows[0], fields), given
        return np.asarray(apply(model, params, *args))

    changed = logits(rows[1].at[4].add(1.0)) != logits(rows[1])
    assert not changed[: 4 - P].any() and changed[4 - P :].all()
