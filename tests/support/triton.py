"""For tests of the Triton kernels: lowering, an interpreter, a recorder of launches.

The recorder needs no Triton. The interpreter is Triton's, with numpy for PyTorch.
"""

import ast
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from loka_jax import mapped, triton

_NEEDS_EXTRA = "needs the extra loka-jax[triton]"
# The modules that launch kernels, and those that hold them.
_NAMES_OF_LAUNCHING = (
    "dot_features gated_norm joined_norm matmul merge packed route row_update"
)
_LAUNCHING = [
    importlib.import_module(f"{triton.__name__}.{name}")
    for name in f"{_NAMES_OF_LAUNCHING} row_wire tails trees".split()
]
_KERNEL_FILES = sorted(pathlib.Path(triton.__file__).parent.glob("*_kernel.py"))
# Triton's name of a type -> numpy's.
_TYPES = dict(u8=np.uint8, i32=np.int32, u32=np.uint32, fp16=np.float16)
_TYPES |= dict(fp32=np.float32, bf16=ml_dtypes.bfloat16)
_TYPES |= dict(fp8e4nv=ml_dtypes.float8_e4m3fn, fp8e5=ml_dtypes.float8_e5m2)
_NAMES = {np.dtype(x): name for name, x in _TYPES.items()}


class Program(NamedTuple):
    """A kernel compiled for Hopper, and the shared memory of one of its programs."""

    ptx: str
    shared_bytes: int

    def ptxas_report(self) -> str:
        """Returns the report of ptxas on the program's registers, with its warnings."""
        ptxas = triton_module("knobs").nvidia.ptxas.path
        command = [ptxas, "--verbose", "--gpu-name=sm_90a", "-", "-o", os.devnull]
        how = dict(input=self.ptx, capture_output=True, text=True, check=True)
        return subprocess.run(command, **how).stderr


def spilled_bytes(report):
    """Returns the bytes of registers that are spilled to memory."""
    spills = re.findall(r"(\d+) bytes spill", report)
    assert spills, report
    return sum(map(int, spills))


def triton_module(name):
    """Returns a module of Triton, or skips the test."""
    return pytest.importorskip(f"triton.{name}", reason=_NEEDS_EXTRA)


def compiled(f, *args) -> Program:
    """Lowers f, a single kernel, for CUDA without a GPU."""
    [program] = compiled_programs(f, *args)
    return program


def compiled_programs(f, *args) -> list[Program]:
    """Lowers f for CUDA and returns its distinct kernels."""
    pytest.importorskip("jax_triton", reason=_NEEDS_EXTRA, exc_type=ImportError)
    from jax_triton import triton_lib

    programs = []

    def compile_to_ptx(*args):
        programs.append(compile_ttir(*args))
        return programs[-1]

    compile_ttir = triton_lib.compile_ttir_to_ptx_inplace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", compile_to_ptx)
        patch.setattr(triton_lib, "_COMPILED_KERNEL_CACHE", {})
        lowered = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))
    assert "triton_kernel_call" in lowered.as_text()
    return [Program(x.binary, x.shared_mem_bytes) for x in programs]


def skip_without_triton():
    """Skips the module that is being collected in an installation without Triton."""
    pytest.importorskip("triton", reason=_NEEDS_EXTRA)


class Launch(NamedTuple):
    """A launch that was recorded, given what the names of its parameters say."""

    kernel: str
    given: dict[str, Any]
    grid: int
    num_warps: int
    aliases: dict[str, str]

    def assert_given(self, **expected):
        """Asserts what was given: arrays themselves, shapes of outputs, constants."""
        for name, x in expected.items():
            found = self.given[name]
            if isinstance(found, jax.ShapeDtypeStruct):
                assert found.shape == x, name
            else:
                assert found is x or not isinstance(x, jax.Array) and found == x, name


@functools.cache
def _kernels_of_files():
    """Returns the kernels of each file, and the names of their parameters."""
    return {
        path.stem: {
            function.name: [x.arg for x in function.args.args]
            for function in ast.parse(path.read_text()).body
            if isinstance(function, ast.FunctionDef)
        }
        for path in _KERNEL_FILES
    }


