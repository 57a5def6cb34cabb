"""The ways to compute Wukong's FM and LCB that `fm_lcb.py` times.

XLA's forms are the baselines: the same algebra, written so that XLA has different
products to choose kernels for. Ours are the Pallas kernels.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from loka_jax import quality
from loka_jax.ops.device import local_device
from loka_jax.pallas import fm_lcb, fm_lcb_backward

Passes = Literal["forward", "backward", "training"]

BF16, F32 = jnp.bfloat16, jnp.float32
# Least SQNR of our results: they, and what they are made of, are rounded to 2**-9.
LEAST_DB = 45.0
OTHER_LAYOUT = "xla_transposed_x"  # X is stored as [B, d, n]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a model: n embeddings of d, k columns of Y, m of `[Y | W_L]`."""

    n: int
    d: int
    k: int
    m: int

    def problem(self, batch: int) -> fm_lcb.Problem:
        """Returns the kernels' problem."""
        return fm_lcb.Problem(batch=batch, **dataclasses.asdict(self))

    def flops(self, batch: int) -> float:
        """Returns the FLOPs of the forward pass."""
        return 2.0 * batch * self.n * self.d * (self.m + self.k)

    def num_bytes(self, batch: int, passes: Passes = "forward") -> float:
        """Returns the bytes of X, FM and LCB; backward, of X twice and gradients."""
        x = self.n * self.d
        out = self.n * self.k + (self.m - self.k) * self.d
        count = {"forward": 1, "backward": 2, "training": 3}[passes]
        outs = 2 if passes == "training" else 1
        return 2.0 * batch * (count * x + outs * out)


SIZES = {
    "S": Size(n=40, d=64, k=24, m=40),
    "M": Size(n=64, d=128, k=32, m=64),
    "L": Size(n=96, d=160, k=48, m=96),
    "XL": Size(n=192, d=160, k=96, m=192),
}


class Form(NamedTuple):
    """One way to compute FM and LCB.

    Attributes:
        name: in the result.
        run: from x and the weight to FM and LCB.
        passes: the forward pass from x and the weight; the backward pass from them
            and the cotangents of FM and LCB; training is both, and returns both.
        transposed: x and LCB are [B, d, n], as another layout of the model has them.
        is_ours: checked against float32 before it is timed.
        facts: recorded beside its time.
    """

    name: str
    run: Callable[..., Any]
    passes: Passes = "forward"
    transposed: bool = False
    is_ours: bool = False
    facts: dict[str, Any] = {}


def forward_forms(size: Size, batch: int, most_configs: int) -> list[Form]:
    """Returns the forms of the forward pass: XLA's, then ours by tuning config."""
    bind = functools.partial
    forms = [
        Form("xla_p_transposed", bind(_p_transposed, size.k)),
        Form("xla_p", bind(_p, size.k)),
        Form("xla_two_weights", bind(_two_weights, size.k)),
        Form("xla_broadcast", bind(_broadcast, size.k)),
        Form("xla_gram", bind(_gram, size.k)),
        Form(OTHER_LAYOUT, bind(_transposed, size.k), transposed=True),
    ]
    problem = size.problem(batch)
    if local_device().why_not_pallas or fm_lcb.why_not(problem):
        return forms
    for config in fm_lcb.search_space(problem)[:most_configs]:
        values = dataclasses.asdict(config)
        name = "pallas " + " ".join(map(str, values.values()))
        run = bind(fm_lcb.fm_lcb, k=size.k, config=config)
        forms.append(Form(name, run, is_ours=True, facts={"config": values}))
    return forms


def gradient_forms(size: Size, batch: int, forward: list[Form]) -> list[Form]:
    """Returns the forms of the backward pass and of training.

    XLA's are derived by autodiff from its forward forms. Ours begin with the kernel of
    the forward pass: with each of XLA's backward passes, and with our own.
    """
    by_xla = [form for form in forward if not form.is_ours]
    derived = [(form, _backward(form.run)) for form in by_xla]
    forms = [
        form._replace(name=f"backward {form.name}", run=run, passes="backward")
        for form, run in derived
    ]
    for form in by_xla:
        run = functools.partial(_train, form.run)
        forms.append(
            form._replace(name=f"train {form.name}", run=run, passes="training")
        )
    if not any(form.is_ours for form in forward):
        return forms
    ours = functools.partial(fm_lcb.fm_lcb, k=size.k)
    for form, run in derived:
        if form.name != OTHER_LAYOUT:
            run = functools.partial(_both, ours, run)
            name = f"train pallas + {form.name}"
            forms.append(Form(name, run, "training", is_ours=True))
    if fm_lcb_backward.why_not(size.problem(batch)):
        return forms
    for config in fm_lcb_backward.search_space(size.problem(batch)):
        values = dataclasses.asdict(config)
        name, facts = " ".join(map(str, values.values())), {"config": values}
        run = functools.partial(_backward_kernel, config)
        bind = functools.partial(Form, is_ours=True, facts=facts)
        forms.append(bind(f"backward pallas {name}", run, "backward"))
        run = functools.partial(_both, ours, run)
        forms.append(bind(f"train pallas + pallas {name}", run, "training"))
    return forms


