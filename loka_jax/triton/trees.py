"""Kernels whose operands are trees: tuples of arrays, scales, numbers and None.

    @triton.jit
    def kernel(given, out, of):
        tile = tl.load(given.z.at + ...)  # of `given.z.shape`, which is constant
        if given.bias is not None:  # decided when the kernel is compiled
            ...

jax-triton passes pointers one by one. So a kernel is generated for each structure: it
has a parameter for each array, and calls the one that is written with trees of them.
"""

import dataclasses
import functools
import hashlib
import linecache
from collections import namedtuple
from typing import Any, NamedTuple

import jax

from loka_jax.mapped import by_kernel
from loka_jax.tails import Scale
from loka_jax.triton.launch import launch


class Ref(NamedTuple):
    """An array in a kernel: a pointer to its first element, and its shape."""

    at: Any
    shape: tuple[int, ...]


def static(**values: Any) -> Any:
    """Returns compile-time constants, which a kernel reads by name: `of.block_m`."""
    return namedtuple("static", values)(**values)  # noqa: PYI024


def launch_tree(
    kernel: Any, given: Any, out: Any, of: Any, *, grid: int, num_warps: int
) -> Any:
    """Returns the results of a kernel, in the structure of `out`.

    Args:
        kernel: compiled by `triton.jit`, with parameters (given, out, of).
        given: its operands: arrays become `Ref`s, scales pointers, and dataclasses
            tuples of the same names; numbers are constants.
        out: types of its results, None for what is not written.
        of: further constants, see `static`.
        grid: the number of programs.
        num_warps: warps of a program.
    """
    arguments: list[Any] = []
    results: list[Any] = []
    trees = ((given, arguments), (out, results), (of, []))
    source = ", ".join(_source(*tree) for tree in trees)
    numbers = {i: x for i, x in enumerate(arguments) if isinstance(x, int)}

    def run(*arrays: jax.Array):
        operands: list[Any] = list(arrays)
        for i, number in numbers.items():
            operands.insert(i, number)
        return launch(
            _generated(kernel, source, len(operands), len(results)),
            *operands,
            outputs=results,
            grid=grid,
            num_warps=num_warps,
            num_stages=1,
            constants={},
        )

    arrays = [x for i, x in enumerate(arguments) if i not in numbers]
    return jax.tree.unflatten(jax.tree.structure(out), by_kernel(run, *arrays))


def _source(x: Any, arguments: list[Any]) -> str:
    """Returns the expression of a tree, and appends its arrays to `arguments`."""

    def parameter(value: Any) -> str:
        arguments.append(value)
        kind = "o" if isinstance(value, jax.ShapeDtypeStruct) else "p"
        return f"{kind}{len(arguments) - 1}"

    if isinstance(x, Scale):
        return f"{parameter(x.vector)} + {parameter(x.at)}"
    if hasattr(x, "shape"):
        return f"Ref({parameter(x)}, {x.shape!r})"
    if dataclasses.is_dataclass(x):
        x = static(**vars(x))
    if not isinstance(x, tuple):
        return repr(x)
    parts = "".join(f"{_source(value, arguments)}, " for value in x)
    fields = getattr(x, "_fields", ())
    if not fields:
        return f"({parts})"
    name = "_".join(("of", *fields))
    _TYPES.setdefault(name, type(x))
    return f"{name}({parts})"


# The types of named tuples in generated kernels, by what `_source` calls them.
_TYPES: dict[str, type] = {}


@functools.cache
def _generated(kernel: Any, source: str, inputs: int, outputs: int) -> Any:
    """Returns the kernel that takes arrays one by one, of the same name."""
    import triton  # an optional extra

    from loka_jax.triton.kept import keep

    keep()
    name = kernel.__name__
    parameters = [f"p{i}" for i in range(inputs)] + [f"o{i}" for i in range(outputs)]
    text = f"def {name}({', '.join(parameters)}):\n    body({source})\n"
    # Triton reads the source of a function where Python has it.
    file = f"<{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = dict(body=kernel, Ref=Ref, **_TYPES)
    names["__name__"] = kernel.__module__
    exec(compile(text, file, "exec"), names)
    return triton.jit(names[name])
