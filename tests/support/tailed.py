"""What products with tails between them compute, in numpy and float64, rounded alike.

Written from the equations of `ops.group` and `ops.group_cross`, and from what their
recipes say is rounded. Amaxes are those that a step should measure: of
lhs, rhs and g of each product, NaN where no product casts an operand.
"""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from loka_jax import scaling
from loka_jax.group import Cross, Dense, Group, Member
from loka_jax.normed import Epilogue
from loka_jax.ops.device import local_device
from loka_jax.ops.group import run_group
from loka_jax.ops.group_sites import LayerArrays
from loka_jax.ops.plan import resolve
from loka_jax.recipe import ROLES, get_recipe
from loka_jax.site import Choice, SiteSpec
from loka_jax.unbiased import uniform
from tests import support
from tests.support import oracle
from tests.support.nn import factor_of, updated

DELAYED = "fp8_tensorwise_delayed"
BF16_DRHS = "fp8_tensorwise_delayed_bf16_drhs"
AMAXES = 8.0, 1.0, 16.0  # of lhs, rhs and g in earlier steps
SCALES = 2.0**-4, 2.0**-7, 2.0**-3  # that keep twice that below 448


class Form(NamedTuple):
    """The layers of a wide stack."""

    norm: str = "block"
    activation: str = "hard_swish"
    use_bias: bool = False
    ends_linear: bool = False
    input_norm: str = "none"
    m: int = 48
    dropout: float = 0.0
    widths: tuple[int, ...] = (96, 272, 80, 64)  # 272: more than a block of a norm

    def epilogue(self, i):
        """Returns norm and activation of layer i: none after a last, linear product."""
        if self.ends_linear and i == len(self.widths) - 2:
            return "none", "none"
        return self.norm, self.activation


def plan(recipe, m, k, n, **spec):
    """Returns the plan of a site whose delayed scales are set."""
    choice = Choice.parse(f"group {recipe}").with_initialized_scales()
    return resolve(SiteSpec(m, k, n, **spec), choice, local_device())


def state(recipe):
    """Returns a state whose history holds `AMAXES`; None without delayed scales."""
    recipe = get_recipe(recipe)
    if not recipe.is_delayed:
        return None
    return updated(scaling.init_delayed(recipe), np.float32(AMAXES), recipe)


def wide_plans(form, by_layer):
    """Returns the plans of a stack with these recipes."""

    def of_layer(i):
        norm, activation = form.epilogue(i)
        options = dict(norm=norm, activation=activation, use_bias=form.use_bias)
        return plan(by_layer[i], form.m, *form.widths[i : i + 2], **options)

    return tuple(map(of_layer, range(len(form.widths) - 1)))


def wide_layers(form):
    """Returns the parameters of a stack."""

    def layer(i):
        k, n = form.widths[i : i + 2]
        gamma = beta = None
        if form.epilogue(i)[0] in ("layer", "rms"):
            # One factor is so large that without it the bound of rows would clip.
            gamma = (1 + support.normal(n, seed=20 + i) / 4).at[3].set(32.0)
            beta = support.normal(n, seed=30 + i) if form.norm == "layer" else None
        bias = support.normal(n, seed=10 + i) if form.use_bias else None
        kernels = (support.normal(k, n, seed=i) / k**0.5,)
        return LayerArrays(kernels, bias, gamma, beta)

    return tuple(map(layer, range(len(form.widths) - 1)))


def cross_layers(n, rank, depth, *, has_bias=True):
    """Returns the parameters of a cross network of a rank, or None for full rank."""
    widths = (n, n) if rank is None else (n, rank, n)

    def layer(i):
        kernels = tuple(
            support.normal(k, n, seed=10 * i + j) / k**0.5
            for j, (k, n) in enumerate(itertools.pairwise(widths))
        )
        bias = support.normal(n, seed=10 * i + 5) if has_bias else None
        return LayerArrays(kernels, bias)

    return tuple(map(layer, range(depth)))


