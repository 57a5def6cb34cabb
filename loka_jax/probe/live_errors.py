"""Errors of FP8 products on the operands of the steps that Probe observes.

Each product contracts its whole dim, over all rows of the batch for drhs, but only some
of its elements are computed:

    fwd    256 rows of lhs        x  the whole rhs
    dlhs   256 rows of g          x  the whole rhs
    drhs   64 columns of lhs      x  64 columns of g

Where drhs contracts more rows than are seen, on other devices or in other microbatches,
its error is extrapolated: the part that rows have alike grows with them, and the part
that is independent with their root.

Rows and columns are spread evenly, others at each step. Operands are cast as the site
casts them, with its stored scales where a recipe's scales are delayed; a site without
such a state would cast with the scale of equal earlier amaxes, and so is measured.

The worst row is that of the whole product, as far as the tail of the rows that are
seen tells. The errors of the steps are averaged. Their spread over the steps tells how
far the error of another step may lie from the mean.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from loka_jax import fp8, xla
from loka_jax.fp8 import Fp8Array
from loka_jax.probe import monitors
from loka_jax.probe.monitors import Monitors
from loka_jax.probe.operands import Operands, blocks, products_of_parts
from loka_jax.quality import MEASURES
from loka_jax.recipe import (
    OPERANDS,
    ROLE_OPERANDS,
    ROLES,
    Cast,
    Operand,
    Recipe,
    Role,
)

# One of each family of casts; their roles can be combined.
RECIPES = ("fp8_tensorwise", "fp8_tensorwise_delayed", "fp8_rowwise")
_ANY_ROWS = 16  # a number of rows that FP8 allows
_TAIL_SHARE = 8  # of the rows that are seen, one in so many is of the tail
_PARTS = 8  # of the rows, whose products tell what more rows would add
_GOLDEN = 2654435769  # of 2^32: the golden ratio, whose multiples spread evenly


class LiveErrors(NamedTuple):
    """The errors of a site's products over the observed steps.

    Attributes:
        steps: number of observed steps, or microbatches.
        sums: of each recipe, role and measure, over the steps of weight w and error x:
            of w, w^2, w x and w x^2. In float32 they tell a spread of a thousandth of
            the mean. Recipes are in the order of the `ProbeConfig` that observes.
        amaxes: of lhs, rhs and g in the newest of the steps where they are finite; of
            several uses of a site their sum.
        monitors: what else the newest steps say of the site, see `probe.monitors`.
    """

    steps: Float[Array, ""]
    sums: Float[Array, "recipes 3 3 4"]
    amaxes: Float[Array, "3"]
    monitors: Monitors

    @property
    def relative_l2(self) -> Float[Array, "*layers recipes 3"]:
        """The mean relative L2 errors by role; NaN where none was finite.

        Of a stack of layers, whose statistics are stacked, those of each.
        """
        weight, _, total, _ = jnp.moveaxis(
            self.sums[..., MEASURES.index("relative_l2"), :], -1, 0
        )
        return jnp.where(weight > 0, total / jnp.maximum(weight, 1e-9), jnp.nan)


def empty_errors(recipes: int) -> LiveErrors:
    """Returns the errors of a number of recipes before the first step."""
    shape = (recipes, len(ROLES), len(MEASURES), 4)
    sums, amaxes = jnp.zeros(shape, jnp.float32), jnp.zeros(3)
    return LiveErrors(jnp.zeros(()), sums, amaxes, monitors.empty_monitors())


def merge(a: LiveErrors, b: LiveErrors, decay: float = 1.0) -> LiveErrors:
    """Returns the errors after the later steps of `b`.

    `decay` is the factor on the weight of the earlier steps.
    """
    is_newer = b.steps > 0
    kept = jnp.where(is_newer, decay, 1.0)
    factors = jnp.stack([kept, kept**2, kept, kept])
    sums = a.sums * factors.reshape(1, 1, 1, 4) + b.sums
    # Infinite ones would be scales for good.
    is_amax = is_newer & jnp.isfinite(b.amaxes)
    amaxes = jnp.where(is_amax, b.amaxes, a.amaxes)
    newest = monitors.merge(a.monitors, b.monitors)
    return LiveErrors(a.steps + b.steps, sums, amaxes, newest)


def live_errors(
    operands: Operands,
    recipes: Sequence[Recipe],
    steps: Float[Array, ""] | float = 0.0,
    axis_names: tuple[str, ...] = (),
    copies: int = 1,
) -> LiveErrors:
    """Returns the errors of one step.

    A product whose errors are not finite is left out, and so are products of recipes
    that do not run in FP8 at this k and n.

    Args:
        steps: number of steps before, by which rows and columns are chosen.
        axis_names: mesh axes over which the rows of the batch are spread.
        copies: how many times as many rows drhs contracts, like these: its relative L2
            is extrapolated to them.
    """
    # The share of the way to the next row or column that a step begins at.
    whole = jnp.asarray(steps).astype(jnp.uint32) * jnp.uint32(_GOLDEN)  # modulo 2^32
    shift = whole.astype(jnp.float32) / 2.0**32
    by_role = (_role_errors(operands, recipes, x, shift, axis_names) for x in ROLES)
    values = jnp.stack([*by_role], axis=1)  # [recipes, roles, measures]
    if copies > 1:
        told = _relative_l2_of_drhs(operands, recipes, shift, copies)
        place = ROLES.index("drhs"), MEASURES.index("relative_l2")
        known = jnp.where(jnp.isfinite(told), told, values[:, *place])
        values = values.at[:, *place].set(known)
    seen = monitors.of_product(operands, shift, axis_names)
    return _of_a_step(values, operands.amaxes, seen)


def errors_of_forward(
    ref: Float[Array, "r c"],
    out: Float[Array, "r c"],
    examples: Int32[Array, "r"],
    count: int,
    recipes: int,
    seen: Monitors,
    axis_names: tuple[str, ...] = (),
) -> LiveErrors:
    """Returns the errors of one step of a forward result, alike in so many recipes.

    In place of the worst row it has the worst example.

    Args:
        examples: the example of each row, of so many.
        seen: the monitors of the step.
        axis_names: mesh axes over which rows are spread.
    """
    errors = _errors(ref, out, "fwd", count, axis_names, examples)
    values = jnp.full((recipes, len(ROLES), len(MEASURES)), jnp.nan)
    return _of_a_step(values.at[:, ROLES.index("fwd")].set(errors), jnp.zeros(3), seen)


def _of_a_step(
    values: Float[Array, "recipes roles measures"],
    amaxes: Float[Array, "3"],
    seen: Monitors,
) -> LiveErrors:
    """Returns the errors of one step, without those of products that are not finite."""
    is_known = jnp.all(jnp.isfinite(values), axis=2, keepdims=True)
    values = jnp.where(is_known, values, 0.0)
    weights = jnp.broadcast_to(is_known, values.shape).astype(jnp.float32)
    sums = jnp.stack([weights, weights, values, values**2], axis=-1)
    return LiveErrors(jnp.ones(()), sums, amaxes, seen)


def _role_errors(
    operands: Operands,
    recipes: Sequence[Recipe],
    role: Role,
    shift: Float[Array, ""],
    axis_names: tuple[str, ...],
) -> Float[Array, "recipes measures"]:
    """Returns the errors of each recipe's product; NaN where it has none in FP8."""
    first, second = blocks(operands, role, shift)
    # Errors of few of a row's columns vary more, which makes up for fewer rows.
    num_rows = first.shape[0] if role == "drhs" else operands.lhs.shape[0]
    gemms = [recipe.gemm(role) for recipe in recipes]
    nothing = jnp.full((len(MEASURES),), jnp.nan, jnp.float32)
    # Rows are padded anywhere, k and n where that is cheap.
    is_fp8 = xla.why_not(_ANY_ROWS, *operands.rhs.shape) is None
    if not (any(gemms) and is_fp8 and first.size):
        return jnp.broadcast_to(nothing[None], (len(recipes), len(MEASURES)))

    def total(product: Array) -> Array:
        """Returns a product, summed over devices where they hold parts of it."""
        product = product.astype(jnp.float32)
        is_split = role == "drhs" and axis_names
        return jax.lax.psum(product, axis_names) if is_split else product

    ref, rows = total(products_of_parts(first, second, 1)[0]), []
    for recipe, gemm in zip(recipes, gemms, strict=True):
        if gemm is None:
            rows.append(nothing)
            continue
        out = xla.fp8_matmul(
            *quantized(operands, role, recipe, first, second),
            out_dtype=jnp.float32 if role == "drhs" else recipe.compute_dtype,
            fast_accumulation=gemm.fast_accumulation,
        )
        # Otherwise the compiler would omit the rounding of a product to bfloat16.
        out = total(jax.lax.optimization_barrier(out))
        rows.append(_errors(ref, out, role, num_rows, axis_names))
    return jnp.stack(rows)


