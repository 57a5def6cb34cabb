"""Checks while training that delayed scales still fit their operands.

    ratio = newest amax / the largest amax that its scale covers, 2^margin max(older)

Below one, nothing was clipped. A ratio far above one in several looks means that the
operand has left the distribution on which its candidate was measured.
"""

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


class Watch:
    """Counts the consecutive looks at which each site was off its scales."""

    def __init__(self):
        """Starts with no site off its scales."""
        self._looks: dict[str, int] = {}

    def look(self, ratios: dict[str, float]) -> dict[str, str]:
        """Returns why sites have drifted, by path.

        Args:
            ratios: the ratio of each site at this look.
        """
        self._looks = {
            path: self._looks.get(path, 0) + 1
            for path, ratio in ratios.items()
            if ratio > MOST
        }
        return {
            path: f"an amax was {ratios[path]:.1f} times the largest of its scale"
            for path, looks in self._looks.items()
            if looks >= LOOKS
        }
