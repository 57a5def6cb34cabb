"""Which Pallas kernels serve a site, and their calls.

A site `activation(norm(lhs @ rhs))` can run in one kernel each way ("fused"), with a
kernel for norm, activation and quantization beside XLA's products ("norm"), or by XLA
alone ("xla"). `plan` chooses, and says why not the kernels.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import (
    NORM_BLOCK,
    XHAT_MAX_FEATURES,
    ActivationName,
    Gradients,
    Normed,
    NormName,
    Outputs,
)
from loka_jax.ops.products import decide
from loka_jax.pallas import dense_norm as _forward
from loka_jax.pallas import dense_norm_backward as _backward
from loka_jax.pallas import norm_backward as _norm_backward
from loka_jax.pallas import norm_quantize as _norm
from loka_jax.recipe import OPERANDS, Cast, Recipe

Implementation = Literal["xla", "pallas"]
Out = Literal["wide", "fp8", "both"]

_ROWS = 64  # a kernel takes rows in multiples of it; callers pad


class Plan(NamedTuple):
    """What runs for a site.

    Attributes:
        forward: one kernel ("fused"), a kernel after XLA's product ("norm"), or "xla".
        backward: one kernel ("fused"), a kernel before XLA's products ("norm"), or
            "xla".
        why_not: why forward is not fused, or None if it is.
        why_not_backward: why backward is not fused, or None if it is.
    """

    forward: Literal["fused", "norm", "xla"]
    backward: Literal["fused", "norm", "xla"]
    why_not: str | None
    why_not_backward: str | None

    @property
    def is_served(self) -> bool:
        """True if a kernel runs the norm of the forward pass."""
        return self.forward != "xla"

    def padded_rows(self, m: int) -> int:
        """Returns the rows that are computed for m of them."""
        return m + -m % _ROWS if self.is_served else m


BY_XLA = Plan("xla", "xla", None, None)  # a site without a norm


def plan(
    recipe: Recipe,
    m: int,
    k: int,
    n: int,
    *,
    norm: NormName,
    activation: ActivationName,
    out: Out = "wide",
    has_bias: bool = False,
    is_handed: bool = False,
    implementation: Implementation | None = None,
) -> Plan:
    """Returns what runs for a site with lhs (m, k) and rhs (k, n).

    Args:
        recipe: the casts of each role.
        m, k, n: sizes; kernels pad m to a multiple of 64.
        norm: norm of the site.
        activation: activation of the site.
        out: in which form the activations leave.
        has_bias: a bias is added before the norm.
        is_handed: lhs comes in FP8 from another site.
        implementation: "xla" for XLA alone; "pallas" for kernels, or an error; None for
            kernels where there is a Hopper GPU and they serve the site.

    Raises:
        ValueError: if kernels were asked for and none serves the forward pass.
    """
    if implementation == "xla":
        return Plan("xla", "xla", "implementation 'xla'", "implementation 'xla'")
    why_not = _why_no_kernel(recipe, m, k, n)
    if why_not is None and implementation is None and not has_hopper():
        why_not = "no Hopper GPU"
    why_not_norm = why_not_backward = why_not_norm_backward = why_not
    if why_not is None:
        rows = m + -m % _ROWS
        fwd, dlhs = (decide(recipe, r, rows, k, n).gemm for r in ("fwd", "dlhs"))
        want = training_outputs(recipe, rows, k, n, norm, out)
        assert want.xhat is not None
        problem = _forward.Problem(
            m=rows,
            k=k,
            n=n,
            dtype=jnp.bfloat16 if fwd is None else E4M3,
            norm=norm,
            activation=activation,
            want=want,
            has_bias=has_bias,
            has_affine=norm in ("layer", "rms"),
            x_scale_by_row=fwd is not None and (is_handed or _is_by_row(fwd.first)),
            w_scale_by_column=fwd is not None and _is_by_row(fwd.second),
        )
        why_not = _forward.why_not(problem)
        why_not_norm = _norm.why_not(rows, n, norm=norm)
        why_not_backward = _backward.why_not(
            rows,
            k,
            n,
            xhat_dtype=want.xhat,
            w_dtype=jnp.bfloat16 if dlhs is None else E4M3,
            norm=norm,
            activation=activation,
        )
        why_not_norm_backward = _norm_backward.why_not(
            rows, n, norm=norm, xhat_dtype=want.xhat
        )
    if why_not is None:
        forward = "fused"
    elif why_not_norm is None:
        forward = "norm"
    elif implementation == "pallas":
        raise ValueError(
            f"implementation='pallas' does not serve lhs ({m}, {k}), rhs ({k}, {n}) "
            f"with recipe {recipe.name!r}, norm {norm!r}: {why_not}."
        )
    else:
        return Plan("xla", "xla", why_not, why_not_backward or why_not)
    backward = "xla"
    if why_not_backward is None:
        backward = "fused"
    elif why_not_norm_backward is None:
        backward = "norm"
    return Plan(forward, backward, why_not, why_not_backward)


def training_outputs(
    recipe: Recipe, m: int, k: int, n: int, norm: NormName, out: Out
) -> Outputs:
    """Returns what a differentiated forward pass writes.

    The activations as `out` says, and in bfloat16 always: the gradient of the next
    weight reads them. Normalized rows are kept in E4M3 where dlhs is in FP8 too, for an
    error of the same size, and where all values that a norm can give fit it.
    """
    features = min(n, NORM_BLOCK) if norm == "block" else n
    fits = norm != "none" and features <= XHAT_MAX_FEATURES
    is_fp8 = decide(recipe, "dlhs", m, k, n).gemm is not None
    return Outputs(
        y=True,
        y_fp8=None if out == "wide" else "row",
        xhat=E4M3 if is_fp8 and fits else jnp.bfloat16,
        rstd=norm != "none",
    )


def _is_by_row(cast: Cast) -> bool:
    return cast.granularity == "rowwise"


@functools.cache
def has_hopper() -> bool:
    """Returns True if JAX's default device is a Hopper GPU, which kernels need."""
    if jax.default_backend() != "gpu":
        return False
    return getattr(jax.devices()[0], "compute_capability", None) == "9.0"


