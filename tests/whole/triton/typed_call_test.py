"""What XLA sees of a call of a Triton kernel: it records typed ones in CUDA graphs."""

import jax
import jax.numpy as jnp
import pytest

from loka_jax.triton.launch import launch

ROWS = jax.ShapeDtypeStruct((64, 16), jnp.float32)
IDS = jax.ShapeDtypeStruct((1, 64), jnp.int32)
SIZES = {"num_rows": 64, "capacity": 64, "dim": 16, "width": 1024, "tile": 64}
CONSTANTS = SIZES | {"tile_dim": 16, "codec": "bf16"}
WARPS = {"num_warps": 4, "num_stages": 1}


@pytest.fixture
def kernel():
    pytest.importorskip("jax_triton", exc_type=ImportError)
    from loka_jax.triton import row_wire_kernel

    return row_wire_kernel.encode_kernel


def lowered(function):
    traced = jax.jit(function).trace(ROWS, IDS)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_kernels_are_typed_calls_that_write_in_place(kernel):
    def call(rows, ids):
        how = WARPS | {"grid": 1, "constants": CONSTANTS, "aliases": {0: 0}}
        return launch(kernel, rows, ids, outputs=[ROWS], **how)

    text = lowered(call)
    assert "@triton_kernel_call_ffi" in text and "api_version = 4" in text
    assert "backend_config = {opaque = " in text
    assert "output_operand_alias" in text


def test_calls_of_others_are_lowered_as_ever(kernel):
    import jax_triton

    import loka_jax.triton.typed_call  # noqa: F401  # registers how ours are lowered

    def call(rows, ids):
        how = WARPS | CONSTANTS | {"grid": (1,), "compute_capability": 90}
        return jax_triton.triton_call(rows, ids, kernel=kernel, out_shape=ROWS, **how)

    text = lowered(call)
    assert "@triton_kernel_call(" in text and "api_version = 2" in text
