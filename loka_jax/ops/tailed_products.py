"""Products in a row with the passes between them: what `cross` and `wide_stack` share.

A `Site` multiplies with operands that are `Written` in the forms that its products
read, and leaves its results unscaled: the tail that reads them applies the scales.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from loka_jax import triton, xla
from loka_jax.fp8 import Fp8Array
from loka_jax.normed import Epilogue
from loka_jax.ops.kernels import by_kernel
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.products import Products, read_state
from loka_jax.recipe import OPERANDS, ROLE_OPERANDS, Cast, Operand, Role
from loka_jax.scaling import DelayedScaling
from loka_jax.tails import Forms, Scaled, Written
from loka_jax.triton import cross_tail, norm_tail
from loka_jax.xla.tails import decode

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
    "cross_tail": cross_tail.cross_tail,
    "cross_tail_backward": cross_tail.cross_tail_backward,
    "norm_tail": norm_tail.norm_tail,
    "norm_tail_backward": norm_tail.norm_tail_backward,
}
_CAST = Epilogue("none")


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

        def site(plan: KernelPlan, state: DelayedScaling | None) -> Site:
            return Site(self, Products.of(plan, self.axis_names), state)

        return jax.tree.map(site, self.plans, states)

    def tail(self, name: str, *operands, static: dict[str, Any], **scale_inv):
        """Runs a tail by its provider."""
        if self.implementation == "xla":
            return getattr(xla, name)(*operands, **static, **scale_inv)
        run = functools.partial(_TRITON[name], **static)
        return by_kernel(lambda x, scale: run(*x, **scale), operands, scale_inv)


class Site(NamedTuple):
    """A product with the scales of its operands."""

    run: Tailed
    products: Products
    state: DelayedScaling | None

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
        fp8: dict[Role, Cast] = {
            role: cast for role, cast in casts.items() if cast is not None
        }
        return Forms(
            bf16=len(fp8) < len(casts),
            fp8=next((cast.dtype for cast in fp8.values()), None),
            transposed=any(_contracted(role, operand) == 0 for role in fp8),
            amax=keep and bool(fp8),
        )

    def scale_inv(self, operand: Operand) -> Array | None:
        """Returns the scale of an operand, from earlier steps; None without a cast."""
        for cast in self.products.recipe.casts(operand):
            return self.products.stored_scale_inv(operand, cast, self.state)
        return None

    def cast(self, operand: Operand, x: Scaled, *, keep: bool) -> Written:
        """Returns an operand from a product, or from a matrix in high precision."""
        want = self.forms(operand, keep=keep)
        if want.fp8 is None:
            return Written(decode(x).astype(jnp.bfloat16), None, None)
        is_given = not x.scales and x.data.dtype == jnp.bfloat16
        wanted = dataclasses.replace(want, bf16=want.bf16 and not is_given)
        static = dict(epilogue=_CAST, want=wanted, xhat=None)
        scale_inv = self.scale_inv(operand)
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
        return Scaled(out, (lhs.scale_inv, rhs.scale_inv))

    def next_state(self, lhs: Written, rhs: Written, g: Written):
        """Returns the gradient of the state."""
        return self.products.state_after(self.state, lhs.amaxes, rhs.amaxes, g.amaxes)


def _contracted(role: Role, operand: Operand) -> int:
    return _CONTRACTED[role][ROLE_OPERANDS[role].index(operand)]


def _fp8_views(role: Role, first: Written, second: Written) -> list[Fp8Array]:
    """Returns the operands of a role as its product contracts them."""
    operands = zip((first.fp8, second.fp8), _CONTRACTED[role], strict=True)
    return [x.contracting(dim) for x, dim in operands if x is not None]


def _bf16_view(x: Written, dim: int) -> Array:
    assert x.bf16 is not None
    return x.bf16 if dim == 1 else x.bf16.T
