"""What a site should return, by the float32 product of the same quantized operands.

    forward    lhs, rhs cast -> z -> xhat = norm(z + bias) -> u -> y
    backward   g, xhat as it is kept -> dz cast -> dlhs, drhs; dgamma, dbeta, dbias

What is kept and how it is cast is taken from the plan: the kernels keep xhat in E4M3
where the backward pass is in FP8, and cast dz by rows. A candidate may round between
the steps, where this does not. How far that may move each result is measured:
`Rounding` perturbs all values that some provider rounds.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import pallas
from loka_jax.fp8 import E4M3, compute_scale_inv, fp8_max
from loka_jax.measure import reference
from loka_jax.measure.check_casts import (
    Product,
    Rounding,
    Scaled,
    code_step,
    operand,
    product,
    round_to,
)
from loka_jax.measure.check_operands import Trial
from loka_jax.normed import NO_VECTORS, XHAT_SCALE_INV, Epilogue, NormResiduals
from loka_jax.ops.plan import KernelPlan
from loka_jax.pallas import norm_backward, norm_quantize
from loka_jax.recipe import OPERANDS, ROLE_OPERANDS, Cast, Operand, Recipe, Role
from loka_jax.site import SiteSpec

_TILE_ROOT = 8.0  # of the rows, and of the columns, of a tile
_HALF = 2.0**-11  # of float16, and of the GPU's tanh
# Where the slopes of activations jump.
_CORNERS = {"relu": (0.0,), "hard_swish": (-3.0, 3.0)}


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What the numbers of a site should be under a plan.

    Attributes:
        recipe: the casts of each product as it runs.
        reads_fp8: fwd reads the FP8 form of lhs that another site hands on.
        xhat_is_e4m3: the backward pass reads normalized rows from E4M3.
        exact_rows: operands whose row scales are amax / fp8_max rather than the next
            power of two, as kernels that fold long rows write them.
    """

    spec: SiteSpec
    recipe: Recipe
    reads_fp8: bool
    xhat_is_e4m3: bool
    exact_rows: frozenset[Operand]

    @classmethod
    def of(cls, plan: KernelPlan) -> "Numerics":
        """Returns the numerics of a plan."""
        spec, recipe = plan.spec, plan.backward_recipe
        exact_rows: set[Operand] = set()
        xhat_is_e4m3 = False
        if plan.runs_kernels:
            xhat = pallas.training_outputs(spec, plan.recipe).xhat
            xhat_is_e4m3 = xhat is not None and jnp.dtype(xhat) == jnp.dtype(E4M3)
            exact_rows |= {"lhs"} if _folds_lhs(plan) else set()
        dlhs, has_kernel = recipe.dlhs, plan.dlhs.kernel is not None
        if dlhs is not None and has_kernel and dlhs.first.scaling == "current":
            # The kernel of the norm gives each row of dz a scale: one for all rows
            # would take another pass.
            dlhs = dataclasses.replace(dlhs, first=Cast(granularity="rowwise"))
            lanes = norm_backward.default_config(spec.n, norm=spec.norm).lanes
            exact_rows |= {"g"} if lanes > 32 else set()  # rows that it folds
        return cls(
            spec=dataclasses.replace(spec, out="compute"),
            recipe=dataclasses.replace(recipe, dlhs=dlhs),
            reads_fp8=spec.fp8_in is not None and plan.reads_fp8,
            xhat_is_e4m3=xhat_is_e4m3,
            exact_rows=frozenset(exact_rows),
        )

    @property
    def epilogue(self) -> Epilogue:
        """Norm and activation."""
        return Epilogue(self.spec.norm, self.spec.activation)

    @property
    def unit(self) -> float:
        """The largest relative error of a rounding to the compute dtype."""
        return float(jnp.finfo(self.recipe.compute_dtype).eps) / 2

    @property
    def fine_unit(self) -> float:
        """The same of steps that no provider rounds to less than half precision."""
        return min(self.unit, _HALF)

    def delayed(self) -> dict[Operand, Cast]:
        """Returns the casts by delayed scales, by operand."""
        found: dict[Operand, Cast] = {}
        for name in OPERANDS:
            for cast in self.recipe.casts(name):
                if cast.scaling == "delayed":
                    found[name] = cast
        return found

    def multiply(
        self, role: Role, first, second, stored: Array, rounding: Rounding
    ) -> tuple[Product, Scaled, Scaled]:
        """Returns a product and its operands as they are cast.

        They come in float32 or cast already, to be contracted over their last dims, and
        the delayed scales of lhs, rhs and g in `stored`.
        """
        gemm = self.recipe.gemm(role)
        casts = (None, None) if gemm is None else (gemm.first, gemm.second)

        def as_cast(x, name: Operand, cast: Cast | None) -> Scaled:
            if isinstance(x, Scaled):
                return x
            scale_inv = stored[OPERANDS.index(name)]
            is_exact = name in self.exact_rows and role != "drhs"
            return operand(x, cast, name, scale_inv, rows_are_exact=is_exact)

        a, b = map(as_cast, (first, second), ROLE_OPERANDS[role], casts)
        return product(a, b, gemm, self.recipe.compute_dtype, rounding), a, b


