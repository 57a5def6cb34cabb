"""A shuffle of any number of examples, computed index by index without a table.

A Feistel network permutes the numbers of `bits` bits, keyed by (seed, epoch); results
at or beyond `size` are permuted again until they fall below it (cycle walking). It
needs no memory, start-up time or state, whether there are ten rows or a billion.
"""

import numpy as np

_ROUNDS = 6
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


def mix(x: np.ndarray) -> np.ndarray:
    """Returns a well mixed 64-bit hash of each uint64, bijectively.

    References:
        Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014
        (the finalizer of SplitMix64).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key_of(*numbers: int) -> np.uint64:
    """Returns a 64-bit key made from several numbers; their order matters."""
    state = np.zeros(1, np.uint64)
    for number in numbers:
        word = np.array([number % 2**64], np.uint64)
        state = mix((state + _MULTIPLIER) ^ mix(word + _MULTIPLIER))
    return state[0]


def permute(index: np.ndarray, size: int, key: np.uint64) -> np.ndarray:
    """Returns the image of each index under a permutation of `range(size)`, int64.

    Args:
        index: int64, each in [0, size).
        size: the number of permuted indices, at least 1.
        key: selects the permutation.
    """
    bits = max(2, (size - 1).bit_length())
    keys = mix(np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _MULTIPLIER ^ key)
    out = _feistel(index.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(out >= size)
    while len(outside):
        out[outside] = _feistel(out[outside], bits, keys)
        outside = outside[out[outside] >= size]
    return out.astype(np.int64)


def _feistel(x: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Permutes the numbers of `bits` bits; the halves may be of unequal width."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    for key in keys:
        left = x >> np.uint64(right_bits)
        right = x & np.uint64((1 << right_bits) - 1)
        left ^= mix(right ^ key) >> np.uint64(64 - left_bits)
        x = (right << np.uint64(left_bits)) | left
        left_bits, right_bits = right_bits, left_bits
    return x
