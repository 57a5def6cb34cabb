"""Vectors in 8 bits: blocks with a scale each, codes and scales in one array of bytes.

A vector of m values, zeros after its end, is n parts of k blocks of b values. A block
has the float32 factor `scale_inv = amax / limit`, and

    code = rounded(x / scale_inv),    E[code * scale_inv] = x

with the limit 127 of int8, or 448 of e4m3, rounded as `unbiased` says, n being the
number of the block in all parts. A row of the packed array is a part: its
codes `[k b]`, then its factors `[k]`, four bytes each, the lowest first.

A block with a NaN or an infinity has the factor NaN: what it is unpacked to is NaN
throughout, so that a cast hides no fault.
"""

import dataclasses
from typing import Literal, get_args

from loka_jax.fp8 import E4M3, fp8_max

Format = Literal["int8", "e4m3"]
BLOCKS = (32, 64, 128, 256)
SCALE_BYTES = 4
_INT8_MAX = 127.0  # not -128: symmetric
# So that every row of codes and factors begins at a multiple of 16 bytes.
_BLOCKS_MULTIPLE = 4


@dataclasses.dataclass(frozen=True)
class Packing:
    """How a vector is packed.

    Attributes:
        size: m, the number of values.
        parts: n, the number of rows.
        block: b, the values that share a factor.
    """

    size: int
    parts: int
    block: int = 128
    format: Format = "int8"

    def __post_init__(self):
        """Checks the ranges."""
        if self.block not in BLOCKS:
            raise ValueError(f"block={self.block} must be one of {BLOCKS}.")
        if self.format not in get_args(Format):
            raise ValueError(f"format={self.format!r} must be 'int8' or 'e4m3'.")
        if self.size < 1 or self.parts < 1:
            raise ValueError(
                f"size={self.size} and parts={self.parts} must be at least 1."
            )

    @property
    def blocks(self) -> int:
        """k, the blocks of a part."""
        fewest = -(-self.size // (self.parts * self.block))
        return -(-fewest // _BLOCKS_MULTIPLE) * _BLOCKS_MULTIPLE

    @property
    def part(self) -> int:
        """Values of a part, those past the end of the vector included."""
        return self.blocks * self.block

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed part."""
        return self.blocks * (self.block + SCALE_BYTES)

    @property
    def limit(self) -> float:
        """The largest magnitude of a code."""
        return _INT8_MAX if self.format == "int8" else fp8_max(E4M3)
