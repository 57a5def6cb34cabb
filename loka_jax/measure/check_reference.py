"""What a site should return, by the float32 product of the same quantized operands.

    forward    lhs, rhs cast -> z -> xhat = norm(z + bias) -> u -> y
    backward   g, xhat as it is kept -> dz cast -> dlhs, drhs; dgamma, dbeta, dbias

What is kept and how it is cast is part of the definition, and taken from the plan: the
kernels keep xhat in E4M3 where the backward pass is in FP8, and cast dz by rows.

A candidate may round between the steps, where this does not. How far that may move each
result, by codes that flip too, is measured: `Rounding` perturbs all values that some
provider rounds.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import pallas
from loka_jax.fp8 import E4M3, fp8_max
from loka_jax.measure import reference
from loka_jax.measure.check_casts import (
    Product,
    Rounding,
    Scaled,
    code_step,
    operand,
    product,
    round_to,
    scale_inv_of,
)
from loka_jax.measure.check_operands import Trial
from loka_jax.normed import NO_VECTORS, XHAT_SCALE_INV, Epilogue, NormResiduals
from loka_jax.ops.plan import KernelPlan
from loka_jax.pallas import norm_backward, norm_quantize
from loka_jax.recipe import ROLE_OPERANDS, ROLES, Cast, GemmRecipe, Operand, Role
from loka_jax.site import SiteSpec

_TILE_ROOT = 8.0  # of the rows, and of the columns, of a tile
_HALF = 2.0**-11  # of float16, and of the GPU's tanh
# Where the slopes of activations jump.
_CORNERS = {"relu": (0.0,), "hard_swish": (-3.0, 3.0)}


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What the numbers of a site should be under a plan.

    Attributes:
        spec: the site.
        compute_dtype: of what is not in FP8.
        fwd, dlhs, drhs: the casts of each product as it runs; None in `compute_dtype`.
        reads_fp8: fwd reads the FP8 form of lhs that another site hands on.
        xhat_is_e4m3: the backward pass reads normalized rows from E4M3.
        exact_rows: operands whose row scales are amax / fp8_max rather than the next
            power of two, as kernels that fold long rows write them.
        epsilon: added to the variance or mean square.
        margin: bits of headroom of the next delayed scales.
    """

    spec: SiteSpec
    compute_dtype: Any
    fwd: GemmRecipe | None
    dlhs: GemmRecipe | None
    drhs: GemmRecipe | None
    reads_fp8: bool
    xhat_is_e4m3: bool
    exact_rows: frozenset[Operand]
    epsilon: float
    margin: int

    @classmethod
    def of(cls, plan: KernelPlan, epsilon: float) -> "Numerics":
        """Returns the numerics of a plan."""
        spec, recipe, dlhs = plan.spec, plan.recipe, plan.backward_recipe.dlhs
        exact_rows: set[Operand] = set()
        xhat_is_e4m3 = False
        if plan.runs_kernels:
            xhat = pallas.training_outputs(spec, recipe).xhat
            xhat_is_e4m3 = xhat is not None and jnp.dtype(xhat) == jnp.dtype(E4M3)
            exact_rows |= {"lhs"} if _folds_lhs(plan) else set()
        has_kernel = plan.dlhs.kernel is not None
        if dlhs is not None and has_kernel and dlhs.first.scaling == "current":
            # The kernel of the norm gives each row of dz a scale: one for all rows
            # would take another pass.
            dlhs = dataclasses.replace(dlhs, first=Cast(granularity="rowwise"))
            exact_rows |= {"g"} if _folds_gradient(spec) else set()
        return cls(
            spec=dataclasses.replace(spec, out="compute"),
            compute_dtype=jnp.dtype(recipe.compute_dtype),
            fwd=recipe.fwd,
            dlhs=dlhs,
            drhs=recipe.drhs,
            reads_fp8=spec.fp8_in is not None and plan.reads_fp8,
            xhat_is_e4m3=xhat_is_e4m3,
            exact_rows=frozenset(exact_rows),
            epsilon=epsilon,
            margin=plan.choice.recipe.margin,
        )

    @property
    def epilogue(self) -> Epilogue:
        """Norm and activation."""
        return Epilogue(self.spec.norm, self.spec.activation, self.epsilon)

    @property
    def unit(self) -> float:
        """The largest relative error of a rounding to the compute dtype."""
        return float(jnp.finfo(self.compute_dtype).eps) / 2

    @property
    def fine_unit(self) -> float:
        """The same of steps that no provider rounds to less than half precision."""
        return min(self.unit, _HALF)

    def gemm(self, role: Role) -> GemmRecipe | None:
        """Returns the casts of a product."""
        return {"fwd": self.fwd, "dlhs": self.dlhs, "drhs": self.drhs}[role]

    def delayed(self, name: Operand) -> Cast | None:
        """Returns the cast of an operand by a delayed scale; None without one."""
        for role in ROLES:
            gemm = self.gemm(role)
            if gemm is not None and name in ROLE_OPERANDS[role]:
                cast = (gemm.first, gemm.second)[ROLE_OPERANDS[role].index(name)]
                if cast.scaling == "delayed":
                    return cast
        return None

    def multiply(
        self, role: Role, first, second, stored: Array, rounding: Rounding
    ) -> tuple[Product, Scaled, Scaled]:
        """Returns a product and its operands as they are cast.

        Args:
            first, second: its operands, both to be contracted over their last dim, in
                float32 or cast already.
            stored: delayed scales of lhs, rhs and g.
        """
        gemm = self.gemm(role)
        casts = (None, None) if gemm is None else (gemm.first, gemm.second)
        operands = []
        for x, name, cast in zip(
            (first, second), ROLE_OPERANDS[role], casts, strict=True
        ):
            if not isinstance(x, Scaled):
                scale_inv = stored[_ROWS[name]]
                is_exact = name in self.exact_rows and role != "drhs"
                x = operand(x, cast, name, scale_inv, rows_are_exact=is_exact)
            operands.append(x)
        a, b = operands
        return product(a, b, gemm, self.compute_dtype, rounding), a, b


