"""How vectors lie in parts of blocks with a scale each."""

import pytest

from loka_jax.packed import Packing


@pytest.mark.parametrize(
    "size, parts, block, blocks",
    [
        (1, 1, 32, 4),  # a multiple of 4 blocks: rows begin at multiples of 16 bytes
        (4 * 32, 1, 32, 4),
        (4 * 32 + 1, 1, 32, 8),
        (10_000, 8, 128, 12),  # 79 blocks, 10 a part
        (10_000, 3, 256, 16),
    ],
)
def test_parts_have_whole_blocks_in_fours(size, parts, block, blocks):
    packing = Packing(size, parts, block)
    assert packing.blocks == blocks
    assert packing.part == blocks * block >= size / parts
    assert packing.row_bytes == blocks * (block + 4)


def test_codes_reach_127_or_448():
    assert [Packing(1, 1, 32, f).limit for f in ("int8", "e4m3")] == [127, 448]


def test_impossible_packings_are_refused():
    with pytest.raises(ValueError, match="block=100 must be one of"):
        Packing(1, 1, 100)
    with pytest.raises(ValueError, match="size=0"):
        Packing(0, 1)
