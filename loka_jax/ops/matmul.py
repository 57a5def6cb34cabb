"""The differentiable product of a site, its three GEMMs each in its own precision.

For lhs (M, K), rhs (K, N), and the gradient g (M, N) of `out`:

    fwd    out  = lhs   @ rhs
    dlhs   dlhs = g     @ rhs^T
    drhs   drhs = lhs^T @ g

Each role follows the recipe if its shape allows FP8, and runs in the recipe's compute
dtype if not; `decide` tells which, and why. A whole-tensor FP8 copy is made once: the
forward pass keeps it for the backward pass, and keeps the wide operand only where a
backward role reads that.

Delayed scaling is state that only the backward pass can complete, since it needs the
amax of g. So the state is an input whose "gradient" is its new value, as in Flax's FP8
operations: differentiate with respect to it, then replace it.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import fp8, xla
from loka_jax.fp8 import Fp8Array
from loka_jax.recipe import (
    BLOCK,
    ROLE_OPERANDS,
    ROLES,
    Cast,
    GemmRecipe,
    Operand,
    Recipe,
    Role,
)
from loka_jax.scaling import DelayedScaling, delayed_scale_inv, update_delayed


class Decision(NamedTuple):
    """What runs for one role of a site.

    Attributes:
        gemm: the casts of the FP8 GEMM, or None for high precision.
        why_not: why it is not FP8 though the recipe asks for it, or None.
    """

    gemm: GemmRecipe | None
    why_not: str | None


def decide(recipe: Recipe, role: Role, m: int, k: int, n: int) -> Decision:
    """Returns what runs for `role` of a site with lhs (m, k) and rhs (k, n)."""
    gemm = recipe.gemm(role)
    if gemm is None:
        return Decision(None, None)
    sizes = {"fwd": (m, k, n), "dlhs": (m, n, k), "drhs": (k, m, n)}[role]
    why_not = xla.why_not(*sizes)
    return Decision(gemm if why_not is None else None, why_not)


def matmul(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "k n"],
    state: DelayedScaling | None = None,
    *,
    recipe: Recipe,
    axis_names: tuple[str, ...] = (),
) -> Float[Array, "m n"]:
    """Returns `lhs @ rhs` in the recipe's precision and compute dtype.

    Differentiable in lhs and rhs; gradients have their operands' dtypes. The gradient
    with respect to `state` is its value for the next step. `state` must belong to one
    call a step: JAX adds up the gradients of several, which is no state.

    Args:
        lhs: rows, usually activations.
        rhs: usually a weight in float32.
        state: delayed-scaling state if `recipe.is_delayed`, else None.
        recipe: the casts of each role.
        axis_names: mesh axes (under `shard_map`) over which rows are spread: scales of
            whole tensors and the state then agree on all devices. The gradient of an
            rhs that the devices share is their sum if `shard_map` tracks what varies
            (`check_vma`, the default), and each device's own share if not.

    Raises:
        ValueError: if the recipe needs a state and there is none, or the reverse.
    """
    if (state is not None) != recipe.is_delayed:
        need = "needs a" if recipe.is_delayed else "takes no"
        raise ValueError(f"recipe {recipe.name!r} {need} delayed-scaling state.")
    return _matmul(*_equally_varying(lhs, rhs), state, recipe, axis_names)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _matmul(lhs, rhs, state, recipe: Recipe, axis_names: tuple[str, ...]):
    return _forward(lhs, rhs, state, recipe, axis_names)[0]


def _forward(lhs, rhs, state, recipe, axis_names):
    site = _Site(recipe, (*lhs.shape, rhs.shape[1]), axis_names)
    lhs, rhs = site.read("lhs", lhs, state), site.read("rhs", rhs, state)
    out = site.multiply("fwd", lhs, rhs, out_dtype=recipe.compute_dtype)
    return out, (site.keep("lhs", lhs), site.keep("rhs", rhs), state)


def _backward(recipe, axis_names, residuals, g):
    lhs, rhs, state = residuals
    site = _Site(recipe, (*lhs.shape, rhs.shape[1]), axis_names)
    g = site.read("g", g, state)
    dlhs = site.multiply("dlhs", g, rhs, out_dtype=lhs.dtype)
    drhs = site.multiply("drhs", lhs, g, out_dtype=rhs.dtype)
    return dlhs, drhs, site.next_state(state, lhs, rhs, g)


_matmul.defvjp(_forward, _backward)


def _equally_varying(*operands: Array) -> tuple[Array, ...]:
    """Returns the operands marked as varying over the same mesh axes.

    `shard_map` wants gradients that vary as their operands do. The mark is its own
    transpose's sum: the gradient of an operand that devices share is added up.
    """
    varying = [jax.typeof(x).mat.varying for x in operands]
    union = frozenset().union(*varying)
    return tuple(
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying")
        for x, own in zip(operands, varying, strict=True)
    )


@struct.dataclass
class _Operand:
    """An operand of a site.

    Attributes:
        value: the array as given; None once no role reads it any more.
        amaxes: float32, of the parts of the array; None if no cast needs them.
        tensorwise: the whole-tensor FP8 copy, if any role reads one.
    """

    value: Array | None
    amaxes: Array | None
    tensorwise: Fp8Array | None
    shape: tuple[int, int] = struct.field(pytree_node=False)
    dtype: DTypeLike = struct.field(pytree_node=False)


class _Site(NamedTuple):
    """The static side of one product: the recipe and the sizes (m, k, n)."""

    recipe: Recipe
    sizes: tuple[int, int, int]
    axis_names: tuple[str, ...]

    def gemm(self, role: Role) -> GemmRecipe | None:
        return decide(self.recipe, role, *self.sizes).gemm

    def cast(self, role: Role, operand: Operand) -> Cast | None:
        """Returns how `role` casts `operand`; None in high precision."""
        gemm = self.gemm(role)
        if gemm is None:
            return None
        return (gemm.first, gemm.second)[ROLE_OPERANDS[role].index(operand)]

    def read(self, name: Operand, x, state) -> _Operand:
        """Returns the operand with its whole-tensor FP8 copy, if a role reads one."""
        casts = [self.cast(r, name) for r in ROLES if name in ROLE_OPERANDS[r]]
        tensorwise = [c for c in casts if c and c.granularity == "tensorwise"]
        if not tensorwise:
            return _Operand(x, None, None, x.shape, x.dtype)
        (cast,) = set(tensorwise)  # Recipe allows one whole-tensor cast an operand
        amaxes = fp8.amax_of_parts(x)
        amax = fp8.amax_over_devices(fp8.amax(amaxes), self.axis_names)
        if cast.scaling == "delayed":
            scale_inv = delayed_scale_inv(state, name, amax, cast, self.recipe)
        else:
            scale_inv = fp8.compute_scale_inv(
                amax, cast.dtype, pow2_scale=cast.pow2_scale
            )
        return _Operand(x, amaxes, fp8.cast(x, scale_inv, cast.dtype), x.shape, x.dtype)

    def keep(self, name: Operand, operand: _Operand) -> _Operand:
        """Returns what the backward pass needs of an operand of the forward pass."""
        role: Role = "drhs" if name == "lhs" else "dlhs"
        cast = self.cast(role, name)
        if cast is not None and cast.granularity == "tensorwise":
            return dataclasses.replace(operand, value=None)
        return dataclasses.replace(operand, tensorwise=None)

    def multiply(
        self, role: Role, first: _Operand, second: _Operand, out_dtype: DTypeLike
    ) -> Array:
        """Returns the product of `role`, its operands turned K-major."""
        gemm = self.gemm(role)
        first_turned, second_turned = _TURNED[role]
        if gemm is None:
            return xla.high_precision_matmul(
                _wide_view(first, first_turned),
                _wide_view(second, second_turned),
                compute_dtype=self.recipe.compute_dtype,
                out_dtype=out_dtype,
            )
        first_name, second_name = ROLE_OPERANDS[role]
        return xla.fp8_matmul(
            _fp8_view(first, gemm.first, first_name, first_turned),
            _fp8_view(second, gemm.second, second_name, second_turned),
            out_dtype=out_dtype,
            fast_accumulation=gemm.fast_accumulation,
        )

    def next_state(self, state, *operands: _Operand):
        """Returns the state for the next step; the same if nothing ran in FP8."""
        if state is None or all(x.amaxes is None for x in operands):
            return state
        nothing = jnp.zeros((1,), jnp.float32)
        parts = [nothing if x.amaxes is None else x.amaxes for x in operands]
        longest = max(x.size for x in parts)
        stacked = jnp.stack([jnp.pad(x, (0, longest - x.size)) for x in parts])
        amaxes = fp8.amax_over_devices(fp8.amax(stacked, (1,))[:, 0], self.axis_names)
        return update_delayed(state, amaxes, self.recipe)


# Which operands of a role's product must be transposed to contract their last dim:
# lhs (M, K) and rhs (K, N) as given, g (M, N).
_TURNED: dict[Role, tuple[bool, bool]] = {
    "fwd": (False, True),
    "dlhs": (False, False),
    "drhs": (True, True),
}


def _wide_view(operand: _Operand, turned: bool) -> Array:
    """Returns the operand as given, contracting its last dim."""
    assert operand.value is not None
    return operand.value.T if turned else operand.value


def _fp8_view(operand: _Operand, cast: Cast, name: Operand, turned: bool) -> Fp8Array:
    """Returns the operand in FP8, contracting its last dim."""
    if cast.granularity == "tensorwise":
        copy = operand.tensorwise
        assert copy is not None
        return Fp8Array(copy.data.T, copy.scale_inv) if turned else copy
    x = _wide_view(operand, turned)
    if cast.granularity == "rowwise":
        return fp8.quantize(x, cast.dtype, axes=(1,), pow2_scale=cast.pow2_scale)
    # 128 x 128 for weights, 1 x 128 for what changes with every batch (DeepSeek-V3).
    tile = (BLOCK, BLOCK) if name == "rhs" else (1, BLOCK)
    return fp8.quantize_tiles(x, cast.dtype, tile=tile, pow2_scale=cast.pow2_scale)
