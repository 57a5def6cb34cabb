"""The products of a cross network, with the scales of their operands, and its tails."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from loka_jax import triton, xla
from loka_jax.fp8 import Fp8Array
from loka_jax.normed import Epilogue
from loka_jax.ops.kernels import by_kernel
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.products import Products
from loka_jax.recipe import Operand, Role
from loka_jax.scaling import DelayedScaling
from loka_jax.tails import Forms, Scaled, Written
from loka_jax.triton import cross_tail, norm_tail
from loka_jax.xla.tails import write

# A value for each product of each layer.
type ByProduct[T] = tuple[tuple[T, ...], ...]

# The dims that the operands of a role's product contract.
_CONTRACTED: dict[Role, tuple[int, int]] = {
    "fwd": (1, 0),
    "dlhs": (1, 1),
    "drhs": (0, 0),
}
_TRITON = {
    "cross_tail": cross_tail.cross_tail,
    "cross_tail_backward": cross_tail.cross_tail_backward,
    "norm_tail": norm_tail.norm_tail,
}
_CAST = Epilogue("none")


class Network(NamedTuple):
    """The static arguments.

    Attributes:
        plans: of the products.
        axis_names: mesh axes over which rows are spread.
        implementation: the provider of the tails.
    """

    plans: ByProduct[KernelPlan]
    axis_names: tuple[str, ...]
    implementation: triton.Implementation

    def sites(self, states) -> "ByProduct[Site]":
        """Returns the sites with their states."""
        return tuple(
            tuple(
                Site(self, Products.of(plan, self.axis_names), state)
                for plan, state in zip(*both, strict=True)
            )
            for both in zip(self.plans, states, strict=True)
        )

    def tail(self, name: str, *operands, static: dict[str, Any], **scale_inv):
        """Runs a tail by its provider."""
        if self.implementation == "xla":
            return getattr(xla, name)(*operands, **static, **scale_inv)
        run = functools.partial(_TRITON[name], **static)
        return by_kernel(lambda x, scale: run(*x, **scale), operands, scale_inv)


class Site(NamedTuple):
    """A product of the network with the scales of its operands."""

    network: Network
    products: Products
    state: DelayedScaling | None

    def forms(self, operand: Operand, *, keep: bool) -> Forms:
        """Returns the forms in which lhs or g is read; in drhs, too, if `keep`."""
        cast = self.products.cast("dlhs" if operand == "g" else "fwd", operand)
        if cast is None:
            return Forms()
        is_fp8 = self.products.recipe.drhs is not None
        return Forms(
            bf16=keep and not is_fp8,
            fp8=cast.dtype,
            transposed=keep and is_fp8,
            amax=keep,
        )

    def scale_inv(self, operand: Operand) -> Array | None:
        """Returns the scale of an operand, from earlier steps."""
        cast = self.products.cast("dlhs" if operand == "g" else "fwd", operand)
        if cast is None:
            return None
        return self.products.stored_scale_inv(operand, cast, self.state)

    def cast(self, operand: Operand, x: Scaled, *, keep: bool) -> Written:
        """Returns an operand from a product, or from bfloat16."""
        want = self.forms(operand, keep=keep)
        if want.fp8 is None:
            return Written(x.data, None, None)
        has_bf16 = not x.scales
        want = dataclasses.replace(want, bf16=want.bf16 and not has_bf16)
        static = dict(epilogue=_CAST, want=want, keep=False)
        scale_inv = self.scale_inv(operand)
        run = functools.partial(self.network.tail, "norm_tail")
        y = run(x, static=static, y_scale_inv=scale_inv).y
        return y._replace(bf16=x.data) if has_bf16 else y

    def weight(self, kernel: Array) -> Written:
        """Returns the operand rhs, in both layouts."""
        cast, want = self.products.cast("fwd", "rhs"), Forms()
        if cast is not None:
            want = Forms(bf16=False, fp8=cast.dtype, transposed=True, amax=True)
        return write(kernel.astype(jnp.float32), want, self.scale_inv("rhs"))

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


def _fp8_views(role: Role, first: Written, second: Written) -> list[Fp8Array]:
    """Returns the operands of a role as its product contracts them."""
    operands = zip((first.fp8, second.fp8), _CONTRACTED[role], strict=True)
    return [x.contracting(dim) for x, dim in operands if x is not None]


def _bf16_view(x: Written, dim: int) -> Array:
    assert x.bf16 is not None
    return x.bf16 if dim == 1 else x.bf16.T
