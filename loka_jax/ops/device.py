"""The device that kernels are planned for."""

import dataclasses
import functools
from typing import Any

import jax

from loka_jax import pallas


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A device and its Pallas kernels.

    Attributes:
        compute_capability: of an NVIDIA GPU, such as "9.0".
        interpret: `plgpu.InterpretGPUParams` to interpret Pallas kernels on a CPU.
        own_kernels: the Pallas kernels of a site in place of `pallas.KERNELS`.
    """

    platform: str = "gpu"
    compute_capability: str | None = None
    interpret: Any = None
    own_kernels: Any = None

    @property
    def kernels(self) -> Any:
        """The Pallas kernels of a site, `pallas.SiteKernels`."""
        return self.own_kernels or pallas.KERNELS

    @property
    def why_not_pallas(self) -> str | None:
        """Why no Pallas kernel runs here, or None if they do."""
        if self.compute_capability == "9.0" or self.interpret is not None:
            return None
        return "no Hopper GPU"

    @property
    def why_not_triton(self) -> str | None:
        """Why no Triton kernel runs here, or None if they do."""
        return None if self.platform == "gpu" else "no GPU"

    @property
    def why_not_tails(self) -> str | None:
        """Why no kernel of tails runs here, or None if they do."""
        return None if self.compute_capability == "9.0" else "no Hopper GPU"


HOPPER = Device(compute_capability="9.0")


@functools.cache
def local_device() -> Device:
    """Returns JAX's default device."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return Device(platform=jax.default_backend(), compute_capability=capability)
