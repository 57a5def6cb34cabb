"""Sites as one operation: how tests run them, and their equations, rounded alike."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from loka_jax import scaling
from loka_jax.normed import NormVectors
from loka_jax.ops.device import Device
from loka_jax.ops.plan import KernelPlan, resolve, resolve_served
from loka_jax.ops.products import Activations
from loka_jax.ops.run_site import SiteArrays, run_site
from loka_jax.recipe import ROLE_OPERANDS, Recipe
from loka_jax.site import Choice, SiteSpec
from tests import support
from tests.support import E4M3, oracle, stand_ins, tailed
from tests.support.nn import factor_of, updated
from tests.support.recipes import recipe_of

# In earlier steps, where scales are stored.
AMAXES = {"lhs": 4.0, "rhs": 0.5, "g": 8.0}


def dense_norm(
    lhs,
    rhs,
    bias=None,
    gamma=None,
    beta=None,
    *,
    recipe: Recipe,
    device: Device = stand_ins.CPU,
    state=None,
    provider=None,
    **spec,
):
    """Plans and runs a site; on a device with kernels they must serve it."""
    plan = plan_of(lhs, rhs, bias, recipe, device, provider, **spec)
    return run_site(plan, SiteArrays(lhs, rhs, bias, gamma, beta), state)


def plan_of(lhs, rhs, bias, recipe, device, provider=None, **spec) -> KernelPlan:
    """Returns the plan of a site by its arrays."""
    fp8_in = lhs.scaling if isinstance(lhs, Activations) else None
    spec = SiteSpec(
        math.prod(lhs.shape[:-1]),
        *rhs.shape,
        use_bias=bias is not None,
        fp8_in=fp8_in,
        **spec,
    )
    if provider is None:
        provider = "xla" if device == stand_ins.CPU else "pallas"
    if provider == "served":
        return resolve_served(spec, recipe, device)
    return resolve(spec, Choice(provider, recipe), device)


def operands(m, k, n, dtype=jnp.bfloat16):
    """Returns lhs and dy in `dtype`, and a float32 rhs: (lhs, rhs, dy)."""
    return (
        support.normal(m, k, dtype=dtype),
        support.normal(k, n, seed=1) / k**0.5,
        support.normal(m, n, seed=2, dtype=dtype),
    )


def vectors_of(n, norm, *, with_bias=False):
    """Returns the parameters that a site with this norm has."""
    names = {"layer": ["gamma", "beta"], "rms": ["gamma"]}.get(norm, [])
    names = [*names, "bias"] if with_bias else names
    centre = {"gamma": 1.0}
    return {
        name: centre.get(name, 0.0) + 0.3 * support.normal(n, seed=10 + i)
        for i, name in enumerate(names)
    }


def initial(recipe):
    """Returns the state that a recipe begins with, if it has one."""
    if not recipe.is_delayed:
        return None
    state = scaling.init_delayed(recipe)
    if recipe.scales_initialized:
        state = updated(state, np.float32([*AMAXES.values()]), recipe)
    return state


def pulled(f, args, g):
    """Returns `f(*args)` and its gradients, compiled."""

    @support.jitted
    def run(args, g):
        y, pull = jax.vjp(f, *args)
        return y, pull(g)

    return run(args, g)


class Case(NamedTuple):
    """A site, and what its kernels refuse; None where XLA runs the site."""

    name: str
    norm: str
    activation: str
    refusals: dict[str, str] | None = None
    sizes: tuple[int, int, int] = (48, 32, 80)

    @property
    def device(self):
        """The device."""
        is_xla = self.refusals is None
        return stand_ins.CPU if is_xla else stand_ins.hopper(**self.refusals)

    def runs(self, kernel):
        """Returns whether a kernel of the forward or backward pass runs."""
        if self.refusals is None or {"dense_norm", "norm_quantize"} <= {*self.refusals}:
            return False
        return kernel not in self.refusals


@dataclasses.dataclass
class Site:
    """The equations of a site: its forward pass, then its backward pass."""

    case: Case
    vectors: Any

    def __post_init__(self):
        self.params = NormVectors(**oracle.in_float64(self.vectors))
        name, _, is_stored = self.case.name.partition(":")
        self.roundings = dict(oracle.ROUNDINGS[name])
        self.is_fp8_dlhs = recipe_of(name).dlhs is not None
        if is_stored:
            for role, names in ROLE_OPERANDS.items():
                if recipe_of(name).gemm(role) is not None:
                    self.roundings[role] = tuple(map(_under_stored_scale, names))
        self.round = oracle.bf16
        if name == "f32":
            self.round = lambda x: np.asarray(x, np.float64)
        # The kernel of the backward pass writes FP8 from what it has not rounded.
        self.unrounded = set()
        if not self.case.runs("norm_backward"):
            return
        if self.case.sizes[2] < 2048:
            self.roundings["dlhs"] = oracle.ROUNDINGS["bf16"]["dlhs"]
        elif self.is_fp8_dlhs:
            self.unrounded = {"dlhs", "drhs"} if is_stored else {"dlhs"}
            if not is_stored:
                rows = oracle.ROUNDINGS["fp8_rowwise"]["dlhs"][0]
                self.roundings["dlhs"] = rows, self.roundings["dlhs"][1]

    def forward(self, lhs, rhs, handed=None):
        """Returns the activations before a rounding; `handed` is an lhs in FP8."""
        norm, activation = self.case.norm, self.case.activation
        self.lhs, self.rhs = (np.asarray(x, np.float64) for x in (lhs, rhs))
        first, second = self.roundings["fwd"]
        lhs = first(self.lhs) if handed is None else handed
        z = lhs @ second(self.rhs.T).T
        z = z if self.case.runs("dense_norm") else self.round(z)
        z = z if self.params.bias is None else z + self.params.bias
        self.xhat, self.rate = oracle.normalized(z, norm)
        return oracle.activate(activation, oracle.affine(self.xhat, self.params))[0]

    def backward(self, dy):
        """Returns the gradients of lhs, rhs and the vectors."""
        dy, xhat, norm = np.asarray(dy, np.float64), self.xhat, self.case.norm
        if self.case.runs("forward"):
            fits = min(xhat.shape[1], 256 if norm == "block" else 2048) <= 784
            xhat = tailed.stored_xhat(xhat, norm, self.is_fp8_dlhs and fits)
        terms = oracle.product_gradient(
            dy, xhat, self.rate, self.params, norm, self.case.activation
        )
        dz, sums = terms[0], dict(zip(("bias", "gamma", "beta"), terms, strict=True))
        self.g = self.round(dz)
        g, gt = (dz if r in self.unrounded else self.g for r in ("dlhs", "drhs"))
        (of_g, of_rhs), (of_lhs, of_gt) = (self.roundings[r] for r in ("dlhs", "drhs"))
        vectors = {name: sums[name].sum(0) for name in self.vectors}
        dlhs = self.round(of_g(g) @ of_rhs(self.rhs).T)
        return dlhs, of_lhs(self.lhs.T) @ of_gt(gt.T).T, vectors


def _under_stored_scale(operand):
    """Returns a cast with the scale that earlier steps left of an operand."""
    return functools.partial(
        support.cast_with_amax, amax=AMAXES[operand], dtype=E4M3, margin=1
    )


def assert_follows_the_equations(case, *, limit=2.0**-9, **options):
    """Asserts that results and the next state are those of the equations."""
    m, k, n = case.sizes
    recipe = recipe_of(case.name)
    lhs, rhs, dy = operands(m, k, n, recipe.compute_dtype)
    vectors = vectors_of(n, case.norm, with_bias=True)
    options = dict(device=case.device, recipe=recipe) | options
    options |= dict(norm=case.norm, activation=case.activation)
    f = lambda lhs, rhs, vectors, state: dense_norm(  # noqa: E731
        lhs, rhs, **vectors, state=state, **options
    )
    y, (*gradients, state) = pulled(f, (lhs, rhs, vectors, initial(recipe)), dy)
    expected = Site(case, vectors)
    theirs = expected.round(expected.forward(lhs, rhs)), list(expected.backward(dy))
    limit = 1e-5 if case.name == "f32" else limit
    tailed.assert_close((y, gradients), theirs, limit)
    chex.assert_trees_all_equal_dtypes(gradients, [lhs, rhs, vectors])
    assert y.dtype == recipe.compute_dtype
    if state is not None:
        amaxes = [np.abs(np.asarray(x, np.float64)).max() for x in (lhs, rhs)]
        amaxes = [*amaxes, np.abs(expected.g).max()]
        before = factor_of([*AMAXES.values()]) * recipe.scales_initialized
        newest, earlier = np.asarray(state.history)[:, :2].T
        if recipe.scales_initialized and recipe.drhs is None and case.runs("backward"):
            # No product reads g in FP8.
            amaxes[2], before[2] = AMAXES["g"], 0
        # A sum of float32 and a rounding to bfloat16 may differ in g.
        tailed.assert_factors(newest, np.array(amaxes), rtol=2.0**-7)
        np.testing.assert_array_equal(earlier, before)


CHAIN = "fp8_rowwise_bf16_drhs"


def assert_chain_follows_the_equations(refusals, m=64):
    """Asserts that a site multiplies what another hands on, which has its gradient."""
    static = dict(recipe=recipe_of(CHAIN), device=stand_ins.hopper(**refusals))

    def chain(lhs, first, second, vectors):
        options = dict(norm="layer", activation="swish", out="fp8", **static)
        hidden = dense_norm(lhs, first, **vectors, **options)
        return dense_norm(hidden, second, norm="none", **static)

    hidden = Case(CHAIN, "layer", "swish", refusals, (m, 32, 80))
    last = Case(CHAIN, "none", "none", refusals, (m, 80, 16))
    lhs, first, _ = operands(*hidden.sizes)
    _, second, dy = operands(*last.sizes)
    vectors = vectors_of(80, "layer")
    # Leading dims, which stay.
    args = lhs.reshape(4, -1, 32), first, second, vectors
    y, (dlhs, *gradients) = pulled(chain, args, dy.reshape(4, -1, 16))
    before, after = Site(hidden, vectors), Site(last, {})
    exact = before.forward(lhs, first)
    bound = tailed.bound_after_norm("layer", 80, before.params)
    handed = oracle.fp8(exact, bound / 448)
    theirs = oracle.bf16(after.forward(oracle.bf16(exact), second, handed))
    dhidden, dsecond, _ = after.backward(dy)
    their_dlhs, dfirst, dvectors = before.backward(dhidden)
    expected = theirs, their_dlhs, dfirst, dsecond, dvectors
    flat = y.reshape(m, 16), dlhs.reshape(m, 32), *gradients
    # Of few values one rounding to E4M3 that flips shows.
    tailed.assert_close(flat, expected, 2.0**-7)
