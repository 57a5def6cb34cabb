"""What can run at a site: providers and recipes, with the reasons of what cannot.

A candidate is a `Choice` for a whole site, for what its products cost depends on what
they share: a cast of g serves dlhs and drhs, the norm's kernel makes the one of dlhs.
"""

import dataclasses
from collections.abc import Callable, Iterator

from loka_jax import triton
from loka_jax.normed import ActivationName, NormName
from loka_jax.ops.plan import plan
from loka_jax.ops.products import decide
from loka_jax.recipe import ROLES
from loka_jax.site import PROVIDERS, Choice, Provider

BF16 = Choice.parse("xla bf16")
# Each FP8 recipe for the forward product alone, for it and dlhs, and for all.
_FP8 = ("fp8_tensorwise", "fp8_tensorwise_delayed", "fp8_rowwise")
_WIDE = "bf16"
RECIPES = (
    _WIDE,
    *(f"{name}/{_WIDE}/{_WIDE}" for name in _FP8),
    *(f"{name}/{name}/{_WIDE}" for name in _FP8),
    *_FP8,
    "fp8_rowwise_bf16_drhs",  # dlhs reads the weight with one scale
    "fp8_blockwise",  # multiplied in bfloat16: no part of it can be fast alone
)
_LEAST_ROWS = 64


@dataclasses.dataclass(frozen=True, order=True)
class SiteKey:
    """What the time of a site depends on.

    Attributes:
        m: rows, rounded up to a power of two.
        k, n: sizes of the weight.
        norm, activation, use_bias: what follows the product within the site.
    """

    m: int
    k: int
    n: int
    norm: NormName = "none"
    activation: ActivationName = "none"
    use_bias: bool = False

    def __str__(self) -> str:
        """Returns sizes and what follows."""
        parts = [f"{self.m} x {self.k} x {self.n}"]
        parts += [self.norm] if self.norm != "none" else []
        parts += [self.activation] if self.activation != "none" else []
        return ", ".join(parts + ["bias"] * self.use_bias)


def bucket(m: int) -> int:
    """Returns the number of rows at which a site of m rows is measured."""
    return max(_LEAST_ROWS, 1 << (m - 1).bit_length())


def why_not(choice: Choice, site: SiteKey) -> str | None:
    """Returns why a choice cannot train at a site on a Hopper GPU, or None."""
    for role in ROLES:
        decision = decide(choice.recipe, role, site.m, site.k, site.n)
        if decision.why_not is not None:
            return f"{role}: {decision.why_not}"
    return _WHY_NOT[choice.provider](choice, site)


def _why_not_xla(choice: Choice, site: SiteKey) -> str | None:
    del choice, site
    return None


def _why_not_pallas(choice: Choice, site: SiteKey) -> str | None:
    try:
        chosen = plan(
            choice.recipe,
            site.m,
            site.k,
            site.n,
            norm=site.norm,
            activation=site.activation,
            has_bias=site.use_bias,
            implementation="pallas",
        )
    except ValueError as error:
        return str(error).rpartition(": ")[2].rstrip(".")
    return chosen.why_not_backward


def _why_not_triton(choice: Choice, site: SiteKey) -> str | None:
    missing = triton.why_not_installed()
    if missing is not None:
        return missing
    m, k, n = site.m, site.k, site.n
    sizes = {"fwd": (m, k, n), "dlhs": (m, n, k), "drhs": (k, m, n)}
    reasons = [
        triton.why_not(*sizes[role]) for role in ROLES if choice.recipe.gemm(role)
    ]
    if not reasons:
        return "it multiplies in FP8 only"
    return next((reason for reason in reasons if reason), None)


_WHY_NOT: dict[Provider, Callable[[Choice, SiteKey], str | None]] = {
    "xla": _why_not_xla,
    "pallas": _why_not_pallas,
    "triton": _why_not_triton,
}


def feasible(site: SiteKey) -> Iterator[Choice]:
    """Yields the choices that can run at a site, the fallback first."""
    for provider in PROVIDERS:
        for name in RECIPES:
            choice = Choice.parse(f"{provider} {name}")
            if why_not(choice, site) is None:
                yield choice
