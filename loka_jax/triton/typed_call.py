"""Calls of Triton kernels that XLA may record in CUDA graphs.

jax-triton 0.3 lowers its calls to a target of XLA's old interface, of which XLA knows
nothing and which it launches from the host, one kernel after another. JAX's plugin has
the same launcher as a typed target. XLA records calls of that one, with the kernels
around them, as a graph, which the host launches at once.

Calls that others make with jax-triton are lowered as ever.
"""

import functools
from typing import Any

import jax_triton  # pyright: ignore[reportMissingImports]  # an optional extra
from jax.interpreters import mlir
from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]
from jaxlib.mlir import ir

TARGET = "triton_kernel_call_ffi"
_TYPED = 4  # of StableHLO's versions of custom calls

triton_call = functools.partial(jax_triton.triton_call, custom_call_target_name=TARGET)


def _lower(ctx: mlir.LoweringRuleContext, *operands: ir.Value, **params: Any):
    """Lowers a call as jax-triton does; calls of `TARGET` as typed ones."""
    results = triton_lib.triton_kernel_call_lowering(
        triton_lib.get_cuda_backend, ctx, *operands, **params
    )
    if params["custom_call_target_name"] == TARGET:
        attributes = results[0].owner.attributes  # pyright: ignore[reportAttributeAccessIssue]
        kernel = attributes["backend_config"]
        attributes["backend_config"] = ir.DictAttr.get({"opaque": kernel})
        attributes["api_version"] = mlir.i32_attr(_TYPED)
    return results


mlir.register_lowering(triton_lib.triton_kernel_call_p, _lower, platform="cuda")
