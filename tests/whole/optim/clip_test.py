"""Kernels of the global norm, compiled for an H200."""

import jax

from loka_jax.optim.clip import global_norm
from tests.support import hopper


def test_many_small_arrays_cost_no_more_kernels_than_one():
    arrays = {"matrix": jax.ShapeDtypeStruct((1024, 1024), "float32")}
    kernels = []
    for size in (3, 5, 7, 1024):
        arrays[str(size)] = jax.ShapeDtypeStruct((size,), "float32")
        kernels.append(len(hopper.kernels(hopper.compiled(global_norm, arrays))))
    assert set(kernels) == {kernels[0]}
