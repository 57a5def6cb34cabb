"""Compiles many small programs at a time, and keeps the errors of those that fail."""

import concurrent.futures
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
    compiled: dict[str, Any] = {}
    # One program is traced, which Python does alone, while others are compiled.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for name, (function, arguments) in programs.items():
            try:
                lowered = _of_leaves(function, arguments).lower(*leaves(arguments))
                compiled[name] = pool.submit(lowered.compile, dict(options))
            except Exception as error:  # of any kind: the caller sees which it was
                compiled[name] = error
    return {name: _outcome(x) for name, x in compiled.items()}


def leaves(arguments: tuple) -> tuple:
    """Returns the arrays in a function's arguments, as its compiled form takes them."""
    return tuple(jax.tree.leaves(arguments))


def _of_leaves(function, arguments):
    # Ahead-of-time compilation builds trees of argument descriptions, which `Fp8Array`
    # refuses as leaves where types are checked at run time.
    structure = jax.tree.structure(arguments)
    return jax.jit(lambda *leaves: function(*jax.tree.unflatten(structure, leaves)))


def _outcome(compiled):
    if isinstance(compiled, Exception):
        return compiled
    return compiled.exception() or compiled.result()