def _relative_l2_of_drhs(
    operands: Operands, recipes: Sequence[Recipe], shift: Float[Array, ""], copies: int
) -> Float[Array, "recipes"]:
    """Returns what to expect of drhs's relative L2 over many times as many rows.

    It is not finite below 8 rows.
    """
    rows = operands.lhs.shape[0] // _PARTS * _PARTS
    first, second = (x[:, :rows] for x in blocks(operands, "drhs", shift))
    exact = products_of_parts(first, second, _PARTS)
    unit = fp8.amax(exact)  # so that squares do not underflow
    signal, errors = _expected_square(exact / unit, copies), []
    for recipe in recipes:
        lost = jnp.zeros_like(exact)
        if recipe.gemm("drhs") is not None:
            views = quantized(operands, "drhs", recipe, first, second)
            one, two = (view.dequantize()[:, :rows] for view in views)
            lost = (products_of_parts(one, two, _PARTS) - exact) / unit
        errors.append(jnp.sqrt(_expected_square(lost, copies) / signal))
    return jnp.stack(errors)


def _expected_square(parts: Float[Array, "p r c"], copies: int) -> Float[Array, ""]:
    """Returns the expected square of the sum of so many times these parts.

        E |sum of n parts|^2 = n E|part|^2 + n (n - 1) E<part, another>

    The first is what is independent from row to row, the second what rows have alike.
    """
    own, count = jnp.sum(parts**2), _PARTS * copies
    others = jnp.sum(jnp.sum(parts, axis=0) ** 2) - own
    pairs = count * (count - 1) / (_PARTS * (_PARTS - 1))
    return copies * own + pairs * jnp.maximum(others, 0.0)