_ROWS: dict[Operand, int] = {"lhs": 0, "rhs": 1, "g": 2}


def _folds_lhs(plan: KernelPlan) -> bool:
    """Returns True if a kernel quantizes lhs by rows that it folds."""
    m, k = plan.spec.m + plan.padding, plan.spec.k
    is_served = norm_quantize.why_not(m, k, norm="none") is None
    return is_served and norm_quantize.default_config(k, norm="none").lanes > 32


def _folds_gradient(spec: SiteSpec) -> bool:
    """Returns True if a kernel quantizes the gradient by rows that it folds."""
    return norm_backward.default_config(spec.n, norm=spec.norm).lanes > 32


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
    flips: dict[str, "Flip"]
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
    if numerics.dlhs is not None:
        moved += code_step(numerics.dlhs.first.dtype) * jnp.abs(dlhs_g.value)
    if numerics.dlhs is not None or numerics.xhat_is_e4m3:  # all of a row moves
        sizes = jnp.sqrt(jnp.sum(rhs.value**2, axis=0))
        row = jnp.max(moved * sizes[None], axis=1)
        flips["dlhs"] = Flip(row, row / _TILE_ROOT)
    if numerics.drhs is not None:  # all of a column moves
        largest = jnp.max(jnp.abs(g.value), axis=0)
        step = code_step(numerics.drhs.second.dtype)
        row = step * jnp.max(jnp.abs(lhs.value) * largest[None], axis=1)
        flips["drhs"] = Flip(row, row * columns / _TILE_ROOT)
    amaxes = _amaxes(numerics, trial, dz)
    return Expected(results, uncast, flips, lhs.value.T, g.value.T, amaxes)


def next_scales(
    numerics: Numerics, amaxes: Float[Array, "3"]
) -> dict[Operand, Float[Array, ""]]:
    """Returns the scales that these amaxes give the next step, where one is delayed."""
    return {
        name: scale_inv_of(amaxes[i], cast.dtype) * 2.0**numerics.margin
        for name, i in _ROWS.items()
        if (cast := numerics.delayed(name)) is not None
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

    Attributes:
        y: activations.
        xhat, rstd: normalized rows, and the reciprocals of their deviations.
        is_settled: no rounding decides the slope of the activation.
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
    scales, amaxes = [], _amaxes(numerics, trial._replace(lhs_fp8=None), dz)
    for name, i in _ROWS.items():
        scale_inv, cast = jnp.float32(1), numerics.delayed(name)
        if cast is not None:
            scale_inv = scale_inv_of(amaxes[i], cast.dtype) * trial.headroom[i]
        scales.append(scale_inv)
    return jnp.stack(scales)


def _amaxes(numerics: Numerics, trial: Trial, dz: Array) -> Float[Array, "3"]:
    """Returns the amaxes of lhs, rhs and dz.

    Of an lhs in FP8 it is what its scales bound, unless drhs casts the lhs once more.
    """
    rhs, dz = jnp.max(jnp.abs(trial.rhs)), jnp.max(jnp.abs(dz))
    drhs = numerics.drhs
    casts_again = drhs is not None and drhs.first.granularity == "tensorwise"
    if numerics.reads_fp8 and trial.lhs_fp8 is not None and not casts_again:
        lhs = jnp.max(trial.lhs_fp8.scale_inv) * fp8_max(E4M3)
    else:
        lhs = jnp.max(jnp.abs(trial.lhs.astype(jnp.float32)))
    return jnp.stack([lhs, rhs, dz])
