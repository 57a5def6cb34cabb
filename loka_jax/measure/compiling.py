"""Compiles many small programs at a time, and keeps the errors of those that fail."""

import concurrent.futures
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Kernels of a command buffer are not profiled one by one.
NO_CAPTURE = {"xla_gpu_enable_command_buffer": ""}
# For programs that are not timed: leaves out the search for the fastest kernels, which
# is most of a compilation.
UNTUNED = {"xla_gpu_autotune_level": "0"}
_THREADS = 8


def compile_all(
    programs: Mapping[str, tuple[Callable[..., Any], tuple]],
    options: Mapping[str, str] = NO_CAPTURE,
) -> dict[str, Any]:
    """Returns compiled functions by name, or the exception where compilation failed.

    They take the leaves of their arguments, see `leaves`.

    Args:
        programs: functions with the arguments they are compiled for.
        options: of the compiler.
    """
    lowered: dict[str, Any] = {}
    for name, (function, arguments) in programs.items():
        try:
            lowered[name] = _of_leaves(function, arguments).lower(*leaves(arguments))
        except Exception as error:  # a candidate may not run here
            lowered[name] = error
    # Not while programs are lowered: a Mosaic kernel that was lowered beside a
    # compilation has ended the process.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        compile_one = functools.partial(_compiled, options=dict(options))
        return dict(zip(lowered, pool.map(compile_one, lowered.values()), strict=True))


def leaves(arguments: tuple) -> tuple:
    """Returns the arrays in a function's arguments, as its compiled form takes them."""
    return tuple(jax.tree.leaves(arguments))


def _of_leaves(function, arguments):
    # Ahead-of-time compilation builds trees of argument descriptions, which `Fp8Array`
    # refuses as leaves where types are checked at run time.
    structure = jax.tree.structure(arguments)
    return jax.jit(lambda *leaves: function(*jax.tree.unflatten(structure, leaves)))


def _compiled(lowered: Any, options: dict[str, str]) -> Any:
    """Returns a compiled program, or the exception that it or its lowering raised."""
    if isinstance(lowered, Exception):
        return lowered
    try:
        return lowered.compile(options)
    except Exception as error:  # a candidate may not compile here
        return error