def quantized(
    operands: Operands, role: Role, recipe: Recipe, *arrays: Array
) -> list[Fp8Array]:
    """Returns some rows of both operands of a role, cast by their last dim."""
    gemm = recipe.gemm(role)
    assert gemm is not None
    casts = zip(ROLE_OPERANDS[role], (gemm.first, gemm.second), arrays, strict=True)
    return [_quantized(operands, name, cast, recipe, x) for name, cast, x in casts]


def _quantized(
    operands: Operands, name: Operand, cast: Cast, recipe: Recipe, x: Array
) -> Fp8Array:
    if cast.granularity == "rowwise":
        return fp8.quantize(x, cast.dtype, axes=(1,), pow2_scale=cast.pow2_scale)
    if cast.is_tiled:
        return cast.in_tiles(x, name)
    place, is_delayed = OPERANDS.index(name), cast.scaling == "delayed"
    margin = recipe.margin if is_delayed else 0
    scale_inv = fp8.compute_scale_inv(
        operands.amaxes[place], cast.dtype, pow2_scale=cast.pow2_scale, margin=margin
    )
    if is_delayed:
        stored = operands.scales[place]
        scale_inv = jnp.where(stored > 0, stored, scale_inv)
    return fp8.cast(x, scale_inv, cast.dtype)


def _worst_of_all(errors: Float[Array, "r"], num_rows: int) -> Float[Array, ""]:
    """Returns what to expect of the largest error of all rows, of which some are seen.

        log max of N rows ~ log max of r rows + s log(N / r)

    for a tail P(e > t) ~ t^(-1/s), whose s is the mean of the logarithms of the largest
    errors, an eighth of them, above the next one, and 1 at most.

    References:
        Hill, "A Simple General Approach to Inference About the Tail of a Distribution",
        Annals of Statistics, 1975.
    """
    count = errors.shape[0] // _TAIL_SHARE
    if num_rows <= errors.shape[0] or count < 1:
        return jnp.max(errors)
    largest, _ = jax.lax.top_k(errors, count + 1)
    # Rows without an error are below every other.
    logs = jnp.log(jnp.maximum(largest, jnp.finfo(jnp.float32).tiny))
    slope = jnp.minimum(jnp.mean(logs[:-1]) - logs[-1], 1.0)
    return largest[0] * (num_rows / errors.shape[0]) ** slope


def _errors(
    ref: Float[Array, "r c"],
    out: Float[Array, "r c"],
    role: Role,
    num_rows: int,
    axis_names: tuple[str, ...],
    examples: Int32[Array, "r"] | None = None,
) -> Float[Array, "3"]:
    """Returns the measures of a product of so many rows, over all devices.

    With the example of each row they are measures of so many examples.
    """
    # The blocks of drhs are the same on all devices, those of other roles are not.
    names = () if role == "drhs" else axis_names
    unit = fp8.amax_over_devices(fp8.amax(ref), names)
    unit = jnp.where(unit > 0, unit, 1.0)  # so that squares do not underflow
    ref, noise = ref / unit, jnp.abs(out - ref) / unit
    is_counted = ref != 0
    signals, noises = jnp.sum(ref**2, axis=1), jnp.sum(noise**2, axis=1)
    if examples is not None:
        add = functools.partial(jax.ops.segment_sum, num_segments=num_rows)
        signals, noises = (add(x, examples) for x in (signals, noises))
    relative = noise / jnp.where(is_counted, jnp.abs(ref), 1.0)
    counted = jnp.where(is_counted, relative, 0.0), is_counted.astype(jnp.float32)
    sums = jnp.stack([*map(jnp.sum, (signals, noises, *counted))])
    sums = jax.lax.psum(sums, names)
    worst = _worst_of_all(jnp.where(signals > 0, noises / signals, 0.0), num_rows)
    worst = jax.lax.pmax(worst, names)
    signal, noise, relative, count = sums
    total = jnp.where(noise > 0, jnp.sqrt(noise / signal), 0.0)
    # A maximum may lose a NaN, a sum does not.
    worst = jnp.sqrt(worst) + 0.0 * total
    return jnp.stack([total, worst, relative / jnp.maximum(count, 1.0)])
