"""The sites of a model: what each GEMM is, what runs for it, and why not FP8.

A site is one place in a model where a GEMM happens, named by its module path. Modules
announce their sites while they are traced; `list_sites` traces a model abstractly and
returns what was announced, so that it can be read before anything is compiled.
"""

import contextvars
import dataclasses
import functools

import jax

from loka_jax.nn.overrides import Model
from loka_jax.normed import ActivationName, NormName
from loka_jax.ops.dense_norm import describe
from loka_jax.ops.plan import BY_XLA, Plan
from loka_jax.ops.products import Engine, HandOver, decide
from loka_jax.recipe import ROLES, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """One GEMM of a model, `(m, k) x (k, n)`, and what runs for its three roles.

    Attributes:
        path: the module path, for example `top_mlp/dense_0`.
        m, k, n: sizes of the forward product; m is the batch.
        recipe: name of the recipe asked for.
        norm, activation, use_bias: what follows the product within the site.
        fwd, dlhs, drhs: what runs, in words.
        why_not: why no role runs in FP8, or None if one does.
        why_not_fused: why no kernel runs product and norm in one; None if one does, and
            where there is no norm to fuse.
        has_choice: False where the module alone decides what runs.
        follows: lhs is what the site before makes, and can come in FP8.
    """

    path: str
    m: int
    k: int
    n: int
    recipe: str
    fwd: str
    dlhs: str
    drhs: str
    why_not: str | None
    why_not_fused: str | None = None
    norm: NormName = "none"
    activation: ActivationName = "none"
    use_bias: bool = False
    has_choice: bool = True
    follows: bool = False

    @property
    def is_fp8(self) -> bool:
        """True if at least one role casts its operands to FP8."""
        return self.why_not is None


_announced: contextvars.ContextVar[list[Site] | None] = contextvars.ContextVar(
    "announced_sites", default=None
)


def announce(
    path: str,
    m: int,
    k: int,
    n: int,
    recipe: Recipe,
    why_not: str | None,
    *,
    chosen: Plan = BY_XLA,
    handed: HandOver | None = None,
    norm: NormName = "none",
    activation: ActivationName = "none",
    use_bias: bool = False,
    has_choice: bool = True,
    engine: Engine = "xla",
    follows: bool = False,
):
    """Adds a site to the list being made by `list_sites`, if one is.

    Args:
        path: the module path.
        m: rows of lhs.
        k: contracted size.
        n: columns of rhs.
        recipe: the recipe that the site follows.
        why_not: a reason of the module itself against FP8, or None.
        chosen: which kernels run, of a site with a norm.
        handed: how lhs is scaled, if it comes in FP8 from another site.
        norm, activation, use_bias: what follows the product within the site.
        has_choice: False where the module alone decides what runs.
        engine: who multiplies in FP8 where no kernel does.
        follows: lhs is what the site before makes, and can come in FP8.
    """
    sites = _announced.get()
    if sites is None:
        return
    decisions = [decide(recipe, role, chosen.padded_rows(m), k, n) for role in ROLES]
    if why_not is None and all(d.gemm is None for d in decisions):
        reasons = [d.why_not for d in decisions if d.why_not]
        why_not = reasons[0] if reasons else f"recipe {recipe.name}"
    sites.append(
        Site(
            path=path,
            m=m,
            k=k,
            n=n,
            recipe=recipe.name,
            why_not=why_not,
            why_not_fused=chosen.why_not,
            norm=norm,
            activation=activation,
            use_bias=use_bias,
            has_choice=has_choice,
            follows=follows,
            **describe(recipe, chosen, m, k, n, handed, engine),
        )
    )


def list_sites(module: Model, *args, **kwargs) -> tuple[Site, ...]:
    """Returns the sites of `module` when called with `args`, in calling order.

    Nothing is computed: arguments may be `jax.ShapeDtypeStruct`s.
    """
    token = _announced.set([])
    try:
        init = functools.partial(module.init, **kwargs)
        jax.eval_shape(init, jax.random.key(0), *args)
        return tuple(_announced.get() or ())
    finally:
        _announced.reset(token)
