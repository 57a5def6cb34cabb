"""The three products of a site and their operands, each cast as the recipe says.

For lhs (M, K), rhs (K, N), and the gradient g (M, N) of `out`:

    fwd    out  = lhs   @ rhs
    dlhs   dlhs = g     @ rhs^T
    drhs   drhs = lhs^T @ g

A whole-tensor FP8 copy is made once: the forward pass keeps it for the backward pass,
and keeps the operand in high precision only where a backward role reads that.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import fp8, scaling, triton, xla
from loka_jax.fp8 import Fp8Array, fp8_max
from loka_jax.ops.mesh_axes import axes_to_merge, manual_axes, tracks_varying
from loka_jax.ops.plan import KernelPlan
from loka_jax.recipe import ROLE_OPERANDS, ROLES, Cast, Operand, Recipe, Role
from loka_jax.scaling import DelayedScaling, delayed_scale_inv
from loka_jax.site import Fp8Scaling


@struct.dataclass
class Activations:
    """Activations handed from one site to the next, with their FP8 form.

    Gradients flow through `y`; the FP8 form is a rounding of it without a gradient. A
    site whose forward product takes E4M3 reads `fp8`, its drhs reads `y`. The compiler
    removes a form that is not read: in inference `y` costs nothing.

    Attributes:
        y: the activations in the compute dtype; where only FP8 was written, `fp8`
            dequantized.
        fp8: in E4M3, with one scale (`scale_inv` is `[]`) or one a row (`[..., 1]`).
    """

    y: Float[Array, "*rows n"]
    fp8: Fp8Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the activations."""
        return self.y.shape

    @property
    def scaling(self) -> Fp8Scaling:
        """The granularity of the FP8 form's scales."""
        return "rowwise" if self.fp8.scale_inv.ndim else "tensorwise"

    def reshape(self, *shape: int) -> "Activations":
        """Returns the same rows under other leading dims; the last dim must stay."""
        y = self.y.reshape(*shape)
        scale_inv = self.fp8.scale_inv
        if scale_inv.ndim:
            scale_inv = scale_inv.reshape(*y.shape[:-1], 1)
        return Activations(y, Fp8Array(self.fp8.data.reshape(y.shape), scale_inv))


def read_state(recipe: Recipe, state: DelayedScaling | None) -> DelayedScaling | None:
    """Returns the state of a site.

    Raises:
        ValueError: if the recipe needs a state and there is none, or the reverse.
    """
    if (state is not None) != recipe.is_delayed:
        need = "needs a" if recipe.is_delayed else "takes no"
        raise ValueError(f"recipe {recipe.name!r} {need} delayed-scaling state.")
    return state


@struct.dataclass
class SiteOperand:
    """An operand of a site, in the forms that its roles read.

    Attributes:
        value: the array in high precision; None once no role reads it any more.
        amaxes: float32, of the parts of the array; None if no cast needs them.
        tensorwise: the whole-tensor FP8 copy, if any role reads one.
        handed: the FP8 form from another site, which fwd reads in place of a cast.
    """

    value: Array | None
    amaxes: Array | None
    tensorwise: Fp8Array | None
    handed: Fp8Array | None
    shape: tuple[int, ...] = struct.field(pytree_node=False)
    dtype: DTypeLike = struct.field(pytree_node=False)


