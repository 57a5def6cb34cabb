"""Delayed scales of models that others wrote, in groups and by themselves."""

import functools

import jax
import numpy as np
import pytest

from loka_jax import nn
from loka_jax.nn import OVERWRITE_WITH_GRADIENT as STATES
from loka_jax.site import Choice
from tests.support.flow import MODELS, X, loss
from tests.support.nn import DELAYED

KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("as_users_do")


@pytest.mark.parametrize("plain", MODELS, ids=lambda m: type(m).__name__)
def test_delayed_scales_are_of_every_site_and_change(plain):
    model = nn.convert(plain, recipe=DELAYED, skip="head" if plain != MODELS[3] else ())
    variables = model.init(KEY, X)
    sites = [x for x in nn.list_sites(model, X) if x.is_fp8]
    states = jax.jit(jax.grad(lambda v: loss(model, v, X)))(variables)[STATES]
    tables = jax.tree.leaves(states)
    assert len(tables) == len({x.path for x in sites})
    assert all(np.all(np.max(table, axis=-1) > 0) for table in tables)


@pytest.mark.parametrize("plain", MODELS, ids=lambda m: type(m).__name__)
def test_a_group_in_fp8_has_scales_under_scan_and_remat(plain):
    model = nn.convert(plain, recipe=DELAYED)
    sites = [x for x in nn.list_sites(model, X) if x.group is not None]
    choices = tuple((x.path, Choice.parse(f"group {DELAYED}")) for x in sites)
    planned = nn.Planned(model, choices)
    variables = model.init(KEY, X)

    @jax.jit
    def step(variables):
        run = [functools.partial(loss, m, x=X) for m in (model, planned)]
        grads = [jax.grad(f)(variables) for f in run]
        return grads, [{**variables, STATES: g[STATES]} for g in grads]

    _, (own, joint) = step(variables)
    (apart, _), _ = step(own)
    (_, found), _ = step(joint)
    largest = max(np.linalg.norm(x) for x in jax.tree.leaves(apart["params"]))
    each = (jax.tree.leaves(g["params"]) for g in (apart, found))
    for x, y in zip(*each, strict=True):
        assert np.linalg.norm(x - y) < 0.2 * np.linalg.norm(x) + 2.0**-5 * largest
    tables = [x for g in (own, joint) for x in jax.tree.leaves(g[STATES])]
    assert all(np.all(np.max(x, axis=-1) > 0) for x in tables)
