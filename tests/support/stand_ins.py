"""XLA's references in the place of the Pallas kernels, devices, and a roofline."""

import functools

import jax.numpy as jnp

from loka_jax import fp8, pallas, xla
from loka_jax.measure.roofline import Roofline
from loka_jax.normed import NormGradients
from loka_jax.ops.device import Device
from loka_jax.ops.matmul import matmul
from loka_jax.ops.plan import resolve
from loka_jax.site import Choice, SiteKernel, SiteSpec


def _dense_norm(*args, interpret, **kwargs):
    return xla.dense_norm(*args, **kwargs)


def _norm_quantize(z, scales, vectors, *, interpret, **kwargs):
    for scale in scales:
        z = z.astype(jnp.float32) * scale
    z = z.astype(jnp.bfloat16)
    eye = jnp.eye(z.shape[1], dtype=z.dtype)
    return xla.dense_norm(z, eye, vectors, **kwargs)


def _norm_backward(*args, interpret, dz_fp8, dz_scale_inv=None, **kwargs):
    dz, *sums = xla.norm_backward(*args, **kwargs)
    copy = amax = None
    if dz_scale_inv is not None:
        copy, amax = fp8.cast(dz, dz_scale_inv, dz_fp8), fp8.amax_of_parts(dz)
    elif dz_fp8 is not None:
        copy = fp8.quantize(dz, dz_fp8, axes=(1,))
    vectors, norm = args[2], kwargs["epilogue"].norm
    dbias = jnp.sum(dz, axis=0) if vectors.bias is not None else None
    assert norm == "none" or dbias is None
    return NormGradients(dz.astype(jnp.bfloat16), copy, amax, *sums, dbias)


_RUNS = {
    "dense_norm": _dense_norm,
    "norm_quantize": _norm_quantize,
    "norm_backward": _norm_backward,
}


def hopper(**refusals: str) -> Device:
    """Returns a Hopper GPU whose kernels are XLA's references, with these refusals."""

    def why_not(name, spec, recipe):
        few = f"m={spec.m} rows are fewer than {pallas.ROWS}"
        return few if spec.m < pallas.ROWS else refusals.get(name)

    kernels = [
        SiteKernel(name, functools.partial(why_not, name), run)
        for name, run in _RUNS.items()
    ]
    return Device(compute_capability="9.0", own_kernels=pallas.SiteKernels(*kernels))


HOPPER = hopper()
CPU = Device(platform="cpu")
# In round numbers that are those of no device.
ROOFLINE = Roofline(
    bytes_per_us=4e6,
    fp8_flops_per_us=1e9,
    bf16_flops_per_us=5e8,
    launch_us=1.0,
    sms=132,
)


def xla_matmul(recipe, axis_names=()):
    """Returns a function of lhs, rhs and state: their product by XLA in a recipe."""

    def product(lhs, rhs, state=None):
        spec = SiteSpec(*lhs.shape, rhs.shape[1])
        plan = resolve(spec, Choice("xla", recipe), CPU)
        return matmul(lhs, rhs, state, plan=plan, axis_names=axis_names)

    return product
