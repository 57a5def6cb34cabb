"""Precision choices as data: which operand of which GEMM is cast how.

For `out = lhs @ rhs` with lhs (M, K), rhs (K, N) and the gradient g (M, N), a site has
three GEMMs, the roles, each decided on its own:

    fwd    out  = lhs  @ rhs      contracts K
    dlhs   dlhs = g    @ rhs^T    contracts N
    drhs   drhs = lhs^T @ g       contracts M

A `GemmRecipe` names its two operands in the order of these products.
"""

import dataclasses
import difflib
import functools
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import E4M3, E5M2, Fp8Array, fp8_max

Role = Literal["fwd", "dlhs", "drhs"]
Operand = Literal["lhs", "rhs", "g"]
Granularity = Literal["tensorwise", "rowwise", "blockwise", "mx"]

ROLES: tuple[Role, ...] = ("fwd", "dlhs", "drhs")
OPERANDS: tuple[Operand, ...] = ("lhs", "rhs", "g")
# The two operands of each role, in the order of its product.
ROLE_OPERANDS: dict[Role, tuple[Operand, Operand]] = {
    "fwd": ("lhs", "rhs"),
    "dlhs": ("g", "rhs"),
    "drhs": ("lhs", "g"),
}
BLOCK = 128  # blockwise scaling: 1 x 128 for activations, 128 x 128 for weights
MX_BLOCK = 32  # of the MX formats, along the contracting dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """The cast of an operand of a GEMM to FP8.

    Attributes:
        granularity: the elements that share a scale: the whole array (tensorwise), a
            slice along the contracting dim (rowwise), or a tile (blockwise, or "mx",
            with the scales of the MX formats).
        scaling: "current" takes the scale from this step's amax; "delayed" from a
            history of earlier amaxes, so that one pass over the data is enough.
        pow2_scale: round scales down to powers of two (exact scaling), which delayed
            and mx ones always are.
    """

    dtype: DTypeLike = E4M3
    granularity: Granularity = "tensorwise"
    scaling: Literal["current", "delayed"] = "current"
    pow2_scale: bool = True

    def __post_init__(self):  # noqa: D105
        fp8_max(self.dtype)  # raises if it is not an FP8 type
        if self.scaling == "delayed" and self.granularity != "tensorwise":
            raise ValueError(
                f"delayed scaling keeps one scale per tensor; "
                f"granularity={self.granularity!r} needs scaling='current'."
            )
        for kind in (self.scaling, self.granularity):
            if kind in ("delayed", "mx") and not self.pow2_scale:
                raise ValueError(f"{kind} scaling needs pow2_scale=True.")

    @property
    def is_tiled(self) -> bool:
        """True if tiles of the operand share a scale."""
        return self.granularity in ("blockwise", "mx")

    def in_tiles(self, x: Float[Array, "r c"], operand: Operand) -> Fp8Array:
        """Returns an operand, to be contracted over its last dim, cast in tiles.

        128 x 128 for weights and 1 x 128 for activations and gradients (DeepSeek-V3),
        or 1 x 32.
        """
        if self.granularity == "mx":
            tile, scale_inv_of = (1, MX_BLOCK), fp8.mx_scale_inv
        else:
            tile = (BLOCK, BLOCK) if operand == "rhs" else (1, BLOCK)
            how = dict(pow2_scale=self.pow2_scale)
            scale_inv_of = functools.partial(fp8.compute_scale_inv, **how)
        return fp8.quantize_tiles(x, self.dtype, tile=tile, scale_inv_of=scale_inv_of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmRecipe:
    """The casts of the two operands of one FP8 GEMM, in the order of its product.

    Attributes:
        fast_accumulation: keep the tensor core's narrower accumulator over the whole
            contraction: a little faster, a little less exact.
    """

    first: Cast
    second: Cast
    fast_accumulation: bool = False

    def __post_init__(self):  # noqa: D105
        formats = {jnp.dtype(self.first.dtype), jnp.dtype(self.second.dtype)}
        if formats == {jnp.dtype(E5M2)}:
            raise ValueError(
                "E5M2 x E5M2 has no FP8 GEMM on Hopper; make one operand E4M3."
            )
        kinds = self.first.granularity, self.second.granularity
        for kind in ("blockwise", "mx"):
            if kind in kinds and kinds != (kind, kind):
                raise ValueError(f"{kind} scaling needs both operands {kind}.")

    @property
    def is_tiled(self) -> bool:
        """True if tiles of the operands share a scale."""
        return self.first.is_tiled or self.second.is_tiled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named, complete precision choice for a site.

    Attributes:
        name: as in `RECIPES`.
        compute_dtype: dtype of activations and of the GEMMs that are not FP8.
        fwd, dlhs, drhs: the FP8 casts of each role; None runs it in `compute_dtype`.
        amax_history_length: steps that a delayed scale looks back.
        margin: bits of headroom of a delayed scale above the largest amax seen.
        scales_initialized: every delayed scale is set, so the guard for first steps is
            left out (see `scaling.delayed_scale_inv`). Who sets them says so: a run
            after its first steps, or `dispatch.adopt`.
    """

    name: str
    compute_dtype: DTypeLike = jnp.bfloat16
    fwd: GemmRecipe | None = None
    dlhs: GemmRecipe | None = None
    drhs: GemmRecipe | None = None
    amax_history_length: int = 16
    margin: int = 1
    scales_initialized: bool = False

    def __post_init__(self):  # noqa: D105
        if not self.amax_history_length >= 1:
            raise ValueError(f"{self.amax_history_length=} must be at least 1.")
        for operand in OPERANDS:
            whole = {c for c in self.casts(operand) if c.granularity == "tensorwise"}
            if len(whole) > 1:
                raise ValueError(
                    f"recipe {self.name!r} casts {operand} tensorwise in two ways; "
                    "one FP8 copy of it must serve all roles."
                )

    def gemm(self, role: Role) -> GemmRecipe | None:
        """Returns the casts of `role`, or None if it runs in high precision."""
        return {"fwd": self.fwd, "dlhs": self.dlhs, "drhs": self.drhs}[role]

    def casts(self, operand: Operand) -> tuple[Cast, ...]:
        """Returns every cast of `operand`, over the roles that read it in FP8."""
        casts = []
        for role in ROLES:
            gemm = self.gemm(role)
            if gemm is not None and operand in ROLE_OPERANDS[role]:
                place = ROLE_OPERANDS[role].index(operand)
                casts.append((gemm.first, gemm.second)[place])
        return tuple(casts)

    @property
    def is_delayed(self) -> bool:
        """True if the scale of any operand comes from a history, which is state."""
        return any(
            cast.scaling == "delayed"
            for operand in OPERANDS
            for cast in self.casts(operand)
        )


