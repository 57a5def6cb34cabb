"""Faults to plant around the kernels of a site, or XLA's references on a CPU."""

# ruff: noqa: E731 (changes are functions of one expression)

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loka_jax import fp8, xla
from loka_jax.fp8 import E5M2, Fp8Array
from loka_jax.ops import products
from loka_jax.ops.device import Device
from loka_jax.pallas import SiteKernels

TILE = 64
FUSED, QUANTIZE, BACKWARD = "dense_norm", "norm_quantize", "norm_backward"
BF16, ROWWISE = "pallas bf16", "pallas fp8_rowwise"
DELAYED = "pallas fp8_tensorwise_delayed"
IN_FP8 = (), ROWWISE, {"out": "fp8"}


class Fault(NamedTuple):
    """A fault to plant."""

    kind: str
    what: str
    kernels: dict[str, Callable] = {}
    patches: tuple = ()
    choice: str = BF16
    spec: dict[str, Any] = {}


def plant(fault: Fault, monkeypatch, device: Device) -> Device:
    """Returns the device with the fault in its kernels."""
    for target, name, change in fault.patches:
        monkeypatch.setattr(target, name, change(getattr(target, name)))
    kernels = []
    for kernel in device.kernels:
        change = fault.kernels.get(kernel.name, lambda run: run)
        kernels.append(kernel._replace(run=change(kernel.run)))
    return dataclasses.replace(device, own_kernels=SiteKernels(*kernels))


def wrapping(change):
    """Returns a change of a function, which is the first argument of `change`."""
    return lambda run: lambda *args, **kwargs: change(run, *args, **kwargs)


# What a kernel reads and writes.


def writes(change, *names):
    """Returns a change of a kernel: of these of its outputs."""

    @wrapping
    def changed(run, *args, **kwargs):
        out = run(*args, **kwargs)
        values = {name: getattr(out, name) for name in names}
        values = {n: change(x) for n, x in values.items() if x is not None}
        return out._replace(**values)

    return changed


def reads(place, change):
    """Returns a change of a kernel: of an argument, by place or name."""

    @wrapping
    def changed(run, *args, **kwargs):
        args = list(args)
        target = args if isinstance(place, int) else kwargs
        target[place] = change(target[place])
        return run(*args, **kwargs)

    return changed


y = lambda change: {FUSED: writes(change, "y")}
y_fp8 = lambda change: {FUSED: writes(change, "y_fp8")}
lhs_scale = lambda change: {FUSED: reads(0, scale_inv(change))}


def vectors(kernel, **changes):
    """Returns a change of a kernel's bias, gamma or beta."""

    def change(old):
        new = {name: change(getattr(old, name)) for name, change in changes.items()}
        return old._replace(**new)

    return {kernel: reads(2, change)}


def epsilon(value):
    return {FUSED: reads("epilogue", lambda e: dataclasses.replace(e, epsilon=value))}


# Changes of arrays.


def tile_from(x, other, first=TILE):
    # By a select: XLA does not compile an update in place of a kernel's result.
    row = jnp.arange(len(x))[:, None]
    return jnp.where((first <= row) & (row < first + TILE), other, x)


tile_of_zeros = lambda x: tile_from(x, jnp.zeros_like(x))
tile_repeated = lambda x: tile_from(x, jnp.roll(x, TILE, axis=0))
off_by_one = lambda x: jnp.roll(x, 1, axis=0)
times = lambda factor: lambda x: (x.astype(jnp.float32) * factor).astype(x.dtype)
plus = lambda summand: lambda x: (x.astype(jnp.float32) + summand).astype(x.dtype)
data = lambda change: lambda x: Fp8Array(change(x.data), x.scale_inv)


def block_transposed(x):
    block = slice(TILE, 2 * TILE), slice(TILE)
    return x.at[block].set(x[block].T)


def stale_rows(x):
    is_stale = (jnp.arange(len(x)) % 128 == 127)[:, None]
    return jnp.where(is_stale, jnp.roll(x, TILE, axis=0), x)


