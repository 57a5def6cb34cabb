"""Updates of all dense parameters by Triton: what is served, and the launches."""

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import E4M3
from loka_jax.tails import Forms, Scale
from loka_jax.triton.adam import MOST_ARRAYS, Copy, Factors, adam, why_not
from tests.support.triton import launches

__all__ = ["launches"]

FACTORS = Factors(1.0, 0.1, 0.001, -0.01, 1.0, 1.0)
CONSTANTS = dict(b1=0.9, b2=0.999, eps=1e-8)
FORMS = Forms(bf16=False, fp8=E4M3, transposed=True, amax=True, padded=True)
COPY = Copy(FORMS, Scale.of(jnp.ones(())))


def arrays(*shapes):
    """Returns zeros of these shapes, four times."""
    return [[jnp.asarray(np.zeros(x, np.float32)) for x in shapes] for _ in range(4)]


def test_a_launch_updates_arrays_in_place_and_writes_forms(launches):
    shapes = (100, 70), (5000,), (64, 65)
    found = adam(*arrays(*shapes), FACTORS, [COPY, None, None], **CONSTANTS)
    (launch,) = launches
    assert launch.aliases == {i: i for i in range(9)}
    # Tiles of the padded matrix, and of rows of 4,096 numbers.
    assert launch.given["of"].starts == (0, 4, 6, 8) and launch.grid == 8
    first, *rest = found
    assert first.copy.fp8.shape == (112, 80) and first.copy.fp8_t.shape == (80, 112)
    assert first.copy.scale_inv is COPY.scale_inv and first.copy.bf16 is None
    assert first.copy.amaxes.shape == (4,)
    assert [x.copy for x in rest] == [None, None]
    for x, shape in zip(found, shapes, strict=True):
        assert x.param.shape == x.mu.shape == x.nu.shape == shape


def test_many_arrays_are_updated_in_few_launches(launches):
    found = adam(*arrays(*[(3,)] * (2 * MOST_ARRAYS + 1)), FACTORS, **CONSTANTS)
    assert len(found) == 2 * MOST_ARRAYS + 1
    assert [launch.grid for launch in launches] == [MOST_ARRAYS, MOST_ARRAYS, 1]


def test_arrays_that_are_not_served_are_refused():
    params, *rest = arrays((4, 4))
    halves = [x.astype(jnp.bfloat16) for x in params]
    assert why_not(params, params) is None
    for given, match in (
        ((halves, *rest), "an array is bfloat16, not float32"),
        ((params, halves, *rest[1:]), "an array is bfloat16, not float32"),
        (arrays((0, 4)), "an array of 0 numbers"),
    ):
        with pytest.raises(ValueError, match=match):
            adam(*given, FACTORS, **CONSTANTS)
    with pytest.raises(ValueError, match=r"forms of an array of shape \(5,\)"):
        adam(*arrays((5,)), FACTORS, [COPY], **CONSTANTS)
