"""A dense layer with norm and activation: its operands, and what is right for them.

    z = x W^T        xhat = norm(z)        y = activation(gamma xhat + beta)

Inputs and weights are normal, weights divided by sqrt(K), so that z is of size one.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loka_jax import fp8, nn, quality
from loka_jax.fp8 import Fp8Array
from loka_jax.normed import NORM_BLOCK, XHAT_SCALE_INV, ActivationName, NormName

EPSILON = 1e-6
Y_SCALE_INV = 1 / 16  # of FP8 activations under one scale: they reach 6 or so
DZ_SCALE_INV = 2.0**-10  # of gradients in E5M2, which reach 20 or so
# Least SQNR of what our forms write, a few dB under what they reach where they are
# right. Those that round to FP8, or multiply gradients rounded to it, reach 31 and 25.
FLOOR_DB = {
    "y": 38.0,
    "y_fp8": 28.0,
    "xhat": 28.0,
    "rstd": 38.0,
    "dx": 21.0,
    "dz": 38.0,
}
_CHECKED_ROWS = 256  # at the start, in the middle and at the end of more than thrice
_MOST_DB = 200.0  # stands for infinity, which JSON has not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A layer of a shape.

    Attributes:
        m: rows.
        k: input features.
        n: output features.
        norm: after the product.
        activation: after the norm.
        interpret: run our kernels in Mosaic's interpreter.
    """

    m: int
    k: int
    n: int
    norm: NormName = "layer"
    activation: ActivationName = "swish"
    interpret: bool = False

    @property
    def flops(self) -> float:
        """Returns the operations of one product."""
        return 2.0 * self.m * self.k * self.n

    def __str__(self) -> str:
        """Returns the shape."""
        return f"{self.m}x{self.k}x{self.n}"


class Operands(NamedTuple):
    """Arrays by name: of every input set, and what all of them share."""

    sets: list[dict[str, Any]]
    shared: dict[str, Any]

    def arguments(self, reads: tuple[str, ...]) -> list[tuple]:
        """Returns the operands of those names, a tuple for each input set."""
        return [
            tuple({**one, **self.shared}[name] for name in reads) for one in self.sets
        ]


def make_operands(site: Site, num_sets: int, *, backward: bool) -> Operands:
    """Makes `num_sets` input sets, and the weight and the norm's parameters."""
    key = jax.random.key(site.m + 7 * site.k + 13 * site.n, impl="rbg")  # quick to make
    make = jax.jit(functools.partial(_make_rows, site, backward=backward))
    sets = [make(jax.random.fold_in(key, i)) for i in range(num_sets)]
    return Operands(sets, jax.jit(functools.partial(_make_weights, site))(key))


def _make_rows(site: Site, key, *, backward: bool) -> dict[str, Any]:
    keys = jax.random.split(key, 4)
    x = jax.random.normal(keys[0], (site.m, site.k), jnp.bfloat16)
    made = {
        "x": x,
        "x_row": fp8.quantize(x, axes=(1,)),
        "x_tensor": fp8.quantize(x),
    }
    if backward:
        xhat = jax.random.normal(keys[1], (site.m, site.n), jnp.bfloat16)
        made |= {
            "dy": jax.random.normal(keys[2], (site.m, site.n), jnp.bfloat16),
            "xhat": xhat,
            "xhat_fp8": xhat,  # without a norm it is no normalized row
            "rstd": None,
        }
        if site.norm != "none":
            blocks = math.ceil(site.n / NORM_BLOCK) if site.norm == "block" else 1
            shape = (site.m,) if blocks == 1 else (blocks, site.m)
            scaled = xhat.astype(jnp.float32) / XHAT_SCALE_INV
            made["xhat_fp8"] = fp8.saturate(scaled, fp8.E4M3)
            made["rstd"] = jax.random.uniform(keys[3], shape, minval=0.5, maxval=2.0)
    return made


def _make_weights(site: Site, key) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    kernel = jax.random.normal(keys[0], (site.k, site.n)) / math.sqrt(site.k)
    kernel = kernel.astype(jnp.bfloat16)
    gamma = beta = None
    if site.norm in ("layer", "rms"):
        gamma = 1 + 0.1 * jax.random.normal(keys[1], (site.n,))
        beta = 0.1 * jax.random.normal(keys[2], (site.n,))
    return {
        "w_kn": kernel,
        "w_kn_fp8": fp8.quantize(kernel),
        "w_nk": kernel.T,
        "w_nk_fp8": fp8.quantize(kernel.T),
        "gamma": gamma,
        "beta": beta,
        "y_scale_inv": jnp.asarray(Y_SCALE_INV, jnp.float32),
        "dz_scale_inv": jnp.asarray(DZ_SCALE_INV, jnp.float32),
    }


def with_scale(y_fp8: jax.Array) -> Fp8Array:
    """Returns FP8 activations with the one scale given in advance."""
    return Fp8Array(y_fp8, jnp.asarray(Y_SCALE_INV, jnp.float32))


def normalize(site: Site, z):
    """Returns float32 z normalized, and the reciprocal deviations."""
    if site.norm == "none":
        return z, jnp.ones(z.shape[:1], jnp.float32)
    if site.norm == "block" and site.n > NORM_BLOCK:
        blocks = z.reshape(z.shape[0], -1, NORM_BLOCK)
        rstd = jax.lax.rsqrt(jnp.mean(blocks**2, axis=2) + EPSILON)
        return (blocks * rstd[:, :, None]).reshape(z.shape), rstd.T
    if site.norm == "layer":
        z = z - jnp.mean(z, axis=1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(z**2, axis=1) + EPSILON)
    return z * rstd[:, None], rstd