class Products(NamedTuple):
    """The three products of a site.

    Attributes:
        axis_names: mesh axes over which rows are spread.
    """

    plan: KernelPlan
    recipe: Recipe
    axis_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: KernelPlan, axis_names: tuple[str, ...] = ()) -> "Products":
        """Returns the products of a plan."""
        return cls(plan, plan.recipe, axis_names)

    def backward(self) -> "Products":
        """Returns the products as the backward pass runs them."""
        return self._replace(recipe=self.plan.backward_recipe)

    def cast(self, role: Role, operand: Operand) -> Cast | None:
        """Returns how `role` casts `operand`; None in high precision."""
        gemm = self.recipe.gemm(role)
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
        """Returns the operand, with a whole-tensor FP8 copy if one of `roles` reads it.

        If another site handed the lhs over in FP8 (`handed`), fwd reads that form, and
        a copy for drhs is left to the backward pass, see `reread`.
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
        padded = self._padded(name, x)
        amaxes = fp8.amax_of_parts(padded)
        amax = fp8.amax_over_devices(fp8.amax(amaxes), self.axis_names)
        recipe = self.plan.choice.recipe
        if cast.scaling == "delayed":
            scale_inv = delayed_scale_inv(state, name, amax, cast, recipe)
        else:
            scale_inv = fp8.compute_scale_inv(
                amax, cast.dtype, pow2_scale=cast.pow2_scale
            )
        if cast.scaling != "delayed" or not recipe.scales_initialized:
            amaxes = amax[None]  # the cast waits for it, so parts have no use
        copy = fp8.cast(padded, scale_inv, cast.dtype)
        return SiteOperand(x, amaxes, copy, None, x.shape, x.dtype)

    def _padded(self, name: Operand, x: Array) -> Array:
        """Returns an operand whose FP8 copy XLA's products read as it is.

        Kernels read and write rows of any number.
        """
        if self.plan.choice.provider == "triton":
            return x
        padded = fp8.pad(x)
        is_of_rows = name != "rhs" and self.plan.runs_kernels
        return padded[: x.shape[0]] if is_of_rows else padded

    def keep(self, name: Operand, operand: SiteOperand) -> SiteOperand:
        """Returns an operand of the forward pass in the forms that backward reads."""
        role: Role = "drhs" if name == "lhs" else "dlhs"
        if self._reads_copy(role, name) and operand.tensorwise is not None:
            return dataclasses.replace(operand, value=None)
        return dataclasses.replace(operand, tensorwise=None, handed=None)

    def reread(self, operand: SiteOperand, state) -> SiteOperand:
        """Returns a kept lhs with the copy that drhs reads, if that is missing."""
        if self._reads_copy("drhs", "lhs") and operand.tensorwise is None:
            assert operand.value is not None
            return self.read("lhs", operand.value, state)
        return operand

    def _reads_copy(self, role: Role, operand: Operand) -> bool:
        cast = self.cast(role, operand)
        return cast is not None and cast.granularity == "tensorwise"

    def view(self, role: Role, operand: Operand, x: SiteOperand) -> Array | Fp8Array:
        """Returns the operand as `role` multiplies it, contracting its last dim.

        It may be padded with zeros.
        """
        place = ROLE_OPERANDS[role].index(operand)
        transposed = _TRANSPOSED[role][place]
        cast = self.cast(role, operand)
        if cast is not None:
            return _fp8_view(x, role, cast, operand, transposed)
        return _high_precision_view(x, transposed).astype(self.recipe.compute_dtype)

    def multiply(
        self, role: Role, first: SiteOperand, second: SiteOperand, out_dtype: DTypeLike
    ) -> Array:
        """Returns the product of `role`."""
        first_name, second_name = ROLE_OPERANDS[role]
        lhs = self.view(role, first_name, first)
        rhs = self.view(role, second_name, second)
        gemm = self.recipe.gemm(role)
        if gemm is None:
            assert not isinstance(lhs, Fp8Array) and not isinstance(rhs, Fp8Array)
            return xla.high_precision_matmul(
                lhs, rhs, compute_dtype=self.recipe.compute_dtype, out_dtype=out_dtype
            )
        assert isinstance(lhs, Fp8Array) and isinstance(rhs, Fp8Array)
        by_triton = self.plan.choice.provider == "triton"
        multiply = triton.fp8_matmul if by_triton else xla.fp8_matmul
        out = multiply(
            lhs, rhs, out_dtype=out_dtype, fast_accumulation=gemm.fast_accumulation
        )
        return xla.cut(out, _shape(role, first, second))

    def multiply_unscaled(
        self, role: Role, first: SiteOperand, second: SiteOperand, out_dtype: DTypeLike
    ) -> tuple[Array, tuple[Array, ...]]:
        """Returns an unscaled product, and the scales `[]` or `[m, 1]` to apply to it.

        The next kernel applies them, which saves a pass over the product.
        """
        first_name, second_name = ROLE_OPERANDS[role]
        gemm = self.recipe.gemm(role)
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
        scales = lhs.scale_inv, rhs.scale_inv
        return xla.cut(product, _shape(role, first, second)), scales

    def stored_scale_inv(self, operand: Operand, cast: Cast, state) -> Array:
        """Returns the scale from earlier steps that an operand is cast with."""
        assert self.recipe.scales_initialized
        unused_amax = jnp.zeros(())
        return delayed_scale_inv(state, operand, unused_amax, cast, self.recipe)

    def next_state(self, state, *operands: SiteOperand):
        """Returns the gradient of the state, see `scaling.contributions`."""
        if state is None:
            return None
        amaxes = [x.amaxes for x in operands]
        return DelayedScaling(self.tables_after(state.table, amaxes))

    def tables_after(self, tables: Array, amaxes: Sequence[Array | None]) -> Array:
        """Returns the gradients of the tables of states, see `scaling.contributions`.

        Args:
            tables: `[3, 1 + H]`, of this site, or `[s, 3, 1 + H]`, of it and of sites
                with its recipe.
            amaxes: of parts of lhs, rhs and g of each site; None where not measured.
        """
        largest = None
        if any(x is not None for x in amaxes):
            largest = self._over_devices(tables, amaxes).reshape(tables.shape[:-1])
        return scaling.contributions(tables, largest, self.plan.choice.recipe)

    def _over_devices(self, tables: Array, amaxes: Sequence[Array | None]) -> Array:
        """Returns the amax of each operand over all devices that share the states."""
        missing = jnp.full((1,), jnp.inf, jnp.float32)  # never enters the history
        parts = [missing if x is None else x for x in amaxes]
        largest = fp8.amax_over_devices(_each_amax(parts), self.axis_names)
        return fp8.amax_over_devices(largest, _unmerged_axes(self, tables, largest))


def _unmerged_axes(products: Products, tables: Array, amaxes: Array) -> tuple[str, ...]:
    """Returns the mesh axes over which amaxes differ, but not the states.

    These are all axes where `shard_map` does not say, and nobody named any, or merges
    the states later.
    """
    axes = manual_axes()
    if tracks_varying(axes):
        own = jax.typeof(tables).mat.varying
        return tuple(sorted(jax.typeof(amaxes).mat.varying - own))
    return () if products.axis_names else axes_to_merge()


def with_copy(x: Array, copy: Fp8Array, amaxes: Array) -> SiteOperand:
    """Returns an operand whose whole-tensor FP8 copy and amaxes exist already."""
    return SiteOperand(x, amaxes, copy, None, x.shape, x.dtype)


def _each_amax(parts: list[Array]) -> Array:
    """Returns the amax of each operand from those of its parts, in one kernel."""
    longest = max(x.size for x in parts)
    many = [i for i, x in enumerate(parts) if x.size > 1]
    amaxes = {i: x[0] for i, x in enumerate(parts) if x.size == 1}
    padded = [jnp.pad(parts[i], (0, longest - parts[i].size)) for i in many]
    if padded:
        largest = fp8.amax(jnp.stack(padded), (1,))[:, 0]
        amaxes |= dict(zip(many, largest, strict=True))
    return jnp.stack([amaxes[i] for i in range(len(parts))])


# Which operands of a role's product must be transposed to contract their last dim:
# lhs (M, K) and rhs (K, N) as given, g (M, N).
_TRANSPOSED: dict[Role, tuple[bool, bool]] = {
    "fwd": (False, True),
    "dlhs": (False, False),
    "drhs": (True, True),
}


def _shape(role: Role, first: SiteOperand, second: SiteOperand) -> tuple[int, int]:
    """Returns the shape of a role's product."""
    of_first, of_second = _TRANSPOSED[role]
    return first.shape[of_first], second.shape[of_second]


