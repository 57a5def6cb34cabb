"""A site as data: its shape and surroundings, and what was chosen to run there.

A site is one place in a model where a GEMM happens, with what surrounds it:

    [quantize] -> lhs @ rhs -> [bias] -> [norm] -> [activation] -> [quantize]
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from loka_jax.normed import ActivationName, NormName
from loka_jax.recipe import ROLES, Recipe, Role, get_recipe

# "group": the site runs with those of its group as one operation, see `ops.group`.
Provider = Literal["xla", "pallas", "triton", "group"]
PROVIDERS: tuple[Provider, ...] = get_args(Provider)
ALONE: tuple[Provider, ...] = PROVIDERS[:3]  # those that run a site by itself
# Scales of activations handed on in FP8: one for all rows, or one a row.
Fp8Scaling = Literal["tensorwise", "rowwise"]
# Activations leave in the compute dtype, in FP8, or in both.
Out = Literal["compute", "fp8", "both"]


@dataclasses.dataclass(frozen=True, order=True)
class SiteSpec:
    """What a kernel needs to know of a site.

    Attributes:
        m, k, n: sizes of lhs (m, k) and rhs (k, n).
        use_bias: a bias is added before the norm.
        fp8_in: scaling of an lhs that another site hands on in FP8; None if lhs comes
            in the compute dtype.
        out: in which form the activations leave.
    """

    m: int
    k: int
    n: int
    norm: NormName = "none"
    activation: ActivationName = "none"
    use_bias: bool = False
    fp8_in: Fp8Scaling | None = None
    out: Out = "compute"

    def __str__(self) -> str:
        """Returns the sizes and what follows the product."""
        parts = [f"{self.m} x {self.k} x {self.n}"]
        parts += [self.norm] if self.norm != "none" else []
        parts += [self.activation] if self.activation != "none" else []
        return ", ".join(parts + ["bias"] * self.use_bias)

    @property
    def fp8_out(self) -> Fp8Scaling:
        """The scaling of activations that leave in FP8.

        After a norm they are bounded, so that one scale is known in advance.
        """
        return "rowwise" if self.norm == "none" else "tensorwise"

    @property
    def has_affine(self) -> bool:
        """True if the norm is followed by a factor gamma, and a summand beta."""
        return self.norm in ("layer", "rms")

    def gemm_sizes(self, role: Role) -> tuple[int, int, int]:
        """Returns rows, contracted size and columns of a role's product."""
        m, k, n = self.m, self.k, self.n
        return {"fwd": (m, k, n), "dlhs": (m, n, k), "drhs": (k, m, n)}[role]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A provider and a recipe for a site; hashable, with a name that can be parsed.

    Attributes:
        provider: of the kernels; XLA runs what the provider leaves out.
        recipe: the casts of the site's three GEMMs.
    """

    provider: Provider
    recipe: Recipe

    @property
    def is_fp8(self) -> bool:
        """True if any product is in FP8."""
        return any(self.recipe.gemm(role) is not None for role in ROLES)

    @property
    def name(self) -> str:
        """Provider and recipe: what `parse` reads."""
        return f"{self.provider} {self.recipe.name}"

    def with_initialized_scales(self) -> "Choice":
        """Returns the choice for states whose delayed scales are set."""
        recipe = dataclasses.replace(self.recipe, scales_initialized=True)
        return dataclasses.replace(self, recipe=recipe)

    @classmethod
    def parse(cls, name: str) -> "Choice":
        """Returns the choice of a name: "xla bf16", "pallas fp8_rowwise/bf16/bf16".

        Raises:
            ValueError: if the name has no known provider or recipe.
        """
        first, _, recipe = name.partition(" ")
        for provider in PROVIDERS:
            if first == provider:
                return cls(provider, get_recipe(recipe))
        raise ValueError(
            f"{name!r} begins with no provider ({', '.join(PROVIDERS)}): give one and "
            "a recipe, as in 'xla fp8_rowwise'."
        )


class SiteKernel(NamedTuple):
    """A kernel of a provider, as sites see it.

    Attributes:
        why_not: why the kernel does not serve a site in a recipe, or None if it does.
    """

    name: str
    why_not: Callable[[SiteSpec, Recipe], str | None]
    run: Callable[..., Any]


BF16 = Choice("xla", get_recipe("bf16"))  # what every other choice is compared with
