"""Joined features by Triton, in one pass: `[first; second; zeros]`, cast on the way.

The features of a cross network are a vector of the embeddings and the dense features.
Its products and its tails read them as they are written here, so that nothing has to
be concatenated.
"""

from jaxtyping import Array, Float

from loka_jax.tails import Forms, Scale, Written
from loka_jax.triton import tail
from loka_jax.triton.tail import Arguments, TuningConfig

CONFIGS = (
    TuningConfig(128, 128, 8),
    TuningConfig(64, 128, 8),
    TuningConfig(64, 128, 4),
    TuningConfig(64, 64, 4),
)
DEFAULT = TuningConfig(64, 128, 4)
NARROW_DEFAULT = TuningConfig(64, 64, 4)  # where the other's last tiles are not full


def joined_cast(
    first: Float[Array, "m a"],
    second: Float[Array, "m b"],
    *,
    want: Forms,
    scale_inv: Scale | None = None,
    config: TuningConfig | None = None,
) -> Written:
    """Returns `[first; second; zeros]` in the requested forms.

    Raises:
        ValueError: if these operands are not served (see `tail.why_not`).
        ImportError: if jax-triton is not installed.
    """
    (m, start), end = first.shape, first.shape[1] + second.shape[1]
    tail.check("joined_cast", m, start, first)
    tail.check("joined_cast", m, end - start, second)
    operands = Arguments.of(want.shape or (m, end), want)
    is_narrow = operands.constants["n"] % DEFAULT.block_n
    config = config or (NARROW_DEFAULT if is_narrow else DEFAULT)
    operands.arrays.extend((first, second))
    operands.constants.update(start=start, end=end)
    operands.add_forms(want, scale_inv)
    from loka_jax.triton import joined_cast_kernel  # not above: it imports Triton

    types = tail.result_types(operands.out_shape, want, config)
    kernel = joined_cast_kernel.joined_cast_kernel
    return tail.written(tail.run(kernel, operands, types, config), want, scale_inv)