def scale_inv(change):
    def changed(x):
        is_fp8 = isinstance(x, Fp8Array)
        return Fp8Array(x.data, change(x.scale_inv)) if is_fp8 else x

    return changed


# Changes of kernels that need more.


@wrapping
def bias_after_norm(run, x, w, vectors, **kwargs):
    beta = vectors.beta + vectors.bias
    return run(x, w, vectors._replace(bias=None, beta=beta), **kwargs)


@wrapping
def mean_kept(run, *args, epilogue, **kwargs):
    right = run(*args, epilogue=epilogue, **kwargs)
    rms = dataclasses.replace(epilogue, norm="rms")
    wrong = run(*args, epilogue=rms, **kwargs)
    return right._replace(y=tile_from(right.y, wrong.y))


@wrapping
def padded_width(run, x, w, vectors, *, epilogue, **kwargs):
    factor = (1 + 16 / w.shape[0]) ** 0.5
    vectors = vectors._replace(gamma=vectors.gamma * factor)
    out = run(x, w, vectors, epilogue=epilogue, **kwargs)
    rstd = None if out.rstd is None else out.rstd * factor
    return out._replace(rstd=rstd)


@wrapping
def short_k(run, x, *args, **kwargs):
    return run(x.at[:, -16:].set(jnp.zeros_like(x[:, -16:])), *args, **kwargs)


@wrapping
def swapped_scales(run, x, w, *args, **kwargs):
    of_x, of_w = jnp.max(x.scale_inv), jnp.max(w.scale_inv)
    x = Fp8Array(x.data, jnp.full_like(x.scale_inv, of_w))
    w = Fp8Array(w.data, jnp.full_like(w.scale_inv, of_x))
    return run(x, w, *args, **kwargs)


@wrapping
def padded_rows_summed(run, dy, *args, **kwargs):
    out = run(dy, *args, **kwargs)
    last = dy.at[: -2 * TILE].set(jnp.zeros_like(dy[: -2 * TILE]))
    again = run(last, *args, **kwargs)
    return out._replace(dgamma=out.dgamma + again.dgamma)


@wrapping
def unclipped(saturate, x, dtype):
    return x.astype(jnp.float32).astype(dtype)


@wrapping
def toward_zero(saturate, x, dtype):
    rounded = saturate(x, dtype)
    bits = jax.lax.bitcast_convert_type(rounded, jnp.uint8)
    lower = jax.lax.bitcast_convert_type(bits - jnp.uint8(1), rounded.dtype)
    is_beyond = jnp.abs(rounded.astype(jnp.float32)) > jnp.abs(x)
    return jnp.where(is_beyond, lower, rounded)


@wrapping
def by_e5m2(saturate, x, dtype):
    # XLA would drop a cast whose result is cast again.
    in_e5m2 = jax.lax.optimization_barrier(saturate(x, E5M2))
    return saturate(in_e5m2.astype(jnp.float32), dtype)


@wrapping
def without_last_terms(multiply, lhs, rhs, **kwargs):
    """Leaves out the last 16 rows of a product over the rows."""
    if lhs.shape[0] < lhs.shape[1] and rhs.shape[0] < rhs.shape[1]:
        lhs = lhs.at[:, -16:].set(jnp.zeros_like(lhs[:, -16:]))
    return multiply(lhs, rhs, **kwargs)


@wrapping
def unquantized_weight(multiply, site, role, first, second, out_dtype):
    if role != "dlhs":
        return multiply(site, role, first, second, out_dtype)
    g = site.view(role, "g", first)
    return jnp.matmul(g.dequantize(), second.value.T).astype(out_dtype)


def _faults(kind: str, *faults) -> list[Fault]:
    return [
        fault if isinstance(fault, Fault) else Fault(kind, *fault) for fault in faults
    ]


def _cast(what: str, choice: str, change) -> Fault:
    return Fault("casts", what, patches=((fp8, "saturate", change),), choice=choice)


