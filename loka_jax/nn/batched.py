"""Products within each example as sites: announced, without a choice.

They run in the operands' dtype. Probe sees none of their operands.
"""

import dataclasses

from flax import linen
from jaxtyping import Array, Float

from loka_jax.nn.context import current
from loka_jax.nn.sites import announce
from loka_jax.ops.plan import resolve
from loka_jax.recipe import Recipe
from loka_jax.site import Choice, SiteSpec


class BatchedSite(linen.Module):
    """A product (m, k) x (k, n) of each example, computed elsewhere, as a site.

    Attributes:
        recipe: as that of other sites; its FP8 casts are left out.
    """

    recipe: str | Recipe = "fp8_tensorwise"

    @linen.nowrap
    def announce(self, batch: int, spec: SiteSpec, **attributes) -> None:
        """Announces the site, see `announce_batched`."""
        announce_batched(self, batch, spec, **attributes)

    @linen.compact
    def __call__(
        self,
        out: Float[Array, "B m n"],
        lhs: Float[Array, "B m k"],
    ) -> Float[Array, "B m n"]:
        """Returns `out`, the product; the site is announced."""
        batch, m, n = out.shape
        self.announce(batch, SiteSpec(m=m, k=lhs.shape[-1], n=n))
        return out


def announce_batched(module, batch: int, spec: SiteSpec, **attributes) -> None:
    """Announces a product of each of `batch` examples."""
    plan = current().plan("/".join(module.path), spec, module.recipe, "xla")
    choice = Choice("xla", in_high_precision(plan.choice.recipe))
    resolved = resolve(plan.spec, choice, plan.device)
    announce(module, resolved, batch=batch, **attributes)


def in_high_precision(recipe: Recipe) -> Recipe:
    """Returns the recipe without its FP8 casts."""
    return dataclasses.replace(recipe, fwd=None, dlhs=None, drhs=None)
