"""The errors of candidates at each role of a site, on drawn and on real operands.

A role is measured by itself, from float32 operands:

    fwd    lhs (m, k), rhs (k, n)    ->  lhs @ rhs
    dlhs   g (m, n),   rhs (k, n)    ->  g @ rhs^T
    drhs   lhs (m, k), g (m, n)      ->  lhs^T @ g

A role is measured once for each way to cast its operands: recipes that differ elsewhere
only count once, under the first one's name. A single draw says little, since `mere` is
a heavy-tailed mean: the mean over draws has an interval.
"""

import concurrent.futures
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loka_jax import quality, scaling
from loka_jax.measure.compiling import untuned_here
from loka_jax.measure.intervals import Interval, interval
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.ops.products import Products
from loka_jax.ops.run_site import SiteArrays, run_site
from loka_jax.probe.operands import Operands, blocks
from loka_jax.quality import MEASURES, Measure
from loka_jax.recipe import ROLE_OPERANDS, ROLES, Recipe, Role, get_recipe
from loka_jax.scaling import DelayedScaling
from loka_jax.site import BF16, Choice, SiteSpec
from loka_jax.xla import high_precision_matmul

PAIRS = 64  # draws; the paper takes 50 to 100

# By name: a function from a seed to operands, and the seeds.
type Sources = Mapping[str, tuple[Callable[[Any], Operands], Iterable[Any]]]
# By role, candidate, source and measure.
type SiteErrors = dict[Role, dict[str, dict[str, dict[str, Interval]]]]


def site_errors(
    spec: SiteSpec, sources: Sources, recipes: tuple[str, ...]
) -> SiteErrors:
    """Returns the errors of each role's candidates, by source of the operands."""
    measure_role = functools.partial(_role_errors, spec, sources, recipes)
    # In parallel, since most of it is compilation.
    with concurrent.futures.ThreadPoolExecutor(len(ROLES)) as pool:
        return dict(zip(ROLES, pool.map(measure_role, ROLES), strict=True))


def role_candidates(
    spec: SiteSpec, role: Role, recipes: tuple[str, ...]
) -> list[Choice]:
    """Returns the choices that differ at a role of a site, bfloat16 first."""
    product_alone = SiteSpec(m=spec.m, k=spec.k, n=spec.n)
    candidates, gemms = [BF16], set()
    for recipe in map(get_recipe, recipes):
        choice = Choice("xla", recipe)
        gemm = resolve(spec, choice, local_device()).recipe.gemm(role)
        if gemm is None or gemm in gemms:
            continue
        gemms.add(gemm)
        candidates.append(choice)
        # Only the fused kernel multiplies differently from XLA.
        fused = Choice("pallas", recipe)
        if role == "fwd" and resolve(product_alone, fused, local_device()).is_fused:
            candidates.append(fused)
    return candidates


def _role_errors(
    spec: SiteSpec, sources: Sources, recipes: tuple[str, ...], role: Role
) -> dict[str, dict[str, dict[str, Interval]]]:
    """Returns the errors of a role's candidates by source."""
    candidates = role_candidates(spec, role, recipes)
    score = jax.jit(
        functools.partial(_score, role, tuple(candidates)),
        compiler_options=untuned_here(),
    )
    by_name: dict[str, dict[str, dict[str, Interval]]] = {}
    for source, (draw, seeds) in sources.items():
        draws = [score(draw(seed)) for seed in seeds]
        scores = jax.tree.map(lambda *x: np.stack(x), *jax.device_get(draws))
        for candidate in candidates:
            values = scores[candidate.name]
            intervals = {name: interval(value) for name, value in values.items()}
            by_name.setdefault(candidate.name, {})[source] = intervals
    return by_name


def _score(
    role: Role, candidates: tuple[Choice, ...], operands: Operands
) -> dict[str, dict[Measure, Array]]:
    """Returns the errors of all candidates on some operands.

    Delayed scales are made from the amaxes of the operands themselves: `amax_ratio`
    tells how far a scale lags behind.
    """
    (m, k), n, ref = operands.lhs.shape, operands.rhs.shape[1], exact(role, operands)
    first, second = (getattr(operands, name) for name in ROLE_OPERANDS[role])
    scores = {}
    for choice in candidates:
        recipe, state = choice.recipe, None
        if recipe.is_delayed:
            start = scaling.init_delayed(recipe)
            state = scaling.update_delayed(start, operands.amaxes, recipe)
        if choice.provider == "xla":
            out = product(role, first, second, recipe, state)
        else:
            plan = resolve(SiteSpec(m=m, k=k, n=n), choice, local_device())
            out = run_site(plan, SiteArrays(first, second), state)
        # Otherwise the compiler would omit the rounding of a product to bfloat16.
        scores[choice.name] = errors(ref, jax.lax.optimization_barrier(out))
    return scores


def errors(
    ref: Float[Array, "m n"], x: Float[Array, "m n"]
) -> dict[Measure, Float[Array, ""]]:
    """Returns the errors of a product."""
    return {measure: getattr(quality, measure)(ref, x) for measure in MEASURES}


def product(
    role: Role,
    first: Float[Array, "..."],
    second: Float[Array, "..."],
    recipe: Recipe,
    state: DelayedScaling | None = None,
) -> Float[Array, "..."]:
    """Returns a role's product by XLA in the recipe's precision.

    The result has the compute dtype; drhs, the gradient of a master weight, float32.
    """
    m, k, n = _sizes(role, first, second)
    spec = SiteSpec(m=m, k=k, n=n)
    products = Products.of(resolve(spec, Choice("xla", recipe), local_device()))
    a, b = (
        products.read(name, x, state, roles=(role,))
        for name, x in zip(ROLE_OPERANDS[role], (first, second), strict=True)
    )
    out_dtype = jnp.float32 if role == "drhs" else recipe.compute_dtype
    return products.multiply(role, a, b, out_dtype=out_dtype)


def exact(role: Role, operands: Operands) -> Float[Array, "..."]:
    """Returns a role's product in float32."""
    dtypes = {"compute_dtype": jnp.float32, "out_dtype": jnp.float32}
    return high_precision_matmul(*blocks(operands, role), **dtypes)


def _sizes(role: Role, first: Array, second: Array) -> tuple[int, int, int]:
    """Returns (m, k, n) of the site whose role has these operands."""
    if role == "dlhs":
        return first.shape[0], second.shape[0], first.shape[1]
    return first.shape[0], first.shape[1], second.shape[1]
