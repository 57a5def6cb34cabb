"""A whole site as one differentiable operation: product, norm, activation, FP8.

    y = activation(gamma norm(lhs @ rhs + bias) + beta)

XLA runs it as the three products of `matmul.py` with the norm differentiated by JAX;
`kernel_site.py` runs it by Pallas kernels. `plan.resolve` decides which.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8, xla
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.mapped import equally_varying
from loka_jax.normed import NormVectors, bounded_scale_inv
from loka_jax.ops.kernel_site import KernelRun, run
from loka_jax.ops.matmul import matmul
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.products import Activations, read_state
from loka_jax.scaling import DelayedScaling


class SiteArrays(NamedTuple):
    """The operands and parameters of a site; None for an absent parameter.

    Attributes:
        lhs: rows in any dtype, or activations in FP8 from another site.
        gamma, beta: factor and summand after the norm ("layer" and "rms" only).
    """

    lhs: Float[Array, "*rows k"] | Activations
    rhs: Float[Array, "k n"]
    bias: Float[Array, "n"] | None = None
    gamma: Float[Array, "n"] | None = None
    beta: Float[Array, "n"] | None = None


def run_site(
    plan: KernelPlan,
    arrays: SiteArrays,
    state: DelayedScaling | None = None,
    *,
    epsilon: float = 1e-6,
    axis_names: tuple[str, ...] = (),
    observe: Callable[[Array, Array, Array], Array] | None = None,
) -> Float[Array, "*rows n"] | Activations:
    """Returns `activation(gamma norm(lhs @ rhs + bias) + beta)`.

    Differentiable in all arrays; gradients have their operands' dtypes. The gradient
    with respect to `state` is its value for the next step, as in `matmul`.

    Args:
        state: delayed-scaling state if the recipe is delayed, else None.
        axis_names: mesh axes over which rows are spread, under `shard_map`.
        observe: a function of the product, lhs and rhs that returns the product; it
            makes XLA run the site, since kernels do not write their product.

    Returns:
        an array in the compute dtype if `plan.spec.out` is "compute"; for "fp8" the FP8
        form, whose `y` is exact only where it is differentiated; for "both" the FP8
        form with an exact `y`.

    Raises:
        ValueError: if the plan's choice cannot run; if the recipe needs a state and
            there is none, or the reverse; if gamma or beta are given to a norm without
            parameters.
    """
    spec, recipe = plan.spec, plan.choice.recipe
    _check(plan, arrays)
    lhs, rhs, *vectors = arrays
    leading = lhs.shape[:-1]
    rows = lhs.reshape(spec.m, spec.k)
    if not isinstance(rows, Activations):
        rows = rows.astype(recipe.compute_dtype)
    vectors = [None if v is None else v.astype(jnp.float32) for v in vectors]
    arrays = SiteArrays(rows, rhs, *vectors)
    site = KernelRun(plan, epsilon, axis_names)
    if plan.runs_kernels and observe is None:
        y = _by_kernels(site, arrays, state)
    else:
        y = _by_xla(site, arrays, state, observe)
    return y.reshape(*leading, spec.n)


def _check(plan: KernelPlan, arrays: SiteArrays):
    spec = plan.spec
    if plan.why_not is not None:
        raise ValueError(
            f"{plan.choice.name!r} does not serve lhs ({spec.m}, {spec.k}), rhs "
            f"({spec.k}, {spec.n}) with norm {spec.norm!r}: {plan.why_not}."
        )
    if not spec.has_affine and not (arrays.gamma is None and arrays.beta is None):
        raise ValueError(f"norm {spec.norm!r} takes neither gamma nor beta.")
    scaling = arrays.lhs.scaling if isinstance(arrays.lhs, Activations) else None
    assert scaling == spec.fp8_in, (scaling, spec)


def _by_xla(site: KernelRun, arrays: SiteArrays, state, observe):
    """Runs a site by XLA, its norm differentiated by JAX."""
    plan, spec = site.plan, site.plan.spec
    lhs, rhs, bias, gamma, beta = arrays
    z = matmul(lhs, rhs, state, plan=plan, axis_names=site.axis_names)
    if observe is not None:
        z = observe(z, lhs.y if isinstance(lhs, Activations) else lhs, rhs)
    vectors = NormVectors(bias, gamma, beta)
    epilogue = site.static["epilogue"]
    exact = xla.norm_activation(z, vectors, epilogue=epilogue)
    y = exact.astype(plan.recipe.compute_dtype)
    if spec.out == "compute":
        return y
    exact = jax.lax.stop_gradient(exact)
    if spec.fp8_out == "rowwise":
        return Activations(y, fp8.quantize(exact, E4M3, axes=(1,)))
    scale_inv = bounded_scale_inv(epilogue, spec.n, gamma, beta)
    return Activations(y, fp8.cast(exact, jax.lax.stop_gradient(scale_inv), E4M3))


def _by_kernels(site: KernelRun, arrays: SiteArrays, state):
    """Runs a site by kernels, on padded rows if they need that.

    Padding is zeros in both passes, which add nothing to the gradients of the weights.
    """
    state = read_state(site.plan.choice.recipe, state)
    m, padding = site.plan.spec.m, site.plan.padding
    lhs, fp8_lhs = arrays.lhs, None
    if isinstance(lhs, Activations):
        fp8_lhs, lhs = (lhs.fp8.data, lhs.fp8.scale_inv), lhs.y
    if padding:
        lhs = _pad_rows(lhs, padding, 0.0)
    if padding and fp8_lhs is not None:
        data, scale_inv = fp8_lhs
        if scale_inv.ndim:
            scale_inv = _pad_rows(scale_inv, padding, 1.0)
        fp8_lhs = _pad_rows(data, padding, 0.0), scale_inv
    operands = arrays._replace(lhs=lhs)._asdict()
    present = {name: x for name, x in operands.items() if x is not None}
    varying = equally_varying(*present.values())
    present = dict(zip(present, varying, strict=True))
    out: Any = run(site, present, fp8_lhs, state)
    y, *y_fp8 = out
    if not y_fp8:
        return y[:m]
    # The FP8 form has no gradient: gradients flow through y.
    data, scale_inv = (jax.lax.stop_gradient(x) for x in y_fp8)
    scale_inv = scale_inv[:m] if scale_inv.ndim else scale_inv
    return Activations(y[:m], Fp8Array(data[:m], scale_inv))


def _pad_rows(x, missing: int, value: float):
    return jnp.pad(x, ((0, missing), (0, 0)), constant_values=value)
