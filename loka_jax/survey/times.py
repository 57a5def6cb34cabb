"""How long a site takes in every recipe, by XLA and by kernels, on a GPU.

Kernel time by the profiler, of operands that were drawn from what Probe learned:

    fwd         the whole site: casts, product, bias, norm, activation
    dlhs, drhs  casts and product alone; all recipes share what comes before
    training    the whole site forward and backward
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from loka_jax import fp8
from loka_jax.dispatch.candidates import SiteKey
from loka_jax.nn import Site
from loka_jax.normed import NormName
from loka_jax.ops import roles
from loka_jax.ops.dense_norm import (
    Activations,
    Implementation,
    Out,
    dense_norm,
    plan,
)
from loka_jax.probe.capture import Operands
from loka_jax.probe.compiling import compile_all
from loka_jax.probe.timing import Case, time_kernels
from loka_jax.recipe import INITIALIZED, Recipe, Role, get_recipe
from loka_jax.scaling import DelayedScaling
from loka_jax.survey.candidates import BF16, scaling_state

_ROTATED_BYTES = 120e6  # twice the L2 of an H200
_MAX_SETS = 16
_BACKWARD: tuple[Role, ...] = ("dlhs", "drhs")


def site_times(
    site: Site,
    draw: Callable[[Array], Operands],
    recipes: tuple[str, ...],
    seed: int,
    say: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """Returns microseconds by "fwd", "dlhs", "drhs", "training", and candidate.

    Empty without a GPU.

    Args:
        site: where.
        draw: all rows of its operands from a key.
        recipes: beside bfloat16.
        seed: of the draws.
        say: takes a line on each candidate that does not compile.
    """
    if jax.default_backend() != "gpu":
        return {}
    keys = jax.random.split(jax.random.key(seed), rotated(site))
    drawn = [_as_read(draw(key)) for key in keys]
    programs = _programs(site, recipes, drawn[0])
    compiled = compile_all({key: (f, drawn[0]) for key, f in programs.items()})
    cases = {}
    for key, program in compiled.items():
        if isinstance(program, Exception):
            say(f"{key} does not compile: {program}")
        else:
            cases[key] = Case(program, drawn)
    times = time_kernels(cases)
    found: dict[str, dict[str, float]] = {}
    for key, taken in times.items():
        what, _, candidate = key.partition(" ")
        found.setdefault(what, {})[candidate] = taken.median_us
    return found


def rotated(site: Site | SiteKey) -> int:
    """Returns how many sets of operands keep a call from finding its own in the L2."""
    num_bytes = 2 * site.m * (site.k + site.n)
    return min(max(2, round(_ROTATED_BYTES / num_bytes + 0.5)), _MAX_SETS)


def operand_amaxes(operands: tuple[Array, Array, Array]) -> Array:
    """Returns the amaxes of lhs, rhs and g."""
    return jnp.stack([fp8.amax(x) for x in operands])


def speedup(times: dict[str, dict[str, float]], what: str, name: str) -> float | None:
    """Returns a candidate's speed over bfloat16; None if one was not measured."""
    of_all = times.get(what, {})
    if name not in of_all or BF16 not in of_all:
        return None
    return of_all[BF16] / of_all[name]


def _programs(site: Site, recipes: tuple[str, ...], operands: tuple) -> dict[str, Any]:
    """Returns functions of (lhs, rhs, g) by what is timed, and candidate."""
    amaxes = operand_amaxes(operands)
    found: dict[str, Any] = {}
    for name in ("bf16", *recipes):
        recipe = get_recipe(name)
        state = scaling_state(recipe, amaxes)
        if recipe.is_delayed:
            recipe = get_recipe(name + INITIALIZED)
        implementations: list[Implementation] = ["xla"]
        if _is_served(site, recipe):
            implementations.append("pallas")
        for implementation in implementations:
            run = functools.partial(run_site, site, recipe, state, implementation)
            found[f"fwd {implementation} {name}"] = lambda x, w, g, run=run: run(x, w)
            found[f"training {implementation} {name}"] = functools.partial(
                train_site, run
            )
        for role in _BACKWARD:
            found[f"{role} xla {name}"] = functools.partial(
                _product, role, recipe, state
            )
    return found


def run_site(
    site: Site | SiteKey,
    recipe: Recipe,
    state: DelayedScaling | None,
    implementation: Implementation,
    lhs: Array | Activations,
    rhs: Array,
    *,
    out: Out = "compute",
) -> Array | Activations:
    """Returns what a site makes of its operands, with parameters as at the start."""
    n = site.n
    bias = jnp.ones((n,), jnp.float32) if site.use_bias else None
    gamma = jnp.ones((n,), jnp.float32) if _has_gamma(site.norm) else None
    beta = jnp.zeros((n,), jnp.float32) if site.norm == "layer" else None
    return dense_norm(
        lhs,
        rhs,
        bias=bias,
        gamma=gamma,
        beta=beta,
        norm=site.norm,
        activation=site.activation,
        recipe=recipe,
        state=state,
        out=out,
        implementation=implementation,
    )


def _is_served(site: Site, recipe: Recipe) -> bool:
    return plan(
        recipe,
        site.m,
        site.k,
        site.n,
        norm=site.norm,
        activation=site.activation,
        has_bias=site.use_bias,
    ).is_served


def _has_gamma(norm: NormName) -> bool:
    return norm in ("layer", "rms")


def train_site(run: Callable, lhs: Array | Activations, rhs: Array, g: Array):
    """Returns what a function of lhs and rhs returns, and both gradients."""

    def wide(lhs: Array, rhs: Array):
        out = run(lhs if given is None else dataclasses.replace(given, y=lhs), rhs)
        return (out.y, out.fp8) if isinstance(out, Activations) else (out, None)

    given = lhs if isinstance(lhs, Activations) else None
    y, pull, y_fp8 = jax.vjp(wide, lhs if given is None else given.y, rhs, has_aux=True)
    gradients = pull(g)
    return (y, gradients) if y_fp8 is None else (y, gradients, y_fp8)


def _product(role: Role, recipe: Recipe, state, lhs, rhs, g):
    first, second = (g, rhs) if role == "dlhs" else (lhs, g)
    return roles.product(role, first, second, recipe, state)


def _as_read(operands: Operands) -> tuple[Array, Array, Array]:
    lhs, rhs, g = operands
    return lhs.astype(jnp.bfloat16), rhs, g.astype(jnp.bfloat16)
