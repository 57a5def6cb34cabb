"""Checks while training that delayed scales still fit their operands.

A site whose newest amaxes are far above what their scales cover, in several looks, has
left the distribution on which its candidate was measured (`scaling.amax_ratios`).
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.recipe import Recipe
from loka_jax.scaling import DelayedScaling, amax_ratios

MOST = 4.0  # ratio above which a scale is far off
LOOKS = 2  # consecutive looks above it that count as drift; one batch proves nothing


def amax_ratio(state: DelayedScaling, recipe: Recipe) -> Float[Array, ""]:
    """Returns the largest newest ratio of a site's operands; 0 without older amaxes."""
    return jnp.max(amax_ratios(state.amax_history, recipe, steps=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch:
    """The looks so far; `dataclasses.asdict` gives JSON values.

    Attributes:
        looks: consecutive looks at which a site was off its scales, by path.
        drifted: why sites have drifted, by path.
    """

    looks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    drifted: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def after(self, ratios: Mapping[str, float]) -> "Watch":
        """Returns the watch after a look.

        Args:
            ratios: the ratio of each site at this look.
        """
        looks = {
            path: self.looks.get(path, 0) + 1
            for path, ratio in ratios.items()
            if ratio > MOST
        }
        drifted = {
            path: f"an amax was {ratios[path]:.1f} times the largest of its scale"
            for path, count in looks.items()
            if count >= LOOKS
        }
        return Watch(looks=looks, drifted={**self.drifted, **drifted})