def get_recipe(name: str) -> Recipe:
    """Returns the recipe of a name, or of three for forward, dlhs and drhs.

    The casts of each product are those of its own recipe: "fp8_rowwise/bf16/bf16".

    Raises:
        ValueError: if no recipe has a name (the message suggests the nearest), or the
            three recipes do not combine.
    """
    return _of_roles(name) if "/" in name else _named(name)


def _named(name: str) -> Recipe:
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=1)
    near = near or sorted((x for x in RECIPES if x.startswith(name)), key=len)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(
        f"unknown recipe {name!r}{hint}: there are {', '.join(sorted(RECIPES))}."
    )


@functools.cache
def _of_roles(names: str) -> Recipe:
    parts = [_named(name) for name in names.split("/")]
    if len(parts) != len(ROLES):
        raise ValueError(f"{names!r} names {len(parts)} recipes: give one, or three.")
    if len({part.compute_dtype for part in parts}) > 1:
        raise ValueError(f"the recipes in {names!r} do not compute in one dtype.")
    fwd, dlhs, drhs = parts
    recipe = dataclasses.replace(fwd, name=names, dlhs=dlhs.dlhs, drhs=drhs.drhs)
    for named in RECIPES.values():
        if dataclasses.replace(recipe, name=named.name) == named:
            return named
    return recipe


def _tensorwise(
    name: str, scaling: Literal["current", "delayed"], *, fp8_drhs: bool = True
) -> Recipe:
    # E4M3 for gradients, too: E5M2 rounds those of many examples alike, by up to an
    # eighth, and the sums over a batch do not average that out. See docs/recipes.md.
    e4m3 = Cast(dtype=E4M3, scaling=scaling)
    gemm = GemmRecipe(first=e4m3, second=e4m3)
    return Recipe(
        name=name,
        fwd=dataclasses.replace(gemm, fast_accumulation=True),
        dlhs=gemm,
        drhs=gemm if fp8_drhs else None,
    )


def _uniform(name: str, granularity: Granularity) -> Recipe:
    # With fine scales E4M3 serves gradients too (torchao rowwise, DeepSeek-V3).
    e4m3 = Cast(dtype=E4M3, granularity=granularity)
    gemm = GemmRecipe(first=e4m3, second=e4m3)
    fwd = dataclasses.replace(gemm, fast_accumulation=granularity == "rowwise")
    return Recipe(name=name, fwd=fwd, dlhs=gemm, drhs=gemm)


def _rowwise_bf16_drhs() -> Recipe:
    # torchao's rowwise_with_gw_hp: the weight gradient, which sums over the whole
    # batch, stays in bfloat16, and dlhs reads the weight with one scale.
    row = Cast(dtype=E4M3, granularity="rowwise")
    return Recipe(
        name="fp8_rowwise_bf16_drhs",
        fwd=GemmRecipe(first=row, second=row, fast_accumulation=True),
        dlhs=GemmRecipe(first=row, second=Cast(dtype=E4M3)),
    )


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="f32", compute_dtype=jnp.float32),
        Recipe(name="bf16"),
        _tensorwise("fp8_tensorwise", "current"),
        _tensorwise("fp8_tensorwise_delayed", "delayed"),
        # Fewest kernels: an FP8 drhs needs transposed copies of lhs and g on Hopper.
        _tensorwise("fp8_tensorwise_delayed_bf16_drhs", "delayed", fp8_drhs=False),
        _uniform("fp8_rowwise", "rowwise"),
        _rowwise_bf16_drhs(),
        _uniform("fp8_blockwise", "blockwise"),
        # Not an "fp8_": it is emulated where Dispatch knows times.
        _uniform("mxfp8", "mx"),
    )
}
