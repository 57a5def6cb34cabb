"""Calls of Triton kernels as XLA sees them: it records typed ones in CUDA graphs."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from loka_jax.triton.launch import launch


def test_kernels_are_typed_calls_that_write_in_place():
    pytest.importorskip("jax_triton", exc_type=ImportError)
    from loka_jax.triton.row_update_kernel import sum_runs_kernel

    rows = jax.ShapeDtypeStruct((64, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((64,), jnp.int32)
    constants = dict(n=64, dim=16, is_carried=True, positions=64, tile_dim=16)
    how = dict(grid=1, num_warps=4, num_stages=1, constants=constants, aliases={3: 0})

    def call(*operands):
        outputs = [rows, ids, ids, rows]
        return launch(sum_runs_kernel, *operands, outputs=outputs, **how)

    traced = jax.jit(call).trace(ids, ids, rows, rows)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@triton_kernel_call_ffi" in text and "api_version = 4" in text
    assert "backend_config = {opaque = " in text and "output_operand_alias" in text


def test_importing_the_provider_does_not_import_triton():
    modules = "loka_jax.nn, loka_jax.triton.matmul, loka_jax.triton.row_update"
    found = "{'triton', 'jax_triton'} & {*sys.modules}"
    command = [sys.executable, "-c", f"import sys, {modules}; print({found})"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
