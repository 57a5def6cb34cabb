"""Digests of programs, to tell whether a change of the sources changes GPU code.

A program is traced and lowered for CUDA, which needs no GPU, and digested as a graph:

    digest(value) = hash(operation, attributes, types, digests of the operands)
    digest(program) = hash(digests of its results, and of its side effects in order)

So names, locations, the order of functions and of independent operations, and code
whose results are unused do not count. Kernels are digested as the code that reaches
their compiler: Mosaic GPU's module, Triton's PTX.
"""

import functools
import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.mlir import ir, passmanager

_LENGTH = 16
_CONFIGS = ("backend_config", "mhlo.backend_config")
# The parameter with the inner program of primitives that only run it.
_INNER = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}
_PALLAS = ("mpmd_map", "pallas_call")
# A file for debugging, with the name of the kernel's function and a counter.
_DUMP_BASENAME = re.compile(r'mosaic_gpu\.dump_basename = "[^"]*"')
_SYMBOL = re.compile(r'@([\w$.-]+)|sym_name = "([^"]*)"')
# Of PTX: comments, lines of sources, and labels that only a debugger reads.
_PTX_DEBUG = re.compile(
    r"//.*|^\s*\.loc\b.*|^\s*\$L__(?:tmp|func_begin|func_end)\d+:", re.MULTILINE
)
_PTX_DEBUG_SECTIONS = re.compile(r"^\s*\.(?:file\b|section\s+\.debug)", re.MULTILINE)
# Fields of the messages in a Triton call: TritonAnyKernelCall.kernel_call.kernel.
_TRITON_KERNEL, _TRITON_NAME, _TRITON_PTX, _TRITON_TTIR = (1, 1), 1, 4, 5


def program_digest(function: Callable[..., Any], arguments: Sequence[Any]) -> str:
    """Returns the digest of a function's program for CUDA.

    Args:
        function: as `jax.jit` takes it.
        arguments: arrays or `jax.ShapeDtypeStruct`, in trees.
    """
    traced = jax.jit(function).trace(*arguments)
    leaves = jax.tree.leaves(arguments)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    # Kernels make most of a lowering, and many programs share them.
    closed = traced.jaxpr
    run = functools.partial(_run_without_kernels, closed.jaxpr, closed.consts)
    return _digest_of(jax.jit(run), shapes)


def _digest_of(jitted: Any, shapes: Sequence[Any]) -> str:
    lowered = jitted.trace(*shapes).lower(lowering_platforms=("cuda",))
    module: Any = lowered.compiler_ir()
    with module.context:
        pipeline = "builtin.module(inline,canonicalize,symbol-dce)"
        passmanager.PassManager.parse(pipeline).run(module.operation)
        [main] = module.body.operations
        digests = {
            arg: _hash("argument", i, arg.type) for i, arg in enumerate(main.arguments)
        }
        return _of_block(main.regions[0].blocks[0], digests)


