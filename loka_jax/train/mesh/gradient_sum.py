"""How the dense gradients of a run travel between its devices: asked for, or chosen.

The numbers are in `ops.collectives`, the choice by measured times is in
`dispatch.gradient_wire`; here is what a run is: its option, its devices, its bytes.
"""

import dataclasses
import math
import os
from typing import Any, NamedTuple

import jax

from loka_jax import triton
from loka_jax.dispatch import gradient_wire
from loka_jax.dispatch.gradient_wire import Option, choose_wire
from loka_jax.ops.collectives import Wire
from loka_jax.train.processes.group import hosts

_FLOAT32_BYTES = 4
_MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectivesConfig:
    """Sums over several devices.

    Attributes:
        gradients: how dense gradients travel: "f32" is exact up to the order of
            addition, "bf16" and "int8" round; "auto" takes the fastest by what was
            measured on such GPUs, and "f32" on GPUs that were not. With one device
            nothing travels.
    """

    gradients: Option = "auto"


class GradientSum(NamedTuple):
    """How the dense gradients of a run are summed over its devices.

    Attributes:
        wire: how they travel.
        reason: a sentence.
        num_bytes: of all of them in float32.
    """

    wire: Wire
    reason: str
    num_bytes: int

    @property
    def note(self) -> str:
        """A sentence for the user."""
        size = f"{self.num_bytes / _MIB:.3g} MiB"
        return f"Dense gradients, {size}, are summed in {self.wire}: {self.reason}."


def choose(config: CollectivesConfig, params: Any, devices: int) -> GradientSum:
    """Returns how the gradients of some parameters are summed.

    Args:
        config: what the user asks for.
        params: the parameters, or their shapes.
        devices: of the mesh.

    Raises:
        ValueError: if the times that were measured cannot be read.
    """
    sizes = (math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    num_bytes = _FLOAT32_BYTES * sum(sizes)
    chosen = choose_wire(
        config.gradients,
        num_bytes,
        device=_device(),
        devices=devices,
        hosts=gradient_wire.read() if config.gradients == "auto" else (),
        has_kernels=triton.why_not_here() is None,
    )
    return GradientSum(*chosen, num_bytes)


def _device() -> str:
    """Returns the kind of the GPUs, and how many hosts they are in if several.

    What was measured was measured in one host; links between hosts are others.
    """
    kind = jax.devices()[0].device_kind
    count = hosts(os.environ)
    return kind if count == 1 else f"{kind} of {count} hosts"
