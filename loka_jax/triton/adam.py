"""Adam of many arrays in one launch, with FP8 forms of the new parameters.

    mu = b1 mu + (1 - b1) c g         nu = b2 nu + (1 - b2) (c g)^2
    w  = w + s r (mu / (1 - b1^t)) / (sqrt(nu / (1 - b2^t)) + eps)

of which XLA computes the factors: c clips, r is the negative learning rate, s a factor
on it, t counts updates. XLA updates each array by a kernel of its own, and casts each
weight by another one in the next step. Here a tile's new values are cast before they
leave the registers, so that a form is always that of the values that were written.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.fp8 import fp8_max
from loka_jax.tails import Forms, Scale, Written
from loka_jax.triton.launch import require_triton
from loka_jax.triton.trees import launch_tree, static

# Arrays of a launch: each adds to the code, and a dozen pointers to the arguments.
MOST_ARRAYS = 32
_MOST_NUMBERS = 2**31 - 1
_FLAT = (1, 4096)  # rows and columns of a tile of an array that is not cast
_CAST = (64, 64)
_NUM_WARPS = 8


class Factors(NamedTuple):
    """The numbers of an update, float32; see the equations above.

    Attributes:
        clip: c.
        mu_correction, nu_correction: 1 - b1^t and 1 - b2^t.
        rate: r.
        rate_scale: s.
        is_accepted: 1, or 0 to keep what was.
    """

    clip: Float[Array, ""] | float
    mu_correction: Float[Array, ""] | float
    nu_correction: Float[Array, ""] | float
    rate: Float[Array, ""] | float
    rate_scale: Float[Array, ""] | float
    is_accepted: Float[Array, ""] | float


class Copy(NamedTuple):
    """The forms in which a matrix of parameters is written, too, and their scale."""

    forms: Forms
    scale_inv: Scale | None = None


class Updated(NamedTuple):
    """An array after its update; `copy` is None where none was asked for."""

    param: Array
    mu: Array
    nu: Array
    copy: Written | None


def why_not(params: Sequence[Array], grads: Sequence[Array]) -> str | None:
    """Returns why these arrays are not updated here, or None if they are."""
    for x in (*params, *grads):
        if jnp.dtype(x.dtype) != jnp.float32:
            return f"an array is {jnp.dtype(x.dtype).name}, not float32"
        if not 0 < x.size <= _MOST_NUMBERS:
            return f"an array of {x.size} numbers"
    return None


def adam(
    params: Sequence[Array],
    grads: Sequence[Array],
    mu: Sequence[Array],
    nu: Sequence[Array],
    factors: Factors,
    copies: Sequence[Copy | None] | None = None,
    *,
    b1: float,
    b2: float,
    eps: float,
) -> list[Updated]:
    """Returns the arrays after an update, in place if the caller donates them.

    Args:
        params, grads, mu, nu: float32, of each array.
        copies: of each array, None for none; forms of matrices.

    Raises:
        ValueError: if these arrays are not served (see `why_not`), or forms are asked
            for of an array that is no matrix.
        ImportError: if jax-triton is not installed.
    """
    reason = why_not(params, grads)
    if reason is not None:
        raise ValueError(f"adam: {reason}.")
    copies = copies or [None] * len(params)
    for param, copy in zip(params, copies, strict=True):
        if copy is not None and param.ndim != 2:
            raise ValueError(f"adam: forms of an array of shape {param.shape}.")
    vector = jnp.stack([jnp.asarray(x, jnp.float32) for x in factors])
    rows = zip(params, grads, mu, nu, copies, strict=True)
    constants = dict(b1=b1, b2=b2, eps=eps)
    return [
        updated
        for some in itertools.batched(rows, MOST_ARRAYS)
        for updated in _launch(some, vector, constants)
    ]


def launches(arrays: int) -> int:
    """Returns the number of launches that update so many arrays."""
    return math.ceil(arrays / MOST_ARRAYS)


def _launch(rows: Sequence[Any], factors: Array, constants: dict) -> list[Updated]:
    require_triton()
    from loka_jax.triton import adam_kernel  # not above: it imports Triton

    *arrays, copies = zip(*rows, strict=True)
    params, grads, mu, nu = (
        tuple(_matrix(x, copy) for x, copy in zip(each, copies, strict=True))
        for each in arrays
    )
    layouts = [_layout(x, copy) for x, copy in zip(params, copies, strict=True)]
    tiles = (
        math.ceil(x.out_m / x.block_m) * math.ceil(x.out_n / x.block_n) for x in layouts
    )
    starts = (0, *itertools.accumulate(tiles))
    types = tuple(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in params)
    written = tuple(_types(*each) for each in zip(copies, layouts, strict=True))
    scales = tuple(None if copy is None else copy.scale_inv for copy in copies)
    count = len(params)
    out = launch_tree(
        adam_kernel.adam_kernel,
        static(
            **dict(params=params, mu=mu, nu=nu, grads=grads),
            **dict(factors=factors, scales=scales),
        ),
        static(params=types, mu=types, nu=types, copies=written),
        static(arrays=tuple(layouts), starts=starts, **constants),
        grid=starts[-1],
        num_warps=_NUM_WARPS,
        aliases={i: i for i in range(3 * count)},
    )
    return [
        Updated(
            *(x.reshape(shape) for x in each),
            copy=None if copy is None else form._replace(scale_inv=copy.scale_inv),
        )
        for *each, form, copy, shape in zip(
            *(out.params, out.mu, out.nu, out.copies, copies),
            [x.shape for x in arrays[0]],
            strict=True,
        )
    ]


def _matrix(x: Array, copy: Copy | None) -> Array:
    return x.reshape(1, -1) if copy is None else x


def _layout(x: Array, copy: Copy | None) -> Any:
    """Returns the sizes of a matrix, and of its tiles, as constants of the kernel."""
    m, n = x.shape
    out_m, out_n = (m, n) if copy is None else copy.forms.written_shape((m, n))
    block_m, block_n = _FLAT if copy is None else _CAST
    fp8 = None if copy is None else copy.forms.fp8
    return static(
        **dict(m=m, n=n, out_m=out_m, out_n=out_n),
        **dict(block_m=block_m, block_n=block_n),
        limit=1.0 if fp8 is None else fp8_max(fp8),
        is_copied=copy is not None,
    )


def _types(copy: Copy | None, layout: Any) -> Written | None:
    """Returns the types of the forms of a matrix."""
    if copy is None:
        return None
    forms, shape = copy.forms, (layout.out_m, layout.out_n)
    tiles = math.ceil(shape[0] / _CAST[0]) * math.ceil(shape[1] / _CAST[1])

    def type_(is_wanted: bool, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) if is_wanted else None

    is_cast = forms.fp8 is not None
    return Written(
        bf16=type_(forms.bf16, shape, jnp.bfloat16),
        fp8=type_(is_cast, shape, forms.fp8),
        fp8_t=type_(is_cast and forms.transposed, shape[::-1], forms.fp8),
        amaxes=type_(forms.amax, (tiles,), jnp.float32),
    )
