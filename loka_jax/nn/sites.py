"""The sites of a model: each GEMM, its plan, and why it is not in FP8.

A site is one place in a model where a GEMM happens, named by its module path. Modules
announce their sites while they are traced; `list_sites` traces a model abstractly and
returns the announced sites, before anything is compiled.
"""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.extend.core as jex

from loka_jax.group import Cross, Group
from loka_jax.nn.context import current, site_context
from loka_jax.ops.fm_lcb import FmLcbPlan
from loka_jax.ops.jagged_attention import AttentionPlan
from loka_jax.ops.mesh_axes import manual_axes
from loka_jax.ops.plan import KernelPlan, describe
from loka_jax.ops.softmax_attention import SoftmaxPlan
from loka_jax.recipe import ROLES, Role
from loka_jax.site import SiteSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A site of a model and its plan.

    Attributes:
        path: the module path, for example `top_mlp/dense_0`.
        batch: the number of products of a batched GEMM, which runs in the operands'
            dtype; None for a single product.
        together: which passes a kernel runs that includes the site's neighbours; None
            for a site by itself.
        left: why `nn.convert` left the product as it is; None for a site that it or
            the model's author made.
        apart: why a norm or activation that follows is not part of the site, as far as
            `nn.convert` knows.
        count: how often the site runs in a call of the model, in the steps of a scan
            or by a layer that is shared.
        group: the sites that it may run with as one operation; None for none.
        not_joined: why it does not run with them, or, of a site of `nn.convert`, why
            there are none; None where it does.
        runs_by: the operation of ours that runs a product that is no dense layer's.
        default: why this runs where nobody chose a recipe; None where somebody did.
        share: of the forward pass's FLOPs of all listed products, from 0 to 1.
        is_local: its rows are those of one device, under `shard_map`.
    """

    path: str
    plan: KernelPlan
    batch: int | None = None
    together: FmLcbPlan | AttentionPlan | SoftmaxPlan | None = None
    left: str | None = None
    apart: str | None = None
    count: int = 1
    group: Group | None = None
    not_joined: str | None = None
    runs_by: str | None = None
    default: str | None = None
    share: float = dataclasses.field(default=0.0, compare=False)
    is_local: bool = dataclasses.field(default=False, compare=False)

    @property
    def flops(self) -> int:
        """The FLOPs of the forward pass, in a call of the model."""
        sizes = self.spec.m * self.spec.k * self.spec.n
        return 2 * sizes * (self.batch or 1) * self.count

    @property
    def spec(self) -> SiteSpec:
        """The sizes of the site, its norm and its activation."""
        return self.plan.spec

    @property
    def attention(self) -> AttentionPlan | None:
        """What runs the site if it is all of an attention; None if it is a product."""
        return self.together if isinstance(self.together, AttentionPlan) else None

    @property
    def in_group(self) -> bool:
        """True if the site runs with those of its group as one operation."""
        return self.plan.choice.provider == "group"

    @property
    def follows(self) -> bool:
        """True if lhs is the output of the previous site, and can come in FP8."""
        return self.group is not None and self.group.follows(self.path)

    @property
    def is_crossed(self) -> bool:
        """True if the site belongs to a cross network."""
        if self.group is None:
            return False
        return isinstance(self.group.layer_of(self.path), Cross)

    @property
    def fp8_results(self) -> tuple[Role, ...]:
        """The roles whose products leave in FP8, where these are in FP8."""
        if self.group is None or not self.in_group:
            return ()
        return self.group.fp8_results(self.path)

    @property
    def recipe(self) -> str:
        """The name of the requested recipe."""
        return self.plan.choice.recipe.name

    @property
    def runs(self) -> dict[str, str]:
        """A short description of each role."""
        if self.left is not None or self.runs_by is not None:
            return {role: self.runs_by or "as written" for role in ROLES}
        texts = {f"{role}": text for role, text in describe(self.plan).items()}
        if self.together is not None:
            for role in ROLES:
                if self.together.why_not(role) is None:
                    texts[role] = f"pallas{texts[role].removeprefix('xla')}"
        if self.batch is not None and self.is_fp8:
            texts["fwd"] = f"{texts['fwd'].partition(' ')[0]} fp8 e4m3"
        return texts

    @property
    def why_not(self) -> str | None:
        """Why no role runs in FP8, or None if one does."""
        if self.left is not None:
            return self.left
        if self.attention is not None:
            return self.attention.why_not_fp8
        if self.batch is not None:
            return f"a batched product ({self.batch} of them)"
        why_not = self.plan.why_no_fp8
        return why_not if why_not is None else self.default or why_not

    @property
    def why_not_fused(self) -> str | None:
        """Why no single kernel runs product and norm, or a site and its neighbours.

        None if one does, and where nothing follows the product.
        """
        if self.together is not None:
            return self.together.why_not("fwd") or self.together.why_not("dlhs")
        if self.apart is not None:
            return self.apart
        spec = self.spec
        is_product = spec.norm == spec.activation == "none" and not spec.use_bias
        if is_product or self.in_group:
            return None
        return self.plan.fwd.why_not_kernel

    @property
    def has_choice(self) -> bool:
        """True if the site is a product that can run by another choice."""
        is_left = self.left is not None and self.default is None
        return self.batch is None and not is_left

    @property
    def is_fp8(self) -> bool:
        """True if at least one role casts its operands to FP8."""
        return self.why_not is None

    def as_row(self) -> dict[str, Any]:
        """Returns the site as JSON-ready values by name."""
        spec = self.spec
        names = ("m", "k", "n", "norm", "activation", "use_bias")
        return {
            "path": self.path,
            **{name: getattr(spec, name) for name in names},
            "recipe": self.recipe,
            **self.runs,
            "why_not": self.why_not,
            "why_not_fused": self.why_not_fused,
            "has_choice": self.has_choice,
            "count": self.count,
            "follows": self.follows,
        }


def announce(module: Any, plan: KernelPlan, **attributes):
    """Marks a site in the program, if `list_sites` traces it."""
    if current().is_listing:
        attributes["is_local"] = bool(manual_axes())
        _mark.bind(site=Site(path="/".join(module.path), plan=plan, **attributes))


def list_sites(module: Any, *args, **kwargs) -> tuple[Site, ...]:
    """Returns the sites of a Linen or NNX model called with `args`, in calling order.

    A site that runs several times is listed once, with a count. Of a model of
    `nn.convert` every product is listed, those that run as written, too. Nothing is
    computed: arguments may be `jax.ShapeDtypeStruct`s, and flags stay what they are.
    """
    with site_context(is_listing=True):
        program = _trace(module, args, kwargs)
    return _listed(program)


def sites_of(
    function: Callable[..., Any], *args: Any, recipe: str | None = None
) -> tuple[Site, ...]:
    """Returns the sites of the models that a function calls, as `list_sites` does.

    The function is traced, and nothing is computed.

    Args:
        recipe: of the sites of conversions to which nobody gave one.
    """
    with site_context(is_listing=True, recipe=recipe):
        program = jax.make_jaxpr(function)(*args)
    return _listed(program)


def _listed(program: jex.ClosedJaxpr) -> tuple[Site, ...]:
    """Returns the sites of a program with marks."""
    # By the program, as layers are traced more often than they run, or not again.
    counts: collections.Counter[Hashable] = collections.Counter()
    sites: dict[Hashable, Site] = {}
    for site, times in _marks(program.jaxpr):
        key = site.path, site.plan, site.batch, site.left, site.together
        sites.setdefault(key, site)
        counts[key] += times * site.count
    listed = [
        dataclasses.replace(site, count=counts[key]) for key, site in sites.items()
    ]
    total = max(1, sum(site.flops for site in listed))
    return tuple(dataclasses.replace(x, share=x.flops / total) for x in listed)


def _trace(module: Any, args: tuple, kwargs: dict) -> jex.ClosedJaxpr:
    from flax import nnx  # a tenth of a second, which not all need

    # Flags stay what they are, as in a call of the model.
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [x for x in leaves if hasattr(x, "dtype")]

    def given(arrays):
        rest = iter(arrays)
        values = [next(rest) if hasattr(x, "dtype") else x for x in leaves]
        return jax.tree.unflatten(tree, values)

    if not isinstance(module, nnx.Module):

        def init(key, arrays):
            args, kwargs = given(arrays)
            return module.init(key, *args, **kwargs)

        return jax.make_jaxpr(init)(jax.random.key(0), arrays)
    graph, state = nnx.split(module)

    def call(state, arrays):
        args, kwargs = given(arrays)
        return jax.tree.leaves(nnx.merge(graph, state)(*args, **kwargs))

    return jax.make_jaxpr(call)(state, arrays)


# Marks where a site is in a program that is only traced.
_mark = jex.Primitive("loka_site")
_mark.multiple_results = True
_mark.def_abstract_eval(lambda *, site: [])


def _marks(jaxpr: jex.Jaxpr, times: int = 1) -> Iterator[tuple[Site, int]]:
    """Yields the site of each mark in a program, and how often it runs."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is _mark:
            yield eqn.params["site"], times
        steps = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from _marks(inner, times * steps)
