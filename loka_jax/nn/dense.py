"""A dense layer whose GEMMs follow a recipe, and an FP8 product for any Flax layer.

Delayed scaling keeps its state in the collection `_overwrite_with_gradient`, one small
pytree a site. As in Flax's own FP8 operations its "gradient" is its next value:
differentiate with respect to the collection, then replace it. `nn.overwriting` lets
any optax optimizer do so; Flax's `TrainState` does it by itself.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen
from jax.interpreters.ad import JVPTracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import scaling, xla
from loka_jax.group import Group
from loka_jax.nn.batched import announce_batched, in_high_precision
from loka_jax.nn.context import current
from loka_jax.nn.explicit_axes import run_in_auto
from loka_jax.nn.observed import site_tap
from loka_jax.nn.scale_state import read_scaling
from loka_jax.nn.sites import announce
from loka_jax.ops.device import local_device
from loka_jax.ops.mesh_axes import manual_axes
from loka_jax.ops.plan import KernelPlan, resolve
from loka_jax.ops.products import Activations
from loka_jax.ops.run_site import SiteArrays, run_site
from loka_jax.recipe import Recipe
from loka_jax.site import BF16, SiteSpec

default_kernel_init = linen.initializers.lecun_normal()


class Dense(linen.Module):
    """A dense layer, `y = x W + b`, its three GEMMs in the recipe's precision.

    The kernel is a float32 master weight of shape (in, features), as Flax's, so that
    checkpoints can be exchanged. The result has the recipe's compute dtype.

    Attributes:
        features: width of the output.
        recipe: a name of `recipe.RECIPES`, or a `Recipe`.
        axis_names: mesh axes over which rows are spread, under `shard_map` only.
        group: as in `nn.Site`.
    """

    features: int
    recipe: str | Recipe = "fp8_tensorwise"
    use_bias: bool = True
    kernel_init: Callable = default_kernel_init
    bias_init: Callable = linen.initializers.zeros_init()
    axis_names: tuple[str, ...] = ()
    group: Group | None = None

    @linen.compact
    def __call__(
        self, inputs: Float[Array, "... k"] | tuple[Float[Array, "... _"], ...]
    ) -> Float[Array, "... n"]:
        """Returns `inputs @ kernel + bias` over the last dim.

        Args:
            inputs: an array, or parts of one. In high precision each part is multiplied
                by itself, so that nothing is concatenated, nor gradients split.
        """
        parts = inputs if isinstance(inputs, tuple) else (inputs,)
        kernel, bias = dense_parameters(self, sum(x.shape[-1] for x in parts))
        rows = tuple(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in parts)
        out = site_product(self, rows, kernel, group=self.group)
        if bias is not None:
            # In float32: else the bias's gradient would be summed in bfloat16.
            out = (out.astype(jnp.float32) + bias[None, :]).astype(out.dtype)
        return out.reshape(*parts[0].shape[:-1], self.features)


class SiteVariables(NamedTuple):
    """The variables of a dense layer; None for an absent one."""

    kernel: Float[Array, "k n"]
    bias: Float[Array, "n"] | None
    state: scaling.DelayedScaling | None


class DenseVariables(Dense):
    """The variables of a `Dense` that runs in its group, by the same names."""

    @linen.compact
    def __call__(self, plan: KernelPlan) -> SiteVariables:
        """Returns the variables of a site, and announces it."""
        announce(self, plan, group=self.group)
        kernel, bias = dense_parameters(self, plan.spec.k)
        return SiteVariables(kernel, bias, with_state(self, plan, kernel)[1])


def dense_parameters(module: Dense, k: int) -> tuple[Array, Array | None]:
    """Returns the kernel and the bias of a layer, None without one."""
    features = module.features
    kernel = module.param("kernel", module.kernel_init, (k, features), jnp.float32)
    if not module.use_bias:
        return kernel, None
    return kernel, module.param("bias", module.bias_init, (features,), jnp.float32)


class Fp8DotGeneral(linen.Module):
    """A `dot_general` in the recipe's precision, for any Flax layer that takes one.

    `flax.linen.Dense(64, dot_general_cls=Fp8DotGeneral)`; another recipe through
    `functools.partial(Fp8DotGeneral, recipe="fp8_rowwise")`.

    Products with batch dims run in the operands' dtype, as `list_sites` reports.

    Attributes:
        recipe: a name of `recipe.RECIPES`, or a `Recipe`.
        axis_names: mesh axes over which lhs is spread, under `shard_map` only.
    """

    recipe: str | Recipe = "fp8_tensorwise"
    axis_names: tuple[str, ...] = ()

    @linen.compact
    def __call__(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        dimension_numbers: jax.lax.DotDimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Float[Array, "..."]:
        """Returns `jax.lax.dot_general` of the operands, in their common dtype.

        `precision` applies to batched products only.
        """
        return product(
            self, lhs, rhs, dimension_numbers, precision, preferred_element_type
        )


def product(
    module: Any,
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers: jax.lax.DotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    **attributes: Any,
) -> Float[Array, "..."]:
    """Returns a `jax.lax.dot_general` that is a site, as `Fp8DotGeneral` does.

    Args:
        module: of the site, with `recipe` and `axis_names`.
        lhs, rhs, dimension_numbers, precision, preferred_element_type: as of
            `jax.lax.dot_general`; precision is that of batched products only.
        attributes: further attributes of `Site`, of a product without batch dims.
    """
    operands = jnp.result_type(lhs, rhs)
    out_dtype = preferred_element_type or operands
    (lhs_dims, rhs_dims), (batch_dims, _) = dimension_numbers
    if not jnp.issubdtype(operands, jnp.floating):
        return _left(module, lhs, rhs, dimension_numbers, precision, out_dtype)
    if batch_dims:
        out = jax.lax.dot_general(lhs, rhs, dimension_numbers, precision, out_dtype)
        batch, m, k, n = _sizes(lhs, rhs, dimension_numbers)
        announce_batched(module, batch, SiteSpec(m=m, k=k, n=n))
        return out
    lhs_rows, lhs_shape = as_matrix(lhs, lhs_dims, contract_last=True)
    rhs_columns, rhs_shape = as_matrix(rhs, rhs_dims, contract_last=False)
    out = site_product(module, (lhs_rows,), rhs_columns, **attributes)
    return out.reshape(*lhs_shape, *rhs_shape).astype(out_dtype)


def _left(module: Any, lhs, rhs, dimension_numbers, precision, out_dtype) -> Array:
    """Returns a product as written, whose operands have no form in FP8."""
    _, m, k, n = _sizes(lhs, rhs, dimension_numbers)
    why_left = f"in {jnp.result_type(lhs, rhs)}, which FP8 has no form of"
    plan = resolve(SiteSpec(m=m, k=k, n=n), BF16, local_device())
    announce(module, plan, left=why_left)
    return jax.lax.dot_general(lhs, rhs, dimension_numbers, precision, out_dtype)


def planned(module: Any, spec: SiteSpec) -> KernelPlan:
    """Returns the plan of a module's site, which XLA runs."""
    return current().plan("/".join(module.path), spec, module.recipe, "xla")


