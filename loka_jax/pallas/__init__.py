"""Provider `pallas`: Mosaic GPU kernels for Hopper. Arrays in, arrays out.

Each kernel is a module with `why_not`, which says in a sentence why a problem is not
served (None if it is), and a function of the module's name, which launches it:

    dense_norm      product, norm, activation and quantization in one kernel
    norm_quantize   norm, activation and quantization after a product by XLA
    norm_backward   backward pass of activation and norm
    fm_lcb          Wukong's factorization machine and linear compression
    fm_lcb_backward its backward pass

`KERNELS` has them as sites see them: (`why_not(spec, recipe)`, run).

The kernels are imported when one of these names is first asked for, as a kernel is
planned: Mosaic GPU takes a fifth of a second, which a CPU has no use for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka_jax.pallas.site_kernels import (
        KERNELS,
        ROWS,
        SiteKernels,
        training_outputs,
        why_not,
    )

__all__ = ["KERNELS", "ROWS", "SiteKernels", "training_outputs", "why_not"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("loka_jax.pallas.site_kernels"), name)
