"""The delayed-scaling states of an operation's sites, several in one array.

A kernel on a state takes as long as its launch, and each site by itself would need
several: the check of its table, the copy of each factor for the kernel that reads it,
the maximum of amaxes, and the next table. Tables of equal recipes are stacked: one
vector holds the factors that kernels read, and one update makes all next tables.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.ops.plan import KernelPlan
from loka_jax.recipe import OPERANDS
from loka_jax.scaling import DelayedScaling
from loka_jax.tails import Scale

# XLA writes all slices of an array below 1 KiB in one kernel, else each in its own.
_MOST_BYTES = 1023


class JointStates(NamedTuple):
    """States of sites whose recipe is the same.

    Attributes:
        sites: their numbers in the operation.
        tables: float32, one a site, see `DelayedScaling`.
    """

    sites: tuple[int, ...]
    tables: Float[Array, "s 3 C"]

    def scales(self) -> Iterator[tuple[int, tuple[Scale, ...]]]:
        """Yields the number of each site with the scales of lhs, rhs and g."""
        vector = DelayedScaling(self.tables).scale_inv.reshape(-1)
        places = itertools.batched(range(vector.size), len(OPERANDS))
        for site, of_operands in zip(self.sites, places, strict=True):
            yield site, tuple(Scale(vector, at) for at in of_operands)


def joint_states(
    plans: Sequence[KernelPlan], states: Sequence[DelayedScaling | None]
) -> Iterator[JointStates]:
    """Yields the states of an operation's sites, without those that have none."""
    alike: dict[object, list[int]] = {}
    for i, (plan, state) in enumerate(zip(plans, states, strict=True)):
        if state is not None:
            # Not with states that vary over other axes of a mesh.
            axes = jax.typeof(state.table).mat.varying
            alike.setdefault((plan.choice.recipe, axes), []).append(i)
    for sites in alike.values():
        tables = {i: state.table for i in sites if (state := states[i]) is not None}
        together = max(1, _MOST_BYTES // tables[sites[0]].nbytes)
        for some in itertools.batched(sites, together):
            yield JointStates(some, jnp.stack([tables[i] for i in some]))