def site_product(
    module: Any, parts: tuple[Array, ...], rhs: Array, **attributes
) -> Array:
    """Returns the product of a module's site by itself, of the parts of its lhs."""
    m, (k, n) = parts[0].shape[0], rhs.shape
    plan = planned(module, SiteSpec(m=m, k=k, n=n))
    announce(module, plan, **attributes)
    is_whole = plan.choice.is_fp8 or current().observer is not None
    if is_whole and len(parts) > 1:
        parts = (jnp.concatenate(parts, axis=1),)
    out, start = None, 0
    for lhs in parts:
        end = start + lhs.shape[1]
        own = dataclasses.replace(plan, spec=SiteSpec(m=m, k=end - start, n=n))
        product = run_planned(module, own, SiteArrays(lhs, rhs[start:end]))
        assert isinstance(product, jax.Array)
        out, start = product if out is None else out + product, end
    assert out is not None
    return out


# Layers alike are traced, differentiated and lowered once, as JAX's cache finds them.
_run_alike = jax.jit(run_site, static_argnames=("plan", "epsilon", "axis_names"))


def run_planned(
    module: Any, plan: KernelPlan, arrays: SiteArrays, **options
) -> Array | Activations:
    """Runs a site with the module's scaling state, observed by Probe."""
    _check_not_forward_mode(module, arrays)
    plan, state = with_state(module, plan, arrays.rhs)
    axis_names = _bound_axes(module)
    observe = site_tap(module, plan, state, axis_names)

    def run(arrays, state, observe):
        if observe is None:
            return _run_alike(plan, arrays, state, axis_names=axis_names, **options)
        return run_site(
            plan, arrays, state, axis_names=axis_names, observe=observe, **options
        )

    lhs = arrays.lhs.y if isinstance(arrays.lhs, Activations) else arrays.lhs
    return run_in_auto(run, lhs, arrays.rhs, arrays, state, observe)