def _folds_lhs(plan: KernelPlan) -> bool:
    """Returns True if a kernel quantizes lhs by rows that it folds."""
    m, k = plan.spec.m + plan.padding, plan.spec.k
    is_served = norm_quantize.why_not(m, k, norm="none") is None
    return is_served and norm_quantize.default_config(k, norm="none").lanes > 32


class Flip(NamedTuple):
    """What moves if the code that matters most to a row is the next one.

    Attributes:
        row: the length by which each row moves.
        tile: the same over the root of a tile's size, in units of the rows' lengths.
    """

    row: Float[Array, "r"]
    tile: Float[Array, "r"]


class Expected(NamedTuple):
    """What a site should return, and what it is made of.

    Attributes:
        results: by name "y", "dlhs", "drhs", and "dgamma", "dbeta", "dbias" if present.
        uncast: by result and operand ("dlhs", "rhs"), how the result changes if that
            operand is not cast.
        flips: by result, what one code that is the next one moves.
        lhs, g: the operands of drhs as they are cast, (m, k) and (m, n).
        amaxes: of lhs, rhs and dz, before they are cast.
    """

    results: dict[str, Array]
    uncast: dict[tuple[str, str], Array]
    flips: dict[str, Flip]
    lhs: Array
    g: Array
    amaxes: Float[Array, "3"]


def settle(numerics: Numerics, trial: Trial) -> tuple[Trial, Float[Array, "3"]]:
    """Returns the operands, and delayed scales of lhs, rhs and dz.

    The gradient is made zero where rounding decides a slope.
    """
    exact = Rounding(jnp.uint32(0), jnp.float32(0))
    stored = _stored_scales(numerics, trial, jnp.zeros((1, 1)))
    normed = _forward(numerics, trial, stored, exact)
    g = jnp.where(normed.is_settled, trial.g.astype(jnp.float32), 0.0)
    trial = trial._replace(g=g.astype(trial.g.dtype))
    dz, _ = _norm_backward(numerics, trial, normed, exact)
    return trial, _stored_scales(numerics, trial, dz)


