"""The times of a site in every recipe, by XLA and by kernels, on a GPU.

Kernel time by the profiler, on ordinary operands, of which it does not depend:

    fwd         the whole site: casts, product, bias, norm, activation
    dlhs, drhs  casts and product alone; all recipes share the work before them
    training    the whole site forward and backward
"""

from collections.abc import Callable

import jax
from jaxtyping import Array

from loka_jax.measure.check_operands import Trial
from loka_jax.measure.compiling import compile_lowered, lower
from loka_jax.measure.programs import (
    State,
    num_rotated,
    operand_sets,
    planned,
    programs_of,
)
from loka_jax.measure.site_errors import product
from loka_jax.measure.timing import Case, time_kernels
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.recipe import ROLE_OPERANDS, Recipe, Role, get_recipe
from loka_jax.site import BF16, Choice, Provider, SiteSpec

_BACKWARD: tuple[Role, ...] = ("dlhs", "drhs")
_PROVIDERS: tuple[Provider, ...] = ("xla", "pallas")


def site_times(
    spec: SiteSpec, recipes: tuple[str, ...], say: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Returns microseconds by "fwd", "dlhs", "drhs", "training", and candidate.

    Empty without a GPU.
    """
    if jax.default_backend() != "gpu":
        return {}
    cases: dict[str, Case] = {}
    for choice in _choices(spec, recipes):
        for key, case in _cases(spec, choice).items():
            if isinstance(case.function, Exception):
                say(f"{key} does not compile: {case.function}")
            else:
                cases[key] = case
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


def _choices(spec: SiteSpec, recipes: tuple[str, ...]) -> list[Choice]:
    """Returns the candidates that run here."""
    choices = [
        Choice(provider, get_recipe(name))
        for name in ("bf16", *recipes)
        for provider in _PROVIDERS
    ]
    return [c for c in choices if resolve(spec, c, local_device()).why_not is None]


def _cases(spec: SiteSpec, choice: Choice) -> dict[str, Case]:
    """Returns what is timed of a candidate; an exception where it does not compile."""
    plan = planned(spec, choice)
    _, passes, _, programs = programs_of(plan)
    (_, arguments, _), recipe = programs["training"], plan.choice.recipe
    # All take what the training pass takes.
    parts = {"training": passes.training, "fwd": passes.forward}
    if choice.provider == "xla":
        parts |= {role: _product_of(role, recipe) for role in _BACKWARD}
    lowered = {name: lower(part, arguments) for name, part in parts.items()}
    own = {name: lower(*programs[name]) for name in ("draw", "begin")}
    compiled = compile_lowered(own | lowered)
    sets = operand_sets(compiled, num_rotated(spec))["training"]
    return {f"{name} {choice.name}": Case(compiled[name], sets) for name in parts}


def _product_of(role: Role, recipe: Recipe) -> Callable[[Trial, State], Array]:
    """Returns the product of a role of the backward pass."""

    def of_role(trial: Trial, state: State) -> Array:
        first, second = (getattr(trial, name) for name in ROLE_OPERANDS[role])
        return product(role, first, second, recipe, state)

    return of_role