def _train(forward, x, weight, cotangents):
    out, vjp = jax.vjp(forward, x, weight)
    return out, vjp(cotangents)


def _backward(forward):
    def run(x, weight, cotangents):
        return jax.vjp(forward, x, weight)[1](cotangents)

    return run


def _backward_kernel(config, x, weight, cotangents):
    return fm_lcb_backward.fm_lcb_backward(x, weight, *cotangents, config=config)


def _both(forward, backward, x, weight, cotangents):
    return forward(x, weight), backward(x, weight, cotangents)


def make_operands(size: Size, batch: int, key) -> tuple[jax.Array, ...]:
    """Returns x, the weight and cotangents of FM and LCB: normal, results of size 1."""
    keys = jax.random.split(key, 4)
    shapes = (
        (batch, size.n, size.d),
        (size.n, size.m),
        (batch, size.n, size.k),
        (batch, size.m - size.k, size.d),
    )
    x, weight, *cotangents = (
        jax.random.normal(*pair, BF16) for pair in zip(keys, shapes, strict=True)
    )
    return x, weight * size.n**-0.5, *cotangents


@functools.partial(jax.jit, static_argnums=(0, 1))
def sqnr_db(k: int, passes: Passes, operands, out):
    """Returns the least SQNR of a form's results against float32, if all is finite.

    Args:
        k: columns of Y.
        passes: of the form.
        operands: as `make_operands` returns them.
        out: what the form returned.
    """
    x, weight, *cotangents = (operand.astype(F32) for operand in operands)
    forward = functools.partial(_p_transposed, k)
    with jax.default_matmul_precision("highest"):
        out_exact, gradients = _train(forward, x, weight, tuple(cotangents))
    exact = {
        "forward": out_exact,
        "backward": gradients,
        "training": (out_exact, gradients),
    }[passes]
    pairs = zip(jax.tree.leaves(exact), jax.tree.leaves(out), strict=True)
    db = jnp.stack([quality.sqnr(a, b.astype(F32)) for a, b in pairs])
    finite = [jnp.all(jnp.isfinite(b)) for b in jax.tree.leaves(out)]
    return jnp.where(jnp.all(jnp.stack(finite)), jnp.min(db), -jnp.inf)


def _p_transposed(k, x, weight):
    p = jnp.einsum("nm,bnd->bmd", weight, x)
    return jnp.einsum("bnd,bkd->bnk", x, p[:, :k]), p[:, k:]


def _p(k, x, weight):
    p = jnp.einsum("bnd,nm->bdm", x, weight)
    return jnp.einsum("bnd,bdk->bnk", x, p[:, :, :k]), p[:, :, k:].swapaxes(1, 2)


def _two_weights(k, x, weight):
    p = jnp.einsum("bnd,nk->bdk", x, weight[:, :k])
    lcb = jnp.einsum("nl,bnd->bld", weight[:, k:], x)
    return jnp.einsum("bnd,bdk->bnk", x, p), lcb


def _broadcast(k, x, weight):
    weight = jnp.broadcast_to(weight, (x.shape[0], *weight.shape))
    p = jnp.einsum("bnm,bnd->bmd", weight, x)
    return jnp.einsum("bnd,bkd->bnk", x, p[:, :k]), p[:, k:]


def _gram(k, x, weight):
    gram = jnp.einsum("bnd,bmd->bnm", x, x)
    lcb = jnp.einsum("nl,bnd->bld", weight[:, k:], x)
    return jnp.einsum("bnm,mk->bnk", gram, weight[:, :k]), lcb


def _transposed(k, x, weight):
    p = jnp.einsum("bdn,nm->bdm", x, weight)
    return jnp.einsum("bdn,bdk->bnk", x, p[:, :, :k]), p[:, :, k:]