def dropout_words(count):
    """Returns random words of each of some layers."""
    return jax.random.bits(jax.random.key(3), (count, 2), jnp.uint32)


def kept_share(form, i, shape):
    """Returns the factors of dropout on the activations of layer i."""
    if not form.dropout:
        return np.float64(1.0)
    has_norm = form.input_norm != "none"
    words = dropout_words(len(form.widths) - 1 + has_norm)[i + has_norm]
    u = np.asarray(uniform(words, jnp.arange(shape[0]), shape[1]))
    return np.where(u < form.dropout, 0.0, 1 / (1 - form.dropout))


def rows(m, n, seed):
    """Returns normal rows in bfloat16."""
    return support.normal(m, n, seed=seed, dtype=jnp.bfloat16)


def value_and_gradients(run, operands, states, g):
    """Returns (the result, gradients of the operands), and the next states."""
    y, pull = jax.vjp(run, operands, states)
    gradients, states = pull(jax.tree.map(lambda g, y: g.astype(y.dtype), g, y))
    return (y, gradients), states


compiled = support.jitted(value_and_gradients, static_argnums=0)


def assert_close(ours, theirs, limit):
    """Asserts that the relative L2 error of each array is small."""

    def error(x, y):
        x, y = (np.asarray(v, np.float64) for v in (x, y))
        assert x.shape == y.shape
        return float(np.linalg.norm(x - y) / np.linalg.norm(y))

    errors = jax.tree.map(error, ours, theirs)
    assert max(jax.tree.leaves(errors)) <= limit, errors


def assert_triton_gives_the_results_of_xla(results, limit=2.0**-7):
    """Asserts that both give the same on this device, up to few flipped roundings.

    And up to those of the terms of sums over rows, 2^-9 of each: the terms of a bias
    before a norm cancel to a few times less than their root mean square.
    """
    by = (dict(step=value_and_gradients, implementation=x) for x in ("triton", "xla"))
    assert_close(*(results(**how)[0] for how in by), limit)


def assert_next_states(found, amaxes):
    """Asserts that each state is that of a step with these amaxes of its operands."""
    is_state = lambda x: isinstance(x, scaling.DelayedScaling)  # noqa: E731
    states = jax.tree.leaves(found, is_leaf=is_state)
    amaxes = [a for a in amaxes if np.isfinite(a).any()]
    for state, expected in zip(states, np.array(amaxes).reshape(-1, 3), strict=True):
        history, measured = np.asarray(state.history), np.isfinite(expected)
        # A rounding of E4M3 that flips upstream moves an element by up to 2^-4.
        assert_factors(history[measured, 0], expected[measured], rtol=2.0**-5)
        # Those before moved on by a step where one came, and stay where none did.
        rest = np.where(measured[:, None], history[:, 1:3], history[:, :2])
        # Of an operand that no product casts it is known that there was an amax.
        before = np.where(~measured & (rest[:, 0] == 1), 1.0, SCALES)
        np.testing.assert_array_equal(rest, [[scale, 0] for scale in before])


def assert_factors(found, amaxes, rtol):
    """Asserts that factors are those of amaxes that may be off by a little."""
    least, most = (factor_of(amaxes * (1 + sign * rtol)) for sign in (-1, 1))
    np.testing.assert_array_equal(found, np.clip(found, least, most))


