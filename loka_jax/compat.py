"""What this library needs of JAX and Flax beyond their public API, all in one place.

`tests/unit/compat_test.py` names the versions that each part was tried with.
"""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax.extend.core as jex
from jax._src import config
from jaxlib.mlir import ir

# Events of `jax.monitoring`, whose names JAX may change.
LOWERING_EVENT = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILATION_EVENT = "/jax/core/compile/backend_compile_duration"


@functools.cache
def name_kernels_alike() -> None:
    """Has Mosaic GPU leave out the number by which it tells its dumps apart.

    It counts the kernels that a process has lowered, and is part of a program. So JAX's
    cache of compiled programs would miss one if other kernels were lowered before it.
    """
    from jax.experimental.mosaic import gpu

    dialect: Any = vars(gpu.core)["dialect"]
    number = dialect.get_or_set_dump_options

    def unnumbered(module: Any) -> Any:
        options = number(module)
        if not (options.mlir_passes or options.ptx or options.sass):
            name = ir.StringAttr.get("kernel", module.context)
            module.operation.attributes["mosaic_gpu.dump_basename"] = name
        return options

    dialect.get_or_set_dump_options = unnumbered


def random_bits_by_kernel() -> AbstractContextManager[Any]:
    """Has programs that are lowered within take random bits from JAX's kernel on a GPU.

    XLA's code, the same bits, took ten seconds to compile for a wide model's parameters
    and two with the kernel. That holds the bits in memory beside what is made of them.
    """
    return config.threefry_gpu_kernel_lowering(True)


def evaluate(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of an equation of a jaxpr."""
    params = eqn.primitive.get_bind_params(eqn.params)
    results = eqn.primitive.bind(*values, **params)
    return results if eqn.primitive.multiple_results else [results]


def scan_operands(params: dict[str, Any], operands: Sequence[Any]) -> list[list[Any]]:
    """Returns the operands of a scan: constants, carry, and what is cut into steps."""
    return [[*part] for part in params["ft_in"].update(operands).unpack()]


def closed_jaxprs(params: dict[str, Any]) -> list[Any]:
    """Returns the jaxprs of a scan, cond, while or remat with their constants."""
    found = [params.get(name) for name in ("jaxpr", "cond_jaxpr", "body_jaxpr")]
    found = [x for x in (*found, *params.get("branches", ())) if x is not None]
    return [
        x if isinstance(x, jex.ClosedJaxpr) else jex.ClosedJaxpr(x, ()) for x in found
    ]
