"""The three products of a site and their operands, each cast as the recipe says.

For lhs (M, K), rhs (K, N), and the gradient g (M, N) of `out`:

    fwd    out  = lhs   @ rhs
    dlhs   dlhs = g     @ rhs^T
    drhs   drhs = lhs^T @ g

Each role follows the recipe if its shape allows FP8, and runs in the recipe's compute
dtype if not; `decide` tells which, and why. A whole-tensor FP8 copy is made once: the
forward pass keeps it for the backward pass, and keeps the wide operand only where a
backward role reads that.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import fp8, triton, xla
from loka_jax.fp8 import E4M3, Fp8Array, fp8_max
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

# Who multiplies in FP8.
Engine = Literal["xla", "triton"]
# How activations in FP8 are scaled: with one scale, or with one a row.
HandOver = Literal["tensorwise", "rowwise"]


@struct.dataclass
class Activations:
    """What one site hands to the next: activations, and their FP8 form.

    Gradients flow through `y`; the FP8 form is a rounding of it that has none of its
    own. A site whose forward product takes E4M3 reads `fp8`, its drhs reads `y`. What
    nobody reads is not computed, once compiled: in inference `y` costs nothing.

    Attributes:
        y: in the compute dtype: the activations, or where only FP8 was written, what
            `fp8` decodes to.
        fp8: in E4M3, with one scale (`scale_inv` is `[]`) or one a row (`[..., 1]`).
    """

    y: Float[Array, "*rows n"]
    fp8: Fp8Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the activations."""
        return self.y.shape

    @property
    def scaling(self) -> HandOver:
        """How the FP8 form is scaled."""
        return "rowwise" if self.fp8.scale_inv.ndim else "tensorwise"

    def reshape(self, *shape: int) -> "Activations":
        """Returns the same rows under other leading dims; the last dim must stay."""
        y = self.y.reshape(*shape)
        scale_inv = self.fp8.scale_inv
        if scale_inv.ndim:
            scale_inv = scale_inv.reshape(*y.shape[:-1], 1)
        return Activations(y, Fp8Array(self.fp8.data.reshape(y.shape), scale_inv))


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


def check_state(recipe: Recipe, state: DelayedScaling | None):
    """Raises ValueError if the recipe needs a state and there is none, or the reverse.

    Raises:
        ValueError: if so.
    """
    if (state is not None) != recipe.is_delayed:
        need = "needs a" if recipe.is_delayed else "takes no"
        raise ValueError(f"recipe {recipe.name!r} {need} delayed-scaling state.")


def equally_varying(*operands: Array) -> tuple[Array, ...]:
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
class SiteOperand:
    """An operand of a site.

    Attributes:
        value: the array as given; None once no role reads it any more.
        amaxes: float32, of the parts of the array; None if no cast needs them.
        tensorwise: the whole-tensor FP8 copy, if any role reads one.
        handed: the FP8 form that came with it, which fwd reads in place of a cast.
    """

    value: Array | None
    amaxes: Array | None
    tensorwise: Fp8Array | None
    handed: Fp8Array | None
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: DTypeLike = struct.field(pytree_node=False)


def takes_handed(recipe: Recipe, m: int, k: int, n: int) -> bool:
    """Returns True if fwd can read a handed-over lhs: E4M3, and not in tiles."""
    gemm = decide(recipe, "fwd", m, k, n).gemm
    if gemm is None or gemm.first.granularity == "blockwise":
        return False
    return jnp.dtype(gemm.first.dtype) == jnp.dtype(E4M3)