class Rounded:
    """The roundings of one product by its recipe, and the amaxes that it measures."""

    def __init__(self, recipe):
        gemms = {role: get_recipe(recipe).gemm(role) for role in ROLES}
        self.is_fp8 = {role: gemm is not None for role, gemm in gemms.items()}
        self.amaxes = dict.fromkeys(("lhs", "rhs", "g"), math.nan)
        self.of = dict(zip(self.amaxes, SCALES, strict=True))

    def read(self, name, x, *roles, scale=None):
        """Returns an operand as each of two roles reads it."""
        if any(self.is_fp8[role] for role in roles):
            self.amaxes[name] = np.abs(x).max()
        to_fp8 = functools.partial(oracle.fp8, scale=scale or self.of[name])
        return [(to_fp8 if self.is_fp8[role] else oracle.bf16)(x) for role in roles]

    def unit(self, role, first, second):
        """Returns the scale of an unscaled product."""
        return self.of[first] * self.of[second] if self.is_fp8[role] else 1.0

    def to_fp8(self, role, x, k, unit):
        """Returns a product that only tails read, in FP8 where the role runs in it."""
        if not self.is_fp8[role]:
            return oracle.bf16(x)
        exponent = {"fwd": 7, "dlhs": 5}[role] + int(math.log2(k + -k % 16)) // 2
        return oracle.fp8(x, unit * 2.0**exponent)


def bound_after_norm(norm, n, layer=None):
    """Returns the largest magnitude that an element after a norm can have."""
    bound = math.sqrt(min(n, 256) if norm == "block" else n)
    if layer is None or layer.gamma is None:
        return bound
    beta = 0 if layer.beta is None else np.abs(layer.beta)
    return np.max(bound * np.abs(layer.gamma) + beta)


def bounding_scale(norm, n, layer=None, dropout=0.0):
    """Returns the least power of two under which no row after a norm saturates."""
    bound = bound_after_norm(norm, n, layer) / (1 - dropout)
    return 2.0 ** math.ceil(math.log2(bound / 448))


def stored_xhat(xhat, norm, is_fp8):
    """Returns normalized rows as the backward pass reads them."""
    return oracle.fp8(xhat, 1 / 16) if norm != "none" and is_fp8 else oracle.bf16(xhat)


@dataclasses.dataclass
class WideStack:
    """A stack's forward pass (`forward`), then its backward pass (`backward`)."""

    form: Form
    layers: tuple[LayerArrays, ...]
    by_layer: tuple[str, ...]

    def __post_init__(self):
        self.layers = oracle.in_float64(self.layers)
        self.roundings = [Rounded(recipe) for recipe in self.by_layer]
        self.kept = []

    @property
    def amaxes(self):
        """The measured amaxes of each layer."""
        return [[*rounded.amaxes.values()] for rounded in self.roundings]

    def forward(self, x):
        """Returns the activations of rows."""
        norm, scale = self.form.input_norm, None
        self.given, self.rate = oracle.normalized(np.asarray(x, np.float64), norm)
        if norm != "none":
            scale = bounding_scale(norm, self.given.shape[1])
        x = self.given
        for i, (rounded, layer) in enumerate(
            zip(self.roundings, self.layers, strict=True)
        ):
            norm, activation = self.form.epilogue(i)
            lhs, of_drhs = rounded.read("lhs", x, "fwd", "drhs", scale=scale)
            if self.kept and self.kept[-1][2:4] == ["none", "relu"]:
                # Its backward pass reads the signs of what it has handed on.
                self.kept[-1][4] = lhs if rounded.is_fp8["fwd"] else of_drhs
            rhs, of_dlhs = rounded.read("rhs", *layer.kernels, "fwd", "dlhs")
            of_lhs = scale or rounded.of["lhs"]
            unit = of_lhs * rounded.of["rhs"] if rounded.is_fp8["fwd"] else 1.0
            z = oracle.bf16(lhs @ rhs, unit)
            z = z if layer.bias is None else z + self.bias_of(i)
            xhat, rate = oracle.normalized(z, norm)
            kept = xhat  # without a norm backward adds the bias to the product again
            if norm != "none":
                kept = stored_xhat(xhat, norm, rounded.is_fp8["dlhs"])
            self.kept.append([of_drhs, of_dlhs, norm, activation, kept, rate])
            x, _ = oracle.activate(activation, oracle.affine(xhat, layer))
            x = x * kept_share(self.form, i, x.shape)
            scale = None
            if norm != "none":
                scale = bounding_scale(norm, xhat.shape[1], layer, self.form.dropout)
        return oracle.bf16(x)

    def bias_of(self, i):
        """Returns a bias; in FP8 the product of a linear end adds it in bfloat16."""
        form, bias = self.form, self.layers[i].bias
        is_end = form.ends_linear and i == len(self.layers) - 1 and not form.dropout
        is_rounded = is_end and self.roundings[i].is_fp8["fwd"]
        return oracle.bf16(bias) if is_rounded else bias

    def backward(self, g, *, to_fp8=False):
        """Returns the gradients of x (before a norm of it) and of the layers."""
        d, gradients = np.asarray(g, np.float64), []
        for i in reversed(range(len(self.layers))):
            rounded, layer = self.roundings[i], self.layers[i]
            lhs, rhs, norm, activation, xhat, rate = self.kept[i]
            d = d * kept_share(self.form, i, d.shape)
            terms = oracle.product_gradient(d, xhat, rate, layer, norm, activation)
            of_dlhs, of_drhs = rounded.read("g", terms[0], "dlhs", "drhs")
            given = zip(layer[1:], terms, strict=True)
            vectors = (None if v is None else term.sum(0) for v, term in given)
            gradients.append(LayerArrays((lhs.T @ of_drhs,), *vectors))
            d, unit = of_dlhs @ rhs.T, rounded.unit("dlhs", "g", "rhs")
            if to_fp8 and i == 0:
                d = rounded.to_fp8("dlhs", d, of_dlhs.shape[1], unit)
            else:
                d = oracle.bf16(d, unit)
        norm = self.form.input_norm
        if norm != "none":
            given = stored_xhat(self.given, norm, self.roundings[0].is_fp8["dlhs"])
            d = oracle.norm_gradient(d, given, self.rate, norm)
        return d, tuple(reversed(gradients))