def finish(site: Site, xhat, gamma, beta):
    """Returns the activations of float32 normalized rows."""
    return nn.activation(site.activation)(_affine(xhat, gamma, beta))


def _affine(xhat, gamma, beta):
    return xhat if gamma is None else xhat * gamma[None, :] + beta[None, :]


def norm_backward(site: Site, dy, xhat, rstd, gamma, beta):
    """Returns dz, dgamma and dbeta in float32, the latter None without parameters."""
    dy, xhat = dy.astype(jnp.float32), xhat.astype(jnp.float32)
    u = _affine(xhat, gamma, beta)
    (du,) = jax.vjp(nn.activation(site.activation), u)[1](dy)
    if site.norm == "none":
        return du, None, None
    if rstd.ndim == 2:  # the blocks of a row, as rows of their own
        rstd = rstd.T.reshape(-1)
    g = (du if gamma is None else du * gamma[None, :]).reshape(rstd.shape[0], -1)
    rows = xhat.reshape(g.shape)
    dz = g - rows * jnp.mean(g * rows, axis=1, keepdims=True)
    if site.norm == "layer":
        dz = dz - jnp.mean(g, axis=1, keepdims=True)
    dz = (dz * rstd[:, None]).reshape(xhat.shape)
    if gamma is None:
        return dz, None, None
    return dz, jnp.sum(du * xhat, axis=0), jnp.sum(du, axis=0)


class Check(NamedTuple):
    """How far one result is from the exact product of the operands that were read.

    Attributes:
        sqnr_db: over the rows that were looked at.
        worst_row_db: of the worst of them.
    """

    sqnr_db: float
    worst_row_db: float


def check(site: Site, reads: tuple[str, ...], arguments: tuple, results, *, casts_rows):
    """Returns a `Check` for each result, and what is wrong with them or None.

    Args:
        site: the layer.
        reads: names of the operands.
        arguments: their arrays.
        results: what a form made of them, by name; those without a floor are not
            looked at.
        casts_rows: the form quantized the rows of x itself; so does the reference.
    """
    rows = _checked_rows(site.m)
    part = dataclasses.replace(site, m=rows.shape[0])
    operands = dict(zip(reads, arguments, strict=True))
    take = functools.partial(_take, m=site.m, rows=rows)
    operands = {k: take(v) if k in _BY_ROW else v for k, v in operands.items()}
    results = {k: take(v) for k, v in results.items() if k in FLOOR_DB}
    found = {
        name: Check(*(min(float(value), _MOST_DB) for value in values))
        for name, values in _compare(part, operands, results, casts_rows).items()
    }
    wrong = [
        f"{name} {one.sqnr_db:.1f} dB of {FLOOR_DB[name]:.0f}"
        for name, one in found.items()
        if not one.sqnr_db >= FLOOR_DB[name]
    ]
    return found, ", ".join(wrong) or None


_BY_ROW = ("x", "x_row", "x_tensor", "dy", "xhat", "xhat_fp8", "rstd")


def _checked_rows(m: int) -> jax.Array:
    if m <= 3 * _CHECKED_ROWS:
        return jnp.arange(m)
    first = jnp.arange(_CHECKED_ROWS)
    middle = m // 2 - _CHECKED_ROWS // 2
    return jnp.concatenate([first, middle + first, m - _CHECKED_ROWS + first])


def _take(array, *, m: int, rows):
    """Returns the rows of an array; rows come last in statistics of blocks."""
    if array is None:
        return None
    if isinstance(array, Fp8Array):
        by_row = array.scale_inv.ndim == 2
        scale_inv = array.scale_inv[rows] if by_row else array.scale_inv
        return Fp8Array(array.data[rows], scale_inv)
    return array[rows] if array.shape[0] == m else array[:, rows]


@functools.partial(jax.jit, static_argnums=(0, 3))
def _compare(site: Site, operands, results, casts_rows: bool):
    right = _reference(site, operands, casts_rows)
    found = {}
    for name, result in results.items():
        if name == "y_fp8" and not isinstance(result, Fp8Array):
            result = with_scale(result)
        result, ref = _wide(result), right[name]
        worst = quality.sqnr(ref, result)
        if name != "rstd":
            worst = quality.worst_slice_sqnr(ref, result)
        found[name] = (quality.sqnr(ref, result), worst)
    return found


def _reference(site: Site, operands, casts_rows: bool) -> dict[str, Any]:
    gamma, beta = operands["gamma"], operands["beta"]

    def one_of(*names):
        (found,) = (operands[name] for name in names if name in operands)
        return found

    if "w_nk" in operands or "w_nk_fp8" in operands:
        kernel = _wide(one_of("w_nk", "w_nk_fp8")).T
    else:
        kernel = _wide(one_of("w_kn", "w_kn_fp8"))
    if "dy" in operands:
        xhat, rstd = _wide(one_of("xhat", "xhat_fp8")), operands.get("rstd")
        dz, _, _ = norm_backward(site, operands["dy"], xhat, rstd, gamma, beta)
        return {"dx": jnp.dot(dz, kernel.T, precision="highest"), "dz": dz}
    x = one_of("x", "x_row", "x_tensor")
    if casts_rows:
        x = fp8.quantize(x, axes=(1,))
    z = jnp.dot(_wide(x), kernel, precision="highest")
    xhat, rstd = normalize(site, z)
    y = finish(site, xhat, gamma, beta)
    return {"y": y, "y_fp8": y, "xhat": xhat, "rstd": rstd}


def _wide(array):
    """Returns the float32 values; bare E4M3 holds normalized rows."""
    if isinstance(array, Fp8Array):
        return array.dequantize()
    scale = XHAT_SCALE_INV if array.dtype == fp8.E4M3 else 1.0
    return array.astype(jnp.float32) * scale
