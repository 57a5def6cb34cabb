"""Provider `pallas`: Mosaic GPU kernels for Hopper. Arrays in, arrays out.

`site_kernels` has a list of the kernels of a site.
"""

from loka_jax.pallas.site_kernels import (
    KERNELS,
    ROWS,
    SiteKernels,
    training_outputs,
    why_not,
)

__all__ = ["KERNELS", "ROWS", "SiteKernels", "training_outputs", "why_not"]
