"""What the kernel of the dense parameters' updates is checked on."""

import functools
from typing import Any

import jax
import numpy as np
import optax

from loka_jax.fp8 import E4M3
from loka_jax.measure.check_families import SUMS, Case, normal, uneven
from loka_jax.optim.adam import adam
from loka_jax.tails import Forms, Scale
from loka_jax.triton.adam import Copy

# Whole tiles, none that is whole, and arrays of a few numbers.
_SHAPES = ((128, 192), (100, 70), (333,), (5,), (9, 7))
_CAST = (True, True, False, False, False)


def adams() -> list[Case]:
    """Returns the cases of updates that a step makes, and of one that it refuses."""
    ours, theirs = (
        functools.partial(_updated, implementation=x) for x in ("triton", "xla")
    )
    return [
        Case(f"updates, {name}", functools.partial(_draw, accept), ours, theirs, SUMS)
        for name, accept in (("accepted", True), ("refused", False))
    ]


def _draw(accept: bool) -> tuple:
    params, grads = (
        [_numbers(shape, seed + i) for i, shape in enumerate(_SHAPES)]
        for seed in (0, 10)
    )
    # Some values lie beyond the scale.
    return params, grads, np.full(len(_SHAPES), 0.01, np.float32), np.bool_(accept)


def _numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    draw = uneven if len(shape) == 2 else normal
    return draw(*shape, seed=seed, dtype=np.float32)


def _updated(params, grads, scales, accept, *, implementation):
    """Returns parameters, state and copies after two updates."""
    optimizer = adam(0.1, max_norm=1.0, implementation=implementation)
    forms = Forms(fp8=E4M3, transposed=True, amax=True, padded=True)
    copies = [
        Copy(forms, Scale(scales, i)) if is_cast else None
        for i, is_cast in enumerate(_CAST)
    ]
    updates: Any = None
    state = optimizer.init(params)
    for factor in (1.0, 0.5):
        how = dict(accept=accept, lr_scale=np.float32(factor), copies=copies)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state, params, **how)
        params = optax.apply_updates(params, updates)
    return params, state, [x.copy for x in updates]