def _why_no_kernel(recipe: Recipe, m: int, k: int, n: int) -> str | None:
    """Returns why no kernel at all can serve such sizes and casts, or None."""
    for name, size in (("m", m), ("k", k), ("n", n)):
        if size == 0:
            return f"{name}=0"
    if jnp.dtype(recipe.compute_dtype) != jnp.bfloat16:
        return f"recipe {recipe.name!r} computes in {jnp.dtype(recipe.compute_dtype)}"
    casts = [cast for operand in OPERANDS for cast in recipe.casts(operand)]
    if any(cast.granularity == "blockwise" for cast in casts):
        return f"recipe {recipe.name!r} scales in blocks"
    if recipe.fwd is not None:
        formats = {jnp.dtype(c.dtype) for c in (recipe.fwd.first, recipe.fwd.second)}
        if formats != {jnp.dtype(E4M3)}:
            return f"recipe {recipe.name!r} has a forward product that is not E4M3"
        return decide(recipe, "fwd", m + -m % _ROWS, k, n).why_not
    return None


def dense_norm(
    x: Float[Array, "m k"] | Fp8Array,
    w: Float[Array, "n k"] | Fp8Array,
    bias: Float[Array, "n"] | None,
    gamma: Float[Array, "n"] | None,
    beta: Float[Array, "n"] | None,
    *,
    norm: NormName,
    activation: ActivationName,
    epsilon: float,
    want: Outputs,
    interpret: Any,
) -> Normed:
    """Returns what the fused forward kernel writes."""

    def call(x, w, bias, gamma, beta):
        return _forward.dense_norm(
            x,
            w,
            bias=bias,
            gamma=gamma,
            beta=beta,
            norm=norm,
            activation=activation,
            epsilon=epsilon,
            want=want,
            interpret=interpret,
        )

    return _one_by_one(call, x, w, bias, *_both(gamma, beta))


