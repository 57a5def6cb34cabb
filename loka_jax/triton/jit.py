"""How kernels are compiled. Importing this module imports Triton."""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import inspect
from collections.abc import Callable
from typing import Any

import triton


def jit(function: Callable[..., Any]) -> Any:
    """Returns a function that Triton compiles from its source.

    As it is written: without the run-time type checks that tests wrap functions in.
    """
    return triton.jit(inspect.unwrap(function))
