"""HSTU's attention on jagged rows: as a function, and as a site of a layer.

C is the number of rows of all sequences together, B that of sequences, h of heads.
"""

from typing import Any, Literal

from flax import linen
from jaxtyping import Array, Float, Int32

from loka_jax import jagged
from loka_jax.heads import Qkv
from loka_jax.jagged import Rule
from loka_jax.nn.batched import announce_batched
from loka_jax.nn.context import as_recipe, current
from loka_jax.nn.norms import check_choice
from loka_jax.nn.observed import PROBE
from loka_jax.ops import jagged_attention as ops
from loka_jax.ops.device import local_device
from loka_jax.ops.tap import tell
from loka_jax.probe.live_errors import empty_errors
from loka_jax.probe.site import ErrorsAlone, ProbeConfig
from loka_jax.recipe import Recipe
from loka_jax.site import Choice, SiteSpec

type Implementation = Literal["xla", "group"] | None


def jagged_attention(
    q: Float[Array, "C h d_qk"],
    k: Float[Array, "C h d_qk"],
    v: Float[Array, "C h d_v"],
    offsets: Int32[Array, " B_plus_1"],
    *,
    rule: Rule = jagged.CAUSAL,
    scale: float,
    max_length: int,
    is_fp8: bool = False,
    implementation: Literal["xla"] | None = None,
) -> Float[Array, "C h d_v"]:
    """Returns `ops.jagged_attention` by kernels where they serve it, and else by XLA.

    Args:
        is_fp8: the forward pass is in FP8, E4M3 without scales.
        implementation: "xla" for XLA everywhere.

    Raises:
        ValueError: as of `ops.jagged_attention`.
    """
    how: dict[str, Any] = dict(rule=rule, scale=scale, max_length=max_length)
    plan = _plan(Qkv.of(q, k, v), implementation, is_fp8)
    return ops.jagged_attention(q, k, v, offsets, plan=plan, **how)


class JaggedAttention(linen.Module):
    """`jagged_attention` as a site: forward in FP8 if its choice is FP8.

    Without a choice it runs in the dtype of the rows, whatever the recipe. A choice of
    "xla" runs by XLA, any other by kernels where they serve it.

    Attributes:
        max_length: as that of `jagged_attention`.
        recipe: of the layer; its casts are left out.
        implementation: as that of `HstuLayer`.
    """

    max_length: int
    recipe: str | Recipe = "fp8_tensorwise"
    implementation: Implementation = None

    @linen.compact
    def __call__(
        self,
        rows: Qkv,
        offsets: Int32[Array, " B_plus_1"],
        rule: Rule = jagged.CAUSAL,
    ) -> tuple[Float[Array, "C _"] | None, Float[Array, "C h d_v"]]:
        """Returns `ops.attend`, announced as a site and observed by Probe.

        Its sizes are the rows, the columns of q and v, and the mean rows of a sequence.
        """
        q, _, v = rows.parts()
        count = len(q.array)
        mean_length = -(-count // max(len(offsets) - 1, 1))
        spec = SiteSpec(m=count, k=q.size + v.size, n=max(mean_length, 1))
        choice = current().choices.get("/".join(self.path))
        implementation, is_fp8 = self.implementation, False
        if isinstance(choice, Choice):
            implementation = "xla" if choice.provider == "xla" else implementation
            choice = choice.recipe
        if choice is not None:
            is_fp8 = as_recipe(choice).fwd is not None
        plan = _plan(rows, implementation, is_fp8)
        announce_batched(self, rows.heads, spec, together=plan)
        how: dict[str, Any] = dict(rule=rule, scale=q.size**-0.5)
        how |= dict(max_length=self.max_length)
        u, out = ops.attend(rows, offsets, plan=plan, **how)
        observer = current().observer
        if not isinstance(observer, ProbeConfig | ErrorsAlone):
            return u, out
        count = len(observer.recipes)
        stats = self.variable(PROBE, "stats", empty_errors, count).value
        seen = ops.forward_errors(rows, offsets, recipes=count, **how)
        return u, tell(out, seen, stats)


def _plan(rows: Qkv, implementation: Implementation, is_fp8: bool) -> ops.AttentionPlan:
    """Returns what runs attention on the device that sites are planned for."""
    check_choice("implementation", implementation, ("xla", "group", None))
    device = current().device or local_device()
    plan = ops.plan_jagged_attention(rows, device, is_fp8=is_fp8)
    by_xla = plan._replace(why_xla=ops.BY_XLA.why_xla)
    return by_xla if implementation == "xla" else plan