def _run_without_kernels(jaxpr: jex.Jaxpr, consts, *arguments):
    """Returns a program's results, each Pallas kernel a call named by its digest."""
    env: dict[jex.Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, jex.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if name in _INNER:
            inner = eqn.params[_INNER[name]]
            outs = _run_without_kernels(inner.jaxpr, inner.consts, *values)
        elif name in _PALLAS:
            avals: list[Any] = [var.aval for var in eqn.outvars]
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
            outs = jax.ffi.ffi_call(f"kernel {_kernel_digest(eqn)}", shapes)(*values)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            outs = eqn.primitive.bind(*values, **params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        env |= dict(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


_kernels: dict[tuple, str] = {}


def _kernel_digest(eqn: jex.JaxprEqn) -> str:
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    # In full: its grid, layouts, transforms of its memory, and its code.
    key = (eqn.primitive.name, str(avals), str(eqn.params))
    if key not in _kernels:
        params = eqn.primitive.get_bind_params(eqn.params)
        call = jax.jit(lambda *args: eqn.primitive.bind(*args, **params))
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
        _kernels[key] = _digest_of(call, shapes)
    return _kernels[key]


def _of_block(block: Any, digests: dict[Any, str]) -> str:
    """Returns the digest of a block's results and side effects."""
    effects = []
    for operation in block.operations:
        op = operation.operation
        digest = _of_operation(op, digests)
        for i, result in enumerate(op.results):
            digests[result] = _hash(digest, i)
        if not len(op.results) or _has_effect(op):
            effects.append(digest)
    return _hash(*effects)


def _of_operation(op: Any, digests: dict[Any, str]) -> str:
    regions = []
    for region in op.regions:
        [block] = region.blocks
        inner = dict(digests)
        for i, arg in enumerate(block.arguments):
            # By the nesting too: an outer block's arguments are read within.
            inner[arg] = _hash("block argument", _depth(op), i, arg.type)
        regions.append(_of_block(block, inner))
    return _hash(
        op.name,
        *_attributes(op),
        *(digests[operand] for operand in op.operands),
        *(result.type for result in op.results),
        *regions,
    )


def _depth(op: Any) -> int:
    depth = 0
    while op is not None:
        op, depth = op.parent, depth + 1
    return depth


def _has_effect(op: Any) -> bool:
    attributes = op.attributes
    return "has_side_effect" in attributes and str(attributes["has_side_effect"]) == (
        "true"
    )


def _attributes(op: Any) -> Iterator[str]:
    attributes = {name: op.attributes[name] for name in op.attributes}
    for name in sorted(attributes):
        if name not in _CONFIGS:
            yield f"{name}={attributes[name]}"
    if op.name == "stablehlo.custom_call":
        yield from _payload(attributes)


def _payload(attributes: dict[str, Any]) -> Iterator[str]:
    """Yields the configuration of a custom call, with kernels without their names."""
    target = attributes["call_target_name"].value
    if target.startswith("mosaic_gpu"):
        config = attributes["mhlo.backend_config"]
        for named in sorted(config, key=lambda named: named.name):
            if named.name == "module":
                yield _mosaic(named.attr.value_bytes)
            elif named.name != "kernel_hash":  # of the module with its names
                yield f"{named.name}={named.attr}"
    elif target == "triton_kernel_call_ffi":
        kernel = attributes["backend_config"]["opaque"]
        yield from _triton(zlib.decompress(kernel.value_bytes))
    else:
        for name in _CONFIGS:
            if name in attributes:
                yield f"{name}={attributes[name]}"


def _mosaic(bytecode: bytes) -> str:
    """Returns a kernel of Mosaic GPU as text."""
    context: Any = ir.Context.current
    unregistered = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True
    try:
        module: Any = ir.Module.parse(bytecode)
        pipeline = "mosaic_gpu-serde{serialize=false},canonicalize,cse,symbol-dce"
        manager = passmanager.PassManager.parse(f"builtin.module({pipeline})")
        manager.run(module.operation)
        text = module.operation.get_asm(
            print_generic_op_form=True, enable_debug_info=False
        )
    finally:
        context.allow_unregistered_dialects = unregistered
    return _renamed(text)


def _renamed(text: str) -> str:
    """Returns a module's text with the names of its functions replaced by numbers."""
    names = re.findall(r'sym_name = "([^"]*)"', text)
    numbers = {name: f"symbol{i}" for i, name in enumerate(dict.fromkeys(names))}

    def rename(match: re.Match) -> str:
        name = match[1] or match[2]
        return match[0].replace(name, numbers.get(name, name))

    return _SYMBOL.sub(rename, _DUMP_BASENAME.sub("", text))


def _triton(message: bytes, path: tuple[int, ...] = ()) -> Iterator[str]:
    """Yields the parts of a Triton call: its kernel's PTX, its grid and parameters."""
    fields = list(_fields(message))
    name = b""
    for number, value in fields:
        is_kernel = path == _TRITON_KERNEL
        if is_kernel and number == _TRITON_NAME:
            name = value
        elif is_kernel and number == _TRITON_PTX:
            yield _ptx(value.decode(), name.decode())
        elif (*path, number) in (_TRITON_KERNEL[:1], _TRITON_KERNEL):
            yield from _triton(value, (*path, number))
        elif not (is_kernel and number == _TRITON_TTIR):
            yield f"{path} {number} {value}"


def _ptx(text: str, name: str) -> str:
    text = _PTX_DEBUG_SECTIONS.split(text, maxsplit=1)[0]
    lines = _PTX_DEBUG.sub("", text).replace(name, "kernel").splitlines()
    return "\n".join(line.strip() for line in lines if line.strip())


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the numbers and values of a protocol buffer's fields."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, wire_type = divmod(varint(), 8)
        if wire_type == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(wire_type) or varint()
        yield number, message[at : at + size]
        at += size


def _hash(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        text = str(part).encode()
        digest.update(len(text).to_bytes(8) + text)
    return digest.hexdigest()[:_LENGTH]
