"""What the kernels of the tails share: tiles, operands, and results.

A program reads a tile of block_m rows by block_n columns of each operand once, computes
in float32, and writes every form of the result: also its FP8 transpose, which passes
through shared memory.

Matrices of m rows and n columns may have any size. Operands may have more, and results
are written of out_m by out_n, the rest as zeros: padding costs no pass of its own.
Loads and stores take 16 bytes at a time where columns are multiples of 16.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from loka_jax.fp8 import fp8_max, padded_size
from loka_jax.tails import Forms, Fp8Copies, Outer, Scale, Scaled, Written
from loka_jax.triton.launch import launch, require_triton

_DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """The tunable parameters of a tail.

    Attributes:
        block_m, block_n: rows and columns of a program's tile, powers of two.
        num_warps: warps of a program.
    """

    block_m: int
    block_n: int
    num_warps: int

    def tiles_m(self, m: int) -> int:
        """Returns the number of tiles that cover m rows."""
        return math.ceil(m / self.block_m)

    def tiles_n(self, n: int) -> int:
        """Returns the number of tiles that cover n columns."""
        return math.ceil(n / self.block_n)

    def num_programs(self, m: int, n: int) -> int:
        """Returns the number of tiles that cover an (m, n) matrix."""
        return self.tiles_m(m) * self.tiles_n(n)


class Arguments(NamedTuple):
    """The operands of a launch: in the order of the kernel, and its constants.

    A kernel has a pointer for everything that may be absent; then it gets any array,
    which it does not touch, and a constant says so. A scale is a pointer and an index:
    not a constant, so that all sites of one shape share a kernel.
    """

    arrays: list[Array | int]
    constants: dict[str, Any]

    @classmethod
    def of(cls, shape: tuple[int, int], want: Forms) -> "Arguments":
        """Returns no operands yet, and the sizes of the matrix and of its forms."""
        (m, n), (out_m, out_n) = shape, want.written_shape(shape)
        return cls([], dict(m=m, n=n, out_m=out_m, out_n=out_n))

    @property
    def out_shape(self) -> tuple[int, int]:
        """Rows and columns that are written."""
        return self.constants["out_m"], self.constants["out_n"]

    def add(self, name: str, x: Array | None):
        """Appends an operand that may be absent: the constant is has_<name>."""
        self.arrays.append(_unused() if x is None else x)
        self.constants[f"has_{name}"] = x is not None

    def add_matrix(self, name: str, x: Array | None):
        """Appends a matrix that may be absent: the constant is <name>_n, its columns.

        Of an absent one that is 0.
        """
        shape = self.constants["m"], self.constants["n"]
        padded = tuple(map(padded_size, shape))
        assert x is None or x.shape in (shape, padded), (x.shape, shape)
        self.arrays.append(_unused() if x is None else x)
        self.constants[f"{name}_n"] = 0 if x is None else x.shape[1]

    def add_scaled(self, name: str, x: Scaled):
        """Appends data and two scales: <name>_scales is their number.

        And <name>_n are the columns of the data, <name>_unit is its unit.
        """
        assert len(x.scales) <= 2 and (x.scales or x.unit == 1)
        self.add_matrix(name, x.data)
        for i in range(2):
            self.add_scale(x.scales[i] if i < len(x.scales) else None)
        self.constants[f"{name}_scales"] = len(x.scales)
        self.constants[f"{name}_unit"] = x.unit

    def add_scale(self, scale: Scale | None):
        """Appends a scale that may be absent: a vector and an index."""
        scale = Scale(_unused()) if scale is None else scale
        self.arrays.extend((scale.vector, scale.at))

    def add_summands(self, name: str, summands: Sequence[Scaled], most: int):
        """Appends `most` operands, absent ones after those that are given."""
        for i in range(most):
            self.add_summand(f"{name}_{i}", summands[i] if i < len(summands) else None)

    def add_summand(self, name: str, x: Scaled | None):
        """Appends a matrix that may be absent: then <name>_scales is -1."""
        if x is not None:
            return self.add_scaled(name, x)
        self.add_matrix(name, None)
        for _ in range(2):
            self.add_scale(None)
        self.constants.update({f"{name}_scales": -1, f"{name}_unit": 1.0})

    def add_outer(self, name: str, x: Outer | None):
        """Appends the vectors of an outer product: has_<name> says if it is given."""
        self.add(name, None if x is None else x.column)
        self.arrays.append(_unused() if x is None else x.row)

    def add_forms(self, want: Forms, scale_inv: Scale | None):
        """Appends the scale of a result; the constants say in which forms it goes."""
        assert (want.fp8 is None) == (scale_inv is None)
        assert want.fp8 is not None or not want.transposed
        self.add_scale(scale_inv)
        self.constants.update(
            has_bf16=want.bf16,
            has_fp8=want.fp8 is not None,
            has_fp8_t=want.transposed,
            has_amax=want.amax,
            limit=1.0 if want.fp8 is None else fp8_max(want.fp8),
        )


def why_not(m: int, n: int, *operands: Scaled | Array | None) -> str | None:
    """Returns why (m, n) matrices are not served, or None if they are."""
    for name, size in (("m", m), ("n", n)):
        if size <= 0:
            return f"{name}={size} is not positive"
    for operand in operands:
        data = operand.data if isinstance(operand, Scaled) else operand
        if data is not None and data.dtype.name not in _DTYPES:
            return f"{data.dtype.name} is none of {', '.join(_DTYPES)}"
    return None


def check(name: str, m: int, n: int, *operands: Scaled | Array | None):
    """Raises an error if operands are not served, or Triton is not installed.

    Args:
        name: of the operation.
        m, n, operands: as in `why_not`.

    Raises:
        ValueError: with the reason.
        ImportError: with the remedy.
    """
    reason = why_not(m, n, *operands)
    if reason is not None:
        raise ValueError(f"{name}: {reason}.")
    require_triton()


def run(
    kernel: Any,
    operands: Arguments,
    types: list[jax.ShapeDtypeStruct],
    config: TuningConfig,
    *,
    by_row: bool = False,
) -> list[Array]:
    """Returns the results of a kernel of a tail, of these types.

    Args:
        kernel: compiled by `triton.jit`.
        operands: of the launch, see `Arguments.of`.
        types: of the results.
        config: the tuning config.
        by_row: a program computes all tiles of its rows.
    """
    (m, n), block_n = operands.out_shape, config.block_n
    blocks = dict(block_m=config.block_m, block_n=config.block_n)
    results = launch(
        kernel,
        *operands.arrays,
        outputs=types,
        grid=config.num_programs(m, block_n if by_row else n),
        num_warps=config.num_warps,
        num_stages=1,
        constants=operands.constants | blocks,
    )
    return list(results)


def _unused() -> Array:
    return jnp.ones((1,), jnp.float32)  # a constant of the program: no kernel


def result_types(
    shape: tuple[int, int], want: Forms, config: TuningConfig
) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of a result in all forms, of one element where not wanted.

    Args:
        shape: rows and columns that are written.
        want: the forms.
        config: the tuning config.
    """
    m, n = shape
    fp8 = jnp.bfloat16 if want.fp8 is None else want.fp8
    programs = config.num_programs(m, n)
    return [
        optional_type(want.bf16, (m, n), jnp.bfloat16),
        optional_type(want.fp8 is not None, (m, n), fp8),
        optional_type(want.transposed, (n, m), fp8),
        optional_type(want.amax, (programs,), jnp.float32),
    ]


def optional_type(
    is_wanted: bool, shape: tuple[int, ...], dtype: DTypeLike
) -> jax.ShapeDtypeStruct:
    """Returns the type of a result, of one element if it is not wanted."""
    return jax.ShapeDtypeStruct(shape if is_wanted else (1,), dtype)


def written(arrays: list[Array], want: Forms, scale_inv: Scale | None) -> Written:
    """Returns a result from the arrays of `result_types`."""
    bf16, fp8, fp8_t, amaxes = arrays
    copies = None
    if want.fp8 is not None:
        assert scale_inv is not None
        copies = Fp8Copies(fp8, fp8_t if want.transposed else None, scale_inv)
    return Written(
        bf16=bf16 if want.bf16 else None,
        fp8=copies,
        amaxes=amaxes if want.amax else None,
    )