def norm_quantize(
    z: Float[Array, "m n"],
    scales: tuple[Float[Array, "..."], ...],
    bias: Float[Array, "n"] | None,
    gamma: Float[Array, "n"] | None,
    beta: Float[Array, "n"] | None,
    *,
    norm: NormName,
    activation: ActivationName,
    epsilon: float,
    want: Outputs,
    interpret: Any,
) -> Normed:
    """Returns what the kernel for norm, activation and quantization writes."""

    def call(z, scales, bias, gamma, beta):
        return _norm.norm_quantize(
            z,
            scales=scales,
            bias=bias,
            gamma=gamma,
            beta=beta,
            norm=norm,
            activation=activation,
            epsilon=epsilon,
            want=want,
            interpret=interpret,
        )

    return _one_by_one(call, z, scales, bias, gamma, beta)


def dense_norm_backward(
    dy: Float[Array, "m n"],
    xhat: Float[Array, "m n"],
    rstd: Float[Array, "..."] | None,
    w: Float[Array, "k n"] | Fp8Array,
    gamma: Float[Array, "n"] | None,
    beta: Float[Array, "n"] | None,
    *,
    norm: NormName,
    activation: ActivationName,
    interpret: Any,
) -> Gradients:
    """Returns what the fused backward kernel writes."""

    def call(dy, xhat, rstd, w, gamma, beta):
        return _backward.dense_norm_backward(
            dy,
            xhat,
            rstd,
            w,
            gamma=gamma,
            beta=beta,
            norm=norm,
            activation=activation,
            interpret=interpret,
        )

    gradients = _one_by_one(call, dy, xhat, rstd, w, *_both(gamma, beta))
    return gradients._replace(
        dgamma=None if gamma is None else gradients.dgamma,
        dbeta=None if beta is None else gradients.dbeta,
    )


def norm_backward(
    dy: Float[Array, "m n"],
    xhat: Float[Array, "m n"],
    rstd: Float[Array, "..."] | None,
    gamma: Float[Array, "n"] | None,
    beta: Float[Array, "n"] | None,
    *,
    norm: NormName,
    activation: ActivationName,
    quantize: bool,
    interpret: Any,
) -> _norm_backward.NormGradients:
    """Returns what the kernel for the backward pass of norm and activation writes."""

    def call(dy, xhat, rstd, gamma, beta):
        return _norm_backward.norm_backward(
            dy,
            xhat,
            rstd,
            gamma=gamma,
            beta=beta,
            norm=norm,
            activation=activation,
            quantize=quantize,
            interpret=interpret,
        )

    return _one_by_one(call, dy, xhat, rstd, gamma, beta)


def _both(gamma: Array | None, beta: Array | None) -> tuple[Array | None, Array | None]:
    """Returns gamma and beta, ones or zeros for a missing one: kernels want both."""
    if gamma is None and beta is not None:
        gamma = jnp.ones_like(beta)
    if beta is None and gamma is not None:
        beta = jnp.zeros_like(gamma)
    return gamma, beta


def _one_by_one(kernel: Callable, *args):
    """Returns `kernel(*args)`; under `vmap` kernels run one after another.

    JAX would give a batched kernel another grid axis, which kernels that stay on their
    SMs and count their tiles do not expect.
    """
    leaves, tree = jax.tree.flatten(args)
    out_trees = []

    @sequential_vmap
    def call(*leaves):
        out, out_tree = jax.tree.flatten(kernel(*jax.tree.unflatten(tree, leaves)))
        out_trees.append(out_tree)
        return tuple(out)

    out = call(*leaves)
    return jax.tree.unflatten(out_trees[0], out)
