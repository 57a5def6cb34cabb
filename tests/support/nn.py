"""What tests of modules and models share: variables, and sites in numpy."""

import functools
from typing import get_args

import jax
import ml_dtypes
import numpy as np

from loka_jax import nn, scaling
from loka_jax.nn import OVERWRITE_WITH_GRADIENT, observed
from loka_jax.normed import ActivationName
from loka_jax.recipe import get_recipe
from tests.support import oracle

DELAYED = "fp8_tensorwise_delayed"
BF16 = 2.0**-8  # at most the relative error of a rounding to bfloat16
# Of lhs, rhs and g, each far from the others: above their limits of 1.75 and 3.5 normal
# numbers are clipped, and weights below 1 lose all but two bits.
FACTORS = np.float32([2.0**-8, 2.0**2, 2.0**-7])

ACTIVATIONS = {
    name: lambda x, name=name: oracle.activate(name, x)[0]
    for name in get_args(ActivationName)
}


def rms_by_blocks(x, **options):
    """Returns `x` with every block of the last dim at unit mean square, in float64."""
    return oracle.normalized(np.asarray(x, np.float64), "block", **options)[0]


def normalized(x, norm, params=None, stats=None):
    """Returns float64 `gamma norm(x) + beta`; a batch norm may take other moments."""
    x, params = np.asarray(x, np.float64), params or {}
    if norm == "batch":
        axes = tuple(range(x.ndim - 1))
        stats = stats or {"mean": x.mean(axes), "var": x.var(axes)}
        x = (x - stats["mean"]) / np.sqrt(stats["var"] + 1e-5)
    else:
        x, _ = oracle.normalized(x, norm)
    return x * params.get("scale", 1.0) + params.get("bias", 0.0)


def rounded(*shape, seed=0, scale=1.0):
    """Returns normal values that are exact in bfloat16, as float32 of numpy."""
    values = scale * np.random.default_rng(seed).standard_normal(shape, np.float32)
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def table_of(factors):
    """Returns the table of a site with these factors."""
    stored = jax.jit(scaling.stored, static_argnums=1)
    return np.array(stored(np.float32(factors), get_recipe(DELAYED)).table)


def stored_table():
    """Returns a table whose operands have different factors."""
    return table_of(FACTORS)


# The state after a step: one program, where each of its operations would be one.
updated = jax.jit(scaling.update_delayed, static_argnums=2)


def scales_of(table):
    """Returns what is read in a table: the factors, and those of earlier steps."""
    return np.concatenate(_read(np.asarray(table, np.float32)), axis=1)


@jax.jit
def _read(table):
    state = scaling.DelayedScaling(table)
    return state.factors[:, None], state.history


def table_after(table, amaxes):
    """Returns a table after a step with these amaxes of lhs, rhs and g."""
    state = scaling.DelayedScaling(jax.numpy.asarray(table))
    return updated(state, np.float32(amaxes), get_recipe(DELAYED)).table


def factor_of(amax):
    """Returns the factor of an amax by itself: E4M3, with a margin of one bit."""
    return 2.0 ** np.ceil(np.log2(np.float64(amax) / 224))


def e4m3(x, factor):
    """Returns float64 values as a cast by a stored factor to E4M3 leaves them."""
    return oracle.fp8(x, factor)


def initialized(module, *args, table=None, **kwargs):
    """Returns variables of random parameters and moments, without compiling.

    The table of each site is as given, by default that before a first step.
    """
    init = functools.partial(module.init, **kwargs)
    shapes = jax.eval_shape(init, jax.random.key(0), *args)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    values = [
        np.broadcast_to(0 if table is None else table, leaf.shape).astype(np.float32)
        if path[0].key == OVERWRITE_WITH_GRADIENT
        else _random(path[-1].key, leaf.shape, seed)
        if path[0].key in ("params", "batch_stats")
        else np.zeros(leaf.shape, leaf.dtype)
        for seed, (path, leaf) in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, values)


def _random(name, shape, seed):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    match name:
        case "kernel":
            return values / np.float32(max(shape[0], 1) ** 0.5)
        case "scale":
            return 1 + np.float32(0.3) * values
        case "var":
            return np.exp(values)
    return np.float32(0.3) * values


def states(variables):
    """Returns the tables of all sites, of variables or of their gradients."""
    return [np.asarray(x) for x in jax.tree.leaves(variables[OVERWRITE_WITH_GRADIENT])]


def gradients(module, variables, x, factors):
    """Returns the output, and gradients of the sum of it times factors.

    They are those of the variables and of x.
    """

    def loss(variables, x, factors):
        y = module.apply(variables, x)
        return jax.numpy.sum(y.astype(np.float32) * factors), y

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, y), found = run(variables, x, factors)
    return y, *found


def record_calls(monkeypatch, *functions):
    """Returns a list of names and arguments of calls of functions of modules."""
    found = []

    def recorded(run, name, *args, **kwargs):
        found.append((name, args))
        return run(*args, **kwargs)

    for module, name in functions:
        run = functools.partial(recorded, getattr(module, name), name)
        monkeypatch.setattr(module, name, run)
    return found


def record_taps(monkeypatch):
    """Returns a list that gets (out, lhs, rhs, scales) of each product Probe is shown.

    Nothing else is done with them, so that little is compiled.
    """
    found = []

    def tap(observer, axis_names, out, lhs, rhs, scales, stats):
        found.append((out, lhs, rhs, scales))
        return out

    monkeypatch.setattr(observed, "tap", tap)
    return found


def listed(module, *args, **kwargs):
    """Returns the sites of a module by path."""
    return {site.path: site for site in nn.list_sites(module, *args, **kwargs)}
