"""What the kernel of the dense parameters' updates is checked on."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from loka_jax.fp8 import E4M3
from loka_jax.measure.check_families import Case, normal, uneven
from loka_jax.optim.adam import adam
from loka_jax.optim.clip import clip_factor
from loka_jax.tails import Forms, Scale
from loka_jax.triton import adam as kernel
from loka_jax.triton.adam import Copy, Factors

# Whole tiles, none that is whole, and arrays of a few numbers.
_SHAPES = ((128, 192), (100, 70), (333,), (5,), (9, 7))
_CAST = (True, True, False, False, False)
_FORMS = Forms(fp8=E4M3, transposed=True, amax=True, padded=True)
_B1, _B2, _EPS, _RATE = 0.9, 0.999, 1e-8, 0.1
_POW = 2.0**-13  # noise: 1 - 0.999^t magnifies the rounding of powers by 1,000
_RATE_SCALES = (1.0, 0.5)  # of two updates


def adams() -> list[Case]:
    """Returns the cases of updates that a step makes, and of some that it refuses."""
    return [
        Case(f"updates, {name}", functools.partial(_draw, accept), _ours, _theirs, _POW)
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


def _copies(scales) -> list[Copy | None]:
    return [
        Copy(_FORMS, Scale(scales, i)) if is_cast else None
        for i, is_cast in enumerate(_CAST)
    ]


def _ours(params, grads, scales, accept):
    """Returns parameters, moments and copies after two updates."""
    mu, nu = ([0.0 * x for x in params] for _ in range(2))
    copies: Any = None
    for updates, rate_scale in enumerate(_RATE_SCALES, 1):
        # Of those that were refused the next one is again the first.
        count = jnp.where(accept, float(updates), 1.0)
        corrections = 1 - jnp.power(_B1, count), 1 - jnp.power(_B2, count)
        factors = Factors(
            clip_factor(grads, 1.0), *corrections, -_RATE, rate_scale, accept
        )
        constants = dict(b1=_B1, b2=_B2, eps=_EPS)
        operands = params, grads, mu, nu, factors, _copies(scales)
        updated = kernel.adam(*operands, **constants)
        params, mu, nu, copies = map(list, zip(*updated, strict=True))
    return params, mu, nu, copies


def _theirs(params, grads, scales, accept):
    optimizer = adam(_RATE, max_norm=1.0, implementation="xla")
    updates: Any = None
    state: Any = optimizer.init(params)
    for rate_scale in _RATE_SCALES:
        how = dict(accept=accept, lr_scale=rate_scale, copies=_copies(scales))
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(grads, state, params, **how)
        params = optax.apply_updates(params, updates)
    (_, (moments, _)) = state
    return params, moments.mu, moments.nu, [x.copy for x in updates]