@pytest.fixture
def launches(monkeypatch):
    """Records launches, whose results are zeros: neither Triton nor a GPU is needed."""
    parameters, recorded = _kernels_of_files(), []
    for stem, names in parameters.items():
        stand_in = types.SimpleNamespace(**{name: name for name in names})
        monkeypatch.setitem(sys.modules, f"{triton.__name__}.{stem}", stand_in)
        monkeypatch.setattr(triton, stem, stand_in, raising=False)
    parameters = {k: v for names in parameters.values() for k, v in names.items()}

    def record(kernel, *arrays, outputs, grid, num_warps, num_stages, constants, **how):
        del num_stages
        names, count = parameters[kernel], len(arrays) + len(outputs)
        given = dict(zip(names[:count], (*arrays, *outputs), strict=True))
        assert sorted(names[count:]) == sorted(constants)
        aliases = {
            names[source]: names[len(arrays) + target]
            for source, target in (how.get("aliases") or {}).items()
        }
        recorded.append(Launch(kernel, given | constants, grid, num_warps, aliases))
        return tuple(jnp.asarray(np.zeros(x.shape, x.dtype)) for x in outputs)

    def record_tree(kernel, given, out, of, *, grid, num_warps):
        trees = dict(given=given, out=out, of=of)
        recorded.append(Launch(kernel, trees, grid, num_warps, {}))
        return jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), out)

    for module in _LAUNCHING:
        monkeypatch.setattr(module, "launch_tree", record_tree, raising=False)
        monkeypatch.setattr(module, "launch", record, raising=False)
        monkeypatch.setattr(module, "require_triton", lambda: None, raising=False)
    return recorded


@pytest.fixture
def on_gpu():
    """Skips a test where the provider does not run."""
    if reason := triton.why_not_here():
        pytest.skip(reason)


