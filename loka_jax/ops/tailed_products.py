"""Products in a row with the passes between them: what wide operations share.

A `Site` multiplies with operands that are `Written` in the forms that its products
read, and leaves its results unscaled: the tail that reads them applies the scales.

Operands and products are padded with zeros to multiples of 16. What casts an operand
writes its padding; what leaves an operation has none.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from loka_jax import fp8, triton, xla
from loka_jax.normed import Epilogue
from loka_jax.ops.joint_states import joint_states
from loka_jax.ops.kernels import by_kernel
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.products import Products, read_state
from loka_jax.recipe import OPERANDS, ROLE_OPERANDS, Cast, Operand, Role
from loka_jax.scaling import DelayedScaling
from loka_jax.tails import Forms, Fp8Copies, Scale, Scaled, Written
from loka_jax.triton import cross_gradient, cross_tail, joined_cast, norm_tail
from loka_jax.xla.tails import decode, in_bf16

# The dims that the operands of a role's product contract.
_CONTRACTED: dict[Role, tuple[int, int]] = {
    "fwd": (1, 0),
    "dlhs": (1, 1),
    "drhs": (0, 0),
}
# The roles that read an operand, the first in the pass that writes it.
_READERS: dict[Operand, tuple[Role, ...]] = {
    "lhs": ("fwd", "drhs"),
    "rhs": ("fwd", "dlhs"),
    "g": ("dlhs", "drhs"),
}
_TRITON = {
    "cross_gradient": cross_gradient.cross_gradient,
    "cross_tail": cross_tail.cross_tail,
    "joined_cast": joined_cast.joined_cast,
    "norm_tail": norm_tail.norm_tail,
    "norm_tail_backward": norm_tail.norm_tail_backward,
}
_CAST = Epilogue("none")
# Of a product in FP8: what 1 stands for is 2^_UNIT_EXPONENT sqrt(k). Delayed scales put
# the amaxes of operands between 2^6.8 and 2^7.8, and so the root mean squares of lhs
# and rhs at 2^3 to 2^6: those of fwd are 2^-1 to 2^5 in this unit. Rows that are 30
# times smaller are still rounded with full precision. Those of g are at 2^0 to 2^6, as
# few examples have large gradients, and those of dlhs at 2^-2 to 2^7.
_UNIT_EXPONENT: dict[Role, int] = {"fwd": 7, "dlhs": 5}
# Sums of 32 products lose 2^-13 of the largest at each addition in the tensor cores'
# accumulators: over so many less than 2^-6, a quarter of the rounding to E4M3.
_MAX_FAST = 4096


def unit_of_fp8(role: Role, k: int) -> float:
    """Returns what 1 stands for in a product in FP8, see `_UNIT_EXPONENT`.

    Args:
        role: fwd or dlhs.
        k: the size that the product contracts, padded or not.
    """
    return 2.0 ** (_UNIT_EXPONENT[role] + int(math.log2(fp8.padded_size(k))) // 2)


def why_not_tailed(plans: Iterable[KernelPlan]) -> str | None:
    """Returns why products are not run with tails, or None if they are.

    Args:
        plans: of the products.
    """
    return next(filter(None, map(_why_not, plans)), None)


def _why_not(plan: KernelPlan) -> str | None:
    choice, recipe = plan.choice, plan.choice.recipe
    if choice.provider != "xla":
        return f"provider {choice.provider!r}"
    if jnp.dtype(recipe.compute_dtype) != jnp.bfloat16:
        return f"{jnp.dtype(recipe.compute_dtype).name} is not bfloat16"
    if not choice.is_fp8:
        return None
    casts = [cast for operand in OPERANDS for cast in recipe.casts(operand)]
    if any(cast.scaling != "delayed" for cast in casts):
        return f"recipe {recipe.name!r} does not scale every operand by earlier amaxes"
    if not recipe.scales_initialized:
        return "delayed scales are not initialized"
    return plan.refusal


def read_states(plans: Any, states: Any) -> Any:
    """Returns the states of products for one call, see `products.read_state`.

    Args:
        plans: of the products: a tuple, or nested ones.
        states: of each of them.
    """
    return jax.tree.map(lambda p, s: read_state(p.choice.recipe, s), plans, states)


class Tailed(NamedTuple):
    """The static arguments of an operation of products and tails.

    Attributes:
        plans: of the products: a tuple, or nested ones.
        axis_names: mesh axes over which rows are spread.
        implementation: the provider of the tails.
    """

    plans: Any
    axis_names: tuple[str, ...]
    implementation: triton.Implementation

    def sites(self, states: Any) -> Any:
        """Returns the sites with their states, nested as the plans are."""
        plans, tree = jax.tree.flatten(self.plans)
        scales: list[tuple[Scale, ...]] = [()] * len(plans)
        for joint in joint_states(plans, tree.flatten_up_to(states)):
            for i, of_site in joint.scales():
                scales[i] = of_site
        products = [Products.of(plan, self.axis_names) for plan in plans]
        sites = [Site(self, *each) for each in zip(products, scales, strict=True)]
        return jax.tree.unflatten(tree, sites)

    def next_states(self, states: Any, amaxes: Any) -> Any:
        """Returns the gradients of the states, nested as the plans are.

        Args:
            states: of the sites.
            amaxes: of parts of the operands (lhs, rhs, g) of each site, None where not
                measured.
        """
        plans, tree = jax.tree.flatten(self.plans)
        measured = tree.flatten_up_to(amaxes)
        gradients: list[DelayedScaling | None] = [None] * len(plans)
        for joint in joint_states(plans, tree.flatten_up_to(states)):
            products = Products.of(plans[joint.sites[0]], self.axis_names)
            parts = [x for i in joint.sites for x in measured[i]]
            tables = products.tables_after(joint.tables, parts)
            for i, table in zip(joint.sites, tables, strict=True):
                gradients[i] = DelayedScaling(table)
        return jax.tree.unflatten(tree, gradients)

    def tail(self, name: str, *operands, static: dict[str, Any], **scale_inv):
        """Runs a tail by its provider."""
        if self.implementation == "xla":
            return getattr(xla, name)(*operands, **static, **scale_inv)
        run = functools.partial(_TRITON[name], **static)
        return by_kernel(lambda x, scale: run(*x, **scale), operands, scale_inv)


class Site(NamedTuple):
    """A product with the scales of its operands.

    Attributes:
        run: the operation.
        products: of the site.
        scales: of lhs, rhs and g from earlier steps; () without a state.
    """

    run: Tailed
    products: Products
    scales: tuple[Scale, ...]

    def shape(self, operand: Operand) -> tuple[int, int]:
        """Returns rows and columns of an operand without padding."""
        spec = self.products.plan.spec
        m, k, n = spec.m, spec.k, spec.n
        return {"lhs": (m, k), "rhs": (k, n), "g": (m, n)}[operand]

    def forms(self, operand: Operand, *, keep: bool) -> Forms:
        """Returns the forms in which products read an operand.

        Args:
            operand: of the site.
            keep: for the backward pass, too, and measure the amax of what is cast.
        """
        readers = _READERS[operand] if keep else _READERS[operand][:1]
        casts: dict[Role, Cast | None] = {
            role: self.products.cast(role, operand) for role in readers
        }
        in_fp8: dict[Role, Cast] = {
            role: cast for role, cast in casts.items() if cast is not None
        }
        return Forms(
            bf16=len(in_fp8) < len(casts),
            fp8=next((cast.dtype for cast in in_fp8.values()), None),
            transposed=any(_contracted(role, operand) == 0 for role in in_fp8),
            amax=keep and bool(in_fp8),
            shape=self.shape(operand),
            padded=True,
        )

    def scale_inv(self, operand: Operand, want: Forms) -> Scale | None:
        """Returns the scale of an operand's FP8 form, from earlier steps.

        None without such a form.
        """
        return None if want.fp8 is None else self.scales[OPERANDS.index(operand)]

    def cast(self, operand: Operand, x: Scaled, *, keep: bool) -> Written:
        """Returns an operand from a product, or from a matrix in high precision."""
        want = self.forms(operand, keep=keep)
        if want.fp8 is None:
            return Written(fp8.pad(in_bf16(x)), None, None)
        is_given = not x.scales and x.data.dtype == jnp.bfloat16
        is_given = is_given and x.data.shape == want.written_shape(self.shape(operand))
        wanted = dataclasses.replace(want, bf16=want.bf16 and not is_given)
        static = dict(epilogue=_CAST, want=wanted, xhat=None)
        scale_inv = self.scale_inv(operand, want)
        y = self.run.tail("norm_tail", x, static=static, y_scale_inv=scale_inv).y
        return y._replace(bf16=x.data) if want.bf16 and is_given else y

    def weight(self, kernel: Array, *, keep: bool) -> Written:
        """Returns the operand rhs from the float32 master weight."""
        return self.cast("rhs", Scaled(kernel), keep=keep)

    def multiply(self, role: Role, first: Written, second: Written) -> Scaled:
        """Returns the product of a role: bfloat16, of drhs float32."""
        dtype = jnp.float32 if role == "drhs" else jnp.bfloat16
        gemm = self.products.recipe.gemm(role)
        if gemm is None:
            lhs, rhs = (
                _bf16_view(x, dim)
                for x, dim in zip((first, second), _CONTRACTED[role], strict=True)
            )
            options = dict(compute_dtype=jnp.bfloat16, out_dtype=dtype)
            return Scaled(xla.high_precision_matmul(lhs, rhs, **options))
        lhs, rhs = _fp8_views(role, first, second)
        options = dict(out_dtype=dtype, fast_accumulation=gemm.fast_accumulation)
        out = xla.fp8_product(lhs.data, rhs.data, **options)
        return Scaled(out, (*lhs.scales, *rhs.scales))

    def weight_gradient(self, lhs: Written, g: Written) -> Array:
        """Returns drhs, in float32."""
        return xla.cut(decode(self.multiply("drhs", lhs, g)), self.shape("rhs"))

    def multiply_to_fp8(self, role: Role, first: Written, second: Written) -> Scaled:
        """Returns the product of a role in the FP8 format of its first operand.

        For what is only read element by element: one byte in place of two. Its scale
        needs no amax, see `_UNIT_EXPONENT`; values far beyond that saturate, which
        looks at operands measure (`dispatch.drift`).

        In high precision the product is bfloat16.
        """
        gemm = self.products.recipe.gemm(role)
        if gemm is None:
            return self.multiply(role, first, second)
        lhs, rhs = _fp8_views(role, first, second)
        k = lhs.data.shape[1]
        unit = unit_of_fp8(role, k)
        is_short = k <= _MAX_FAST
        out = xla.fp8_product_to_fp8(
            *(lhs.data, rhs.data, 1 / unit),
            out_dtype=gemm.first.dtype,
            fast_accumulation=gemm.fast_accumulation or is_short,
        )
        return Scaled(out, (*lhs.scales, *rhs.scales), unit)

    def hand_on(
        self,
        first: Written,
        second: Written,
        reader: "Site",
        bias: Array | None = None,
        *,
        has_relu: bool = False,
    ) -> Written | None:
        """Returns the activations of an inference as the next product reads them.

        The product writes them itself, in FP8; None where it or the next one runs in
        high precision.

        Args:
            first, second: the operands of fwd.
            reader: the next product.
            bias: float32; None if absent.
            has_relu: apply relu after the bias.
        """
        gemm, want = self.products.recipe.gemm("fwd"), reader.forms("lhs", keep=False)
        scale_inv = reader.scale_inv("lhs", want)
        if gemm is None or want.fp8 is None or scale_inv is None:
            return None
        lhs, rhs = _fp8_views("fwd", first, second)
        (of_lhs,), (of_rhs,) = lhs.scales, rhs.scales
        unscaled = None
        if bias is not None:
            padding = rhs.data.shape[0] - bias.size
            unscaled = jnp.pad(bias / of_lhs.value / of_rhs.value, (0, padding))
        factor = of_lhs.value / scale_inv.value * of_rhs.value
        out = xla.fp8_product_to_fp8(
            *(lhs.data, rhs.data, factor, unscaled),
            out_dtype=want.fp8,
            has_relu=has_relu,
            fast_accumulation=gemm.fast_accumulation,
        )
        return Written(None, Fp8Copies(out, None, scale_inv), None)


def _contracted(role: Role, operand: Operand) -> int:
    return _CONTRACTED[role][ROLE_OPERANDS[role].index(operand)]


def _fp8_views(role: Role, first: Written, second: Written) -> list[Scaled]:
    """Returns the operands of a role as its product contracts them."""
    operands = zip((first.fp8, second.fp8), _CONTRACTED[role], strict=True)
    return [x.contracting(dim) for x, dim in operands if x is not None]


def _bf16_view(x: Written, dim: int) -> Array:
    assert x.bf16 is not None
    return x.bf16 if dim == 1 else x.bf16.T
