"""Wide dense layers in a row as one operation: products, and a tail in one pass each.

    forward     z = x W    y = activation(norm(z + b)), the x of the next layer
    backward    dz from dy    dW = x^T dz    dx = dz W^T, the dy of the layer before

The first x may be a norm of the rows that are given.

Of layers thousands of features wide the products take FP8's full gain, if what lies
between them takes no more than one pass each way. The tail applies the scales of the
product before it, and writes what is read next in the forms that the recipe asks for:
in FP8, as it is and transposed for dW, under a scale that is known beforehand (from
earlier steps, or the bound of a block norm), or in bfloat16. In bfloat16 the same
passes run without FP8.

The weights are cast once a step, in both layouts and in one pass.

Sizes that are no multiples of 16 are padded with zeros by the passes that cast: no norm
or gradient sees them.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import triton
from loka_jax.fp8 import E4M3
from loka_jax.normed import Epilogue, NormName, NormResiduals, bounded_scale_inv
from loka_jax.ops.kernels import equally_varying
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.tailed_products import Site, Tailed, read_states, why_not_tailed
from loka_jax.scaling import DelayedScaling
from loka_jax.tails import Forms, Scaled, Written
from loka_jax.triton import norm_tail
from loka_jax.xla.matmul import cut
from loka_jax.xla.tails import decode

# The least size of a product of which a run of layers has one; narrow layers alone are
# left to kernels that multiply and normalize at once.
WIDE = 1024


class WideLayer(NamedTuple):
    """The parameters of a layer.

    Attributes:
        kernel: float32 (k, n).
        bias: float32 `[n]`, added before the norm; None if absent.
    """

    kernel: Float[Array, "k n"]
    bias: Float[Array, "n"] | None = None


def why_not(plan: KernelPlan) -> str | None:
    """Returns why a site is not a layer of this operation, or None if it is.

    Args:
        plan: of the site.
    """
    spec = plan.spec
    if spec.fp8_in is not None or spec.out != "compute":
        return "it hands FP8 on, or takes it"
    return (
        why_not_tailed([plan])
        or norm_tail.why_not(spec.m, spec.k, norm="none")
        or norm_tail.why_not(spec.m, spec.n, norm=spec.norm)
    )


def wide_runs(plans: Sequence[KernelPlan]) -> list[range]:
    """Returns the layers that run as one operation: in a row, and one of them wide.

    Args:
        plans: of an MLP's layers.
    """
    runs = []
    for is_served, group in itertools.groupby(
        range(len(plans)), lambda i: why_not(plans[i]) is None
    ):
        layers = list(group)
        specs = [plans[i].spec for i in layers]
        if is_served and any(max(spec.k, spec.n) >= WIDE for spec in specs):
            runs.append(range(layers[0], layers[-1] + 1))
    return runs


def wide_stack(
    x: Float[Array, "m k"],
    layers: tuple[WideLayer, ...],
    states: tuple[DelayedScaling | None, ...],
    *,
    plans: tuple[KernelPlan, ...],
    input_norm: NormName = "none",
    axis_names: tuple[str, ...] = (),
    implementation: triton.Implementation | None = None,
) -> Float[Array, "m n"]:
    """Returns the activations of the last layer, in bfloat16.

    Differentiable in x and the layers; gradients have their dtypes. The gradient with
    respect to `states` is their values for the next step, as in `matmul`.

    Each product runs in FP8 or in bfloat16 as the recipe of its layer says.

    Args:
        x: rows, cast to bfloat16.
        layers: the parameters.
        states: of the layers, for recipes with delayed scaling, else None.
        plans: of the layers, with what follows their products.
        input_norm: of the rows before the first product: "block" or "none".
        axis_names: mesh axes over which rows are spread, under `shard_map`.
        implementation: of the tails: "triton" requires its kernels; "xla"; None is
            Triton if it is installed and the GPU is a Hopper, else XLA.

    Raises:
        ValueError: if a layer is not served (see `why_not`), if Triton is required and
            is not installed, or if a state is missing.
    """
    check(plans)
    m, k = x.shape
    reason = norm_tail.why_not(m, k, norm=input_norm)
    if reason is not None:
        raise ValueError(f"wide_stack: {reason}.")
    tailed = Tailed(plans, axis_names, triton.chosen(implementation, None))
    stack = _Stack(tailed, input_norm)
    states = read_states(plans, states)
    arrays, tree = jax.tree.flatten((x.astype(jnp.bfloat16), layers))
    return _run(stack, *jax.tree.unflatten(tree, equally_varying(*arrays)), states)


def check(plans: tuple[KernelPlan, ...]):
    """Raises a ValueError if a layer is not served (see `why_not`)."""
    for plan in plans:
        reason = why_not(plan)
        if reason is not None:
            raise ValueError(f"wide_stack: {plan.spec}: {reason}.")


class _Stack(NamedTuple):
    """The static arguments.

    Attributes:
        tailed: of the products and tails.
        input_norm: of the rows before the first product.
    """

    tailed: Tailed
    input_norm: NormName


class Kept(NamedTuple):
    """What the backward pass reads of a layer's forward pass.

    `residuals` are None where nothing follows the product.
    """

    lhs: Written
    rhs: Written
    residuals: NormResiduals | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(stack: _Stack, x, layers, states):
    return _whole(stack, x, layers, states, keep=False)[0]


def _forward(stack: _Stack, x, layers, states):
    y, residuals = _whole(stack, x, layers, states, keep=True)
    return y, (biases_of(layers), states, residuals)


def _whole(stack: _Stack, x, layers, states, *, keep: bool):
    """Returns the activations of the last layer, and what backward reads."""
    first = stack.tailed.sites(states)[0]
    lhs, of_input = _input(Epilogue(stack.input_norm), first, Scaled(x), keep=keep)
    y, kept = propagate(stack.tailed, lhs, layers, states, keep=keep)
    return y, (of_input, kept)


def _backward(stack: _Stack, residuals, dy):
    biases, states, (of_input, kept) = residuals
    d, *gradients = pull_back(stack.tailed, kept, biases, states, dy)
    shape = stack.tailed.sites(states)[0].shape("lhs")
    if of_input is None:
        return cut(decode(d), shape).astype(dy.dtype), *gradients
    static = dict(epilogue=Epilogue(stack.input_norm), want=Forms(shape=shape))
    dx = stack.tailed.tail("norm_tail_backward", d, None, of_input, static=static)
    return dx.dz.bf16, *gradients


_run.defvjp(_forward, _backward)


def biases_of(layers: tuple[WideLayer, ...]) -> tuple[Array | None, ...]:
    """Returns the bias of each layer."""
    return tuple(layer.bias for layer in layers)


def propagate(
    stack: Tailed, x: Written, layers: tuple[WideLayer, ...], states, *, keep: bool
) -> tuple[Float[Array, "m n"], tuple[Kept, ...]]:
    """Returns the activations of the last layer, and what backward reads.

    Args:
        stack: the static arguments; its plans are those of the layers.
        x: rows, as the first product reads them.
        layers, states: of the stack.
        keep: for the backward pass, too.
    """
    sites, y, kept = stack.sites(states), x, []
    readers = (*sites[1:], None)
    for i, (site, layer) in enumerate(zip(sites, layers, strict=True)):
        epilogue = _epilogue(site)
        lhs, rhs = y, site.weight(layer.kernel, keep=keep)
        if not keep and (handed := _handed(site, readers[i], lhs, rhs, layer.bias)):
            y = handed
            continue
        z = site.multiply("fwd", lhs, rhs)
        if readers[i] is None and _is_nothing(epilogue):
            y, residuals = _unscaled_end(z, layer.bias, site.shape("g")), None
        else:
            xhat = _xhat(site) if keep else None
            tail = _Tail(site.run, epilogue, xhat, site.shape("g"))
            y, residuals = tail(readers[i], z, layer.bias)
        kept.append(Kept(lhs, rhs, residuals))
    assert y.bf16 is not None
    return y.bf16, tuple(kept)


def pull_back(
    stack: Tailed,
    kept: tuple[Kept, ...],
    biases: tuple[Array | None, ...],
    states,
    dy: Float[Array, "m n"],
    *,
    to_fp8: bool = False,
) -> tuple[Scaled, tuple[WideLayer, ...], tuple[DelayedScaling | None, ...]]:
    """Returns the gradients of the rows and of the layers, and the next states.

    Args:
        stack: the static arguments.
        kept: of the forward pass.
        biases, states: of the layers.
        dy: the gradient of the last activations.
        to_fp8: return the gradient of the rows in FP8 if their product runs in FP8.
    """
    d, gradients, next_states = Scaled(dy), [], []
    layers = zip(stack.sites(states), biases, kept, strict=True)
    for i, (site, bias, (lhs, rhs, of_tail)) in reversed(list(enumerate(layers))):
        has_bias = bias is not None
        g, dbias = _gradient(site, _epilogue(site), d, of_tail, has_bias=has_bias)
        gradients.append(WideLayer(site.weight_gradient(lhs, g), dbias))
        next_states.append(site.next_state(lhs, rhs, g))
        multiply = site.multiply_to_fp8 if to_fp8 and i == 0 else site.multiply
        d = multiply("dlhs", g, rhs)
    return d, tuple(reversed(gradients)), tuple(reversed(next_states))


def _handed(
    site: Site, reader: Site | None, lhs: Written, rhs: Written, bias: Array | None
) -> Written | None:
    """Returns activations that a product writes itself, None if a tail does."""
    epilogue = _epilogue(site)
    if reader is None or epilogue.norm != "none":
        return None
    if epilogue.activation not in ("none", "relu"):
        return None
    has_relu = epilogue.activation == "relu"
    return site.hand_on(lhs, rhs, reader, bias, has_relu=has_relu)


def _epilogue(site: Site) -> Epilogue:
    spec = site.products.plan.spec
    return Epilogue(spec.norm, spec.activation)


def _input(
    epilogue: Epilogue, site: Site, x: Scaled, *, keep: bool
) -> tuple[Written, NormResiduals | None]:
    """Returns the normalized rows as the first product reads them."""
    if _is_nothing(epilogue):
        return site.cast("lhs", x, keep=keep), None
    xhat = _xhat(site) if keep else None
    return _Tail(site.run, epilogue, xhat, site.shape("lhs"))(site, x)


def _xhat(site: Site) -> DTypeLike:
    """Returns the dtype that the error of the gradient allows normalized rows."""
    return E4M3 if site.products.recipe.dlhs is not None else jnp.bfloat16


def _unscaled_end(z: Scaled, bias: Array | None, shape: tuple[int, int]) -> Written:
    """Returns the last product; XLA joins this with what reads it."""
    out = cut(decode(z), shape)
    out = out if bias is None else out + bias[None, :]
    return Written(out.astype(jnp.bfloat16), None, None)


class _Tail(NamedTuple):
    """A tail of the forward pass.

    Attributes:
        run: has its provider.
        epilogue: of the tail.
        xhat: dtype of normalized rows for the backward pass; None in inference.
        shape: rows and columns of the activations.
    """

    run: Tailed
    epilogue: Epilogue
    xhat: DTypeLike | None
    shape: tuple[int, int]

    def __call__(
        self, reader: Site | None, z: Scaled, bias: Array | None = None
    ) -> tuple[Written, NormResiduals | None]:
        """Returns what follows a product, as the next one reads it, and residuals."""
        is_kept, epilogue = self.xhat is not None, self.epilogue
        want, scale_inv = Forms(shape=self.shape), None
        if reader is not None:
            want = reader.forms("lhs", keep=is_kept)
            scale_inv = self._scale_inv(reader, want)
        keeps_y = _is_nothing(epilogue) or epilogue == Epilogue("none", "relu")
        xhat = None if keeps_y else self.xhat
        static = dict(epilogue=epilogue, want=want, xhat=xhat)
        y, residuals = self.run.tail(
            *("norm_tail", z, None, bias), static=static, y_scale_inv=scale_inv
        )
        if keeps_y and not _is_nothing(epilogue):
            kept = y.bf16 if y.fp8 is None else y.fp8.data  # of relu signs are enough
            residuals = NormResiduals(kept, None)
        return y, residuals

    def _scale_inv(self, reader: Site, want: Forms) -> Array | None:
        """Returns the scale of the activations in FP8."""
        if want.fp8 is None:
            return None
        if self.epilogue.norm == "block" and jnp.dtype(want.fp8) == jnp.dtype(E4M3):
            return bounded_scale_inv("block", self.shape[1], None, None)
        return reader.scale_inv("lhs")


def _gradient(
    site: Site,
    epilogue: Epilogue,
    d: Scaled,
    residuals: NormResiduals | None,
    *,
    has_bias: bool,
) -> tuple[Written, Array | None]:
    """Returns the gradient of a product, as backward reads it, and that of the bias."""
    if residuals is None:
        rows = cut(decode(d), site.shape("g"))
        dbias = jnp.sum(rows, axis=0) if has_bias else None
        return site.cast("g", d, keep=True), dbias
    want = site.forms("g", keep=True)
    static = dict(epilogue=epilogue, want=want, has_bias=has_bias)
    return site.run.tail(
        *("norm_tail_backward", d, None, residuals),
        static=static,
        dz_scale_inv=site.scale_inv("g"),
    )


def _is_nothing(epilogue: Epilogue) -> bool:
    return epilogue.norm == epilogue.activation == "none"