class Products(NamedTuple):
    """The static side of a site's products.

    Attributes:
        recipe: the casts of each role.
        sizes: (m, k, n).
        axis_names: mesh axes over which rows are spread.
        engine: of the products in FP8; others are XLA's.
    """

    recipe: Recipe
    sizes: tuple[int, int, int]
    axis_names: tuple[str, ...]
    engine: Engine = "xla"

    def gemm(self, role: Role) -> GemmRecipe | None:
        """Returns the casts of the FP8 GEMM of `role`, None in high precision."""
        return decide(self.recipe, role, *self.sizes).gemm

    def cast(self, role: Role, operand: Operand) -> Cast | None:
        """Returns how `role` casts `operand`; None in high precision."""
        gemm = self.gemm(role)
        if gemm is None:
            return None
        return (gemm.first, gemm.second)[ROLE_OPERANDS[role].index(operand)]

    def read(
        self,
        name: Operand,
        x: Array,
        state,
        *,
        handed=None,
        roles: tuple[Role, ...] = ROLES,
    ) -> SiteOperand:
        """Returns the operand with its whole-tensor FP8 copy, if one of `roles` reads.

        Of an lhs that was handed over in FP8, fwd reads that form. A copy for drhs is
        then left to the backward pass, see `reread`.
        """
        casts = [self.cast(r, name) for r in roles if name in ROLE_OPERANDS[r]]
        tensorwise = [c for c in casts if c and c.granularity == "tensorwise"]
        if handed is not None:
            # The scales bound the amax from above.
            amax = fp8.amax(handed.scale_inv) * fp8_max(handed.data.dtype)
            amaxes = amax[None] if tensorwise else None
            return SiteOperand(x, amaxes, None, handed, x.shape, x.dtype)
        if not tensorwise:
            return SiteOperand(x, None, None, None, x.shape, x.dtype)
        (cast,) = set(tensorwise)  # Recipe allows one whole-tensor cast an operand
        amaxes = fp8.amax_of_parts(x)
        amax = fp8.amax_over_devices(fp8.amax(amaxes), self.axis_names)
        if cast.scaling == "delayed":
            scale_inv = delayed_scale_inv(state, name, amax, cast, self.recipe)
        else:
            scale_inv = fp8.compute_scale_inv(
                amax, cast.dtype, pow2_scale=cast.pow2_scale
            )
        copy = fp8.cast(x, scale_inv, cast.dtype)
        return SiteOperand(x, amaxes, copy, None, x.shape, x.dtype)

    def keep(self, name: Operand, operand: SiteOperand) -> SiteOperand:
        """Returns what the backward pass needs of an operand of the forward pass."""
        role: Role = "drhs" if name == "lhs" else "dlhs"
        cast = self.cast(role, name)
        is_copied = cast is not None and cast.granularity == "tensorwise"
        if is_copied and operand.tensorwise is not None:
            return dataclasses.replace(operand, value=None)
        return dataclasses.replace(operand, tensorwise=None, handed=None)

    def reread(self, operand: SiteOperand, state) -> SiteOperand:
        """Returns a kept lhs with the copy that drhs reads, if that is missing."""
        cast = self.cast("drhs", "lhs")
        is_copied = cast is not None and cast.granularity == "tensorwise"
        if is_copied and operand.tensorwise is None:
            assert operand.value is not None
            return self.read("lhs", operand.value, state)
        return operand

    def view(self, role: Role, operand: Operand, x: SiteOperand) -> Array | Fp8Array:
        """Returns the operand as `role` multiplies it, contracting its last dim."""
        place = ROLE_OPERANDS[role].index(operand)
        turned = _TURNED[role][place]
        cast = self.cast(role, operand)
        if cast is not None:
            return _fp8_view(x, role, cast, operand, turned)
        return _wide_view(x, turned).astype(self.recipe.compute_dtype)

    def multiply(
        self, role: Role, first: SiteOperand, second: SiteOperand, out_dtype: DTypeLike
    ) -> Array:
        """Returns the product of `role`."""
        first_name, second_name = ROLE_OPERANDS[role]
        lhs = self.view(role, first_name, first)
        rhs = self.view(role, second_name, second)
        gemm = self.gemm(role)
        if gemm is None:
            assert not isinstance(lhs, Fp8Array) and not isinstance(rhs, Fp8Array)
            return xla.high_precision_matmul(
                lhs, rhs, compute_dtype=self.recipe.compute_dtype, out_dtype=out_dtype
            )
        assert isinstance(lhs, Fp8Array) and isinstance(rhs, Fp8Array)
        multiply = triton.fp8_matmul if self.engine == "triton" else xla.fp8_matmul
        return multiply(
            lhs, rhs, out_dtype=out_dtype, fast_accumulation=gemm.fast_accumulation
        )

    def multiply_unscaled(
        self, role: Role, first: SiteOperand, second: SiteOperand, out_dtype: DTypeLike
    ) -> tuple[Array, tuple[Array, ...]]:
        """Returns a product and the factors `[]` or `[m, 1]` that it lacks.

        Whoever reads the product next can apply them without a pass of their own.
        """
        first_name, second_name = ROLE_OPERANDS[role]
        gemm = self.gemm(role)
        lhs = self.view(role, first_name, first)
        rhs = self.view(role, second_name, second)
        if gemm is None or _is_tiled_or_by_column(lhs, rhs):
            return self.multiply(role, first, second, out_dtype), ()
        assert isinstance(lhs, Fp8Array) and isinstance(rhs, Fp8Array)
        product = xla.fp8_product(
            lhs.data,
            rhs.data,
            out_dtype=out_dtype,
            fast_accumulation=gemm.fast_accumulation,
        )
        return product, (lhs.scale_inv, rhs.scale_inv)

    def given(self, x: Array, copy: Fp8Array, amaxes: Array) -> SiteOperand:
        """Returns an operand whose whole-tensor FP8 copy and amaxes were made."""
        return SiteOperand(x, amaxes, copy, None, x.shape, x.dtype)

    def stored_scale_inv(self, operand: Operand, cast: Cast, state) -> Array:
        """Returns the scale from earlier steps that an operand is cast with."""
        assert self.recipe.scales_initialized
        unseen = jnp.zeros(())
        return delayed_scale_inv(state, operand, unseen, cast, self.recipe)

    def next_state(self, state, *operands: SiteOperand):
        """Returns the state for the next step; the same if nothing ran in FP8.

        The rows of operands that were not measured stay as they were.
        """
        if state is None or all(x.amaxes is None for x in operands):
            return state
        nothing = jnp.full((1,), jnp.nan, jnp.float32)  # never enters the history
        parts = [nothing if x.amaxes is None else x.amaxes for x in operands]
        amaxes = fp8.amax_over_devices(_each_amax(parts), self.axis_names)
        return update_delayed(state, amaxes, self.recipe)


