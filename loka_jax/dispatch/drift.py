"""Checks while training that delayed scales still fit their operands.

    ratio = newest amax / the largest amax that its scale covers, 2^margin max(older)

Below one, nothing was clipped. A ratio far above one in several looks means that the
operand has left the distribution on which its candidate was measured.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.scaling import DelayedScaling

MOST = 4.0  # ratio above which a scale is far off
LOOKS = 2  # consecutive looks above it that count as drift; one batch proves nothing


def amax_ratio(state: DelayedScaling, margin: int) -> Float[Array, ""]:
    """Returns the largest ratio over a site's operands; 0 without older amaxes."""
    newest, older = state.amax_history[:, 0], state.amax_history[:, 1:]
    reach = jnp.max(older, axis=1) * 2.0**margin
    has_older = reach > 0
    return jnp.max(jnp.where(has_older, newest / jnp.where(has_older, reach, 1.0), 0.0))


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