def wide_operands(form, by_layer):
    """Returns plans, x, the layers, their states and the gradient of the result."""
    x, g = rows(form.m, form.widths[0], 98), rows(form.m, form.widths[-1], 99)
    states = tuple(map(state, by_layer))
    return wide_plans(form, by_layer), x, wide_layers(form), states, g


def dense_layers(form, plans, first):
    """Returns the layers of a stack that reads value `first`, the next in order."""
    return tuple(
        Dense(
            reads=first if i == 0 else i,
            member=Member(f"dense_{i}", plan.spec),
            norm=Epilogue(*form.epilogue(i)),
            dropout=form.dropout,
        )
        for i, plan in enumerate(plans)
    )


def moved(layer, by):
    """Returns a dense layer as it is behind `by` more layers."""
    return dataclasses.replace(layer, reads=layer.reads + by)


def wide_group(form, plans):
    """Returns the group of a stack, whose input may be normalized."""
    layers = dense_layers(form, plans, 0)
    if form.input_norm != "none":
        normed = Dense(reads=0, member=None, norm=Epilogue(form.input_norm))
        layers = normed, *(moved(layer, 1) for layer in layers)
    outputs = (len(layers),)
    widths = ((form.widths[0],),)
    return Group(rows=form.m, inputs=widths, layers=layers, outputs=outputs)


def wide_results(form, by_layer, *, step=compiled, **options):
    """Returns (y, gradients of x and the layers), and the next states."""
    plans, x, layers, states, g = wide_operands(form, by_layer)
    group = wide_group(form, plans)

    def run(arrays, states):
        x, layers = arrays
        given = tuple((layer,) for layer in layers)
        if form.input_norm != "none":
            given = (LayerArrays(),), *given
        words = dropout_words(len(group.layers)) if form.dropout else None
        options.setdefault("words", words)
        (y,) = run_group(group, plans, ((x,),), given, states, **options)
        return y

    return step(run, (x, layers), states, g)