def _each_amax(parts: list[Array]) -> Array:
    """Returns the largest of each of some amaxes of parts, in one kernel for all."""
    longest = max(x.size for x in parts)
    many = [i for i, x in enumerate(parts) if x.size > 1]
    found = {i: x[0] for i, x in enumerate(parts) if x.size == 1}
    padded = [jnp.pad(parts[i], (0, longest - parts[i].size)) for i in many]
    if padded:
        largest = fp8.amax(jnp.stack(padded), (1,))[:, 0]
        found |= dict(zip(many, largest, strict=True))
    return jnp.stack([found[i] for i in range(len(parts))])


# Which operands of a role's product must be transposed to contract their last dim:
# lhs (M, K) and rhs (K, N) as given, g (M, N).
_TURNED: dict[Role, tuple[bool, bool]] = {
    "fwd": (False, True),
    "dlhs": (False, False),
    "drhs": (True, True),
}


def _is_tiled_or_by_column(lhs: Array | Fp8Array, rhs: Array | Fp8Array) -> bool:
    """Returns True if a product has factors that are not one or one a row."""
    is_tiled = isinstance(lhs, Fp8Array) and lhs.tile is not None
    return is_tiled or (isinstance(rhs, Fp8Array) and rhs.scale_inv.size != 1)


def _wide_view(operand: SiteOperand, turned: bool) -> Array:
    """Returns the operand as given, contracting its last dim."""
    assert operand.value is not None
    return operand.value.T if turned else operand.value


def _fp8_view(
    operand: SiteOperand, role: Role, cast: Cast, name: Operand, turned: bool
) -> Fp8Array:
    """Returns the operand in FP8, contracting its last dim."""
    if role == "fwd" and operand.handed is not None:
        return operand.handed
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