FAULTS = [
    *_faults(
        "rows and tiles",
        ("a tile of zeros", y(tile_of_zeros)),
        ("a tile repeated", y(tile_repeated)),
        (
            "the last partial tile skipped",
            y(lambda x: tile_from(x, 0 * x, first=len(x) - TILE)),
        ),
        ("the tile before added", y(lambda x: tile_from(x, x + jnp.roll(x, TILE, 0)))),
        ("a block transposed", y(block_transposed)),
        ("rows off by one", y(off_by_one)),
        ("single rows stale", y(stale_rows)),
        ("the K loop one step short", {FUSED: short_k}),
    ),
    *_faults(
        "gain and offset",
        ("1 % too large", y(times(1.01))),
        ("3 % too large in FP8", y(times(1.03)), (), ROWWISE),
        ("one tile 0.6 % too large", y(lambda x: tile_from(x, times(1.006)(x)))),
        ("shifted by 0.02", y(plus(0.02))),
    ),
    *_faults(
        "norm",
        ("epsilon ten times as large", epsilon(1e-5)),
        ("no epsilon", epsilon(0.0)),
        ("gamma dropped", vectors(FUSED, gamma=jnp.ones_like)),
        ("gamma off by one column", vectors(FUSED, gamma=off_by_one)),
        ("beta dropped", vectors(FUSED, beta=jnp.zeros_like)),
        ("beta of one column dropped", vectors(FUSED, beta=lambda x: x.at[-1].set(0))),
        ("bias added after the norm", {FUSED: bias_after_norm}),
        ("mean not subtracted from 64 rows", {FUSED: mean_kept}),
        ("variance over padded columns", {FUSED: padded_width}),
    ),
    *_faults(
        "scales",
        ("scale_inv missing", lhs_scale(jnp.ones_like), (), DELAYED, {"norm": "none"}),
        ("scale_inv squared", lhs_scale(jnp.square), (), DELAYED),
        ("scale_inv of the other operand", {FUSED: swapped_scales}, (), ROWWISE),
        ("scale_inv of the row above", lhs_scale(off_by_one), (), ROWWISE),
    ),
    _cast("no saturation", "xla fp8_tensorwise_delayed", unclipped),
    _cast("rounding toward zero", "xla fp8_rowwise", toward_zero),
    _cast("E5M2 in place of E4M3", "xla fp8_rowwise", by_e5m2),
    Fault(
        "casts",
        "dlhs by the unquantized weight",
        patches=((products.Products, "multiply", unquantized_weight),),
        choice="xla fp8_rowwise",
    ),
    *_faults(
        "gradients",
        ("xhat of stale rows", {FUSED: writes(stale_rows, "xhat")}),
        ("rstd of the row above", {FUSED: writes(off_by_one, "rstd")}),
        ("the slope without beta", vectors(BACKWARD, beta=jnp.zeros_like)),
        ("dz of a tile repeated", {BACKWARD: writes(tile_repeated, "dz")}),
        ("dgamma off by one column", {BACKWARD: writes(off_by_one, "dgamma")}),
        ("dgamma of padded rows", {BACKWARD: padded_rows_summed}),
        (
            "drhs without its last rows",
            {},
            ((xla, "high_precision_matmul", without_last_terms),),
            "xla bf16",
        ),
    ),
    *_faults(
        "maxima",
        ("that of lhs halved", {QUANTIZE: writes(times(0.5), "y_amax")}, (), DELAYED),
        ("that of dz halved", {BACKWARD: writes(times(0.5), "dz_amax")}, (), DELAYED),
        ("that of dz four times", {BACKWARD: writes(times(4), "dz_amax")}, (), DELAYED),
    ),
    *_faults(
        "activations in FP8",
        ("their scales 3 % too large", y_fp8(scale_inv(times(1.03))), *IN_FP8),
        ("their tile of zeros", y_fp8(data(tile_of_zeros)), *IN_FP8),
    ),
]
