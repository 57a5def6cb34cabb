"""Wide dense layers in a row as one operation: products, and a tail in one pass each.

    forward     z = x W    y = activation(gamma norm(z + b) + beta), the next layer's x
    backward    dz from dy    dW = x^T dz    dx = dz W^T, the dy of the layer before

The first x may be a norm of the rows that are given.

Of layers thousands of features wide the products take FP8's full gain, if what lies
between them takes no more than one pass each way. The tail applies the scales of the
product before it, and writes what is read next in the forms that the recipe asks for:
in FP8, as it is and transposed for dW, under a scale that is known beforehand (from
earlier steps, or the bound of a norm), or in bfloat16. In bfloat16 the same
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

from loka_jax import fp8, triton
from loka_jax.fp8 import E4M3
from loka_jax.normed import (
    NO_VECTORS,
    Epilogue,
    NormName,
    NormResiduals,
    NormVectors,
    bounded_scale_inv,
)
from loka_jax.ops.kernels import equally_varying
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.tailed_products import Site, Tailed, read_states, why_not_tailed
from loka_jax.scaling import DelayedScaling
from loka_jax.tails import Forms, Scale, Scaled, Written
from loka_jax.triton import tails
from loka_jax.xla.matmul import cut
from loka_jax.xla.tails import decode, in_bf16

# The least size of a product of which a run of layers has one; narrow layers alone are
# left to kernels that multiply and normalize at once.
WIDE = 1024


class WideLayer(NamedTuple):
    """The parameters of a layer.

    Attributes:
        kernel: float32 (k, n).
        bias: float32 `[n]`, added before the norm; None if absent.
        gamma, beta: float32 `[n]`, of a "layer" or "rms" norm; None if absent.
    """

    kernel: Float[Array, "k n"]
    bias: Float[Array, "n"] | None = None
    gamma: Float[Array, "n"] | None = None
    beta: Float[Array, "n"] | None = None


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
        or tails.why_not(spec.m, spec.k)
        or tails.why_not(spec.m, spec.n)
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
        input_norm: of the rows before the first product, without gamma and beta.
        axis_names: mesh axes over which rows are spread, under `shard_map`.
        implementation: of the tails: "triton" requires its kernels; "xla"; None is
            Triton if it is installed and the GPU is a Hopper, else XLA.

    Raises:
        ValueError: if a layer is not served (see `why_not`), if Triton is required and
            is not installed, or if a state is missing.
    """
    check(plans)
    m, k = x.shape
    reason = tails.why_not(m, k)
    if reason is not None:
        raise ValueError(f"wide_stack: {reason}.")
    tailed = Tailed(plans, axis_names, triton.chosen(implementation, None, "norm_tail"))
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
    return y, (vectors_of(layers), states, residuals)


def _whole(stack: _Stack, x, layers, states, *, keep: bool):
    """Returns the activations of the last layer, and what backward reads."""
    first = stack.tailed.sites(states)[0]
    lhs, of_input = _input(Epilogue(stack.input_norm), first, Scaled(x), keep=keep)
    y, kept = propagate(stack.tailed, lhs, layers, states, keep=keep)
    return y, (of_input, kept)


def _backward(stack: _Stack, residuals, dy):
    vectors, states, (of_input, kept) = residuals
    d, *gradients = pull_back(stack.tailed, kept, vectors, states, dy)
    shape = stack.tailed.sites(states)[0].shape("lhs")
    if of_input is None:
        return cut(in_bf16(d), shape).astype(dy.dtype), *gradients
    static = dict(epilogue=Epilogue(stack.input_norm), want=Forms(shape=shape))
    dx = stack.tailed.tail("norm_tail_backward", d, None, of_input, static=static)
    return dx.dz.bf16, *gradients


_run.defvjp(_forward, _backward)


def vectors_of(layers: tuple[WideLayer, ...]) -> tuple[NormVectors, ...]:
    """Returns the vectors of each layer."""
    return tuple(NormVectors(*layer[1:]) for layer in layers)


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
    each = zip(sites, layers, vectors_of(layers), strict=True)
    for i, (site, layer, vectors) in enumerate(each):
        epilogue = _epilogue(site)
        lhs, rhs = y, site.weight(layer.kernel, keep=keep)
        if not keep and (handed := _handed(site, readers[i], lhs, rhs, layer.bias)):
            y = handed
            continue
        z = site.multiply("fwd", lhs, rhs)
        if readers[i] is None and _is_nothing(epilogue):
            y, residuals = _unscaled_end(z, layer.bias, site.shape("g")), None
        else:
            tail = _Tail.of(site, epilogue, site.shape("g"), keep=keep)
            y, residuals = tail(readers[i], z, vectors)
        kept.append(Kept(lhs, rhs, residuals))
    assert y.bf16 is not None
    return y.bf16, tuple(kept)