@pytest.fixture(params=["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)])
def anywhere(request):
    """Runs a test interpreted and on a GPU."""
    request.getfixturevalue(request.param)


@dataclasses.dataclass
class _Tensor:
    """A numpy array with the methods that the interpreter calls on a tensor."""

    array: np.ndarray
    dtype: str

    def data_ptr(self):
        return self.array.ctypes.data

    def _itself(self, *_, **__):
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = _itself
    storage_offset = size = stride = _itself


@pytest.fixture
def interpreted(monkeypatch):
    """Interprets kernels on the CPU: replaces `launch` in the provider's modules."""
    # It takes no traced arrays.
    call = lambda kernel, *operands: kernel(*operands)  # noqa: E731
    monkeypatch.setattr(mapped, "one_by_one", call)
    tl = triton_module("language")
    standard = triton_module("language.standard")
    interpreter = triton_module("runtime.interpreter")
    # Imported before interpretation is enabled, which applies at import.
    for path in _KERNEL_FILES:
        importlib.import_module(f"{triton.__name__}.{path.stem}")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(interpreter, "_convert_float", _convert)
    _compute_in_float32(monkeypatch, interpreter.InterpreterBuilder, tl)

    def set_attr(_, owner, name, value):
        # Triton's takes int() of an array of one element, which numpy no longer does.
        if name == "__index__":
            value = lambda x: x.handle.data.item()  # noqa: E731
        monkeypatch.setattr(owner, name, value, raising=False)

    # It patches Triton's library, and does not restore it after nested calls.
    monkeypatch.setattr(interpreter._LangPatchScope, "set_attr", set_attr)
    # Functions of Triton's library that are written in Triton were compiled at import.
    compiled_type = triton_module("runtime.jit").JITFunction
    for name, function in list(vars(standard).items()):
        if isinstance(function, compiled_type):
            function = interpreter.InterpretedFunction(function.fn)
            for module in (standard, tl):
                monkeypatch.setattr(module, name, function, raising=False)
    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", _scan)

    def assembly(asm, constraints, args, *_, **__):
        """Computes what the kernels' assembly does: a sigmoid, or nothing."""
        return 1 / (1 + tl.exp2(args[0])) if "ex2" in asm else args[0]

    monkeypatch.setattr(tl, "inline_asm_elementwise", assembly)
    for module in _LAUNCHING:
        monkeypatch.setattr(module, "launch", _interpret, raising=False)
        monkeypatch.setattr(module, "require_triton", lambda: None, raising=False)


def _compute_in_float32(monkeypatch, builder, tl):
    """Makes the interpreter add and multiply bfloat16, which it holds as integers."""

    def to_float32(self, x):
        is_narrow = x.dtype.scalar == tl.bfloat16
        return self.cast_impl(x, tl.float32) if is_narrow else x

    def dot(self, lhs, rhs, *rest):
        return create_dot(self, to_float32(self, lhs), to_float32(self, rhs), *rest)

    def binary_op(self, lhs, rhs, op):
        out = apply(self, to_float32(self, lhs), to_float32(self, rhs), op)
        is_narrow = lhs.dtype.scalar == tl.bfloat16
        return self.cast_impl(out, tl.bfloat16) if is_narrow else out

    create_dot, apply = builder.create_dot, builder.binary_op
    monkeypatch.setattr(builder, "create_dot", dot)
    monkeypatch.setattr(builder, "binary_op", binary_op)


def _scan(self, inputs):
    """Replaces the interpreter's scan over elements by one over whole slices."""
    arrays = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    slices = [arrays_at for arrays_at in zip(*arrays, strict=True)]
    out = [slices[0]]
    for at in slices[1:]:
        pair = [
            self.to_tensor(x, of.dtype)
            for side in (out[-1], at)
            for x, of in zip(side, inputs, strict=True)
        ]
        out.append(tuple(x.handle.data for x in self.combine_fn.fn(*pair)))
    joined = [np.moveaxis(np.stack(x), 0, self.axis) for x in zip(*out, strict=True)]
    return [self.to_tensor(x, of.dtype) for x, of in zip(joined, inputs, strict=True)]


def _interpret(
    kernel, *arrays, outputs, grid, num_warps, num_stages, constants, aliases=None
):
    """Replaces `launch`, with the interpreter; aliased inputs are copied."""
    del num_warps, num_stages
    results = [np.zeros(x.shape, x.dtype) for x in outputs]
    arrays = [x if isinstance(x, int) else np.ascontiguousarray(x) for x in arrays]
    for source, target in (aliases or {}).items():
        results[target][...] = arrays[source]
    tensors = [
        x if isinstance(x, int) else _Tensor(x, _NAMES[x.dtype])
        for x in (*arrays, *results)
    ]
    kernel = _interpreted(kernel)
    with np.errstate(all="ignore"):  # as on a GPU
        kernel[(grid,)](*tensors, **constants)
    return tuple(jnp.asarray(x) for x in results)


def _interpreted(kernel):
    """Returns a kernel, or a generated one and what it calls, uncompiled."""
    body = kernel.fn.__globals__.get("body")
    if body is None:
        return getattr(_interpreted_copy(kernel.fn), kernel.__name__)
    names = kernel.fn.__globals__ | dict(body=_interpreted(body))
    function = types.FunctionType(kernel.fn.__code__, names)
    return triton_module("runtime.interpreter").InterpretedFunction(function)


def _interpreted_copy(function):
    """Returns the module of a kernel, and those it needs, imported anew uncompiled."""
    path = pathlib.Path(function.__code__.co_filename)
    spec = importlib.util.spec_from_file_location(f"interpreted_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    compiled_type = triton_module("runtime.jit").JITFunction
    for name, imported in list(vars(module).items()):
        if isinstance(imported, compiled_type):
            copy = getattr(_interpreted_copy(imported.fn), imported.__name__)
            setattr(module, name, copy)
    return module


def _convert(x, from_type, to_type, rounding_mode):
    """Casts by IEEE rounding, unlike the interpreter, which holds types as integers.

    To FP8 it saturates, as the hardware does.
    """
    del rounding_mode
    x = np.ascontiguousarray(x).view(_TYPES[from_type.name]).astype(np.float32)
    to = _TYPES[to_type.name]
    if "float8" in np.dtype(to).name:
        limit = float(ml_dtypes.finfo(to).max)
        x = np.clip(x, -limit, limit)  # NaN stays NaN
    y = x.astype(to)
    return y.view(f"uint{8 * y.itemsize}")
