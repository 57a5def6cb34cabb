"""The times of a site in every recipe, by XLA and by kernels, on a GPU.

Kernel time by the profiler, on operands drawn from Probe's statistics:

    fwd         the whole site: casts, product, bias, norm, activation
    dlhs, drhs  casts and product alone; all recipes share the work before them
    training    the whole site forward and backward
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from loka_jax.measure.compiling import compile_all
from loka_jax.measure.passes import as_read, num_rotated, site_run, train_site
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.ops import roles
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.probe.capture import Operands
from loka_jax.recipe import Recipe, Role, get_recipe
from loka_jax.site import BF16, Choice, Provider, SiteSpec

_BACKWARD: tuple[Role, ...] = ("dlhs", "drhs")
_PROVIDERS: tuple[Provider, ...] = ("xla", "pallas")


def site_times(
    spec: SiteSpec,
    draw: Callable[[Array], Operands],
    recipes: tuple[str, ...],
    seed: int,
    say: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """Returns microseconds by "fwd", "dlhs", "drhs", "training", and candidate.

    Empty without a GPU.

    Args:
        spec: the site.
        draw: all rows of its operands from a key.
        recipes: to time beside bfloat16.
        seed: of the draws.
        say: takes a line on each candidate that does not compile.
    """
    if jax.default_backend() != "gpu":
        return {}
    keys = jax.random.split(jax.random.key(seed), num_rotated(spec))
    drawn = [as_read(draw(key)) for key in keys]
    programs = _programs(spec, recipes, drawn[0])
    compiled = compile_all({key: (f, drawn[0]) for key, f in programs.items()})
    cases = {}
    for key, program in compiled.items():
        if isinstance(program, Exception):
            say(f"{key} does not compile: {program}")
        else:
            cases[key] = Case(program, drawn)
    times: dict[str, dict[str, float]] = {}
    for key, time in time_kernels(cases).items():
        part, _, candidate = key.partition(" ")
        times.setdefault(part, {})[candidate] = time.median_us
    return times


def speedup(times: dict[str, dict[str, float]], part: str, name: str) -> float | None:
    """Returns a candidate's speed over bfloat16; None if either was not measured."""
    by_name = times.get(part, {})
    if name not in by_name or BF16.name not in by_name:
        return None
    return by_name[BF16.name] / by_name[name]


def _programs(
    spec: SiteSpec, recipes: tuple[str, ...], operands: tuple
) -> dict[str, Any]:
    """Returns functions of (lhs, rhs, g), named by part and candidate."""
    programs: dict[str, Any] = {}
    for name in ("bf16", *recipes):
        recipe = get_recipe(name)
        for provider in _PROVIDERS:
            choice = Choice(provider, recipe)
            if resolve(spec, choice, local_device()).why_not is not None:
                continue
            run = site_run(choice, spec, operands)
            programs[f"fwd {choice.name}"] = lambda x, w, g, run=run: run(x, w)
            programs[f"training {choice.name}"] = functools.partial(train_site, run)
        run = site_run(Choice("xla", recipe), spec, operands)
        for role in _BACKWARD:
            product = functools.partial(_product, role, run.choice.recipe, run.state)
            programs[f"{role} xla {name}"] = product
    return programs


def _product(role: Role, recipe: Recipe, state, lhs, rhs, g):
    first, second = (g, rhs) if role == "dlhs" else (lhs, g)
    return roles.product(role, first, second, recipe, state)