def pull_back(
    stack: Tailed,
    kept: tuple[Kept, ...],
    all_vectors: tuple[NormVectors, ...],
    states,
    dy: Float[Array, "m n"],
    *,
    to_fp8: bool = False,
) -> tuple[Scaled, tuple[WideLayer, ...], tuple[DelayedScaling | None, ...]]:
    """Returns the gradients of the rows and of the layers, and the next states.

    Args:
        stack: the static arguments.
        kept: of the forward pass.
        all_vectors, states: of the layers.
        dy: the gradient of the last activations.
        to_fp8: return the gradient of the rows in FP8 if their product runs in FP8.
    """
    d, gradients, amaxes = Scaled(dy), [], []
    layers = zip(stack.sites(states), all_vectors, kept, strict=True)
    for i, (site, vectors, (lhs, rhs, of_tail)) in reversed(list(enumerate(layers))):
        g, dvectors = _gradient(site, d, of_tail, vectors)
        gradients.append(WideLayer(site.weight_gradient(lhs, g), *dvectors))
        amaxes.append((lhs.amaxes, rhs.amaxes, g.amaxes))
        multiply = site.multiply_to_fp8 if to_fp8 and i == 0 else site.multiply
        d = multiply("dlhs", g, rhs)
    next_states = stack.next_states(states, tuple(reversed(amaxes)))
    return d, tuple(reversed(gradients)), next_states


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
    return _Tail.of(site, epilogue, site.shape("lhs"), keep=keep)(site, x)


def _unscaled_end(z: Scaled, bias: Array | None, shape: tuple[int, int]) -> Written:
    """Returns the last product; XLA joins a bias with what reads it."""
    if bias is None:
        return Written(cut(in_bf16(z), shape), None, None)
    out = cut(decode(z), shape) + bias[None, :]
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

    @classmethod
    def of(
        cls, site: Site, epilogue: Epilogue, shape: tuple[int, int], *, keep: bool
    ) -> "_Tail":
        """Returns the tail before or after a product.

        Normalized rows are kept in E4M3 where the error of the gradient allows it.
        """
        is_fp8 = site.products.recipe.dlhs is not None
        xhat = (E4M3 if is_fp8 else jnp.bfloat16) if keep else None
        return cls(site.run, epilogue, xhat, shape)

    def __call__(
        self, reader: Site | None, z: Scaled, vectors: NormVectors = NO_VECTORS
    ) -> tuple[Written, NormResiduals | None]:
        """Returns what follows a product, as the next one reads it, and residuals."""
        is_kept, epilogue = self.xhat is not None, self.epilogue
        want, scale_inv = Forms(shape=self.shape), None
        if reader is not None:
            want = reader.forms("lhs", keep=is_kept)
            scale_inv = self._scale_inv(reader, want, vectors)
        keeps_y = _is_nothing(epilogue) or epilogue == Epilogue("none", "relu")
        xhat = None if keeps_y else self.xhat
        static = dict(epilogue=epilogue, want=want, xhat=xhat)
        y, residuals = self.run.tail(
            *("norm_tail", z, None, vectors), static=static, y_scale_inv=scale_inv
        )
        if keeps_y and not _is_nothing(epilogue):
            kept = y.bf16 if y.fp8 is None else y.fp8.data  # of relu signs are enough
            residuals = NormResiduals(kept, None)
        return y, residuals

    def _scale_inv(
        self, reader: Site, want: Forms, vectors: NormVectors
    ) -> Scale | None:
        """Returns the scale of the activations in FP8."""
        if want.fp8 is None:
            return None
        norm = self.epilogue.norm
        if norm != "none" and jnp.dtype(want.fp8) == jnp.dtype(E4M3):
            # A power of two, so that the next product is exact in bfloat16.
            bound = bounded_scale_inv(norm, self.shape[1], vectors.gamma, vectors.beta)
            return Scale.of(fp8.power_of_two_up(bound))
        return reader.scale_inv("lhs", want)


def _gradient(
    site: Site, d: Scaled, residuals: NormResiduals | None, vectors: NormVectors
) -> tuple[Written, NormVectors]:
    """Returns the gradients of a product, as backward reads it, and of the vectors."""
    if residuals is None:
        rows = cut(decode(d), site.shape("g"))
        dbias = None if vectors.bias is None else jnp.sum(rows, axis=0)
        return site.cast("g", d, keep=True), NormVectors(dbias)
    want = site.forms("g", keep=True)
    return site.run.tail(
        *("norm_tail_backward", d, None, residuals, vectors),
        static=dict(epilogue=_epilogue(site), want=want),
        dz_scale_inv=site.scale_inv("g", want),
    )


def _is_nothing(epilogue: Epilogue) -> bool:
    return epilogue.norm == epilogue.activation == "none"