def _is_tiled_or_by_column(lhs: Array | Fp8Array, rhs: Array | Fp8Array) -> bool:
    """Returns True if a product's scales are neither one in all nor one per row."""
    is_tiled = isinstance(lhs, Fp8Array) and lhs.tile is not None
    return is_tiled or (isinstance(rhs, Fp8Array) and rhs.scale_inv.size != 1)


def _high_precision_view(operand: SiteOperand, transposed: bool) -> Array:
    """Returns the operand in high precision, contracting its last dim."""
    assert operand.value is not None
    return operand.value.T if transposed else operand.value


def _fp8_view(
    operand: SiteOperand, role: Role, cast: Cast, name: Operand, transposed: bool
) -> Fp8Array:
    """Returns the operand in FP8, contracting its last dim."""
    if role == "fwd" and operand.handed is not None:
        return operand.handed
    if cast.granularity == "tensorwise":
        copy = operand.tensorwise
        assert copy is not None
        return Fp8Array(copy.data.T, copy.scale_inv) if transposed else copy
    assert operand.value is not None
    x = operand.value
    if role == "drhs":
        # Read as it lies, for the amax and for the cast. XLA would write a transposed
        # copy in high precision, and compute x again for that, gathers and all.
        x = jax.lax.optimization_barrier(x)
        x = with_layout_constraint(x, Layout(major_to_minor=(0, 1)))
    x = x.T if transposed else x
    if cast.granularity == "rowwise":
        return fp8.quantize(x, cast.dtype, axes=(1,), pow2_scale=cast.pow2_scale)
    return cast.in_tiles(x, name)