def assert_wide_follows_the_equations(form, by_layer, *, limit=2.0**-9, **options):
    """Asserts that results and states are those of the equations, rounded alike.

    Another order of sums flips few roundings to FP8 and bfloat16, hence the limit.
    """
    _, x, layers, _, g = wide_operands(form, by_layer)
    (y, (dx, dlayers)), after = wide_results(form, by_layer, **options)
    expected = WideStack(form, layers, by_layer)
    theirs = expected.forward(x), *expected.backward(g)
    assert_close((y, dx, dlayers), theirs, limit)
    chex.assert_trees_all_equal_dtypes((dx, dlayers), (x, layers))
    assert_next_states(after, expected.amaxes)


@dataclasses.dataclass
class CrossNetwork:
    """A network's forward pass (`forward`), then its backward pass (`backward`)."""

    layers: tuple[LayerArrays, ...]
    recipe: str

    def __post_init__(self):
        self.layers = oracle.in_float64(self.layers)
        self.roundings = [
            [Rounded(self.recipe) for _ in layer.kernels] for layer in self.layers
        ]
        self.kept = []

    @property
    def amaxes(self):
        """The measured amaxes of each product."""
        return [[*r.amaxes.values()] for own in self.roundings for r in own]

    def forward(self, x0):
        """Returns the features after the last layer, before a rounding."""
        x0 = np.asarray(x0, np.float64)
        (self.x0,) = self.roundings[0][0].read("lhs", x0, "fwd")
        s, x = np.ones_like(x0), x0
        for own, layer in zip(self.roundings, self.layers, strict=True):
            all_lhs, all_rhs, h = [], [], x
            for j, (rounded, kernel) in enumerate(zip(own, layer.kernels, strict=True)):
                lhs, of_drhs = rounded.read("lhs", h, "fwd", "drhs")
                rhs, of_dlhs = rounded.read("rhs", kernel, "fwd", "dlhs")
                unit = rounded.unit("fwd", "lhs", "rhs")
                if j + 1 < len(own):
                    h = oracle.bf16(lhs @ rhs, unit)
                else:
                    z = rounded.to_fp8("fwd", lhs @ rhs, lhs.shape[1], unit)
                all_lhs.append(of_drhs)
                all_rhs.append(of_dlhs)
            self.kept.append((all_lhs, all_rhs, s))
            s = s + z + (0 if layer.bias is None else layer.bias)
            x = self.x0 * s
        self.s = s
        return x

    def backward(self, d, other=0.0):
        """Returns the gradients of x0, before a rounding, and of the layers."""
        total = d = np.asarray(d, np.float64)
        dx0, gradients = d * self.s + other, []
        each = zip(self.roundings, self.layers, self.kept, strict=True)
        for own, layer, (all_lhs, all_rhs, s) in reversed([*each]):
            g, kernels = self.x0 * total, []
            dbias = None if layer.bias is None else g.sum(0)
            for j in reversed(range(len(own))):
                rounded = own[j]
                of_dlhs, of_drhs = rounded.read("g", g, "dlhs", "drhs")
                kernels.append(all_lhs[j].T @ of_drhs)
                g, unit = of_dlhs @ all_rhs[j].T, rounded.unit("dlhs", "g", "rhs")
                if j:
                    g = oracle.bf16(g, unit)
            d = rounded.to_fp8("dlhs", g, of_dlhs.shape[1], unit)
            gradients.append(LayerArrays(tuple(reversed(kernels)), dbias))
            dx0, total = dx0 + d * s, total + d
        return dx0, tuple(reversed(gradients))


def cross_plans(m, n, rank, recipe, depth):
    """Returns the plans of a network."""
    sizes = [(n, n)] if rank is None else [(n, rank), (rank, n)]
    return (tuple(plan(recipe, m, *size) for size in sizes),) * depth


def cross_states(plans):
    """Returns the states of a network's products."""
    return tuple(tuple(state(p.choice.recipe.name) for p in own) for own in plans)


