"""A site run by kernels, forward and backward.

    forward     y, and for the backward pass xhat = norm(...) and rstd
    backward    dy, xhat, rstd -> dz, dgamma, dbeta

Forward in one kernel, or in one beside XLA's product. The products of the backward
pass, dlhs = dz rhs^T and drhs = lhs^T dz, are XLA's. Where they take dz in FP8 its
kernel writes that too: under the scale that the recipe has from earlier steps, or for
dlhs under one a row. One scale for the whole of this dz would need a pass of its own.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import custom_vjp
from jaxtyping import Array

from loka_jax import xla
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import (
    ActivationName,
    Epilogue,
    Normed,
    NormName,
    NormResiduals,
    NormVectors,
    Outputs,
    bounded_scale_inv,
)
from loka_jax.ops import kernels
from loka_jax.ops.plan import Out, Plan, hand_over, training_outputs
from loka_jax.ops.products import Products, SiteOperand, takes_handed
from loka_jax.recipe import Cast, Recipe
from loka_jax.scaling import DelayedScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSite:
    """What is static of a site that kernels run.

    Attributes:
        recipe: the casts of each role.
        norm, activation, epsilon: what follows the product.
        out: in which form the activations leave.
        plan: which kernels run.
        is_pallas_asked: refuse a backward pass that no kernel serves.
        axis_names: mesh axes over which rows are spread.
        interpret: how to interpret the kernels on a CPU.
    """

    recipe: Recipe
    norm: NormName
    activation: ActivationName
    epsilon: float
    out: Out
    plan: Plan
    is_pallas_asked: bool
    axis_names: tuple[str, ...]
    interpret: Any

    def products_of(self, sizes: tuple[int, int, int]) -> Products:
        """Returns the products of a site of sizes (m, k, n)."""
        return Products(self.recipe, sizes, self.axis_names)

    def backward_products(self, sizes: tuple[int, int, int]) -> Products:
        """Returns them as the backward pass runs them."""
        products = self.products_of(sizes)
        if not self.plan.is_dlhs_wide:
            return products
        return products._replace(recipe=dataclasses.replace(self.recipe, dlhs=None))

    def read(self, products: Products, given, handed, state):
        """Returns lhs and rhs as the products read them."""
        rhs = products.read("rhs", given["rhs"], state)
        if handed is None or not takes_handed(self.recipe, *products.sizes):
            return self._read_rows(products, given["lhs"], state), rhs
        handed = Fp8Array(*handed)
        return products.read("lhs", given["lhs"], state, handed=handed), rhs

    def _read_rows(self, products: Products, x, state) -> SiteOperand:
        """Returns an lhs that was not handed over, quantized by a kernel if one can.

        It takes two thirds of the time of XLA's cast (measured on an H200).
        """
        cast = products.cast("fwd", "lhs")
        if cast is None or not kernels.quantizes(*x.shape):
            return products.read("lhs", x, state)
        if cast.granularity == "rowwise":
            rows, _ = kernels.quantize(x, interpret=self.interpret)
            return products.read("lhs", x, state, handed=rows)
        if cast.scaling != "delayed" or not self.recipe.scales_initialized:
            return products.read("lhs", x, state)
        scale_inv = products.stored_scale_inv("lhs", cast, state)
        copy, amaxes = kernels.quantize(x, scale_inv, interpret=self.interpret)
        assert amaxes is not None
        return products.given(x, copy, amaxes)

    def forward(
        self, products: Products, lhs: SiteOperand, rhs: SiteOperand, given, want
    ) -> Normed:
        """Returns what the kernels of the forward pass write."""
        vectors, y_scale_inv = _vectors(given), None
        if want.y_fp8 == "tensorwise":
            n, (_, gamma, beta) = products.sizes[2], vectors
            y_scale_inv = bounded_scale_inv(self.norm, n, gamma, beta)
        static = dict(self._static, want=want)
        if self.plan.forward == "fused":
            x, w = products.view("fwd", "lhs", lhs), products.view("fwd", "rhs", rhs)
            return kernels.dense_norm(x, w, vectors, y_scale_inv, **static)
        dtype = self.recipe.compute_dtype
        z, scales = products.multiply_unscaled("fwd", lhs, rhs, out_dtype=dtype)
        return kernels.norm_quantize(z, scales, vectors, y_scale_inv, **static)

    def backward(self, products: Products, dy, kept: "_Kept") -> "_Backward":
        """Returns the gradients of all but rhs, and that of z as products read it."""
        if self.plan.backward == "xla":
            return self._backward_by_xla(products, dy, kept)
        cast = self._known_cast(products)
        if cast is not None:
            return self._backward_under_known_scale(products, cast, dy, kept)
        gemm = products.gemm("dlhs")
        found = kernels.norm_backward(
            dy,
            kept.residuals,
            kept.affine,
            dz_fp8=None if gemm is None else E4M3,
            **self._static,
        )
        g = self._read_g(products, found.dz, kept.state)
        if gemm is None:
            dlhs = products.multiply("dlhs", g, kept.rhs, out_dtype=dy.dtype)
            return _Backward(dlhs, g, found.dgamma, found.dbeta)
        weight = products.view("dlhs", "rhs", kept.rhs)
        assert isinstance(weight, Fp8Array) and found.dz_fp8 is not None
        accumulation = dict(fast_accumulation=gemm.fast_accumulation)
        dlhs = xla.fp8_matmul(found.dz_fp8, weight, out_dtype=dy.dtype, **accumulation)
        return _Backward(dlhs, g, found.dgamma, found.dbeta)

    def _known_cast(self, products: Products) -> Cast | None:
        """Returns the cast of g whose scale is known before g is, if there is one."""
        if not self.recipe.scales_initialized:
            return None
        casts = (products.cast(role, "g") for role in ("dlhs", "drhs"))
        return next((c for c in casts if c and c.scaling == "delayed"), None)

    def _backward_under_known_scale(
        self, products: Products, cast: Cast, dy, kept: "_Kept"
    ):
        scale_inv = products.stored_scale_inv("g", cast, kept.state)
        found = kernels.norm_backward(
            dy,
            kept.residuals,
            kept.affine,
            scale_inv,
            dz_fp8=cast.dtype,
            **self._static,
        )
        assert found.dz_fp8 is not None and found.dz_amax is not None
        g = products.given(found.dz, found.dz_fp8, found.dz_amax)
        dlhs = products.multiply("dlhs", g, kept.rhs, out_dtype=dy.dtype)
        return _Backward(dlhs, g, found.dgamma, found.dbeta)

    def _backward_by_xla(self, products: Products, dy, kept: "_Kept"):
        epilogue = self._static["epilogue"]
        dz, dgamma, dbeta = xla.norm_backward(
            dy, kept.residuals, kept.affine, epilogue=epilogue
        )
        g = products.read("g", dz.astype(dy.dtype), kept.state)
        dlhs = products.multiply("dlhs", g, kept.rhs, out_dtype=dy.dtype)
        return _Backward(dlhs, g, dgamma, dbeta)

    def _read_g(self, products: Products, dz, state) -> SiteOperand:
        """Returns g for drhs and for a wide dlhs.

        Before delayed scales are set it is measured even if no product here reads its
        scale: another plan may go on from there.
        """
        if not self.recipe.scales_initialized:
            products = self.products_of(products.sizes)
            return products.read("g", dz, state)
        return products.read("g", dz, state, roles=("drhs",))

    @property
    def _static(self) -> dict[str, Any]:
        epilogue = Epilogue(self.norm, self.activation, self.epsilon)
        return dict(epilogue=epilogue, interpret=self.interpret)


class _Kept(NamedTuple):
    """What the backward pass has of the forward pass."""

    lhs: SiteOperand
    rhs: SiteOperand
    vectors: NormVectors
    residuals: NormResiduals
    state: DelayedScaling | None

    @property
    def affine(self) -> NormVectors:
        """gamma and beta."""
        return self.vectors._replace(bias=None)


class _Backward(NamedTuple):
    """Gradients of a site; None for what it has not."""

    lhs: Array
    g: SiteOperand
    gamma: Array | None
    beta: Array | None


# What is in FP8 goes in and out as data and scale_inv: on its way through an operation
# with a gradient of its own, JAX puts other things than arrays into containers.
@functools.partial(custom_vjp, nondiff_argnums=(0,))
def run(
    site: KernelSite,
    given: dict[str, Array],
    handed: tuple[Array, Array] | None,
    state: DelayedScaling | None,
) -> tuple[Array, ...]:
    """Returns y, and if the site hands FP8 over, its data and `scale_inv`.

    Args:
        site: the static side.
        given: lhs, rhs, and of bias, gamma and beta those there are.
        handed: the FP8 form of lhs, if it came with one.
        state: delayed-scaling state; its gradient is its next value.
    """
    products = site.products_of(_sizes(given["lhs"], given["rhs"]))
    lhs, rhs = site.read(products, given, handed, state)
    scaling = None if site.out == "compute" else hand_over(site.norm)
    want = Outputs(y=site.out != "fp8", y_fp8=scaling)
    return _out(site.forward(products, lhs, rhs, given, want))


def _vectors(given) -> NormVectors:
    return NormVectors(*(given.get(name) for name in NormVectors._fields))


def _sizes(lhs, rhs) -> tuple[int, int, int]:
    return lhs.shape[0], lhs.shape[1], rhs.shape[1]


def _out(normed: Normed) -> tuple[Array, ...]:
    """Returns y, and what was written in FP8."""
    if normed.y_fp8 is None:
        assert normed.y is not None
        return (normed.y,)
    # In place of y, which only a drhs would read: the next site's, where this one is
    # not differentiated.
    y = normed.y_fp8.dequantize(jnp.bfloat16) if normed.y is None else normed.y
    return y, normed.y_fp8.data, normed.y_fp8.scale_inv


def _forward(site: KernelSite, given, handed, state):
    if site.is_pallas_asked and site.plan.backward == "xla":
        raise ValueError(
            "implementation='pallas' does not serve the backward pass: "
            f"{site.plan.why_not_backward}."
        )
    products = site.products_of(_sizes(given["lhs"], given["rhs"]))
    lhs, rhs = site.read(products, given, handed, state)
    want = training_outputs(site.recipe, *products.sizes, site.norm, site.out)
    normed = site.forward(products, lhs, rhs, given, want)
    assert normed.xhat is not None
    products = site.backward_products(products.sizes)
    kept = _Kept(
        lhs=products.keep("lhs", lhs),
        rhs=products.keep("rhs", rhs),
        vectors=_vectors(given),
        residuals=NormResiduals(normed.xhat, normed.rstd),
        state=state,
    )
    return _out(normed), kept


def _backward(site: KernelSite, kept: _Kept, gradients):
    products = site.backward_products(_sizes(kept.lhs, kept.rhs))
    dy, *_ = gradients
    found = site.backward(products, dy, kept)
    lhs, g = products.reread(kept.lhs, kept.state), found.g
    drhs = products.multiply("drhs", lhs, g, out_dtype=kept.rhs.dtype)
    given = {"lhs": found.lhs, "rhs": drhs, "gamma": found.gamma, "beta": found.beta}
    if kept.vectors.bias is not None:
        assert g.value is not None
        given["bias"] = jnp.sum(g.value, axis=0, dtype=jnp.float32)
    given = {name: x for name, x in given.items() if x is not None}
    products = site.products_of(products.sizes)
    return given, None, products.next_state(kept.state, lhs, kept.rhs, g)


run.defvjp(_forward, _backward)
