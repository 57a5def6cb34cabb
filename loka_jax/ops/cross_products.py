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
from loka_jax.tails import CrossGradients, Forms, Scaled, Written
from loka_jax.triton import cross_matmul, cross_tail, norm_tail
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
    "cross_matmul": cross_matmul.cross_matmul,
    "cross_matmul_backward": cross_matmul.cross_matmul_backward,
}
_CAST = Epilogue("none")


class Network(NamedTuple):
    """The static arguments.

    Attributes:
        plans: of the products.
        axis_names: mesh axes over which rows are spread.
        implementation: the provider of the tails.
        fuses_products: tails run in one kernel with the product before them.
    """

    plans: ByProduct[KernelPlan]
    axis_names: tuple[str, ...]
    implementation: triton.Implementation
    fuses_products: bool

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
        if self.products.recipe.gemm(role) is None:
            lhs, rhs = (
                _bf16_view(x, dim)
                for x, dim in zip((first, second), _CONTRACTED[role], strict=True)
            )
            options = dict(compute_dtype=jnp.bfloat16, out_dtype=dtype)
            return Scaled(xla.high_precision_matmul(lhs, rhs, **options))
        lhs, rhs = _fp8_views(role, first, second)
        options = dict(out_dtype=dtype, fast_accumulation=self.is_fast(role))
        out = xla.fp8_product(lhs.data, rhs.data, **options)
        return Scaled(out, (lhs.scale_inv, rhs.scale_inv))

    def is_fast(self, role: Role) -> bool:
        """Returns True if a role's recipe has fast accumulation."""
        gemm = self.products.recipe.gemm(role)
        return gemm is not None and gemm.fast_accumulation

    def next_state(self, lhs: Written, rhs: Written, g: Written):
        """Returns the gradient of the state."""
        return self.products.state_after(self.state, lhs.amaxes, rhs.amaxes, g.amaxes)


class Product(NamedTuple):
    """A product that a tail follows."""

    site: Site
    role: Role
    first: Written
    second: Written

    def tail(
        self, operands: tuple, *, want: Forms, scale_inv, keep: bool
    ) -> tuple[Scaled, Written]:
        """Returns z, and the result of a cross tail of it.

        Args:
            operands: x0, x and bias.
            want: the forms of the result.
            scale_inv: of its FP8 form.
            keep: z is read again.
        """
        x0, x, bias = operands
        network = self.site.network
        if not network.fuses_products:
            z = self.site.multiply(*self[1:])
            static = dict(want=want)
            y = network.tail(
                "cross_tail", z, x0, x, bias, static=static, y_scale_inv=scale_inv
            )
            return z, y
        wants = Forms(bf16=keep), want
        static = dict(want=wants, fast_accumulation=self.site.is_fast(self.role))
        z, y = network.tail(
            "cross_matmul",
            *(*_fp8_views(*self[1:]), (x0, x), bias),
            static=static,
            scale_inv=(None, scale_inv),
        )
        return Scaled(z.bf16), y

    def tail_backward(
        self, gradients: tuple, operands: tuple, *, static: dict, scale_inv
    ) -> CrossGradients:
        """Returns the gradients of a cross tail, whose result's is the product plus r.

        Args:
            gradients: r, and that of x0 so far.
            operands: x0, z and bias.
            static: further arguments of the tail.
            scale_inv: of the FP8 form of u.
        """
        network, (r, dx0) = self.site.network, gradients
        if not network.fuses_products:
            d = self.site.multiply(*self[1:])
            run = functools.partial(network.tail, "cross_tail_backward")
            return run(d, r, *operands, dx0, static=static, u_scale_inv=scale_inv)
        static = static | dict(fast_accumulation=self.site.is_fast(self.role))
        run = functools.partial(network.tail, "cross_matmul_backward")
        views = _fp8_views(*self[1:])
        return run(*views, gradients, operands, static=static, u_scale_inv=scale_inv)


def _fp8_views(role: Role, first: Written, second: Written) -> list[Fp8Array]:
    """Returns the operands of a role as its product contracts them."""
    operands = zip((first.fp8, second.fp8), _CONTRACTED[role], strict=True)
    return [x.contracting(dim) for x, dim in operands if x is not None]


def _bf16_view(x: Written, dim: int) -> Array:
    assert x.bf16 is not None
    return x.bf16 if dim == 1 else x.bf16.T
