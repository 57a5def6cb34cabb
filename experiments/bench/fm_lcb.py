"""Times Wukong's FM and LCB: XLA's forms of the same algebra, and our kernels.

    python experiments/bench/fm_lcb.py --out fm_lcb.json

For every size and batch: kernel time of each form by JAX's profiler, median over input
sets that together exceed twice the L2, and the speed over the best of XLA's. Ours run
with their own tuning config and are checked against float32 first. The same for the
backward pass, and for training, the forward and the backward pass.

Without a GPU times are wall clock and only XLA's forms run, to try the script:
`--batches 4 --sizes S`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.bench import result as results
from experiments.bench.forms import Form, num_sets, print_records, time_forms
from loka_jax.ops.device import local_device
from loka_jax.pallas import fm_lcb, fm_lcb_backward

PASSES = {"forward": "", "backward": "backward ", "both": "train "}  # in names
# Least SQNR of our results: they, and what they are made of, are rounded to 2**-9.
_LEAST_DB = 45.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a model: n embeddings of d, k columns of Y, m of `[Y | W_L]`."""

    n: int
    d: int
    k: int
    m: int


SIZES = {
    "S": Size(n=40, d=64, k=24, m=40),
    "M": Size(n=64, d=128, k=32, m=64),
    "L": Size(n=96, d=160, k=48, m=96),
    "XL": Size(n=192, d=160, k=96, m=192),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        batches: examples.
        sizes: S, M, L, XL.
    """

    batches: tuple[int, ...] = (4096, 16384)
    sizes: tuple[str, ...] = tuple(SIZES)


def main(arguments: Arguments) -> None:
    """Measures, prints and writes the result."""
    about = {"inputs": "N(0, 1); weights N(0, 1 / n)", "rows": []}
    result = results.head("fm_lcb", arguments) | about
    cases = list(itertools.product(arguments.batches, arguments.sizes))
    for batch, name in results.in_time(cases, result, arguments):
        forms = measure(SIZES[name], batch)
        result["rows"].append({"size": name, "batch": batch, "forms": forms})
        print(f"{name} at {batch}")
        print_records(forms)


def measure(size: Size, batch: int) -> dict[str, Any]:
    """Returns a record of every form by name, as `time_forms` does."""
    key = jax.random.key(batch, impl="rbg")  # the generator that is quick on a GPU
    make = jax.jit(lambda key: make_operands(size, batch, key))
    count = num_sets(2 * batch * size.n * (size.d + size.k))
    sets = [make(key) for key in jax.random.split(key, count)]
    records: dict[str, dict[str, Any]] = {}
    for passes, prefix in PASSES.items():
        inputs = [(x, w) if passes == "forward" else (x, w, out) for x, w, out in sets]
        forms = {
            f"{prefix}{name}": Form(run, inputs)
            for name, run in by_xla(size.k, passes).items()
        }
        for name, run in ours(size, batch, passes).items():
            exact = functools.partial(_exact, passes, size.k)
            forms[f"{prefix}{name}"] = Form(run, inputs, exact, _LEAST_DB)
        timed = time_forms(forms)
        us = [record["us"] for name, record in timed.items() if "xla" in name]
        for record in timed.values():
            if "us" in record:
                record["vs_xla"] = min(us) / record["us"]
        records |= timed
    return records


def by_xla(k: int, passes: str) -> dict[str, Callable[..., Any]]:
    """Returns XLA's forms of a pass; they differ in the products that XLA sees."""
    forms = {
        "xla_p_transposed": _p_transposed,
        "xla_p": _p,
        "xla_two_weights": _two_weights,
        "xla_broadcast": _broadcast,
        "xla_gram": _gram,
    }
    bind = functools.partial
    return {name: _pass_of(passes, bind(form, k)) for name, form in forms.items()}


def ours(size: Size, batch: int, passes: str) -> dict[str, Callable[..., Any]]:
    """Returns our kernels for a pass, none where they do not serve it."""
    problem = fm_lcb.Problem(batch=batch, **dataclasses.asdict(size))
    if local_device().why_not_pallas or fm_lcb.why_not(problem):
        return {}
    forward = functools.partial(fm_lcb.fm_lcb, k=size.k)
    if passes == "forward":
        return {"pallas": forward}
    if fm_lcb_backward.why_not(problem):
        return {}

    def backward(x, weight, cotangents):
        return fm_lcb_backward.fm_lcb_backward(x, weight, *cotangents)

    def both(x, weight, cotangents):
        return forward(x, weight), backward(x, weight, cotangents)

    return {"pallas": backward if passes == "backward" else both}


def _pass_of(passes: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of a pass that autodiff derives from the forward pass."""
    if passes == "forward":
        return forward

    def run(x, weight, cotangents):
        out, vjp = jax.vjp(forward, x, weight)
        return vjp(cotangents) if passes == "backward" else (out, vjp(cotangents))

    return run


def _exact(passes: str, k: int, *operands) -> Any:
    """Returns the results of a pass in float32."""
    operands = jax.tree.map(lambda x: x.astype(jnp.float32), operands)
    return _pass_of(passes, functools.partial(_p_transposed, k))(*operands)


def make_operands(size: Size, batch: int, key) -> tuple[Any, ...]:
    """Returns x, the weight and cotangents of FM and LCB: normal, results of size 1."""
    keys = jax.random.split(key, 4)
    shapes = (
        (batch, size.n, size.d),
        (size.n, size.m),
        (batch, size.n, size.k),
        (batch, size.m - size.k, size.d),
    )
    x, weight, *cotangents = (
        jax.random.normal(*pair, jnp.bfloat16)
        for pair in zip(keys, shapes, strict=True)
    )
    return x, weight * size.n**-0.5, tuple(cotangents)


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


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
