"""What this library needs of JAX and Flax beyond their public API, all in one place.

`tests/unit/compat_test.py` names the versions that each part was tried with.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax import linen

# Events of `jax.monitoring`, whose names JAX may change.
LOWERING_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILATION_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def dot_general_set(
    layer: linen.Dense | linen.DenseGeneral, dot_general: Callable
) -> Iterator[None]:
    """Lets a bound, frozen layer of Flax multiply by `dot_general` within the block.

    A `clone` with another `dot_general` would be a module of its own: a call of it runs
    all interceptors again, those of a user included.
    """
    before = layer.dot_general
    object.__setattr__(layer, "dot_general", dot_general)
    try:
        yield
    finally:
        object.__setattr__(layer, "dot_general", before)


def bias_shapes(layer: Any, equation: str, x: Any, kernel: Any) -> Sequence[Any]:
    """Returns the shape of the bias of a Flax Einsum, and that added to its product."""
    return layer._get_bias_shape(equation, x, kernel)


def evaluate(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of an equation of a jaxpr."""
    params = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*values, **params)
    return results if eqn.primitive.multiple_results else [results]