def expect(
    numerics: Numerics, trial: Trial, stored: Float[Array, "3"], rounding: Rounding
) -> Expected:
    """Returns the results of a site."""
    unit = numerics.unit
    normed = _forward(numerics, trial, stored, rounding)
    dz, results = _norm_backward(numerics, trial, normed, rounding)
    multiply = functools.partial(numerics.multiply, stored=stored, rounding=rounding)
    lhs = trial.lhs.astype(jnp.float32)
    dlhs, dlhs_g, rhs = multiply("dlhs", dz, trial.rhs)
    drhs, lhs, g = multiply("drhs", lhs.T, dz.T)
    results["y"] = normed.y
    results["dlhs"] = rounding(dlhs.out, 8, unit * jnp.abs(dlhs.out))
    results["drhs"] = drhs.out
    uncast = {
        ("dlhs", "g"): dlhs.by_first,
        ("dlhs", "rhs"): dlhs.by_second,
        ("drhs", "lhs"): drhs.by_first,
        ("drhs", "g"): drhs.by_second,
    }
    uncast = {key: x for key, x in uncast.items() if x is not None}
    flips, columns = {}, results["y"].shape[1] ** 0.5
    moved = _moved_by_codes(numerics, trial, normed, rounding, dz)
    recipe = numerics.recipe
    if recipe.dlhs is not None:
        moved += code_step(recipe.dlhs.first.dtype) * jnp.abs(dlhs_g.value)
    if recipe.dlhs is not None or numerics.xhat_is_e4m3:  # all of a row moves
        sizes = jnp.sqrt(jnp.sum(rhs.value**2, axis=0))
        row = jnp.max(moved * sizes[None], axis=1)
        flips["dlhs"] = Flip(row, row / _TILE_ROOT)
    if recipe.drhs is not None:  # all of a column moves
        largest = jnp.max(jnp.abs(g.value), axis=0)
        step = code_step(recipe.drhs.second.dtype)
        row = step * jnp.max(jnp.abs(lhs.value) * largest[None], axis=1)
        flips["drhs"] = Flip(row, row * columns / _TILE_ROOT)
    amaxes = _amaxes(numerics, trial, dz)
    return Expected(results, uncast, flips, lhs.value.T, g.value.T, amaxes)


def next_scales(
    numerics: Numerics, amaxes: Float[Array, "3"]
) -> dict[Operand, Float[Array, ""]]:
    """Returns the scales that these amaxes give the next step, where one is delayed."""
    margin = 2.0**numerics.recipe.margin
    return {
        name: compute_scale_inv(amaxes[OPERANDS.index(name)], cast.dtype) * margin
        for name, cast in numerics.delayed().items()
    }


def in_fp8(name: str, expected: Expected, scale_inv: Array) -> Expected:
    """Returns the results with the activations in E4M3 under these scales too."""
    y = expected.results["y"]
    rounded = round_to(y / scale_inv, E4M3) * scale_inv
    row = code_step(E4M3) * jnp.max(jnp.abs(y), axis=1)  # by one element
    return expected._replace(
        results=expected.results | {name: rounded},
        uncast=expected.uncast | {(name, "y"): y - rounded},
        flips=expected.flips
        | {name: Flip(row, row * y.shape[1] ** 0.5 / _TILE_ROOT**2)},
    )


class _Normed(NamedTuple):
    """The forward pass: its result and what the backward pass reads.

    Where `is_settled` no rounding decides the slope of the activation.
    """

    y: Array
    xhat: Array
    rstd: Array | None
    is_settled: Array


def _forward(numerics: Numerics, trial: Trial, stored, rounding: Rounding) -> _Normed:
    bias, gamma, beta = (None if v is None else v[None, :] for v in trial.vectors)
    lhs, unit = trial.lhs.astype(jnp.float32), numerics.unit
    if numerics.reads_fp8:
        assert trial.lhs_fp8 is not None
        data, scale_inv = trial.lhs_fp8.data, trial.lhs_fp8.scale_inv
        lhs = Scaled(data.astype(jnp.float32), scale_inv)
    out, _, _ = numerics.multiply("fwd", lhs, trial.rhs.T, stored, rounding)
    z = rounding(out.out, 1, unit * jnp.abs(out.out))
    z = z if bias is None else z + bias
    xhat, rstd = reference.normalize(z, numerics.epilogue)
    scaled = xhat if gamma is None else xhat * gamma
    u = scaled if beta is None else scaled + beta
    u = rounding(u, 2, numerics.fine_unit * (jnp.abs(scaled) + jnp.abs(u)))
    activation = Epilogue("none", numerics.spec.activation)
    y = reference.norm_activation(u, NO_VECTORS, activation)
    y = rounding(y, 3, numerics.fine_unit * jnp.abs(u) + unit * jnp.abs(y))
    return _Normed(y, xhat, rstd, _is_settled(numerics, xhat, u, gamma, beta))