class CrossedCase(NamedTuple):
    """A cross network, and layers behind it or beside it (of x0) with a head.

    The form also has the sizes of x0; without layers the network is alone.
    """

    recipe: str
    rank: int | None = 31
    depth: int = 1
    is_beside: bool = False
    form: Form = Form("none", "swish", use_bias=True, m=47, widths=(95, 32))
    has_bias: bool = True

    @property
    def by_layer(self):
        """The recipes of the layers."""
        return (self.recipe,) * (len(self.form.widths) - 1)


def crossed_group(case, own, plans, parts):
    """Returns the group of a cross network and the layers behind it or beside it."""
    members = tuple(
        tuple(Member(f"cross_{i}_{j}", plan.spec) for j, plan in enumerate(each))
        for i, each in enumerate(own)
    )
    layers = dense_layers(case.form, plans, 0 if case.is_beside else 1)
    layers = *layers[:1], *(moved(layer, 1) for layer in layers[1:])
    return Group(
        rows=case.form.m,
        inputs=(tuple(part.shape[1] for part in parts),),
        layers=(Cross(reads=0, members=members), *layers),
        outputs=(1 + len(layers),),
        head=1 if case.is_beside else None,
    )


def crossed_operands(case):
    """Returns a function of arrays and states, both, and a result's gradient."""
    plans, x0, layers, states, g = wide_operands(case.form, case.by_layer)
    m, n = x0.shape
    own = cross_plans(m, n, case.rank, case.recipe, case.depth)
    head = support.normal(n, seed=52) / n**0.5
    cross = cross_layers(n, case.rank, case.depth, has_bias=case.has_bias)
    parts = (x0[:, :16], x0[:, 16:]) if case.has_bias else (x0,)
    group = crossed_group(case, own, plans, parts)

    def run(arrays, states, **options):
        parts, cross, layers, head = arrays
        given = cross, *((layer,) for layer in layers)
        states = *(x for each in states[0] for x in each), *states[1]
        all_plans = *(x for each in own for x in each), *plans
        dotted = head if case.is_beside else None
        out = run_group(group, all_plans, (parts,), given, states, dotted, **options)
        return out if case.is_beside else (jnp.sum(head) * jnp.ones(m), *out)

    arrays = parts, cross, layers, head
    return run, arrays, (cross_states(own), states), (support.normal(m, seed=53), g)


def crossed_results(case, *, step=compiled, **options):
    """Returns (dots and y, gradients of the arrays), and the next states."""
    run, *operands = crossed_operands(case)
    return step(functools.partial(run, **options), *operands)


def assert_crossed_follows_the_equations(case, *, limit=2.0**-9, **options):
    """Asserts that results and states are those of the equations, rounded alike."""
    _, arrays, _, (e, g) = crossed_operands(case)
    (results, gradients), after = crossed_results(case, **options)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, arrays)
    parts, cross, layers, head = arrays
    x0 = np.asarray(jnp.concatenate(parts, axis=1), np.float64)
    network = CrossNetwork(cross, case.recipe)
    stack = WideStack(case.form, layers, case.by_layer)
    features = network.forward(x0)
    y = stack.forward(x0 if case.is_beside else features)
    d, dlayers = stack.backward(g, to_fp8=True)
    (dots, ours), (dparts, dcross, our_dlayers, dhead) = results, gradients
    dx0 = jnp.concatenate(dparts, axis=1)
    if case.is_beside:
        head, e = np.asarray(head, np.float64), np.asarray(e, np.float64)
        their_dx0, their_dcross = network.backward(np.outer(e, head), other=d)
        assert_close((dots, dhead), (features @ head, e @ features), limit)
    else:
        their_dx0, their_dcross = network.backward(d)
    theirs = y, their_dx0, their_dcross, dlayers
    assert_close((ours, dx0, dcross, our_dlayers), theirs, limit)
    assert_next_states(after, network.amaxes + stack.amaxes)