def _check_not_forward_mode(module: Any, arrays: SiteArrays) -> None:
    """Refuses forward-mode derivatives, of which JAX's own error names no site."""
    for x in jax.tree.leaves(arrays):
        while hasattr(x, "val"):  # of vmap
            x = x.val
        if isinstance(x, JVPTracer):
            raise ValueError(
                f"site {'/'.join(module.path)!r} has no derivatives in forward mode "
                "(jax.jvp, jax.jacfwd): use reverse mode, jax.grad, jax.vjp or "
                "jax.jacrev, of which forward mode may be taken, as by jax.hessian; or "
                "the model as written."
            )


def _bound_axes(module: Any) -> tuple[str, ...]:
    """Returns the mesh axes of a module; none where `init` is outside of the mesh."""
    if manual_axes() or not module.is_initializing():
        return module.axis_names
    return ()


def with_state(
    module: Any, plan: KernelPlan, weight: Array
) -> tuple[KernelPlan, scaling.DelayedScaling | None]:
    """Returns the scaling state of a site, and the plan that goes with it.

    A weight (k, n) that can never be multiplied in FP8 gets no state. The batch size
    does not decide that: models are often initialized with one row.
    """
    recipe, spec = plan.choice.recipe, plan.spec
    if not recipe.is_delayed:
        return plan, None
    if not weight_has_fp8(spec.k, spec.n):
        choice = dataclasses.replace(plan.choice, recipe=in_high_precision(recipe))
        return dataclasses.replace(plan, choice=choice), None
    return plan, read_scaling(module, recipe, weight)


def weight_has_fp8(k: int, n: int) -> bool:
    """Returns True if a weight (k, n) can be multiplied in FP8, by enough rows."""
    return xla.why_not(_ANY_BATCH, k, n) is None


_ANY_BATCH = 16  # a number of rows that FP8 allows


def as_matrix(x: Array, dims, *, contract_last: bool):
    """Returns `x` as (kept, contracted), or the reverse, and the kept shape."""
    kept = [i for i in range(x.ndim) if i not in dims]
    order = (*kept, *dims) if contract_last else (*dims, *kept)
    kept_shape = tuple(x.shape[i] for i in kept)
    k, rest = math.prod(x.shape[i] for i in dims), math.prod(kept_shape)
    shape = (rest, k) if contract_last else (k, rest)
    # An operation that does nothing takes time to trace.
    if order != tuple(range(x.ndim)):
        x = x.transpose(order)
    return x if x.shape == shape else x.reshape(shape), kept_shape


def _sizes(lhs, rhs, dimension_numbers) -> tuple[int, int, int, int]:
    """Returns the number of products, and m, k and n of each."""
    (lhs_dims, rhs_dims), (lhs_batch, rhs_batch) = dimension_numbers
    batch = math.prod(lhs.shape[i] for i in lhs_batch)
    k = math.prod(lhs.shape[i] for i in lhs_dims)
    return batch, _kept(lhs, lhs_dims, lhs_batch), k, _kept(rhs, rhs_dims, rhs_batch)


def _kept(x: Array, dims, batch_dims) -> int:
    """Returns the size of the dims that are neither contracted nor of the batch."""
    others = (*dims, *batch_dims)
    return math.prod(size for i, size in enumerate(x.shape) if i not in others)