def _is_settled(numerics: Numerics, xhat, u, gamma, beta) -> Array:
    """Returns where rounding cannot move `u` past a corner of the activation."""
    corners = _CORNERS.get(numerics.spec.activation)
    if corners is None:
        return jnp.ones(u.shape, bool)
    # A step of E4M3, or some roundings to bfloat16 of a value of the row's size.
    share = 2.0**-3 if numerics.xhat_is_e4m3 else 2.0**-6
    size = jnp.sqrt(jnp.mean(xhat**2, axis=1, keepdims=True))
    doubt = share * jnp.maximum(jnp.abs(xhat), size)
    doubt = doubt if gamma is None else doubt * jnp.abs(gamma)
    doubt = doubt if beta is None else doubt + 2.0**-6 * jnp.abs(beta)
    distances = [jnp.abs(u - corner) for corner in corners]
    return functools.reduce(jnp.minimum, distances) > doubt


def _norm_backward(
    numerics: Numerics, trial: Trial, normed: _Normed, rounding: Rounding
) -> tuple[Array, dict[str, Array]]:
    """Returns dz, and the gradients of the vectors by name."""
    xhat, dy = normed.xhat, trial.g.astype(jnp.float32)
    if numerics.xhat_is_e4m3:
        xhat = round_to(xhat / XHAT_SCALE_INV, E4M3) * XHAT_SCALE_INV
    else:
        xhat = rounding(xhat, 4, numerics.unit * jnp.abs(xhat))
    dy = rounding(dy, 5, numerics.fine_unit * jnp.abs(dy))
    kept = NormResiduals(xhat, normed.rstd)
    vectors = trial.vectors._replace(bias=None)
    dz, dgamma, dbeta = reference.norm_backward(dy, kept, vectors, numerics.epilogue)
    dz = rounding(dz, 6, numerics.unit * jnp.abs(dz))
    dbias = None if trial.vectors.bias is None else jnp.sum(dz, axis=0)
    gradients = {"dgamma": dgamma, "dbeta": dbeta, "dbias": dbias}
    return dz, {name: x for name, x in gradients.items() if x is not None}


def _moved_by_codes(
    numerics: Numerics, trial: Trial, normed: _Normed, rounding: Rounding, dz: Array
) -> Array:
    """Returns how far dz moves if codes of xhat are the next ones; 0 without codes."""
    if not numerics.xhat_is_e4m3:
        return jnp.zeros_like(dz)
    above = normed._replace(xhat=normed.xhat * (1 + code_step(E4M3)))
    moved, _ = _norm_backward(numerics, trial, above, rounding)
    return jnp.abs(moved - dz)


def _stored_scales(numerics: Numerics, trial: Trial, dz: Array) -> Float[Array, "3"]:
    """Returns delayed scales with the trial's headroom; 1 where none is delayed."""
    amaxes = _amaxes(numerics, trial._replace(lhs_fp8=None), dz)
    scales = jnp.ones(3)
    for name, cast in numerics.delayed().items():
        i = OPERANDS.index(name)
        scale_inv = compute_scale_inv(amaxes[i], cast.dtype)
        scales = scales.at[i].set(scale_inv * trial.headroom[i])
    return scales


def _amaxes(numerics: Numerics, trial: Trial, dz: Array) -> Float[Array, "3"]:
    """Returns the amaxes of lhs, rhs and dz.

    Of an lhs in FP8 it is what its scales bound, unless drhs casts the lhs once more.
    """
    rhs, dz = jnp.max(jnp.abs(trial.rhs)), jnp.max(jnp.abs(dz))
    drhs = numerics.recipe.drhs
    casts_again = drhs is not None and drhs.first.granularity == "tensorwise"
    if numerics.reads_fp8 and trial.lhs_fp8 is not None and not casts_again:
        lhs = jnp.max(trial.lhs_fp8.scale_inv) * fp8_max(E4M3)
    else:
        lhs = jnp.max(jnp.abs(trial.lhs.astype(jnp.float32)))
    return jnp.stack([lhs, rhs, dz])
