"""The work of a site's candidate, as times that the device's limits would allow.

    time ~ sum_i c_i w_i,   c_i >= 0

Each w_i is the least time, in microseconds, of a part of the work: moving an array
once, a product at full rate, a launch. The factors c_i say how often a candidate does
it, and how well; `regression` fits them. They have no unit, so that factors fitted on
one GPU are a first guess for another one.
"""

import functools
import math

import numpy as np

from loka_jax.measure.roofline import Roofline
from loka_jax.ops.device import HOPPER, Device
from loka_jax.ops.plan import resolve
from loka_jax.recipe import ROLES, Role
from loka_jax.site import Choice, SiteSpec

_TILE = 128  # rows and columns of a product that an SM computes at a time
_EVEN = 64  # sizes of which multiples fill the tiles of all kernels
_ALIGNED = 8  # bfloat16 values in 16 bytes, which a fast load takes
_FP8_ROWS = 16  # of which XLA's FP8 products take multiples
_SECTOR = 32  # bytes of the smallest access to memory


def roles_of(pass_name: str) -> tuple[Role, ...]:
    """Returns the roles that run in a pass, "training" or "inference"."""
    return ROLES if pass_name == "training" else ("fwd",)


def work(
    spec: SiteSpec, choice: Choice, pass_name: str, roofline: Roofline
) -> np.ndarray:
    """Returns the parts w of a candidate's work, in microseconds."""
    launch = roofline.launch_us
    passes = _passes(spec, roofline)
    products = _products(spec, choice, pass_name, roofline)
    norm, activation = spec.norm != "none", spec.activation != "none"
    m_n = passes[1]
    rows = spec.m * _SECTOR / roofline.bytes_per_us
    tail = [m_n * norm, m_n * activation, m_n * spec.use_bias, launch * norm]
    parts = [launch, *passes, *tail, rows * norm, *products]
    flops = products[0]
    is_odd = any(size % 2 for size in (spec.k, spec.n))
    is_loose = any(size % _ALIGNED for size in (spec.k, spec.n))
    parts += _if(is_loose, [launch, *passes, flops])
    parts += _if(is_odd, [*passes, flops])
    if choice.provider != "pallas":
        return np.array(parts)
    fused = is_fused(spec, choice)
    parts += _if(fused, [launch, *passes, *products[:2]])
    parts += _if(not fused, [launch, *passes])
    return np.array(parts)


def least_us(
    spec: SiteSpec, choice: Choice, pass_name: str, roofline: Roofline
) -> float:
    """Returns the microseconds that the products take at the device's full rates.

    Rates were measured at one size; at others a product has been 10 % faster.
    """
    return sum(
        0.9 * 2.0 * spec.m * spec.k * spec.n / _rate(choice, role, roofline)
        for role in roles_of(pass_name)
    )


def place(spec: SiteSpec, choice: Choice) -> np.ndarray:
    """Returns where a candidate's problem lies among others.

    Distance 1 is one within which errors of the model are alike: a factor of four in a
    size, another norm or activation.
    """
    sizes = [math.log2(size) / 2 for size in (spec.m, spec.k, spec.n)]
    kinds = [
        spec.norm != "none",
        (spec.norm == "layer") / 2,
        (spec.norm == "block") / 2,
        spec.activation != "none",
        (spec.activation not in ("none", "relu", "hard_swish")) / 2,
        spec.use_bias / 2,
        choice.provider == "pallas" and is_fused(spec, choice),
    ]
    is_even = [size % _EVEN == 0 for size in (spec.m, spec.k, spec.n)]
    return np.array([*sizes, *kinds, *(x / 1.5 for x in is_even)], float)


@functools.cache
def is_fused(spec: SiteSpec, choice: Choice, device: Device = HOPPER) -> bool:
    """Returns True if one kernel runs the forward pass of a candidate."""
    return resolve(spec, choice, device).is_fused


def _passes(spec: SiteSpec, roofline: Roofline) -> list[float]:
    """Returns the times to move a byte for each element of lhs, y and rhs."""
    sizes = (spec.m * spec.k, spec.m * spec.n, spec.k * spec.n)
    return [size / roofline.bytes_per_us for size in sizes]


def _products(
    spec: SiteSpec, choice: Choice, pass_name: str, roofline: Roofline
) -> list[float]:
    """Returns the times of the products: in all, then of each three bounds."""
    bounds = []
    for role in roles_of(pass_name):
        rate = _rate(choice, role, roofline)
        a, b, c = spec.gemm_sizes(role)
        moved = 2 * (a * b + b * c + a * c) / roofline.bytes_per_us
        tiles = math.ceil(a / _TILE) * math.ceil(c / _TILE)
        waves = math.ceil(tiles / roofline.sms) * roofline.sms
        copied = _copied_bytes(spec, choice, role) / roofline.bytes_per_us
        bounds += [
            max(2 * a * b * c / rate, moved) + copied,
            max(2 * waves * _TILE * _TILE * b / rate, moved),
            b / 1000 * roofline.launch_us,  # steps of a sum, one after another
        ]
    return [sum(bounds[::3]), *bounds]


def _rate(choice: Choice, role: Role, roofline: Roofline) -> float:
    """Returns the rate of a product."""
    is_fp8 = _is_fp8(choice, role)
    return roofline.fp8_flops_per_us if is_fp8 else roofline.bf16_flops_per_us


def _is_fp8(choice: Choice, role: Role) -> bool:
    """Returns True if a product is in FP8; what is tiled is multiplied in bfloat16."""
    gemm = choice.recipe.gemm(role)
    return gemm is not None and not gemm.is_tiled


def _copied_bytes(spec: SiteSpec, choice: Choice, role: Role) -> int:
    """Returns the bytes moved to pad rows of FP8, and to slice those of bfloat16.

    As `xla.matmul.fp8_product` does where rows are no multiple of 16. That of drhs sums
    over rows: padding joins the copies that transpose them. Padding of k and n joins
    the casts.
    """
    if spec.m % _FP8_ROWS == 0 or role == "drhs" or not _is_fp8(choice, role):
        return 0
    if role == "fwd" and choice.provider == "pallas" and is_fused(spec, choice):
        return 0
    rows, k, n = spec.gemm_sizes(role)
    return 2 * rows * (k + 2 * n)


def _if(condition: bool, parts: list[float]) -> list[float]:
    return [part * condition for part in parts]
