"""Whether delayed scales still fit what they cast: a plan's health while training.

    ratio = newest amax / the amax that its scale reached,  2^margin max(older amaxes)

Below one nothing was clipped. A ratio far above one, look after look, means that the
operand has left the distribution on which its candidate was measured.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.scaling import DelayedScaling

MOST = 4.0  # ratio above which a scale is far off
LOOKS = 2  # in a row at which it must be, for a single batch proves nothing


def amax_ratio(state: DelayedScaling, margin: int) -> Float[Array, ""]:
    """Returns the largest ratio over a site's operands; 0 where nothing was seen."""
    newest, older = state.amax_history[:, 0], state.amax_history[:, 1:]
    reach = jnp.max(older, axis=1) * 2.0**margin
    is_known = reach > 0
    return jnp.max(jnp.where(is_known, newest / jnp.where(is_known, reach, 1.0), 0.0))


class Watch:
    """Counts the looks at which each site was off its scales."""

    def __init__(self):
        """Starts with all sites in order."""
        self._looks: dict[str, int] = {}

    def look(self, ratios: dict[str, float]) -> dict[str, str]:
        """Returns by path why a site has drifted; takes its ratio at this look."""
        self._looks = {
            path: self._looks.get(path, 0) + 1
            for path, ratio in ratios.items()
            if ratio > MOST
        }
        return {
            path: f"an amax was {ratios[path]:.1f} times what its scale reached"
            for path, looks in self._looks.items()
            if looks >= LOOKS
        }
