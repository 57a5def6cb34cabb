"""The differentiable product of a site, its three GEMMs each in its own precision.

For lhs (M, K), rhs (K, N), and the gradient g (M, N) of `out`:

    fwd    out  = lhs   @ rhs
    dlhs   dlhs = g     @ rhs^T
    drhs   drhs = lhs^T @ g

Delayed scaling is state that only the backward pass can complete, since it needs the
amax of g. So the state is an input whose "gradient" is its new value, as in Flax's FP8
operations: differentiate with respect to it, then replace it.
"""

import functools

import jax
from jaxtyping import Array, Float

from loka_jax.fp8 import Fp8Array
from loka_jax.mapped import equally_varying
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.products import Activations, Products, read_state
from loka_jax.scaling import DelayedScaling


def matmul(
    lhs: Float[Array, "m k"] | Activations,
    rhs: Float[Array, "k n"],
    state: DelayedScaling | None = None,
    *,
    plan: KernelPlan,
    axis_names: tuple[str, ...] = (),
) -> Float[Array, "m n"]:
    """Returns `lhs @ rhs` in the recipe's precision and compute dtype.

    Differentiable in lhs and rhs; gradients have their operands' dtypes. The gradient
    with respect to `state` is its value for the next step; of several calls, the
    maximum.

    Args:
        lhs: usually activations. If another site handed them on in FP8, fwd reads that
            form where the recipe allows it.
        state: delayed-scaling state if the recipe is delayed, else None.
        plan: of the site; its Pallas kernels are not run here.
        axis_names: mesh axes (under `shard_map`) over which rows are spread: scales of
            whole tensors and the state then agree on all devices. The gradient of an
            rhs that the devices share is their sum if `shard_map` tracks varying values
            (`check_vma`, the default), and each device's part of it if not.

    Raises:
        ValueError: if the recipe needs a state and there is none, or the reverse.
    """
    state = read_state(plan.choice.recipe, state)
    fp8_lhs = None
    if isinstance(lhs, Activations):
        lhs, fp8_lhs = lhs.y, (lhs.fp8.data, lhs.fp8.scale_inv)
    lhs, rhs = equally_varying(lhs, rhs)
    return _matmul(lhs, rhs, state, fp8_lhs, Products.of(plan, axis_names))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _matmul(lhs, rhs, state, fp8_lhs, products: Products):
    return _forward(lhs, rhs, state, fp8_lhs, products)[0]


def _forward(lhs, rhs, state, fp8_lhs, products: Products):
    handed = None
    if fp8_lhs is not None and products.plan.reads_fp8:
        handed = Fp8Array(*fp8_lhs)
    lhs = products.read("lhs", lhs, state, handed=handed)
    rhs = products.read("rhs", rhs, state)
    out = products.multiply("fwd", lhs, rhs, out_dtype=products.recipe.compute_dtype)
    return out, (products.keep("lhs", lhs), products.keep("rhs", rhs), state)


def _backward(products: Products, residuals, g):
    lhs, rhs, state = residuals
    lhs, g = products.reread(lhs, state), products.read("g", g, state)
    dlhs = products.multiply("dlhs", g, rhs, out_dtype=lhs.dtype)
    drhs = products.multiply("drhs", lhs, g, out_dtype=rhs.dtype)
    return dlhs, drhs, products.next_state(state, lhs, rhs, g), None


_matmul.defvjp(_forward, _backward)
