"""Compiles programs for an H200, or a B200, without one, and reads the optimized HLO.

Needs `jax-cuda13-plugin`, `jax-cuda13-pjrt`, `nvidia-cuda-nvcc` and `nvidia-nvvm`.
"""

import functools
import importlib
import os
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import pytest
from jax.experimental import topologies

_HERE = pathlib.Path(__file__)
# The HLO of an FP8 GEMM, and of every other product (a Triton fusion contains a `dot`).
_FP8_GEMM = 'custom_call_target="__cublas$lt$matmul$f8"'
_OTHER_GEMM = re.compile(r'custom_call_target="__cublas\$(?:gemm|lt\$matmul)"| dot\(')
# Instructions of the entry computation that launch nothing.
_FREE = "parameter constant tuple get-tuple-element bitcast after-all".split()
# `%name = type opcode(`, the type one array or a tuple of them, layouts removed.
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (?:\([^)]*\)|\S+) ([\w\-]+)\(")


class Kernel(NamedTuple):
    """An instruction of the entry computation that launches something."""

    name: str
    opcode: str


def compiled(
    f: Callable, *args, donate_argnums: tuple[int, ...] = (), target: str = "h200"
) -> str:
    """Returns the optimized HLO of `f` for a GPU; arguments give their shapes."""
    sharding = jax.sharding.SingleDeviceSharding(_device(target))
    avals = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    lowered = jax.jit(f, donate_argnums=donate_argnums).lower(*avals)
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0}).as_text()


def fp8_gemms(hlo: str) -> int:
    """Returns the number of FP8 GEMMs in a program."""
    return hlo.count(_FP8_GEMM)


def other_gemms(hlo: str) -> int:
    """Returns the number of products in a program that are not FP8 GEMMs."""
    return len(_OTHER_GEMM.findall(hlo))


def kernels(hlo: str) -> list[Kernel]:
    """Returns the launches of the entry computation, in order."""
    entry = hlo[hlo.index("\nENTRY ") :]
    entry = entry[: entry.index("\n}")]
    lines = (re.sub(r"\{[^}]*\}", "", line) for line in entry.splitlines()[2:])
    all_kernels = (Kernel(*m.groups()) for m in map(_INSTRUCTION.match, lines) if m)
    return [kernel for kernel in all_kernels if kernel.opcode not in _FREE]


@functools.cache
def _device(target: str):
    target = _HERE.with_name(f"{target}_target.txtpb").read_text()
    how = dict(platform="cuda", topology_name="1x1x1", topology="1x1x1")
    make = functools.partial(topologies.get_topology_desc, target_config=target, **how)
    try:
        return make().devices[0]
    except NotImplementedError:
        _register_plugin()
        return make().devices[0]


def _register_plugin():
    """Registers the CUDA plugin, which JAX ignores if it finds no cuDNN."""
    try:
        plugin = importlib.import_module("jax_plugins.xla_cuda13")
    except ImportError:
        pytest.skip("needs jax-cuda13-plugin and jax-cuda13-pjrt to compile for CUDA")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        plugin.initialize()
